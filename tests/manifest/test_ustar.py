import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvport.manifest.errors import ContainerError, LimitExceededError
from kvport.manifest.limits import ENVELOPE_BYTES, GIB
from kvport.manifest.ustar import (
    TRAILER,
    ArchiveFinished,
    Entry,
    EntryData,
    EntryFinished,
    EntryStarted,
    Reader,
    container_size,
    header,
    padding,
)
from tests.manifest.builder import ManifestBuilder, pack

CONTENTS = [
    ("envelope.json", b"{}" * 300),
    ("tokens", b"\x01\x00\x00\x00"),
    ("blobs/blake3/" + "a" * 64, bytes(range(256)) * 2),
    ("blobs/blake3/" + "b" * 64, b""),
]
ARCHIVE = pack(CONTENTS)
ENTRIES = [Entry(name, len(data)) for name, data in CONTENTS]


def read(data, chunk=None, entries=ENTRIES):
    """All contents of a container; raises as the reader does."""
    reader = Reader()
    found = {}
    step = chunk or max(len(data), 1)
    for at in range(0, len(data), step):
        for event in reader.feed(data[at : at + step]):
            note(reader, event, found, entries)
    reader.finish()
    return found


def note(reader, event, found, entries):
    match event:
        case EntryStarted(entry):
            assert entry.name not in found
            found[entry.name] = b""
        case EntryData(view):
            *_, name = found
            found[name] += view
        case EntryFinished(entry):
            *_, name = found
            assert (entry.name, entry.size) == (name, len(found[name]))
            if name == "envelope.json":
                reader.expect(entries[1:])
        case ArchiveFinished():
            found["end"] = b""


def content_ranges():
    at = 0
    for _, data in CONTENTS:
        yield range(at + 512, at + 512 + len(data))
        at += 512 + len(data) + len(padding(len(data)))


DERIVED = sorted(set(range(len(ARCHIVE))).difference(*content_ranges()))


def test_a_container_reads_as_it_was_packed():
    assert read(ARCHIVE) == {**dict(CONTENTS), "end": b""}
    assert len(ARCHIVE) == container_size(ENTRIES)


@given(st.lists(st.integers(1, 1500), min_size=1))
def test_chunks_of_any_length_give_the_same(lengths):
    reader, found, at = Reader(), {}, 0
    while at < len(ARCHIVE):
        for length in lengths:
            for event in reader.feed(memoryview(ARCHIVE)[at : at + length]):
                note(reader, event, found, ENTRIES)
            at += length
    reader.finish()
    assert found == {**dict(CONTENTS), "end": b""}


def test_content_is_passed_on_as_views_of_the_chunk():
    chunk = bytearray(ARCHIVE)
    reader, found, owners = Reader(), {}, []
    for event in reader.feed(chunk):
        note(reader, event, found, ENTRIES)
        if isinstance(event, EntryData):
            owners.append(event.data.obj)
    assert len(owners) == 3
    assert all(owner is chunk for owner in owners)


def test_empty_chunks_change_nothing():
    reader = Reader()
    assert list(reader.feed(b"")) == []
    with pytest.raises(ContainerError):
        reader.finish()


def test_every_single_bit_flip_outside_of_content_is_refused():
    data = bytearray(ARCHIVE)
    for at in DERIVED:
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises((ContainerError, LimitExceededError)):
                read(bytes(data))
            data[at] ^= 1 << bit
    assert read(bytes(data))


def test_truncation_at_every_length_is_refused():
    for length in range(len(ARCHIVE)):
        with pytest.raises(ContainerError):
            read(ARCHIVE[:length])


@pytest.mark.parametrize("extra", [b"\0", b"x", TRAILER, ARCHIVE])
def test_appended_bytes_are_refused(extra):
    with pytest.raises(ContainerError, match="follow the end"):
        read(ARCHIVE + extra)
    with pytest.raises(ContainerError, match="follow the end"):
        read(ARCHIVE + extra, chunk=len(ARCHIVE))


def with_header(index, **fields):
    """The archive with one header changed, its checksum made right again."""
    spans = {"name": (0, 100), "mode": (100, 108), "size": (124, 136)}
    spans |= {"type": (156, 157), "link": (157, 257), "prefix": (345, 500)}
    sizes = [512 + len(data) + len(padding(len(data))) for _, data in CONTENTS]
    at = sum(sizes[:index])
    block = bytearray(ARCHIVE[at : at + 512])
    for name, value in fields.items():
        start, end = spans[name]
        block[start:end] = value.ljust(end - start, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return ARCHIVE[:at] + bytes(block) + ARCHIVE[at + 512 :]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"5", b"6", b"7", b"x", b"g", b"L"])
