"""The silence of each member as this peer observes it, and the peer's votes to retire members that are silent for too long.

The peer votes only if its operator has set `retire_after_days`. No clock and no statement of another peer counts: a quorum of
voters retires a member, and each voter of the quorum has observed the whole silence. At each observation:

| since the last observation, this peer               | silence of a heard member  | silence of another member   |
|-----------------------------------------------------|----------------------------|-----------------------------|
| ran, and heard a quorum of the voters at both       | 0 s                        | grows by one interval       |
| ran, and heard fewer voters at one of them          | 0 s                        | stays as it was             |
| was off, or was stopped                             | –                          | stays as it was             |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import trio

from consensus.voter_set import VoterSet
from ledger.ledger_state import CurrentState
from ledger.members import MembersState, RetireMember, lowers_tolerance, retirement_vote_count
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.settings.data_directory import storage_errors
from peer.settings.invitation import DAY_MS
from protocol.errors import UserError
from protocol.identity import parse_peer_id, peer_id, short_id
from protocol.limits import MEMBERS_MAX
from storage import durable_files
from transport.connections.connection_manager import ConnectionManager

OBSERVE_SECONDS = 30  # seconds between two observations: twice the default silence after which a peer is suspected
SAVE_OBSERVATIONS = 120  # observations between two writes to the disk: a stopped peer loses at most an hour of observed silence
DAY_SECONDS = DAY_MS // 1_000
# Days after which such a vote expires: it is repeated while the silence lasts. An operator's vote has seven days.
RETIREMENT_DAYS = 1


class InactivityTracker:
    """The observer of silent members. Its task `run` runs beside the driver.

    `signers` returns the keys whose signatures were decided since its last call.
    """

    def __init__(
        self,
        network: ConnectionManager,
        applied: CurrentState,
        signers: Callable[[], Collection[bytes]],
        author: TransactionSubmitter,
        days: int,
        file: Path,
        tell: Callable[[str, bytes], None],
    ) -> None:
        self._network, self._applied, self._signers = network, applied, signers
        self._author, self._seconds_max, self._file, self._tell = author, days * DAY_SECONDS, file, tell
        self._silent: dict[bytes, int] = {}  # member -> observed seconds of silence
        self._nonces: dict[bytes, int] = {}
        self._heard_quorum = False
        self._saved: Mapping[bytes, int] = {}
        self._unsaved = 0  # observations since the last write to the disk
        self._told: dict[tuple[bytes, str], int] = {}  # (member, message) -> days of silence when the message was last shown

    async def run(self) -> None:
        self.load_saved()
        while True:
            subject = self.observe_members()
            # Up to an hour of silence may be lost at a stop of the peer, but the end of a silence must be saved at once.
            if self._unsaved >= SAVE_OBSERVATIONS or self._saved.keys() - self._silent.keys():
                await trio.to_thread.run_sync(self.save)
            if subject is not None and not self._author.has_pending:
                await self._submit_retirement(subject)
            await trio.sleep(OBSERVE_SECONDS)

    def load_saved(self) -> None:
        """Read the seconds of silence that were observed before a restart."""
        self._silent = load_silences(self._file, lambda text: self._tell(text, self._network.me))
        self._saved = dict(self._silent)

    def save(self) -> None:
        self._saved, self._unsaved = dict(self._silent), 0
        with storage_errors(self._file), durable_files.atomic_write(self._file) as stream:
            stream.write("".join(f"{peer_id(key)} {seconds}\n" for key, seconds in self._saved.items()).encode())

    def observe_members(self) -> bytes | None:
        """Observe all members once. Return the member that this peer must now vote to retire, or None."""
        members, me = self._applied.current.members, self._network.me
        voters = VoterSet(members.voters)
        hears_quorum = len((self._network.live_peers() | {me}) & voters.members) >= voters.quorum
        counts, self._heard_quorum = hears_quorum and self._heard_quorum, hears_quorum
        before, self._nonces = self._nonces, {key: member.nonce for key, member in members.members.items()}
        # Members whose new transactions were decided.
        decided = {key for key, nonce in self._nonces.items() if before.get(key, nonce) != nonce}
        heard = {me, *self._network.live_peers(), *self._signers(), *decided}
        silent = {
            key for key in members.members if key not in heard and members.is_current_key(key) and not members.has_no_duties(key)
        }
        self._told = {(key, what): days for (key, what), days in self._told.items() if key in silent}
        self._silent = {
            key: self._silent.get(key, 0) + OBSERVE_SECONDS * counts for key in silent if counts or key in self._silent
        }
        self._unsaved += counts
        return self._member_to_retire(members) if counts else None

    def _member_to_retire(self, members: MembersState) -> bytes | None:
        """Return the silent member with the most votes to retire it, or None.

        The smallest key breaks a tie, so that voters choose the same member.
        """
        me, lasting = self._network.me, {key for key, seconds in self._silent.items() if seconds >= self._seconds_max}
        lasting -= set(members.resigning_voters)
        mine = members.retirement_votes.get(me)
        if me not in members.voters or (mine is not None and (mine.lower_tolerance or mine.subject not in lasting)):
            return None  # this peer is no voter, or its operator has voted about another member
        for key, seconds in self._silent.items():  # a warning long before the vote gives operators time to find the cause
            if key not in lasting and seconds >= max(DAY_SECONDS, self._seconds_max / 2):
                self._tell_of(key, f"after {self._seconds_max // DAY_SECONDS} days this peer votes to retire it")
        for key in sorted(key for key in lasting if lowers_tolerance(members, key)):
            lasting.remove(key)
            command = f"`peer retire {short_id(key)} --lower-tolerance`"
            self._tell_of(key, f"retiring it lowers the number of tolerated faulty voters: add a voter first, or run {command}")
        subject = min(lasting, key=lambda key: (-retirement_vote_count(members, key), key), default=None)
        return None if mine is not None and mine.subject == subject else subject

    def _tell_of(self, key: bytes, what: str) -> None:
        days = self._silent[key] // DAY_SECONDS
        if self._told.get((key, what)) != days:
            self._told[key, what] = days
            self._tell(f"{short_id(key)} has been silent at this peer for {days} days: {what}", key)

    async def _submit_retirement(self, subject: bytes) -> None:
        self._tell_of(subject, "this peer votes to retire it (setting `retire_after_days`)")
        expires = time.time_ns() // 1_000_000 + RETIREMENT_DAYS * DAY_MS
        try:
            await self._author.submit("member/retire", RetireMember(subject, False, expires))
        except UserError as error:
            self._tell_of(subject, str(error))


def load_silences(file: Path, tell: Callable[[str], None]) -> dict[bytes, int]:
    """Return the seconds of silence in a file by member. The silence of a member whose line cannot be read begins at zero."""
    with storage_errors(file):
        lines = file.read_text(errors="replace").splitlines()[:MEMBERS_MAX] if file.exists() else []
    found: dict[bytes, int] = {}
    for line in lines:
        peer, _, seconds = line.partition(" ")
        try:
            found[parse_peer_id(peer)] = int(seconds)
        except (UserError, ValueError):
            tell(f"{file}: ignored the line {line[:80]!r}, expected PEER SECONDS: the silence of that peer counts from now")
    return found
