"""Closed rounds in the model of each job, derived from closings, roots, the log of audits and requests of voters.

Written apart from the code that it checks: nothing here knows how a rollback chooses its anchor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from consensus.voter_set import quorum
from protocol import codec
from protocol.identity import Signed, short_id
from tests.sim.invariants import Violation

CONVICTED = "suspended"  # the log's word for a proposal that judges found false or could not see


@dataclass
class Lineage:
    # Rounds in the model, by job. Forgotten jobs stay here.
    lines: dict[bytes, list[int]] = field(default_factory=dict)
    roots: dict[tuple[bytes, int], bytes] = field(default_factory=dict)  # of the model at the start of a round
    rollbacks: int = 0
    reopened: int = 0  # jobs that had completed all rounds
    voted: int = 0  # rollbacks that a quorum of voters requested
    # By job: the request of each voter, and the anchors after the last block.
    _wishes: dict[bytes, dict[bytes, int]] = field(default_factory=dict)
    _anchors: dict[bytes, set[int]] = field(default_factory=dict)
    _settling: set[bytes] = field(default_factory=set)

    def on_block(self, transition: Any, after: Any, transactions: Iterable[Signed]) -> None:
        """Process each decided block once, in order. `after` has the roots of the models."""
        height, jobs = after.height, after.jobs.jobs
        for signed in transactions:
            _, _, _, kind, content = codec.unpack(signed.body, len(signed.body))
            if kind == "job/rollback":
                key, number, _ = codec.unpack(content, len(content))
                self._wishes.setdefault(key, {})[signed.signer] = number
        for key in transition.started_jobs:
            self.lines[key] = []
        for closed in transition.closed_rounds:
            self.lines[closed.job].append(closed.round)
        before = {key: list(line) for key, line in self.lines.items()}
        for key, back in transition.rolled_back.items():
            self._roll_back(height, key, back)
        convicted = [entry for entry in after.audits.log if (entry.height, str(entry.result)) == (height, CONVICTED)]
        for entry in convicted:
            if entry.round in self.lines[entry.job]:
                lie = f"round {entry.round}, with a false update of {short_id(entry.trainer)}"
                raise Violation("lie stays", f"{lie}, is in the model after height {height}")
        for key in transition.rolled_back:
            if str(jobs[key].phase) != "finished":
                self.rollbacks += 1
                self.reopened += key in self._settling
                is_voted = self._is_voted(key, after)
                self.voted += is_voted
                if not is_voted and not any(entry.job == key and entry.round in before[key] for entry in convicted):
                    raise Violation("rolled back for nothing", f"height {height}: no lie was in the model")
            self._wishes.pop(key, None)
        if any(key in jobs and str(jobs[key].phase) != "finished" and self._is_voted(key, after) for key in self._wishes):
            raise Violation("not rolled back", f"height {height}: a quorum of voters asked for it")
        self._anchors = {key: {anchor.round for anchor in job.anchors} for key, job in jobs.items()}
        self._settling = {key for key, job in jobs.items() if str(job.phase) == "settling"}
        for key, job in jobs.items():
            if job.rounds_in_model != len(self.lines[key]):
                raise Violation(
                    "taken", f"height {height}: {job.rounds_in_model} rounds, {len(self.lines[key])} are in the model"
                )
            if self.roots.setdefault((key, job.round), job.model_root) != job.model_root:
                raise Violation("round used again", f"height {height}: round {job.round} begins with another model than before")

    def _is_voted(self, key: bytes, after: Any) -> bool:
        """Return True if a quorum of the voters requests the same anchor, and it was kept."""
        wishes = self._wishes.get(key, {})
        voters = after.members.voters
        wanted = Counter(wishes[voter] for voter in voters if voter in wishes)
        kept = self._anchors.get(key, set())
        return any(count >= quorum(len(voters)) and number in kept for number, count in wanted.items())

    def _roll_back(self, height: int, key: bytes, back: Any) -> None:
        """Roll a job back to an earlier model of it, which no longer contains the later rounds."""
        if self.roots.get((key, back.anchor.round)) != back.anchor.root:
            raise Violation("anchor", f"height {height}: round {back.anchor.round} did not begin with that model")
        self.lines[key] = [number for number in self.lines[key] if number < back.anchor.round]
