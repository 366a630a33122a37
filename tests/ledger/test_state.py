"""The replicated state: its root, its bytes, and the phases of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger import jobs
from ledger import ledger_state as state_module
from ledger.audits import state_machine
from ledger.audits.audit_state import VOLUNTEER_KIND, AuditFinding, AuditVolunteering
from ledger.blocks.application import LedgerApplication
from ledger.core.genesis import TRAINER
from ledger.jobs import MODEL_ROOT_PENDING, RUNNING_MAX, JobPhase, StartJob, StopJob, job_id
from ledger.ledger_state import EMPTY_BODY, BlockBody, CurrentState, StoredState, decode_body
from ledger.members import RegisterRoles, ResignAsVoter, StandAsVoter
from protocol import codec
from protocol.errors import RemoteProtocolError, StorageError
from protocol.identity import Signed, sign_message
from protocol.limits import TRANSACTION_BYTES_MAX
from protocol.messages import Proposal, Transaction
from protocol.verdicts import ReplayFinding, Verdict
from rounds.round_state import RoundCertificate
from tests.ledger.world import LANGUAGE, PEOPLE, SAMPLED, SAMPLED_SCRATCH, SCRATCH, UNAUDITED, PlainJobs, World, world_with_job
from tests.sim.keys import FastSigner
from training.job_spec import JobSpec

ACCEPT, REPLAY, UNJUDGED = Verdict.ACCEPT, Verdict.REPLAY, Verdict.UNJUDGED


@pytest.fixture
def world() -> World:
    return World()


# Root and bytes -------------------------------------------------------------------------------------------------------


def test_an_empty_block_changes_nothing_but_the_height(world: World) -> None:
    before = world.state
    after = world.decide_body(EMPTY_BODY)
    assert (after.state_root, after.modules, after.height) == (before.state_root, before.modules, before.height + 1)


def test_a_state_that_another_program_wrote_is_one_line_that_names_the_module(world: World) -> None:
    stored = codec.decode(StoredState, world.rules.encode_state(world.state))
    older = codec.encode(replace(stored, modules={**stored.modules, "jobs": codec.encode((1, 2))}))
    with pytest.raises(StorageError, match=r"state on disk \(module jobs \d+: .*\): run the program that wrote it"):
        world.rules.restore_state(older)
    assert world.rules.restore_state(codec.encode(stored)).state_root == world.state.state_root
    assert world.rules.restore_state(None).height == 0


def test_every_change_of_a_module_changes_the_root(world: World) -> None:
    roots = [world.state.state_root]
    roots.append(world.decide(world.tx(PEOPLE[0], "member/register", RegisterRoles(()))).state_root)
    roots.append(world.decide(world.admission(PEOPLE[5])).state_root)
    key = world.start(PEOPLE[1], SCRATCH)
    roots.append(world.state.state_root)
    roots.append(world.decide(closings=(world.closing(key),)).state_root)
    assert len(set(roots)) == len(roots)


def lived() -> World:
    """Return a world with all events that leave a trace in the state."""
    world = World()
    world.decide(world.admission(PEOPLE[5]))
    world.decide(world.tx(PEOPLE[5], "member/stand", StandAsVoter(0, world.state.certified_roots[0])))
    key = world.start(spec=LANGUAGE + b":3")
    trainers = world.job(key).trainers
    world.decide(closings=(world.closing(key, {trainers[0]: ACCEPT, trainers[1]: REPLAY}),))
    world.decide(world.tx(PEOPLE[3], "member/resign", ResignAsVoter()))
    return world


def test_a_state_is_read_back_as_it_was_stored_and_its_bytes_are_stable() -> None:
    world = lived()
    encoded = world.rules.encode_state(world.state)
    again = world.rules.decode_state(encoded)
    assert again == world.state and again.state_root == world.state.state_root
    assert world.rules.encode_state(again) == encoded == lived().rules.encode_state(lived().state)


def test_a_state_larger_than_any_message_is_read_back(world: World) -> None:
    """The state has eight jobs with the largest specifications, and a peer must be able to restart."""
    for i in range(RUNNING_MAX):
        world.start(PEOPLE[i % 4], (b"scratch:" + b"%d" % (i + 1)).ljust(TRANSACTION_BYTES_MAX - 512))
    encoded = world.rules.encode_state(world.state)
    assert len(encoded) > 1 << 20
    assert world.rules.decode_state(encoded).state_root == world.state.state_root


@given(st.data())
@settings(max_examples=25)
def test_two_peers_that_apply_the_same_blocks_have_the_same_root_also_over_a_restart(data: st.DataObject) -> None:
    left, right = World(), World()
    actions = st.sampled_from(["register", "admit", "leave", "start", "close", "nothing"])
    for number, action in enumerate(data.draw(st.lists(actions, max_size=8))):
        body = _some(left, action, number)
        if left.rules.why_body_refused(left.state, body) is not None:
            continue
        left.decide_body(body)
        restored = right.rules.decode_state(right.rules.encode_state(right.state))
        right.ledger = LedgerApplication(right.rules, CurrentState(restored), right.ledger.certified_root)
        right.decide_body(body)
        assert left.state.state_root == right.state.state_root


def _some(world: World, action: str, number: int) -> bytes:
    closings, transactions = _parts(world, action, number)
    return codec.encode(BlockBody(closings, (), transactions))


def _parts(world: World, action: str, number: int) -> tuple[tuple[RoundCertificate, ...], tuple[Signed, ...]]:
    person = PEOPLE[number % 4]
    running = sorted(world.state.jobs.running())
    match action:
        case "register":
            return (), (world.tx(person, "member/register", RegisterRoles((TRAINER,))),)
        case "admit":
            return (), (world.admission(PEOPLE[4 + number]),)
        case "leave":
            return (), (world.tx(person, "member/resign", ResignAsVoter()),)
        case "start":
            return (), (world.tx(person, "job/start", StartJob(SCRATCH)),)
        case "close" if running:
            return (world.closing(running[0]),), ()
    return (), ()


def test_a_body_is_judged_anew_after_every_block(world: World) -> None:
    body = codec.encode(BlockBody((), (), (world.tx(PEOPLE[0], "member/register", RegisterRoles(())),)))
    assert world.rules.why_body_refused(world.state, body) is None
    world.decide_body(body)
    assert "nonce 1" in (world.rules.why_body_refused(world.state, body) or "")


def test_what_was_opened_as_one_kind_of_message_is_no_other_kind(world: World) -> None:
    signed = world.tx(PEOPLE[0], "member/register", RegisterRoles(()))
    opened = world.rules.open_message(signed, (Transaction,))
    world.rules.cache_opened_message(signed, opened)
    assert opened is world.rules.open_message(signed, (Transaction, Proposal))
    with pytest.raises(RemoteProtocolError, match="unknown-message"):
        world.rules.open_message(signed, (Proposal,))
    with pytest.raises(RemoteProtocolError, match="bad-signature"):
        world.rules.open_message(replace(signed, signature=bytes(64)), (Transaction,))


def test_what_is_kept_decoded_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "OPENED_BYTES_MAX", 1 << 20)
    for ahead in range(1, 9):
        signed = sign_message(PEOPLE[0], world.chain, Transaction(ahead, 9, "any", bytes(64_000)))
        world.rules.cache_opened_message(signed, world.rules.open_transaction(signed))
    assert len(world.rules._opened) == 4
    assert world.rules._opened_bytes == sum(map(state_module._opened_bytes, world.rules._opened)) <= 1 << 20


def test_a_message_that_was_only_opened_takes_no_memory(world: World) -> None:
    world.rules.open_transaction(world.tx(PEOPLE[0], "member/register", RegisterRoles(())))
    assert not world.rules._opened and world.rules._opened_bytes == 0


def test_the_root_that_a_block_names_is_remembered_for_a_while_and_not_part_of_the_root(world: World) -> None:
    first = world.state.state_root
    world.decide()
    assert world.state.certified_roots == {0: first} and world.state.state_root == first
    world.decide_empty(150)
    assert len(world.state.certified_roots) == 100 and world.state.height - 1 in world.state.certified_roots


# Jobs -----------------------------------------------------------------------------------------------------------------


def test_a_job_opens_its_first_round_with_the_voters_auditors_and_trainers_after_its_block(world: World) -> None:
    """This holds also if another transaction of the same block changed them."""
    job = world.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE))
    world.decide(job, world.tx(PEOPLE[3], "member/register", RegisterRoles((TRAINER,))))
    (opened,) = world.state.jobs.jobs.values()
    assert opened.trainers == opened.reexecutors == opened.awaited == opened.voters == world.state.members.voters
    assert (opened.round, opened.opened_height, opened.phase) == (
        0,
        1,
        JobPhase.RUNNING,
    ) and opened.model_root != MODEL_ROOT_PENDING


def test_a_job_is_refused_with_fewer_than_2f_plus_1_auditors() -> None:
    few, enough, unaudited = World(trainers=2), World(trainers=3), World(trainers=2)
    assert "needs 3 voters with a worker, found 2" in (few.problem(few.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE))) or "")
    assert enough.problem(enough.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE))) is None
    assert unaudited.problem(unaudited.tx(PEOPLE[0], "job/start", StartJob(UNAUDITED))) is None


def test_a_job_needs_a_trainer_and_a_sound_specification() -> None:
    nobody, world = World(trainers=0), World()
    assert "no member has the role trainer" in (nobody.problem(nobody.tx(PEOPLE[0], "job/start", StartJob(UNAUDITED))) or "")
    assert nobody.problem(nobody.tx(PEOPLE[0], "job/start", StartJob(SCRATCH))) is None
    assert (world.problem(world.tx(PEOPLE[0], "job/start", StartJob(b"dance"))) or "").startswith("bad-job")


def test_the_role_that_an_objective_names_says_who_trains_and_re_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = PlainJobs.terms_of_spec
    monkeypatch.setattr(PlainJobs, "terms_of_spec", lambda self, spec: replace(terms(self, spec), role="clerk"))
    world = World()
    job = world.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE))
    assert "no member has the role clerk" in (world.problem(job) or "")
    clerks = PEOPLE[1:4]
    world.decide(*(world.tx(person, "member/register", RegisterRoles(("clerk",))) for person in clerks))
    world.decide(job)
    (opened,) = world.state.jobs.jobs.values()
    assert opened.trainers == opened.reexecutors == tuple(sorted(person.public for person in clerks))


@pytest.mark.parametrize("spec", [SCRATCH, LANGUAGE])
def test_the_jobs_that_finished_first_are_forgotten_and_running_ones_never(
    world: World, monkeypatch: pytest.MonkeyPatch, spec: bytes
) -> None:
    monkeypatch.setattr(jobs, "UNTRAINED_KEPT_MAX" if spec == SCRATCH else "TRAINED_KEPT_MAX", 2)
    lasting = world.start(PEOPLE[3], SCRATCH)
    keys = []
    for _ in range(5):
        keys.append(world.start(PEOPLE[0], spec + b":1"))
        world.decide(closings=(world.closing(keys[-1]),))
    assert set(world.state.jobs.jobs) == {lasting, *keys[-2:]}


def test_a_job_that_its_own_block_closes_and_stops_is_not_forgotten_in_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "UNTRAINED_KEPT_MAX", 1)
    monkeypatch.setattr(jobs, "TRAINED_KEPT_MAX", 1)
    old = world.start(PEOPLE[0], LANGUAGE + b":99")
    for _ in range(3):
        key = world.start(PEOPLE[1], SCRATCH + b":1")
        world.decide(closings=(world.closing(key),))
    stop = world.tx(PEOPLE[0], "job/stop", StopJob(old))
    world.decide(stop, world.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE), ahead=2), closings=(world.closing(old),))
    assert world.job(old).phase is JobPhase.FINISHED and len(world.state.jobs.running()) == 1


def test_a_job_can_be_stopped_from_the_block_after_its_start_on(world: World) -> None:
    """Otherwise one block could start, end and forget any number of jobs."""
    person = PEOPLE[0]
    start = world.tx(person, "job/start", StartJob(LANGUAGE))
    key = job_id(person.public, world.rules.open_transaction(start))
    assert "starts in this block" in (world.problem(start, world.tx(person, "job/stop", StopJob(key), ahead=2)) or "")
    world.decide(start)
    world.decide(world.tx(person, "job/stop", StopJob(key)))
    assert world.job(key).phase is JobPhase.FINISHED


def test_a_leaders_block_from_a_pool_full_of_starts_and_stops_may_be_decided(world: World) -> None:
    newcomer = PEOPLE[8]
    world.decide(world.admission(newcomer))
    for place in range(65):
        start = world.tx(newcomer, "job/start", StartJob(SCRATCH), ahead=2 * place + 1)
        stop = StopJob(job_id(newcomer.public, world.rules.open_transaction(start)))
        world.ledger.mempool.add_transaction(start)
        world.ledger.mempool.add_transaction(world.tx(newcomer, "job/stop", stop, ahead=2 * place + 2))
    for _ in range(3):
        body = world.ledger.make_body(world.state.height + 1, 0)
        assert body is not None and world.ledger.why_body_refused(world.state.height + 1, body, PEOPLE[0].public) is None
        world.decide_body(body)
    assert len(world.state.jobs.jobs) == 3


def test_nobodys_cheap_jobs_make_others_results_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "TRAINED_KEPT_MAX", 3)
    monkeypatch.setattr(jobs, "UNTRAINED_KEPT_MAX", 2)

    def ended(person: FastSigner, spec: bytes) -> bytes:
        key = world.start(person, spec)
        world.decide(closings=(world.closing(key),))
        return key

    result = ended(PEOPLE[0], LANGUAGE + b":1")
    scratch = [ended(PEOPLE[1], SCRATCH + b":1") for _ in range(4)]
    others = [ended(PEOPLE[1], LANGUAGE + b":1") for _ in range(4)]
    assert set(world.state.jobs.jobs) == {result, *scratch[-2:], *others[-2:]}


def stopped_while_disputed(world: World, author: FastSigner, spec: bytes) -> bytes:
    """Return a job that its author stops while an update of round 1 is disputed."""
    key = world.start(author, spec)
    for _ in range(2):
        world.decide(closings=(world.closing(key),))
    accused = world.job(key).trainers[0]
    challenger = next(person for person in PEOPLE if person.public in world.job(key).reexecutors and person.public != accused)
    world.decide(world.tx(challenger, VOLUNTEER_KIND, AuditVolunteering(key, 1)))
    world.decide(world.tx(challenger, "audit/report", AuditFinding(key, 1, accused, ReplayFinding.MISMATCH, 7)))
    world.decide(world.tx(author, "job/stop", StopJob(key)))
    assert world.job(key).phase is JobPhase.FINISHED and world.state.audits.jobs[key].disputes
    return key


def test_whoever_begins_many_audited_jobs_ends_the_audits_of_its_own_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would end the audits and suspensions of others, or nobody could start a job any more."""
    monkeypatch.setattr(jobs, "TRAINED_KEPT_MAX", 0)
    monkeypatch.setattr(state_machine, "WINDING_UP_MAX", 2)

    def ended(author: FastSigner) -> bytes:
        return stopped_while_disputed(world, author, SAMPLED + b":9")

    honest, *many = ended(PEOPLE[0]), *(ended(PEOPLE[1]) for _ in range(4))
    assert set(world.state.audits.jobs) == {honest, many[-1]} <= set(world.state.jobs.jobs)
    assert world.problem(world.tx(PEOPLE[0], "job/start", StartJob(SAMPLED))) is None


