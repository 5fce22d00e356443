"""Request bodies in the OpenAPI document.

We decode bodies ourselves (bodies.py), so the framework does not know of them: an
operation class per kind of body tells it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema

from kvport.api import media

_REF: Final = "{name}"


def takes(kind: type[msgspec.Struct], note: str = "") -> type[Operation]:
    """An operation that takes this kind of JSON body; `note` ends its description."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template=_REF)
    # Inline: the framework replaces the document's components by its own. The document
    # is made of such dicts; its type wants the framework's classes.
    whole = cast("Schema", _inlined(schema, parts))
    return _operation(media.JSON, OpenAPIMediaType(schema=whole), note)


def takes_artifact() -> type[Operation]:
    """An operation that takes an artifact's bytes."""
    return _operation(media.ARTIFACT, OpenAPIMediaType(), "")


def _operation(
    media_type: str, content: OpenAPIMediaType, note: str
) -> type[Operation]:
    @dataclass
    class Takes(Operation):
        def __post_init__(self) -> None:
            self.request_body = RequestBody(
                content={media_type: content}, required=True
            )
            if note:
                self.description = f"{self.description}\n\n{note}"

    return Takes


def _inlined(value: Any, parts: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON
    """The schema with every reference replaced by what it leads to."""
    if isinstance(value, list):
        return [_inlined(one, parts) for one in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inlined(parts[value["$ref"]], parts)
    return {name: _inlined(one, parts) for name, one in value.items()}
