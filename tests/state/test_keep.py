"""Rotating caches that keep their first rows: captured, restored, continued."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from kvport.manifest.layout import BlobClass
from kvport.snapshot.state.blobs import Assembly, to_buffers
from kvport.snapshot.state.kv_form import KEEP, Limit
from kvport.snapshot.state.probe import probe
from kvport.snapshot.state.rows import take

WINDOW = 48


@pytest.fixture(scope="module")
def model(model_dir):
    return load_model(model_dir("llama", layers=2))[0]


@pytest.fixture(scope="module")
def layout(model):
    return probe(model, Limit(WINDOW)).layout


class Origin:
    """A sequence that runs, and whose rows are captured as they come."""

    def __init__(self, model, layout):
        self.model, self.layout = model, layout
        self.caches = [RotatingKVCache(WINDOW, KEEP) for _ in layout.caches]
        self.held, self.segments = 0, []

    def run(self, count, step, cuts=None):
        """`count` tokens, `step` at once; captured in segments of `cuts` rows."""
        for start in range(self.held, self.held + count, step):
            tokens = [(7 * i) % 290 + 1 for i in range(start, start + step)]
            logits = self.model(mx.array([tokens]), cache=self.caches)[:, -1]
            mx.eval(logits)
            if step > 1:
                self.capture(start + step, cuts or step)
        self.held += count
        self.capture(self.held, self.held)
        return logits

    def capture(self, held, size):
        done = self.segments[-1][1] if self.segments else 0
        ends = [*range(done + size, held, size), held]
        cuts = [c for c in zip([done, *ends], ends, strict=False) if c[0] < c[1]]
        found, _ = take(
            self.layout, self.caches, row=0, held=held, cuts=cuts, state=False
        )
        for (start, end), leaves in zip(cuts, found, strict=True):
            rows = leaves[BlobClass.WINDOW]
            buffers = to_buffers(self.layout, BlobClass.WINDOW, end - start, rows)
            self.segments.append((start, end, memoryview(b"".join(buffers))))

    def restored(self):
        assembly, added = Assembly(self.layout, self.held), 0
        for start, end, blob in self.segments:
            if assembly.wants(BlobClass.WINDOW, start, end):
                assembly.add(BlobClass.WINDOW, start, end, blob)
                added += 1
        assert added == len(self.segments) or self.held > WINDOW
        return assembly.caches()

    def canonical(self):
        """What mlx-lm itself calls temporal order, the newest rows but the first."""
        found = copy.deepcopy(self.caches)
        for cache in found:
            for name in ("keys", "values"):
                rows = cache._temporal_order(getattr(cache, name))
                if rows.shape[2] > WINDOW:
                    tail = rows[:, :, KEEP - WINDOW :]
                    rows = mx.concatenate([rows[:, :, :KEEP], tail], axis=2)
                setattr(cache, name, rows)
            cache._idx = cache.keys.shape[2]
        return found


def same_rows(left, right):
    for a, b in zip(left, right, strict=True):
        assert (a.offset, a.keep, a.max_size) == (b.offset, b.keep, b.max_size)
        assert mx.array_equal(a.keys, b.keys).item()
        assert mx.array_equal(a.values, b.values).item()


def continued(model, caches, steps=24):
    """Log-probabilities of a chunk and of decode, past the window."""
    tokens = [[11, 12, 13], *([step + 1] for step in range(steps))]
    return mx.stack([model(mx.array([t]), cache=caches)[:, -1] for t in tokens])


@pytest.mark.parametrize(
    "prefill",  # tokens, at once, rows in a segment
    [
        (3, 3, None),  # below `keep`
        (4, 4, 2),
        (30, 10, None),  # below the window
        (48, 16, 7),  # at the window
        (48, 48, None),
        (120, 20, 9),  # past it, the chunk smaller than the window
        (192, 96, None),  # and larger
        (192, 96, 11),
    ],
)
@pytest.mark.parametrize("decoded", [0, 5, 60])
def test_what_is_restored_continues_as_the_origin(model, layout, prefill, decoded):
    origin = Origin(model, layout)
    origin.run(*prefill)
    if decoded:
        origin.run(decoded, 1)
    restored, hot = origin.restored(), origin.canonical()
    same_rows(restored, hot)
    expected = continued(model, hot)
    assert mx.array_equal(continued(model, restored), expected).item()
    # A chunk begins in temporal order in the live caches too.
    assert mx.array_equal(continued(model, origin.caches), expected).item()


@pytest.mark.parametrize("prompt", [1, 2, 4, 5])
def test_rows_captured_late_in_a_reply_are_those_that_the_ring_still_holds(
    model, layout, prompt
):
    """Segments that begin before `keep` ends, and are longer than the window."""
    for decoded in (41, 44, 46, 80):
        origin = Origin(model, layout)
        origin.run(prompt, prompt)
        origin.run(decoded, 1)
        same_rows(origin.restored(), origin.canonical())


def test_the_first_rows_of_other_models_caches_are_mlx_lms_own_default():
    class Plain:
        layers = (None,)

    (cache,) = make_prompt_cache(Plain(), max_kv_size=WINDOW)
    assert (cache.max_size, cache.keep) == (WINDOW, KEEP)
