"""Records of a chain whose blocks are a few bytes. They are valid for the store alone."""

from __future__ import annotations

import hashlib
from collections.abc import Set

from consensus.effects import DecidedBlock, OwnRoundStatement, OwnStatement, StoredBlock, StoredCertificate
from consensus.evidence import Evidence
from protocol import codec
from protocol.identity import sign_message
from protocol.messages import Ballot, Certificate, CutOff, Judgement, Prepare, Vouch
from protocol.verdicts import Verdict
from storage.disk_blob_store import DiskBlobStore
from storage.ledger_store import LedgerStore, StoredRound
from tests.sim.keys import FastSigner

CHAIN, ME = b"c" * 32, FastSigner("me")


def add_temporary(blobs: DiskBlobStore, digest: bytes, data: bytes, owner: object) -> None:
    blobs.mark_temporary(digest, owner)
    blobs.add_bytes(data)


def release(blobs: DiskBlobStore, owner: object, keep: Set[bytes] = frozenset()) -> None:
    """Release the blobs of an owner, and delete all unowned blobs except `keep`."""
    blobs.release_owner(owner)
    blobs.delete_unowned(set(keep))


def digest_of(block: bytes) -> bytes:
    """Return the digest of this data. The store does not verify it."""
    return hashlib.sha256(block).digest()


def vote(height: int, view: int = 0, block: bytes = b"b" * 32) -> OwnStatement:
    return OwnStatement(("prepare", height, view), sign_message(ME, CHAIN, Prepare(b"v" * 32, height, view, block)))


def certificate(height: int) -> Certificate:
    return Certificate(codec.encode(Prepare(b"v" * 32, height, 0, b"b" * 32)), {bytes([i]) * 32: bytes(64) for i in range(3)})


def stored_block(height: int, block: bytes = b"block") -> StoredBlock:
    return StoredBlock(height, digest_of(block), block)


def decided(height: int, block: bytes | None = None) -> DecidedBlock:
    content = b"block %d" % height if block is None else block
    return DecidedBlock(height, digest_of(content), content, certificate(height))


def round_vote(tag: str, number: int, message: Ballot | Vouch | CutOff) -> OwnRoundStatement:
    return OwnRoundStatement(tag, b"j" * 32, number, sign_message(ME, CHAIN, message))


def vouch_record(number: int, trainer: bytes, verdict: Verdict = Verdict.ACCEPT) -> OwnRoundStatement:
    return round_vote(f"vouch:{trainer.hex()}", number, Vouch(JOB, number, (Judgement(trainer, b"p" * 32, verdict),)))


JOB = b"j" * 32


def fill(store: LedgerStore) -> None:
    """Write a row into every table."""
    store.append_records([decided(1)])
    store.append_records([decided(2), vote(3), stored_block(3), StoredCertificate(3, certificate(3))])
    store.append_records([vouch_record(1, b"t" * 32), round_vote("ballot", 1, Ballot(JOB, 1, b"r" * 32, ()))])
    store.append_records([Evidence(vote(3).signed, vote(3, block=bytes(32)).signed)])
    store.save_state(2, b"r" * 32, b"state", [StoredRound(JOB, 0, 2, {}, (), False, bytes(32), {})], tables={})
    store.save_measurements(JOB, 0, {"nats": 2.5})
