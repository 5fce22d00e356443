"""Problems (RFC 9457): the one form of every error over HTTP, and the one table.

* `STATUS` maps each code to its status; `LOCAL` names the codes that never cross HTTP.
  A test holds every code to be in exactly one of them.
* What is not a `KvportError` becomes `internal`, without a word of what happened.
* Below /v1 a problem has a further member, `error`, which clients of OpenAI's API read.
"""

from http import HTTPStatus
from typing import Final

import msgspec

from kvport.manifest.errors import KvportError, all_codes

RETRY_AFTER_SECONDS: Final = 5
"""What clients are told to wait when too many requests wait already."""

OPENAI_PATHS: Final = "/v1/"

STATUS: Final[dict[str, int]] = {
    "internal": 500,
    # Requests.
    "bad_request": 400,
    "bad_prompt": 400,
    "unauthorized": 401,
    "not_found": 404,
    "unknown_model": 404,
    "model_loaded": 409,
    "model_unloaded": 410,
    "model_load": 422,
    "setting": 422,
    "cap": 422,
    "unknown_namespace": 404,
    "method_not_allowed": 405,
    "ambiguous_namespace": 409,
    "stalled": 408,
    "too_large": 413,
    "limit_exceeded": 413,
    "prompt_too_large": 413,
    "wrong_host": 421,
    "overloaded": 429,
    # Exports.
    "never_computed": 409,
    "evicted": 409,
    "state_revoked": 409,
    "cache_off": 409,
    "not_restorable": 409,
    "namespace_tier": 409,
    "gone": 410,
    "artifact_unknown": 404,
    "artifact_gone": 410,
    "damaged": 410,
    # Imports: nothing was admitted.
    "format": 422,
    "unsupported_version": 422,
    "container": 422,
    "signature": 422,
    "untrusted_key": 422,
    "version_mismatch": 422,
    "revoked_key": 422,
    "rollback": 422,
    "weak_key": 422,
    "expired": 422,
    "wrong_recipient": 422,
    "wrong_scope": 422,
    "binding_mismatch": 422,
    "arithmetic": 422,
    "token_mismatch": 422,
    "tensor_header": 422,
    "blob_encoding": 422,
    "decryption": 422,
    "digest_mismatch": 422,
    # The machine.
    "engine_failure": 500,
    "key_file": 500,
    "storage": 500,
    "read_only": 503,
    "missing_root": 503,
    "replaced_root": 503,
    "cache_absent": 503,
    "shutting_down": 503,
    "capacity": 507,
    "pin_limit": 507,
    "disk_full": 507,
    "quota": 507,
    "write_budget": 507,
}
"""HTTP status by code."""

LOCAL: Final = frozenset(
    {
        # Starting a server.
        "cache_in_use",
        "engine_conformance",
        "foreign_root",
        "home_in_use",
        "port",
        "unsupported_model",
        # The command line and the client.
        "config_file",
        "fingerprint",
        "incomplete",
        "library_missing",
        "local_file",
        "model_build",
        "model_fetch",
        "model_not_named",
        "no_home",
        "no_model",
        "no_server",
        "not_listed",
        "own_key",
        "pairing",
        "prompt_cache",
        "proof",
        "prompt_cache_mismatch",
        "unreachable",
        "wrong_server",
    }
)
"""Codes that are raised in the process that reports them."""


class OpenAIError(msgspec.Struct, frozen=True):
    """An error as OpenAI's API has it.

    Attributes:
        message: what happened here.
        type: the code.
        code: the code, too.
        param: the first of the problem's `fields`.
    """

    message: str
    type: str
    code: str
    param: str | None


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of an error response.

    Attributes:
        type: a URN made from the code.
        title: the cause, one sentence, the same for every problem of the code.
        status: the HTTP status.
        detail: what happened here.
        code: what programs match on.
        fields: names of what differed or was wrong, where there are such names.
        error: the same for clients of OpenAI's API, below their paths.
    """

    type: str
    title: str
    status: int
    detail: str
    code: str
    fields: tuple[str, ...] = ()
    error: OpenAIError | None = None

    @classmethod
    def of(cls, error: KvportError) -> "Problem":
        """The problem that an error becomes."""
        return cls(
            type=f"urn:kvport:error:{error.code}",
            title=error.cause,
            status=STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR),
            detail=error.message,
            code=error.code,
            fields=error.fields,
        )

    def at(self, path: str) -> "Problem":
        """The problem as it is answered at a path."""
        if not path.startswith(OPENAI_PATHS):
            return self
        error = OpenAIError(
            message=self.detail,
            type=self.code,
            code=self.code,
            param=self.fields[0] if self.fields else None,
        )
        return msgspec.structs.replace(self, error=error)

    def encode(self) -> bytes:
        """The response's body."""
        return msgspec.json.encode(self)

    def event(self) -> bytes:
        """The last event of a stream of tokens that ends with it."""
        return b"event: error\ndata: " + self.at(OPENAI_PATHS).encode() + b"\n\n"


INTERNAL: Final = Problem.of(KvportError("the server failed; its log says how"))


class ProblemError(KvportError):
    """A problem that a server answered with; code and texts are the server's."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail, fields=problem.fields)
        self.problem = problem
        self.status = problem.status
        known = {cls.code: cls.advice for cls in all_codes()}
        # Class variables elsewhere: here every instance has its own.
        vars(self).update(
            code=problem.code,
            cause=problem.title,
            advice=known.get(problem.code, self.advice),
        )
