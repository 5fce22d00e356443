"""Canonical JSON: one byte form per value, and a reader that accepts no other.

The subset of RFC 8785 (JCS) that needs no float rules and no UTF-16 ordering: UTF-8;
objects with ASCII keys `[a-z][a-z0-9_]*`; strings of at most `STRING_BYTES`, booleans,
arrays, objects, integers within +-(2**53 - 1). No float, null, BOM, trailing newline.
In this subset sorted `json.dumps` output equals JCS; the tests hold it against the
`rfc8785` package.
"""

import json
import re
from typing import Any, Final, NoReturn

from kvport.manifest.errors import FormatError, LimitExceededError
from kvport.manifest.limits import JSON_DEPTH, STRING_BYTES

_KEY: Final = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_INTEGER: Final = (1 << 53) - 1
_DIGITS: Final = 17  # of the largest integer, with its sign


def canonical_dumps(value: object, *, depth: int = JSON_DEPTH) -> bytes:
    """Encode.

    Raises:
        FormatError: the value is outside of the subset.
        LimitExceededError: nested deeper than `depth`, or a string is too long.
    """
    _check(value, depth)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8")


def strict_loads(data: bytes, *, depth: int = JSON_DEPTH) -> Any:  # noqa: ANN401 - JSON
    """Decode bytes that are exactly what `canonical_dumps` would give.

    Raises:
        FormatError: any other bytes.
        LimitExceededError: nested deeper than `depth`, or a string is too long.
    """
    value = unambiguous_loads(data)
    if canonical_dumps(value, depth=depth) != data:
        raise FormatError("JSON, but not in canonical form")
    return value


def unambiguous_loads(data: bytes) -> object:
    """Decode JSON in UTF-8 that has one reading, in whatever form: no key twice.

    Numbers are integers.

    Raises:
        FormatError: any other bytes.
    """
    try:
        value: object = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_refuse,
            parse_constant=_refuse,
        )
    except (ValueError, RecursionError) as error:
        raise FormatError("not JSON with one reading") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError("an integer has too many digits")
    return int(text)


def _refuse(_text: str) -> NoReturn:
    raise ValueError("a number is not an integer")


def _check(value: object, depth: int) -> None:
    if not isinstance(value, dict | list):
        _check_scalar(value)
        return
    if depth == 0:
        raise LimitExceededError("nested too deeply")
    if isinstance(value, dict):
        for name in value:
            if type(name) is not str or not _KEY.fullmatch(name):
                raise FormatError("an object's key is not [a-z][a-z0-9_]*")
    for item in value.values() if isinstance(value, dict) else value:
        _check(item, depth - 1)


def _check_scalar(value: object) -> None:
    if type(value) is str:
        try:
            size = len(value.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise FormatError("a string holds a lone surrogate") from error
        if size > STRING_BYTES:
            raise LimitExceededError("a string is too long")
    elif not isinstance(value, int):
        raise FormatError(f"{type(value).__name__} has no place in canonical JSON")
    elif not -_INTEGER <= value <= _INTEGER:
        raise FormatError("an integer is out of range")
