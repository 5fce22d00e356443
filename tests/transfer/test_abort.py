"""Imports that end in between: nothing of them stays."""

import errno
import os
import threading

import pytest

from kvport.snapshot import durable
from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.errors import DiskFullError, StorageError
from tests.transfer.test_refusals import refuse, split


def test_abort_after_any_entry_leaves_nothing(pair):
    a, b = pair
    data = a.export()
    before = b.state()
    for part in split(data):
        for stop in (part.header, part.start, part.start + 1, part.end, part.next):
            running = b.start_import()
            running.feed(data[:stop])
            running.abort()
            running.abort()
            assert b.state() == before
    assert b.take(data).restored_tokens == 11


def test_an_import_that_ended_takes_nothing_more(pair):
    a, b = pair
    running = b.start_import()
    running.abort()
    with pytest.raises(RuntimeError):
        running.feed(a.export())
    with pytest.raises(RuntimeError):
        running.finish()


def test_abort_waits_for_the_chunk_that_is_being_taken(pair, monkeypatch):
    a, b = pair
    data = a.export()
    before = b.state()
    entered, go = threading.Event(), threading.Event()
    reserve = Cache.reserve

    def slow(*args, **kwargs):
        entered.set()
        go.wait(10)
        return reserve(*args, **kwargs)

    monkeypatch.setattr(Cache, "reserve", slow)
    running = b.start_import()
    feeding = threading.Thread(target=running.feed, args=(data[:-1],))
    feeding.start()
    assert entered.wait(10)
    aborting = threading.Thread(target=running.abort)
    aborting.start()
    go.set()
    feeding.join()
    aborting.join()
    assert b.state() == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_volume_that_fails_at_any_flush(pair, monkeypatch, code):
    a, b = pair
    data = a.export()
    expected = DiskFullError if code == errno.ENOSPC else StorageError
    fsync, step, calls = os.fsync, 0, 0

    def failing(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            raise OSError(code, "injected")
        fsync(fd)

    # So that macOS, too, flushes by the call that is replaced here.
    monkeypatch.setattr(durable, "_FULL_FSYNC", None)
    monkeypatch.setattr(os, "fsync", failing)
    before = b.state()
    while b.match() is None:
        step, calls = step + 1, 0
        try:
            b.take(data)
        except expected:
            assert b.state() == before
    # Every flush of an import has failed once, the last one last.
    assert step > calls > 20


def test_a_full_disk_while_a_blob_is_written(pair, monkeypatch):
    a, b = pair
    data = a.export()
    real = os.fdopen

    class Full:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, _data):
            raise OSError(errno.ENOSPC, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", lambda *args: Full(real(*args)))
        assert isinstance(refuse(b, data), DiskFullError)
    assert b.take(data).restored_tokens == 11


def test_an_admission_that_fails_leaves_no_intent(pair, monkeypatch):
    a, b = pair
    data = a.export()

    def failing(*_args, **_kwargs):
        raise StorageError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "admit", failing)
        assert isinstance(refuse(b, data), StorageError)
    assert b.take(data).restored_tokens == 11


def test_a_failed_import_does_not_unrecord_an_earlier_one(pair, monkeypatch):
    a, b = pair
    data = a.export()
    b.take(data)

    def failing(*_args, **_kwargs):
        raise StorageError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "admit", failing)
        refuse(b, data)
    assert len(b.ledger.artifacts()) == 1
