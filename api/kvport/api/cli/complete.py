"""`kvport complete`: one completion through a server."""

from collections.abc import Iterable, Iterator
from typing import Final, cast

import attrs
import rich_click as click

from kvport.api.arguments import CompletionArguments, PinArguments, PromptArguments
from kvport.api.cli.connect import chosen, connected
from kvport.api.cli.options import (
    DURATION,
    POLICY,
    Server,
    model_option,
    server_options,
)
from kvport.api.cli.output import json_option, print_json, say
from kvport.api.cli.prompts import prompt_options
from kvport.api.results import Delta, Logprob, Pinned

_UNPINNED: Final = {
    "capacity": "capacity: the cap leaves no room beside what is in use",
    "pin_limit": "pin_limit: pins may cover half of the cap, see `kvport cache pins`",
    "not_restorable": "not_restorable: no restore point is stored there",
}
"""Reasons that need more than a word."""


class Pin(click.ParamType[PinArguments]):
    """Whose pin it is, and for how long: `night=12h`."""

    name = "pin"

    def convert(
        self,
        value: object,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> PinArguments:
        """The owner may hold `=`, the duration does not."""
        owner, equals, duration = str(value).rpartition("=")
        if not equals or not owner:
            self.fail(f"{value!r} is not OWNER=DURATION", param, ctx)
        seconds = DURATION.convert(duration, param, ctx)
        return PinArguments(owner=owner, seconds=seconds)


@click.command()
@prompt_options
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Length of the reply at most.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Of sampling; 0 takes the likeliest token.",
)
@click.option(
    "--policy",
    type=POLICY,
    help="Which stored state may be restored; the server's choice unless given.",
)
@click.option(
    "--no-read", is_flag=True, help="Restore nothing: compute the whole prompt."
)
@click.option("--no-write", is_flag=True, help="Leave nothing behind in the cache.")
@click.option(
    "--ttl",
    type=DURATION,
    metavar="DURATION",
    help="What is stored expires after so long without use, such as 12h.",
)
@click.option(
    "--pin",
    type=Pin(),
    metavar="OWNER=DURATION",
    help="Keep what is stored for so long, whatever else needs room. An owner's later"
    " pin of the same path replaces it.",
)
@click.option(
    "--logprobs",
    type=click.IntRange(0, 20),
    metavar="N",
    help="Report log-probabilities of each token and of the N likeliest ones.",
)
@model_option
@server_options
@json_option
def complete(
    *,
    prompt: PromptArguments,
    max_tokens: int,
    temperature: float,
    policy: str | None,
    no_read: bool,
    no_write: bool,
    ttl: int | None,
    pin: PinArguments | None,
    logprobs: int | None,
    model: str | None,
    server: Server,
    as_json: bool,
) -> None:
    """Complete one prompt through a server.

    Prints the reply as it comes, and then on standard error how much of the prompt was
    restored. PROMPT is a text, or `-` for standard input; for a chat use
    --messages-file.
    """
    given = {
        "policy": policy,
        "read": False if no_read else None,
        "write": False if no_write else None,
        "ttl": ttl,
        "pin": pin,
        "logprobs": logprobs,
    }
    said = {name: value for name, value in given.items() if value is not None}
    # A prompt's fields are a completion's, which mypy does not see.
    arguments = cast("CompletionArguments", {**prompt, **said})
    arguments["max_tokens"] = max_tokens
    arguments["temperature"] = temperature
    with connected(server) as client:
        name = chosen(client, model)
        if as_json:
            print_json(attrs.asdict(client.complete(name, **arguments)))
            return
        deltas = list(_printed(client.stream(name, **arguments)))
    if logprobs is not None:
        for delta in deltas:
            _print_logprobs(delta)
    for delta in deltas:
        if delta.pinned is not None:
            say(_pinned(delta.pinned))
        if delta.usage is not None:
            say(
                f"{delta.usage.cached_tokens} of {delta.usage.prompt_tokens} prompt"
                f" tokens restored, {delta.usage.completion_tokens} generated"
            )


def _printed(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Print each text as it comes; the line ends with the reply, or where it breaks."""
    begun = False
    try:
        for delta in deltas:
            begun = True
            click.echo(delta.text, nl=False)
            yield delta
    finally:
        if begun:
            click.echo()


def _pinned(found: Pinned) -> str:
    """What became of the wish to be pinned, in a line."""
    reason = found.unpinned_reason
    why = f" ({_UNPINNED.get(reason, reason)})" if reason else ""
    if found.pinned_until is None:
        return f"nothing is pinned{why}"
    rest = f", the rest is not{why}" if why else ""
    return (
        f"{found.pinned_tokens} restorable tokens are pinned until"
        f" {found.pinned_until}{rest}"
    )


def _print_logprobs(delta: Delta) -> None:
    """One line per token: id, its log-probability, and the likeliest ones."""
    tops: tuple[tuple[Logprob, ...], ...] = delta.top_logprobs
    for token, logprob, top in zip(delta.tokens, delta.logprobs, tops, strict=True):
        ordered = sorted(top, key=lambda one: one.logprob, reverse=True)
        likeliest = "  ".join(f"{one.token!r} {one.logprob:.4f}" for one in ordered)
        click.echo(f"{token:>7} {logprob:10.4f}  {likeliest}".rstrip())
