"""Bugs in the rules of sampled audits, beside a liar that challenges everybody."""

from __future__ import annotations

from dataclasses import replace

from ledger.audits.docket import Docket
from ledger.audits.state import Dispute, StepFinding
from ledger.audits.transitions import Event
from protocol.reasons import Finding
from tests.sim.audits import Challenges, Cheats, Distrusts
from tests.sim.mutants.agreement import with_liar
from tests.sim.mutants.planting import Mutant, Planter
from tests.sim.simulation import Simulation

CHALLENGED = with_liar("signs-again", blocks=30)  # whose seeds 1, 4, … have sampled audits


def _challenges(simulation: Simulation) -> None:
    for peer in simulation.peers:
        if not peer.is_honest:
            peer.author.auditor = Challenges()


def _one_convicts(planter: Planter) -> None:
    def judge(self: Docket, before: Dispute, dispute: Dispute) -> None:
        self._disputes[self._disputes.index(before)] = dispute
        self._move_dispute(Event.GUILTY if dispute.guilty else Event.JUDGED, dispute)

    planter.replace(Docket, "_judge", judge)
    planter.simulation(_challenges)


def _every_verdict_is_guilty(planter: Planter) -> None:
    rule = Docket.rule

    def harsh(self: Docket, author: bytes, verdict: StepFinding) -> None:
        rule(self, author, replace(verdict, finding=Finding.MISMATCH))

    planter.replace(Docket, "rule", harsh)
    planter.simulation(_challenges)


def _every_challenge_is_false(planter: Planter) -> None:
    """Whoever challenged is held for a liar, whatever was found."""
    move = Docket._move_dispute

    def both(self: Docket, event: Event, dispute: Dispute) -> None:
        if event is Event.GUILTY:
            for person in dispute.challenges:
                self._hold_against(person)
        move(self, event, dispute)

    planter.replace(Docket, "_move_dispute", both)
    planter.simulation(_false_steps)


def _false_steps(simulation: Simulation) -> None:
    for peer in simulation.peers:
        peer.author.auditor = Distrusts() if peer.is_honest else Cheats()


AUDITS = (
    Mutant("one-convicts", "a challenge is enough to suspend somebody", ("honest suspended",), _one_convicts, CHALLENGED),
    Mutant(
        "every-verdict-guilty",
        "a verdict of innocent is counted as guilty",
        ("honest suspended",),
        _every_verdict_is_guilty,
        CHALLENGED,
    ),
    Mutant(
        "every-challenge-false",
        "a challenger is held for a liar although the step is found false",
        ("honest refuted",),
        _every_challenge_is_false,
        CHALLENGED,
    ),
)
