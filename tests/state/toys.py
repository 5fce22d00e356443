"""Models of one row per token, with whatever caches they are told to make."""

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache

from kvport.snapshot.state.kinds import flatten


class Toy(nn.Module):
    """Rows are the token ids; the output depends on all that the caches hold.

    `slots` gives the arrays of an arrays cache, by slot, from the new tokens and what
    the cache holds; unless given, slot 0 has the last token.
    """

    def __init__(self, make, slots=None, value_width=2, dtype=mx.float32):
        super().__init__()
        self.layers = []
        self._make, self._slots = make, slots or self._last_token
        self._width, self._dtype = value_width, dtype

    def make_cache(self):
        return self._make()

    def __call__(self, tokens, cache=None):
        batch, length = tokens.shape
        rows = mx.broadcast_to(tokens[:, None, :, None], (batch, 1, length, 2))
        rows = rows.astype(self._dtype)
        out = mx.zeros((batch, length, 4))
        for _, one in flatten(cache):
            if isinstance(one, ArraysCache):
                for slot, array in self._slots(tokens, one).items():
                    out = out + array.astype(mx.float32).sum()
                    one[slot] = array
            else:
                keys, values = one.update_and_fetch(rows, rows[..., : self._width])
                out = out + keys.astype(mx.float32).sum()
                out = out - 2 * values.astype(mx.float32).sum()
        return out

    @staticmethod
    def _last_token(tokens, cache):
        del cache
        return {0: tokens[:, -1:, None].astype(mx.float32)}


class Counting(Toy):
    """Keeps a number beside its caches."""

    seen = 0

    def __call__(self, tokens, cache=None):
        self.seen += tokens.shape[1]
        return super().__call__(tokens, cache) + self.seen


class Remembering(Toy):
    """Keeps an array beside its caches."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.last = mx.zeros((1, 1))

    def __call__(self, tokens, cache=None):
        out = super().__call__(tokens, cache) + self.last.sum()
        self.last = tokens[:, -1:].astype(mx.float32)
        return out
