"""Trust documents: what one list makes of what another machine signed."""

import itertools
from datetime import timedelta

import attrs
import pytest

from kvport.manifest.canonical import canonical_dumps, strict_loads
from kvport.manifest.domains import PayloadType
from kvport.manifest.envelope import (
    Signature,
    encode_envelope,
    open_envelope,
    sign_payload,
)
from kvport.manifest.errors import (
    ExpiredError,
    FormatError,
    KvportError,
    LimitExceededError,
    OwnKeyError,
    RevokedKeyError,
    RollbackError,
    SignatureError,
    UnsupportedVersionError,
    UntrustedKeyError,
    WeakKeyError,
)
from kvport.manifest.keys import SigningKey
from kvport.manifest.limits import TRUST_DOCUMENT_BYTES
from kvport.manifest.trust import (
    ANY,
    Revocation,
    Role,
    TrustDocument,
    TrustEntry,
    TrustList,
)
from tests.manifest.builder import NOW

ADMIN, SECOND, OWN, MAC, OTHER = (
    SigningKey.from_bytes(bytes([n]) * 32) for n in range(1, 6)
)
DAY = timedelta(days=1)


def entry(key=MAC, **fields) -> TrustEntry:
    return TrustEntry(public_key=key.public, **{"name": "mac", **fields})


def signer(key=ADMIN, **fields) -> TrustEntry:
    return entry(key, name="admin", roles=frozenset({Role.TRUST}), **fields)


def revocation(key=MAC, **fields) -> Revocation:
    return Revocation(key_id=key.public.key_id, **{"at": NOW, **fields})


def document(**fields) -> TrustDocument:
    said = {
        "issuer": ADMIN.public.key_id,
        "version": 1,
        "created": NOW,
        "expires": NOW + 30 * DAY,
        "entries": (entry(),),
        "revoked": (),
    }
    return TrustDocument(**said | fields)


BELIEVING = TrustList.of([entry(OWN, name="this node"), signer()])


def adopt(trust=BELIEVING, data=None, signers=(ADMIN,), now=NOW, **fields) -> TrustList:
    data = document(**fields).sign(signers) if data is None else data
    return trust.adopt(data, now=now, own_key=OWN.public.key_id)


def allowed(trust: TrustList, key=MAC, now=NOW) -> TrustEntry:
    return trust.allows(key.public.key_id, now=now, role=Role.EXPORT)


def edited(**fields) -> bytes:
    """A signed payload that is not what `TrustDocument` would write."""
    payload = canonical_dumps({**strict_loads(document().encode()), **fields})
    return sign_payload(payload, [ADMIN], PayloadType.TRUST)


def test_what_a_document_lists_is_trusted_from_then_on():
    with pytest.raises(UntrustedKeyError):
        allowed(BELIEVING)
    trust = adopt()
    assert allowed(trust).public_key == MAC.public
    assert TrustList.from_json(trust.to_json()) == trust


def test_a_document_survives_its_bytes():
    said = document(revoked=(revocation(OTHER, reason="lost"),))
    assert TrustDocument.decode(said.encode()) == said


# Who is believed.


def test_a_signer_without_the_role_is_refused():
    for roles in (frozenset(), frozenset({Role.EXPORT})):
        trust = TrustList.of([attrs.evolve(signer(), roles=roles)])
        with pytest.raises(UntrustedKeyError):
            adopt(trust)
    with pytest.raises(UntrustedKeyError):
        adopt(TrustList())


def test_every_signature_counts():
    both = TrustList.of([signer(), signer(SECOND)])
    assert allowed(adopt(both, signers=(ADMIN, SECOND)))
    with pytest.raises(UntrustedKeyError):
        adopt(signers=(ADMIN, SECOND))
    opened = open_envelope(document().sign([ADMIN, SECOND]))
    first, second = opened.signatures
    forged = attrs.evolve(
        opened, signatures=(first, Signature(second.key_id, first.value))
    )
    with pytest.raises(SignatureError):
        adopt(both, encode_envelope(forged))


def test_more_than_eight_signatures_are_refused():
    keys = [SigningKey.generate() for _ in range(9)]
    trust = TrustList.of(map(signer, keys))
    issuer = keys[0].public.key_id
    assert adopt(trust, signers=keys[:8], issuer=issuer).documents
    with pytest.raises(LimitExceededError):
        document(issuer=issuer).sign(keys)


def test_the_issuer_must_have_signed():
    with pytest.raises(SignatureError):
        adopt(issuer=SECOND.public.key_id)


def test_a_changed_document_is_refused():
    opened = open_envelope(document().sign([ADMIN]))
    other = attrs.evolve(opened, payload=document(version=2).encode())
    with pytest.raises(SignatureError):
        adopt(data=encode_envelope(other))


def test_another_type_of_payload_is_refused():
    data = sign_payload(document().encode(), [ADMIN], PayloadType.MANIFEST)
    with pytest.raises(UnsupportedVersionError):
        adopt(data=data)


