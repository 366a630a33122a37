"""Liars with forged proofs: certificates, timeouts, blocks, bodies, evidence and answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from consensus.block import block_digest, decode_block, encode_block, encode_header, make_header
from consensus.effects import StepEffects
from consensus.evidence import Evidence
from consensus.pbft.chain import make_leader_schedule
from ledger.blocks.application import WholeBody
from ledger.ledger_state import EMPTY_BODY, BlockBody, decode_body, module_digest
from ledger.tables import RangeProof
from protocol import codec, merkle
from protocol.identity import Signed, signing_preimage
from protocol.limits import CLOCK_AHEAD_SECONDS
from protocol.messages import (
    NO_VIEW,
    BlockBytes,
    Certificate,
    Commit,
    Decision,
    EvidenceMessage,
    GossipEnvelope,
    InclusionList,
    Prepare,
    Prepared,
    Propose,
    ProposeEnvelope,
    RememberedStatements,
    SnapshotContent,
    SnapshotOffer,
    SnapshotPart,
    Status,
    Timeout,
    TimeoutCertificate,
    TimeoutEnvelope,
    Transaction,
    ViewEnded,
    Vote,
)
from tests.sim.strategies.base import Liar, Outgoing, Strategy, header_digest, opened

CHOICES = 16  # that a liar tries before each block
FAR_VIEWS = 10**12  # beyond all views for which peers keep messages
FORGED_SHARE = 0.2  # of the messages that a liar hears


class AtEveryHeight(Strategy):
    """Does something once at each height that its replica reaches."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        self._height = 0

    def turned(self, turn: StepEffects) -> None:
        replica = self.liar.replica
        if replica is not None and replica.height > self._height and replica._book is not None:
            self._height = replica.height
            self.lie(replica)

    def lie(self, replica: Any) -> None:
        raise NotImplementedError

    def certificate(self, vote: Prepare | Commit, how: str) -> Certificate:
        """Return a false certificate that a quorum signed `vote`."""
        body = codec.encode(vote)
        data = signing_preimage(vote.TAG, self.liar.chain_id, body)
        signers = [self.liar.signer]
        if how == "strangers":
            signers += [self.liar.stranger(i) for i in range(len(self.liar.founders) - 1)]
        signatures = {signer.public: signer.sign(data) for signer in signers}
        if how == "forged":
            signatures |= dict.fromkeys(self.liar.founders, signatures[self.liar.key])
        return Certificate(body, dict(sorted(signatures.items())))


class FalseCertificates(AtEveryHeight):
    """Decides and prepares blocks of its own by certificates of too few, of strangers, and of copied signatures."""

    def lie(self, replica: Any) -> None:
        block = self._block(replica)
        if block is None:
            return
        digest, voters = block_digest(block), replica._book.voters.hash
        for how in ("few", "strangers", "forged"):
            prepare = Prepare(voters, replica.height, replica.view, digest)
            commit = Commit(voters, replica.height, replica.view, digest)
            timeout = Timeout(voters, replica.height, replica.view, replica.view, digest)
            lies = (
                Decision(block, self.certificate(commit, how)),
                Prepared(self.certificate(prepare, how)),
                TimeoutEnvelope(self.liar.sign(timeout), self.certificate(prepare, how)),
            )
            self.liar.tell(self.liar.random.choice(lies), self.liar.random.uniform(0, 0.05))

    def _block(self, replica: Any) -> bytes | None:
        if not replica._chain.is_applied:
            return None
        made: bytes = replica._chain.build_block(EMPTY_BODY, self.liar.key, int(self.liar.now() * 1_000))
        return made


