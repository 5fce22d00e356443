"""What a user's text names: a model's directory, or something else.

In: text from a request or a command line, whatever it is. Out: what is there, or None.
"""

from pathlib import Path


def path_at(source: str) -> Path | None:
    """Where there is something at this path, links resolved; None if there is nothing.

    Nothing is at text that can be no path: too long, with a NUL, of nobody's home.
    """
    try:
        path = Path(source).expanduser()
        return path.resolve() if source and path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def directory_at(source: str) -> Path | None:
    """The same if it is a directory."""
    path = path_at(source)
    return path if path is not None and path.is_dir() else None
