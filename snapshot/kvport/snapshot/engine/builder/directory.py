"""Directories that appear complete or not at all."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvport.snapshot.errors import ModelBuildError


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A directory beside `directory`, renamed to it when the block ends well.

    Yields:
        An empty directory to fill. It goes away if the block raises.

    Raises:
        ModelBuildError: something is at `directory` already, an empty directory aside.
    """
    if directory.exists() and not (directory.is_dir() and _is_empty(directory)):
        raise ModelBuildError("the directory exists already and is not empty")
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    new = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}")
    new.mkdir()
    try:
        yield new
        # An empty directory may be replaced; one that was filled meanwhile may not.
        new.rename(directory)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _is_empty(directory: Path) -> bool:
    return next(directory.iterdir(), None) is None
