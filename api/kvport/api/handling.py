"""What every handler gets: the request, and the node."""

from typing import Any, TypeAlias

from litestar import Request
from litestar.di import NamedDependency

from kvport.snapshot.node import Node

Http: TypeAlias = Request[Any, Any, Any]
Served: TypeAlias = NamedDependency[Node]
"""The node, as the dependency `node`."""
