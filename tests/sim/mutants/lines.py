"""Planted bugs that simulated histories do not reach (links, records, relays, budgets): changed lines with a failing test."""

from __future__ import annotations

import contextlib
import inspect
import io
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, ClassVar

import pytest

import web.feature
from consensus.pbft.message_handlers import ReplicaMessageHandlers
from ledger.audits import disputes, loss_openings
from ledger.jobs import JobsModule
from peer.doctor import doctor
from peer.node.node import Node
from peer.roles import voter
from peer.runtime.driver import Driver
from peer.runtime.membership.inactivity import InactivityTracker
from peer.runtime.membership.liveness_reports import LivenessMonitor
from peer.runtime.work_queues import run_charged
from rounds import round_state, vouch_set
from rounds.vouch_set import VouchSet, VouchState
from scenarios.emulation.link_profiles import TcpFlow
from training.job_spec import JobSpec
from training.replay import proposal_replay
from training.replicated import error_feedback
from training.replicated.codec import payload, quantization_cells
from training.replicated.replicated_model import ReplicatedModel
from transport.blobs.blob_server import UploadQueue
from transport.connections.connection_manager import ConnectionManager
from transport.connections.inbound_queue import InboundQueue
from transport.connections.peer_link import UploadShaper, choose_link_to_evict
from transport.discovery.address_book import AddressBook
from transport.discovery.peer_discovery import PeerDiscovery
from transport.discovery.peer_records import PeerRecordBook
from transport.discovery.reachability import Reachability
from transport.quotas.cpu_quota import CpuQuota, HandshakeQueue
from transport.relay.circuit_relay import CircuitQueue, CircuitRelay, StartTimeFairQueue
from transport.relay.circuit_session import CircuitSession, RelayWatchdog
from transport.relay.relay_client import RelayClient
from transport.wire.framing import Outbox
from transport.wire.link_measurements import LinkMeter
from transport.wire.noise_session import CipherState, NoiseSession

NETWORK = "tests/transport/test_"
ABSENCE = "tests/peer/test_absence.py::test_"
OPENING = "tests/training/replicated/test_opening.py::test_"
BUFFERS = "tests/training/replicated/test_buffers.py::test_"
CARRIED = "tests/training/engines/test_buffers_over_rounds.py::test_"
FEEDBACK = "tests/training/replicated/test_feedback.py::test_"
SAMPLED = "tests/training/engines/test_sampled.py::test_"
CELLS = "tests/training/replicated/test_cells.py::test_"
PAYLOADS = "tests/training/engines/test_payloads.py::test_"
REPLICA = "tests/consensus/test_replica.py::test_"
VOUCHING = "tests/rounds/test_vouching.py::test_"
TRAINERS = "tests/ledger/test_trainer_records.py::test_"
OPENINGS = "tests/ledger/test_openings.py::test_"


