"""`kvport convert`: prompt cache files of mlx-lm to artifacts and back."""

import logging
import tempfile
from pathlib import Path
from typing import Final

import attrs
import rich_click as click

from kvport.api.arguments import PromptArguments
from kvport.api.cli.errors import (
    LocalFileError,
    NoHomeError,
    check_readable,
    naming,
)
from kvport.api.cli.logs import log_to_stderr
from kvport.api.cli.options import home_option, kv_form_options
from kvport.api.cli.output import json_option, print_json
from kvport.api.cli.prompts import prompt_file_options
from kvport.api.files import open_destination
from kvport.manifest.limits import BLOCK_TOKENS
from kvport.manifest.tokens import BLOCK_SIZE
from kvport.snapshot.convert import Converted, is_artifact, unwrap, wrap
from kvport.snapshot.prompts import Prompt
from kvport.snapshot.state.kv_form import KvForm
from kvport.snapshot.state.prompt_cache_writer import Form
from kvport.snapshot.units import format_bytes
from kvport.snapshot.workbench import Workbench

_FORMS: Final = [form.value for form in Form]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Where the other file goes.",
)
@click.option(
    "--model",
    metavar="DIR|ID",
    required=True,
    help="The directory, or the Hugging Face id, of the model that the state is of.",
)
@prompt_file_options
@click.option(
    "--form",
    type=click.Choice(_FORMS),
    default=Form.NEWER.value,
    show_default=True,
    help="The version of mlx-lm that is to read a prompt cache file: up to 0.31, or"
    " since 0.32.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1, BLOCK_TOKENS),
    default=BLOCK_SIZE,
    show_default=True,
    help="Tokens in a block, as of the server with the artifact.",
)
@kv_form_options
@home_option
@json_option
def convert(
    file: Path,
    *,
    output: Path,
    model: str,
    prompt: PromptArguments | None,
    form: str,
    block_size: int,
    kv_form: KvForm | None,
    home: Path,
    as_json: bool,
) -> None:
    """From and to prompt cache files of mlx-lm.

    If FILE is a prompt cache of `mlx_lm.cache_prompt`, writes it as a file to import,
    signed with the home's key. Name the prompt that it is of: it holds the prompt's
    first tokens. For models with a chat template `cache_prompt` makes a user's message
    of its prompt: name it with --messages-file. A part of the prompt is computed, to
    see that it is the one; all of it where layers keep no rows (recurrent layers only),
    and then the cache must be of the whole prompt.

    If FILE is one that `kvport export` wrote, verifies it under the home's trust list,
    or as the home's own, and writes its state as a prompt cache, which mlx-lm loads and
    continues.
    """
    log_to_stderr(logging.WARNING)
    check_readable(file)
    if not home.exists():
        raise NoHomeError(f"the home {home} does not exist")
    if output.is_dir() or not output.parent.is_dir():
        reason = "is a directory" if output.is_dir() else "no such directory"
        raise LocalFileError(f"{output}: {reason}")
    try:
        with file.open("rb") as source:
            artifact = is_artifact(source)
            if artifact == (prompt is not None):
                raise click.UsageError(
                    "An artifact names its own prompt."
                    if artifact
                    else f"{file} is no file of `kvport export`. If it is a prompt"
                    " cache, name its prompt: --prompt-file, --messages-file or"
                    " --tokens-file."
                )
            if output.exists() and output.samefile(file):
                raise LocalFileError(f"{output}: is the file to convert")
            with (
                # Beside the output, where there must be as much room.
                tempfile.TemporaryDirectory(
                    prefix=".kvport-convert-", dir=output.parent
                ) as work,
                Workbench.open(
                    model,
                    home=home,
                    work=Path(work),
                    kv_form=kv_form,
                    block_size=block_size,
                ) as bench,
                open_destination(output) as to,
                naming(file),
            ):
                if prompt is None:
                    done = unwrap(bench, source, Form(form), to)
                else:
                    done = wrap(bench, source, _prompt(prompt), to)
    except OSError as error:
        raise LocalFileError.of(error) from error
    _tell(done, output, as_json=as_json)


def _prompt(arguments: PromptArguments) -> Prompt:
    return Prompt(
        text=arguments.get("prompt"),
        tokens=arguments.get("tokens"),
        messages=arguments.get("messages"),
        tools=arguments.get("tools"),
        options=arguments.get("chat_template_kwargs"),
    )


def _tell(done: Converted, output: Path, *, as_json: bool) -> None:
    size = output.stat().st_size
    if as_json:
        print_json(attrs.asdict(done) | {"size_bytes": size, "file": str(output)})
    else:
        click.echo(
            f"converted the state of {done.tokens} tokens ({format_bytes(size)})"
            f" to {output}"
        )
