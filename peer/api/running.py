"""The running parts of the daemon, as the calls of the API find them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from features.parts import Desk
from ledger.audits.audit_state import ProposalKey
from ledger.core.genesis import Genesis
from peer.api.causes import AlertBook
from peer.driver.author import Author
from peer.driver.driver import Driver
from peer.driver.hearing import Hearing
from peer.settings.config import Config
from peer.settings.invitations import InvitationBook
from peer.worker.supervisor import Worker
from protocol.errors import UserError
from transport.discovery.optional_service import OptionalService
from transport.swarm import Swarm

TEXTS_MAX: Final = 4  # that people wait for at once: the worker keeps what each has of the model


@dataclass
class RunningPeer:
    config: Config
    genesis: Genesis
    driver: Driver
    network: Swarm
    addresses: Callable[[], tuple[str, ...]]  # where others reach this peer, as far as it knows
    worker: Worker | None
    stop_daemon: Callable[[], None]
    set_standing: Callable[[bool], None]  # whether this peer, where it does not vote, asks to
    asked_audits: list[tuple[bytes, ProposalKey]]  # jobs and places of proposals that people want replayed first
    author: Author
    hearing: Hearing
    invited: InvitationBook
    started: float
    desk: Callable[[str], Desk]  # of a part
    asides: Sequence[OptionalService] = ()
    alerts: AlertBook = field(default_factory=AlertBook)
    texts: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(TEXTS_MAX))

    @property
    def me(self) -> bytes:
        return self.driver.signer.public

    @property
    def now_ms(self) -> int:
        """The later one of this clock and the last block's: an idle network's time stands still."""
        return max(time.time_ns() // 1_000_000, self.driver.state.time_ms)

    @contextmanager
    def making_text(self) -> Iterator[None]:
        """`UserError` where too many texts are made already."""
        try:
            self.texts.acquire_nowait()
        except trio.WouldBlock:
            raise UserError(f"{TEXTS_MAX} texts are being made at this peer: wait until one of them ends") from None
        try:
            yield
        finally:
            self.texts.release()

    def require_member(self) -> None:
        members = self.driver.state.members
        if members.is_expelled(self.me):
            raise UserError("this peer was expelled: the network has proof that its key signed what no honest peer signs")
        if not members.is_current_key(self.me):
            raise UserError("this peer is not a member yet: it follows the log until its admission is decided")
