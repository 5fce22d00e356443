"""One running node: home, cache, engine and transfer, wired together.

A node owns its home (one process at a time) and its cache root. Everything that the
API and the command line do goes through here; nothing here knows of HTTP.
"""

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

import attrs
import structlog

from kvport.manifest.digests import ArtifactId
from kvport.manifest.nodes import NodeId
from kvport.manifest.tokens import BLOCK_SIZE, encode_tokens
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.records import Namespace
from kvport.snapshot.engine.local_identity import FileDigests
from kvport.snapshot.engine.models import Model, locate
from kvport.snapshot.engine.requests import Policy, Request, Sink
from kvport.snapshot.engine.restore import selection
from kvport.snapshot.engine.runner import Store
from kvport.snapshot.engine.scheduler import Engine, Ticket
from kvport.snapshot.engine.template import Rendered, render_chat, render_text
from kvport.snapshot.engine.tuning import Tuning
from kvport.snapshot.errors import (
    BadPromptError,
    CacheOffError,
    HomeInUseError,
    SettingError,
)
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.remembered import Remembered
from kvport.snapshot.state.untyped import Tokenizer
from kvport.snapshot.transfer.exporter import Export, Issue, open_export
from kvport.snapshot.transfer.importer import Import, LocalModel
from kvport.snapshot.transfer.kept import Artifacts
from kvport.snapshot.transfer.ledger import Ledger

log = structlog.get_logger(__name__)

DEFAULT_SCOPE: Final = "default"


@attrs.frozen(kw_only=True)
class NodeSettings:
    """How to run a node.

    Attributes:
        home: keys, trust list, ledger.
        cache_root: the paged cache; below the home unless it is given.
        cap_bytes: hard limit of the cache root; None is half of (free + ours).
        block_size: tokens in a block.
        policy: what requests get that do not name one.
        tuning: the scheduler's settings.
        cache_enabled: whether state is kept at all.
    """

    home: Path
    cache_root: Path | None = None
    cap_bytes: int | None = None
    block_size: int = BLOCK_SIZE
    policy: Policy = Policy.NEAREST
    tuning: Tuning = attrs.field(factory=Tuning)
    cache_enabled: bool = True


@attrs.frozen(kw_only=True)
class Prompt:
    """What to run or export: exactly one of text, tokens and messages."""

    text: str | None = None
    tokens: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] | None = None


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


def rendered(tokenizer: Tokenizer, prompt: Prompt, *, closed: bool = False) -> Rendered:
    """Token ids of a prompt: see `Node.render`.

    Raises:
        BadPromptError: the prompt cannot be rendered.
    """
    if prompt.messages is not None:
        return render_chat(
            tokenizer,
            prompt.messages,
            tools=prompt.tools,
            options=prompt.options,
            open_reply=not closed,
        )
    if prompt.text is not None:
        return render_text(tokenizer, prompt.text)
    if prompt.tokens is not None:
        return Rendered(list(prompt.tokens), None)
    raise BadPromptError("a prompt is a text, token ids or messages")