class ForgedTimeouts(AtEveryHeight):
    """Leads later views on timeout certificates of one voter many times, of strangers, of too few, or of another view."""

    modes: tuple[str, ...] = ("twice", "strangers", "few", "stale")

    def lie(self, replica: Any) -> None:
        schedule = replica._chain.leader_schedule(replica.height)
        if schedule is None or not replica._chain.is_applied:
            return
        for view in range(1, 1 + len(self.liar.founders)):
            if schedule.leader_of_view(view) == self.liar.key:
                self._lead(replica, view, self.liar.random.choice(self.modes))

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        """Drop the messages that would contradict its inventions."""
        is_real = isinstance(message, (Vote, TimeoutEnvelope)) or (
            isinstance(message, ProposeEnvelope) and message.justification is not None
        )
        return () if is_real else (message,)

    def _lead(self, replica: Any, view: int, how: str) -> None:
        block = replica._chain.build_block(EMPTY_BODY, self.liar.key, int(self.liar.now() * 1_000))
        header = encode_header(make_header(decode_block(block)))
        propose = Propose(replica._book.voters.hash, replica.height, view, block_digest(block))
        forged = self._timeouts(replica, view - 1, how)
        message = ProposeEnvelope(self.liar.sign(propose), header, codec.encode(WholeBody(EMPTY_BODY)), forged)
        self.liar.tell(ViewEnded(forged) if self.liar.random.random() < 0.2 else message)

    def _timeouts(self, replica: Any, view: int, how: str) -> TimeoutCertificate:
        voters = replica._book.voters
        timeout = Timeout(voters.hash, replica.height, view, NO_VIEW, None)
        if how == "stale":
            timeout = dataclasses.replace(timeout, view=view + 1)
        signed = [self.liar.sign(timeout)]
        if how == "twice":
            signed *= voters.quorum
        elif how == "strangers":
            strangers = [self.liar.stranger(i) for i in range(voters.quorum - 1)]
            body = codec.encode(timeout)
            data = signing_preimage(Timeout.TAG, self.liar.chain_id, body)
            signed += [Signed(body, signer.public, signer.sign(data)) for signer in strangers]
        return TimeoutCertificate(tuple(sorted(signed, key=lambda item: item.signer)), None)


class DoubledTimeouts(ForgedTimeouts):
    """Leads later views with its own timeout alone, as often as it takes."""

    modes = ("twice",)


class StaleTimeouts(Strategy):
    """Leads with real timeouts of an earlier view or height."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        self._real: list[TimeoutCertificate] = []

    def hears(self, peer: bytes, data: bytes) -> bool:
        message = opened(data)
        if isinstance(message, ViewEnded):
            self._real = [*self._real, message.certificate][-8:]
        elif isinstance(message, ProposeEnvelope) and message.justification is not None:
            self._real = [*self._real, message.justification][-8:]
        return True

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if not isinstance(message, ProposeEnvelope) or message.justification is None:
            return (message,)
        stale = [certificate for certificate in self._real if certificate != message.justification]
        self._real = [*stale, message.justification][-8:]
        return (dataclasses.replace(message, justification=stale[-1]) if stale else message,)


class WrongReproposal(Strategy):
    """Leads a later view with a fresh block although an older one was prepared."""

    def started(self) -> None:
        replica = self.liar.replica
        real = replica._block_to_propose
        replica._block_to_propose = lambda book, obligation: real(book, None)


class DroppedLock(WrongReproposal):
    """Leads a later view with the timeouts that name no prepared block, and a fresh block."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if isinstance(message, ProposeEnvelope) and message.justification is not None and message.justification.high is not None:
            return (dataclasses.replace(message, justification=dataclasses.replace(message.justification, high=None)),)
        return (message,)


class LyingHigh(Strategy):
    """Gives up views with a certificate that is lower than the one it names, with none, or with one of another height."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        self._old: Certificate | None = None

    def turned(self, turn: StepEffects) -> None:
        replica = self.liar.replica
        if turn.decided_blocks and replica is not None:
            book = replica._closed.get(codec.decode_message(turn.decided_blocks[-1].certificate.vote, (Commit,)).height)
            self._old = (
                book.highest_prepare_certificate
                if book is not None and book.highest_prepare_certificate is not None
                else self._old
            )

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if not isinstance(message, TimeoutEnvelope):
            return (message,)
        timeout = codec.decode_message(message.timeout.body, (Timeout,))
        how = self.liar.random.choice(("absent", "higher", "other height"))
        if how == "other height" and self._old is not None:
            old = codec.decode_message(self._old.vote, (Prepare,))
            if old.view <= timeout.view:
                lie = dataclasses.replace(timeout, high_view=old.view, high_block=old.block)
                return (TimeoutEnvelope(self.liar.sign(lie), self._old),)
        lie = dataclasses.replace(timeout, high_view=timeout.view, high_block=self.liar.made_up())
        return (TimeoutEnvelope(self.liar.sign(lie), None if how == "absent" else message.high),)


class WrongBytes(Strategy):
    """Sends valid signatures beside the bytes of other statements."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        match message:
            case ProposeEnvelope():
                return (dataclasses.replace(message, compact_body=codec.encode(WholeBody(self._other_body(message)))),)
            case BlockBytes():
                return (dataclasses.replace(message, block=_with_other_body(message.block)),)
            case Decision():
                return (dataclasses.replace(message, block=_with_other_body(message.block)),)
        return (message,)

    def _other_body(self, message: ProposeEnvelope) -> bytes:
        return EMPTY_BODY if self.liar.random.random() < 0.7 else self.liar.random.randbytes(20)


