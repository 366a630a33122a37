"""Whether this trainer's updates come too late, from the decided rounds. Told to its own operator; nothing is decided by it."""

from __future__ import annotations

from dataclasses import dataclass

from rounds.ballots import PROPOSALS_FACTOR, Outcome

LATE_ROUNDS_MIN = 3  # in a row: one or two happen to anybody, as beside another program
LATE_SECONDS_MIN = 30.0  # together: a worker that has just been started takes a third of that, while short rounds go by


@dataclass(frozen=True, slots=True)
class Missed:
    """The rounds of one job in a row, up to now, that counted this trainer as absent."""

    rounds: int = 0
    proposed: int = 0  # of these: in which it had said its proposal before they were closed
    seconds: float = 0.0  # that they took here, together

    def follow(self, outcome: Outcome, me: bytes, proposed: bool, seconds: float) -> Missed:
        """After one more closed round."""
        if me not in outcome.absent:
            return Missed()  # its update was there and was judged, or it did not train in this round
        return Missed(self.rounds + 1, self.proposed + proposed, self.seconds + seconds)

    @property
    def is_to_be_told(self) -> bool:
        """At 3 rounds, 6, 12, …: whoever reads the log knows it, and those who come later see it again."""
        times, rest = divmod(self.rounds, LATE_ROUNDS_MIN)
        return rest == 0 and times.bit_count() == 1

    def why(self, name: str) -> str:
        """What happens, why, and what helps; empty while it is too early to say."""
        if self.rounds < LATE_ROUNDS_MIN or self.seconds < LATE_SECONDS_MIN:
            return ""
        patience = f"the others wait {PROPOSALS_FACTOR:.0f} times what most of them take, `proposal_seconds` of the job at most"
        if 2 * self.proposed > self.rounds:
            why = "they were computed in time and reached too few voters in time: this peer's link is too slow, or cut"
            helps = "a faster link, or a job that sends less (`--preset sparse`)"
        else:
            why = f"a round closes after {self.seconds / self.rounds:.1f} s, before they are computed"
            helps = "more `threads` or a faster machine, or a job with fewer `local_steps`"
        return f"this peer's updates are not in the last {self.rounds} rounds of {name!r}: {why}; what helps: {helps}; {patience}"
