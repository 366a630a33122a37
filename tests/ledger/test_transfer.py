from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consensus.block import decode_header, encode_header, header_digest
from consensus.light_client import TrustedBlock
from ledger.ledger_state import state_root_over
from ledger.members import ResignAsVoter
from ledger.snapshots import snapshot_download, snapshot_server
from ledger.snapshots.snapshot_download import (
    OFFER_SECONDS,
    OFFERLESS_SECONDS,
    SNAPSHOT_TIMEOUT_SECONDS,
    SOURCES_MAX,
    STALL_SECONDS,
    DownloadStep,
    SnapshotRequest,
    make_trust_basis,
    request_order,
)
from ledger.snapshots.snapshot_server import SNAPSHOT_HEIGHTS, SnapshotStore
from protocol import codec, merkle
from protocol.errors import RemoteProtocolError
from protocol.limits import SNAPSHOT_PART_BYTES_MAX
from protocol.messages import (
    Certificate,
    Commit,
    GetSnapshot,
    GetSnapshotPart,
    NoSnapshot,
    SnapshotContent,
    SnapshotOffer,
    SnapshotPart,
)
from storage.ledger_store import LedgerStore
from tests.consensus.certificates import certificate_of
from tests.ledger.notebook import notes
from tests.ledger.snapshots import Chain, Fetch, Server, assert_restored, honestly, lived
from tests.ledger.world import BY_KEY, PEOPLE

HEIGHTS_A_SECOND = 5  # a network on one machine that trains
A, B, C, D, E = (bytes([letter]) * 32 for letter in b"abcde")
VOTERS = tuple(person.public for person in PEOPLE[:4])


@pytest.fixture(scope="module")
def chain() -> Chain:
    return lived()


def serving(chain: Chain, *names: bytes) -> dict[bytes, Server]:
    return {name: Server(chain.shelf()) for name in names}


# Successful transfers ------------------------------------------------------------------------------------------------


def test_a_newcomer_gets_the_certified_state_from_several_peers_at_once(chain: Chain) -> None:
    fetch = assert_restored(Fetch(chain, serving(chain, A, B, C)).run(), chain)
    assert fetch.transfer.restored is not None and fetch.transfer.restored.height % SNAPSHOT_HEIGHTS == 0
    assert all(server.served for server in fetch.servers.values())
    assert not fetch.faults
    assert [link.header for link in fetch.transfer.light_blocks] == [
        link.header for link in chain.light_blocks(0, fetch.transfer.restored.height + 1)
    ]


def test_no_part_is_fetched_twice_from_prompt_peers(chain: Chain) -> None:
    servers = Fetch(chain, serving(chain, A, B, C)).run().servers.values()
    served = [request for server in servers for request in server.served]
    assert len(served) == len(set(served))


def test_a_long_absent_peer_needs_only_what_changed_since(chain: Chain) -> None:
    changes = [header_of_link(link) for link in chain.light_blocks(0, 40)]
    fetch = assert_restored(Fetch(chain, serving(chain, A, B), chain.basis(changes[0])).run(), chain)
    assert [header_of_link(link) for link in fetch.transfer.light_blocks] == changes[1:] != []


def header_of_link(link: Any) -> int:
    height: int = codec.unpack(link.header, 1 << 20)[0]
    return height


def test_a_model_that_is_here_already_is_not_fetched(chain: Chain) -> None:
    fetch = Fetch(chain, serving(chain, A))
    fetch.models.models = dict(chain.models.models)
    assert_restored(fetch.run(), chain)
    assert not [
        request for request in fetch.servers[A].served if request.content in (SnapshotContent.MANIFEST, SnapshotContent.MODEL)
    ]


def test_a_damaged_model_of_the_right_round_is_fetched_again(chain: Chain) -> None:
    fetch = Fetch(chain, serving(chain, A))
    fetch.models.models = {key: [b"damaged"] for key in chain.models.models}
    assert_restored(fetch.run(), chain)


def test_a_snapshot_above_a_given_height_is_made_when_it_is_asked_for(chain: Chain) -> None:
    """A peer whose state diverged at a height needs a later snapshot, also if no block follows for long."""
    wanted = chain.state.height - 1
    assert wanted % SNAPSHOT_HEIGHTS
    fetch = assert_restored(Fetch(chain, serving(chain, A, B), wanted=wanted).run(), chain)
    assert fetch.transfer.restored is not None and fetch.transfer.restored.height == wanted


def test_a_state_that_no_block_certifies_is_not_offered(chain: Chain) -> None:
    fetch = Fetch(chain, serving(chain, A, B), wanted=chain.state.height).run(seconds=10.0)
    assert fetch.transfer.restored is None and not fetch.faults


def test_a_state_of_several_pieces_comes_whole() -> None:
    chain = Chain()
    for number in range(6):
        chain.start(PEOPLE[number % 4], spec=b"scratch:" + b" " * 250_000 + b"%d" % (number + 2))
    chain.grow(9)
    assert len(codec.encode(chain.states[8].jobs)) > SNAPSHOT_PART_BYTES_MAX
    assert_restored(Fetch(chain, serving(chain, A, B)).run(), chain)


