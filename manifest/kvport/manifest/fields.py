"""Typed access to decoded JSON objects: nothing unknown, nothing missing."""

from collections.abc import Sequence
from typing import Any, TypeVar

from kvport.manifest.errors import FormatError

T = TypeVar("T")


def take_exact(value: object, names: Sequence[str]) -> dict[str, Any]:
    """The value as an object with exactly these fields.

    Raises:
        FormatError: it is no object, or has other fields.
    """
    if not isinstance(value, dict) or value.keys() != set(names):
        raise FormatError(f"an object does not have the fields {', '.join(names)}")
    return value


def take(data: dict[str, Any], name: str, kind: type[T]) -> T:
    """A field of exactly this type (a bool is not an int).

    Raises:
        FormatError: the field is missing or of another type.
    """
    value = data.get(name)
    if type(value) is not kind:
        raise FormatError(f"{name!r} is missing or of the wrong type")
    return value
