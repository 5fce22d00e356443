"""One running node: home, cache, engine and transfer, wired together.

A node owns its home (one process at a time) and its cache root. Everything that the
API and the command line do goes through here; nothing here knows of HTTP.
"""

import contextlib
import math
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import attrs
import structlog

from kvport.manifest.digests import ArtifactId
from kvport.manifest.nodes import NodeId
from kvport.manifest.recipients import Recipient
from kvport.manifest.tokens import BLOCK_SIZE, encode_tokens
from kvport.snapshot.cache.cache import Opening
from kvport.snapshot.cache.policy import Tier
from kvport.snapshot.cache.records import Namespace
from kvport.snapshot.engine.models import Model
from kvport.snapshot.engine.requests import Policy, Request, Sink
from kvport.snapshot.engine.restore import selection
from kvport.snapshot.engine.scheduler import Ticket
from kvport.snapshot.engine.template import Rendered
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.errors import CacheOffError, TierError, UnknownModelError
from kvport.snapshot.home_lock import lock
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.known_models import KnownModels
from kvport.snapshot.known_roots import KnownRoots, Limits
from kvport.snapshot.namespaces import NamespaceBook
from kvport.snapshot.orders import JUDGE, Orders
from kvport.snapshot.prompts import Prompt, rendered
from kvport.snapshot.residents import DEFAULT_SCOPE, Residents
from kvport.snapshot.revoking import Revoking
from kvport.snapshot.transfer.exporter import Export, Issue, open_export
from kvport.snapshot.transfer.importer import Import, LocalModel
from kvport.snapshot.transfer.kept import Artifacts
from kvport.snapshot.transfer.ledger import Ledger
from kvport.snapshot.volume import Volume, VolumeStatus

log = structlog.get_logger(__name__)


@attrs.frozen(kw_only=True)
class NodeSettings:
    """How to run a node.

    Attributes:
        home: keys, trust list, ledger.
        cache_root: the paged cache; None for the one that the home had, or else below
            it.
        cap_bytes: hard limit of the cache root; None is half of (free + ours).
        free_floor: bytes that the cache's volume keeps free; 0 for none, None for the
            larger of 10 GiB and 5 % of it.
        block_size: tokens in a block.
        policy: what requests get that do not name one.
        tuning: the scheduler's settings.
        cache_enabled: whether state is kept at all.
        keep_alive: seconds without a request after which a model is unloaded for which
            nothing else is said; infinity for never.
    """

    home: Path
    cache_root: Path | None = None
    cap_bytes: int | None = None
    free_floor: int | None = None
    block_size: int = BLOCK_SIZE
    policy: Policy = Policy.NEAREST
    tuning: Tuning = attrs.field(factory=Tuning)
    cache_enabled: bool = True
    keep_alive: float = math.inf


@attrs.frozen
class ProbeResult:
    """What the cache holds of a prompt, in tokens.

    Attributes:
        prompt_tokens: the prompt's length.
        stored_tokens: tokens of which rows are stored.
        restorable_tokens: tokens that a request would restore now.
    """

    prompt_tokens: int
    stored_tokens: int
    restorable_tokens: int