def test_cheap_jobs_end_no_audits_of_dear_ones(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a liar could end a job, and then end its audits, which would find its last lies, by some scratch jobs."""
    monkeypatch.setattr(state_machine, "WINDING_UP_MAX", 2)

    def ended(spec: bytes) -> bytes:
        return stopped_while_disputed(world, PEOPLE[0], spec + b":9")

    dear, *cheap = ended(SAMPLED), *(ended(SAMPLED_SCRATCH) for _ in range(4))
    assert set(world.state.audits.jobs) == {dear, cheap[-1]}
    more = [ended(SAMPLED) for _ in range(2)]
    assert set(world.state.audits.jobs) == set(more), "of dear ones the oldest"


def test_whoever_gave_up_its_vote_counts_no_more_for_ending_a_job(world: World) -> None:
    key = world.start(PEOPLE[3])
    world.decide(world.tx(PEOPLE[0], "job/stop", StopJob(key)))
    world.decide(world.tx(PEOPLE[0], "member/resign", ResignAsVoter()))
    while PEOPLE[0].public in world.state.members.voters:
        world.decide()
    world.decide(world.tx(PEOPLE[1], "job/stop", StopJob(key)))
    assert world.job(key).stop_requests == (PEOPLE[1].public,)


def test_where_too_many_can_train_voters_come_first_and_then_whoever_came_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys can be chosen, and one voter alone can invite any number of members."""
    monkeypatch.setattr(jobs, "TRAINERS_MAX", 4)
    early, late = sorted(PEOPLE[8:10], key=lambda person: person.public, reverse=True)
    for person, token in ((early, PEOPLE[10]), (late, PEOPLE[11])):
        world.decide(world.admission(person, token=token))
        world.decide(world.tx(person, "member/register", RegisterRoles((TRAINER,))))
    world.decide(world.tx(PEOPLE[3], "member/register", RegisterRoles((TRAINER,))))
    start = world.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE))
    world.decide(world.rotation(PEOPLE[1], PEOPLE[7]), start)
    key = job_id(start.signer, world.rules.open_transaction(start))
    assert PEOPLE[7].public not in world.state.members.voters and early.public not in world.job(key).trainers
    world.decide(world.tx(PEOPLE[0], "job/stop", StopJob(key)))
    for expected in ([PEOPLE[0], PEOPLE[7], *PEOPLE[2:4]], [PEOPLE[0], PEOPLE[7], PEOPLE[2], early]):
        key = world.start()
        assert world.job(key).trainers == tuple(sorted(person.public for person in expected))
        world.decide(world.tx(PEOPLE[0], "job/stop", StopJob(key)), world.tx(PEOPLE[3], "member/register", RegisterRoles(())))