def test_a_revoked_signer_is_refused_and_what_it_gave_falls():
    trust = adopt()
    for after in (
        trust.revoke([revocation(ADMIN)]),
        trust.without(ADMIN.public.key_id),
    ):
        with pytest.raises(UntrustedKeyError):
            allowed(after)
    with pytest.raises(RevokedKeyError):
        adopt(trust.revoke([revocation(ADMIN)]), version=2)


# What it can give.


def test_it_gives_no_more_than_the_signer_has():
    limits = {
        "scopes": frozenset({"team", "a"}),
        "models": frozenset({"tiny"}),
        "not_before": NOW - DAY,
        "not_after": NOW + 5 * DAY,
    }
    trust = adopt(TrustList.of([signer(**limits)]))
    found = allowed(trust)
    assert (found.scopes, found.models) == (limits["scopes"], limits["models"])
    assert (found.not_before, found.not_after) == (NOW - DAY, NOW + 5 * DAY)
    narrow = entry(scopes=frozenset({"a", "z"}), models=ANY, not_after=NOW + DAY)
    found = allowed(adopt(TrustList.of([signer(**limits)]), entries=(narrow,)))
    assert found.scopes == {"a"}
    assert found.not_after == NOW + DAY


def test_several_signers_give_what_all_of_them_have():
    first = signer(scopes=frozenset({"a", "b"}))
    second = signer(SECOND, scopes=frozenset({"b", "c"}))
    trust = adopt(TrustList.of([first, second]), signers=(ADMIN, SECOND))
    assert allowed(trust).scopes == {"b"}
    with pytest.raises(UntrustedKeyError):
        allowed(trust.without(SECOND.public.key_id))


def test_what_it_gives_ends_with_it_and_with_the_signer():
    trust = adopt()
    assert allowed(trust, now=NOW + 30 * DAY - timedelta(seconds=1))
    with pytest.raises(UntrustedKeyError):
        allowed(trust, now=NOW + 30 * DAY)


def test_it_never_gives_the_role_trust():
    for roles in ({Role.TRUST}, {Role.EXPORT, Role.TRUST}, set()):
        given = entry(roles=frozenset(roles)).to_json()
        with pytest.raises(FormatError):
            adopt(data=edited(entries=[given]))
        with pytest.raises(FormatError):
            document(entries=(entry(roles=frozenset(roles)),))
    planted = strict_loads(adopt().to_json())
    planted["documents"][0]["entries"][0]["roles"] = ["export", "trust"]
    with pytest.raises(FormatError):
        TrustList.from_json(canonical_dumps(planted))


def test_the_operators_own_entry_goes_before_it():
    own = entry(scopes=frozenset({"mine"}))
    trust = adopt(BELIEVING.with_entry(own))
    assert allowed(trust) == own
    assert allowed(adopt().with_entry(own)) == own
    # Nor can it widen the signer's own entry, or make a signer of itself.
    trust = adopt(entries=(entry(ADMIN),))
    assert trust.entry(ADMIN.public.key_id).roles == {Role.TRUST}


def test_of_two_that_give_one_key_the_lowest_issuer_counts():
    trust = TrustList.of([signer(), signer(SECOND)])
    by = {
        key.public.key_id: document(
            issuer=key.public.key_id,
            entries=(entry(scopes=frozenset({name})),),
        ).sign([key])
        for key, name in ((ADMIN, "admin"), (SECOND, "second"))
    }
    lowest = min(by)
    name = "admin" if lowest == ADMIN.public.key_id else "second"
    for order in itertools.permutations(by.values()):
        found = trust
        for data in order:
            found = adopt(found, data)
        assert allowed(found).scopes == {name}


# Versions.


def test_a_later_version_replaces_what_was_given():
    trust = adopt(adopt(), version=2, entries=(entry(OTHER),))
    assert allowed(trust, OTHER)
    with pytest.raises(UntrustedKeyError):
        allowed(trust)
    assert len(trust.documents) == 1


def test_a_replayed_older_document_is_a_rollback():
    old = document().sign([ADMIN])
    trust = adopt(version=2, entries=())
    with pytest.raises(RollbackError) as refused:
        adopt(trust, old)
    assert refused.value.code == "rollback"


def test_the_same_document_again_changes_nothing_another_of_its_version_is_refused():
    trust = adopt()
    assert adopt(trust) == trust
    with pytest.raises(RollbackError):
        adopt(trust, entries=())


def test_a_rollback_is_known_after_the_signer_left_and_came_back():
    trust = adopt(version=3).without(ADMIN.public.key_id).with_entry(signer())
    with pytest.raises(RollbackError):
        adopt(trust, version=2)


# Time.


def test_an_expired_or_future_document_is_refused():
    with pytest.raises(ExpiredError):
        adopt(now=NOW + 30 * DAY)
    with pytest.raises(ExpiredError):
        adopt(now=NOW - timedelta(minutes=6))
    assert adopt(now=NOW - timedelta(minutes=5))


# Revocations.


