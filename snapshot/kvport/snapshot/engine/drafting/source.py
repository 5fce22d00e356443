"""From a setting to what drafts a model."""

import structlog

from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.engine.drafting.draft_model import DraftModel
from kvport.snapshot.engine.drafting.drafter import (
    DrafterFactory,
    Drafting,
    DraftSource,
)
from kvport.snapshot.engine.drafting.ngram import NgramDrafter
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.models import Model, Run, load_model

log = structlog.get_logger(__name__)


def open_drafting(
    source: DraftSource | None,
    model: Model,
    files: FileDigests,
    *,
    block_size: int = BLOCK_SIZE,
    run: Run,
) -> Drafting | None:
    """How a model is drafted, None if it is not; loads its draft model.

    Args:
        source: the setting.
        model: what is drafted.
        files: remembered digests.
        block_size: of the cache in which the model's state is kept.
        run: where mlx work is done.

    Raises:
        ModelLoadError: mlx-lm cannot load the draft model.
        SettingError: the draft model cannot draft for the model.
        KvportError: as `run` raises it.
    """
    if source is None:
        return None
    if model.layout is None or model.layout.head:
        # State that is not known cannot be stepped back; and in a limited cache what a
        # token sees depends on how many are evaluated at once: replies would differ.
        log.warning("model_undrafted", model=model.name)
        return None
    drafter: DrafterFactory = NgramDrafter
    nbytes = 0
    if source.model is not None:
        drafts = load_model("draft model", source.model, files, run=run)
        drafter, nbytes = DraftModel(drafts, model), drafts.nbytes
    return Drafting(drafter, block_size, source.tokens, nbytes)
