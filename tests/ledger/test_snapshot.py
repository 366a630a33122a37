from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from consensus.block import encode_header, header_digest, make_header
from consensus.light_client import LightClient as Proof
from consensus.light_client import TrustedBlock
from consensus.voter_set import VoterSet
from ledger.snapshots.snapshot_server import (
    LEASE_SECONDS,
    REQUESTS_MAX,
    RESPONSE_BURST_BYTES,
    RESPONSE_BYTES_PER_SECOND,
    SNAPSHOT_HEIGHTS,
    SNAPSHOTS_KEPT,
    SNAPSHOTS_MAX,
    SnapshotRequestQueue,
    SnapshotStore,
    encode_model_name,
    models_in_state,
)
from protocol.errors import RemoteProtocolError
from protocol.limits import SNAPSHOT_PART_BYTES_MAX
from protocol.messages import (
    Commit,
    GetSnapshot,
    GetSnapshotPart,
    LightBlock,
    NoSnapshot,
    SnapshotContent,
    SnapshotOffer,
    SnapshotPart,
)
from storage.ledger_store import LedgerStore
from tests.consensus.certificates import certificate_of
from tests.ledger.snapshots import Chain, Fetch, Server, assert_restored, lived
from tests.ledger.world import BY_KEY
from tests.sim.keys import FastVerifier

A, B = b"a" * 32, b"b" * 32
ANY = GetSnapshot(0, 0, 0)


@pytest.fixture(scope="module")
def chain() -> Chain:
    return lived(100)


def offered(shelf: SnapshotStore, now: float = 0.0, known: int = 0, wanted: int = 0) -> int:
    answer = shelf.answer_request(GetSnapshot(known, 0, wanted), now)
    assert isinstance(answer, SnapshotOffer | NoSnapshot)
    return answer.height


def module(height: int) -> GetSnapshotPart:
    return GetSnapshotPart(height, SnapshotContent.MODULE, b"jobs", 0)


# Kept snapshots ------------------------------------------------------------------------------------------------------


def test_peers_that_applied_different_heights_offer_the_same_snapshot(chain: Chain) -> None:
    assert {offered(chain.shelf(until)) for until in range(33, 40)} == {32} and 32 % SNAPSHOT_HEIGHTS == 0


def test_a_snapshot_is_offered_once_it_is_certified_and_not_before(chain: Chain) -> None:
    assert offered(chain.shelf(until=40)) == 32
    assert offered(chain.shelf(until=41)) == 40


def test_the_last_ones_are_kept_and_their_models_with_them(chain: Chain) -> None:
    shelf = chain.shelf(until=90)
    held = [height for height in range(8, 90, 8) if isinstance(shelf.answer_request(module(height), 0.0), SnapshotPart)]
    assert held == [80, 88] and len(held) == SNAPSHOTS_KEPT
    needed = {(key, job.round) for height in held for key, job in chain.states[height].jobs.jobs.items()}
    assert needed <= chain.models.pinned


def test_what_is_being_fetched_is_kept_longer_but_not_for_ever(chain: Chain) -> None:
    shelf, now = chain.shelf(until=33), 0.0
    for height in range(34, 60):
        now += 1.0
        assert isinstance(shelf.answer_request(module(32), now), SnapshotPart)
        shelf.add_applied_state(chain.states[height], now)
    for height in range(60, 90):
        shelf.add_applied_state(chain.states[height], now := now + LEASE_SECONDS)
    assert shelf.answer_request(module(32), now) == NoSnapshot(32)


def test_nobody_makes_a_peer_keep_more_than_a_few_snapshots(chain: Chain) -> None:
    shelf = chain.shelf(until=10)
    for height in range(11, 50):
        shelf.add_applied_state(chain.states[height], 0.0)
        for other in range(1, height):
            shelf.answer_request(module(other), 0.0)
            offered(shelf, wanted=other)
            assert len(shelf._held) <= SNAPSHOTS_MAX


