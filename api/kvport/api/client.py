"""A typed client of a kvport server; importing it loads neither mlx nor the framework.

    with Client.for_home(home) as client:
        reply = client.complete("llama", messages=[{"role": "user", "content": "Hi"}])
        client.export("llama", Path("talk.kvport"), messages=[...])

* The home's key is sent to the home's own server only, which is checked first.
* Proxies of the environment are not used: they would see the key.
* What the server refuses is raised as `ProblemError`, with the server's code.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Self, TypeVar, Unpack

import httpx
import msgspec

from kvport.api import media
from kvport.api.admin_client import AdminClient
from kvport.api.arguments import (
    CompletionArguments,
    ExportArguments,
    LoadArguments,
    PromptArguments,
    completion_body,
    export_body,
)
from kvport.api.errors import (
    IncompleteError,
    NoServerError,
    UnreachableError,
    WrongServerError,
)
from kvport.api.files import Progress, open_destination, upload
from kvport.api.problems import Problem, ProblemError
from kvport.api.results import (
    Artifact,
    Completion,
    Delta,
    Download,
    ExportInfo,
    Health,
    ImportInfo,
    KeptExport,
    ModelInfo,
    ProbeInfo,
    UnloadedModel,
    UnloadInfo,
)
from kvport.api.run_file import fingerprint, running
from kvport.snapshot.keyring import Keyring

T = TypeVar("T")
D = TypeVar("D", bound=Download)

_TIMEOUT: Final = httpx.Timeout(60, connect=5, read=None)
"""Seconds; a long prompt may be computed for many minutes before the first byte."""


class Client:
    """Requests to one server; safe to use from several threads.

    Any of them raises `UnreachableError` if there is no answer, or it breaks off.
    """

    def __init__(self, url: str, key: str | None) -> None:
        """A client that sends `key`; without one only `health` is answered."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url: Final = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=_TIMEOUT, trust_env=False
        )

    @classmethod
    def for_home(cls, home: Path, url: str | None = None) -> Self:
        """A client of the server that runs on a home, with the home's key.

        Args:
            home: where the keys are.
            url: where the server is, if it is not the one that the home announces.

        Raises:
            NoServerError: no server runs on it.
            WrongServerError: what answers is not the server of this home.
            KeyFileError: the home's keys cannot be read.
        """
        if url is None:
            if (info := running(home)) is None:
                raise NoServerError("no server runs on this home")
            url = info.url
        keyring = Keyring(home)
        expected = fingerprint(keyring.signing_key().public.key_id)
        with cls(url, None) as stranger:
            if stranger.health().home != expected:
                raise WrongServerError("the server at the address has another home")
        return cls(url, keyring.api_key())

    @property
    def admin(self) -> AdminClient:
        """An operator's orders to the server."""
        return AdminClient(self._called)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def health(self) -> Health:
        """That the server is up, and whose it is."""
        return self._get("/healthz", Health)

    def models(self) -> tuple[ModelInfo, ...]:
        """The models that requests may name."""
        listed = self._get("/v1/models", dict[str, Any])["data"]
        return tuple(map(ModelInfo.from_json, listed))

    def unloaded_models(self) -> tuple[UnloadedModel, ...]:
        """Models that were unloaded since the server's start, and are not loaded."""
        listed = self._get("/v1/models", dict[str, Any])["unloaded"]
        return tuple(map(UnloadedModel.from_json, listed))

    def load_model(self, model: str, **arguments: Unpack[LoadArguments]) -> ModelInfo:
        """Have the server load a model; returns once it can be used.

        Args:
            model: a directory of the server's machine, or a Hugging Face id.
            **arguments: what it is called, and for how long it is kept.

        Raises:
            ProblemError: the server refuses; code `model_loaded`, `model_load`.
        """
        body = {"model": model, **arguments}
        return ModelInfo.from_json(
            self._post("/v1/models/load", dict[str, Any], json=body)
        )

    def unload_model(self, name: str, *, force: bool = False) -> UnloadInfo:
        """Have the server unload a model; returns once its memory is free.

        Args:
            name: what it is called.
            force: whether its requests are ended, and not waited for.

        Raises:
            ProblemError: the server refuses; code `unknown_model`.
        """
        body = {"model": name, "force": force}
        return self._post("/v1/models/unload", UnloadInfo, json=body)

    def stats(self) -> dict[str, Any]:
        """Numbers of the cache and of the models: see docs/operations.md.

        `total_bytes` of `cap_bytes`; under `cache` what that is made of, by namespace
        and kind, and what was counted since `since`; under `models` their requests.
        """
        return self._get("/api/cache/stats", dict[str, Any])

    def complete(
        self, model: str, **arguments: Unpack[CompletionArguments]
    ) -> Completion:
        """Continue a prompt, with the time to the first token measured.

        Raises:
            ProblemError: the server refuses.
        """
        began = time.monotonic()
        deltas, first = [], 0.0
        for delta in self.stream(model, **arguments):
            if delta.tokens and not first:
                first = time.monotonic() - began
            deltas.append(delta)
        return Completion.of(deltas, ttft_s=first, total_s=time.monotonic() - began)

    def stream(
        self, model: str, **arguments: Unpack[CompletionArguments]
    ) -> Iterator[Delta]:
        """Continue a prompt; the last delta carries the usage.

        Raises:
            ProblemError: the server refuses, or fails on the way.
        """
        path, body = completion_body(model, arguments)
        with self._streamed("POST", path, json=body) as response:
            for content in _events(response):
                yield Delta.from_json(content)

    def export(
        self,
        model: str,
        to: Path | BinaryIO,
        *,
        progress: Progress | None = None,
        **what: Unpack[ExportArguments],
    ) -> ExportInfo:
        """Write the longest restorable prefix of a prompt as an artifact.

        Args:
            model: its name on the server.
            to: a file, which appears only once it is complete, or a stream.
            progress: called with bytes so far and in total.
            **what: whose state to export, and how.

        Raises:
            ProblemError: the server refuses; code `never_computed` and the like.
            IncompleteError: it broke off: what `to` got, if it is a stream, is void.
        """
        body = export_body(model, what)
        return self._download(
            ExportInfo, "POST", "/api/cache/export", to, progress, json=body
        )

    def keep(self, model: str, **what: Unpack[ExportArguments]) -> KeptExport:
        """Export, but leave the artifact with the server, for `download`.

        Arguments and errors are as of `export`.
        """
        body, headers = export_body(model, what), {"accept": media.JSON}
        return self._post("/api/cache/export", KeptExport, json=body, headers=headers)

    def download(
        self,
        artifact_id: str,
        to: Path | BinaryIO,
        *,
        progress: Progress | None = None,
    ) -> Download:
        """Write a kept artifact; arguments and errors as of `export`."""
        path = f"/api/cache/artifacts/{artifact_id}"
        return self._download(Download, "GET", path, to, progress)

    def import_(
        self,
        source: Path | BinaryIO,
        *,
        model: str | None = None,
        progress: Progress | None = None,
    ) -> ImportInfo:
        """Send an artifact to the server.

        Args:
            source: a file or a stream.
            model: the model it must be for; by default the server finds it.
            progress: called with bytes so far and in total, 0 if that is unknown.

        Raises:
            ProblemError: the server refuses; nothing was admitted.
            OSError: the source cannot be read.
        """
        with upload(source, progress) as (headers, content):
            return self._post(
                "/api/cache/import",
                ImportInfo,
                params={"model": model} if model else {},
                headers={"content-type": media.ARTIFACT, **headers},
                content=content,
            )

    def probe(
        self,
        model: str,
        *,
        policy: str | None = None,
        artifact: str | None = None,
        **prompt: Unpack[PromptArguments],
    ) -> ProbeInfo:
        """What of a prompt is stored, and what a request would restore now.

        Raises:
            ProblemError: the server refuses.
        """
        given = {"policy": policy, "artifact": artifact}
        cache = {name: value for name, value in given.items() if value is not None}
        body = {"model": model, "cache": cache, **prompt}
        return self._post("/api/cache/probe", ProbeInfo, json=body)

    def artifacts(self) -> tuple[Artifact, ...]:
        """Kept exports and admitted imports, newest first."""
        listed = self._get("/api/cache/artifacts", dict[str, Any])
        return msgspec.convert(listed["artifacts"], tuple[Artifact, ...])

    def artifact(self, artifact_id: str) -> Artifact:
        """One artifact.

        Raises:
            ProblemError: `artifact_unknown`, or `artifact_gone`.
        """
        return self._get(f"/api/cache/artifacts/{artifact_id}", Artifact)

    def _called(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        with self._streamed(method, path, **request) as response:
            return _decode(response.read(), dict[str, Any])

    def _get(self, path: str, kind: type[T]) -> T:
        with self._streamed("GET", path) as response:
            return _decode(response.read(), kind)

    def _post(self, path: str, kind: type[T], **request: Any) -> T:
        with self._streamed("POST", path, **request) as response:
            return _decode(response.read(), kind)

    def _download(
        self,
        kind: type[D],
        method: str,
        path: str,
        to: Path | BinaryIO,
        progress: Progress | None,
        **request: Any,
    ) -> D:
        headers = {"accept": media.ARTIFACT}
        with self._streamed(method, path, headers=headers, **request) as response:
            info = kind.from_headers(response.headers)
            with open_destination(to) as file:
                done = 0
                try:
                    for piece in response.iter_raw():
                        file.write(piece)
                        done += len(piece)
                        if progress is not None:
                            progress(done, info.size_bytes)
                except (httpx.RemoteProtocolError, httpx.ReadError) as error:
                    raise IncompleteError("the transfer ended early") from error
                if done != info.size_bytes:
                    raise IncompleteError("the transfer ended early")
        return info

    @contextlib.contextmanager
    def _streamed(
        self,
        method: str,
        path: str,
        **request: Any,
    ) -> Iterator[httpx.Response]:
        """A successful response, its body still to be read."""
        try:
            with self._http.stream(method, path, **request) as response:
                if not response.is_success:
                    raise ProblemError(_decode(response.read(), Problem))
                yield response
        except httpx.HTTPError as error:
            raise UnreachableError("the server does not answer") from error


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        message = "what answers at the address is no kvport server of this version"
        raise UnreachableError(message) from error


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Contents of server-sent events up to `[DONE]`."""
    for line in _lines(response.iter_bytes()):
        if line == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            content = _decode(line[6:], dict[str, Any])
            if "error" in content:
                raise ProblemError(msgspec.convert(content, Problem))
            yield content
    raise UnreachableError("the answer broke off")


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Lines that end in a line feed; text splits at more, some of it within JSON."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
