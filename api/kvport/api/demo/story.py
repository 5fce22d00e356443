"""The story of one model: computed on one server, answered by another.

1. Server A answers a long prompt on an empty cache: *cold*.
2. A answers it again, from what it kept: *hot*.
3. A exports the prompt's state to a file; B, which trusts A's key and shares nothing
   else with it, imports the file.
4. B answers the same prompt: *imported*. It must equal A's hot answer in every bit.
5. B answers the next turn of the conversation.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from kvport.api.client import Client
from kvport.api.demo.answers import identical, max_difference
from kvport.api.demo.conversation import long_prompt, next_turn
from kvport.api.demo.servers import starting_server
from kvport.api.results import Completion
from kvport.manifest.trust import TrustEntry
from kvport.snapshot.keyring import Keyring

REPLY_TOKENS: Final = 32
_TOP: Final = 20

Say = Callable[[str], None]


@attrs.frozen(kw_only=True)
class Subject:
    """A model to show, and how long a prompt makes computing it visibly slow.

    Attributes:
        model: name of the model and its architecture.
        kind: what is special about its state, for people.
        characters: length of the prompt's text; a token each.
    """

    model: str
    kind: str
    characters: int


@attrs.frozen(kw_only=True)
class Outcome:
    """What was measured for one model.

    Attributes:
        model: its name.
        cold_ttft_s: seconds to the first token on an empty cache.
        hot_ttft_s: the same, on the server that had computed the prompt.
        imported_ttft_s: the same, on the server that imported its state.
        artifact_bytes: size of the file.
        export_s: seconds to write it.
        import_s: seconds to verify and admit it.
        prompt_tokens: length of the prompt.
        restored_tokens: of these, restored on the importing server.
        identical_to_hot: whether its answer equals the hot one in every bit.
        max_diff_to_cold: largest difference of log-probabilities to the cold one.
        next_turn_tokens: length of the next turn's prompt.
        next_turn_restored_tokens: of these, restored.
    """

    model: str
    cold_ttft_s: float
    hot_ttft_s: float
    imported_ttft_s: float
    artifact_bytes: int
    export_s: float
    import_s: float
    prompt_tokens: int
    restored_tokens: int
    identical_to_hot: bool
    max_diff_to_cold: float
    next_turn_tokens: int
    next_turn_restored_tokens: int

    @property
    def passed(self) -> bool:
        """Whether everything was restored that can be, and exactly."""
        all_but_last = self.prompt_tokens - 1
        return (
            self.identical_to_hot
            and self.restored_tokens == all_but_last
            and self.next_turn_restored_tokens >= all_but_last
        )

    def to_json(self) -> dict[str, Any]:
        """The fields by their names."""
        return attrs.asdict(self)


def tell(subject: Subject, directory: Path, work: Path, say: Say) -> Outcome:
    """Run the story for one model.

    Args:
        subject: the model.
        directory: its files.
        work: where the two homes and the artifact go.
        say: told what happens next.

    Raises:
        KvportError: a step was refused.
    """
    home_a, home_b = work / "a", work / "b"
    pair(home_a, home_b)
    say(f"{subject.model}: starting two servers with a home each")
    models = [str(directory)]
    with starting_server(home_a, models) as one, starting_server(home_b, models) as two:
        one.await_ready()
        two.await_ready()
        with Client.for_home(home_a) as a, Client.for_home(home_b) as b:
            return _tell(subject, a, b, work / f"{subject.model}.kvport", say)


def pair(home_a: Path, home_b: Path) -> None:
    """Make two homes, of which B trusts A: `keys show` there, `trust add` here."""
    for home in (home_a, home_b):
        home.mkdir(mode=0o700, parents=True)
        Keyring(home).create()
    public = Keyring(home_a).signing_key().public
    Keyring(home_b).add(TrustEntry(public_key=public, name="server A"))


def _tell(subject: Subject, a: Client, b: Client, artifact: Path, say: Say) -> Outcome:
    model = subject.model
    messages = long_prompt(subject.characters)
    say(f"{model}: A computes the prompt")
    cold = _ask(a, model, messages)
    say(f"{model}: A answers again, from its cache")
    hot = _ask(a, model, messages)
    say(f"{model}: A exports, B imports")
    began = time.monotonic()
    exported = a.export(model, artifact, messages=messages)
    exported_at = time.monotonic()
    b.import_(artifact)
    imported_at = time.monotonic()
    say(f"{model}: B answers, and the next turn")
    imported = _ask(b, model, messages)
    following = _ask(b, model, next_turn(messages, imported.text))
    return Outcome(
        model=model,
        cold_ttft_s=round(cold.ttft_s, 4),
        hot_ttft_s=round(hot.ttft_s, 4),
        imported_ttft_s=round(imported.ttft_s, 4),
        artifact_bytes=exported.size_bytes,
        export_s=round(exported_at - began, 4),
        import_s=round(imported_at - exported_at, 4),
        prompt_tokens=imported.prompt_tokens,
        restored_tokens=imported.cached_tokens,
        identical_to_hot=identical(hot, imported),
        max_diff_to_cold=max_difference(cold, imported),
        next_turn_tokens=following.prompt_tokens,
        next_turn_restored_tokens=following.cached_tokens,
    )


def _ask(client: Client, model: str, messages: list[dict[str, Any]]) -> Completion:
    """32 greedy tokens, whatever they say, with all that the server reports of them."""
    return client.complete(
        model,
        messages=messages,
        max_tokens=REPLY_TOKENS,
        temperature=0.0,
        logprobs=_TOP,
        ignore_eos=True,
    )
