"""The prompt of a command: an argument or one of three kinds of files.

* PROMPT or --prompt-file: a text, continued as it stands; PROMPT `-` reads it from
  standard input, as every file named `-` does.
* --messages-file: a chat, as a JSON list of messages, or as an object with `messages`
  and, if need be, `tools` and `chat_template_kwargs`.
* --tokens-file: a JSON list of token ids.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

import rich_click as click

from kvport.api.arguments import PromptArguments
from kvport.api.cli.errors import LocalFileError, naming
from kvport.api.cli.options import FILE

_CHAT: Final = frozenset({"messages", "tools", "chat_template_kwargs"})
_STANDARD: Final = Path("-")


def prompt_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument and the three options, as one parameter `prompt`."""

    @functools.wraps(command)
    def with_prompt(
        *,
        text: str | None,
        prompt_file: Path | None,
        messages_file: Path | None,
        tokens_file: Path | None,
        **rest: object,
    ) -> None:
        files = {
            "prompt_file": prompt_file,
            "messages_file": messages_file,
            "tokens_file": tokens_file,
        }
        command(prompt=_prompt(text, files), **rest)

    argument = click.argument("text", metavar="[PROMPT]", required=False)
    return argument(_file_options(with_prompt))


def prompt_file_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the three options alone, as one parameter `prompt`; None without any."""

    @functools.wraps(command)
    def with_prompt(
        *,
        prompt_file: Path | None,
        messages_file: Path | None,
        tokens_file: Path | None,
        **rest: object,
    ) -> None:
        files = {
            "prompt_file": prompt_file,
            "messages_file": messages_file,
            "tokens_file": tokens_file,
        }
        named = any(path is not None for path in files.values())
        command(prompt=_prompt(None, files) if named else None, **rest)

    return _file_options(with_prompt)


def _file_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--tokens-file", type=FILE, help="A JSON list of token ids."),
        click.option(
            "--messages-file",
            type=FILE,
            help="A chat: a JSON list of messages, or an object with `messages` and"
            " `tools`.",
        ),
        click.option("--prompt-file", type=FILE, help="A text, continued as it is."),
    ):
        command = option(command)
    return command


def _prompt(text: str | None, files: dict[str, Path | None]) -> PromptArguments:
    given = {name: path for name, path in files.items() if path is not None}
    if len(given) + (text is not None) != 1:
        raise click.UsageError(
            "Name one prompt: an argument, --prompt-file, --messages-file or"
            " --tokens-file."
        )
    if text is not None:
        return {"prompt": _read(_STANDARD) if text == str(_STANDARD) else text}
    ((name, path),) = given.items()
    content = _read(path)
    if name == "prompt_file":
        return {"prompt": content}
    with naming(path):
        value = _parsed(content)
        return _chat(value) if name == "messages_file" else _tokens(value)


def _read(path: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if path == _STANDARD else path.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise LocalFileError.at(path, error) from error
    except UnicodeDecodeError as error:
        with naming(path):
            raise LocalFileError("not text in UTF-8") from error


def _parsed(content: str) -> object:
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise LocalFileError(f"not JSON: {where}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise LocalFileError("not JSON that can be read") from error


def _chat(value: object) -> PromptArguments:
    chat = {"messages": value} if isinstance(value, list) else value
    if not isinstance(chat, dict) or not {"messages"} <= chat.keys() <= _CHAT:
        raise LocalFileError(
            "neither a list of messages nor an object with `messages` and, if need be,"
            " `tools` and `chat_template_kwargs`"
        )
    return cast("PromptArguments", chat)


def _tokens(value: object) -> PromptArguments:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise LocalFileError("not a list of token ids")
    return {"tokens": value}