def test_what_it_revokes_is_refused_for_ever_before_anything_else():
    trust = adopt(revoked=(revocation(reason="lost"),))
    with pytest.raises(RevokedKeyError) as refused:
        allowed(trust)
    assert refused.value.code == "revoked_key"
    later = adopt(trust, version=2, entries=(), revoked=())
    assert later.revoked == trust.revoked
    gone = later.without(ADMIN.public.key_id)
    assert gone.revoked == trust.revoked
    with pytest.raises(RevokedKeyError):
        gone.with_entry(entry())


def test_a_document_that_revokes_this_node_is_refused():
    with pytest.raises(OwnKeyError) as refused:
        adopt(revoked=(revocation(OWN),))
    assert refused.value.code == "own_key"


def test_of_two_revocations_the_earlier_stays_whatever_the_order():
    early, late = revocation(reason="b"), revocation(at=NOW + DAY, reason="a")
    for order in itertools.permutations((early, late)):
        trust = TrustList()
        for one in order:
            trust = trust.revoke([one])
        assert trust.revoked == (early,)


def test_nodes_with_the_same_documents_reach_the_same_list():
    trust = TrustList.of([signer(), signer(SECOND)])
    issuer = SECOND.public.key_id
    of_admin = [
        document(version=1, revoked=(revocation(OTHER),)).sign([ADMIN]),
        document(
            version=2,
            entries=(entry(scopes=frozenset({"x"})),),
            revoked=(revocation(OTHER),),
        ).sign([ADMIN]),
    ]
    of_second = [
        document(
            issuer=issuer, revoked=(revocation(OTHER, at=NOW - DAY, reason="r"),)
        ).sign([SECOND]),
        document(issuer=issuer, version=9, entries=()).sign([SECOND]),
    ]
    reached = set()
    for places in itertools.combinations(range(4), 2):
        queues = iter(of_admin), iter(of_second)
        found = trust
        for at in range(4):
            found = adopt(found, next(queues[0 if at in places else 1]))
        reached.add(found.to_json())
    assert len(reached) == 1


# Form.


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"extra": 1}, FormatError),
        ({"format": "kvport-trust"}, FormatError),
        ({"format_version": 2}, UnsupportedVersionError),
        ({"version": 0}, FormatError),
        ({"version": -1}, FormatError),
        ({"version": "1"}, FormatError),
        ({"issuer": "ed25519:00"}, FormatError),
        ({"created": "2026-03-01"}, FormatError),
        ({"entries": [entry().to_json()] * 2}, FormatError),
        ({"entries": [1]}, FormatError),
        ({"entries": {}}, FormatError),
        ({"revoked": [{"key_id": MAC.public.key_id}]}, FormatError),
        ({"revoked": [revocation().to_json() | {"reason": "\x1b[2J"}]}, FormatError),
        ({"revoked": [revocation().to_json() | {"more": ""}]}, FormatError),
        (
            {"entries": [entry().to_json() | {"public_key": "01" + "00" * 31}]},
            WeakKeyError,
        ),
        ({"revoked": [revocation().to_json()] * 2}, FormatError),
    ],
)
def test_what_is_not_a_document_is_refused(fields, error):
    with pytest.raises(error):
        adopt(data=edited(**fields))


@pytest.mark.parametrize("name", sorted(strict_loads(document().encode())))
def test_a_document_without_a_field_is_refused(name):
    value = strict_loads(document().encode())
    del value[name]
    with pytest.raises(FormatError):
        adopt(data=sign_payload(canonical_dumps(value), [ADMIN], PayloadType.TRUST))


def test_a_document_that_is_not_canonical_is_refused():
    payload = b" " + document().encode()
    with pytest.raises(FormatError):
        adopt(data=sign_payload(payload, [ADMIN], PayloadType.TRUST))


def test_a_document_is_limited_in_size():
    payload = bytes(TRUST_DOCUMENT_BYTES + 1)
    with pytest.raises(LimitExceededError):
        adopt(data=sign_payload(payload, [ADMIN], PayloadType.TRUST))
    many = frozenset(f"{n:0500}" for n in range(1024))
    with pytest.raises(LimitExceededError):
        document(entries=(entry(models=many),)).sign([ADMIN])


def test_every_flipped_bit_is_refused():
    data = bytearray(document(entries=(), revoked=()).sign([ADMIN]))
    for at in range(len(data) * 8):
        data[at // 8] ^= 1 << at % 8
        with pytest.raises(KvportError):
            adopt(data=bytes(data))
        data[at // 8] ^= 1 << at % 8


def test_a_damaged_list_of_documents_is_refused():
    value = strict_loads(adopt().to_json())
    (found,) = value["documents"]
    other = SECOND.public.key_id
    for fields in (
        {"signers": [other]},
        {"signers": []},
        {"version": 0},
        {"digest": "blake3:00"},
        {"extra": 1},
        {"signers": [1]},
    ):
        value["documents"] = [found | fields]
        with pytest.raises(FormatError):
            TrustList.from_json(canonical_dumps(value))
    value["documents"] = [found, found]
    with pytest.raises(FormatError):
        TrustList.from_json(canonical_dumps(value))
