"""Media types."""

from typing import Final

ARTIFACT: Final = "application/vnd.kvport.artifact+tar"
JSON: Final = "application/json"
SCHEMA: Final = "application/schema+json"
PROBLEM: Final = "application/problem+json"
EVENTS: Final = "text/event-stream"
