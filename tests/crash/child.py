"""A process under the shim that runs operations in forks of itself.

`python -m tests.crash.child`, with the shim preloaded: requests come as lines of JSON,
answers go the same way. To fork is what makes thousands of points cheap: everything is
imported once.
"""

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvport.manifest.errors import KvportError
from tests.crash import invariants, shim
from tests.crash.operations import OPERATIONS, Operation
from tests.crash.places import Place
from tests.crash.wants import Want

SECONDS = 30
"""After which a fork that hangs is ended."""


def note(want: Want) -> None:
    shim.note(want.to_text())


@contextlib.contextmanager
def opened(operation: Operation, directory: Path) -> Iterator[Place]:
    place = operation.opens(directory)
    try:
        yield place
    finally:
        place.close()


def calm(directory: Path) -> None:
    """No faults, and no flushes for real: they cost time, and no power is cut."""
    shim.arm(shim.orders(root=directory, sync=0))


def prepare(operation: Operation, *, base: Path, directory: Path, **_: Any) -> Any:
    """Make the directory; answers what was acknowledged while it was made."""
    calm(directory)
    wants: list[Want] = []
    if operation.prepare is not None:
        with opened(operation, directory) as place:
            operation.prepare(place, base, wants.append)
            wants.append(Want("root", place.cache.root_id))
        if operation.spoil is not None:
            operation.spoil(directory)
    return [want.to_text() for want in wants]


def run(
    operation: Operation, *, base: Path, directory: Path, orders: str, **_: Any
) -> Any:
    """Do it once, under orders; answers the number of steps."""
    shim.arm(orders)
    with opened(operation, directory) as place:
        note(Want("root", place.cache.root_id))
        operation.run(place, base, note)
    return shim.steps()


def check(
    operation: Operation,
    *,
    base: Path,
    directory: Path,
    wanted: list[str],
    prompts: list[str],
    lasting: list[str] | None = None,
    **_: Any,
) -> Any:
    """Open what a crash has left; do it again to its end, unless `lasting` is None."""
    calm(directory)
    wants, all_prompts = read(wanted), read(prompts)
    with opened(operation, directory) as place:
        found = invariants.violations(
            place, wants, all_prompts, damaged=operation.damaged
        )
        if lasting is not None:
            operation.run(place, base, note)
            found += again(place, read(lasting), all_prompts)
    return found


def unmet(
    operation: Operation, *, base: Path, directory: Path, wanted: list[str], **_: Any
) -> Any:
    """Which of what was acknowledged does not hold at the end, by design."""
    calm(directory)
    with opened(operation, directory) as place:
        return [want.to_text() for want in invariants.unmet(place, read(wanted))]


def fault(
    operation: Operation,
    *,
    base: Path,
    directory: Path,
    orders: str,
    prompts: list[str],
    lasting: list[str],
    evicts: bool,
    **_: Any,
) -> Any:
    """Do it while the volume fails; then the volume works again, and it goes on.

    A volume that is full may cost what was stored, if it `evicts`, and nothing else.
    """
    codes: list[str] = []
    acknowledged: list[Want] = []
    lasts, all_prompts = read(lasting), read(prompts)
    shim.arm(orders)
    place = None
    try:
        place = operation.opens(directory)
        operation.run(place, base, acknowledged.append)
    except KvportError as error:
        codes.append(error.code)
    calm(directory)
    if place is None:
        place = operation.opens(directory)
    with contextlib.closing(place):
        held = [want for want in acknowledged if want in lasts and not evicts]
        found = [f"while it failed: {v}" for v in again(place, held, all_prompts)]
        acknowledged.clear()
        operation.run(place, base, acknowledged.append)
        if evicts:
            lasts = [want for want in lasts if want in acknowledged]
        found += [f"afterwards: {v}" for v in again(place, lasts, all_prompts)]
    with opened(operation, directory) as place:
        found += invariants.violations(
            place, lasts, all_prompts, damaged=operation.damaged
        )
    return {"codes": codes, "violations": found}


def again(place: Place, wants: list[Want], prompts: list[Want]) -> list[str]:
    """What does not hold in a place that has been open for a while."""
    return [
        *invariants.uncounted(place),
        *invariants.wrong_state(place, prompts),
        *(f"{w.kind} {w.name} {w.tokens[:1]}" for w in invariants.unmet(place, wants)),
    ]


def read(texts: list[str]) -> list[Want]:
    return [Want.from_text(text) for text in texts]


COMMANDS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (prepare, run, check, unmet, fault)
}


def forked(request: dict[str, Any]) -> dict[str, Any]:
    """Run a command in a fork; answers how it ended, and what it said."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        signal.alarm(SECONDS)
        os._exit(answer(request, writer))
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    said = json.loads(text) if text else {}
    return {"ended": os.waitstatus_to_exitcode(status), **said}


def answer(request: dict[str, Any], writer: int) -> int:
    """In the fork: the command's result, or its error, into the pipe."""
    try:
        command = COMMANDS[request.pop("command")]
        operation = OPERATIONS[request.pop("operation")]
        paths = {name: Path(request.pop(name)) for name in ("base", "directory")}
        said = {"result": command(operation, **paths, **request)}
    except Exception:  # noqa: BLE001 - whatever it is, the test shows it
        said = {"error": traceback.format_exc()}
    with os.fdopen(writer, "w") as pipe:
        json.dump(said, pipe)
    return "error" in said


def main() -> None:
    # What the product logs is no answer.
    answers = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