def _with_other_body(block: bytes) -> bytes:
    decoded = decode_block(block)
    body = EMPTY_BODY if decoded.body != EMPTY_BODY else codec.encode(BlockBody((), (), ())) + b"\x00"
    return encode_block(dataclasses.replace(decoded, body=body))


class FutureClock(Strategy):
    """Leads with blocks that are dated hours ahead, and prepares them."""

    ahead_ms = 7_200_000

    def started(self) -> None:
        chain = self.liar.replica._chain
        real = chain.build_block
        chain.build_block = lambda body, proposer, now_ms: real(body, proposer, now_ms + self.ahead_ms)
        chain.why_block_refused = lambda *_: None


class LateDates(FutureClock):
    """Leads with blocks that have the latest date that voters accept."""

    ahead_ms = int(CLOCK_AHEAD_SECONDS * 1_000) - 10


class BadBlocks(Strategy):
    """Leads with blocks that have one wrong field in the envelope."""

    modes: tuple[str, ...] = ("parent", "root", "next voters", "few commits", "failed", "proposer", "old")

    def started(self) -> None:
        chain = self.liar.replica._chain
        real = chain.build_block
        chain.build_block = lambda body, proposer, now_ms: self._spoil(real(body, proposer, now_ms))

    def _spoil(self, data: bytes) -> bytes:
        block, lie = decode_block(data), self.liar.made_up()
        certificate = block.parent_certificate
        match self.liar.random.choice(self.modes):
            case "parent":
                block = dataclasses.replace(block, parent=lie)
            case "root":
                block = dataclasses.replace(block, state_root=lie)
            case "next voters":
                block = dataclasses.replace(block, next_voters=lie)
            case "few commits" if certificate is not None:
                first = dict(list(certificate.signatures.items())[:1])
                block = dataclasses.replace(block, parent_certificate=Certificate(certificate.vote, first))
            case "failed":
                block = dataclasses.replace(block, failed={self.liar.others[0]: block.height + 10})
            case "proposer":
                block = dataclasses.replace(block, proposer=self.liar.others[0])
            case "old":
                block = dataclasses.replace(block, time_ms=1)
        return encode_block(block)


