"""Where downloads go: whole files, links, pipes, standard output."""

import io
import os
import threading

import pytest

from kvport.api.files import open_destination

DATA = bytes(range(256)) * 5000


def write(to):
    with open_destination(to) as file:
        for start in range(0, len(DATA), 100_000):
            file.write(DATA[start : start + 100_000])


class Reluctant(io.RawIOBase):
    """A raw stream that takes a part of what it is given, as pipes do."""

    def __init__(self):
        super().__init__()
        self.found = bytearray()

    def writable(self):
        return True

    def write(self, data):
        part = bytes(data)[:7001]
        self.found += part
        return len(part)


def test_a_raw_stream_gets_every_byte():
    stream = Reluctant()
    write(stream)
    assert bytes(stream.found) == DATA
    assert not stream.closed


def test_a_link_is_followed_and_a_file_replaced(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == DATA
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe, found = tmp_path / "pipe", bytearray()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.extend(pipe.read_bytes()))
    reader.start()
    write(pipe)
    reader.join(30)
    assert bytes(found) == DATA
    assert pipe.is_fifo()


def test_what_breaks_off_leaves_the_old_file(tmp_path):
    (tmp_path / "file").write_bytes(b"old")

    def broken():
        with open_destination(tmp_path / "file") as file:
            file.write(DATA)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
