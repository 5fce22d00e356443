"""What is said of a model that is loaded, and of one that was unloaded."""

import attrs

from kvport.snapshot.engine.models import Model
from kvport.snapshot.engine.store import Store
from kvport.snapshot.engine.tuning import Tuning


@attrs.frozen(kw_only=True)
class Served:
    """A loaded model.

    Attributes:
        model: what it is.
        store: where its state is kept; None if it runs uncached.
        tuning: of its requests.
        drafts: whether replies may be drafted.
        keep_alive: seconds without a request after which it goes, infinity if never.
    """

    model: Model
    store: Store | None
    tuning: Tuning
    drafts: bool
    keep_alive: float


@attrs.frozen(kw_only=True)
class Left:
    """A model that was unloaded: its arrays are freed.

    Attributes:
        name: what it was called.
        nbytes: bytes of its weights, those of its draft model included.
        store: where its state is kept; None if it ran uncached.
    """

    name: str
    nbytes: int
    store: Store | None