def test_whoever_asks_at_every_height_takes_nobody_the_snapshot_that_is_being_fetched(chain: Chain) -> None:
    """Snapshots at multiples are fetched by all. Those that were made for one peer give way to them."""
    shelf = chain.shelf(until=41)
    fetched = offered(shelf)
    assert fetched == 40
    for height in range(42, 42 + 32 - 1):
        shelf.add_applied_state(chain.states[height], float(height))
        assert offered(shelf, float(height), known=height - 3) == height - 1  # made for this peer, and fetched by it too
        assert isinstance(shelf.answer_request(module(height - 1), float(height)), SnapshotPart)
        for other in range(8, height, 8):
            shelf.answer_request(module(other), float(height))
        assert isinstance(shelf.answer_request(module(fetched), height + 0.5), SnapshotPart), height


def test_a_snapshot_between_two_multiples_stays_while_somebody_fetches_it_whatever_else_is_asked_for(chain: Chain) -> None:
    """A peer that was invited after the last multiple can restore no other snapshot yet."""
    shelf = chain.shelf(until=17)
    for height in range(18, 44):
        shelf.add_applied_state(chain.states[height], 0.0)
        for other in range(SNAPSHOT_HEIGHTS, height, SNAPSHOT_HEIGHTS):
            shelf.answer_request(module(other), 0.0)
    assert offered(shelf, wanted=41) == 41
    for height in range(44, 100):
        now = float(height - 43)
        shelf.add_applied_state(chain.states[height], now)
        offered(shelf, now, wanted=height - 2)  # a stranger, at every height
        for other in range(1, height):
            if other != 41:
                shelf.answer_request(module(other), now)
        assert isinstance(shelf.answer_request(module(41), now), SnapshotPart), height


def test_where_everybody_rests_each_of_the_last_certified_states_is_served_whatever_others_fetch(chain: Chain) -> None:
    """A peer whose state diverged in the last block can restore nothing else."""
    shelf = chain.shelf(until=46)
    for height in (24, 32, 40, 43, 44):
        offered(shelf, wanted=height)
        shelf.answer_request(module(height), 1.0)
    for height in (43, 44, 45):
        assert offered(shelf, 2.0, wanted=height) == height
        assert isinstance(shelf.answer_request(module(height), 3.0), SnapshotPart)
    assert shelf.answer_request(module(46), 3.0) == NoSnapshot(46), "nothing certifies the last one yet"


def test_after_a_restart_an_idle_peer_offers_what_the_last_empty_block_certifies(chain: Chain) -> None:
    idle = Chain()
    idle.start()
    idle.grow(6)
    shelf = SnapshotStore(idle, idle.models)
    shelf.add_initial_state(idle.state)
    assert offered(shelf) == 5
    assert_restored(Fetch(idle, {A: Server(shelf)}).run(), idle)


def test_after_a_restart_a_state_that_nothing_certifies_is_not_offered() -> None:
    fresh = Chain()
    fresh.grow(6)
    fresh.start()
    shelf = SnapshotStore(fresh, fresh.models)
    shelf.add_initial_state(fresh.state)
    assert offered(shelf) == 0


def test_a_peer_whose_model_is_gone_offers_that_snapshot_no_more() -> None:
    chain = lived(100)
    shelf = chain.shelf()
    chain.models.models.clear()
    height = offered(shelf)
    name = encode_model_name(*next(iter(models_in_state(chain.states[height]))))
    assert shelf.answer_request(GetSnapshotPart(height, SnapshotContent.MODEL, name, 0), 0.0) == NoSnapshot(height)
    assert shelf.answer_request(module(height), 0.0) == NoSnapshot(height)


def test_a_snapshot_serves_the_models_of_the_jobs_and_of_their_anchors_and_no_others() -> None:
    chain = Chain()
    running = chain.start(spec=b"unaudited:99")
    chain.play(running)
    chain.play(running)
    chain.grow(40)
    shelf, height = chain.shelf(), offered(chain.shelf())
    assert set(models_in_state(chain.states[height])) == {(running, 0), (running, 2)}
    for number in (0, 2):
        part = shelf.answer_request(GetSnapshotPart(height, SnapshotContent.MODEL, encode_model_name(running, number), 0), 0.0)
        assert isinstance(part, SnapshotPart) and part.data == chain.models.read_part(running, number, 0)
    for name in (encode_model_name(running, 1), running):
        with pytest.raises(RemoteProtocolError, match="no such model"):
            shelf.answer_request(GetSnapshotPart(height, SnapshotContent.MODEL, name, 0), 0.0)


