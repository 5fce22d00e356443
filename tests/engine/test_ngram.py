"""Prompt lookup proposes what followed the longest, then latest, earlier occurrence."""

import random

import pytest

from kvport.snapshot.engine.drafting.ngram import NgramDrafter


def looked_up(tokens, count):
    """The definition, by looking through the whole text."""
    for size in range(8, 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[-size:]:
                copied = tokens[:]
                for i in range(count):
                    copied.append(copied[end + i])
                return copied[len(tokens) :]
    return []


@pytest.mark.parametrize("vocabulary", [2, 4, 30, 100_000])
@pytest.mark.parametrize("seed", range(3))
def test_a_growing_text_gives_what_the_definition_says(vocabulary, seed):
    generator = random.Random(seed)
    motifs = [generator.choices(range(vocabulary), k=k) for k in (3, 5, 9, 14)]
    drafter, tokens = NgramDrafter(), []
    for _ in range(60):
        tokens += generator.choice([*motifs, [generator.randrange(vocabulary)]])
        count = generator.randint(1, 9)
        assert drafter.propose(tokens, count) == looked_up(tokens, count)


def test_the_longest_match_wins_over_a_later_one():
    tokens = [1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3]
    assert NgramDrafter().propose(tokens, 1) == [40]


def test_the_latest_of_equal_matches_wins():
    assert NgramDrafter().propose([1, 2, 40, 1, 2, 50, 1, 2], 1) == [50]


def test_a_text_that_repeats_itself_is_copied_past_its_end():
    assert NgramDrafter().propose([5, 6, 7, 5, 6, 7], 8) == [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4], [1, 2, 3, 2]])
def test_nothing_is_proposed_where_nothing_occurred_before(tokens):
    assert NgramDrafter().propose(tokens, 4) == []


def test_a_long_prompt_is_read_once():
    class Counted(list):
        read = 0

        def __getitem__(self, place):
            found = super().__getitem__(place)
            Counted.read += len(found) if isinstance(place, slice) else 1
            return found

    tokens = Counted(random.Random(1).choices(range(50_000), k=100_000))
    drafter = NgramDrafter()
    drafter.propose(tokens, 8)
    assert Counted.read <= len(tokens) + 8
    Counted.read = 0
    for step in range(10):
        tokens.append(step)
        drafter.propose(tokens, 8)
    assert Counted.read <= 10 * (8 + 1 + 8)
