"""The published JSON Schemas, as files of the package.

In the wheel they stand in `kvport/schemas`; in a checkout, where nothing is copied, in
the directory `schemas` at its top.
"""

from functools import cache
from pathlib import Path
from typing import Final

from kvport.api.errors import NotFoundError

_HERE: Final = Path(__file__).resolve()
_PLACES: Final = (_HERE.parents[1] / "schemas", _HERE.parents[3] / "schemas")
_VERSION: Final = "v1"
_END: Final = ".schema.json"


@cache
def schemas() -> dict[str, bytes]:
    """Contents by path below `/schemas/`, such as `v1/manifest.schema.json`."""
    root = next(place for place in _PLACES if place.is_dir())
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.glob(f"{_VERSION}/*{_END}"))
    }


def schema(path: str) -> bytes:
    """One of them.

    Raises:
        NotFoundError: there is none at this path.
    """
    found = schemas().get(path)
    if found is None:
        raise NotFoundError("there is no schema of this name")
    return found