def test_rounds_close_one_after_the_other_until_the_job_is_finished(world: World) -> None:
    key = world.start()
    before = world.job(key).model_root
    world.decide(closings=(world.closing(key),))
    assert (world.job(key).round, world.job(key).opened_height, world.job(key).phase) == (1, 2, JobPhase.RUNNING)
    assert world.job(key).model_root != before
    world.decide(closings=(world.closing(key),))
    job = world.job(key)
    assert (job.round, job.phase) == (2, JobPhase.FINISHED) and world.state.jobs.running() == {}
    assert job.accepted == dict.fromkeys(job.trainers, 2) and job.rejected == {}


def test_a_job_that_a_block_does_not_change_stays_the_very_same_object(world: World) -> None:
    """Otherwise each block would scan the finished jobs."""
    over, other = world.start(spec=SCRATCH + b":1"), world.start(PEOPLE[1], SCRATCH + b":4")
    world.decide(closings=(world.closing(over),))
    running = world.start(PEOPLE[2], SCRATCH + b":4")
    assert world.job(over).phase is JobPhase.FINISHED and world.job(other).anchors
    before = world.state.jobs.jobs
    world.decide(closings=(world.closing(running),))
    assert [key for key, job in world.state.jobs.jobs.items() if job is not before[key]] == [running]


