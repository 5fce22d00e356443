"""Errors with stable codes: what a caller may match on, and what a person can do.

Every refusal of kvport is a `KvportError` with:

* `code`: a stable string, the same in Python, over HTTP and on the command line;
* `cause` and `advice`: one sentence each, from which `docs/errors.md` is made;
* `fields`: names of what differed, where there are such names.

Messages never hold token ids, prompt text, keys or paths of the machine. Nothing here
knows of HTTP: `kvport.api.problems` maps codes to statuses.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar


class KvportError(Exception):
    """Base of all errors that kvport raises on purpose."""

    code: ClassVar[str] = "internal"
    cause: ClassVar[str] = "A defect in kvport."
    advice: ClassVar[str] = "Report it with the server's log."

    def __init__(self, message: str, *, fields: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.fields = tuple(fields)


def all_codes() -> Iterator[type[KvportError]]:
    """All error classes that carry a code of their own, sorted by code."""
    found: dict[str, type[KvportError]] = {}
    queue: list[type[KvportError]] = [KvportError]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        if "code" in cls.__dict__:
            found[cls.code] = cls
    yield from (found[code] for code in sorted(found))


class FormatError(KvportError):
    """The bytes are not the one form that the format permits."""

    code = "format"
    cause = "The file is damaged, or was not written by kvport."
    advice = "Export it again; if it was copied, copy it again and compare sizes."


class UnsupportedVersionError(FormatError):
    """A format version, payload type or algorithm that this build does not read."""

    code = "unsupported_version"
    cause = "The artifact was written in another version of the format."
    advice = "Use the same version of kvport on both machines."


class LimitExceededError(KvportError):
    """A declared size or count is above the format's limits."""

    code = "limit_exceeded"
    cause = "The artifact declares more than the format or this server allows."
    advice = "Export a shorter prefix, or raise the server's limit if it is its own."


class SignatureError(KvportError):
    """A signature does not verify."""

    code = "signature"
    cause = "The manifest was changed after it was signed, or the key is another."
    advice = "Do not use the file; export it again from its origin."


class UntrustedKeyError(KvportError):
    """The signer is not in the allow-list, or not for this use."""

    code = "untrusted_key"
    cause = "No entry of this machine's trust list allows the signer to do this."
    advice = "Compare fingerprints with `kvport keys show`, then `kvport trust add`."


class RevokedKeyError(UntrustedKeyError):
    """A key that was revoked here, as a signer or as an origin of state."""

    code = "revoked_key"
    cause = "A key that signed, or that state came from, is revoked on this machine."
    advice = "Do not use what it brought; `kvport trust list` says when and why."


class OwnKeyError(KvportError):
    """This machine's own key cannot be revoked here."""

    code = "own_key"
    cause = "The key that is to be revoked is this machine's own."
    advice = "Revoke it on the other machines, and give this one a new home and key."


class RollbackError(KvportError):
    """An older state of something of which a newer one was seen."""

    code = "rollback"
    cause = "A later artifact of the session, or trust document, was taken before."
    advice = "Use the latest one; it is newer than this."


class WeakKeyError(KvportError):
    """A public key of small order, under which anyone could sign."""

    code = "weak_key"
    cause = "The public key is one of the small-order Ed25519 points."
    advice = "Refuse it: a real key is never one of these."


class ExpiredError(KvportError):
    """The artifact is past its expiry, or from the future."""

    code = "expired"
    cause = "The artifact's time window does not include this machine's clock."
    advice = "Export it again, or check both machines' clocks."


class ScopeError(KvportError):
    """Audience or scope do not allow an import here."""

    code = "wrong_scope"
    cause = "The artifact was issued for another scope or audience."
    advice = "Export it for this scope, or allow the scope in the trust entry."


class BindingMismatchError(KvportError):
    """State identity, tokenizer or block size differ: `fields` says which."""

    code = "binding_mismatch"
    cause = "The state was computed by another model, tokenizer or engine version."
    advice = "Serve the very same model files with the same versions on both machines."


class VersionMismatchError(BindingMismatchError):
    """Nothing but the versions of what computed the state differ."""

    code = "version_mismatch"
    cause = "The state was computed by another version of mlx-lm, or has another form."
    advice = (
        "Use the same versions on both machines, or have a part of it computed again"
        " here: `kvport selfcheck --artifact FILE --model MODEL --accept`."
    )


class ArithmeticMismatchError(KvportError):
    """Segments, points or sizes contradict each other or the layout."""

    code = "arithmetic"
    cause = "Sizes or positions in the manifest do not add up."
    advice = "Do not use the file; export it again from its origin."


class TokenMismatchError(KvportError):
    """The token entry is not the one that the manifest binds."""

    code = "token_mismatch"
    cause = "The token ids were changed after the manifest was signed."
    advice = "Do not use the file; export it again from its origin."


class DigestMismatchError(KvportError):
    """Bytes of a blob do not have the digest that was signed."""

    code = "digest_mismatch"
    cause = "A blob was damaged or exchanged on the way."
    advice = "Copy or export the file again."


class ContainerError(FormatError):
    """The tar container is not the one form that the format permits."""

    code = "container"
    cause = "The file was cut, extended or changed outside of its blobs."
    advice = "Copy or export the file again; never repack it with other tools."


class EncodedBlobError(FormatError):
    """A blob's encoded bytes are not one frame of exactly that blob."""

    code = "blob_encoding"
    cause = "A compressed blob was damaged or exchanged on the way."
    advice = "Copy or export the file again."


class TensorHeaderError(FormatError):
    """A blob's safetensors header is not the one derived from the signed layout."""

    code = "tensor_header"
    cause = "A blob was not written by kvport for this layout."
    advice = "Do not use the file; export it again from its origin."


class RecipientError(KvportError):
    """A sealed artifact is not sealed for this machine."""

    code = "wrong_recipient"
    cause = "The artifact can only be opened with the keys that it was sealed for."
    advice = "Export it for the key that `kvport keys recipient` prints here."


class DecryptionError(KvportError):
    """A sealed message or a wrapped key cannot be opened."""

    code = "decryption"
    cause = "Sealed bytes were damaged or exchanged, or sealed for another key."
    advice = "Copy or export the file again, for the key of this machine."
