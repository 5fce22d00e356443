"""What a decoder refuses, in our words: names, types, bounds, and what is allowed.

In: msgspec's message, and the type that was to be decoded. Out: which field, and what
is wrong with it. Values that were sent are never repeated.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import attrs
import msgspec
from msgspec import inspect

_AT: Final = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_NAMED: Final = re.compile(r"(?P<how>unknown|required) field `(?P<name>[^`]*)`")


@attrs.frozen
class Refused:
    """What is wrong where.

    Attributes:
        field: its path, with dots; empty for the whole.
        how: `unknown` or `required`, of a field; empty if its value is wrong.
        what: what was expected instead, of a value.
        known: fields that there are, beside an unknown one.
    """

    field: str
    how: str
    what: str
    known: tuple[str, ...]


def explain(message: str, kind: type[msgspec.Struct]) -> Refused:
    """What a `msgspec.ValidationError` about this kind says."""
    at, named = _AT.search(message), _NAMED.search(message)
    path = at["path"] if at else ""
    found = list(_types(inspect.type_info(kind), path))
    if named:
        known = [one.fields for one in found if isinstance(one, inspect.StructType)]
        names = tuple(field.encode_name for fields in known for field in fields)
        field = ".".join(filter(None, (path, named["name"])))
        return Refused(field, named["how"], "", names)
    what = message[: at.start()] if at else message
    if what.startswith("Invalid enum value"):
        allowed = list(map(str, _allowed(found)))
        what = f"not one of {', '.join(allowed)}" if allowed else "not allowed"
    elif " matching regex " in what:
        what = next((f"expected {text}" for text in _descriptions(found)), what)
    return Refused(path, "", what[:1].lower() + what[1:], ())


def _descriptions(found: list[inspect.Type]) -> Iterator[str]:
    for one in found:
        if isinstance(one, inspect.Metadata) and one.extra_json_schema:
            yield one.extra_json_schema["description"]


def _allowed(found: list[inspect.Type]) -> Iterator[Any]:
    for one in found:
        if isinstance(one, inspect.EnumType):
            yield from (member.value for member in one.cls)
        elif isinstance(one, inspect.LiteralType):
            yield from one.values


def _types(kind: inspect.Type, path: str) -> Iterator[inspect.Type]:
    """The types that a field may have, and what is said of them."""
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _types(one, path)
    elif isinstance(kind, inspect.Metadata):
        if not path:
            yield kind
        yield from _types(kind.type, path)
    elif not path:
        yield kind
    else:
        below, rest = _below(kind, path)
        for one in below:
            yield from _types(one, rest)


def _below(kind: inspect.Type, path: str) -> tuple[list[inspect.Type], str]:
    """One step down the path, and what is left of it."""
    if path.startswith("["):
        rest = path.partition("]")[2].removeprefix(".")
        if isinstance(kind, inspect.ListType):
            return [kind.item_type], rest
        if isinstance(kind, inspect.DictType):
            return [kind.value_type], rest
    elif isinstance(kind, inspect.StructType):
        name = re.split(r"[.\[]", path)[0]
        rest = path[len(name) :].removeprefix(".")
        return [one.type for one in kind.fields if one.encode_name == name], rest
    return [], ""