def test_a_closing_closes_exactly_the_open_round_of_a_running_job(world: World) -> None:
    key = world.start(spec=LANGUAGE + b":1")
    closing = world.closing(key)
    assert world.problem(closings=(closing,)) is None
    assert "is not open" in (world.problem(closings=(replace(closing, round=1),)) or "")
    assert "is not open" in (world.problem(closings=(replace(closing, job=bytes(32)),)) or "")
    assert "must not close two rounds of one job" in (world.problem(closings=(closing, closing)) or "")
    world.decide(closings=(closing,))
    assert "is not open" in (world.problem(closings=(closing,)) or "")


def test_a_closing_with_a_forged_or_foreign_signature_is_refused(world: World) -> None:
    key = world.start()
    closing = world.closing(key)
    ballot, *rest = closing.ballots
    forged = replace(ballot, signature=bytes(64))
    wrong_kind = sign_message(PEOPLE[0], world.chain, Proposal(key, 0, bytes(32), bytes(32), 1, bytes(32), None))
    assert (world.problem(closings=(replace(closing, ballots=(forged, *rest)),)) or "").startswith("bad-signature")
    assert (world.problem(closings=(replace(closing, ballots=(replace(wrong_kind), *rest)),)) or "").startswith("unknown-message")
    assert world.problem(closings=(replace(closing, ballots=closing.ballots[:2]),)) == "round 1: 2 ballots, quorum 3"


