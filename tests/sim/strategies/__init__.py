"""Liars by name. A plan's fault of kind `liar` names one; ordinary seeds draw at most f of `HONEST_MAJORITY`."""

from __future__ import annotations

from tests.sim.strategies import forged, hostile, silence, twice
from tests.sim.strategies.base import Liar, Outgoing, Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "silent": silence.Silent,
    "silent-leader": silence.SilentLeader,
    "crash-at-step": silence.CrashAtStep,
    "selective": silence.Selective,
    "just-in-time": silence.JustInTime,
    "withheld-parts": silence.WithheldParts,
    "withheld-payload": silence.WithheldPayload,
    "late-payload": silence.LatePayload,
    "withheld-buffer": silence.WithheldBuffer,
    "silent-voucher": silence.SilentVoucher,
    "ballotless-voucher": silence.BallotlessVoucher,
    "censor": silence.Censor,
    "forgetful-witness": silence.CensoredHeight,
    "veto": silence.Veto,
    "two-blocks": twice.TwoBlocks,
    "two-proposes": twice.TwoProposes,
    "two-prepares": twice.TwoPrepares,
    "two-commits": twice.TwoCommits,
    "two-timeouts": twice.TwoTimeouts,
    "two-proposals": twice.TwoProposals,
    "two-ballots": twice.TwoBallots,
    "two-vouches": twice.TwoVouches,
    "two-cut-offs": twice.TwoCutOffs,
    "withheld-lock": twice.WithheldLock,
    "amnesia": twice.Amnesia,
    "rejects-all": twice.RejectsAll,
    "vouches-for-all": twice.VouchesForAll,
    "bad-payload": twice.BadPayload,
    "signs-again": twice.SignsAgain,
    "fork": twice.Fork,
    "false-certificates": forged.FalseCertificates,
    "forged-timeouts": forged.ForgedTimeouts,
    "doubled-timeouts": forged.DoubledTimeouts,
    "stale-timeouts": forged.StaleTimeouts,
    "wrong-reproposal": forged.WrongReproposal,
    "dropped-lock": forged.DroppedLock,
    "lying-high": forged.LyingHigh,
    "wrong-bytes": forged.WrongBytes,
    "future-clock": forged.FutureClock,
    "late-dates": forged.LateDates,
    "bad-blocks": forged.BadBlocks,
    "shown-to-one": forged.ShownToOne,
    "bad-bodies": forged.BadBodies,
    "doubled-ballots": forged.DoubledBallots,
    "few-ballots": forged.FewBallots,
    "turn-thief": forged.TurnThief,
    "repeated-transactions": forged.RepeatedTransactions,
    "forged-relays": forged.ForgedRelays,
    "forged-evidence": forged.ForgedEvidence,
    "altered-votes": forged.AlteredVotes,
    "far-timeouts": forged.FarTimeouts,
    "forged-names": forged.ForgedNames,
    "lying-status": forged.LyingStatus,
    "false-notices": forged.FalseNotices,
    "bad-parts": forged.BadParts,
    "bad-rows": forged.BadRows,
    "bad-offers": forged.BadOffers,
    "renamed-modules": forged.RenamedModules,
    "flood": hostile.Flood,
    "deluge": hostile.Deluge,
    "old-epoch": hostile.OldEpoch,
    "cross-chain": hostile.CrossChain,
    "garbage": hostile.Garbage,
    "epoch-edge": hostile.EpochEdge,
}
TOO_DEAR = ("deluge",)  # for the mass of seeds: megabytes
HONEST_MAJORITY = tuple(
    name for name in STRATEGIES if name not in TOO_DEAR
)  # what at most f liars of an ordinary history draw from

__all__ = ["HONEST_MAJORITY", "STRATEGIES", "Liar", "Outgoing", "Strategy"]