def test_whoever_was_restored_lately_itself_and_lacks_older_headers_leaves_the_asker_to_others(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, height = chain.shelf(), offered(chain.shelf())
    kept = chain.get_header
    monkeypatch.setattr(chain, "get_header", lambda of: kept(of) if of > height - 5 else None)
    assert isinstance(shelf.answer_request(GetSnapshotPart(height, SnapshotContent.HEADERS, b"", height - 2), 0.0), SnapshotPart)
    assert shelf.answer_request(GetSnapshotPart(height, SnapshotContent.HEADERS, b"", height - 5), 0.0) == NoSnapshot(height)
    assert shelf.answer_request(module(height), 0.0) != NoSnapshot(height), "what is there it gives"


# Invalid requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        GetSnapshotPart(96, SnapshotContent.BLOCK, bytes(32), 0),
        GetSnapshotPart(96, SnapshotContent.MODULE, b"nothing", 0),
        GetSnapshotPart(96, SnapshotContent.MANIFEST, bytes(32), 0),
        GetSnapshotPart(96, SnapshotContent.MODEL, b"", 0),
        GetSnapshotPart(96, SnapshotContent.HEADERS, b"", 0),
        GetSnapshotPart(96, SnapshotContent.HEADERS, b"", 10_000),
    ],
)
def test_a_request_for_what_cannot_be_there_is_a_fault(chain: Chain, request_: GetSnapshotPart) -> None:
    with pytest.raises(RemoteProtocolError, match="bad-request"):
        chain.shelf().answer_request(request_, 0.0)


def test_whoever_knows_more_than_is_held_gets_no_offer(chain: Chain) -> None:
    shelf = chain.shelf()
    for request in (GetSnapshot(99, 0, 0), GetSnapshot(0, 0, 100), GetSnapshot(0, 1_000, 0)):
        assert shelf.answer_request(request, 0.0) == NoSnapshot(0)


def test_pieces_behind_the_end_are_empty(chain: Chain) -> None:
    answer = chain.shelf().answer_request(GetSnapshotPart(96, SnapshotContent.MODULE, b"jobs", 10**9), 0.0)
    assert isinstance(answer, SnapshotPart) and answer.data == b""


# Rate ----------------------------------------------------------------------------------------------------------------


def test_each_peer_is_served_in_its_turn_within_its_rate() -> None:
    queue = SnapshotRequestQueue()
    for number in range(REQUESTS_MAX):
        queue.add_request(A, module(number), 0.0)
    queue.add_request(B, module(0), 0.0)
    served = [request[0] for _ in range(20) if (request := queue.pop_request(0.0))]
    assert served.index(B) == 1, "a long queue of one peer is not before the others"
    assert len(served) == RESPONSE_BURST_BYTES // SNAPSHOT_PART_BYTES_MAX + 1
    wait = queue.wait_seconds()
    assert 0 < wait <= SNAPSHOT_PART_BYTES_MAX / RESPONSE_BYTES_PER_SECOND
    assert queue.pop_request(wait * 0.9) is None and queue.pop_request(wait * 1.01) is not None


def test_a_flood_of_requests_is_a_fault_and_one_that_left_is_forgotten() -> None:
    queue = SnapshotRequestQueue()
    for number in range(REQUESTS_MAX):
        queue.add_request(A, module(number), 0.0)
    with pytest.raises(RemoteProtocolError, match="flood"):
        queue.add_request(A, module(99), 0.0)
    queue.remove_peer(A)
    assert queue.pop_request(0.0) is None and queue.wait_seconds() == float("inf")


# The proof -----------------------------------------------------------------------------------------------------------


def test_a_path_stands_where_it_was_after_a_link_that_proves_nothing(chain: Chain) -> None:
    first, second = list(chain.light_blocks(0, 100))[:2]
    path = Proof(chain.chain, FastVerifier(), 0, VoterSet(chain.states[0].members.voters), None)
    for wrong in (second, replace(first, certificate=second.certificate), replace(first, next_voters=())):
        with pytest.raises(RemoteProtocolError):
            path.verify_light_block(wrong)
        assert path.height == 0
    path.verify_light_block(first)
    with pytest.raises(RemoteProtocolError, match="bad-proof"):
        path.verify_light_block(first)
    assert path.verify_light_block(second).header.next_voters == path.voters.hash