def test_the_trainers_accepted_in_the_last_round_that_accepted_any_and_new_ones_are_awaited(world: World) -> None:
    key = world.start(spec=LANGUAGE + b":9")
    first, second, third = world.job(key).trainers
    world.decide(closings=(world.closing(key, {first: ACCEPT, second: ACCEPT, third: REPLAY}),))
    assert world.job(key).awaited == (first, second) and world.job(key).trainers == (first, second, third)
    world.decide(closings=(world.closing(key, {first: REPLAY}),))
    assert world.job(key).awaited == (first, second), "a round that accepts nobody changes nothing"
    world.decide(
        world.tx(PEOPLE[3], "member/register", RegisterRoles((TRAINER,))), closings=(world.closing(key, {first: ACCEPT}),)
    )
    assert world.job(key).awaited == tuple(sorted((first, PEOPLE[3].public)))
    world.decide(closings=(world.closing(key, {third: ACCEPT}),))
    assert world.job(key).awaited == (third,), "who was not awaited gets back in"


def test_a_trainer_that_gives_up_its_role_is_neither_awaited_nor_counted_from_the_next_round(world: World) -> None:
    key = world.start(spec=LANGUAGE + b":9")
    first, *others = world.job(key).trainers
    gives_up = world.tx(PEOPLE[0], "member/register", RegisterRoles(()))
    assert PEOPLE[0].public == first
    world.decide(gives_up)
    assert first in world.job(key).trainers, "the open round stays as it was opened"
    world.decide(closings=(world.closing(key),))
    assert world.job(key).trainers == world.job(key).awaited == world.job(key).reexecutors == tuple(others)


