"""The replica: PBFT with two phases, one height at a time, certificates carried through view changes.

Inputs are handled into facts (a verified statement, a certificate, a claim); then the rules run until none has anything to do.
`state` holds the facts, `handlers` makes them, `answers` tells them, `rules` acts on them, `timers` acts when time has passed.

Safety, as the comments in those name it:
(S1) One Propose, Prepare, Commit and Timeout per (height, view), durable before it is sent, over restarts too.
(S2) No Prepare or Commit in a view after a Timeout for it or a later one.
(S3) A proposal of view v > 0 carries a timeout certificate of exactly v − 1; the prepared block in it is proposed again unjudged.
(S4) Block bytes are durable before the Prepare, the prepare certificate before the Commit.
(S5) A Timeout counts with its certificate only; certificates are taken whole; a commit certificate of any view decides.
(S6) Who has not applied the parent prepares nothing; who finds another state than a decided block names signs nothing.
(L) marks what liveness needs.
"""

from __future__ import annotations

from consensus.application import Application
from consensus.effects import NEVER_VOTED, RestartState, StepEffects
from consensus.inputs import (
    AppliedInput,
    ConnectedInput,
    DisconnectedInput,
    DuplicateIdentityInput,
    MessageInput,
    ReplicaInput,
    TickInput,
    WorkChangedInput,
)
from consensus.pbft.replica_timers import ReplicaTimers
from protocol.identity import Signer, Verifier


class Replica(ReplicaTimers):
    """One voter's, or observer's, part in the agreement. Pure: time is an argument, effects are returned.

    `now` is seconds since the Unix epoch, and never goes backwards during a replica's life: the daemon adds a monotonic
    clock to the wall time at its start. `applied` is the last height the application has applied; decided heights above it that
    are in `restart` must follow as `AppliedInput` events, as for every `StepEffects.decided_blocks`. `anchor_height` is that of
    the block that this peer's invitation names, 0 if none: the executor lets no other block be decided there.
    """

    def __init__(
        self,
        signer: Signer,
        chain_id: bytes,
        verifier: Verifier,
        application: Application,
        applied: AppliedInput,
        restart: RestartState = NEVER_VOTED,
        anchor_height: int = 0,
    ) -> None:
        super().__init__(signer, chain_id, verifier, application, applied, restart, anchor_height)
        self._open_height()

    def step(self, event: ReplicaInput, now: float) -> StepEffects:
        """Handles one input. The turn must be executed, or merged with later ones and executed, before the next wait."""
        self.handle_input(event, now)
        return self.finish_step(now)

    def finish_step(self, now: float) -> StepEffects:
        """What the inputs taken since the last turn lead to. Rules and timers are looked at once for all of them."""
        self._now = max(now, self._now)
        if self._ask_again is not None and (self._ask_again <= self._now or self._is_vouched_for()):
            self._ask_application, self._ask_again = True, None
        self._settle()
        self._run_timers()
        return self._finish()

    def handle_input(self, event: ReplicaInput, now: float) -> None:
        """Makes facts of one input; nothing is signed before `finish_step`."""
        self._now = max(now, self._now)
        match event:
            case MessageInput(peer, message):
                self._receive(peer, message)
            case ConnectedInput(peer):
                self._links.add(peer)
                self._lost.pop(peer, None)
                self._greet(peer)
            case DisconnectedInput(peer):
                self._links.discard(peer)
                if self._chain.is_known_voter(peer):
                    self._lost[peer] = self._now
                for memory in (self._catch_up, self._future, self._answers):
                    memory.remove_peer(peer)
            case DuplicateIdentityInput(address):
                self._check.record_duplicate_identity(address)
            case AppliedInput():
                self._chain.add_applied(event)
                self._ask_application = True
                self._open_height()
            case WorkChangedInput():
                self._ask_application = True
            case TickInput():
                pass

    def _finish(self) -> StepEffects:
        turn = StepEffects(tuple(self._records), tuple(self._sends), self._deadline(), tuple(self._faults), tuple(self._heard))
        self._records, self._sends, self._faults, self._heard = [], [], [], []
        return turn
