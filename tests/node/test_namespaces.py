import stat

import pytest

from kvport.snapshot.cache.policy import DEFAULT, NamespaceSettings, Tier
from kvport.snapshot.cache.retention import Retention
from kvport.snapshot.errors import ConfigFileError
from kvport.snapshot.namespaces import Change, NamespaceBook, RetentionChange

CONFIG = """
[namespaces.default]
ttl = "30d"
tier = "on"
[namespaces.qwen]
quota_bytes = "20GiB"
retention = { prompts = 3 }
[namespaces."qwen/team"]
tier = "read-only"
ttl = 90
"""


def book(home, config=CONFIG):
    if config is not None:
        (home / "config.toml").write_text(config)
    return NamespaceBook(home)


def test_without_files_nothing_is_set(tmp_path):
    assert book(tmp_path, None).settings("a", "qwen", "default") == DEFAULT


def test_the_more_special_section_goes_before_the_more_general_one(tmp_path):
    found = book(tmp_path)
    assert found.settings("a", "other", "default") == NamespaceSettings(ttl=30 * 86_400)
    assert found.settings("a", "qwen", "default") == NamespaceSettings(
        ttl=30 * 86_400, quota_bytes=20 << 30, retention=Retention(prompts=3)
    )
    assert found.settings("a", "qwen", "team") == NamespaceSettings(
        ttl=90,
        quota_bytes=20 << 30,
        retention=Retention(prompts=3),
        tier=Tier.READ_ONLY,
    )


def test_what_was_set_goes_before_the_file_and_outlives_the_process(tmp_path):
    first = book(tmp_path)
    first.change("a", Change(ttl=5, tier=Tier.OFF))
    first.change("a", Change(reclaim_on_unload=True))
    first.change("b", Change(retention=RetentionChange(newest=1)))
    for found in (first, NamespaceBook(tmp_path)):
        assert found.settings("a", "qwen", "default") == NamespaceSettings(
            ttl=5,
            tier=Tier.OFF,
            quota_bytes=20 << 30,
            retention=Retention(prompts=3),
            reclaim_on_unload=True,
        )
        assert found.settings("b", "x", "y").retention == Retention(newest=1)
    assert stat.S_IMODE((tmp_path / "namespaces.json").stat().st_mode) == 0o600


def test_numbers_of_a_retention_are_set_one_by_one(tmp_path):
    (tmp_path / "config.toml").write_text(
        "[namespaces.default]\nretention = { newest = 65536, forks = 5 }\n"
        "[namespaces.qwen]\nretention = { forks = 4 }\n"
    )
    found = NamespaceBook(tmp_path)
    found.change("a", Change(retention=RetentionChange(prompts=2)))
    found.change("a", Change(retention=RetentionChange(replies=3)))
    wanted = Retention(newest=65536, forks=4, prompts=2, replies=3)
    assert found.settings("a", "qwen", "default").retention == wanted
    assert found.origins("a", "qwen", "default")["retention"] == (
        "config.toml, [namespaces.default]; config.toml, [namespaces.qwen]; command"
    )
    found.change("a", Change(retention=None))
    wanted = Retention(newest=65536, forks=4)
    assert found.settings("a", "qwen", "default").retention == wanted


def test_a_config_that_is_no_toml_says_where(tmp_path):
    (tmp_path / "config.toml").write_text("[namespaces.default]\nttl = 30d\n")
    with pytest.raises(ConfigFileError, match="line 2"):
        NamespaceBook(tmp_path)


def test_none_takes_back_what_was_set(tmp_path):
    found = book(tmp_path)
    found.change("a", Change(ttl=5, quota_bytes=7))
    found.change("a", Change(ttl=None))
    assert found.settings("a", "x", "y").ttl == 30 * 86_400
    found.change("a", Change(quota_bytes=None))
    assert (tmp_path / "namespaces.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "a = 1",
        "namespaces = 3",
        "[namespaces]\nqwen = 3",
        "[namespaces.a]\nquota = 3",
        "[namespaces.a]\nquota_bytes = 0",
        "[namespaces.a]\nquota_bytes = true",
        "[namespaces.a]\nquota_bytes = 'lots'",
        "[namespaces.a]\nttl = '0s'",
        "[namespaces.a]\nttl = 315360001",
        "[namespaces.a]\ntier = 'maybe'",
        "[namespaces.a]\nretention = { newest = 0 }",
        "[namespaces.a]\nretention = { oldest = 1 }",
        "[namespaces.a]\nreclaim_on_unload = 1",
        "[namespaces.a]\nttl = 1979-05-27",
        "[names]\n",
        "#" * (2 << 20),
    ],
)
def test_a_config_that_says_what_cannot_be_is_refused(tmp_path, text):
    with pytest.raises(ConfigFileError):
        book(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quota = 3", "no setting 'quota'; there are quota_bytes, ttl, tier,"),
        ("tier = 'readonly'", "tier: not one of on, read-only, off"),
        ("retention = { old = 1 }", "no setting 'retention.old'; there are newest,"),
        ("ttl = true", "ttl: expected `int | null`, got `bool`"),
    ],
)
def test_a_config_is_refused_in_words_that_help(tmp_path, text, said):
    with pytest.raises(ConfigFileError) as refused:
        book(tmp_path, f"[namespaces.a]\n{text}")
    assert said in refused.value.message


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"a": 3}', b'{"a": {"ttl": -1}}', b"\xff", b"[" * 100_000]
)
def test_settings_that_are_damaged_are_not_forgotten(tmp_path, data):
    (tmp_path / "namespaces.json").write_bytes(data)
    with pytest.raises(ConfigFileError):
        NamespaceBook(tmp_path)


def test_where_a_setting_comes_from(tmp_path):
    found = book(tmp_path)
    found.loaded.add("a", "qwen")
    found.loaded.add("a", "other")
    found.change("a", Change(tier=Tier.OFF))
    for one in (found, NamespaceBook(tmp_path)):
        assert one.names("a", "whatever") == ("other", "qwen")
        assert one.origins("a", "whatever", "team") == {
            "ttl": "config.toml, [namespaces.qwen/team]",
            "quota_bytes": "config.toml, [namespaces.qwen]",
            "retention": "config.toml, [namespaces.qwen]",
            "tier": "command",
        }


def test_a_name_belongs_to_the_namespace_that_was_loaded_under_it_last(tmp_path):
    found = book(tmp_path)
    for namespace, name in (("a", "x"), ("a", "y"), ("b", "x")):
        found.loaded.add(namespace, name)
    assert (found.names("a", "y"), found.names("b", "x")) == (("y",), ("x",))
    found.loaded.remove("b", "x")
    assert found.names("b", "x") == ("x",), "the last one stays"
    assert found.names("c", "x") == ("x",)
    assert found.names("c", "") == ()


@pytest.mark.parametrize("data", [b"", b"[]", b'{"a": "x"}', b'{"a": [1]}', b"\xff"])
def test_loaded_names_that_are_damaged_are_learned_again(tmp_path, data):
    (tmp_path / "namespace-names.json").write_bytes(data)
    found = book(tmp_path)
    assert found.names("a", "x") == ("x",)
    found.loaded.add("a", "y")
    assert NamespaceBook(tmp_path).names("a", "x") == ("y",)