class ShownToOne(Strategy):
    """Leads an idle height with a block that no voter accepts, shows it to one voter and gives up the view."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        self._lied_at = 0

    def turned(self, turn: StepEffects) -> None:
        replica, node = self.liar.replica, self.liar.node()
        if node is None or not replica.is_voter or not replica._chain.is_applied or node.ledger.has_work():
            return
        if replica.height > self._lied_at and replica.view == 0 and replica.leader == self.liar.key:
            self._lied_at = replica.height
            self._lie(replica)

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        """Send nothing else at that height, so that nothing contradicts the block."""
        replica = self.liar.replica
        speaks = (
            replica is None
            or replica.height != self._lied_at
            or not isinstance(message, (ProposeEnvelope, Vote, TimeoutEnvelope))
        )
        return (message,) if speaks else ()

    def _lie(self, replica: Any) -> None:
        honest = decode_block(replica._chain.build_block(EMPTY_BODY, self.liar.key, int(self.liar.now() * 1_000)))
        block = dataclasses.replace(honest, state_root=self.liar.made_up())
        header = encode_header(make_header(block))
        propose = self.liar.sign(Propose(block.voters, block.height, 0, header_digest(header)))
        short = replica._application.make_compact_body(block.body)
        self.liar.send(self.liar.random.choice(self.liar.others), ProposeEnvelope(propose, header, short, None), 0.0)
        self.liar.tell(TimeoutEnvelope(self.liar.sign(Timeout(block.voters, block.height, 0, NO_VIEW, None)), None))


class BadBodies(Strategy):
    """Leads with bodies that no ledger accepts: ballots twice or left out, other people's transactions, evidence of nothing."""

    modes: tuple[str, ...] = ("twice", "few ballots", "forged transaction", "forged evidence", "repeated transaction", "garbage")

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        self._decided: Signed | None = None

    def started(self) -> None:
        node = self.liar.node()
        assert node is not None
        real = node.ledger.make_body
        node.ledger.make_body = lambda height, now_ms: self._spoil(real(height, now_ms))  # type: ignore[method-assign]

    def _spoil(self, data: bytes | None) -> bytes | None:
        if data is None:
            return None
        body = decode_body(data)
        closings, transactions = body.round_certificates, body.transactions
        victim = self.liar.others[0]
        self._decided = transactions[0] if transactions and self._decided is None else self._decided
        match self.liar.random.choice(self.modes):
            case "twice" if closings:
                ballots = closings[0].ballots
                body = dataclasses.replace(
                    body, round_certificates=(dataclasses.replace(closings[0], ballots=(ballots[0], *ballots)),)
                )
            case "few ballots" if closings:
                body = dataclasses.replace(
                    body, round_certificates=(dataclasses.replace(closings[0], ballots=closings[0].ballots[:1]),)
                )
            case "forged transaction":
                forged = self._forged(victim)
                body = dataclasses.replace(body, transactions=(*transactions, forged)) if forged else body
            case "forged evidence":
                lie = self.liar.sign(Commit(bytes(32), 1, 0, bytes(32)))
                evidence = Evidence(Signed(lie.body, victim, lie.signature), Signed(lie.body, victim, lie.signature))
                body = dataclasses.replace(body, evidence=(evidence,))
            case "repeated transaction" if self._decided is not None:
                body = dataclasses.replace(body, transactions=(self._decided, *transactions))
            case "garbage":
                return data + b"\x00"
        return codec.encode(body)

    def _forged(self, victim: bytes) -> Signed | None:
        node = self.liar.node()
        assert node is not None
        member = node.state.members.members.get(victim)
        if member is None:
            return None
        signed = self.liar.sign(Transaction(member.nonce + 1, node.state.height + 20, "counter/add", codec.encode([1])))
        return Signed(signed.body, victim, signed.signature)


class DoubledBallots(BadBodies):
    """Leads with closings that count one ballot twice."""

    modes = ("twice",)


class FewBallots(BadBodies):
    """Leads with closings of one ballot."""

    modes = ("few ballots",)


class TurnThief(Strategy):
    """Leads with blocks that include exactly the commits after which a liar leads again, if this is possible."""

    def started(self) -> None:
        chain = self.liar.replica._chain
        real = chain.build_block
        chain.build_block = lambda body, proposer, now_ms: self._choose(chain, real(body, proposer, now_ms))

    def _choose(self, chain: Any, data: bytes) -> bytes:
        block, voters = decode_block(data), chain.voters.get(chain.height)
        certificate = block.parent_certificate
        for _ in range(CHOICES if certificate else 0):
            assert certificate is not None
            signatures = certificate.signatures
            honest = [key for key in signatures if key not in self.liar.colluders]
            hidden = self.liar.random.sample(honest, self.liar.random.randint(0, len(signatures) - voters.quorum))
            shown = Certificate(certificate.vote, {key: of for key, of in signatures.items() if key not in hidden})
            chosen: Any = chain._envelope(block.proposer, block.time_ms, shown, block.body)
            if make_leader_schedule(block.height + 1, voters, chosen).leader_of_view(0) in self.liar.colluders:
                return encode_block(chosen)
        return data


class RepeatedTransactions(BadBodies):
    """Leads with a transaction that was decided before."""

    modes = ("repeated transaction",)