class Node:
    """A running node; `open` makes one, `close` ends it."""

    def __init__(
        self,
        *,
        settings: NodeSettings,
        keyring: Keyring,
        cache: Cache,
        ledger: Ledger,
        engine: Engine,
        ending: contextlib.ExitStack,
    ) -> None:
        self.settings = settings
        self.keyring = keyring
        self.cache = cache
        self.ledger = ledger
        self.engine = engine
        self._ending = ending
        self._files = FileDigests(settings.home / "model-digests.json")
        self._signer = keyring.signing_key()
        self.key_id = self._signer.public.key_id
        self.artifacts = Artifacts(
            cache=cache,
            ledger=ledger,
            scope=DEFAULT_SCOPE,
            key=self._signer.public,
            now=_now,
        )

    @classmethod
    def open(cls, settings: NodeSettings) -> Self:
        """Take the home, open its cache, start the engine.

        Raises:
            HomeInUseError: another process runs on this home.
            KeyFileError: a key file is not private.
            KvportError: the cache root cannot be used, or mlx-lm is not the pinned one.
        """
        keyring = Keyring(settings.home)
        keyring.create()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, _lock(settings.home))
            ledger = Ledger(settings.home / "state.sqlite")
            undo.callback(ledger.close)
            # A known root that is not there is a volume that is not mounted: it must
            # not be made again as an empty directory in its place.
            roots = Remembered(settings.home / "cache-roots.json")
            root = (settings.cache_root or settings.home / "cache").absolute()
            cache = Cache.open(
                root,
                cap_bytes=settings.cap_bytes,
                on_removed=ledger.record_removed,
                expected_root=roots.get(str(root)),
            )
            undo.callback(cache.close)
            roots.put(str(root), cache.root_id)
            ledger.reconcile(cache)
            engine = Engine(settings.tuning)
            undo.callback(engine.close)
            return cls(
                settings=settings,
                keyring=keyring,
                cache=cache,
                ledger=ledger,
                engine=engine,
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
        self, source: str, name: str | None = None, tuning: Tuning | None = None
    ) -> Model:
        """Load a model from a directory or by its Hugging Face id.

        Args:
            source: the directory or id.
            name: what requests call it; the last part of the source if None.
            tuning: of this model, with the node's chunk; the node's if None.

        Raises:
            ModelLoadError: there is no such model, or mlx-lm cannot load it.
            UnsupportedModelError: mlx-lm cannot batch it.
            SettingError: another model has its name.
        """
        found, directory = locate(source)
        name = name or found
        if name in self.engine.models:
            raise SettingError(f"two models are called {name!r}; name one NAME=PATH")
        model = self.engine.load(name, directory, self._files, self._store, tuning)
        log.info("model_loaded", model=name, cached=model.refusal is None)
        if model.refusal is not None:
            log.warning("model_uncached", model=name, reason=model.refusal)
        return model

    def _store(self, model: Model) -> Store | None:
        if model.identity is None or not self.settings.cache_enabled:
            return None
        namespace = self.cache.namespace(
            model.identity, DEFAULT_SCOPE, self.settings.block_size
        )
        return Store(cache=self.cache, namespace=namespace, local=self.key_id)

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

    def probe(self, name: str, request: Request) -> ProbeResult:
        """What a request would restore now; nothing is loaded or computed."""
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
        match = self.cache.match(namespace, tokens, chosen)
        return ProbeResult(
            prompt_tokens=length,
            stored_tokens=self.cache.longest(namespace, tokens),
            restorable_tokens=match.position if match else 0,
        )

    def export(
        self, name: str, tokens: Sequence[int], *, compress: bool = False
    ) -> Export:
        """Open an export of the longest restorable prefix of these tokens.

        Args:
            name: the model.
            tokens: ids.
            compress: whether blobs are encoded that are smaller so.

        Raises:
            NothingRestorableError: a subclass says why.
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
        )
        return open_export(
            self.cache, self.ledger, namespace, encode_tokens(tokens), issue
        )

    def path_of(self, artifact: str | None) -> frozenset[NodeId] | None:
        """The nodes that a request for one artifact may restore; None for all.

        Raises:
            ArtifactUnknownError: it was neither kept nor admitted here.
            ArtifactGoneError: its state was removed since.
        """
        return None if artifact is None else self.artifacts.nodes(ArtifactId(artifact))

    def start_import(self, model: str | None = None) -> Import:
        """Begin an import; feed it the container's bytes."""
        return Import(
            cache=self.cache,
            ledger=self.ledger,
            models=self.local_models(model),
            trust=self.keyring.load_trust,
            local=self.key_id,
        )

    def local_models(self, only: str | None = None) -> list[LocalModel]:
        """The models that an artifact may be for."""
        names = [only] if only is not None else list(self.engine.models)
        found = []
        for name in names:
            model, store = self.engine.model(name), self.engine.store(name)
            if store is not None and model.identity is not None:
                found.append(LocalModel(name, model.tokenizer_digest, store.namespace))
        return found

    def _namespace(self, name: str) -> Namespace:
        store = self.engine.store(name)
        if store is None:
            reason = self.engine.model(name).refusal or "the cache is switched off"
            raise CacheOffError(f"the model {name!r} runs without the cache: {reason}")
        return store.namespace


def _lock(home: Path) -> int:
    descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # Clients hold the lock for an instant when they ask whether there is an owner.
    for patience in (0.05, 0.1, 0.2, 0.4, None):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if patience is None:
                os.close(descriptor)
                raise HomeInUseError("another process runs on this home") from error
            time.sleep(patience)
        else:
            break
    return descriptor


def _now() -> datetime:
    return datetime.now(UTC)
