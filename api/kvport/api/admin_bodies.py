"""JSON bodies of an operator's orders; see `bodies` for how they are decoded.

The command line makes the same bodies, whether it sends them or carries them out.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvport.api.bodies import ArtifactName, Body
from kvport.api.errors import BadRequestError
from kvport.manifest.layout import BlobClass
from kvport.manifest.limits import MIB
from kvport.snapshot.namespaces import Change, Positive, Seconds

SCRUB_RATE: Final = 32 * MIB
"""Bytes per second: what a disk hardly notices."""

Which = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=512,
        description="A namespace: its id, 8 digits or more of its beginning, its"
        " model's name, or that name and its scope as NAME/SCOPE.",
    ),
]


class NamespaceBody(Change, frozen=True, kw_only=True):
    """Fields to set; null takes back what was set so before, absent leaves it."""

    namespace: Which

    @property
    def change(self) -> Change:
        """What is to be set."""
        names = Change.__struct_fields__
        return Change(**{name: getattr(self, name) for name in names})


class PlanBody(Body, frozen=True):
    """What to ask for: what is absent is as it is.

    Attributes:
        cap_bytes: with this cap at a start.
        free_floor_bytes: with this floor, likewise; 0 for none.
        quotas: with these, null for none.
        gc: what `gc` would remove, too.
    """

    cap_bytes: Positive | Literal["auto"] | None = None
    free_floor_bytes: (
        Annotated[int, Meta(ge=0, le=1 << 62)] | Literal["auto"] | None
    ) = None
    quotas: dict[Which, Positive | None] = msgspec.field(default_factory=dict)
    gc: bool = False


class GcBody(Body, frozen=True):
    """Nothing can be said yet; so whoever says something is not misunderstood."""


class PurgeBody(Body, frozen=True):
    """Nothing can be said: what is purged says the trust list of the home alone."""


class ClearBody(Body, frozen=True):
    """What to clear: what meets all that is given, or all of it.

    Attributes:
        namespace: only there.
        kind: only blobs of this class, as `cache stats --json` names them.
        older_than: only what was not used for as many seconds.
        artifact: only its path, as far as no other path needs it.
        force: what is leased or pinned goes as well.
        all: needed if nothing else says what is to go.
    """

    namespace: Which | None = None
    kind: BlobClass | None = None
    older_than: Seconds | None = None
    artifact: ArtifactName | None = None
    force: bool = False
    all: bool = False

    def __post_init__(self) -> None:
        filters = (self.namespace, self.kind, self.older_than, self.artifact)
        chosen = any(one is not None for one in filters)
        if chosen == self.all:
            raise BadRequestError(
                'say what is to be cleared: a filter, or "all": true, but not both',
                fields=("all",),
            )
        if self.artifact is not None and (self.namespace or self.kind):
            raise BadRequestError(
                "an artifact's path goes whole, wherever it is",
                fields=("artifact", "namespace", "kind"),
            )


class ReleaseBody(Body, frozen=True):
    """Whose pins end: those of one owner, and of nobody else.

    Attributes:
        owner: as it pinned.
        node: the beginning of a node's name; all of the owner's if absent.
    """

    owner: Annotated[str, Meta(min_length=1, max_length=512)]
    node: (
        Annotated[
            str,
            Meta(
                pattern=r"^[0-9a-f]{8,64}$(?!\n)",
                description="8 to 64 hex digits of a node's name",
            ),
        ]
        | None
    ) = None


class ScrubBody(Body, frozen=True):
    """How fast to read; null for as fast as the disk does."""

    bytes_per_second: Positive | None = SCRUB_RATE