def test_next_voters_that_do_not_hash_to_what_the_header_names_are_refused(chain: Chain) -> None:
    link = next(iter(chain.light_blocks(0, 100)))
    path = Proof(chain.chain, FastVerifier(), 0, VoterSet(chain.states[0].members.voters), None)
    for keys in (link.next_voters[:-1], link.next_voters[::-1], (*link.next_voters, link.next_voters[-1])):
        with pytest.raises(RemoteProtocolError, match="bad-proof"):
            path.verify_light_block(replace(link, next_voters=keys))


def test_a_header_that_contradicts_its_certificate_about_the_voters_is_refused(chain: Chain) -> None:
    """The proof requires that the signing set is the one that the header names as deciding."""
    voters = VoterSet(chain.states[0].members.voters)
    header = encode_header(replace(make_header(chain.decided[1].decode()), voters=bytes(32)))
    commit = Commit(voters.hash, 1, 0, header_digest(header))
    certificate = certificate_of(chain.chain, commit, (BY_KEY[key] for key in voters.keys))
    path = Proof(chain.chain, FastVerifier(), 0, voters, None)
    with pytest.raises(RemoteProtocolError, match="foreign-voters"):
        path.verify_light_block(LightBlock(header, certificate, voters.keys))


# On disk -------------------------------------------------------------------------------------------------------------


def test_a_peer_that_began_with_a_snapshot_serves_the_next_newcomer(tmp_path: Path, chain: Chain) -> None:
    """It has no old blocks, but it has the proof and the headers that it received."""
    fetch = Fetch(chain, {A: Server(chain.shelf(until=90))}).run()
    restored = fetch.transfer.restored
    assert restored is not None
    restored.install_models()
    store = LedgerStore(tmp_path / "ledger.db", chain.chain)
    encoded = chain.rules.encode_state(restored.state)
    proof = restored.decisions, restored.height, restored.state.state_root, encoded, restored.headers, fetch.transfer.light_blocks
    store.restore_snapshot(*proof, tables=restored.state.tables)
    shelf = SnapshotStore(store, fetch.models)
    state = chain.rules.decode_state(store.encoded_state() or b"")
    store.rows.attach_tables(state.tables)
    shelf.add_initial_state(state)
    shelf.add_applied_state(chain.states[restored.height + 1], 0.0)
    assert store.get_decision(restored.height - 2) is None
    assert store.get_header(restored.height - 2) == chain.get_header(restored.height - 2)
    assert list(store.light_blocks(0, 1_000)) == list(chain.light_blocks(0, restored.height + 1))
    assert_restored(Fetch(chain, {B: Server(shelf)}).run(), chain)
    anchored = Fetch(chain, {B: Server(shelf)}, chain.basis(0, TrustedBlock(50, chain.decided[50].digest))).run(seconds=3.0)
    assert anchored.transfer.restored is None and not anchored.faults, "what it cannot prove it does not offer"
    store.close()


def test_links_of_another_history_leave_the_disk_with_a_restored_state(tmp_path: Path, chain: Chain) -> None:
    """A peer that receives one of them among the true ones would blame this peer."""
    store, links = LedgerStore(tmp_path / "ledger.db", chain.chain), chain.light_blocks(0, 29)
    foreign = replace(links[0], header=chain.get_header(2) or b"")
    store.restore_snapshot(
        [chain.decided[h] for h in (1, 2, 3)], 2, chain.states[2].state_root, b"other", links=[foreign], tables={}
    )
    store.restore_snapshot(
        [chain.decided[h] for h in (27, 28, 29)], 28, chain.states[28].state_root, b"right", links=links, tables={}
    )
    assert list(store.light_blocks(0, 100)) == links
    store.close()


def test_results_that_turned_out_wrong_leave_the_disk_with_a_restored_state(tmp_path: Path, chain: Chain) -> None:
    store = LedgerStore(tmp_path / "ledger.db", chain.chain)
    store.append_records([chain.decided[height] for height in range(1, 30)])
    for height in range(1, 30):
        root = chain.states[height].state_root if height < 20 else b"wrong" + bytes(27)
        store.save_state(height, root, b"state", tables={})
    store.restore_snapshot(
        [chain.decided[h] for h in (27, 28, 29)], 28, chain.states[28].state_root, b"right", disproved=20, tables={}
    )
    assert store.state_roots() == {height: chain.states[height].state_root for height in [*range(1, 20), 28]}
    assert store.get_decision(1) == chain.decided[1], "decided blocks stay"
    store.close()
