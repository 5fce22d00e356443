"""What runs a model's sequences: mlx-lm's batches, or one sequence after the other."""

from functools import partial

from kvport.snapshot.engine.mlx_private import Batch
from kvport.snapshot.engine.models import Model
from kvport.snapshot.engine.solo import Solo
from kvport.snapshot.state.probe import Quantisation, make_caches


def open_batch(
    model: Model, chunk: int, quantisation: Quantisation | None
) -> Batch | Solo:
    """A new batch, in the thread that will use it.

    Args:
        model: what to run.
        chunk: tokens that prefill evaluates at once.
        quantisation: of keys and values, as the model was probed with.
    """
    if model.alone is None:
        return Batch(model.module, chunk)
    return Solo(model.module, chunk, partial(make_caches, model.module, quantisation))
