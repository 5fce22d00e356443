"""`python -m tests.vectors.fuzzing SECONDS`: strange artifacts until the time is over.

Artifacts are vectors whose bytes were cut, repeated, exchanged and flipped; whose
payloads were changed before they were signed; and bytes that are no artifact at all.
Ends with a line of JSON: how many there were, the slowest in seconds, how much memory
was taken above what the process had before, in bytes. Anything but a KvportError ends
it with that error.
"""

import io
import json
import os
import random
import sys
import time
from contextlib import suppress
from typing import Any

import attrs
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from kvport.manifest.domains import PayloadType
from kvport.manifest.envelope import sign_payload
from kvport.manifest.errors import KvportError
from kvport.manifest.ustar import Entry, Reader, header, padding
from kvport.snapshot.transfer.archive import inspect_file
from tests.bench.processes import peak_of
from tests.manifest.builder import KEY
from tests.vectors.case import Case, directories, read
from tests.vectors.judging import examine
from tests.vectors.mutants import DOCUMENTS, mutants, spelled

CASES = [read(directory) for directory in directories()]
VALID = [case for case in CASES if case.is_valid]
_TYPES = {"manifest": PayloadType.MANIFEST, "sealed": PayloadType.SEALED}

_bytes = st.one_of(
    st.binary(max_size=2000),
    st.sampled_from([bytes(512), b"0" * 12, b"\xff" * 64, b"[" * 5000, b'{"a":' * 900]),
)


@st.composite
def changed(draw: st.DrawFn) -> Case:
    """A vector some of whose bytes are others, or are elsewhere."""
    case = draw(st.sampled_from(CASES))
    data = bytearray(case.container)
    for _ in range(draw(st.integers(0, 4))):
        at, to = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
        match draw(st.integers(0, 4)):
            case 0:
                data[at:to] = draw(_bytes)
            case 1:
                del data[at:to]
            case 2:
                data[at:at] = data[at:to]
            case 3:
                other = draw(st.sampled_from(CASES)).container
                data[at:to] = other[at:to]
            case _ if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
    return attrs.evolve(case, container=bytes(data))


@st.composite
def resigned(draw: st.DrawFn) -> Case:
    """A vector whose payload was changed, then signed."""
    case = draw(st.sampled_from(VALID))
    document = draw(st.sampled_from([d for d in DOCUMENTS if d.schema in _TYPES]))
    value = draw(st.sampled_from(document.examples).flatmap(mutants))
    envelope = sign_payload(spelled(value), [KEY], _TYPES[document.schema])
    size = int(case.container[124:135], 8)
    rest = case.container[512 + size + -size % 512 :]
    head = header("envelope.json", len(envelope)) + envelope + padding(len(envelope))
    return attrs.evolve(case, container=head + rest, local=None)


def look(case: Case) -> float:
    """Verify and inspect; seconds."""
    began = time.perf_counter()
    for act in (
        lambda: examine(case),
        lambda: inspect_file(io.BytesIO(case.container)),
    ):
        with suppress(KvportError):
            act()
    return time.perf_counter() - began


def read_tar(data: bytes, names: list[Entry]) -> float:
    """The tar reader alone, told to expect whatever; seconds."""
    began, reader = time.perf_counter(), Reader()
    try:
        for event in reader.feed(data):
            if type(event).__name__ == "EntryFinished" and names:
                reader.expect(names)
                names = []
        reader.finish()
    except KvportError:
        pass
    except RuntimeError as error:
        # A caller's fault, and ours: nobody told it what follows.
        if "entries" not in str(error):
            raise
    return time.perf_counter() - began


@attrs.define
class Tally:
    inputs: int = 0
    slowest: float = 0.0

    def add(self, seconds: float) -> None:
        self.inputs += 1
        self.slowest = max(self.slowest, seconds)


def run(seconds: float) -> Tally:
    """Go on until the time is over."""
    tally, end = Tally(), time.monotonic() + seconds
    quiet = settings(
        max_examples=100,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    entries = st.lists(
        st.builds(Entry, st.sampled_from(["tokens", "a"]), st.integers(0, 600)),
        max_size=3,
    )

    @quiet
    @given(st.one_of(changed(), resigned()))
    def artifacts(case: Case) -> None:
        tally.add(look(case))

    @quiet
    @given(st.one_of(_bytes, changed().map(lambda case: case.container)), entries)
    def archives(data: bytes, names: list[Entry]) -> None:
        tally.add(read_tar(data, names))

    while time.monotonic() < end:
        for test in (artifacts, archives):
            seed(random.randrange(1 << 32))(test)()
    return tally


def main() -> None:
    run(1)  # what is loaded and kept once is no cost of an input
    pid = os.getpid()
    result: dict[str, Any]
    with peak_of(pid) as peak:
        result = attrs.asdict(run(float(sys.argv[1])))
    print(json.dumps({**result, "above_idle": peak.above_idle}))


if __name__ == "__main__":
    main()
