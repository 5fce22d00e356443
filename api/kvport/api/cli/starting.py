"""What is known of a server before anything heavy is imported; its home is claimed.

A client that finds the home claimed waits for the server instead of missing it.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import rich_click as click

from kvport.api.cli.errors import naming
from kvport.api.cli.per_model import PointSettings
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.engine.requests import Policy
from kvport.snapshot.engine.source import directory_at, path_at
from kvport.snapshot.errors import HomeInUseError, ModelLoadError
from kvport.snapshot.home_lock import lock
from kvport.snapshot.state.kv_form import KvForm

_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@attrs.frozen
class Source:
    """A model to serve: what requests call it, and its directory or Hub id."""

    name: str
    source: str


@attrs.frozen(kw_only=True)
class Start:
    """The arguments of a server, each checked by itself."""

    home: Path
    sources: Sequence[Source]
    cache_root: Path | None
    cap_bytes: int | None
    free_floor: int | None
    host: str
    port: int
    policy: Policy
    chunk: int
    points: Mapping[str, PointSettings]
    """By the name of the model, or `ANY`."""
    drafts: Mapping[str, DraftSource | None]
    """Likewise."""
    keep_alives: Mapping[str, float]
    """Likewise, in seconds."""
    block_size: int
    cache_enabled: bool
    live_bytes: int | None
    kv_form: KvForm | None
    as_json: bool


def named(model: str) -> Source:
    """The source that a `--model` means; a directory may have `=` in its name.

    Raises:
        BadParameter: not `NAME=PATH`.
        ModelLoadError: neither a directory nor the form of a Hub id.
    """
    name, equals, source = model.partition("=")
    if not equals or directory_at(model):
        name, source = "", model
    elif not name or not source:
        raise click.BadParameter(f"{model!r} is not NAME=PATH", param_hint="--model")
    if (directory := directory_at(source)) is not None:
        return Source(name or directory.name, source)
    if path_at(source) is not None or not _HUB_ID.fullmatch(source):
        raise ModelLoadError(f"no model is at {source}: there is no such directory")
    return Source(name or source.rpartition("/")[2], source)


class Claim:
    """The lock of a home, which the node takes over."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self.is_void = False
        """Whether what was made in the home is of no use, after the hand-over too."""

    @property
    def held(self) -> bool:
        """Whether the home was not handed over yet."""
        return self._descriptor is not None

    def release(self) -> None:
        """Free the lock, for whoever owns the home from now on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def claimed(home: Path) -> Iterator[Claim]:
    """Hold a home's lock until it is released; make the home if there is none.

    A home that was made is removed if the block fails before the release, or after it
    if the claim was declared void, and nobody else has taken the home.

    Raises:
        HomeInUseError: another process runs on the home.
    """
    made = not home.exists()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with naming(home):
        claim = Claim(lock(home))
    try:
        yield claim
    except BaseException:
        if made and claim.held:
            (home / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # if somebody else has put files there
                home.rmdir()
        elif made and claim.is_void:
            with contextlib.suppress(HomeInUseError, OSError):
                again = Claim(lock(home))
                shutil.rmtree(home)
                again.release()
        raise
    finally:
        claim.release()
