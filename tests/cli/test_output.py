"""Sizes in and out, and how errors are told."""

import pytest
import rich_click as click

from kvport.api.cli.options import SIZE
from kvport.api.cli.output import report
from kvport.api.errors import BadRequestError
from kvport.manifest.errors import BindingMismatchError
from kvport.manifest.identity import fingerprint
from kvport.snapshot.units import format_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1500", 1500),
        ("1500B", 1500),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("2k", 2048),
        ("1.5GiB", 3 << 29),
        ("1.5 GB", 1_500_000_000),
        ("8G", 8 << 30),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_are_read(text, size):
    assert SIZE.convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "8 gigs", "1,5G", "0", "0.1"])
def test_other_texts_are_no_sizes(text):
    with pytest.raises(click.BadParameter):
        SIZE.convert(text, None, None)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 30, "5.0 GiB"),
        (3000 << 40, "3000.0 TiB"),
    ],
)
def test_sizes_are_written(size, text):
    assert format_bytes(size) == text


def test_a_fingerprint_is_128_bits_in_groups():
    text = fingerprint("ed25519:" + "0123456789abcdef" * 4)
    assert text == "0123 4567 89ab cdef 0123 4567 89ab cdef"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (BindingMismatchError("elsewhere", fields=["mlx_lm"]), "  differs: mlx_lm"),
        (BadRequestError("wrong", fields=["top_p"]), "  field: top_p"),
        (BadRequestError("wrong", fields=["top_p", "seed"]), "  fields: top_p, seed"),
        (BadRequestError("top_p is wrong", fields=["top_p"]), None),
    ],
)
def test_fields_are_shown_once_and_called_what_they_are(capsys, error, line):
    report(error, click.Context(click.Command("any")))
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"error[{error.code}]: {error.message}"
    assert rest == [*([line] if line else []), f"  {error.advice}"]
