"""Directories of the root that become links: nothing is changed behind one."""

import pytest

from kvport.snapshot.cache import directories
from kvport.snapshot.cache.files import Files
from kvport.snapshot.errors import StorageError
from tests.cache.builder import check_account, open_cache, position, space, store

TOKENS = list(range(600))
ENDS = [256, 512]
NAMES = ["staging", "ns", "ns/{id}", "staging/left", "ns/{id}/left"]


@pytest.fixture
def theirs(tmp_path):
    """A directory outside of the root, with things in it."""
    directory = tmp_path / "documents"
    (directory / "inside").mkdir(parents=True)
    (directory / "thesis.txt").write_text("all of it")
    (directory / "inside" / "notes").write_text("some")
    return directory


def content(directory):
    return sorted(path.name for path in directory.rglob("*"))


def exchange(root, name, theirs):
    path = root / name
    if path.exists():
        path.rename(theirs.parent / "moved")
    path.symlink_to(theirs)


@pytest.mark.parametrize("name", NAMES)
def test_a_link_that_appears_while_the_cache_runs_is_not_followed(root, theirs, name):
    before = content(theirs)
    with open_cache(root) as cache:
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
        exchange(root, name.format(id=ns.id), theirs)
        whole = name not in {"staging", "ns"}
        for step in (
            cache.administration.gc,
            lambda: cache.staging("upload"),
            lambda: store(cache, ns, [4, *TOKENS], ENDS),
            lambda: cache.administration.clear(force=True),
            lambda: cache.discard_staging("upload"),
        ):
            if whole:
                step()
            else:
                with pytest.raises((StorageError, AssertionError)):
                    step()
            assert content(theirs) == before
    with open_cache(root) as cache:
        assert content(theirs) == before
        check_account(cache, root)
        store(cache, space(cache), TOKENS, ENDS)
        assert position(cache, ns, TOKENS) == 512
        check_account(cache, root)
    assert content(theirs) == before


@pytest.mark.parametrize("name", NAMES)
def test_a_link_that_a_start_finds_is_removed_itself(root, theirs, name):
    before = content(theirs)
    with open_cache(root) as cache:
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
    exchange(root, name.format(id=ns.id), theirs)
    with open_cache(root) as cache:
        check_account(cache, root)
        assert content(theirs) == before
        assert not any(path.is_symlink() for path in root.rglob("*"))


def test_a_link_that_appears_between_a_look_and_a_removal_is_not_followed(
    root, theirs, monkeypatch
):
    with open_cache(root) as cache:
        ns = space(cache)
        store(cache, ns, TOKENS, ENDS)
    files = Files(root, lambda: None)
    (victim,) = {path.parent for path in files.blobs(ns.id)}
    target = victim / "thesis.txt"
    target.write_text("ours")
    look = files.check_root

    def then_exchange():
        look()
        exchange(root, f"ns/{ns.id}", theirs)

    monkeypatch.setattr(files, "check_root", then_exchange)
    before = content(theirs)
    assert files.remove(target)
    assert content(theirs) == before
    with pytest.raises(NotADirectoryError):
        files.write(ns.id, bytes(32), [b"bytes"])
    assert content(theirs) == before


@pytest.mark.parametrize(
    "name", ["", "x", "../../x", "/etc", "a" * 63, "A" * 64, "0" * 65]
)
def test_a_name_that_is_no_namespace_s_leads_nowhere(root, name):
    files = Files(root, lambda: None)
    with pytest.raises(StorageError):
        files.namespace(name)
    with pytest.raises(StorageError):
        files.blob(name, bytes(32))


@pytest.mark.parametrize("digest", [b"", b"../..", bytes(31), bytes(33)])
def test_a_digest_that_is_none_leads_nowhere(root, digest):
    with pytest.raises(StorageError):
        Files(root, lambda: None).blob("0" * 64, digest)


def test_a_path_out_of_the_root_is_refused(root, tmp_path):
    root.mkdir(exist_ok=True)
    for path in (tmp_path, root / ".." / "documents", root / "ns" / ".."):
        with pytest.raises(ValueError, match="path"), directories.opened(root, path):
            pass
