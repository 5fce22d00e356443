"""The schemas of the checkout, as validators."""

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

SCHEMAS = Path(__file__).parents[2] / "schemas"
NAMES = sorted(path.name.removesuffix(".schema.json") for path in SCHEMAS.glob("v1/*"))


def schema(name: str) -> dict[str, Any]:
    """One, as JSON."""
    value: dict[str, Any] = json.loads(
        (SCHEMAS / f"v1/{name}.schema.json").read_bytes()
    )
    return value


_REGISTRY: Registry[Any] = Registry().with_resources(
    (value["$id"], Resource.from_contents(value)) for value in map(schema, NAMES)
)


def validator(name: str) -> Draft202012Validator:
    """What says whether a value is one of these documents."""
    return Draft202012Validator(schema(name), registry=_REGISTRY)
