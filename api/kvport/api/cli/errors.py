"""Errors of the command line itself; the base is in `kvport.manifest.errors`."""

from kvport.manifest.errors import KvportError


class LocalFileError(KvportError):
    """A file that the user named cannot be read or written.

    Alone of all errors it names a path: it is told to the user who gave it, and never
    crosses HTTP.
    """

    code = "local_file"
    cause = "The operating system refuses a file or directory of this machine."
    advice = "Check the path, its permissions, and the space that is left."

    @classmethod
    def of(cls, error: OSError) -> "LocalFileError":
        """What the system said."""
        reason = error.strerror or "cannot be used"
        name = f"{error.filename}: " if isinstance(error.filename, str) else ""
        return cls(f"{name}{reason}")


class NoHomeError(KvportError):
    """The home does not exist, so there are no keys."""

    code = "no_home"
    cause = "There is no home, and so no key, at this place yet."
    advice = "Make it with `kvport keys init`, or name the right one with --home."


class NotListedError(KvportError):
    """A key that is to be removed is not in the trust list."""

    code = "not_listed"
    cause = "The trust list has no such key."
    advice = "See `kvport trust list` for the key ids."


class ModelNotNamedError(KvportError):
    """A server has not exactly one model, and none was named."""

    code = "model_not_named"
    cause = "The server does not hold exactly one model, and none was named."
    advice = "Name one with --model; `kvport models list` shows them."
