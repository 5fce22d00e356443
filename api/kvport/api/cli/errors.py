"""Errors of the command line itself; the base is in `kvport.manifest.errors`."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvport.api.errors import NoServerError
from kvport.manifest.errors import KvportError


class LocalFileError(KvportError):
    """A file that the user named cannot be read or written, or holds something else.

    Alone of all errors it names a path: it is told to the user who gave it, and never
    crosses HTTP.
    """

    code = "local_file"
    cause = "A file or directory of this machine cannot be used as it was asked for."
    advice = "Check the path, its permissions and content, and the space that is left."

    @classmethod
    def of(cls, error: OSError) -> "LocalFileError":
        """What the system said."""
        name = error.filename
        if isinstance(name, (str, os.PathLike)):
            return cls.at(os.fspath(name), error)
        return cls(error.strerror or "a file cannot be used")

    @classmethod
    def at(cls, path: str | os.PathLike[str], error: OSError) -> "LocalFileError":
        """The same, of the file that the user named, whatever stood in for it."""
        return cls(f"{os.fspath(path)}: {error.strerror or 'cannot be used'}")


class NoHomeError(KvportError):
    """The home does not exist, so there are no keys."""

    code = "no_home"
    cause = "There is no home, and so no key, at this place yet."
    advice = "Make it with `kvport keys init`, or name the right one with --home."


class NotListedError(KvportError):
    """A key that is to be removed is not in the trust list."""

    code = "not_listed"
    cause = "The trust list has no such key."
    advice = "See `kvport trust list` for names and fingerprints."


class FingerprintError(KvportError):
    """A key is not the one whose fingerprint was compared."""

    code = "fingerprint"
    cause = "The key does not have the fingerprint that the other machine shows."
    advice = "Trust nothing yet: get the key again, and ask who answered for it."


class PairingError(KvportError):
    """Another machine did not tell its key over ssh."""

    code = "pairing"
    cause = "The other machine could not be asked for its key."
    advice = "Try `ssh HOST kvport keys show` by hand; kvport must be installed there."


class ModelNotNamedError(KvportError):
    """A server has not exactly one model, and none was named."""

    code = "model_not_named"
    cause = "The server does not hold exactly one model, and none was named."
    advice = "Name one with --model; `kvport models list` shows them."


class NoModelError(KvportError):
    """A server has no model at all; the message says which it had."""

    code = "no_model"
    cause = "The server holds no model now."
    advice = "Load one with `kvport models load PATH`; a request does not."


class NoServerHereError(NoServerError):
    """No server runs on the home that was looked at; the message names it."""

    advice = "Start one as above, or name a running one with --url."


def check_readable(path: Path) -> None:
    """Refuse a file that cannot be read, before anything else is found wanting.

    Raises:
        LocalFileError: it is not there, is a directory, or may not be read.
    """
    if path == Path("-"):
        return
    try:
        # Not opened: a pipe can be read once.
        if not stat.S_ISDIR(path.stat().st_mode) and os.access(path, os.R_OK):
            return
        with path.open("rb"):
            pass
    except OSError as error:
        raise LocalFileError.at(path, error) from error


@contextlib.contextmanager
def naming(subject: str | Path) -> Iterator[None]:
    """Put what the user named in front of the messages of errors about it.

    Errors cross HTTP without paths; here they are told to whoever gave the path.
    """
    try:
        yield
    except KvportError as error:
        shown = "standard input" if subject == Path("-") else subject
        error.message = f"{shown}: {error.message}"
        error.args = (error.message,)
        raise