@dataclass(frozen=True, slots=True)
class ChangedLine:
    name: str
    what: str  # the rule it breaks, for people
    function: Any = field(repr=False)
    line: str  # a part of its source that occurs once
    instead: str
    test: str  # pytest id of a test that fails at once, without waiting for a deadline
    expects: ClassVar = ("test",)
    scenario: ClassVar = None

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Change the function in place: it stays the same object for all modules that hold it."""
        function = inspect.unwrap(self.function)
        right, function.__code__ = function.__code__, self._changed(function)
        try:
            yield
        finally:
            function.__code__ = right

    def _changed(self, function: Any) -> CodeType:
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.line) == 1, f"{self.name}: {self.line!r} is there {source.count(self.line)} times"
        in_class = "class _:\n" + textwrap.indent(source.replace(self.line, self.instead), "    ")  # so that `super()` works
        code = compile(in_class, function.__code__.co_filename, "exec", annotations.compiler_flag, dont_inherit=True)
        for name in ("_", function.__name__):
            [code] = [inner for inner in code.co_consts if isinstance(inner, CodeType) and inner.co_name == name]
        return code


LINES: tuple[ChangedLine, ...] = (
    # Records ---------------------------------------------------------------------------------------------------------
    ChangedLine(
        "record-of-lower-sequence",
        "an older record replaces a newer one",
        PeerRecordBook.accept_record,
        "record.sequence < held.record.sequence",
        "False",
        f"{NETWORK}records.py::test_the_highest_sequence_holds_whoever_brings_it_and_an_older_one_replayed_changes_nothing",
    ),
    ChangedLine(
        "record-unsigned",
        "the signature of a record is not checked",
        PeerRecordBook.accept_record,
        "open_signed(signed, self._chain_id, self._verifier, (PeerRecord,))\n    self._make_room",
        "self._make_room",
        f"{NETWORK}records.py::test_a_forged_record_of_a_member_drives_nobody_out",
    ),
    ChangedLine(
        "private-addresses-told",
        "addresses of the own network are told to peers from elsewhere",
        PeerRecordBook.records_for_scope,
        " and name[1].includes(scope)",
        "",
        f"{NETWORK}records.py::test_near_addresses_come_only_from_near_and_go_only_to_near_links",
    ),
    ChangedLine(
        "strangers-fill-records",
        "records of strangers take the room of members' ones",
        PeerRecordBook._has_room,
        " and len(strangers) < STRANGERS_MAX",
        "",
        f"{NETWORK}records.py::test_strangers_fill_their_own_room_alone_and_cost_no_signature_beyond",
    ),
    ChangedLine(
        "member-fills-address-book",
        "one member names as many addresses as it likes",
        AddressBook._learn,
        " and source.address_count < source.book_max",
        "",
        f"{NETWORK}addressbook.py::test_each_source_has_a_share_of_the_book_and_takes_none_of_others",
    ),
    ChangedLine(
        "reached-as-one-says",
        "one peer alone says where this one is reached",
        Reachability.observed_host.fget,
        ">= OBSERVERS_MIN",
        ">= 1",
        f"{NETWORK}reachability.py::test_one_that_sees_it_is_not_believed_two_are_and_then_asked",
    ),
    ChangedLine(
        "dials-for-strangers",
        "strangers have this peer dial whom they like",
        PeerDiscovery._on_dial_back,
        "not self.book.is_member(link.peer) or is_full",
        "is_full",
        f"{NETWORK}reachability.py::test_strangers_get_no_dial_back",
    ),
    # Circuits --------------------------------------------------------------------------------------------------------
    ChangedLine(
        "circuit-for-stranger",
        "a relay forwards for somebody who is no member",
        CircuitRelay._refusal_reason,
        "not (self._serves(opener) and self._serves(message.peer)) or opener == message.peer",
        "opener == message.peer",
        f"{NETWORK}relay.py::test_only_members_reach_members_that_have_reserved",
    ),
    ChangedLine(
        "circuit-of-others",
        "a third peer speaks in a circuit",
        CircuitRelay.on_message,
        " or peer not in circuit.ends",
        "",
        f"{NETWORK}relay.py::test_a_third_peer_can_neither_speak_in_a_circuit_nor_end_it",
    ),
    ChangedLine(
        "relay-without-budget",
        "a circuit takes more of a relay's uplink than its budget",
        StartTimeFairQueue.next_queue,
        "wait = lane.circuit.budget.wait_seconds(now)",
        "wait = 0",
        f"{NETWORK}relay.py::test_budgets_are_bytes_a_second_and_never_a_total",
    ),
    ChangedLine(
        "relay-without-window",
        "a relay holds whatever a circuit sends",
        CircuitRelay.on_message,
        "lane.waiting + lane.owed_credit + len(data) > WINDOW_BYTES[priority]",
        "False",
        f"{NETWORK}relay.py::test_an_end_that_reads_nothing_holds_up_its_circuit_alone_and_one_window_of_memory",
    ),
    ChangedLine(
        "vote-behind-bulk-in-relay",
        "inside a relay a vote waits for bulk",
        CircuitRelay._next,
        "for turns in self._turns if turns.first",
        "for turns in self._turns[::-1] if turns.first",
        f"{NETWORK}relay.py::test_a_vote_overtakes_bulk_of_its_own_circuit_and_of_others",
    ),
    ChangedLine(
        "relay-shares-by-circuit",
        "whoever has more circuits has more of a relay",
        StartTimeFairQueue.charge_member,
        "self._at[member] += max(size, RECORD_COST_BYTES)",
        "pass",
        f"{NETWORK}relay.py::test_members_share_each_priority_alike_however_many_circuits_they_have",
    ),
    ChangedLine(
        "turns-saved-up",
        "a member whose circuits had to wait takes a relay for as long afterwards",
        StartTimeFairQueue.next_queue,
        "self._at[other] = self._at[member]",
        "pass",
        f"{NETWORK}relay.py::test_a_member_saves_up_no_turns_while_its_circuits_have_to_wait",
    ),
    ChangedLine(
        "votes-fill-relay",
        "whoever marks all as votes takes all of a relay",
        CircuitRelay._next,
        "turns.first.spend(len(lane.queue[0]))",
        "pass",
        f"{NETWORK}relay.py::test_whoever_marks_all_as_votes_leaves_others_their_votes_at_once_and_a_share_of_bulk",
    ),
    ChangedLine(
        "reserves-without-budget",
        "whoever reserves again and again is told to all each time",
        CircuitRelay.set_reservation,
        "not _take_token(self._budgets(peer)[0], now)",
        "False",
        f"{NETWORK}relay.py::test_whoever_reserves_again_and_again_is_refused_also_over_a_new_link",
    ),
    ChangedLine(
        "pair-takes-all-circuits",
        "one member takes all circuits that another one may have",
        CircuitRelay._refusal_reason,
        "CIRCUITS_PER_PAIR_MAX",
        "CIRCUITS_MAX",
        f"{NETWORK}relay.py::test_nobody_takes_all_circuits_that_another_may_have",
    ),
    ChangedLine(
        "others-circuits-hold-up-ours",
        "a relay that begins circuits keeps its victim from opening any over another one",
        RelayClient._half_open,
        "(None if stream.is_opener else stream.carrier)",
        "stream.carrier or carrier is None",
        f"{NETWORK}detours.py::test_circuits_that_a_relay_begins_hold_up_none_of_ours",
    ),
    ChangedLine(
        "vote-as-bulk-from-relay",
        "a relay sends a vote on as bulk",
        CircuitRelay._pass_on,
        "CircuitData(lane.circuit.circuit_id, lane.priority, record), lane.priority)",
        "CircuitData(lane.circuit.circuit_id, lane.priority, record), Priority.BULK)",
        f"{NETWORK}relay.py::test_a_circuit_leads_to_a_peer_that_has_reserved_and_back",
    ),
    ChangedLine(
        "one-lane-held-back",
        "a relay holds back bulk, and nobody notices while votes pass",
        RelayWatchdog.is_withholding,
        "(SILENT_SECONDS, WITHHELD_SECONDS, WITHHELD_SECONDS)",
        "(SILENT_SECONDS, 1e9, 1e9)",
        f"{NETWORK}turns.py::test_whoever_holds_back_one_lane_is_found_out",
    ),
    ChangedLine(
        "relay-brings-strangers",
        "a relay brings circuits with strangers",
        RelayClient._refusal_reason,
        "not self._serves(message.peer)",
        "False",
        f"{NETWORK}detours.py::test_a_relay_brings_no_strangers",
    ),
    ChangedLine(
        "circuit-with-whomever",
        "the far end of a circuit may be anybody, the relay for one",
        CircuitSession.__init__,
        "expected=expected,",
        "expected=None,",
        f"{NETWORK}relay.py::test_a_relay_is_not_taken_for_the_far_end",
    ),
    ChangedLine(
        "any-wire-version",
        "a peer of another wire version is not refused for it",
        NoiseSession._read_preamble,
        "version != WIRE_VERSION",
        "False",
        f"{NETWORK}session.py::test_peers_of_two_versions_part_and_each_says_which_one_the_other_speaks",
    ),
    ChangedLine(
        "identity-unproven",
        "a peer may claim any key",
        NoiseSession._check_identity,
        "not self._verifier.verify(key, signed, signature)",
        "False",
        f"{NETWORK}session.py::test_a_key_that_the_peer_cannot_sign_for_is_refused",
    ),
    ChangedLine(
        "lanes-share-nonces",
        "two records are sealed with one key and nonce",
        CipherState.split_by_priority,
        "lane * (NONCE_MAX // count)",
        "0",
        f"{NETWORK}relay.py::test_whatever_the_relay_does_to_a_record_is_seen",
    ),
    # Silence ---------------------------------------------------------------------------------------------------------
    ChangedLine(
        "hearsay-decides",
        "what a peer says that it hears changes whom this one counts as heard",
        ConnectionManager.live_peers,
        "if not link.failure_detector.is_suspected(now)",
        "if not link.failure_detector.is_suspected(now)"
        " and (link.liveness_report is None or any(link.liveness_report.heard_voters))",
        "tests/peer/test_hearing.py::test_what_the_others_say_changes_a_table_and_nothing_else",
    ),
    ChangedLine(
        "silent-forever",
        "whoever was silent once stays so",
        LivenessMonitor.exchange_reports,
        "self._heard_at.keys() - heard",
        "self._silent | (self._heard_at.keys() - heard)",
        "tests/peer/test_hearing.py::test_silence_and_its_end_are_told_once",
    ),
    # Strangers -------------------------------------------------------------------------------------------------------
    ChangedLine(
        "read-memory-not-paid-back",
        "what was taken still counts as held",
        InboundQueue._release_bytes,
        "line.account.add_bytes(-_size(event))",
        "pass",
        f"{NETWORK}strangers.py::test_what_a_stranger_said_and_nobody_has_taken_goes_with_its_link",
    ),
    ChangedLine(
        "queue-memory-not-paid-back",
        "what is taken back still counts as held",
        Outbox.withdraw_waiting,
        "self.account.add_bytes(-gone)",
        "pass",
        f"{NETWORK}turns.py::test_what_waits_for_a_peer_that_goes_elsewhere_is_taken_back_but_for_what_has_begun",
    ),
    ChangedLine(
        "voters-give-way",
        "of many links not a stranger's gives way, but a voter's",
        choose_link_to_evict,
        "min(link.peer_class for link in links)",
        "max(link.peer_class for link in links)",
        f"{NETWORK}strangers.py::test_of_all_links_the_lowest_standing_gives_way",
    ),
    ChangedLine(
        "strangers-take-the-uplink",
        "what strangers ask for is sent while members wait",
        UploadShaper.wait_for_turn,
        "min(link.outbox.held, link.meter.frame_bytes)",
        "0",
        f"{NETWORK}uplink.py::test_strangers_cost_a_member_that_is_sent_something_little",
    ),
    ChangedLine(
        "messages-for-nothing",
        "what a link's own messages cost is charged to nobody",
        ConnectionManager.measure_cpu,
        "payer.spend(self._processor() - started)",
        "pass",
        f"{NETWORK}effort.py::test_what_a_message_costs_is_charged_to_its_link",
    ),
    ChangedLine(
        "strangers-at-work",
        "any number of strangers' messages is in a turn of the node, before a vote",
        InboundQueue._pause,
        "self._at_work.total() >= STRANGER_MESSAGES_IN_PROGRESS_MAX",
        "False",
        f"{NETWORK}effort.py::test_few_of_strangers_are_at_work_at_once_and_none_while_they_have_spent_too_much",
    ),
    ChangedLine(
        "all-hands-at-once",
        "all handshakes that wait are dealt with at the moment at which the budget is paid back",
        CpuQuota.wait_for_handshake,
        "payer.spend(STEP_SECONDS)",
        "pass",
        f"{NETWORK}effort.py::test_of_those_that_wait_for_a_handshake_each_pays_before_the_next_one_looks",
    ),
    ChangedLine(
        "newcomers-behind-attackers",
        "the host that has spent most on handshakes comes first",
        HandshakeQueue.wait_for_turn,
        "min(self._waiting",
        "max(self._waiting",
        f"{NETWORK}effort.py::test_of_hosts_that_wait_for_a_handshake_the_one_that_spent_least_is_next",
    ),
    ChangedLine(
        "strangers-overhear",
        "strangers get a copy of what is said to all",
        ConnectionManager.broadcast,
        " if not self._is_stranger(link)",
        "",
        f"{NETWORK}strangers.py::test_a_broadcast_is_not_for_strangers_but_for_whoever_is_one_no_more",
    ),
    ChangedLine(
        "strangers-checked",
        "signatures of strangers are checked whatever they say",
        Node._handle_relayed,
        "and not _asks_for_admission(signed)",
        "and False",
        "tests/peer/test_node_strangers.py::"
        "test_what_no_member_wrote_is_refused_before_its_signature_is_checked_but_for_an_admission",
    ),
    ChangedLine(
        "blocks-for-nothing",
        "what is read for askers is charged to nobody",
        run_charged,
        "network.charge_cpu(peer, seconds)",
        "pass",
        "tests/peer/test_answering.py::test_who_asks_for_much_is_answered_at_its_own_pace_and_holds_up_nobody",
    ),
    ChangedLine(
        "strangers-take-places",
        "strangers take the places of a blob that members wait for",
        UploadQueue._is_full,
        "is_stranger = self._is_stranger(peer)",
        "is_stranger = False",
        f"{NETWORK}turns.py::test_strangers_have_a_place_of_their_own_and_take_none_of_others",
    ),
    # Blobs, measures, monitors ---------------------------------------------------------------------------------------
    ChangedLine(
        "fourth-copy",
        "a holder serves everybody at once",
        UploadQueue._is_full,
        "if alike < (STRANGERS_UPLOAD_SLOTS if is_stranger else UPLOAD_SLOTS):",
        "if True:",
        f"{NETWORK}turns.py::test_the_fourth_waits_and_is_told_of_the_three",
    ),
    ChangedLine(
        "vote-behind-large-frame",
        "on a slow link a vote waits for a frame of the largest size",
        LinkMeter._piece,
        "min(most, int(VOTE_WAIT_SECONDS * self.bytes_per_second))",
        "most",
        f"{NETWORK}measures.py::test_pieces_follow_the_rate_between_their_bounds",
    ),
    ChangedLine(
        "losses-without-effect",
        "a link that loses segments carries as much as one that loses none",
        TcpFlow._note,
        "if lost and now",
        "if False and now",
        f"{NETWORK}memory.py::test_a_flow_that_loses_is_about_as_fast_as_cubic_is",
    ),
    # Members that are gone -------------------------------------------------------------------------------------------
    ChangedLine(
        "relay-of-the-expelled",
        "a relay asks who is a member only when a circuit opens",
        CircuitRelay._is_served,
        "if all(map(self._serves, circuit.ends)):",
        "if True:",
        f"{NETWORK}relay.py::test_nothing_is_forwarded_for_whoever_is_expelled_from_that_block_on",
    ),
    ChangedLine(
        "windows-without-account",
        "nobody pays for what waits in a relay",
        CircuitQueue.push,
        "self.account.add_bytes(len(record) + MESSAGE_OVERHEAD_BYTES)",
        "pass",
        f"{NETWORK}relay.py::test_what_waits_in_a_relay_is_paid_for_by_whoever_sent_it",
    ),
    ChangedLine(
        "silence-in-a-partition",
        "a peer counts days in which it heard no quorum",
        InactivityTracker.observe_members,
        "hears_quorum and self._heard_quorum, hears_quorum",
        "True, True",
        f"{ABSENCE}a_peer_that_hears_no_quorum_counts_nothing",
    ),
    ChangedLine(
        "silence-forgotten",
        "a restart forgets for how long a member was silent",
        InactivityTracker.load_saved,
        "load_silences(self._file, lambda text: self._tell(text, self._network.me))",
        "{}",
        f"{ABSENCE}a_restart_forgets_no_silence_and_adds_none",
    ),
    ChangedLine(
        "silence-lowers-f",
        "a peer wants a member retired without which f falls",
        InactivityTracker._member_to_retire,
        "if lowers_tolerance(members, key)",
        "if False",
        f"{ABSENCE}f_never_falls_by_itself_and_the_operator_is_told_once_a_day",
    ),
    ChangedLine(
        "silence-above-people",
        "a peer replaces the wish of its operator",
        InactivityTracker._member_to_retire,
        "(mine.lower_tolerance or mine.subject not in lasting)",
        "False",
        f"{ABSENCE}what_a_person_has_said_stays",
    ),
    # Opening rounds --------------------------------------------------------------------------------------------------
    ChangedLine(
        "opening-forgotten",
        "a voter forgets that the first rounds say more bits",
        JobSpec.payload_bits,
        "taken < self.compression_warmup_rounds",
        "False",
        f"{OPENING}so_many_first_rounds_say_four_bits_of_every_element_and_all_later_ones_what_the_job_says",
    ),
    ChangedLine(
        "opening-without-end",
        "one round more than the job says is said with more bits",
        JobSpec.payload_bits,
        "taken < self.compression_warmup_rounds",
        "taken <= self.compression_warmup_rounds",
        f"{OPENING}a_trainer_that_goes_on_with_four_bits_after_the_opening_or_says_its_own_in_it_is_refused",
    ),
    ChangedLine(
        "any-bits-are-right",
        "a payload may say as many bits as its trainer likes",
        payload.decode_payload,
        "unpack_header(payload)[:2] != (expected.bits, expected.origin)",
        "unpack_header(payload)[1] != expected.origin",
        f"{OPENING}a_trainer_that_goes_on_with_four_bits_after_the_opening_or_says_its_own_in_it_is_refused",
    ),
    ChangedLine(
        "opening-payload-refused",
        "an auditor bounds the payload before by the bits of the open round",
        voter.audit_request,
        "for taken in (0, round.spec.rounds)",
        "for taken in (round.model.taken,)",
        "tests/peer/test_roles.py::test_the_first_round_after_the_opening_goes_on_from_a_payload_that_is_longer_than_its_own",
    ),
    ChangedLine(
        "residual-survives",
        "trainers go on from what their undone updates left unsaid",
        ReplicatedModel.rolled_back,
        "dict(self.records) if self.spec.has_estimates else {}",
        "dict(self.records)",
        "tests/training/test_host.py::test_a_rollback_gives_the_model_of_an_anchor_a_later_number_and_forgets_what_was_left_unsaid",
    ),
    # Operators -------------------------------------------------------------------------------------------------------
    ChangedLine(
        "metrics-for-the-world",
        "metrics are served to other machines",
        web.feature._not_loopback,
        "None if is_loopback(host) else",
        "None if host else",
        "tests/peer/test_metrics.py::test_it_is_off_unless_named_and_only_on_loopback",
    ),
    ChangedLine(
        "doctor-blind-to-keys",
        "others of the machine can read the key, and the doctor is silent",
        doctor.check_key,
        "if mode & 0o077:",
        "if mode & 0o007:",
        "tests/peer/test_doctor.py::test_an_open_key_is_named_with_its_mode",
    ),
    # Buffers of levels -----------------------------------------------------------------------------------------------
    ChangedLine(
        "rounding-is-a-lie",
        "an honest trainer is convicted for what eight bits cannot say",
        quantization_cells._outside_levels,
        "(sizes + 0.5) * units",
        "sizes * units",
        f"{BUFFERS}levels_are_said_of_the_vector_that_they_were_made_of",
    ),
    ChangedLine(
        "levels-without-signs",
        "a buffer may turn its elements round",
        quantization_cells._outside_levels,
        "values * np.sign(levels)",
        "np.abs(values)",
        f"{BUFFERS}a_negative_level_is_of_negative_values_and_an_empty_chunk_of_tiny_ones",
    ),
    ChangedLine(
        "scales-of-any-size",
        "a buffer may say whatever is larger than its scale can",
        quantization_cells._squares,
        "np.repeat(high, lengths) if bits >= 8 else np.inf",
        "np.inf",
        f"{BUFFERS}levels_that_have_nothing_but_the_signs_are_far_away",
    ),
    ChangedLine(
        "payload-scales-unread",
        "a payload of few bits may say any norm",
        quantization_cells._squares,
        "_outside_scales(np.abs(values), lengths, low, high, bits) if bits < 8 else 0.0",
        "0.0",
        f"{CELLS}scales_of_another_vector_are_far_away",
    ),
    ChangedLine(
        "payload-unread",
        "a job without feedback takes any payload",
        error_feedback.payload_distances,
        "EDGES * distance, norm",
        "0.0, norm",
        f"{PAYLOADS}another_update_than_the_re_executed_one_is_found",
    ),
    ChangedLine(
        "unasked-buffer",
        "a proposal may name a buffer that nobody looks at",
        ReplicatedModel._continues,
        "proposal.buffer is not None, proposal.inner",
        "self.spec.commits_to_buffer, proposal.inner",
        f"{PAYLOADS}a_proposal_with_a_buffer_is_no_proposal_of_such_a_job",
    ),
    ChangedLine(
        "invented-residual",
        "nobody compares a buffer with the replay",
        error_feedback.buffer_distances,
        "return distance, weight * norm",
        "return 0.0, weight * norm",
        f"{CARRIED}going_on_from_another_vector_than_the_records_is_found",
    ),
    ChangedLine(
        "payload-of-another-buffer",
        "a payload may say something else than the buffer that its trainer commits to",
        error_feedback.replay_deviation,
        "if is_said else (math.inf, 0.0)",
        "",
        f"{CARRIED}a_payload_that_does_not_follow_from_the_buffer_is_far_off",
    ),
    ChangedLine(
        "tolerance-unread",
        "an auditor accepts any distance",
        error_feedback.judge_deviation,
        "distance <= tolerance * norm",
        "True",
        f"{CARRIED}another_update_is_found",
    ),
    ChangedLine(
        "buffer-of-the-payloads-bytes",
        "a buffer and a payload are one file, which is deleted with the buffer",
        JobSpec._combination_problem,
        "if self.bits >= 8 and self.commits_to_buffer:",
        "if False:",
        "tests/training/test_spec.py::test_payloads_of_eight_bits_carry_nothing_over",
    ),
    ChangedLine(
        "another-residual",
        "a trainer may go on from a buffer other than its record's",
        error_feedback.next_feedback,
        "(buffer_digest(buffer), blob_digest(payload))",
        "(record.buffer, blob_digest(payload))",
        f"{FEEDBACK}other_bytes_than_the_record_names_are_our_own_mistake",
    ),
    ChangedLine(
        "first-loss-binds",
        "an auditor that replays one step of fifteen is not found",
        proposal_replay._judge,
        "losses[-1]",
        "losses[0]",
        f"{SAMPLED}the_loss_that_binds_an_auditor_is_of_the_last_step",
    ),
    # Agreement, audits, upgrades -------------------------------------------------------------------------------------
    ChangedLine(
        "justification-not-adopted",
        "the prepare certificate of a justification is no lock",
        ReplicaMessageHandlers._take_timeouts,
        "self._adopt(book, certificate.high, high)",
        "False",
        f"{REPLICA}the_certificate_of_a_justification_is_adopted_and_durable",
    ),
    ChangedLine(
        "justification-not-durable",
        "the prepare certificate of a justification is forgotten by a restart",
        ReplicaMessageHandlers._take_timeouts,
        "self._adopt(book, certificate.high, high)",
        "book.adopt_prepare_certificate(certificate.high, high)",
        f"{REPLICA}the_certificate_of_a_justification_is_adopted_and_durable",
    ),
    ChangedLine(
        "justification-accuses-nobody",
        "votes in the prepare certificate of a justification are no evidence",
        ReplicaMessageHandlers._take_timeouts,
        "self._add_certified(book, certificate.high, high)",
        "pass",
        f"{REPLICA}votes_in_the_certificate_of_a_justification_are_evidence_against_a_voter_that_contradicts_them",
    ),
    ChangedLine(
        "fourth-challenge-ends-apart",
        "the fourth refuted challenge of an auditor ends what keeps it apart from trainers",
        disputes.hold_against,
        "tables.count(challenger, refuted=1)",
        "tables.count(challenger, refuted=1)\n    if tables.member_record(challenger).refuted > FALSE_CHALLENGES_MAX:\n"
        "        tables.withheld_claims.clear()",
        "tests/ledger/test_audits.py::test_an_auditor_stays_apart_from_a_trainer_whatever_else_of_it_is_refuted",
    ),
    ChangedLine(
        "unheard-once",
        "an auditor is unheard after its third refuted challenge, and never again",
        disputes.hold_against,
        "% FALSE_CHALLENGES_MAX == 0",
        "== FALSE_CHALLENGES_MAX",
        "tests/ledger/test_audits.py::test_an_auditor_stays_apart_from_a_trainer_whatever_else_of_it_is_refuted",
    ),
    ChangedLine(
        "opened-in-the-block-of-the-stop",
        "losses may be opened in the block that ends the job and draws once more",
        loss_openings.may_open_loss,
        " and tables.job.opened_height < tables.height",
        "",
        f"{OPENINGS}losses_stay_shut_in_the_block_that_stops_the_job_since_its_closing_may_still_draw",
    ),
    ChangedLine(
        "opened-with-any-key",
        "any member opens the losses of a proposal whose secret it knows",
        loss_openings.apply_loss_opening,
        " or tables.current_key(trainer) != author",
        "",
        f"{OPENINGS}losses_are_opened_by_the_member_of_the_key_that_they_name",
    ),
    ChangedLine(
        "one-update-a-key",
        "a voter that rotates in a round has an update in it for each of its keys",
        round_state.compute_round_result,
        "if not enough.keys() & _later_keys(terms, trainer)",
        "",
        "tests/rounds/test_ballots.py::test_of_the_keys_of_one_member_the_last_one_with_a_quorum_is_accepted",
    ),
    ChangedLine(
        "vouches-for-itself",
        "the vouch of a trainer for its own proposal counts",
        VouchSet.add_vouch,
        "if voter != self.terms.voting_key(judgement.trainer)",
        "if voter",
        f"{VOUCHING}seven_voters_accept_nothing_false",
    ),
    ChangedLine(
        "vouches-for-itself-with-a-new-key",
        "the vouch of a trainer for the proposal of its former key counts",
        VouchSet.add_vouch,
        "self.terms.voting_key(judgement.trainer)",
        "judgement.trainer",
        f"{VOUCHING}no_false_proposal_is_accepted_in_a_renewed_round_of_at_most_six",
    ),
    ChangedLine(
        "vouch-of-a-former-voter",
        "a vouch counts whose signer re-executes nothing in the renewed round",
        vouch_set.check_vouch,
        "voter not in terms.reexecutors",
        "not terms.reexecutors",
        f"{VOUCHING}the_proof_finds_vouches_of_former_voters",
    ),
    ChangedLine(
        "f-vouches-for-a-trainer-without-vote",
        "f vouches are enough for a trainer that does not vote",
        vouch_set.vouches_needed,
        "return terms.faults + 1",
        "return max(1, terms.faults)",
        f"{VOUCHING}seven_voters_accept_nothing_false",
    ),
    ChangedLine(
        "vouches-needed-at-the-opening",
        "a trainer that does not vote in the renewed round any more needs as many vouches as when it did",
        vouch_set.vouches_needed,
        "if key not in terms.voters",
        "if not terms.trainers",
        f"{VOUCHING}no_false_proposal_is_accepted_in_a_renewed_round_of_at_most_six",
    ),
    ChangedLine(
        "block-without-vouches",
        "a round is settled by accepts without vouches",
        round_state.is_round_settled,
        " and vouches.has_enough_vouches(*named)",
        "",
        f"{VOUCHING}accepts_without_vouches_are_not_settled_and_need_cut_offs",
    ),
    ChangedLine(
        "accepted-without-vouches",
        "a proposal with q accepts is accepted without vouches",
        round_state._sure,
        " and vouches.has_enough_vouches(trainer, digest)",
        "",
        f"{VOUCHING}accepts_without_vouches_are_not_settled_and_need_cut_offs",
    ),
    ChangedLine(
        "vouch-needs-a-ballot",
        "a vouch counts in a closing only beside a ballot of its voter",
        round_state.why_round_certificate_invalid,
        "VouchSet.from_vouches(terms, said)",
        "VouchSet.from_vouches(terms, [(voter, vouch) for voter, vouch in said if voter in ballots])",
        f"{VOUCHING}a_closing_carries_the_vouches_and_needs_no_ballot_of_those_that_vouch",
    ),
    ChangedLine(
        "unsure-is-not-final",
        "a voter that was unsure vouches again when it has re-executed the proposal, which is evidence",
        VouchState.record_own_judgement,
        "self.own_judgements.setdefault(judgement.trainer, judgement)",
        "self.own_judgements[judgement.trainer] = judgement",
        f"{VOUCHING}what_does_not_arrive_in_time_makes_unsure_for_good",
    ),
    ChangedLine(
        "unsure-counts-as-a-rejection",
        "more than f unsure voters reject a proposal",
        vouch_set._rejects,
        "verdict not in (Verdict.ACCEPT, Verdict.UNJUDGED)",
        "verdict is not Verdict.ACCEPT",
        f"{VOUCHING}a_voter_accepts_with_k_vouches_and_rejects_with_more_than_f_rejections",
    ),
    ChangedLine(
        "f-rejections-reject",
        "f rejecting vouches reject a proposal",
        VouchSet.rejection_reason,
        "reasons.total() <= self.terms.faults",
        "reasons.total() < self.terms.faults",
        f"{VOUCHING}a_voter_accepts_with_k_vouches_and_rejects_with_more_than_f_rejections",
    ),
    ChangedLine(
        "nobody-for-one-of-three-that-is-down",
        "nobody is called in the place of a silent re-executor when no voter may lie",
        VouchSet.assigned_reexecutors,
        "max(rejections, self.terms.spare_voters)",
        "max(rejections, self.terms.faults)",
        f"{VOUCHING}n_minus_q_silent_voters_do_not_keep_a_proposal_from_its_vouches",
    ),
    ChangedLine(
        "suspended-for-its-norm",
        "a trainer is suspended for what cheap checks refuse, as they do with honest updates that diverge",
        VouchSet.trainers_with_invalid_updates,
        "sum(map(is_replay_rejection, verdicts.values()))",
        "sum(map(_rejects, verdicts.values()))",
        f"{VOUCHING}an_update_is_false_if_more_than_f_voters_and_at_least_two_find_it_so_by_re_execution",
    ),
    ChangedLine(
        "no-trainer-left",
        "a round has only trainers that are away when all others are suspended",
        JobsModule.open_round,
        "if accepted & unsuspended",
        "if True",
        f"{TRAINERS}suspended_trainers_train_where_no_other_update_is_accepted",
    ),
    ChangedLine(
        "vouches-left-out-by-a-leader",
        "a voter prepares a block without a proposal for which it holds all accepts and vouches",
        round_state.OpenRoundState.why_certificate_refused,
        "if left_out := held.items() - carried",
        "if left_out := set[tuple[bytes, bytes]]()",
        f"{VOUCHING}a_voter_prepares_no_block_that_leaves_out_what_it_knows_to_be_accepted",
    ),
    ChangedLine(
        "double-vouchers-keep-a-round-open",
        "a voter that contradicts itself makes others refuse each other's blocks",
        VouchState.without_double_vouchers,
        " if voter not in self.double_vouchers",
        "",
        f"{VOUCHING}voters_that_contradict_themselves_do_not_make_us_refuse_blocks",
    ),
    ChangedLine(
        "vouches-of-a-former-key-left-out",
        "a closing leaves out vouches for an update that gives way to one of a later key",
        round_state.OpenRoundState._closing,
        "_sure(self.terms, votes, self.vouching.vouches)",
        "accepted",
        f"{VOUCHING}a_closing_carries_the_vouches_of_an_update_that_gives_way_to_a_later_key",
    ),
    ChangedLine(
        "stops-before-the-last-block",
        "a driver that lacks an upgrade stops a block before the last one that it can apply",
        Driver._apply_after,
        "block.height > last",
        "block.height >= last",
        "tests/peer/test_upgrade.py::test_a_driver_applies_the_last_block_before_an_upgrade_that_it_lacks_and_the_next_program_goes_on",
    ),
)


def look(name: str) -> dict[str, Any]:
    """Run the test of one changed line, which must fail. Without a name run all tests on unchanged code, which must pass."""
    if name:
        line = next(line for line in LINES if line.name == name)
        with line.planted():
            failed = failing(line.test)
    else:
        failed = failing(*dict.fromkeys(line.test for line in LINES))
    return {"mutant": name, "rule": "test" if failed else None, "problem": " ".join(failed), "seed": 0}


def failing(*tests: str) -> list[str]:
    """Run tests in this process, and return those that fail. A missing test, or one that cannot begin, is an error.

    Each process has its own folders: parallel processes would otherwise scan each other's while they change.
    """
    heard = _Heard()
    with contextlib.redirect_stdout(io.StringIO()) as said, tempfile.TemporaryDirectory(prefix="folkmoot-mutants-") as folder:
        pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder}/tests", *tests], plugins=[heard])
    assert {test.partition("[")[0] for test in heard.called} == set(tests), said.getvalue()
    return heard.failed


class _Heard:
    def __init__(self) -> None:
        self.called, self.failed = list[str](), list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.called.append(report.nodeid)
            if report.failed:
                self.failed.append(report.nodeid)
