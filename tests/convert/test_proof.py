"""Artifacts, computed again in part; versions accepted for it."""

import io
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import attrs
import pytest

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.digests import ArtifactId
from kvport.manifest.equivalence import NONE, Equivalence, Equivalences, Versions
from kvport.manifest.errors import (
    BindingMismatchError,
    FormatError,
    KvportError,
    UntrustedKeyError,
    VersionMismatchError,
)
from kvport.manifest.identity import Lineage, Provenance
from kvport.manifest.tokens import BLOCK_SIZE, encode_tokens, prefix_keys
from kvport.snapshot.engine.comparison import ROUNDING
from kvport.snapshot.engine.convert import store_caches
from kvport.snapshot.engine.recompute import sample
from kvport.snapshot.errors import KeyFileError, ProofError
from kvport.snapshot.keyring import Keyring
from kvport.snapshot.proof import accept, prove
from kvport.snapshot.transfer.exporter import Issue, open_export
from kvport.snapshot.transfer.ledger import Direction
from tests.convert.conftest import tokens_of
from tests.manifest.builder import NUMERICS

LENGTH = 530
TOKENS = tokens_of(LENGTH)


@pytest.mark.parametrize(
    ("ends", "count", "expected"),
    [
        ([5], 8, [(0, 5)]),
        ([5, 9], 8, [(0, 5), (5, 9)]),
        ([5, 9, 12], 2, [(0, 5), (9, 12)]),
        ([5, 9, 12], 1, [(0, 5)]),
    ],
)
def test_what_is_computed_again(ends, count, expected):
    assert sample(ends, count) == expected


def test_first_and_last_are_always_computed_and_others_by_chance():
    ends = list(range(10, 1_000, 10))
    drawn = [sample(ends, 5) for _ in range(20)]
    for parts in drawn:
        assert (parts[0], parts[-1]) == ((0, 10), (980, 990))
        assert len(set(parts)) == 5
        assert parts == sorted(parts)
    assert len({part for parts in drawn for part in parts}) > 20


OTHER = {"mlx_lm": "0.31.9"}


def exported(b, caches, tokens=TOKENS, **identity) -> bytes:
    """An artifact that a home like ours made, where versions were others."""
    with b.workbench() as opened:
        namespace = opened.cache.namespace(
            attrs.evolve(opened.namespace.identity, **identity), "default", BLOCK_SIZE
        )
        signer = opened.keyring.signing_key()
        said = Provenance(Lineage.DERIVED, NUMERICS, frozenset({signer.public.key_id}))
        store_caches(opened.cache, namespace, caches, tokens, said)
        issue = Issue(
            signer=signer,
            issuer_name="other",
            model_name="m",
            tokenizer=opened.model.tokenizer_digest,
            now=datetime.now(UTC),
        )
        encoded = encode_tokens(tokens)
        export = open_export(opened.cache, opened.ledger, namespace, encoded, issue)
        return b"".join(export.stream())


def proved(b, data: bytes, **options):
    work = Path(tempfile.mkdtemp(dir=b.work))
    source = str(b.directory)
    arguments = {"home": b.home, "work": work, "kv_form": b.kv_form, **options}
    return prove(io.BytesIO(data), source, **arguments)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5", "mamba"])
def test_what_a_model_computed_it_computes_again(bench, arch):
    b = bench(arch)
    proof = proved(b, exported(b, b.fill(LENGTH)))
    assert proof.passed
    assert proof.pair is None
    assert (proof.parts[0].start, proof.parts[-1].end) == (0, LENGTH)
    assert proof.tokens == LENGTH
    assert proof.max_difference < 1e-3
    assert not accept(b.home, proof)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5"])
def test_state_of_other_tokens_is_found_out(bench, arch):
    b = bench(arch)
    tokens = [token + 1 for token in TOKENS]
    proof = proved(b, exported(b, b.fill(LENGTH), tokens, **OTHER))
    assert not proof.passed
    assert proof.max_difference > ROUNDING
    with pytest.raises(ProofError):
        accept(b.home, proof)
    assert Keyring(b.home).load_equivalences() == NONE


def test_a_part_that_was_falsified_is_found_where_it_is(bench):
    b = bench("llama")
    caches = b.fill(LENGTH)
    caches[0].keys = caches[0].keys * 1.0
    caches[0].keys[..., 300:301, :] += 100
    proof = proved(b, exported(b, caches))
    assert not proof.passed
    by_start = {part.start: part.difference for part in proof.parts}
    assert by_start[0] < 1e-3
    assert by_start[256] > ROUNDING


