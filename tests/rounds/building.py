"""Rounds of thirteen peers for tests: terms, signed messages, and open rounds that receive them."""

from __future__ import annotations

from collections.abc import Mapping

from protocol.codec import decode_message
from protocol.identity import Signed, sign_message
from protocol.messages import Ballot, CutOff, Judgement, Proposal, Vouch
from protocol.verdicts import Verdict
from rounds.round_state import OpenRoundState, RoundCertificate, RoundTimeouts, why_round_certificate_invalid
from rounds.round_terms import RoundTerms, signed_body_digest
from rounds.vouch_set import VouchSet
from tests.sim.keys import FastSigner

CHAIN, JOB, ROOT = bytes(range(32)), b"j" * 32, b"r" * 32
SIGNERS = sorted((FastSigner(f"peer {i}") for i in range(13)), key=lambda signer: signer.public)
KEYS = tuple(signer.public for signer in SIGNERS)
BY_KEY = {signer.public: signer for signer in SIGNERS}
TIMERS = RoundTimeouts(proposals_max_seconds=60.0, replay_seconds=30.0)
OPENED = 1_700_000_000.1
ACCEPT, UNJUDGED, REPLAY, NORM = Verdict.ACCEPT, Verdict.UNJUDGED, Verdict.REPLAY, Verdict.NORM


def terms(n: int = 4, auditors: int = 0, trainers: int = 3, awaited: int | None = None) -> RoundTerms:
    """Return terms: voters are the first n keys, and auditors and trainers the first of these. Without auditors nothing is re-
    executed."""
    counts = n, auditors, trainers, trainers if awaited is None else awaited, trainers if auditors else 0
    return RoundTerms(JOB, 0, ROOT, *(frozenset(KEYS[:count]) for count in counts))


def rotated(*pairs: tuple[int, int]) -> frozenset[tuple[bytes, bytes]]:
    """Successors: the former and the next key of a trainer that rotated in the round."""
    return frozenset((KEYS[former], KEYS[after]) for former, after in pairs)


def proposal(trainer: int, variant: int = 0, round: int = 0) -> tuple[Signed, Proposal]:
    message = Proposal(JOB, round, ROOT, bytes([trainer]) * 32, 10, bytes([variant]) * 32, None)
    return sign_message(SIGNERS[trainer], CHAIN, message), message


def digest(trainer: int, variant: int = 0) -> bytes:
    return signed_body_digest(proposal(trainer, variant)[0])


def ballot(verdicts: Mapping[int, Verdict], variants: Mapping[int, int] = {}) -> Ballot:
    judged = [Judgement(KEYS[t], digest(t, variants.get(t, 0)), verdict) for t, verdict in sorted(verdicts.items())]
    return Ballot(JOB, 0, ROOT, tuple(judged))


def book(me: int | None, of: RoundTerms, timers: RoundTimeouts = TIMERS) -> OpenRoundState:
    return OpenRoundState(of, None if me is None else KEYS[me], OPENED, timers)


def hear_proposal(into: OpenRoundState, trainer: int, variant: int = 0, now: float = OPENED) -> tuple[Signed, Signed] | None:
    pair = into.add_proposal(*proposal(trainer, variant))
    into.record_payload(KEYS[trainer], now)
    return pair


def judge_proposal(into: OpenRoundState, trainer: int, verdict: Verdict, now: float = OPENED) -> None:
    hear_proposal(into, trainer, now=now)
    into.record_verdict(KEYS[trainer], verdict, now)


def hear_ballot(into: OpenRoundState, voter: int, message: Ballot, now: float = OPENED) -> tuple[Signed, Signed] | None:
    return into.add_ballot(sign_message(SIGNERS[voter], CHAIN, message), message, now)


def hear_vouch(into: OpenRoundState, voter: int, message: Vouch, now: float = OPENED) -> tuple[Signed, Signed] | None:
    return into.add_vouch(sign_message(SIGNERS[voter], CHAIN, message), message, now)


def hear_cut_off(into: OpenRoundState, voter: int, of: tuple[bytes, ...] = ()) -> None:
    message = CutOff(JOB, 0, of)
    into.add_cut_off(sign_message(SIGNERS[voter], CHAIN, message), message)


def vouch(verdicts: Mapping[int, Verdict], variants: Mapping[int, int] = {}) -> Vouch:
    judged = [Judgement(KEYS[t], digest(t, variants.get(t, 0)), verdict) for t, verdict in sorted(verdicts.items())]
    return Vouch(JOB, 0, tuple(judged))


def vouched(of: RoundTerms, said: Mapping[int, Mapping[int, Verdict]] = {}) -> VouchSet:
    """Return the vouches that these voters have signed."""
    return VouchSet.from_vouches(of, [(KEYS[voter], vouch(verdicts)) for voter, verdicts in said.items()])


def opened(
    closing: RoundCertificate,
) -> tuple[dict[bytes, Ballot], dict[bytes, CutOff], dict[bytes, Proposal], list[tuple[bytes, Vouch]]]:
    def of(parts: tuple[Signed, ...], kind: type) -> dict[bytes, object]:
        return {part.signer: decode_message(part.body, (kind,)) for part in parts}

    vouches = [(part.signer, decode_message(part.body, (Vouch,))) for part in closing.vouches]
    parts = of(closing.ballots, Ballot), of(closing.cut_offs, CutOff), of(closing.proposals, Proposal)
    return *parts, vouches  # type: ignore[return-value]


def problem(of: RoundTerms, closing: RoundCertificate) -> str | None:
    return why_round_certificate_invalid(of, closing, *opened(closing))


def ascending(signed: list[Signed]) -> tuple[Signed, ...]:
    return tuple(sorted(signed, key=lambda item: item.signer))