def test_a_proof_of_several_messages_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch, chain: Chain) -> None:
    monkeypatch.setattr("ledger.snapshots.snapshot_server.OFFER_LIGHT_BLOCKS_BYTES_MAX", 2_000)
    fetch = assert_restored(Fetch(chain, serving(chain, A)).run(), chain)
    assert sum(isinstance(request, GetSnapshot) for request in fetch.servers[A].asked) > 1


def test_more_headers_than_a_part_holds_come_in_several(monkeypatch: pytest.MonkeyPatch, chain: Chain) -> None:
    monkeypatch.setattr("ledger.snapshots.snapshot_server.SNAPSHOT_PART_BYTES_MAX", 40_000)
    fetch = assert_restored(Fetch(chain, serving(chain, A)).run(), chain)
    assert len({r.index for r in fetch.servers[A].served if r.content is SnapshotContent.HEADERS}) > 1


def test_the_chain_may_be_longer_than_the_state_remembers_roots() -> None:
    chain = Chain()
    chain.grow(130)
    fetch = assert_restored(Fetch(chain, serving(chain, A)).run(), chain)
    assert fetch.transfer.restored is not None and len(fetch.transfer.restored.headers) == 98


def test_a_table_comes_by_ranges_from_several_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledger.tables.table_proofs.RANGE_BYTES", 2_000)
    chain = Chain()
    chain.write(notes(400))
    chain.write(dict.fromkeys(notes(50)))
    chain.write(notes(40, first=20, text=b"again"))
    chain.grow(9)
    fetch = assert_restored(Fetch(chain, serving(chain, A, B, C)).run(), chain)
    of_each = [
        [request for request in server.served if request.content is SnapshotContent.ROWS] for server in fetch.servers.values()
    ]
    assert all(len(served) >= 4 for served in of_each) and sum(map(len, of_each)) == 16


