"""What can be set about the scheduler, and what it counts."""

import attrs

from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.state.kv_form import KvForm


@attrs.frozen(kw_only=True)
class Tuning:
    """Settings of the scheduler.

    Attributes:
        chunk: tokens that prefill evaluates at once; a multiple of the block size.
        stride: tokens between `stride` points; a multiple of the chunk.
        live_bytes: budget of live state per model; None for what memory allows.
        retention: what is kept of a conversation's points.
        reply_idle: seconds until the end of a reply is stored, if no next turn comes.
        queue: requests that may wait per model.
        batch: requests that may be decoded together.
        kv_form: of keys and values, from token 0 on; None for the model's own.
        draft: where guesses at the next tokens come from; None for no drafting.
    """

    chunk: int = 512
    stride: int = 4096
    retention: Retention = attrs.field(factory=Retention)
    reply_idle: float = 5.0
    live_bytes: int | None = None
    queue: int = 64
    batch: int = 32
    kv_form: KvForm | None = None
    draft: DraftSource | None = None


@attrs.define
class Counts:
    """What a model's requests asked, restored and computed, in tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    hits: int = 0
    misses: int = 0
    drafted_tokens: int = 0
    """Guesses that were verified."""
    accepted_tokens: int = 0
    """Guesses that became part of a reply."""
    failed_captures: int = 0
    stripped_points: int = 0
    """Stride points that replies did not get, since the next turn drops them."""
    superseded_replies: int = 0
    """Ends of replies that were never stored, since the next turn went beyond them."""

    def add_prompt(self, length: int, restored: int, *, read: bool) -> None:
        """Count a request whose prompt is computed from `restored` on.

        Args:
            length: tokens of the prompt.
            restored: of these.
            read: whether any might have been restored.
        """
        self.requests += 1
        self.prompt_tokens += length
        self.restored_tokens += restored
        self.computed_tokens += length - restored
        if read:
            self.hits += restored > 0
            self.misses += restored == 0
