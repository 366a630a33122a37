"""Signed peer records: their validity, their expiry, and their scope. Sans-IO; time is an argument.

Each signer has one valid record per scope: the one with the highest sequence number, regardless of the peer that sent it. A peer
needs neither clock nor disk for its own sequence number: after a restart it receives its old record from other peers, and signs
the next one. The table of accepted records is in `docs/protocol/links.md`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from protocol.addresses import AddressScope, scope_of
from protocol.codec import decode_message
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Ed25519Verifier, Signed, Signer, Verifier, open_signed, sign_message
from protocol.limits import ADVERTISED_MAX, PEER_RECORD_AGE_SECONDS_MAX, PEER_RECORD_BYTES_MAX
from protocol.messages import AgedPeerRecord, PeerRecord

SIGNERS_MAX: Final = 1024  # peers with stored records
STRANGERS_MAX: Final = 128  # signers with stored records that are not known as members; a new peer knows no members yet
FORGOTTEN_MAX: Final = 2048  # remembered sequences of expired records, which are not accepted again; the oldest are dropped
# Age at which own records are renewed: a seventh of the age at which they expire, so a peer may be away for six days.
RENEW_SECONDS: Final = 86_400.0
CHANGE_SECONDS: Final = 15.0  # average interval between new records of one signer, so that no signer floods the network
# Records accepted without that interval: at a start, addresses and relays become known one after another.
CHANGES_BURST: Final = 8
SEQUENCE_MAX: Final = 2**53 - 1

_Name = tuple[bytes, AddressScope]


class RecordOutcome(enum.Enum):
    NEW = enum.auto()  # The record is accepted.
    KNOWN = enum.auto()  # The record is not new, or cannot be accepted here.
    STALE = enum.auto()  # This peer has a newer record of the signer.
    OWN = enum.auto()  # An earlier run or another machine signed the record with our key.


@dataclass(slots=True)
class _HeldRecord:
    signed: Signed
    record: PeerRecord
    first_at: float  # time when this peer received the record
    born_at: float  # time when the record was signed, by the lowest reported age
    paid_until: float  # time until which the signer's changes have used up CHANGE_SECONDS each

    @property
    def ends_at(self) -> float:
        return min(self.first_at, self.born_at) + PEER_RECORD_AGE_SECONDS_MAX

    def aged(self, now: float) -> AgedPeerRecord:
        return AgedPeerRecord(self.signed, min(PEER_RECORD_AGE_SECONDS_MAX, max(0, int(now - self.born_at))))


class PeerRecordBook:
    def __init__(
        self,
        identity: Signer,
        chain_id: bytes,
        is_member: Callable[[bytes], bool] = lambda peer: True,
        verifier: Verifier | None = None,
    ) -> None:
        self.me, self.is_member = identity.public, is_member
        self._identity, self._chain_id, self._verifier = identity, chain_id, verifier or Ed25519Verifier()
        self._held: dict[_Name, _HeldRecord] = {}
        self._forgotten: dict[_Name, int] = {}  # (signer, scope) -> highest sequence of expired records, not accepted again

    # Records of other peers -------------------------------------------------------------------------------------------

    def accept_record(self, aged: AgedPeerRecord, scope: AddressScope, now: float) -> RecordOutcome:
        """Accept or reject a record that arrived over a link of `scope`.

        Raises `RemoteProtocolError` if no honest peer sends such a record.
        """
        signed = aged.record
        if len(signed.body) > PEER_RECORD_BYTES_MAX:
            raise RemoteProtocolError("oversized", f"a peer record has {len(signed.body)} bytes, limit {PEER_RECORD_BYTES_MAX}")
        record = decode_message(signed.body, (PeerRecord,))
        name = signed.signer, record.scope
        held = self._held.get(name)
        if not record.scope.includes(scope) or aged.age_seconds >= PEER_RECORD_AGE_SECONDS_MAX:
            return RecordOutcome.KNOWN
        if held is not None and record.sequence < held.record.sequence:
            return RecordOutcome.KNOWN if signed.signer == self.me else RecordOutcome.STALE
        if held is not None and signed == held.signed:
            held.born_at = max(held.born_at, now - aged.age_seconds)
            return RecordOutcome.KNOWN
        if signed.signer == self.me:
            open_signed(signed, self._chain_id, self._verifier, (PeerRecord,))
            return RecordOutcome.OWN
        if held is not None and record.sequence == held.record.sequence:
            return RecordOutcome.STALE
        if record.sequence <= self._forgotten.get(name, -1) or not self._has_room(signed.signer):
            return RecordOutcome.KNOWN
        paid_until = max(now, held.paid_until if held else now) + CHANGE_SECONDS
        if paid_until > now + CHANGES_BURST * CHANGE_SECONDS:
            return RecordOutcome.KNOWN
        if record.addresses and not addresses_in_scope(record):
            return RecordOutcome.KNOWN
        open_signed(signed, self._chain_id, self._verifier, (PeerRecord,))
        self._make_room(signed.signer)
        self._held[name] = _HeldRecord(signed, record, now, now - aged.age_seconds, paid_until)
        return RecordOutcome.NEW

    def _signers(self) -> tuple[set[bytes], list[bytes]]:
        """Return the signers of all stored records, and the signers among them that are not members."""
        signers = {signer for signer, _ in self._held}
        return signers, [signer for signer in signers if signer != self.me and not self.is_member(signer)]

    def _has_room(self, signer: bytes) -> bool:
        """Return whether a record of `signer` may be stored.

        Records of members displace those of strangers, and never the reverse.
        """
        signers, strangers = self._signers()
        if signer in signers:
            return True
        if self.is_member(signer):
            return len(signers) < SIGNERS_MAX or bool(strangers)
        return len(signers) < SIGNERS_MAX and len(strangers) < STRANGERS_MAX

    def _make_room(self, signer: bytes) -> None:
        signers, strangers = self._signers()
        if signer not in signers and len(signers) >= SIGNERS_MAX:
            for scope in AddressScope:
                self._held.pop((strangers[0], scope), None)

    def drop_expired(self, now: float) -> None:
        """Drop records of other peers that were not renewed for a week."""
        for name, held in tuple(self._held.items()):
            if name[0] == self.me or now < held.ends_at:
                continue
            del self._held[name]
            # The sequence is remembered only if the record expired by our own clock, since other peers may report false ages.
            if now >= held.first_at + PEER_RECORD_AGE_SECONDS_MAX:
                self._forgotten.pop(name, None)
                self._forgotten[name] = held.record.sequence
                if len(self._forgotten) > FORGOTTEN_MAX:
                    del self._forgotten[next(iter(self._forgotten))]

    # Own records ------------------------------------------------------------------------------------------------------

    def sign_own_records(
        self, addresses: Mapping[AddressScope, tuple[str, ...]], relays: tuple[bytes, ...], now: float, above: int = 0
    ) -> list[Signed]:
        """Sign and return new records of this peer.

        A record is new if its contents have changed, if the old one is a day old, or if the old sequence is not above `above`.
        """
        changed = []
        for scope in AddressScope:
            held = self._held.get((self.me, scope))
            said = addresses.get(scope, ())[:ADVERTISED_MAX], relays if scope is AddressScope.PUBLIC else ()
            if held is None and not any(said):
                continue
            sequence = held.record.sequence if held else 0
            is_same = held is not None and (held.record.addresses, held.record.relays) == said
            if is_same and held and now < held.first_at + RENEW_SECONDS and sequence > above:
                continue
            record = PeerRecord(min(max(sequence, above) + 1, SEQUENCE_MAX), scope, *said)
            signed = sign_message(self._identity, self._chain_id, record)
            self._held[self.me, scope] = _HeldRecord(signed, record, now, now, now)
            changed.append(signed)
        return changed

    # Valid records ----------------------------------------------------------------------------------------------------

    def has_records_of(self, peer: bytes) -> bool:
        return any((peer, scope) in self._held for scope in AddressScope)

    def peers(self) -> Iterator[bytes]:
        return iter(dict.fromkeys(peer for peer, _ in self._held if peer != self.me))

    def addresses(self, peer: bytes) -> tuple[str, ...]:
        """Return the addresses of a peer, the widest scope first."""
        records = (self._held.get((peer, scope)) for scope in reversed(AddressScope))
        return tuple(address for held in records if held is not None for address in held.record.addresses)

    def records_for_scope(self, scope: AddressScope, now: float, signers: Iterable[bytes] | None = None) -> list[AgedPeerRecord]:
        """Return the records that may be sent over a link of this scope, of `signers` or of all signers."""
        names = tuple(self._held) if signers is None else [(signer, of) for signer in signers for of in AddressScope]
        found = [(name, self._held[name]) for name in names if name in self._held and name[1].includes(scope)]
        return [held.aged(now) for name, held in found if name[0] == self.me or now < held.ends_at]


def addresses_in_scope(record: PeerRecord) -> tuple[str, ...]:
    """Return a record's addresses, or none if one is outside its scope.

    A peer that forwards a record with an address outside its scope is not banned, since the list of private networks differs
    between programs.
    """
    try:
        return record.addresses if {scope_of(address) for address in record.addresses} <= {record.scope} else ()
    except UserError:
        return ()
