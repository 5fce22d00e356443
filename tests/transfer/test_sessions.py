"""Sessions: a conversation's artifacts are counted, and only go forward."""

import sqlite3
from contextlib import suppress

import pytest

from kvport.manifest.errors import DigestMismatchError, FormatError, RollbackError
from kvport.manifest.model import Session
from kvport.snapshot.transfer.sessions import Mark
from tests.transfer.world import DENSE, TOKENS, Home

LONGER = [*TOKENS, *range(200, 209)]
CUTS = (4, 8, 11, 12, 16, 20)


def turns(home: Home, session: str = "talk", **issue) -> list[bytes]:
    """Two artifacts of one session, the second one of a longer prefix."""
    home.store()
    first = home.export(session=session, **issue)
    home.store(LONGER, CUTS, kinds={20: {"reply"}}, variant="later")
    return [first, home.export(LONGER, session=session, **issue)]


def manifest(home: Home, **issue) -> Session:
    with_session = home.open_export(**issue)
    with_session.close()
    return with_session.manifest.session


def marks(home: Home) -> list[tuple]:
    return home.ledger._all("SELECT session, sequence FROM seen", ())


@pytest.fixture
def a(home) -> Home:
    found = home("a", layout=DENSE)
    found.store()
    return found


@pytest.fixture
def b(home, a) -> Home:
    found = home("b", layout=DENSE)
    found.trusted.append(a.key)
    return found


def test_an_export_without_a_label_is_of_no_session(a):
    assert manifest(a) == Session()
    assert not a.ledger._all("SELECT * FROM sent", ())


def test_artifacts_of_a_session_are_counted_each_by_itself(a):
    assert [manifest(a, session="x").sequence for _ in range(3)] == [1, 2, 3]
    assert manifest(a, session="y") == Session("y", 1)
    assert manifest(a, session="x") == Session("x", 4)


def test_the_count_outlasts_a_crash_and_the_cache(home, tmp_path, a):
    manifest(a, session="x")
    a.cache.administration.clear(force=True)
    # What another process finds on the disk now, as after a crash.
    with sqlite3.connect(f"file:{tmp_path / 'copy'}?mode=rwc", uri=True) as copy:
        a.ledger._connection.backup(copy)
        assert copy.execute("SELECT sequence FROM sent").fetchall() == [(1,)]
    copy.close()
    a.close()
    again = home("a", layout=DENSE)
    again.store()
    assert manifest(again, session="x").sequence == 2


def test_scopes_count_by_themselves(a):
    assert [a.ledger.next_sequence(s, "x") for s in ("one", "two", "one")] == [1, 1, 2]


def test_a_label_that_is_none_is_refused(a):
    with pytest.raises(FormatError):
        a.open_export(session="no label")


@pytest.mark.parametrize("sealed", [False, True])
def test_an_older_artifact_is_a_rollback_and_changes_nothing(a, b, sealed):
    recipients = (b.recipient.public,) if sealed else ()
    first, second = turns(a, recipients=recipients)
    assert b.take(second).restored_tokens == 20
    before = b.state()
    with pytest.raises(RollbackError) as refused:
        b.take(first)
    assert refused.value.code == "rollback"
    assert b.state() == before
    assert marks(b) == [("talk", 2)]


def test_it_is_refused_before_its_blobs_have_come(a, b):
    first, second = turns(a)
    b.take(second)
    envelope_and_tokens = first[: first.index(b"blobs/blake3/")]
    running = b.start_import()
    with pytest.raises(RollbackError):
        running.feed(envelope_and_tokens)


def test_forward_and_the_same_again_are_taken(a, b):
    first, second = turns(a)
    b.take(first)
    b.take(first)
    b.take(second)
    b.take(second)
    assert marks(b) == [("talk", 2)]


def test_another_artifact_of_the_same_number_is_refused(a, b, tmp_path):
    """The exporter's home was restored from a backup, say."""
    first = a.export(session="talk")
    with a.ledger._transaction():
        a.ledger._all("DELETE FROM sent", ())
    again = a.export(session="talk")
    b.take(first)
    with pytest.raises(RollbackError):
        b.take(again)


def test_sessions_and_issuers_do_not_hinder_each_other(home, a, b):
    b.take(turns(a)[1])
    b.take(a.export(session="other"))
    c = home("c", layout=DENSE)
    c.store()
    b.trusted.append(c.key)
    b.take(c.export(session="talk"))
    assert sorted(marks(b)) == [("other", 1), ("talk", 1), ("talk", 2)]


def test_the_mark_outlasts_cache_records_and_restart(home, a, b):
    first, second = turns(a)
    b.take(second)
    b.cache.administration.clear(force=True)
    b.close()
    again = home("b", layout=DENSE)
    again.trusted.append(a.key)
    with pytest.raises(RollbackError):
        again.take(first)
    again.take(second)


def test_a_refused_import_raises_no_mark(a, b):
    _, second = turns(a)
    broken = bytearray(second)
    broken[second.rindex(b"blobs/blake3/") + 712] ^= 1
    with pytest.raises(DigestMismatchError):
        b.take(bytes(broken))
    assert marks(b) == []
    b.take(a.export(session="talk"))


def crash(home: Home, data: bytes, monkeypatch, at: str) -> None:
    """Import; end before or after the index's commit, and before the last step."""

    class Crash(BaseException):
        pass

    def stop(*_, **__):
        raise Crash

    admit = home.cache.admit

    def admit_and_stop(*args):
        if at == "after":
            admit(*args)
        raise Crash

    with monkeypatch.context() as patched, suppress(Crash):
        patched.setattr(home.cache, "admit", admit_and_stop)
        patched.setattr(home.ledger, "_forget", stop)
        home.take(data)


def test_a_crash_after_the_admission_raises_the_mark_at_the_start(
    home, a, b, monkeypatch
):
    first, second = turns(a)
    crash(b, second, monkeypatch, "after")
    assert marks(b) == []
    b.close()
    again = home("b", layout=DENSE)
    again.trusted.append(a.key)
    assert marks(again) == [("talk", 2)]
    with pytest.raises(RollbackError):
        again.take(first)
    again.take(second)


def test_a_crash_before_the_admission_raises_no_mark(home, a, b, monkeypatch):
    first, second = turns(a)
    crash(b, second, monkeypatch, "before")
    b.close()
    again = home("b", layout=DENSE)
    again.trusted.append(a.key)
    assert marks(again) == []
    again.take(first)


def test_of_two_imports_at_once_the_older_one_loses(a, b):
    """Both were let in before either was admitted."""
    first, second = turns(a)
    older, newer = b.start_import(), b.start_import()
    older.feed(first)
    newer.feed(second)
    newer.finish()
    with pytest.raises(RollbackError):
        older.finish()
    assert marks(b) == [("talk", 2)]


def test_a_mark_without_a_session_is_none(a, b):
    b.take(a.export())
    assert marks(b) == []
    assert not Mark.of(a.open_export().manifest, "blake3:00").session
