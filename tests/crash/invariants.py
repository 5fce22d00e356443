"""What holds in every open place, whatever happened before.

Nothing that a lookup finds is wrong, what was acknowledged is there, every file has its
row and every row its file, and the account is what the disk holds.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from blake3 import blake3

from kvport.manifest.errors import KvportError
from kvport.manifest.tokens import encode_tokens, prefix_keys
from kvport.snapshot.cache.records import RemovalReason, Selection
from kvport.snapshot.transfer.ledger import Direction
from tests.cache.builder import stored_tokens, walk
from tests.crash.places import Place
from tests.crash.wants import Want
from tests.transfer.world import dump

ROOT_NAMES = {
    "root.json",
    "index.sqlite",
    "index.sqlite-wal",
    "ballast",
    "ns",
    "staging",
}
DAMAGE = {RemovalReason.DAMAGED, RemovalReason.MISSING, RemovalReason.TAMPERED}


def unmet(place: Place, wanted: Iterable[Want]) -> Iterator[Want]:
    """What was acknowledged, and does not hold."""
    for want in wanted:
        if want.kind == "root":
            holds = place.cache.root_id == want.name
        elif want.kind == "artifact":
            ledger, ns = place.home.ledger, place.home.ns
            holds = ledger.find(want.name, Direction.ADMITTED, scope=ns.scope)
        else:
            found = _position(place, want)
            holds = found == 0 if want.kind == "gone" else found >= want.position
        if not holds:
            yield want


def wrong_state(place: Place, prompts: Iterable[Want]) -> Iterator[str]:
    """State that a lookup finds, and that is not what belongs there."""
    for want in prompts:
        if not want.tokens:
            continue
        match = _match(place, want)
        nodes = match.nodes if match else ()
        ends = [node.end for node in nodes]
        ns = place.space(want.name)
        encoded = encode_tokens(want.tokens)
        # The last node may go beyond the prompt.
        whole = [end for end in ends if end <= len(want.tokens)]
        keys = prefix_keys(ns.identity.digest, ns.block_size, encoded, whole)
        for node, key in zip(nodes, keys, strict=False):
            # Made-up bytes hang on the key only, and so may come with more tokens.
            tokens = stored_tokens(place.cache, ns, [node])
            if node.key != key or not encoded[: 4 * node.end].endswith(tokens):
                yield f"wrong node at {node.start} of {want.name}"
        for node, ref in [(one, ref) for one in nodes for ref in one.blobs]:
            try:
                data = bytes(place.cache.read(ns, ref))
            except KvportError as error:
                yield f"{ref.blob_class} at {node.start} of {want.name}: {error.code}"
            else:
                if not place.is_right(node, ref, data):
                    yield f"wrong {ref.blob_class} at {node.start} of {want.name}"


def uncounted(place: Place) -> Iterator[str]:
    """Bytes on the disk beyond the account; right after a fault they may be fewer."""
    account = place.cache.stats().account
    if account.held:
        yield f"{account.held} bytes are held for nothing"
    if (real := walk(place.root)) > account.reserved:
        yield f"{real} bytes on the disk, {account.reserved} on the account"


def untidy(place: Place) -> Iterator[str]:
    """What a start leaves behind that it should not."""
    stats = place.cache.stats()
    real, account = walk(place.root), stats.account
    if real != account.reserved:
        yield f"{real} bytes on the disk, {account.reserved} on the account"
    if account.reserved > account.cap:
        yield "above the cap"
    if strange := {path.name for path in place.root.iterdir()} - ROOT_NAMES:
        yield f"left in the root: {sorted(strange)}"
    if left := [*(place.root / "staging").iterdir()]:
        yield f"left in staging: {left}"
    yield from strange_files(place)
    if place.home is not None:
        statuses = {row["status"] for row in dump(place.home.ledger)["artifact"]}
        if not statuses <= {"admitted"}:
            yield "the ledger has an intent"


def strange_files(place: Place) -> Iterator[str]:
    """Files and rows that are not the same."""
    rows = {ns.id: ns.files for ns in place.cache.stats().namespaces}
    files = {path.name: [*path.iterdir()] for path in (place.root / "ns").iterdir()}
    if rows != {name: len(found) for name, found in files.items()}:
        yield "files are not rows"
    sizes = place.cache._index.all("SELECT hex(digest), size, trailer FROM file", ())
    known = {digest.lower(): (size, trailer) for digest, size, trailer in sizes}
    for path in itertools.chain(*files.values()):
        data, (size, trailer) = path.read_bytes(), known.get(path.name, (0, 0))
        if len(data) != size + trailer:
            yield "a file's size is not its row's"
        if blake3(data[:size]).hexdigest() != path.name:
            yield "a file's content is not its name"


def losses(place: Place, *, damaged: bool, began: bool) -> Iterator[str]:
    """What a start has counted that no crash may cause."""
    stats = place.cache.stats()
    if stats.index_resets and began:
        yield "the index was lost"
    if not damaged and (lost := DAMAGE & stats.total.removed.keys()):
        yield f"nodes were lost: {sorted(lost)}"
    if stats.total.damaged:
        yield "blobs were damaged"


def _match(place: Place, want: Want):
    selection = Selection(limit=len(want.tokens), local=place.local)
    return place.cache.match(
        place.space(want.name), encode_tokens(want.tokens), selection
    )


def _position(place: Place, want: Want) -> int:
    match = _match(place, want)
    return match.position if match else 0


def violations(
    place: Place,
    wanted: Sequence[Want],
    prompts: Sequence[Want],
    *,
    damaged: bool = False,
) -> list[str]:
    """Everything that does not hold in a place that was just opened."""
    return [
        *losses(place, damaged=damaged, began=bool(wanted)),
        *untidy(place),
        *wrong_state(place, prompts),
        *(
            f"{want.kind} {want.name} {want.tokens[:1]} is not"
            for want in unmet(place, wanted)
        ),
    ]
