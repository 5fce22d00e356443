"""Containers that are not the one form."""

from collections.abc import Iterator

from kvport.manifest.ustar import BLOCK, TRAILER, header, padding
from tests.manifest.builder import pack
from tests.vectors.case import Case
from tests.vectors.making import BASE, case, unpacked


def _header(**fields: tuple[int, bytes]) -> bytes:
    """The header of `tokens` with bytes exchanged, and a checksum that fits them."""
    block = bytearray(header("tokens", len(BASE.token_bytes)))
    for at, value in fields.values():
        block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def cases() -> Iterator[Case]:
    good = BASE.container()
    entries = unpacked()
    start = {name: good.index(header(name, len(data))) for name, data in entries}
    names = [name for name, _ in entries]
    tokens, state = start["tokens"], start[names[2]]

    def replaced(at: int, new: bytes) -> bytes:
        return good[:at] + new + good[at + len(new) :]

    def add(name: str, breaks: str, data: bytes, code: str = "container") -> Case:
        return case(f"container-{name}", code, breaks, data)

    yield add("empty", "there is nothing", b"")
    yield add("of-another-kind", "it is no container", b"PK\x03\x04" + bytes(2000))
    yield add("cut-in-a-blob", "the end is missing", good[: state + BLOCK + 9])
    yield add("cut-after-a-blob", "entries are missing", good[: start[names[3]]])
    yield add("one-zero-block", "two zero blocks end it", good[: -len(TRAILER) // 2])
    yield add("without-end", "two zero blocks end it", good[: -len(TRAILER)])
    yield add("three-zero-blocks", "nothing follows the end", good + bytes(BLOCK))
    yield add("byte-after-the-end", "nothing follows the end", good + b"\0")
    yield add("padding", "padding is zero", replaced(tokens - 1, b"\1"))
    yield add("trailer", "the end is zero", replaced(len(good) - 1, b"\1"))
    for name, what, fields in (
        ("link", "entries are regular files", {"type": (156, b"2")}),
        ("directory", "entries are regular files", {"type": (156, b"5")}),
        ("old-type", "the type is written as 0", {"type": (156, b"\0")}),
        ("mode", "the mode is 0600", {"mode": (0o144, b"0000644\0")}),
        ("owner", "the owner is 0", {"owner": (108, b"0000001\0")}),
        ("time", "the time is 0", {"time": (136, b"00000000001\0")}),
        ("path", "names are no paths", {"name": (0, b"../../tokens")}),
        ("absolute-path", "names are no paths", {"name": (0, b"/tmp/tokens")}),
        ("user-name", "names of users are empty", {"user": (265, b"root")}),
        ("gnu-magic", "the magic is that of ustar", {"magic": (257, b"ustar  \0")}),
    ):
        yield add(f"header-{name}", what, replaced(tokens, _header(**fields)))
    sum_at = tokens + 148
    yield add("checksum", "the checksum has one spelling", replaced(sum_at, b" "))
    longer = header("tokens", len(BASE.token_bytes) + 4)
    yield add("size", "sizes are the signed ones", replaced(tokens, longer))
    yield add(
        "declares-3-gib",
        "sizes are the signed ones",
        replaced(state, header(names[2], 3 << 30)),
    )
    yield add(
        "declares-an-envelope-of-3-gib",
        "an envelope is at most 16 MiB",
        header("envelope.json", 3 << 30) + good[BLOCK:],
        "limit_exceeded",
    )
    spaced = header("envelope.json", len(entries[0][1]))
    spaced = spaced[:124] + b"%11o\0" % len(entries[0][1]) + spaced[136:]
    yield add("size-spelling", "sizes are padded with zeros", spaced + good[BLOCK:])
    swapped = [*entries[:2], entries[3], entries[2], *entries[4:]]
    yield add("order", "entries have one order", pack(swapped))
    yield add(
        "tokens-last",
        "entries have one order",
        pack([entries[0], *entries[2:], entries[1]]),
    )
    yield add("entry-missing", "every blob is there", pack(entries[:-1]))
    yield add("entry-twice", "every blob is there once", pack([*entries, entries[-1]]))
    yield add("envelope-twice", "one envelope", pack([entries[0], *entries]))
    yield add("other-first", "the envelope is first", pack(entries[1:]))
    extended = entries[-1][1] + b"\0"
    yield add(
        "blob-longer",
        "sizes are the signed ones",
        pack([*entries[:-1], (names[-1], extended)]),
    )
    extra = header("notes", 3) + b"abc" + padding(3)
    yield add(
        "foreign-entry",
        "nothing but what is signed",
        good[: -len(TRAILER)] + extra + TRAILER,
    )
