"""The models of a node: loaded, kept as long as they are used, and let go.

In: directories and Hugging Face ids, with the name that requests call them by. Out:
models in the engine, each with its namespace in the cache; and the namespace cleared
when the last model that uses it goes, where its settings say so.

Loading and unloading take long and block; `start_load` and `start_unload` do it in
threads of their own, which do not keep the process from ending.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

import attrs
import structlog

from kvport.manifest.digests import parse_digest
from kvport.manifest.errors import KvportError
from kvport.manifest.identity import KeyId
from kvport.manifest.signed import Local
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.clear import Cleared
from kvport.snapshot.cache.plan import Freed
from kvport.snapshot.cache.records import Namespace, RemovalReason
from kvport.snapshot.engine.futures import settle
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.models import Model, locate
from kvport.snapshot.engine.scheduler import Engine
from kvport.snapshot.engine.served import Left
from kvport.snapshot.engine.store import Store
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.errors import ModelLoadedError, UnknownModelError
from kvport.snapshot.known_models import KnownModels
from kvport.snapshot.namespaces import NamespaceBook
from kvport.snapshot.volume import Volume

T = TypeVar("T")
log = structlog.get_logger(__name__)

DEFAULT_SCOPE: Final = "default"


@attrs.frozen(kw_only=True)
class Unloaded:
    """What became of a model.

    Attributes:
        name: what it was called.
        weight_bytes: bytes of memory that its weights took, all free now.
        reclaimed: what became of its state in the cache; None if it stays.
    """

    name: str
    weight_bytes: int
    reclaimed: Cleared | None


class Residents:
    """The models of a node, and the engine that runs them; thread-safe."""

    def __init__(
        self,
        *,
        volume: Volume,
        book: NamespaceBook,
        digests: Path,
        tuning: Tuning,
        keep_alive: float,
        block_size: int | None,
        local: KeyId,
        known: KnownModels,
    ) -> None:
        """Start the engine.

        Args:
            volume: of the cache.
            book: what is set about namespaces.
            digests: a file that remembers digests of model files.
            tuning: of models that are loaded without one.
            keep_alive: likewise.
            block_size: tokens in a block; None keeps no state.
            local: this node's key.
            known: told of the models that are loaded.

        Raises:
            EngineConformanceError: mlx-lm is not the pinned one.
        """
        self._volume = volume
        self._book = book
        self._files = FileDigests(digests)
        self._keep_alive = keep_alive
        self._block_size = block_size
        self._local = local
        self._known = known
        self._unreclaimed: dict[str, tuple[Namespace, str]] = {}
        """By id: something was held when their model, of this name, went."""
        self._loading = threading.Lock()
        """One load at a time; and no namespace is cleared that is about to be used."""
        self.engine = Engine(tuning, on_idle=self._gone)

    def load(
        self,
        source: str,
        name: str | None = None,
        tuning: Tuning | None = None,
        *,
        keep_alive: float | None = None,
    ) -> Model:
        """Load a model; one that is loaded stays as it is, but for what is said.

        Args:
            source: its directory or Hugging Face id.
            name: what requests call it; the last part of the source if None.
            tuning: of its requests, with the node's chunk; the node's if None.
            keep_alive: seconds without a request after which it goes, infinity if
                never; the node's if None.

        Raises:
            ModelLoadError: there is no such model, or mlx-lm cannot load it.
            ModelLoadedError: another one, or one with another tuning, has the name.
            SettingError: its draft model cannot draft for it.
            EngineStoppedError: the node is closing.
        """
        found, directory = locate(source)
        name, engine = name or found, self.engine
        with self._loading:
            if (served := engine.served.get(name)) is not None:
                same = served.model.directory == directory
                if not same or tuning not in (None, served.tuning):
                    raise ModelLoadedError(f"a model is called {name!r} already")
                if keep_alive is not None:
                    engine.keep(name, keep_alive)
                return served.model
            with contextlib.ExitStack() as undo:

                def store(model: Model) -> Store | None:
                    if (place := self._store(model)) is not None:
                        undo.callback(place.release)
                    return place

                model = engine.load(
                    name,
                    directory,
                    self._files,
                    store,
                    tuning,
                    keep_alive=self._keep_alive if keep_alive is None else keep_alive,
                )
                undo.pop_all()
        log.info("model_loaded", model=name, cached=model.refusal is None)
        if model.refusal is not None:
            log.warning("model_uncached", model=name, reason=model.refusal)
        return model

    def unload(self, name: str, *, force: bool = False) -> Unloaded:
        """Let a model go: see `Engine.unload`; returns once it has gone.

        Raises:
            UnknownModelError: there is no model of this name.
            EngineStoppedError: the node is closing.
        """
        return self._gone(self.engine.unload(name, force=force))

    def start_load(
        self,
        source: str,
        name: str | None = None,
        tuning: Tuning | None = None,
        *,
        keep_alive: float | None = None,
    ) -> Future[Model]:
        """Do as `load`, beside the caller."""
        return _start(lambda: self.load(source, name, tuning, keep_alive=keep_alive))

    def start_unload(self, name: str, *, force: bool = False) -> Future[Unloaded]:
        """Do as `unload`, beside the caller."""
        return _start(lambda: self.unload(name, force=force))

    def settle_tails(self, namespaces: Collection[str] | None, *, drop: bool) -> None:
        """Drop, or store, the ends of replies that are in memory only.

        Args:
            namespaces: ids of those that are meant; None for all.
            drop: forget them; else they are stored.

        Raises:
            EngineStoppedError: the node is closing.
        """
        settle = self.engine.drop_tails if drop else self.engine.store_tails
        for name, one in self.engine.served.items():
            store = one.store
            if store is None:
                continue
            if namespaces is None or store.namespace.id in namespaces:
                with contextlib.suppress(UnknownModelError):  # unloaded meanwhile
                    settle(name)

    def _store(self, model: Model) -> Store | None:
        if model.identity is None or self._block_size is None:
            return None
        of = (model.identity, DEFAULT_SCOPE, self._block_size)
        namespace = Namespace.of(*of)
        # Not when the cache came back, which it may long after.
        loaded = int(time.time())

        def prepare(cache: Cache) -> None:
            source = str(model.directory)
            cache.namespace(*of, model=model.name, source=source, loaded=loaded)
            self._configure(cache, namespace, model.name)

        tokenizer = parse_digest(model.tokenizer_digest)
        self._known.add(Local(model.identity, tokenizer, of[2], model.name))
        self._book.loaded.add(namespace.id, model.name)
        try:
            end = self._volume.arrange(prepare)
        except BaseException:
            self._book.loaded.remove(namespace.id, model.name)
            raise

        def release() -> None:
            end()
            self._book.loaded.remove(namespace.id, model.name)

        return Store(
            volume=self._volume,
            namespace=namespace,
            local=self._local,
            release=release,
        )

    def _configure(self, cache: Cache, namespace: Namespace, name: str) -> None:
        settings = self._book.settings(namespace.id, name, namespace.scope)
        cache.configure(namespace.id, settings)

    def _gone(self, left: Left) -> Unloaded:
        reclaimed = None
        if left.store is not None:
            left.store.release()
            reclaimed = self._reclaim(left.store.namespace, left.name)
        gone = Unloaded(name=left.name, weight_bytes=left.nbytes, reclaimed=reclaimed)
        log.info(
            "model_unloaded",
            model=gone.name,
            weight_bytes=gone.weight_bytes,
            reclaimed=reclaimed is not None,
        )
        return gone

    def reclaim_rest(self) -> Freed:
        """Clear what could not be when its model went, and is held no more."""
        total = Freed()
        for namespace, name in tuple(self._unreclaimed.values()):
            if (cleared := self._reclaim(namespace, name)) is not None:
                nodes = {RemovalReason.RECLAIMED: cleared.removed_segments}
                total += Freed(
                    cleared.freed_bytes, nodes if any(nodes.values()) else {}
                )
        return total

    def _reclaim(self, namespace: Namespace, name: str) -> Cleared | None:
        """Clear what no model uses any more, where that is set; None if it stays.

        What another model uses is from now on what is set about the other one.
        """
        with self._loading:
            self._unreclaimed.pop(namespace.id, None)
            stores = [one.store for one in self.engine.served.values()]
            used = any(one and one.namespace.id == namespace.id for one in stores)
            try:
                cache = self._volume.cache
                if used:
                    self._configure(cache, namespace, name)
                    return None
                if not cache.settings(namespace.id).reclaim_on_unload:
                    return None
                cleared = cache.administration.clear(
                    [namespace.id], reason=RemovalReason.RECLAIMED
                )
            except KvportError as error:
                # What is left is evicted as it ages; the model has gone in any case.
                log.warning("reclaim_failed", reason=error.code)
                return None
            if any(cleared.kept.values()):
                self._unreclaimed[namespace.id] = (namespace, name)
            return cleared


def _start(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    threading.Thread(target=settle, args=(future, work), daemon=True).start()
    return future
