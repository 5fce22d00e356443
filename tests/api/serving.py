"""A server process: home and model directory as arguments, its address on stdout."""

import json
import socket
import sys
from pathlib import Path

import structlog

from kvport.api.server import claim_socket, serve
from kvport.snapshot.node import Node, NodeSettings


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    home, model = map(Path, sys.argv[1:])
    listening = claim_socket("127.0.0.1", 0)
    # Small, so that a client that does not read is soon waited for.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    node = Node.open(NodeSettings(home=home, cap_bytes=1 << 30, free_floor=0))
    node.load_model(str(model))
    serve(node, listening, ready=lambda url: print(json.dumps(url), flush=True))


main()