class ForgedRelays(AtEveryHeight):
    """Relays transactions of others that they never signed."""

    def lie(self, replica: Any) -> None:
        node = self.liar.node()
        assert node is not None
        for victim in self.liar.others:
            member = node.state.members.members[victim]
            forged = self.liar.sign(Transaction(member.nonce + 1, node.state.height + 20, "counter/add", codec.encode([1])))
            self.liar.tell(GossipEnvelope(Signed(forged.body, victim, forged.signature)), 0.01)


class ForgedEvidence(AtEveryHeight):
    """Accuses others with one real statement twice, with statements of two views, and with copied and made-up signatures."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        self._votes: dict[bytes, list[Signed]] = {}

    def hears(self, peer: bytes, data: bytes) -> bool:
        message = opened(data)
        signed = message.vote if isinstance(message, Vote) else message.timeout if isinstance(message, TimeoutEnvelope) else None
        if signed is not None:
            self._votes[signed.signer] = [*self._votes.get(signed.signer, []), signed][-6:]
        return True

    def lie(self, replica: Any) -> None:
        for victim, signed in sorted(self._votes.items()):
            first, second = signed[0], signed[-1]
            made_up = self.liar.sign(Commit(replica._book.voters.hash, replica.height, 0, self.liar.made_up()))
            lies = (
                EvidenceMessage(first, first),
                EvidenceMessage(first, second),
                EvidenceMessage(first, Signed(made_up.body, victim, made_up.signature)),
                EvidenceMessage(
                    Signed(self.liar.sign(Commit(bytes(32), 1, 0, bytes(32))).body, victim, made_up.signature),
                    Signed(made_up.body, victim, made_up.signature),
                ),
                EvidenceMessage(first, made_up),
            )
            self.liar.tell(self.liar.random.choice(lies))


class AlteredVotes(Strategy):
    """Relays signed statements of others with a changed height, view, block, phase or voter set."""

    def hears(self, peer: bytes, data: bytes) -> bool:
        message = opened(data)
        if isinstance(message, Vote) and self.liar.random.random() < 0.1:
            vote = codec.decode_message(message.vote.body, (Prepare, Commit))
            altered: Any = self.liar.random.choice(
                (
                    dataclasses.replace(vote, height=vote.height + 1),
                    dataclasses.replace(vote, view=vote.view + 1),
                    dataclasses.replace(vote, block=self.liar.made_up()),
                    (Commit if isinstance(vote, Prepare) else Prepare)(vote.voters, vote.height, vote.view, vote.block),
                )
            )
            self.liar.tell(Vote(Signed(codec.encode(altered), message.vote.signer, message.vote.signature)))
        return True


class FarTimeouts(AtEveryHeight):
    """Sends timeouts of a view far ahead in the names of all others, with forged signatures."""

    def lie(self, replica: Any) -> None:
        forged = self.liar.sign(Timeout(replica._book.voters.hash, replica.height, replica.view + FAR_VIEWS, NO_VIEW, None))
        for victim in self.liar.others:
            for other in self.liar.others:
                if other != victim:
                    self.liar.send(other, TimeoutEnvelope(Signed(forged.body, victim, forged.signature), None), 0.0)


class ForgedNames(Strategy):
    """Relays statements of others with a changed part, under another name, or with its own signature in their name."""

    def hears(self, peer: bytes, data: bytes) -> bool:
        message = opened(data)
        match message:
            case Vote(signed) | GossipEnvelope(signed) | TimeoutEnvelope(signed, _) | ProposeEnvelope(signed):
                if signed.signer in self.liar.others and self.liar.random.random() < FORGED_SHARE:
                    name = dataclasses.fields(message)[0].name
                    lie = dataclasses.replace(message, **{name: self._forged(signed)})
                    self.liar.tell(lie, self.liar.random.choice((0.0, 0.02)))
        return True

    def _forged(self, signed: Signed) -> Signed:
        how = self.liar.random.randrange(3)
        if how == 0:
            return Signed(signed.body, self.liar.random.choice(self.liar.others), signed.signature)
        altered = self._altered(signed.body)
        if how == 1:
            return Signed(altered, signed.signer, signed.signature)
        return Signed(altered, signed.signer, self.liar.signer.sign(signing_preimage(_tag(signed), self.liar.chain_id, altered)))

    def _altered(self, body: bytes) -> bytes:
        """Return a number or digest that differs from the signed one."""
        fields = codec.unpack(body, len(body))
        at = self.liar.random.choice([i for i, value in enumerate(fields) if i and isinstance(value, int | bytes)])
        value = fields[at]
        fields[at] = value + 1 if isinstance(value, int) else self.liar.random.randbytes(len(value))
        return codec.encode(fields)


def _tag(signed: Signed) -> str:
    return str(codec.unpack(signed.body, len(signed.body))[0])


class LyingStatus(AtEveryHeight):
    """Claims heights that no peer has reached, and signatures that others never made."""

    def lie(self, replica: Any) -> None:
        for key in self.liar.others:
            made_up = self.liar.sign(Commit(replica._book.voters.hash, replica.height + 1, 0, self.liar.made_up()))
            lies = (
                Status(replica.height + 10**6, 0),
                Status(0, 10**6),
                RememberedStatements(2**50, ()),
                RememberedStatements(replica.height, (Signed(made_up.body, key, made_up.signature),)),
                RememberedStatements(0, ()),
            )
            self.liar.send(key, self.liar.random.choice(lies), 0.0)

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        return (RememberedStatements(message.height + 10**6, ()),) if isinstance(message, RememberedStatements) else (message,)


class FalseNotices(AtEveryHeight):
    """Gives notice at every height of omitted transactions that do not exist."""

    def lie(self, replica: Any) -> None:
        node = self.liar.node()
        assert node is not None
        digests = tuple(sorted(self.liar.made_up() for _ in range(4)))
        self.liar.tell(GossipEnvelope(self.liar.sign(InclusionList(node.state.height, digests))))
        self.liar.tell(GossipEnvelope(self.liar.sign(InclusionList(2**50, digests))))


class BadParts(Strategy):
    """Serves snapshots in which one module differs from the certified one."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if isinstance(message, SnapshotPart) and message.content is SnapshotContent.MODULE and message.name == b"counter":
            return (dataclasses.replace(message, data=_counted(message.data)),)
        return (message,)


