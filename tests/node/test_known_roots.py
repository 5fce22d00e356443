"""Which cache of a home is meant, and under which limits it ran."""

from pathlib import Path

import pytest

from kvport.snapshot.errors import MissingRootError, SettingError
from kvport.snapshot.known_roots import KnownRoots, Limits


def test_without_a_name_it_is_the_only_one_that_there_was(tmp_path):
    roots, volume = KnownRoots(tmp_path), tmp_path / "volume" / "cache"
    assert roots.to_serve(None) == tmp_path / "cache"
    with pytest.raises(MissingRootError):
        roots.to_open(None)
    roots.opened(volume, "id")
    for again in (roots, KnownRoots(tmp_path)):
        assert again.to_serve(None) == again.to_open(None) == volume
        assert again.id_of(volume) == "id"
    assert roots.to_serve(tmp_path / "other") == tmp_path / "other"
    roots.opened(tmp_path / "cache", "other")
    for choose in (roots.to_serve, roots.to_open):
        with pytest.raises(SettingError, match="--cache-dir"):
            choose(None)
        assert choose(volume) == volume


def test_limits_are_those_of_the_last_server_on_a_root(tmp_path):
    roots, one, two = KnownRoots(tmp_path), Path("/one"), Path("/two")
    assert roots.served is None
    assert roots.limits(one) == Limits(None, None)
    roots.serves(one, Limits(5 << 20, 0))
    roots.serves(two, Limits(None, 1 << 20))
    roots.serves(one, Limits(5 << 20, None))
    again = KnownRoots(tmp_path)
    assert again.served == one
    assert again.limits(one) == Limits(5 << 20, None)
    assert again.limits(two) == Limits(None, 1 << 20)
    (tmp_path / "cache-limits.json").write_text('{"/one": "many few"}')
    assert KnownRoots(tmp_path).limits(one) == Limits(None, None)