def test_a_snapshot_has_the_rows_of_its_own_height(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Later writes of the store do not change them."""
    monkeypatch.setattr("ledger.tables.table_proofs.RANGE_BYTES", 2_000)
    chain = Chain()
    store = LedgerStore(tmp_path / "ledger.sqlite", chain.chain)

    def save() -> None:
        state = chain.state
        store.append_records([chain.decided[state.height]])
        store.save_state(state.height, state.state_root, chain.rules.encode_state(state), tables=state.tables)

    for _ in range(8):
        chain.write(notes(200, first=20 * chain.state.height))
        save()
    server = Server(chain.shelf())
    for _ in range(6):
        chain.write(notes(100, first=20 * chain.state.height, text=b"later"))
        save()
        server.shelf.add_applied_state(chain.state, 0.0)
    fetch = assert_restored(Fetch(chain, {A: server}).run(), chain)
    assert fetch.transfer.restored is not None and fetch.transfer.restored.height == 8 < chain.state.height - 4
    store.close()


WRONG_RANGES = ("notebook/notes:0", "notebook/notes:", "notebook/notes:0a", "notebook/notes", "jobs/notes:01", ":01", "\xff:01")


@pytest.mark.parametrize("name", WRONG_RANGES)
def test_a_range_that_nobody_has_to_ask_for_is_refused(monkeypatch: pytest.MonkeyPatch, chain: Chain, name: str) -> None:
    """For example a whole table at once."""
    monkeypatch.setattr("ledger.tables.table_proofs.RANGE_BYTES", 1_000)
    shelf, height = chain.shelf(), chain.state.height - 1
    assert isinstance(
        shelf.answer_request(GetSnapshotPart(height, SnapshotContent.ROWS, b"notebook/notes:01", 0), 0.0), SnapshotPart
    )
    with pytest.raises(RemoteProtocolError, match="bad-request"):
        shelf.answer_request(GetSnapshotPart(height, SnapshotContent.ROWS, name.encode(), 0), 0.0)


# Liars ---------------------------------------------------------------------------------------------------------------


def wrong_part(content: SnapshotContent) -> Any:
    def says(request: SnapshotRequest, answer: Any) -> Any:
        if isinstance(answer, SnapshotPart) and answer.content is content:
            return replace(answer, data=answer.data[:-1] + bytes([answer.data[-1] ^ 1]) if answer.data else b"more")
        return answer

    return says


def other_leaf(request: SnapshotRequest, answer: Any) -> Any:
    if isinstance(answer, SnapshotOffer) and answer.modules:
        return replace(answer, modules={**answer.modules, "members": bytes(32)})
    return answer


def renamed(offer: SnapshotOffer) -> dict[str, bytes]:
    """Return the true digests in their order, under other names."""
    return {f"my {name}": digest for name, digest in offer.modules.items()}


def joined(offer: SnapshotOffer) -> dict[str, bytes]:
    """Return the modules' digests, with an inner node of their tree in place of the first two digests."""
    first, second, *rest = sorted(offer.modules)
    return {first: merkle.node_hash(offer.modules[first], offer.modules[second]), **{name: offer.modules[name] for name in rest}}


def with_modules(change: Any) -> Any:
    def says(request: SnapshotRequest, answer: Any) -> Any:
        return replace(answer, modules=change(answer)) if isinstance(answer, SnapshotOffer) and answer.modules else answer

    return says


def lying_height(request: SnapshotRequest, answer: Any) -> Any:
    return replace(answer, height=answer.height + 1_000) if isinstance(answer, SnapshotOffer) else answer


def truncated_proof(request: SnapshotRequest, answer: Any) -> Any:
    return replace(answer, light_blocks=answer.light_blocks[-3:]) if isinstance(answer, SnapshotOffer) else answer


def without_its_end(request: SnapshotRequest, answer: Any) -> Any:
    return replace(answer, light_blocks=answer.light_blocks[:-1]) if isinstance(answer, SnapshotOffer) else answer


def too_few_signatures(request: SnapshotRequest, answer: Any) -> Any:
    if not isinstance(answer, SnapshotOffer):
        return answer
    last = answer.light_blocks[-1]
    few = dict(list(last.certificate.signatures.items())[:2])
    return replace(
        answer, light_blocks=(*answer.light_blocks[:-1], replace(last, certificate=Certificate(last.certificate.vote, few)))
    )


def forged_root(request: SnapshotRequest, answer: Any) -> Any:
    """Return a liar's own state under a header with its root, beside the certificate of the true header."""
    if not isinstance(answer, SnapshotOffer) or not answer.modules:
        return answer
    modules = {**answer.modules, "members": bytes(32)}
    header = replace(decode_header(answer.light_blocks[-1].header), state_root=state_root_over(modules))
    last = replace(answer.light_blocks[-1], header=encode_header(header))
    return replace(answer, light_blocks=(*answer.light_blocks[:-1], last), modules=modules)


def oversized(request: SnapshotRequest, answer: Any) -> Any:
    if isinstance(answer, SnapshotPart) and answer.content is SnapshotContent.BLOCK:
        return replace(answer, data=bytes(SNAPSHOT_PART_BYTES_MAX))
    return answer


LIES: dict[str, tuple[Any, str]] = {
    **{f"wrong {content.value}": (wrong_part(content), "") for content in SnapshotContent},
    "wrong root": (other_leaf, "bad-offer"),
    "renamed modules": (with_modules(renamed), "bad-offer"),
    "two modules as one": (with_modules(joined), "bad-offer"),
    "forged root": (forged_root, "bad-proof"),
    "lying height": (lying_height, "bad-offer"),
    "truncated proof": (truncated_proof, "foreign-voters"),
    "proof without its end": (without_its_end, "bad-offer"),
    "too few signatures": (too_few_signatures, "no-quorum"),
    "endless piece": (oversized, "oversized"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_is_named_and_the_transfer_goes_on(chain: Chain, lie: str) -> None:
    says, reason = LIES[lie]
    servers = {A: Server(chain.shelf(), says), B: Server(chain.shelf(), delay=0.5)}  # the liar comes first
    fetch = assert_restored(Fetch(chain, servers).run(), chain)
    assert fetch.blamed.keys() == {A}
    assert not reason or fetch.blamed[A] == reason


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_alone_gets_nothing_installed(chain: Chain, lie: str) -> None:
    fetch = Fetch(chain, {A: Server(chain.shelf(), LIES[lie][0])}).run()
    assert fetch.transfer.restored is None and fetch.blamed.keys() == {A}


def test_a_liar_is_not_asked_again_when_it_comes_back(chain: Chain) -> None:
    fetch = Fetch(chain, {A: Server(chain.shelf(), other_leaf)}).run()
    asked = len(fetch.servers[A].asked)
    fetch.transfer.remove_peer(A, fetch.now)
    fetch.do(fetch.transfer.add_peer(A, fetch.now))
    assert len(fetch.servers[A].asked) == asked


def test_three_liars_of_different_kinds_do_not_stop_one_honest_peer(chain: Chain) -> None:
    servers = serving(chain, A, B, C, D)
    servers[A].says, servers[B].says, servers[C].says = (
        lying_height,
        wrong_part(SnapshotContent.MODULE),
        wrong_part(SnapshotContent.MODEL),
    )
    assert D not in assert_restored(Fetch(chain, servers).run(), chain).blamed


# Slow and absent peers -----------------------------------------------------------------------------------------------


def silent(request: SnapshotRequest, answer: Any) -> Any:
    return None


def silent_after_the_offer(request: SnapshotRequest, answer: Any) -> Any:
    return answer if isinstance(request, GetSnapshot) else None


@pytest.mark.parametrize("says", [silent, silent_after_the_offer])
def test_a_peer_that_stalls_is_passed_over_within_seconds_and_not_blamed(chain: Chain, says: Any) -> None:
    fetch = assert_restored(Fetch(chain, {A: Server(chain.shelf(), says), **serving(chain, B)}).run(), chain)
    assert fetch.now < STALL_SECONDS and not fetch.faults


def test_many_silent_peers_do_not_keep_the_others_from_being_asked(chain: Chain) -> None:
    servers = {bytes([i]) * 32: Server(chain.shelf(), silent) for i in range(20)} | serving(chain, A)
    assert_restored(Fetch(chain, servers).run(), chain)


def test_peers_that_say_nothing_hold_others_up_for_a_second_each_time(chain: Chain) -> None:
    silents = 8 * SOURCES_MAX
    servers = {bytes([i]) * 32: Server(chain.shelf(), silent) for i in range(silents)} | serving(chain, A, B)
    fetch = assert_restored(Fetch(chain, servers).run(), chain)
    assert fetch.now < silents / SOURCES_MAX * OFFER_SECONDS + 1.0 and not fetch.faults


def test_peers_that_prove_their_offer_link_by_link_hold_nobody_up(chain: Chain) -> None:
    shelf = chain.shelf()

    def slowly(request: SnapshotRequest, answer: Any) -> Any:
        if not isinstance(request, GetSnapshot):
            return None
        link = shelf._link(request.known + 1)
        return replace(answer, light_blocks=(link,), modules={}) if link else None

    servers = {bytes([i]) * 32: Server(shelf, slowly, delay=0.45) for i in range(SOURCES_MAX)} | serving(chain, A)
    fetch = assert_restored(Fetch(chain, servers).run(), chain)
    assert fetch.now < 2 * OFFER_SECONDS and not fetch.faults


def test_voters_are_asked_first_and_the_others_in_a_ring(chain: Chain) -> None:
    voters = chain.basis().voters
    strangers = [bytes([i]) * 32 for i in range(20)]
    ordered = request_order([*strangers, *voters.keys], voters, b"")
    assert ordered == [*voters.keys, *strangers]
    fetch = Fetch(chain, {peer: Server(chain.shelf(), silent) for peer in ordered}).run(seconds=0.0)
    assert fetch.transfer.asked_last == strangers[SOURCES_MAX - 1], "those that ask for places beside the voters"
    again = request_order(strangers, voters, fetch.transfer.asked_last)
    assert again[0] == strangers[SOURCES_MAX] and sorted(again) == strangers


def test_a_snapshot_that_all_hold_is_taken_before_a_later_one_that_few_do(chain: Chain) -> None:
    """Otherwise the only holder of a height could send it arbitrarily slowly."""
    alone = chain.shelf()
    latest = chain.state.height - 1

    def offers_the_latest(request: SnapshotRequest, answer: Any) -> Any:
        return alone.answer_request(replace(request, wanted=latest), 0.0) if isinstance(request, GetSnapshot) else answer

    fetch = assert_restored(Fetch(chain, {A: Server(alone, offers_the_latest), **serving(chain, B)}).run(), chain)
    assert fetch.transfer.restored is not None
    assert fetch.transfer.restored.height == latest // SNAPSHOT_HEIGHTS * SNAPSHOT_HEIGHTS < latest


def test_a_peer_that_leaves_is_replaced(chain: Chain) -> None:
    fetch = Fetch(chain, serving(chain, A, B))
    fetch.at(0.05, lambda: fetch.transfer.remove_peer(A, fetch.now))
    assert_restored(fetch.run(), chain)


def refuses_parts(request: SnapshotRequest, answer: Any) -> Any:
    return NoSnapshot(request.height) if isinstance(request, GetSnapshotPart) else answer


def test_a_snapshot_that_all_have_given_up_is_left_at_once_for_a_later_one() -> None:
    chain = lived(61)
    servers = {A: Server(chain.shelf(until=43), refuses_parts)}
    fetch = Fetch(chain, servers)
    fetch.run(seconds=5.0)
    assert fetch.transfer.progress[0] == 0
    assert [request.height for request in servers[A].asked if isinstance(request, GetSnapshotPart)][-1] == 40
    servers[A] = Server(chain.shelf())
    assert_restored(fetch.run(seconds=10.0), chain)
    assert fetch.transfer.restored is not None and fetch.transfer.restored.height == 56


class Busy:
    """A peer whose network continues meanwhile, and whose snapshots at multiples are all being fetched by others."""

    def __init__(self, chain: Chain, height: int) -> None:
        self.chain, self.begun, self.height = chain, height, 1
        self.shelf = chain.shelf(until=self.height)
        self.go_on(0.0)

    def go_on(self, now: float) -> None:
        while self.height < min(self.chain.state.height, self.begun + int(now * HEIGHTS_A_SECOND)):
            self.height += 1
            self.shelf.add_applied_state(self.chain.states[self.height], now)
            for height in range(SNAPSHOT_HEIGHTS, self.height, SNAPSHOT_HEIGHTS):
                self.shelf.answer_request(GetSnapshotPart(height, SnapshotContent.MODULE, b"jobs", 0), now)

    def serve(self, fetch: Fetch) -> Server:
        """Return a server of this peer, whose chain grows until a part is requested."""

        def says(request: SnapshotRequest, answer: Any) -> Any:
            self.go_on(fetch.now)
            return self.shelf.answer_request(request, fetch.now)

        return Server(self.shelf, says, delay=0.15)


@pytest.mark.parametrize("fetched_before", [(), (41,)])
def test_whoever_is_invited_between_two_multiples_does_not_starve_where_blocks_come_fast(fetched_before: tuple[int, ...]) -> None:
    """All heights above the invitation's block differ then, and each is among the last ones for three blocks only."""
    chain = lived(90)
    fetch = Fetch(chain, {}, chain.basis(0, chain.anchor(43)))  # the last multiple is 40
    for name in (A, B, C):
        peer = Busy(chain, 44)
        for height in fetched_before:
            peer.shelf.answer_request(GetSnapshot(0, 0, height), 0.0)
        fetch.servers[name] = peer.serve(fetch)
        fetch.do(fetch.transfer.add_peer(name, 0.0))
    assert_restored(fetch.run(seconds=4.0), chain)
    assert not fetch.faults


def test_where_many_join_at_once_whoever_finds_no_place_has_the_next_multiple_soon() -> None:
    """Earlier clients still hold the places for snapshots between multiples."""
    chain = lived(90)
    fetch = Fetch(chain, {}, chain.basis(0, chain.anchor(45)))
    for name in (A, B, C):
        peer = Busy(chain, 44)
        for height in (41, 42):
            peer.shelf.answer_request(GetSnapshot(0, 0, height), 0.0)
        fetch.servers[name] = peer.serve(fetch)
        peer.go_on(0.4)
        fetch.do(fetch.transfer.add_peer(name, 0.0))
    assert_restored(fetch.run(seconds=4.0), chain)
    assert fetch.transfer.restored is not None and fetch.transfer.restored.height == 48
    assert not fetch.faults


def test_links_that_break_cost_nothing_of_what_took_long_to_fetch(chain: Chain) -> None:
    """This holds also if the first peer that returns is a liar that refuses to continue."""
    fetch = Fetch(chain, {A: Server(chain.shelf(), delay=1.0)})
    fetch.run(seconds=4.5)
    height, missing = fetch.transfer.progress
    taken = fetch.servers[A].served[:4]
    assert missing > 0
    fetch.do(fetch.transfer.remove_peer(A, 4.5))
    fetch.servers |= {A: Server(chain.shelf()), B: Server(chain.shelf(), refuses_parts)}
    fetch.at(4.8, lambda: fetch.transfer.add_peer(B, 4.8))
    fetch.run(seconds=5.5)
    assert fetch.transfer.progress == (height, missing)
    fetch.at(5.6, lambda: fetch.transfer.add_peer(A, 5.6))
    assert_restored(fetch.run(seconds=30.0), chain)
    assert not [request for request in fetch.servers[A].served if request in taken]


def test_strangers_that_come_back_with_new_links_are_not_chosen_again_and_again() -> None:
    """A new link has no rest period, and strangers have any number of names."""
    chain = lived(90)
    honest, liars = VOTERS[:3], (D, E)
    servers = {peer: Server(chain.shelf(until=43), delay=0.2) for peer in honest}  # too late for the first choice
    fetch = Fetch(chain, servers | {liar: Server(chain.shelf(), silent_after_the_offer) for liar in liars})

    def again() -> DownloadStep:
        fetch.at(fetch.now + 1.2, again)
        for change in (fetch.transfer.remove_peer, fetch.transfer.add_peer):
            for liar in liars:
                fetch.do(change(liar, fetch.now))
        return DownloadStep()

    fetch.at(1.2, again)
    assert_restored(fetch.run(seconds=10.0), chain)


def test_a_question_about_what_was_left_meanwhile_is_asked_anew() -> None:
    """Otherwise strangers that leave at the right moment would be the only ones with an offer."""
    chain = lived(90)
    fetch = Fetch(chain, {voter: Server(chain.shelf(until=75), delay=0.2) for voter in VOTERS[:3]})

    def come(place: int) -> DownloadStep:
        stranger, asked = bytes([place]) * 32, []

        def says(request: SnapshotRequest, answer: Any) -> Any:
            if isinstance(request, GetSnapshot):
                return chain.shelf().answer_request(replace(request, wanted=88), 0.0)
            if not asked:
                asked.append(request)
                fetch.at(fetch.now + 1.2, lambda: go(place))
            return None

        fetch.servers[stranger] = Server(chain.shelf(), says, delay=0.01)
        return fetch.transfer.add_peer(stranger, fetch.now)

    def go(place: int) -> DownloadStep:
        fetch.do(fetch.transfer.remove_peer(bytes([place]) * 32, fetch.now))
        return come(place + 1)

    fetch.do(come(0))
    assert_restored(fetch.run(seconds=10.0), chain)


def test_a_key_that_votes_no_more_counts_like_any_stranger() -> None:
    """Its snapshot is true, but no other peer holds it any more."""
    chain = Chain()
    chain.start()
    for place, person in enumerate(PEOPLE[4:8]):
        chain.admit_voter(person, place + 1)
    for person in PEOPLE[:4]:
        chain.dismiss_voter(person)
    chain.grow(130)
    servers = {person.public: Server(chain.shelf(), delay=0.05) for person in PEOPLE[4:8]}
    servers[VOTERS[0]] = Server(chain.shelf(until=91), silent_after_the_offer)
    assert_restored(Fetch(chain, servers).run(seconds=2.0), chain)


def test_a_height_that_more_than_f_voters_offer_comes_before_a_strangers_multiple() -> None:
    """Two peers are invited by one block between two multiples: the second one gets the offer that the first one fetched."""
    chain = lived(90)

    def held() -> SnapshotStore:
        shelf = chain.shelf(until=56)
        shelf.answer_request(GetSnapshot(0, 55, 0), 0.0)
        for height in range(57, 84):
            shelf.add_applied_state(chain.states[height], 0.0)
        return shelf

    servers = {voter: Server(held(), delay=0.05) for voter in VOTERS[:3]}
    servers[D] = Server(chain.shelf(until=58), silent_after_the_offer)
    assert_restored(Fetch(chain, servers, chain.basis(0, chain.anchor(55))).run(seconds=2.0), chain)


def test_a_link_that_breaks_while_a_part_is_slow_costs_nothing(chain: Chain) -> None:
    fetch = Fetch(chain, {A: Server(chain.shelf(), delay=1.0)})
    fetch.run(seconds=6.5)
    fetch.servers[A].says = silent
    fetch.run(seconds=13.0)
    progress = fetch.transfer.progress
    fetch.do(fetch.transfer.remove_peer(A, 13.0))
    fetch.servers[A] = Server(chain.shelf())
    fetch.at(13.3, lambda: fetch.transfer.add_peer(A, 13.3))
    fetch.run(seconds=13.29)
    assert fetch.transfer.progress == progress and progress[0]
    assert_restored(fetch.run(seconds=20.0), chain)


def test_pieces_of_a_large_module_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_download, "SNAPSHOT_PART_BYTES_MAX", 50)
    monkeypatch.setattr(snapshot_server, "_piece", lambda data, index: data[50 * index : 50 * (index + 1)])
    chain = lived(40)
    fetch = Fetch(chain, {voter: Server(chain.shelf(), delay=1.0) for voter in VOTERS[:3]})
    assert_restored(fetch.run(seconds=500.0), chain)
    assert fetch.now > 2 * SNAPSHOT_TIMEOUT_SECONDS


def test_pieces_that_one_voter_alone_sends_are_no_progress() -> None:
    """It may have invented them, and only the last piece would show it."""
    chain = lived(90)

    def drips(request: SnapshotRequest, answer: Any) -> Any:
        if isinstance(request, GetSnapshot):
            return chain.shelf().answer_request(replace(request, wanted=88), 0.0)
        if request.content is SnapshotContent.MODULE:
            piece = SnapshotPart(request.height, request.content, request.name, request.index, bytes(SNAPSHOT_PART_BYTES_MAX))
            fetch.at(fetch.now + 9.0, lambda: fetch.transfer.handle_answer(VOTERS[3], piece, fetch.now))
        return None

    servers = {voter: Server(chain.shelf(until=75), delay=0.4) for voter in VOTERS[:3]}
    fetch = Fetch(chain, servers | {VOTERS[3]: Server(chain.shelf(), drips, delay=0.01)})
    assert_restored(fetch.run(seconds=30.0), chain)


def test_whoever_sends_a_part_before_it_refuses_is_waited_for_longer_each_time(chain: Chain) -> None:
    """Otherwise a liar with the highest snapshot, which nobody else holds, would be chosen again and again."""
    asked: list[float] = []

    def lies(request: SnapshotRequest, answer: Any) -> Any:
        if isinstance(request, GetSnapshot):
            asked.append(fetch.now)
        return (
            NoSnapshot(request.height)
            if isinstance(request, GetSnapshotPart) and request.content is not SnapshotContent.MODULE
            else answer
        )

    fetch = Fetch(chain, {A: Server(chain.shelf(), lies)})
    fetch.run(seconds=40.0)
    rests = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert len(rests) >= 4 and all(later >= 1.9 * earlier for earlier, later in itertools.pairwise(rests))


@pytest.mark.parametrize("seed", range(12))
def test_liars_that_offer_a_height_of_their_own_and_refuse_its_parts_are_passed_over_in_the_end(seed: int) -> None:
    """The heights are real and proven, but no honest peer happens to hold them."""
    chain, luck = lived(90), random.Random(seed)
    early, later, top = chain.shelf(until=43), chain.shelf(until=75), chain.shelf()
    fetch = Fetch(chain, {})

    def honest(request: SnapshotRequest, answer: Any) -> Any:
        return (early if fetch.now < 1.0 else later).answer_request(request, fetch.now)

    def lies(request: SnapshotRequest, answer: Any) -> Any:
        return (
            top.answer_request(replace(request, wanted=89), 0.0)
            if isinstance(request, GetSnapshot)
            else NoSnapshot(request.height)
        )

    for name in (A, B, C, D, E):
        says, fastest = (lies, 0.02) if name in (D, E) else (honest, 0.15)
        fetch.servers[name] = Server(early, says, delay=luck.uniform(fastest, 0.3))
        fetch.at(luck.uniform(0.0, 0.1), lambda name=name: fetch.transfer.add_peer(name, fetch.now))
    assert_restored(fetch.run(seconds=3 * SNAPSHOT_TIMEOUT_SECONDS), chain)


def test_after_a_snapshot_of_which_nothing_came_there_is_time_to_find_another(chain: Chain) -> None:
    """A new transfer would not know the silent peers."""
    fetch = Fetch(chain, {A: Server(chain.shelf(), silent_after_the_offer)})
    fetch.run(seconds=STALL_SECONDS - 0.5)
    assert fetch.transfer.progress[0] and not fetch.transfer.has_no_source(fetch.now)
    fetch.run(seconds=STALL_SECONDS + 1.0)
    assert not fetch.transfer.progress[0] and not fetch.transfer.has_no_source(STALL_SECONDS + OFFERLESS_SECONDS)
    assert fetch.transfer.has_no_source(STALL_SECONDS + OFFERLESS_SECONDS + 1.0)


@pytest.mark.parametrize("says", [silent_after_the_offer, refuses_parts])
def test_who_offers_the_highest_snapshot_and_sends_nothing_of_it_is_left_for_a_lower_one(chain: Chain, says: Any) -> None:
    fetch = assert_restored(
        Fetch(chain, {A: Server(chain.shelf(), says), B: Server(chain.shelf(until=33), delay=0.05)}, wanted=20).run(), chain
    )
    assert fetch.transfer.restored is not None and fetch.transfer.restored.height == 32


def test_the_highest_snapshot_is_taken_although_its_offer_comes_later() -> None:
    chain = lived(44)
    fetch = assert_restored(Fetch(chain, {A: Server(chain.shelf(until=33)), B: Server(chain.shelf(), delay=0.05)}).run(), chain)
    assert fetch.transfer.restored is not None and fetch.transfer.restored.height == 40
    assert not fetch.faults


def test_an_offer_below_what_was_asked_for_is_a_lie(chain: Chain) -> None:
    old = chain.shelf(until=33)
    assert Fetch(
        chain, {A: Server(chain.shelf(), lambda request, answer: old.answer_request(replace(request, wanted=0), 0.0))}, wanted=36
    ).run(seconds=5.0).blamed == {A: "bad-offer"}


# Other chains --------------------------------------------------------------------------------------------------------


def test_retired_keys_cannot_lead_a_newcomer_astray_that_trusts_a_recent_block() -> None:
    """The founders of height 1 sign another history long afterwards. The newcomer's invitation names a block of the true one."""
    true = lived(40)
    false = another_chain(true)
    false.grow(41)
    fetch = Fetch(true, {A: Server(false.shelf())}, true.basis(0, true.anchor(30))).run()
    assert fetch.transfer.restored is None and fetch.blamed == {A: "foreign-chain"}
    fetch = assert_restored(
        Fetch(true, {A: Server(false.shelf()), B: Server(true.shelf(), delay=0.1)}, true.basis(0, true.anchor(30))).run(), true
    )
    assert fetch.blamed == {A: "foreign-chain"}


def another_chain(true: Chain) -> Chain:
    """Return another chain of the same founders."""
    false = Chain()
    false.genesis, false.rules, false.chain = true.genesis, true.rules, true.chain
    return false


def led_astray(true: Chain) -> Chain:
    """Return a history that the founders of height 1 sign long afterwards, and in which one of them leaves."""
    false = another_chain(true)
    false.dismiss_voter(PEOPLE[2])
    false.grow(60)
    return false


@pytest.mark.parametrize(("decided", "applied"), [(0, 0), (5, 5), (5, 3), (29, 25), (29, None)])
def test_whoever_took_blocks_of_another_history_still_comes_to_the_one_of_its_invitation(
    decided: int, applied: int | None
) -> None:
    """Decisions below the trusted block are ignored, both as a block to continue from and for their voters."""
    true = lived(40)
    false = led_astray(true)
    state = None if applied is None else false.states[applied]
    basis = make_trust_basis(true.rules, state, false.decided.get(decided), true.anchor(30))
    fetch = assert_restored(Fetch(true, {A: Server(false.shelf()), B: Server(true.shelf(), delay=0.1)}, basis).run(), true)
    assert fetch.blamed == {A: "foreign-chain"}


def test_whoever_has_decided_the_block_of_its_invitation_trusts_its_own_last_one(chain: Chain) -> None:
    last, invited = chain.decided[30], chain.anchor(30)
    for state, known in ((chain.states[25], 25), (None, 0)):
        basis = make_trust_basis(chain.rules, state, last, invited)
        assert (basis.height, basis.anchor) == (known, invited)
        assert basis.voters.keys == chain.states[known].members.voters
        assert make_trust_basis(chain.rules, state, chain.decided[31], invited).anchor == chain.anchor(31)


def test_a_proof_that_leaves_the_trusted_block_out_is_refused() -> None:
    true = lived(40)

    def leaves_out(request: SnapshotRequest, answer: Any) -> Any:
        if not isinstance(answer, SnapshotOffer):
            return answer
        return replace(answer, light_blocks=tuple(link for link in answer.light_blocks if header_of_link(link) != 30))

    fetch = Fetch(true, {A: Server(true.shelf(), leaves_out)}, true.basis(0, true.anchor(30))).run()
    assert fetch.blamed == {A: "foreign-chain"} and "skips" in str(fetch.faults[0].error)


def test_a_snapshot_from_before_the_trusted_block_is_not_taken() -> None:
    old, true = lived(33), lived(44)
    fetch = Fetch(true, serving(old, A), true.basis(0, true.anchor(42))).run(seconds=5.0)
    assert fetch.transfer.restored is None and not fetch.faults  # it has nothing to offer, and reports it

    def offers_it_all_the_same(request: SnapshotRequest, answer: Any) -> Any:
        return shelf.answer_request(replace(request, anchor=0, wanted=0), 0.0) if isinstance(request, GetSnapshot) else answer

    servers = serving(old, A)
    shelf, servers[A].says = old.shelf(), offers_it_all_the_same
    fetch = Fetch(true, servers, true.basis(0, true.anchor(42))).run(seconds=5.0)
    assert fetch.transfer.restored is None and fetch.blamed == {A: "foreign-chain"}


@pytest.mark.parametrize(("set_named", "reason"), [("current", "not-a-voter"), ("old", "foreign-voters")])
def test_a_certificate_by_keys_that_have_retired_is_refused_at_the_current_height(
    chain: Chain, set_named: str, reason: str
) -> None:
    """The founders still have their keys, but one of them votes no more, and the others are no quorum."""
    retired = chain.states[0].members.voters
    assert PEOPLE[1].public in retired and PEOPLE[1].public not in chain.states[39].members.voters

    def stale(request: SnapshotRequest, answer: Any) -> Any:
        if not isinstance(answer, SnapshotOffer):
            return answer
        last = answer.light_blocks[-1]
        vote = codec.decode_message(last.certificate.vote, (Commit,))
        voters = vote.voters if set_named == "current" else chain.decided[1].decode().voters
        forged = Commit(voters, vote.height, 0, header_digest(last.header))
        certificate = certificate_of(chain.chain, forged, (BY_KEY[key] for key in retired))
        return replace(answer, light_blocks=(*answer.light_blocks[:-1], replace(last, certificate=certificate)))

    fetch = Fetch(chain, {A: Server(chain.shelf(), stale)}).run()
    assert fetch.transfer.restored is None and fetch.blamed == {A: reason}


def test_a_proof_signed_by_a_set_that_was_replaced_on_the_way_is_refused(chain: Chain) -> None:
    """Without the link that replaces it, a certificate of the old set would still prove the next change."""
    assert len(chain.light_blocks(0, 40)) >= 2

    def skips_a_change(request: SnapshotRequest, answer: Any) -> Any:
        return replace(answer, light_blocks=answer.light_blocks[1:]) if isinstance(answer, SnapshotOffer) else answer

    assert Fetch(chain, {A: Server(chain.shelf(), skips_a_change)}).run().blamed == {A: "foreign-voters"}


def test_two_certified_chains_stop_the_transfer_and_say_why() -> None:
    """More than f keys of a current set are in wrong hands, so no peer can tell which chain is the true one."""
    true = lived(41)
    false = another_chain(true)
    false.grow(40)
    false.decide(false.tx(PEOPLE[0], "member/resign", ResignAsVoter()))
    false.grow(true.state.height)
    fetch = Fetch(true, {A: Server(false.shelf()), B: Server(true.shelf())}).run()
    assert fetch.transfer.restored is None
    assert fetch.transfer.conflict is not None and "certified" in fetch.transfer.conflict


def test_an_anchor_at_or_below_what_is_known_asks_for_nothing(chain: Chain) -> None:
    assert_restored(Fetch(chain, serving(chain, A), chain.basis(12, TrustedBlock(12, bytes(32)))).run(), chain)


@pytest.mark.parametrize("height", [38, 39, 40, 41])
def test_the_trusted_block_may_be_among_the_last(height: int) -> None:
    chain = lived(44)
    assert_restored(Fetch(chain, serving(chain, A, B), chain.basis(0, chain.anchor(height))).run(), chain)


# Random lies ---------------------------------------------------------------------------------------------------------


def chance(seed: int, lies: tuple[str, ...]) -> Any:
    """Return a function that answers as a peer that lies now and then."""
    counter = iter(range(10**9))

    def says(request: SnapshotRequest, answer: Any) -> Any:
        turn = (seed + next(counter) * 7) % 5
        if turn == 0:
            return None
        return LIES[lies[turn % len(lies)]][0](request, answer) if lies and turn < 3 else answer

    return says


_LIVED = lived()


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 99), st.lists(st.sampled_from(sorted(LIES)), max_size=3), st.floats(0.001, 2.0)),
        min_size=0,
        max_size=4,
    ),
    st.floats(0.001, 0.5),
)
def test_with_one_honest_peer_the_true_state_arrives_whatever_the_others_do(
    others: list[tuple[int, list[str], float]], delay: float
) -> None:
    servers = {
        bytes([number]) * 32: Server(_LIVED.shelf(), chance(seed, tuple(lies)), slow)
        for number, (seed, lies, slow) in enumerate(others)
    }
    honest = b"h" * 32
    servers[honest] = Server(_LIVED.shelf(), honestly, delay)
    assert honest not in assert_restored(Fetch(_LIVED, servers).run(seconds=600.0), _LIVED).blamed
