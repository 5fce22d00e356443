"""Errors of the HTTP side: of the server, and of the client that talks to it.

The base and the rules are in `kvport.manifest.errors`, statuses in `problems`.
"""

from kvport.manifest.errors import KvportError


class BadRequestError(KvportError):
    """A request that is not of the documented form; `fields` names the culprit."""

    code = "bad_request"
    cause = "The request's body, query or headers are not what this address takes."
    advice = "Correct the named field; GET /schema describes every request."


class UnauthorizedError(KvportError):
    """No bearer key, or a wrong one."""

    code = "unauthorized"
    cause = "The request carries no API key, or not this server's."
    advice = "Send `Authorization: Bearer KEY` with the key in <home>/keys/api.key."


class WrongHostError(KvportError):
    """The Host header is not an address of this server."""

    code = "wrong_host"
    cause = "The Host header is not a loopback name or address with the server's port."
    advice = "Call the server by the address that `kvport serve` prints."


class NotFoundError(KvportError):
    """Nothing is at the address."""

    code = "not_found"
    cause = "The server has no such address."
    advice = "Check the address; GET /schema lists them all."


class MethodNotAllowedError(KvportError):
    """The address does not take this method."""

    code = "method_not_allowed"
    cause = "The address takes another HTTP method."
    advice = "GET /schema lists the methods of each address."


class StalledError(KvportError):
    """The client sends nothing any more, or reads nothing."""

    code = "stalled"
    cause = "The client stopped sending an artifact, or reading a reply."
    advice = "Check the network and the client, then try again."


class PortError(KvportError):
    """The port to serve on cannot be had."""

    code = "port"
    cause = "The port is taken by another process, or not open to this user."
    advice = "Name another with --port, or 0 for a free one."


class NoServerError(KvportError):
    """No server runs on the home."""

    code = "no_server"
    cause = "No process serves from this home."
    advice = "Start one with `kvport serve --model DIR`, or name a server by its URL."


class WrongServerError(KvportError):
    """Another server answers where the home's server should."""

    code = "wrong_server"
    cause = (
        "What answers at the address is not the server of this home; no key was sent."
    )
    advice = "Use the home that belongs to the URL, or give the key: KVPORT_API_KEY."


class UnreachableError(KvportError):
    """No answer, or the connection broke."""

    code = "unreachable"
    cause = "The server does not answer, or the connection to it broke."
    advice = "Check that the server still runs, and its log; then try again."


class IncompleteError(KvportError):
    """A download ended early; nothing is left at its destination."""

    code = "incomplete"
    cause = "The server broke the transfer off: it stops, or stored state is damaged."
    advice = "See the server's log, send the prompt again, then export again."
