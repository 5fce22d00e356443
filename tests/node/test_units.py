import pytest

from kvport.snapshot.units import parse_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1.5GB", 1_500_000_000),
        ("8GiB", 8 << 30),
        ("8g", 8 << 30),
        ("2 K", 2048),
    ],
)
def test_a_size_is_read_as_people_mean_it(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1x", "1e9", "GB", "0.1", "9" * 400])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("15m", 900), ("12h", 43_200), ("2w", 1_209_600)],
)
def test_a_duration_is_read_in_seconds(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0d", "-1s", "1.5h", "1y", "9" * 400])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="duration"):
        parse_seconds(text)
