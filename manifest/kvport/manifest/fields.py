"""Typed access to decoded JSON objects: nothing unknown, nothing missing."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypeVar

from kvport.manifest.errors import FormatError, LimitExceededError

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


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


def take_count(data: dict[str, Any], name: str, limit: int) -> int:
    """A field that is an integer in 0..limit.

    Raises:
        FormatError: the field is missing, of another type, or negative.
        LimitExceededError: it is above the limit.
    """
    value = take(data, name, int)
    if value < 0:
        raise FormatError(f"{name!r} is negative")
    if value > limit:
        raise LimitExceededError(f"{name!r} is above {limit}")
    return value


def take_items(data: dict[str, Any], name: str, limit: int) -> list[Any]:
    """A field that is a list of at most `limit` items.

    Raises:
        FormatError: the field is missing or of another type.
        LimitExceededError: it has more items.
    """
    items = take(data, name, list)
    if len(items) > limit:
        raise LimitExceededError(f"{name!r} has more than {limit} items")
    return items


def take_text(data: dict[str, Any], name: str) -> str:
    """A field that people read: printable text, so that no terminal obeys it.

    Raises:
        FormatError: the field is missing, of another type, or has control characters.
    """
    text = take(data, name, str)
    if not text.isprintable():
        raise FormatError(f"{name!r} is not printable text")
    return text


def take_member(data: dict[str, Any], name: str, kind: type[E]) -> E:
    """A field that is the value of an enum's member.

    Raises:
        FormatError: the field is missing, of another type, or no such value.
    """
    try:
        return kind(take(data, name, str))
    except ValueError as error:
        raise FormatError(f"{name!r} is not known") from error
