"""The two forms of mlx-lm's prompt cache files, brought into one.

mlx-lm writes `[cache.state for cache in caches]`, flattened: `3.0` is the first entry
of cache 3. Since 0.32 numbers, texts and None are entries like arrays, listed with
their type in the metadata; a list has pairs of state and class. Before, arrays alone
were entries, and numbers stood in the metadata beside the classes; such a file is
brought into the newer form here.

What comes out has the shape that the file claims: nothing of it is checked against a
model yet, and no array is read.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from kvport.snapshot.errors import PromptCacheError
from kvport.snapshot.state.tensor_files import Tensor, TensorFile

Tree: TypeAlias = Tensor | int | str | list[Any] | None
"""A state, with tensors that were not read yet."""

_NUMBER: Final = re.compile(r"[0-9]{1,10}", re.ASCII)
_ROOTS: Final = {"0.", "1.", "2."}
"""Of the metadata: texts of the user's, classes and numbers, in either order."""
_TEXT_BYTES: Final = 256
_DEPTH: Final = 4
"""Of lists in lists, as a layout has it."""
_LEVELS: Final = 16
"""Of entries in entries: what lies deeper has no index."""


def read_states(file: TensorFile) -> tuple[list[str], list[Tree]]:
    """Classes and states in the newer form, cache by cache.

    Raises:
        PromptCacheError: the file is of neither form, or not whole.
    """
    found = dict[str, Tree](file.tensors)
    if not all(key[:2] in _ROOTS for key in file.metadata):
        raise PromptCacheError("the file is no prompt cache of mlx-lm")
    if file.metadata.get("2.0") == "":
        classes = _tree(file.metadata, "1")
        for scalar in _tree(file.metadata, "2")[1:]:
            match scalar:
                case [str(name), str(kind)] if name in found:
                    found[name] = _scalar(file, file.tensors[name], kind)
                case _:
                    raise PromptCacheError("the file lists a number that it lacks")
        states = _nested(found.items())
    else:
        # Metadata of the user's own stand where classes do since 0.32.
        classes = _tree(file.metadata, "2")
        numbers, states = _tree(file.metadata, "0"), _nested(found.items())
        if not len(classes) == len(states) == len(numbers):
            raise PromptCacheError("the file is no prompt cache of mlx-lm")
        states = [
            _modern(name, state, number)
            for name, state, number in zip(classes, states, numbers, strict=True)
        ]
    if not states or len(classes) != len(states):
        raise PromptCacheError("the file is no prompt cache of mlx-lm")
    return classes, states


def _tree(metadata: Mapping[str, str], root: str) -> list[Any]:
    """The list below an index of the metadata; empty if there is none."""
    above = f"{root}."
    return _nested(
        (key.removeprefix(above), text)
        for key, text in metadata.items()
        if key.startswith(above)
    )


def _nested(items: Iterable[tuple[str, Tree]]) -> list[Any]:
    """Lists out of values at dotted indexes, each complete from 0 on."""
    root: dict[str, Any] = {}
    for path, value in items:
        *above, last = path.split(".", _LEVELS)
        node = root
        for index in above:
            node = node.setdefault(index, {})
            if not isinstance(node, dict):
                raise PromptCacheError("an entry of the file has entries of its own")
        if last in node:
            raise PromptCacheError("an entry of the file has entries of its own")
        node[last] = value
    return _listed(root)


def _listed(node: dict[str, Any]) -> list[Any]:
    names = [str(index) for index in range(len(node))]
    if node.keys() != set(names):
        raise PromptCacheError("an entry of the file is missing")
    return [_listed(node[n]) if isinstance(node[n], dict) else node[n] for n in names]


def _scalar(file: TensorFile, tensor: Tensor, kind: str) -> int | str | None:
    if kind == "none" and tensor.shape == (0,):
        return None
    whole = tensor.dtype in {"I32", "I64"}
    if kind == "scalar" and whole and tensor.shape == ():
        return int.from_bytes(file.read(tensor), "little", signed=True)
    if kind == "string" and tensor.dtype == "I32" and tensor.nbytes <= _TEXT_BYTES:
        points = np.frombuffer(file.read(tensor), "<i4").tolist()
        return "".join(chr(point) if 0 < point < 1 << 7 else "?" for point in points)
    raise PromptCacheError("a number in the file has an unknown form")


def _modern(name: object, state: Any, numbers: Any, depth: int = _DEPTH) -> Tree:  # noqa: ANN401 - trees
    """The state as mlx-lm 0.32 has it, of one as 0.31 wrote it."""
    match name, state, numbers:
        case "KVCache", [Tensor() as k, Tensor() as v], "":
            return [k, v, _rows(k)]
        case "RotatingKVCache", [k, v], [keep, size, offset, index]:
            return [k, v, *map(_number, (offset, keep, size, index))]
        case "QuantizedKVCache", [k, v], [offset, group, bits]:
            return [k, v, *map(_number, (offset, group, bits))]
        case "ChunkedKVCache", [Tensor() as k, v], [size, "0"]:
            return [k, v, _rows(k), _number(size), 0]
        case "ChunkedKVCache", _, [_, _]:
            # The position is not in the file, and not what mlx-lm 0.31 makes of it.
            raise PromptCacheError("the older form does not say where chunks begin")
        case "ArraysCache", list(slots), "":
            return [slots, None, None]
        case "CacheList", list(states), [list(names), list(inner)] if depth:
            if len(states) == len(names) == len(inner):
                members = zip(names, states, inner, strict=True)
                return [[_modern(n, s, m, depth - 1), n] for n, s, m in members]
    raise PromptCacheError("a cache of the file has an unknown form")


def _rows(tensor: Tensor) -> int:
    if len(tensor.shape) != len(("batch", "heads", "rows", "width")):
        raise PromptCacheError("rows of the file do not have four dimensions")
    return tensor.shape[2]


def _number(text: object) -> int:
    if not isinstance(text, str) or not _NUMBER.fullmatch(text):
        raise PromptCacheError("a number in the file has an unknown form")
    return int(text)