class BadRows(Strategy):
    """Serves snapshots in which rows of tables are missing or changed."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if isinstance(message, SnapshotPart) and message.content is SnapshotContent.ROWS:
            shown = codec.decode(RangeProof, message.data, len(message.data))
            (key, value), *others = shown.rows
            rows = (*others,) if self.liar.random.random() < 0.5 else ((key, value[:-1] + bytes([value[-1] ^ 1])), *others)
            return (dataclasses.replace(message, data=codec.encode(dataclasses.replace(shown, rows=rows))),)
        return (message,)


class BadOffers(BadParts):
    """Offers and serves snapshots whose modules do not match the certified root."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        node = self.liar.node()
        if isinstance(message, SnapshotOffer) and message.modules and node is not None:
            return (dataclasses.replace(message, modules={**message.modules, "counter": self._leaf(message)}),)
        return super().sends(to, message)

    def _leaf(self, offer: SnapshotOffer) -> bytes:
        """Return the digest of the altered module, which is derived from the state that the shelf serves."""
        state = self._states.get(offer.height)
        return module_digest(_counted(state)) if state is not None else self.liar.made_up()

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        self._states: dict[int, bytes] = {}

    def turned(self, turn: StepEffects) -> None:
        node = self.liar.node()
        if node is not None and node.state.height not in self._states:
            self._states[node.state.height] = node.state.encoded_module("counter")


class RenamedModules(Strategy):
    """Offers snapshots with renamed modules, or with fewer: two are hashed to one as in the tree over them."""

    def sends(self, to: bytes, message: Any) -> Iterable[Outgoing]:
        if not isinstance(message, SnapshotOffer) or not message.modules:
            return (message,)
        names, leaves = sorted(message.modules), [leaf for _, leaf in sorted(message.modules.items())]
        if self.liar.random.random() < 0.5:
            return (dataclasses.replace(message, modules={f"my {name}": message.modules[name] for name in names}),)
        joined = [merkle.node_hash(*leaves[:2]), *leaves[2:]]
        return (dataclasses.replace(message, modules=dict(zip(names, joined, strict=False))),)


def _counted(module: bytes) -> bytes:
    fields = codec.unpack(module, len(module))
    fields[0] += 1
    return codec.encode(fields)
