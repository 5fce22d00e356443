"""Request bodies in the OpenAPI document.

We decode bodies ourselves (bodies.py), so the framework does not know of them: an
operation class per kind of body tells it.
"""

from dataclasses import dataclass
from typing import Final, cast

import msgspec
from litestar.openapi.spec import (
    Components,
    OpenAPIMediaType,
    Operation,
    Reference,
    RequestBody,
    Schema,
)

from kvport.api import media
from kvport.api.bodies import ChatBody, CompletionBody, PrefixBody, ProbeBody

_REF: Final = "#/components/schemas/{name}"


def components() -> Components:
    """The schemas of all JSON bodies."""
    kinds = [ChatBody, CompletionBody, PrefixBody, ProbeBody]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    # The document is made of such dicts anyway; its type wants the framework's classes.
    return Components(schemas=cast("dict[str, Schema]", schemas))


def takes(kind: type[msgspec.Struct]) -> type[Operation]:
    """An operation that takes this kind of JSON body."""
    reference = Reference(ref=_REF.format(name=kind.__name__))
    return _operation(media.JSON, OpenAPIMediaType(schema=reference))


def takes_artifact() -> type[Operation]:
    """An operation that takes an artifact's bytes."""
    return _operation(media.ARTIFACT, OpenAPIMediaType())


def _operation(media_type: str, content: OpenAPIMediaType) -> type[Operation]:
    @dataclass
    class Takes(Operation):
        def __post_init__(self) -> None:
            self.request_body = RequestBody(
                content={media_type: content}, required=True
            )

    return Takes