class Node:
    """A running node; `open` makes one, `close` ends it."""

    def __init__(
        self,
        *,
        settings: NodeSettings,
        keyring: Keyring,
        volume: Volume,
        ledger: Ledger,
        residents: Residents,
        orders: Orders,
        ending: contextlib.ExitStack,
    ) -> None:
        self.settings = settings
        self.keyring = keyring
        self.volume = volume
        self.ledger = ledger
        self.residents = residents
        self.engine = residents.engine
        self.orders = orders
        self._ending = ending
        self._signer = keyring.signing_key()
        self.key_id = self._signer.public.key_id
        self.artifacts = Artifacts(
            volume=volume,
            ledger=ledger,
            scope=DEFAULT_SCOPE,
            key=self._signer.public,
            sealing_secret=keyring.sealing_secret(),
            now=_now,
        )

    @classmethod
    def open(cls, settings: NodeSettings) -> Self:
        """Take the home, open its cache, start the engine.

        Without the cache, as long as its volume is missing or fails: see `Volume.open`.

        Raises:
            ConfigFileError: what is set about namespaces cannot be read.
            HomeInUseError: another process runs on this home.
            SettingError: the home had several caches, and none is named.
            KeyFileError: a key file, or the trust list, is not private or is damaged.
            KvportError: the cache root cannot be used, or mlx-lm is not the pinned one.
        """
        keyring = Keyring(settings.home)
        keyring.create()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, lock(settings.home))
            book = NamespaceBook(settings.home)
            ledger = Ledger(settings.home / "state.sqlite")
            undo.callback(ledger.close)
            ledger.purge(keyring.load_trust().revoked_keys)
            volume = _volume(settings, ledger, book, keyring)
            undo.callback(volume.close)
            residents = Residents(
                volume=volume,
                book=book,
                digests=settings.home / "model-digests.json",
                tuning=settings.tuning,
                keep_alive=settings.keep_alive,
                block_size=settings.block_size if settings.cache_enabled else None,
                local=keyring.signing_key().public.key_id,
                known=KnownModels(settings.home),
            )
            undo.callback(residents.engine.close)
            revoking = Revoking(
                trust=keyring.load_trust,
                cache=lambda: volume.cache,
                ledger=ledger,
                requests=residents.engine.purge,
            )
            orders = Orders(
                cache=lambda: volume.cache,
                book=book,
                ledger=ledger,
                revoking=revoking,
                settle=residents.settle_tails,
                reclaim=residents.reclaim_rest,
            )
            undo.callback(orders.close)
            return cls(
                settings=settings,
                keyring=keyring,
                volume=volume,
                ledger=ledger,
                residents=residents,
                orders=orders,
                ending=undo.pop_all(),
            )

    def close(self) -> None:
        """End running requests, keep what they captured, close everything."""
        self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load_model(
        self,
        source: str,
        name: str | None = None,
        tuning: Tuning | None = None,
        *,
        keep_alive: float | None = None,
    ) -> Model:
        """Load a model, and wait for it: see `Residents.load`."""
        return self.residents.load(source, name, tuning, keep_alive=keep_alive)

    def render(self, name: str, prompt: Prompt, *, closed: bool = False) -> Rendered:
        """Token ids of a prompt, by the model's own tokenizer and template.

        Args:
            name: the model.
            prompt: what to render.
            closed: whether messages end as they stand, without opening a reply.

        Raises:
            UnknownModelError: there is no such model.
            BadPromptError: the prompt cannot be rendered.
        """
        return rendered(self.engine.model(name).tokenizer, prompt, closed=closed)

    def submit(self, name: str, request: Request, sink: Sink) -> Ticket:
        """Queue a request: see `Engine.submit`."""
        return self.engine.submit(name, request, sink)

    def require_storing(self, name: str) -> None:
        """Refuse what makes no sense unless a model's state is stored.

        A cache that is absent now is no reason: it may be back when it is needed.

        Raises:
            CacheOffError: it is not, by the model's kind or by a setting.
            TierError: it is not, by its namespace's tier.
            UnknownModelError: there is no such model.
        """
        self._namespace(name)
        store = self.engine.store(name)
        if store is not None and store.tier not in {Tier.ON, None}:
            raise TierError(
                f"nothing is stored for the model {name!r}: its tier is {store.tier}"
            )

    def settle(self, name: str) -> None:
        """Wait until what ended requests of a model leave is stored, or was skipped.

        But for ends of replies that are kept in memory, which no pinned one is.

        Raises:
            EngineStoppedError: the node is closing.
        """
        self.engine.call(lambda: None)
        with contextlib.suppress(UnknownModelError):  # unloaded meanwhile
            if (store := self.engine.store(name)) is not None:
                store.flush()

    def probe(self, name: str, request: Request) -> ProbeResult:
        """What a request would restore now; nothing is loaded or computed.

        Raises:
            CacheAbsentError: there is no cache at present.
        """
        namespace = self._namespace(name)
        tokens = encode_tokens(request.tokens)
        length = len(request.tokens)
        chosen = selection(
            request,
            namespace.layout,
            local=self.key_id,
            numerics=self.engine.numerics,
        )
        self.engine.store_tails(name)
        with self.volume.using() as cache:
            match = cache.match(namespace, tokens, chosen, count=False)
            return ProbeResult(
                prompt_tokens=length,
                stored_tokens=cache.longest(namespace, tokens),
                restorable_tokens=match.position if match else 0,
            )

    def export(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        compress: bool = False,
        session: str = "",
        recipients: Iterable[Recipient] = (),
    ) -> Export:
        """Open an export of the longest restorable prefix of these tokens.

        Args:
            name: the model.
            tokens: ids.
            compress: whether blobs are encoded that are smaller so.
            session: label of the conversation that it is of; empty for none.
            recipients: who can open it; empty for everyone.

        Raises:
            NothingRestorableError: a subclass says why.
            CacheAbsentError: there is no cache at present.
        """
        model = self.engine.model(name)
        namespace = self._namespace(name)
        self.engine.store_tails(name)
        issue = Issue(
            signer=self._signer,
            issuer_name=platform.node() or "kvport",
            model_name=name,
            tokenizer=model.tokenizer_digest,
            now=_now(),
            compress=compress,
            session=session,
            recipients=tuple(dict.fromkeys(recipients)),
            sealing_secret=self.keyring.sealing_secret(),
        )
        with self.volume.using() as cache:
            return open_export(
                cache, self.ledger, namespace, encode_tokens(tokens), issue
            )

    def path_of(self, artifact: str | None) -> frozenset[NodeId] | None:
        """The nodes that a request for one artifact may restore; None for all.

        Raises:
            ArtifactUnknownError: it was neither kept nor admitted here.
            ArtifactGoneError: its state was removed since.
        """
        return None if artifact is None else self.artifacts.nodes(ArtifactId(artifact))

    def start_import(self, model: str | None = None) -> Import:
        """Begin an import, for bytes to be fed to; CacheAbsentError without a cache."""
        return Import(
            cache=self.volume.cache,
            ledger=self.ledger,
            models=self.local_models(model),
            trust=self.keyring.load_trust,
            local=self.key_id,
            recipient=self.keyring.recipient_key,
        )

    def health(self) -> VolumeStatus:
        """How it is with the cache: the node serves in any case."""
        return self.volume.status

    def local_models(self, only: str | None = None) -> list[LocalModel]:
        """The models that an artifact may be for."""
        served = self.engine.served
        if only is not None:
            self.engine.model(only)
            served = {name: one for name, one in served.items() if name == only}
        accepted = self.keyring.load_equivalences()
        return [
            LocalModel(name, one.model.tokenizer_digest, one.store.namespace, accepted)
            for name, one in served.items()
            if one.store is not None
        ]

    def _namespace(self, name: str) -> Namespace:
        store = self.engine.store(name)
        if store is None:
            reason = self.engine.model(name).refusal or "the cache is switched off"
            raise CacheOffError(f"the model {name!r} runs without the cache: {reason}")
        return store.namespace


def _volume(
    settings: NodeSettings, ledger: Ledger, book: NamespaceBook, keyring: Keyring
) -> Volume:
    """The volume that the cache is on, purged at each opening; see `Volume.open`."""
    if not settings.cache_enabled:
        return Volume.off()
    # A known root that is not there is a volume that is not mounted: it must not be
    # made again as an empty directory in its place.
    roots = KnownRoots(settings.home)
    root = roots.to_serve(settings.cache_root)
    opening = Opening(
        root=root,
        cap_bytes=settings.cap_bytes,
        on_removed=ledger.record_removed,
        expected_root=roots.id_of(root),
        mac_key=keyring.cache_mac_key(),
        free_floor=settings.free_floor,
        settings=lambda known: book.settings(known.id, known.model, known.scope),
        names=book.names,
        judge=JUDGE,
    )
    works = (
        lambda cache: roots.opened(root, cache.root_id),
        ledger.reconcile,
        lambda cache: cache.administration.purge(keyring.load_trust().revoked_keys),
    )
    volume = Volume.open(opening, works)
    roots.serves(root, Limits(settings.cap_bytes, settings.free_floor))
    return volume


def _now() -> datetime:
    return datetime.now(UTC)