def test_rejections_and_absences_are_counted_by_reason(world: World) -> None:
    key = world.start(spec=LANGUAGE + b":9")
    first, second, third = world.job(key).trainers
    for verdicts in ({first: ACCEPT, second: REPLAY}, {first: ACCEPT, second: UNJUDGED}, {first: ACCEPT, second: REPLAY}):
        world.decide(closings=(world.closing(key, verdicts),))
    assert world.job(key).accepted == {first: 3}
    assert world.job(key).rejected == {second: {"replay": 2, "unjudged": 1}, third: {"absent": 3}}


def test_rounds_that_could_not_be_judged_in_time_double_the_patience_up_to_a_bound(world: World) -> None:
    key = world.start(spec=LANGUAGE + b":99")
    first = world.job(key).trainers[0]
    seen = []
    for _ in range(jobs.TIMEOUT_DOUBLINGS_MAX + 2):
        world.decide(closings=(world.closing(key, {first: UNJUDGED}),))
        seen.append(world.job(key).timeout_doublings)
    assert seen == [1, 2, 3, 4, 5, 6, 6, 6]


def test_rounds_that_are_judged_take_the_patience_back(world: World) -> None:
    key = world.start(spec=LANGUAGE + b":99")
    first, second, third = world.job(key).trainers
    others = {second: ACCEPT, third: ACCEPT}
    seen = []
    for verdicts in (
        {first: UNJUDGED},
        {first: UNJUDGED, **others},
        {first: REPLAY},  # no update is accepted, so that the round measures no speed
        others,
        {second: ACCEPT},  # one awaited trainer is absent, and light voters measure nothing then
        {second: ACCEPT},
        {second: ACCEPT},
    ):
        world.decide(closings=(world.closing(key, verdicts),))
        seen.append(world.job(key).timeout_doublings)
    assert seen == [1, 2, 2, 1, 1, 0, 0]


