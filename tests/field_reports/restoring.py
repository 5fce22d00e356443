"""What is stored for a prompt, as caches; and a prefix carried to another engine."""

import contextlib
from datetime import UTC, datetime

from kvport.manifest.keys import SigningKey
from kvport.manifest.recipients import RecipientKey
from kvport.manifest.tokens import encode_tokens
from kvport.manifest.trust import TrustEntry, TrustList
from kvport.snapshot.state.blobs import Assembly
from kvport.snapshot.state.kinds import flatten
from kvport.snapshot.transfer.exporter import Export, open_export
from kvport.snapshot.transfer.importer import Import, ImportResult, LocalModel
from kvport.snapshot.transfer.issue import Issue
from kvport.snapshot.transfer.ledger import Ledger

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
SIGNER = SigningKey.from_bytes(bytes(range(32)))


def restored_caches(r, tokens):
    """(position, every cache object of the model) of what is stored for a prompt."""
    match = r.match(tokens[:-1])
    assembly = Assembly(r.namespace.layout, match.position)
    for node in match.nodes:
        for ref in node.blobs:
            if assembly.wants(ref.blob_class, node.start, node.end):
                data = memoryview(r.cache.read(r.namespace, ref))
                assembly.add(ref.blob_class, node.start, node.end, data)
    caches = r.engine.call(assembly.caches)
    return match.position, [cache for _, cache in flatten(caches)]


@contextlib.contextmanager
def exporting(r, tokens, directory):
    issue = Issue(
        signer=SIGNER,
        issuer_name="here",
        model_name="m",
        tokenizer=r.engine.model("m").tokenizer_digest,
        now=NOW,
    )
    with contextlib.closing(Ledger(directory / "exporting.sqlite")) as ledger:
        opened: Export = open_export(
            r.cache, ledger, r.namespace, encode_tokens(tokens), issue
        )
        with contextlib.closing(opened):
            yield opened


def carry(here, there, tokens, directory) -> ImportResult:
    """Export the prefix from one engine's cache, import it into another's."""
    with exporting(here, tokens, directory) as opened:
        data = b"".join(opened.stream())
    trust = TrustList.of([TrustEntry(public_key=SIGNER.public, name="here")])
    digest = there.engine.model("m").tokenizer_digest
    with contextlib.closing(Ledger(directory / "importing.sqlite")) as ledger:
        running = Import(
            cache=there.cache,
            ledger=ledger,
            models=[LocalModel("m", digest, there.namespace)],
            trust=lambda: trust,
            local=there.local,
            recipient=RecipientKey.generate,
            now=lambda: NOW,
        )
        running.feed(data)
        return running.finish()
