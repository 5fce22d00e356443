"""Models that mlx-lm has none of; `toy_dir` gives them the weights of llama."""

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import ArraysCache, KVCache


class KeysOnly(llama.Model):
    """One more cache, which keeps keys and no values."""

    def make_cache(self):
        return [KVCache() for _ in range(len(self.layers) + 1)]

    def __call__(self, inputs, cache=None):
        rows = mx.broadcast_to(
            inputs[:, None, :, None] / 300, (inputs.shape[0], 1, inputs.shape[1], 4)
        )
        keys, _ = cache[-1].update_and_fetch(rows, rows[..., :0])
        return super().__call__(inputs, cache[:-1]) * (1 + keys.mean())


class IntegerState(llama.Model):
    """One more cache, of an integer: how many tokens there were."""

    def make_cache(self):
        return [*(KVCache() for _ in self.layers), ArraysCache(1)]

    def __call__(self, inputs, cache=None):
        before = cache[-1][0]
        if before is None:
            before = mx.zeros((inputs.shape[0], 1), mx.int64)
        cache[-1][0] = before + inputs.shape[1]
        return super().__call__(inputs, cache[:-1]) * (1 + before[..., None] / 100)


class SideState(llama.Model):
    """Remembers beside its caches how many tokens it saw."""

    def __init__(self, args):
        super().__init__(args)
        self._seen = 0

    def __call__(self, inputs, cache=None):
        self._seen += inputs.shape[1]
        return super().__call__(inputs, cache) * (1 + self._seen / 100)


class Subclassed(KVCache):
    pass


class SubclassedCache(llama.Model):
    """Keeps its rows in a cache class of its own."""

    def make_cache(self):
        return [Subclassed() for _ in self.layers]
