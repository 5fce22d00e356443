"""The matrix as tests see it: an operation prepared and recorded once, then its points.

Every point is a copy of the prepared directory in which one thing goes wrong.
"""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.crash.operations import OPERATIONS
from tests.crash.recording import Op, Record, read_log
from tests.crash.replaying import Disk, Loss
from tests.crash.shim import orders
from tests.crash.wants import Want

CHECKOUT = Path(__file__).parents[2]
KILLED = -9


class Child:
    """The process under the shim; see child.py."""

    def __init__(self, library: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.child"],
            cwd=CHECKOUT,
            env=os.environ | {"LD_PRELOAD": str(library)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


@attrs.frozen
class Cut:
    """A power cut after `done` records, and what did not hold then."""

    done: int
    loss: Loss
    seed: object
    violations: list[str]


@attrs.frozen
class Recorded:
    """An operation, prepared, and run once to its end.

    Attributes:
        name: of the operation.
        child: runs it.
        base: directory of all this, with `prepared` in it.
        log: what the run did, in order.
        steps: how many calls it made.
        before: what was acknowledged before it.
        lasting: what still holds at its end, of all that was acknowledged.
        prompts: everything that was ever looked up.
    """

    name: str
    child: Child
    base: Path
    log: Sequence[Record] = attrs.field(repr=False)
    steps: int
    before: Sequence[Want] = attrs.field(repr=False)
    lasting: Sequence[Want] = attrs.field(repr=False)
    prompts: Sequence[Want] = attrs.field(repr=False)

    @contextlib.contextmanager
    def copy(self) -> Iterator[Path]:
        """The prepared directory again, under its name: keys hang on it."""
        parent = self.base / "copy"
        shutil.copytree(self.base / "prepared" / "place", parent / "place")
        try:
            yield parent / "place"
        finally:
            shutil.rmtree(parent)

    def ask(self, command: str, directory: Path, **request: Any) -> dict[str, Any]:
        for name in ("wanted", "lasting", "prompts"):
            if request.get(name) is not None:
                request[name] = [want.to_text() for want in request[name]]
        return self.child.ask(
            command=command, operation=self.name, base=self.base, directory=directory,
            **request,
        )  # fmt: skip

    def checked(
        self, directory: Path, acknowledged: Sequence[Want], *, again: bool
    ) -> list[str]:
        """What does not hold in a directory that a crash has left."""
        told = [*self.before, *acknowledged]
        wanted = [w for w in told if w in self.lasting or w.kind == "root"]
        answer = self.ask(
            "check",
            directory,
            wanted=wanted,
            prompts=self.prompts,
            lasting=self.lasting if again else None,
        )
        return answer["result"] if "result" in answer else [why(answer)]

    def killed(self, step: int, *, half: bool = False) -> list[str] | None:
        """Kill it before a step, or within it; what does not hold then.

        None if it had ended before: batches, and so steps, differ from run to run.
        """
        with self.copy() as directory:
            log = directory.parent / "log"
            answer = self.ask(
                "run",
                directory,
                orders=orders(root=directory, log=log, kill=step, half=half, sync=0),
            )
            if answer["ended"] == 0:
                return None
            if answer["ended"] != KILLED:
                return [why(answer)]
            return self.checked(directory, notes(read_log(log)), again=True)

    def failed(self, **fault: object) -> tuple[list[str], list[str]]:
        """Run it on a volume that fails: our codes, and what does not hold."""
        with self.copy() as directory:
            answer = self.ask(
                "fault",
                directory,
                orders=orders(root=directory, sync=0, **fault),
                prompts=self.prompts,
                lasting=self.lasting,
                evicts=fault.get("errno") == errno.ENOSPC,
            )
            if "result" not in answer:
                return [], [why(answer)]
            return answer["result"]["codes"], answer["result"]["violations"]

    def cut(self, points: Mapping[int, Sequence[tuple[Loss, object]]]) -> Iterator[Cut]:
        """Cut the power after so many records; what does not hold then.

        Args:
            points: how many records were done, and what is lost, with seeds.
        """
        prepared = self.base / "prepared" / "place"
        disk = Disk(prepared, json.loads((self.base / "inodes").read_text()))
        for done in range(len(self.log) + 1):
            for loss, seed in points.get(done, ()):
                directory = self.base / "cut" / "place"
                disk.write(directory, loss, seed)
                acknowledged = notes(self.log[:done])
                found = self.checked(directory, acknowledged, again=True)
                shutil.rmtree(self.base / "cut")
                yield Cut(done, loss, seed, found)
            if done < len(self.log):
                disk.replay(self.log[done])


def record(child: Child, name: str, base: Path, *, swallow: str = "") -> Recorded:
    """Prepare an operation in a directory, and run it once, recorded.

    Args:
        child: runs it.
        name: of the operation.
        base: empty directory.
        swallow: of which files flushes never happen, as in a build without them.
    """
    prepared, first = base / "prepared" / "place", base / "first" / "place"
    prepared.mkdir(parents=True)
    told = _ask(child, "prepare", name, base, prepared)
    shutil.copytree(prepared, first)
    inodes = {
        str(path.relative_to(first)): path.lstat().st_ino for path in first.rglob("*")
    }
    (base / "inodes").write_text(json.dumps(inodes))
    log = base / "log"
    text = orders(root=first, log=log, sync=0, swallow=swallow)
    steps = _ask(child, "run", name, base, first, orders=text)
    records = [
        attrs.evolve(
            r,
            path=os.path.relpath(r.path, first) if r.path else "",
            other=os.path.relpath(r.other, first) if r.other else "",
        )
        for r in read_log(log)
    ]
    before = [
        want
        for want in map(Want.from_text, told)
        if want.kind == "root" or not OPERATIONS[name].evicts
    ]
    wants = [*before, *notes(records)]
    texts = [want.to_text() for want in wants]
    ended = _ask(child, "unmet", name, base, first, wanted=texts)
    # A root that this run has made has another name in the next one.
    lasting = [
        want
        for want in wants
        if want.to_text() not in ended and (want.kind != "root" or want in before)
    ]
    assert {"stored", "gone"} & {want.kind for want in lasting}
    recorded = Recorded(name, child, base, records, steps, before, lasting, wants)
    found = recorded.checked(first, wants, again=True)
    assert not found, found
    shutil.rmtree(base / "first")
    return recorded


def notes(records: Sequence[Record] | Iterator[Record]) -> list[Want]:
    return [Want.from_text(r.data) for r in records if r.op is Op.NOTE]


def why(answer: dict[str, Any]) -> str:
    return f"ended with {answer['ended']}: {answer.get('error', '')}"


def _ask(child: Child, command: str, name: str, base: Path, directory: Path, **more):
    answer = child.ask(
        command=command, operation=name, base=base, directory=directory, **more
    )
    assert "result" in answer, why(answer)
    return answer["result"]


def spread(count: int, steps: int, *, first: int = 1) -> list[int]:
    """Some steps, evenly chosen, the first and the last among them."""
    if steps <= count:
        return [*range(first, steps + 1)]
    return sorted({first + (steps - first) * at // (count - 1) for at in range(count)})
