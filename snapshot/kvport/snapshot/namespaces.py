"""What is set about namespaces: an operator's file, and what was set while running.

In: `<home>/config.toml`, which people write, and changes, which are kept in
`<home>/namespaces.json`. Out: the settings that hold for a namespace.

    [namespaces.default]            # for all that say nothing else
    ttl = "30d"
    [namespaces.qwen3-next]         # a model's name
    quota_bytes = "20GiB"
    write_bytes_per_hour = "50GiB"
    [namespaces."qwen3-next/team"]  # a model's name and a scope
    tier = "read-only"

What was set while running goes before the file, field by field; in the file the more
special section goes before the more general one. Of several names that a model is
loaded under, and that have sections alike, the first one in alphabetical order goes
before the others, whatever the order of the loads.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import attrs
import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvport.snapshot.cache.policy import NamespaceSettings, Tier
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.durable import write_atomic
from kvport.snapshot.errors import ConfigFileError
from kvport.snapshot.loaded_names import LoadedNames
from kvport.snapshot.refusals import Refused, explain
from kvport.snapshot.units import parse_seconds, parse_size

DEFAULT_SECTION: Final = "default"
COMMAND: Final = "command"
_LONGEST: Final = 1 << 20
_RETENTION: Final = "retention"
_UNITS: Final = {
    "quota_bytes": parse_size,
    "ttl": parse_seconds,
    "write_bytes_per_hour": parse_size,
}

Positive = Annotated[int, Meta(ge=1, le=1 << 62)]
Seconds = Annotated[int, Meta(ge=1, le=315_360_000)]
"""Up to ten years."""


class RetentionChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of `Retention`; those that are absent are the defaults."""

    newest: Positive | UnsetType = UNSET
    every: Positive | UnsetType = UNSET
    forks: Positive | UnsetType = UNSET
    prompts: Positive | UnsetType = UNSET
    replies: Positive | UnsetType = UNSET


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be set; None takes back what was set before, absent leaves it."""

    quota_bytes: Positive | UnsetType | None = UNSET
    ttl: Seconds | UnsetType | None = UNSET
    tier: Tier | UnsetType | None = UNSET
    retention: RetentionChange | UnsetType | None = UNSET
    reclaim_on_unload: bool | UnsetType | None = UNSET
    write_bytes_per_hour: Positive | UnsetType | None = UNSET


_Fields: TypeAlias = Mapping[str, Any]
"""Fields of `Change` that are set, as JSON."""


class NamespaceBook:
    """Both files of one home; used by whoever owns the home.

    Attributes:
        loaded: names that namespaces are loaded under.
    """

    def __init__(self, home: Path) -> None:
        """Read both.

        Raises:
            ConfigFileError: one cannot be read, or says what cannot be.
        """
        self.loaded: Final = LoadedNames(home / "namespace-names.json")
        self._path: Final = home / "namespaces.json"
        self._config = _read_config(home / "config.toml")
        self._set = _read_set(self._path)

    def names(self, namespace_id: str, model: str) -> tuple[str, ...]:
        """Names that a namespace goes by, in alphabetical order.

        Args:
            namespace_id: whose.
            model: its model's name at the last load, as the cache knows it.
        """
        return self.loaded.of(namespace_id) or ((model,) if model else ())

    def settings(self, namespace_id: str, model: str, scope: str) -> NamespaceSettings:
        """What holds for a namespace of a model, by its names, in a scope."""
        merged: dict[str, Any] = {}
        for _, fields in self._sources(namespace_id, model, scope):
            merged = _merged(merged, fields)
        return _settings(merged)

    def origins(self, namespace_id: str, model: str, scope: str) -> dict[str, str]:
        """Where each field that is set comes from: a section's name, or `command`.

        Of a retention whose numbers come from several places all are named.
        """
        found: dict[str, str] = {}
        numbers: dict[str, str] = {}
        for source, fields in self._sources(namespace_id, model, scope):
            found |= dict.fromkeys(fields, source)
            numbers |= dict.fromkeys(fields.get(_RETENTION) or (), source)
        if numbers:
            found[_RETENTION] = "; ".join(dict.fromkeys(numbers.values()))
        return found

    def _sources(
        self, namespace_id: str, model: str, scope: str
    ) -> Iterator[tuple[str, _Fields]]:
        """All that is set about a namespace; what comes later goes before."""
        names = self.names(namespace_id, model)[::-1]
        sections = (DEFAULT_SECTION, *names, *(f"{name}/{scope}" for name in names))
        for section in sections:
            yield f"config.toml, [namespaces.{section}]", self._config.get(section, {})
        yield COMMAND, self._set.get(namespace_id, {})

    def change(self, namespace_id: str, change: Change) -> None:
        """Set fields of a namespace, durably.

        Raises:
            OSError: the file could not be written; nothing has changed.
        """
        fields = _merged(self._set.get(namespace_id, {}), msgspec.to_builtins(change))
        fields = {name: value for name, value in fields.items() if value is not None}
        changed = {**self._set, namespace_id: fields}
        if not fields:
            del changed[namespace_id]
        write_atomic(self._path, msgspec.json.encode(changed), 0o600)
        self._set = changed


def _merged(below: _Fields, above: _Fields) -> dict[str, Any]:
    """What is set in one place, and in another that goes before it.

    The numbers of a retention are fields of their own.
    """
    merged = {**below, **above}
    if below.get(_RETENTION) and above.get(_RETENTION):
        merged[_RETENTION] = {**below[_RETENTION], **above[_RETENTION]}
    return merged


def _settings(fields: _Fields) -> NamespaceSettings:
    values = dict(fields)
    if (tier := values.get("tier")) is not None:
        values["tier"] = Tier(tier)
    if (retention := values.get("retention")) is not None:
        values["retention"] = attrs.evolve(Retention(), **retention)
    return NamespaceSettings(**values)


def _read_config(path: Path) -> dict[str, _Fields]:
    try:
        value = tomllib.loads(_read(path).decode())
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as error:
        # It says the line and the column.
        raise ConfigFileError(f"config.toml is not TOML: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigFileError("config.toml cannot be read as TOML") from error
    sections = value.pop("namespaces", {})
    if value:
        raise ConfigFileError(f"config.toml has an unknown section, {min(value)!r}")
    if not isinstance(sections, dict):
        raise ConfigFileError("namespaces in config.toml is no table")
    return {name: _section(name, section) for name, section in sections.items()}


def _section(name: str, section: object) -> _Fields:
    if not isinstance(section, dict):
        raise ConfigFileError(f"[namespaces.{name}] in config.toml is no table")
    try:
        plain = {key: _plain(key, value) for key, value in section.items()}
        change = msgspec.convert(plain, Change)
    except msgspec.ValidationError as error:
        text = _said(explain(str(error), Change))
        raise ConfigFileError(f"config.toml, [namespaces.{name}]: {text}") from error
    except ValueError as error:
        raise ConfigFileError(f"config.toml, [namespaces.{name}]: {error}") from error
    fields: dict[str, Any] = msgspec.to_builtins(change)
    return fields


def _said(refused: Refused) -> str:
    if refused.how:
        known = ", ".join(refused.known)
        return f"there is no setting {refused.field!r}; there are {known}"
    return f"{refused.field}: {refused.what}"


def _plain(key: str, value: object) -> object:
    if isinstance(value, str) and key in _UNITS:
        return _UNITS[key](value)
    return value


def _read_set(path: Path) -> dict[str, _Fields]:
    try:
        found = msgspec.json.decode(_read(path), type=dict[str, Change])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        # Someone may have set a tier for privacy's sake: not to be forgotten silently.
        raise ConfigFileError("namespaces.json in the home is damaged") from error
    return {name: msgspec.to_builtins(change) for name, change in found.items()}


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_LONGEST + 1)
    if len(data) > _LONGEST:
        raise OSError("the file is too long")
    return data
