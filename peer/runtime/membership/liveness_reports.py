"""Liveness of voters as this peer and other voters observe it, for people. No decision of the network depends on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Set

import trio

from consensus.voter_set import VoterSet
from features.peer_names import PeerNames
from features.text_tables import pluralize
from ledger.ledger_state import CurrentState
from protocol.api import LivenessMatrix
from protocol.identity import peer_id, short_id
from protocol.limits import VOTERS_MAX
from protocol.messages import LivenessReport
from transport.connections.connection_manager import ConnectionManager
from transport.connections.peer_link import PeerLink

REPORT_SECONDS = 1.0  # seconds between two observations, and between two reports on one link
NAMED_MAX = 12  # peers that a text names on one side of a partition, so that it stays readable
GAPS_MAX = 4  # voters in one line about voters that do not hear others: `peer reach` shows all of them

Links = Mapping[bytes, PeerLink]


class LivenessMonitor:
    """The exchange of liveness reports with other voters. Its task `run` runs beside the driver."""

    def __init__(
        self, network: ConnectionManager, applied: CurrentState, tell: Callable[[str, bytes], None] = lambda text, peer: None
    ) -> None:
        """Create a monitor. It calls `tell(text, key)` when the voter `key` becomes silent and when it is heard again."""
        self._network, self._applied, self._tell = network, applied, tell
        self._silent: Set[bytes] = frozenset()  # voters that were reported as silent
        self._heard_at: dict[bytes, float] = {}  # voter -> time when this peer last heard the voter
        # (observer, voter) -> time of the observer's first report in which the voter is missing.
        self._deaf_since: dict[tuple[bytes, bytes], float] = {}

    async def run(self) -> None:
        while True:
            self.exchange_reports()
            await trio.sleep(REPORT_SECONDS)

    def exchange_reports(self) -> None:
        """Update the observations, show changes, and send this voter's report to linked members if it has changed."""
        (voters, links), members = self._take_in(), self._applied.current.members
        heard = self._heard(voters, links)
        before, self._silent = self._silent, self._heard_at.keys() - heard
        for peer in sorted(self._silent - before):
            self._tell(
                f"{short_id(peer)} is silent: nothing received for {trio.current_time() - self._heard_at[peer]:.0f} s", peer
            )
        for peer in sorted(before & heard):
            self._tell(f"{short_id(peer)} is heard again", peer)
        if self._network.me in voters:
            self._network.send_liveness_report(
                LivenessReport(voters.hash, encode_heard(voters, heard)), {peer for peer in links if members.is_current_key(peer)}
            )

    def _take_in(self) -> tuple[VoterSet, Links]:
        now, voters, links = (
            trio.current_time(),
            VoterSet(self._applied.current.members.voters),
            {link.peer: link for link in self._network.links()},
        )
        self._heard_at |= {peer: now - link.failure_detector.silent_seconds(now) for peer, link in links.items()}
        self._heard_at = {peer: at for peer, at in self._heard_at.items() if peer in voters}
        deaf = {(who, peer) for who, heard in self._reports(voters, links).items() for peer in voters.members - heard}
        self._deaf_since = {pair: self._deaf_since.get(pair, now) for pair in deaf}
        return voters, links

    def _heard(self, voters: VoterSet, links: Links) -> frozenset[bytes]:
        """Return the voters that this peer does not suspect. Silence causes suspicion; the end of a link alone does not."""
        after = trio.current_time() - self._network.keepalive.suspect_seconds
        recent = {peer for peer, at in self._heard_at.items() if peer not in links and at > after}
        return voters.members & (self._network.live_peers() | recent | {self._network.me})

    def _reports(self, voters: VoterSet, links: Links) -> dict[bytes, frozenset[bytes]]:
        """Return the reports of live voters: reporting voter -> voters that it hears."""
        found = {peer: links[peer].liveness_report for peer in self._network.live_peers() if peer in voters}
        return {
            peer: decode_heard(voters, said.heard_voters) for peer, said in found.items() if said and said.voters == voters.hash
        }

    def liveness_matrix(self) -> LivenessMatrix:
        """Return the seconds of silence as observer -> voter -> seconds.

        The row of this peer has the seconds since it last heard each voter. The row of another voter has 0 for each voter that it
        reports as heard. For other voters, that row has the seconds since the first report without the voter, plus the seconds of
        silence before a suspicion.
        """
        voters, links = self._take_in()
        now, me, reports = trio.current_time(), self._network.me, self._reports(voters, links)
        borne = self._network.keepalive.suspect_seconds

        def seconds(observer: bytes, peer: bytes) -> float | None:
            if observer == me:
                return now - self._heard_at[peer] if peer in self._heard_at else None
            if observer not in reports:
                return None
            return 0.0 if peer in reports[observer] else now - self._deaf_since[observer, peer] + borne

        rows = sorted(voters.members | {me})
        return {peer_id(a): {peer_id(b): seconds(a, b) for b in voters.keys if a != b} for a in rows}

    def partition_text(self, names: PeerNames) -> str:
        """Return a line that names both sides of a partition, or an empty string.

        The line is empty unless this peer is a voter that hears no quorum and has heard a missing voter before.
        """
        (voters, links), me = self._take_in(), self._network.me
        here, needed = (self._network.live_peers() | {me}) & voters.members, voters.quorum
        silent = self._heard_at.keys() - self._heard(voters, links)
        if me not in voters or len(here) >= needed or not silent:
            return ""
        return (
            f"partition: {len(here)} of {len(voters)} voters are connected ({_named(here, names)}), {needed} are needed; "
            f"not heard: {_named(voters.members - here, names)}"
        )

    def gaps_text(self, names: PeerNames) -> str:
        """Return a line about gaps, or an empty string.

        A gap is a voter that this peer hears and that does not hear another such voter.
        """
        voters, links = self._take_in()
        heard = self._heard(voters, links)
        reports = self._reports(voters, links)
        deaf = [(names[peer_id(who)], heard - said) for who, said in sorted(reports.items()) if heard - said]
        told = [f"{who} does not hear {_named(peers, names)}" for who, peers in deaf[:GAPS_MAX]]
        return "; ".join(
            told + [f"{pluralize(len(deaf) - GAPS_MAX, 'other')} with gaps: see `peer reach`"] * (len(deaf) > GAPS_MAX)
        )


def encode_heard(voters: VoterSet, heard: frozenset[bytes]) -> bytes:
    return sum(1 << place for place, key in enumerate(voters.keys) if key in heard).to_bytes(-(-len(voters) // 8), "little")


@functools.lru_cache(maxsize=2 * VOTERS_MAX)  # cached, because the last report of each voter is decoded every second
def decode_heard(voters: VoterSet, bits: bytes) -> frozenset[bytes]:
    """Return the voters whose bits are set in a liveness report. Bits beyond the last voter are ignored."""
    number = int.from_bytes(bits, "little")
    return frozenset(key for place, key in enumerate(voters.keys) if number >> place & 1)


def _named(peers: Iterable[bytes], names: PeerNames) -> str:
    called = [names[peer_id(peer)] for peer in sorted(peers)]
    more = [f"{len(called) - NAMED_MAX} more"] if len(called) > NAMED_MAX else []
    return ", ".join(called[:NAMED_MAX] + more)
