"""A server process: home and model directory as arguments, its address on stdout."""

import sys
from pathlib import Path

import structlog

from kvport.api.server import serve
from kvport.snapshot.node import Node, NodeSettings


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    home, model = map(Path, sys.argv[1:])
    node = Node.open(NodeSettings(home=home, cap_bytes=1 << 30))
    node.load_model(str(model))
    serve(node, ready=lambda url: print(url, flush=True))
    print("closed", flush=True)


main()
