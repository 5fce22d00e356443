"""The whole demonstration, for one directory of work."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvport.api.demo.story import Outcome, Say, Subject, tell
from kvport.snapshot.engine.builder import build_model

SUBJECTS: Final = (
    Subject(model="llama", kind="dense", characters=4000),
    Subject(model="qwen3_5", kind="hybrid", characters=4000),
    Subject(model="gemma3_text", kind="window", characters=6000),
)
"""One model for each kind of layer."""


def run(
    work: Path, say: Say, subjects: Sequence[Subject] = SUBJECTS
) -> Iterator[Outcome]:
    """Build each model, tell its story, and yield what came out.

    Args:
        work: a directory for models, homes and artifacts; the caller's to remove.
        say: told what happens next.
        subjects: the models.

    Raises:
        KvportError: a step was refused.
    """
    for subject in subjects:
        say(f"{subject.model}: building a tiny model with random weights")
        directory = work / "models" / subject.model
        build_model(subject.model, directory)
        yield tell(subject, directory, work / subject.model, say)
