"""`docs/errors.md`, from the codes' own table: `python -m kvport.api.errors_page`."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator

import kvport.api.errors
import kvport.snapshot.errors  # noqa: F401 - so that their codes are known
from kvport.api import cli
from kvport.api.problems import STATUS
from kvport.manifest.errors import KvportError, all_codes

_HEAD = """\
# Errors

Every error has a stable code. Over HTTP it comes as a problem (RFC 9457,
`application/problem+json`) with `type`, `title` (the cause), `status`, `detail`, `code`
and, where something has a name, `fields`. Below /v1 the same body has a member `error`
as clients of OpenAI's API read it: `message` (the detail), `type` and `code` (the code)
and `param` (the first of `fields`, or null). The command line prints code, detail and
what to do, and with `--json` the same as JSON; `kvport.api.client` raises
`ProblemError`.

After a refused import (408, 413, 422, 507) nothing was admitted. A stream of tokens
that fails on the way ends with an event `error`, whose data is the same body. An export
that fails on the way breaks the connection off: its body is shorter than its
Content-Length. A server that stops ends every stream with `shutting_down`, answers
other requests with it, and breaks exports off.

This page is made by `python -m kvport.api.errors_page`.

| Code | HTTP status | Cause | What to do |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The page, as Markdown."""
    return _HEAD + "".join(_rows())


def known() -> Iterator[type[KvportError]]:
    """All of kvport's own error classes that have a code, sorted by it."""
    for module in pkgutil.iter_modules(cli.__path__, f"{cli.__name__}."):
        importlib.import_module(module.name)
    return (cls for cls in all_codes() if cls.__module__.startswith("kvport."))


def _rows() -> Iterator[str]:
    for cls in known():
        status = STATUS.get(cls.code, "not over HTTP")
        yield f"| `{cls.code}` | {status} | {cls.cause} | {cls.advice} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