def test_a_link_or_special_entry_is_refused(index, kind):
    with pytest.raises(ContainerError, match="link"):
        read(with_header(index, type=kind, link=b"/etc/passwd"))


def test_the_old_mark_of_a_regular_file_is_refused():
    with pytest.raises(ContainerError):
        read(with_header(1, type=b"\0"))


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("name", [b"/etc/passwd", b"../tokens", b"a/../b", b"..\\x"])
def test_a_path_like_name_is_refused(index, name):
    with pytest.raises(ContainerError, match="is a path"):
        read(with_header(index, name=name))


@pytest.mark.parametrize("index", range(4))
def test_another_name_is_refused(index):
    with pytest.raises(ContainerError, match="belongs there"):
        read(with_header(index, name=b"./tokens"))


@pytest.mark.parametrize(
    "fields",
    [{"prefix": b"dir"}, {"link": b"x"}, {"mode": b"0000644"}, {"name": b"tokens\0x"}],
)
def test_any_other_header_is_refused(fields):
    with pytest.raises(ContainerError):
        read(with_header(1, **fields))


@pytest.mark.parametrize("index", [1, 2, 3])
@pytest.mark.parametrize("size", [b"00000000005", b"30000000000", b"77777777777"])
def test_a_size_that_is_not_the_signed_one_is_refused(index, size):
    with pytest.raises(ContainerError, match="size"):
        read(with_header(index, size=size))


def test_a_declared_envelope_of_3_gib_is_refused_at_its_header():
    reader = Reader()
    with pytest.raises(LimitExceededError):
        list(reader.feed(header("envelope.json", 3 * GIB)))


def test_the_largest_envelope_is_announced():
    [event] = Reader().feed(header("envelope.json", ENVELOPE_BYTES))
    assert event == EntryStarted(Entry("envelope.json", ENVELOPE_BYTES))


@pytest.mark.parametrize(
    "size",
    [b"1130       ", b"00000001130 ", b"\x80\0\0\0\0\0\0\0\0\0\x02\x58", b"", b"-1"],
)
def test_the_envelope_size_has_one_spelling(size):
    with pytest.raises(ContainerError, match="form"):
        read(with_header(0, size=size))


def test_entries_in_another_order_are_refused():
    swapped = [CONTENTS[0], CONTENTS[2], CONTENTS[1], CONTENTS[3]]
    with pytest.raises(ContainerError):
        read(pack(swapped))


def test_a_missing_entry_is_refused():
    with pytest.raises(ContainerError, match="ends where"):
        read(pack(CONTENTS[:-1]))


def test_an_entry_too_many_is_refused():
    with pytest.raises(ContainerError, match="trailer"):
        read(pack([*CONTENTS, ("more", b"")]))


def test_one_zero_block_is_not_an_end():
    with pytest.raises(ContainerError):
        read(ARCHIVE[:-512])


@pytest.mark.parametrize(
    ("name", "size"),
    [("", 0), ("a" * 101, 0), ("\u00e4", 0), ("a", -1), ("a", 8 * GIB)],
)
def test_what_does_not_fit_a_header_has_none(name, size):
    with pytest.raises(ContainerError):
        header(name, size)


def test_entries_are_named_once_and_in_time():
    reader = Reader()
    reader.expect([])
    with pytest.raises(RuntimeError):
        reader.expect([])
    with pytest.raises(RuntimeError):
        list(Reader().feed(ARCHIVE))


def test_standard_tools_list_the_container(tmp_path):
    builder = ManifestBuilder()
    path = tmp_path / "prefix.kvport"
    path.write_bytes(builder.container())
    listing = subprocess.run(
        ["tar", "-tvf", path], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in listing.stdout.splitlines()]
    entries = builder.verified().entries()
    assert not listing.stderr
    assert [line[-1] for line in lines] == [entry.name for entry in entries]
    assert all(line[0].startswith("-rw-------") for line in lines)
    assert all(
        str(entry.size) in line for entry, line in zip(entries, lines, strict=True)
    )


def test_standard_tools_unpack_the_container(tmp_path):
    builder = ManifestBuilder()
    (tmp_path / "prefix.kvport").write_bytes(builder.container())
    subprocess.run(["tar", "-xf", "prefix.kvport"], cwd=tmp_path, check=True)
    for digest, content in builder.blobs().items():
        assert (tmp_path / "blobs" / "blake3" / digest.hex()).read_bytes() == content


@pytest.mark.parametrize(
    "data", [b"", b"# kvport\n", bytes(range(256)) * 8, b"{}" * 600]
)
def test_a_file_of_another_kind_is_called_that(data):
    def read():
        reader = Reader()
        list(reader.feed(data))
        reader.finish()

    with pytest.raises(ContainerError, match="no kvport artifact"):
        read()
