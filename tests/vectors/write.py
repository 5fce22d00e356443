"""`python -m tests.vectors.write`: write the vectors, and the list of their digests.

A vector that is there already keeps its bytes: where they would change, nothing is
written, and the names are printed. `--replace` writes them nevertheless, which is right
only before a release.
"""

import json
import shutil
import sys
from collections.abc import Iterator

from blake3 import blake3

from tests.vectors import (
    cases_container,
    cases_payload,
    cases_sealed,
    cases_signed,
    cases_sums,
    cases_valid,
)
from tests.vectors.case import ROOT, Case, directories, document, read
from tests.vectors.judging import examine

_PARTS = (
    cases_valid,
    cases_container,
    cases_signed,
    cases_payload,
    cases_sums,
    cases_sealed,
)
DIGESTS = ROOT / "digests.json"


def all_cases() -> Iterator[Case]:
    """All vectors, by their makers; `expect` of the valid ones is filled in."""
    for part in _PARTS:
        for case in part.cases():
            if case.is_valid:
                case.expect.update(examine(case))
            yield case


def vector_digest(case: Case) -> str:
    """BLAKE3 over names, lengths and contents of a vector's files."""
    hasher = blake3()
    for name, data in sorted(case.files().items()):
        hasher.update(b"%b %d\n" % (name.encode(), len(data)))
        hasher.update(data)
    return hasher.hexdigest()


def main() -> None:
    cases = list(all_cases())
    names = [case.directory().relative_to(ROOT).as_posix() for case in cases]
    assert len(set(names)) == len(names)
    digests = dict(zip(names, map(vector_digest, cases), strict=True))
    old = json.loads(DIGESTS.read_bytes()) if DIGESTS.exists() else {}
    changed = [name for name in old if old[name] != digests.get(name)]
    if changed and "--replace" not in sys.argv[1:]:
        sys.exit("would change: " + ", ".join(changed))
    for directory in directories():
        shutil.rmtree(directory)
    for case in cases:
        case.directory().mkdir(parents=True)
        for name, data in case.files().items():
            (case.directory() / name).write_bytes(data)
    DIGESTS.write_bytes(document(digests))
    assert {read(directory).name for directory in directories()}
    print(f"{len(cases)} vectors")


if __name__ == "__main__":
    main()