def importing(b, data: bytes):
    keyring = Keyring(b.home)
    with b.workbench() as opened:
        artifact, path = opened.admit(io.BytesIO(data), keyring.load_equivalences())
        tip = path[-1]
        encoded = encode_tokens(TOKENS)
        key = prefix_keys(
            opened.namespace.identity.digest, BLOCK_SIZE, encoded, [LENGTH]
        )
        assert [tip.key] == key
        record = opened.ledger.find(artifact, Direction.ADMITTED, scope="default")
        assert opened.ledger.namespace(record) == opened.namespace
        issue = Issue(
            signer=keyring.signing_key(),
            issuer_name="here",
            model_name="m",
            tokenizer=opened.model.tokenizer_digest,
            now=datetime.now(UTC),
        )
        again = open_export(
            opened.cache, opened.ledger, opened.namespace, encoded, issue
        )
        return again.manifest


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_versions_that_were_accepted_come_in_under_our_identity(bench, arch):
    b = bench(arch)
    data = exported(b, b.fill(LENGTH), **OTHER)
    with pytest.raises(VersionMismatchError) as refused:
        importing(b, data)
    assert refused.value.fields == ("mlx_lm",)
    assert "kvport selfcheck --artifact" in refused.value.advice

    proof = proved(b, data)
    assert proof.passed
    assert proof.pair.theirs.mlx_lm == "0.31.9"
    assert proof.pair.artifact == proof.artifact_id
    assert Keyring(b.home).load_equivalences() == NONE
    assert accept(b.home, proof)
    manifest = importing(b, data)
    assert manifest.identity.mlx_lm == proof.pair.ours.mlx_lm
    assert manifest.prefix.tokens == LENGTH


@pytest.mark.parametrize(
    "other",
    [
        {"mlx_lm": "0.31.8"},
        {"state_format": 9},
        {"mlx_lm": "0.31.9", "state_format": 9},
        {"mlx_lm": "0.31.9", "model_files": "blake3:" + "0" * 64},
        {"mlx_lm": "0.31.9", "quant": {"bits": 4}},
        {"mlx_lm": "0.31.9", "kv": "q8"},
    ],
)
def test_a_pair_widens_nothing_but_its_own_versions(bench, other):
    b = bench("llama")
    caches = b.fill(40)
    accepted = proved(b, exported(b, caches, TOKENS[:40], **OTHER))
    assert accept(b.home, accepted)
    with pytest.raises(BindingMismatchError):
        importing(b, exported(b, caches, TOKENS[:40], **other))


def test_a_proof_is_of_versions_only(bench):
    b = bench("llama")
    data = exported(b, b.fill(40), TOKENS[:40], quant={"bits": 4}, **OTHER)
    with pytest.raises(BindingMismatchError) as refused:
        proved(b, data)
    assert refused.value.code == "binding_mismatch"


def test_a_stranger_proves_nothing(bench, tmp_path):
    b = bench("llama")
    stranger = tmp_path / "stranger"
    Keyring(stranger).create()
    with pytest.raises(UntrustedKeyError):
        proved(b, exported(b, b.fill(40), TOKENS[:40]), home=stranger)
    with pytest.raises(KvportError):
        proved(b, exported(b, b.fill(40), TOKENS[:40])[:-600])


# The list.


PAIR = Equivalence(
    model_files="blake3:" + "1" * 64,
    theirs=Versions("0.31.9", 1),
    ours=Versions("0.32.2", 1),
    artifact=ArtifactId("blake3:" + "2" * 64),
    accepted=datetime(2026, 3, 1, tzinfo=UTC),
)


def test_the_list_survives_its_bytes_and_has_one_pair_of_a_kind():
    other = attrs.evolve(PAIR, theirs=Versions("0.31.8", 1))
    pairs = NONE.with_pair(PAIR).with_pair(other)
    assert pairs.pairs == (PAIR, other)
    assert Equivalences.decode(pairs.encode()) == pairs
    later = attrs.evolve(PAIR, artifact=ArtifactId("blake3:" + "3" * 64))
    assert pairs.with_pair(later).pairs == (other, later)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "kvport-trust"},
        {"format_version": 2},
        {"pairs": {}},
        {"pairs": [1]},
        {"pairs": [PAIR.to_json() | {"artifact": "x"}]},
        {"pairs": [PAIR.to_json() | {"ours": {"mlx_lm": "1"}}]},
        {"pairs": [PAIR.to_json() | {"more": 1}]},
        {"pairs": [PAIR.to_json() | {"accepted": "now"}]},
        {"more": 1},
    ],
)
def test_a_list_of_another_form_is_refused(change):
    good = strict_loads(NONE.with_pair(PAIR).encode())
    with pytest.raises(FormatError):
        Equivalences.decode(canonical_dumps(good | change))


def test_a_damaged_list_is_no_list(bench):
    b = bench("llama")
    path = b.home / "equivalences.json"
    path.write_bytes(b"{}")
    path.chmod(0o600)
    with pytest.raises(KeyFileError):
        Keyring(b.home).load_equivalences()
