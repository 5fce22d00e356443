"""What goes into the scheduler and what comes out: requests and events, as data."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import attrs

from kvport.manifest.errors import KvportError
from kvport.manifest.nodes import NodeId
from kvport.snapshot.cache.records import Pin
from kvport.snapshot.errors import EngineFailureError


class Policy(StrEnum):
    """Which restore points a request may use."""

    NEAREST = "nearest"
    """The longest one, whoever computed it and how."""
    EXACT = "exact"
    """Chunk multiples of cold state made here with these numerics; the request runs
    alone: its answer equals that of an empty cache, bit for bit."""


@attrs.frozen
class Sampling:
    """How tokens are drawn; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


@attrs.frozen(kw_only=True)
class Request:
    """One completion.

    Attributes:
        tokens: the prompt's token ids, at least one.
        max_tokens: tokens to generate at most.
        sampling: how tokens are drawn.
        stop_texts: texts that end the reply and are not part of it.
        ignore_eos: whether the model's end tokens are like any other.
        top_logprobs: alternatives to report for each token; None reports no logprobs.
        full_logprobs: whether events carry the full vocabulary's log-probabilities.
        fork: where the prompt and its continuations part, if known (template.py).
        policy: which restore points may be used.
        within: restrict the lookup to these nodes: the path of one artifact.
        read: whether stored state may be used at all.
        write: whether state is captured; if not, the request leaves nothing behind but
            the note that what it restored was used.
        ttl: seconds after its last use until what is stored expires; None for the
            namespace's.
        pin: whose wish it is that the path stays, and for how long; None for nobody's.
        draft: whether its reply may be drafted, where the model has drafting.
    """

    tokens: Sequence[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_texts: Sequence[str] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    full_logprobs: bool = False
    fork: int | None = None
    policy: Policy = Policy.NEAREST
    within: frozenset[NodeId] | None = None
    read: bool = True
    write: bool = True
    ttl: int | None = None
    pin: Pin | None = None
    draft: bool = True


@attrs.frozen
class Started:
    """The request left the queue."""

    restored: int
    """Tokens of the prompt that were restored, not computed."""


@attrs.frozen
class Logprob:
    """A token and its log-probability (natural logarithm)."""

    token: int
    logprob: float


@attrs.frozen
class Generated:
    """One token of the reply."""

    token: int
    text: str
    """Text that became certain with this token; may be empty."""
    logprob: float | None
    top: tuple[Logprob, ...]
    full: Any
    """numpy float32 [vocabulary] with `full_logprobs`, else None."""
    finish: str | None
    """`stop` or `length` with the last token, else None."""


@attrs.frozen
class Failed:
    """The request ended without a reply."""

    error: KvportError

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """What a client is told: our own errors as they are, of others the fact."""
        if isinstance(error, KvportError):
            return cls(error)
        return cls(EngineFailureError("the model's computation failed"))


@attrs.frozen
class Cancelled:
    """The request was cancelled; rows captured so far are kept."""


Event = Started | Generated | Failed | Cancelled
Sink = Callable[[Event], None]
"""Called in the engine's thread: must return at once."""