def test_its_author_stops_a_job_at_once(world: World) -> None:
    key = world.start(PEOPLE[0], LANGUAGE + b":99")
    assert "is not running, paused or queued" in (world.problem(world.tx(PEOPLE[0], "job/stop", StopJob(bytes(32)))) or "")
    world.decide(world.tx(PEOPLE[0], "job/stop", StopJob(key)))
    assert (world.job(key).phase, world.job(key).round) == (JobPhase.FINISHED, 0)
    assert world.job(key).opened_height == world.state.height, "it finished now, so it is not the first to be forgotten"
    assert "is not running, paused or queued" in (world.problem(world.tx(PEOPLE[0], "job/stop", StopJob(key))) or "")


def test_a_quorum_of_voters_stops_a_job_against_its_author_and_fewer_do_not(world: World) -> None:
    key = world.start(PEOPLE[0], LANGUAGE + b":99")
    for voter in PEOPLE[1:3]:
        world.decide(world.tx(voter, "job/stop", StopJob(key)))
        world.decide(world.tx(voter, "job/stop", StopJob(key)))  # a second request does not count
        assert world.job(key).phase is JobPhase.RUNNING
    world.decide(world.tx(PEOPLE[3], "job/stop", StopJob(key)))
    assert world.job(key).phase is JobPhase.FINISHED


def test_a_job_may_be_stopped_in_the_block_that_closes_its_round(world: World) -> None:
    key = world.start(PEOPLE[0], LANGUAGE + b":99")
    world.decide(world.tx(PEOPLE[0], "job/stop", StopJob(key)), closings=(world.closing(key),))
    assert (world.job(key).phase, world.job(key).round) == (JobPhase.FINISHED, 1)


def test_a_scratch_job_is_its_authors_alone_and_every_voter_re_executes_it() -> None:
    world, key = world_with_job(author=PEOPLE[2], spec=SCRATCH, trainers=0)
    assert world.job(key).trainers == (PEOPLE[2].public,)
    assert world.job(key).reexecutors == world.job(key).voters == world.state.members.voters


def test_a_round_keeps_the_voters_it_was_opened_with() -> None:
    world = World(voters=6)  # of which five can close the round
    key = world.start(PEOPLE[0], SCRATCH)
    voters = world.job(key).voters
    for transactions in ((world.tx(PEOPLE[5], "member/resign", ResignAsVoter()),), (), ()):
        world.decide(*transactions)
    assert PEOPLE[5].public not in world.state.members.voters
    assert world.job(key).voters == voters
    world.decide(closings=(world.closing(key),))
    assert world.job(key).voters == world.state.members.voters


def test_over_all_its_rounds_more_may_train_than_in_one(world: World) -> None:
    key = world.start()
    many = {i.to_bytes(32, "big"): 1 for i in range(500)}
    job = replace(world.job(key), accepted=many, rejected={k: {"norm": 1} for k in many})
    state = world.state.with_modules(jobs=jobs.JobsState({key: job}))
    assert world.rules.decode_state(world.rules.encode_state(state)) == state


def test_an_unknown_field_or_foreign_bytes_are_no_body(world: World) -> None:
    for body in (b"", b"\x90", codec.encode(((), ())), EMPTY_BODY + b"\x00"):
        assert world.rules.why_body_refused(world.state, body) is not None
    assert decode_body(EMPTY_BODY) == BlockBody((), (), ())


@pytest.mark.parametrize("norm, fine", [(1e9, True), (1e200, False)])
def test_a_specification_that_would_overflow_in_every_voter_is_refused(norm: float, fine: bool) -> None:
    assert (JobSpec(name="x", objective="scratch", initial_norm=norm).problem() is None) == fine
