"""Costs of a full block of each kind of transaction for a voter: `python -m benchmarks.block_costs --json FILE`.

A block holds as many transactions of one kind as its bounds allow, on a large state: 200 voters, 3,000 members, 2,000 old keys,
jobs under audit, projects with annotators. The measured time is that of a voter that has seen none of them: decoding, signatures,
application, and the next state root. For kinds that exclude each other, such as pause and resume, the block alternates.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Screen

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from clients.gateway.client_runs import make_run_spec
from clients.ledger.clients_module import (
    FLOPS_LIMIT,
    Checkpoint,
    ClientLimit,
    ClientRun,
    ClientsState,
    EndRun,
    OpenRun,
    RequestStep,
    SaveModel,
    SetExpiry,
)
from clients.records import AdapterSettings, OptimizerStep, StepBrief
from consensus.block import BODY_BYTES_MAX, Block
from consensus.voter_set import faults_tolerated
from curation.ledger.curation_module import project_id
from curation.ledger.curation_state import CurationState, IndexSlot, Project, ProjectPhase, ProjectSpec, Redaction, TaskRow
from curation.ledger.curation_state import TaskStage as TaskStage
from curation.ledger.state_changes import BEGUN_LIST, index_slot_key
from curation.ledger.transaction_types import (
    AddTaskPage,
    AnnotationStatement,
    AnswerCommitment,
    AnswerOpening,
    CreateProject,
    EnrolmentEntry,
    EnrolStatement,
    GoldAnswerProof,
    LeaseRequest,
    ReleaseAssignment,
    RevealGold,
    ReviewTask,
    SessionStatement,
    SetProjectPhase,
    SkipAssignment,
    StatementBatch,
    VoteToStopProject,
)
from curation.limits import ASSIGNED_MAX, BATCH_MAX, LEASES_MAX, OPENING_MS, PAGE_TASKS_MAX
from curation.tasks.answers import QuestionKind, gold_leaf
from curation.tasks.answers import answer_commitment as commitment_to
from curation.tasks.task_pages import task_id
from ledger.audits.audit_state import (
    CHALLENGES_OPEN_MAX,
    LOSS_OPENING_KIND,
    VOLUNTEER_KIND,
    AuditableProposal,
    AuditFinding,
    AuditsState,
    AuditVolunteering,
    JobAudits,
    RoundAudits,
)
from ledger.audits.loss_commitments import LossOpening, UnopenedLosses, commit_loss, seal_loss
from ledger.core.genesis import TRAINER, Founder, Genesis
from ledger.jobs import (
    ON_REQUEST_MAX,
    AttestStartModel,
    Job,
    ModelReference,
    QueuedJob,
    RequestRollback,
    StartJob,
    StopJob,
    job_id,
)
from ledger.jobs import JobPhase as JobPhase
from ledger.ledger_state import BlockBody, LedgerRules, LedgerState
from ledger.members import (
    AdmitMember,
    ApproveVoter,
    Invitation,
    Member,
    RegisterRoles,
    RenameMember,
    ResignAsVoter,
    RetireMember,
    RevokeInvitation,
    RotateKey,
    StandAsVoter,
    rotation_preimage,
    token_preimage,
)
from ledger.model_anchors import ANCHORS_MAX, ModelAnchor
from ledger.network_governance import PARAMETERS_LIMIT, ModuleUpgrade, NetworkLimit
from peer.features import founding_modules, rules_of
from protocol import codec, merkle
from protocol.identity import CachingVerifier, Ed25519Verifier, Identity, Signed, sign_message, signing_preimage
from protocol.limits import AUDITORS_MAX, COST_PER_BLOCK_MAX, TRANSACTIONS_PER_BLOCK_MAX, VOTERS_MAX
from protocol.messages import Proposal, Transaction
from protocol.verdicts import ReplayFinding
from rlhf.ledger.preference_set_attestation import AttestPreferenceSet, PreferenceSetClaim, PreferenceSetSource
from rlhf.ledger.rlhf_module import RlhfState
from rlhf.ledger.tuning_plans import CancelPlan, PausePlan, ReportAccuracy, ResumePlan, StartPlan, TuningPlan, stage_job_id
from rlhf.ledger.tuning_plans import PlanStage as PlanStage
from rlhf.pair_accuracy import PairAccuracy
from scenarios.trials import Parser
from tests.ledger.blocks import compute_transition, with_rows_of
from training.job_spec import AuditMode, JobSpec
from training.model_store import JobModelStore
from training.transformer import ModelSpec

SECONDS_MAX = 0.5  # for a block of any kind
MEMBERS, OLD_KEYS = 3_000, 2_000
AUTHORS = 1_000  # members that sign
SERVING, ANNOTATORS, PROJECTS, PAGES = 4, 1_024, 16, 4
NOW_MS = 1_700_000_000_000
FAR_MS = NOW_MS + 86_400_000
SALT = bytes(16)
TINY = ModelSpec(context=16, width=16, layers=1, hidden=16)
SCRATCH = JobSpec(name="scratch", objective="scratch", model=TINY, audit=AuditMode.OFF, rounds=1_000)
SAMPLED = JobSpec(
    name="sampled", model=TINY, data=bytes(32), audit=AuditMode.SAMPLED, local_steps=8, audit_window=100, rounds=1_000
)
ASKED = ProjectSpec("moods", QuestionKind.LABEL, ("glad", "sad"), False, 0, None, 1, 0, False)


def key_of(name: str, number: int) -> Identity:
    return Identity(hashlib.sha256(f"{name} {number}".encode()).digest())


@dataclass
class Row:
    kind: str
    transactions: int
    kilobytes: int
    cost: int  # as in `TransactionTraits.cost`
    seconds: float
    root_seconds: float  # part of `seconds`

    @property
    def text(self) -> str:
        return f"{self.kind}: {self.seconds:.3f} s"


class Network:
    """A large state, and transactions for it."""

    def __init__(self, folder: Path) -> None:
        self.host = JobModelStore(folder)
        self.voters = sorted((key_of("voter", number) for number in range(VOTERS_MAX)), key=lambda key: key.public)
        self.others = [key_of("member", number) for number in range(AUTHORS - VOTERS_MAX)]
        serving = {key.public for key in self.voters[:SERVING]}
        founders = {
            key.public: Founder("founder", (*["annotator"] * (key.public in serving), "rlhf", TRAINER)) for key in self.voters
        }
        self.genesis = Genesis("costs", NOW_MS, bytes(16), founders, founding_modules())
        self.rules = self.fresh_rules()
        self.chain = self.genesis.chain_id
        self.state = self._with_members(self.rules.genesis_state())
        self.nonces: dict[bytes, int] = {}

    def fresh_rules(self) -> LedgerRules:
        """Return the rules of a voter that has not verified any signature."""
        return rules_of(self.genesis, self.host, CachingVerifier(Ed25519Verifier()))

    def _with_members(self, state: LedgerState) -> LedgerState:
        members = dict(state.members.members)
        free = MEMBERS + OLD_KEYS - len(members) - len(self.others)
        fill = [hashlib.sha256(b"fill %d" % number).digest() for number in range(free)]
        for key in [*(other.public for other in self.others), *fill[OLD_KEYS:]]:
            members[key] = Member("member", ("rlhf", TRAINER), 1, self.voters[len(members) % VOTERS_MAX].public, 0)
        for key in fill[:OLD_KEYS]:
            members[key] = Member("old", (), 1, None, 3, successor=self.others[0].public)
        return replace(state.with_modules(members=replace(state.members, members=dict(sorted(members.items())))), time_ms=NOW_MS)

    @property
    def authors(self) -> list[Identity]:
        return [*self.voters, *self.others]

    def tx(self, author: Identity, kind: str, content: Any) -> Signed:
        member = self.state.members.members.get(author.public)
        nonce = self.nonces[author.public] = self.nonces.get(author.public, member.nonce if member else 0) + 1
        return sign_message(author, self.chain, Transaction(nonce, self.state.height + 50, kind, codec.encode(content)))

    def decide(self, *transactions: Signed, later_ms: int = 1) -> None:
        state = self.state
        body = BlockBody((), (), transactions)
        transition = compute_transition(self.rules, state, state.height + 1, state.time_ms + later_ms, state.state_root, body)
        self.state = transition.finish_state(dict.fromkeys(transition.started_jobs, b"m" * 32))

    def signed(self, who: Identity, statement: Any) -> bytes:
        return who.sign(signing_preimage(statement.TAG, self.chain, codec.encode(statement)))

    # Measuring

    def measure(self, kind: str, transactions: Iterable[Signed]) -> Row:
        chosen = self._fitting(transactions)
        body = codec.encode(BlockBody((), (), tuple(chosen)))
        encoded, rules = self.rules.encode_state(self.state), self.fresh_rules()
        state = with_rows_of(rules.decode_state(encoded), self.state)
        _ = state.state_root
        rules.why_body_refused(state, codec.encode(BlockBody((), (), ())))  # the state is begun, and its jobs are known
        started = time.process_time()
        problem = rules.why_body_refused(state, body)
        judged = time.process_time()
        if problem is not None:
            raise AssertionError(f"{kind}: {problem}")
        block = Block(state.height + 1, bytes(32), NOW_MS, bytes(32), bytes(32), bytes(32), state.state_root, None, {}, body)
        _ = rules.apply_block(state, block).state.state_root
        ended = time.process_time()
        counts = [rules.transaction_traits(signed.signer, rules.open_transaction(signed)).cost for signed in chosen]
        return Row(kind, len(chosen), len(body) >> 10, sum(counts), ended - started, ended - judged)

    def _fitting(self, transactions: Iterable[Signed]) -> list[Signed]:
        chosen, left, room = list[Signed](), COST_PER_BLOCK_MAX, BODY_BYTES_MAX - 4_096
        for signed in islice(transactions, TRANSACTIONS_PER_BLOCK_MAX):
            left -= self.rules.transaction_traits(signed.signer, self.rules.open_transaction(signed)).cost
            room -= len(signed.body) + 128
            if left < 0 or room < 0:
                break
            chosen.append(signed)
        return chosen


Case = Callable[[Network], Iterator[Signed]]
CASES: dict[str, Case] = {}


def case(kind: str) -> Callable[[Case], Case]:
    def add(make: Case) -> Case:
        CASES[kind] = make
        return make

    return add


# Members ----------------------------------------------------------------------------------------------------------------


@case("member/admit")
def admit(net: Network) -> Iterator[Signed]:
    for number in range(TRANSACTIONS_PER_BLOCK_MAX):
        new, token, voter = key_of("new", number), key_of("token", number), net.voters[number % VOTERS_MAX]
        invitation = sign_message(voter, net.chain, Invitation(token.public, FAR_MS))
        yield net.tx(new, "member/admit", AdmitMember(invitation, token.sign(token_preimage(net.chain, new.public)), "new", ()))


@case("member/revoke")
def revoke(net: Network) -> Iterator[Signed]:
    for number in range(TRANSACTIONS_PER_BLOCK_MAX):
        voter, token = net.voters[number % VOTERS_MAX], key_of("revoked", number)
        yield net.tx(voter, "member/revoke", RevokeInvitation(sign_message(voter, net.chain, Invitation(token.public, FAR_MS))))


@case("member/register")
def register(net: Network) -> Iterator[Signed]:
    yield from (net.tx(author, "member/register", RegisterRoles((TRAINER,))) for author in net.authors)


@case("member/rename")
def rename(net: Network) -> Iterator[Signed]:
    yield from (net.tx(author, "member/rename", RenameMember("n" * 64)) for author in net.authors)


def _standing(net: Network) -> None:
    """Make as many candidates as there may be voters, each with the approvals of all faulty voters."""
    liars = tuple(sorted(voter.public for voter in net.voters[:66]))
    members = net.state.members
    standing = {other.public: liars for other in net.others[-VOTERS_MAX:]}
    net.state = net.state.with_modules(members=replace(members, candidates=standing))


@case("member/stand")
def stand(net: Network) -> Iterator[Signed]:
    net.decide()
    net.decide()
    _standing(net)
    height = max(net.state.certified_roots)
    show = StandAsVoter(height, net.state.certified_roots[height])
    yield from (net.tx(author, "member/stand", show) for author in net.others[:-VOTERS_MAX])


@case("member/approve")
def approve(net: Network) -> Iterator[Signed]:
    _standing(net)
    candidates = cycle(list(net.state.members.candidates))
    yield from (net.tx(voter, "member/approve", ApproveVoter(next(candidates))) for voter in cycle(net.voters))


@case("member/resign")
def leave(net: Network) -> Iterator[Signed]:
    yield from (net.tx(voter, "member/resign", ResignAsVoter()) for voter in net.voters[1:])


@case("member/retire")
def retire(net: Network) -> Iterator[Signed]:
    _standing(net)
    subjects = cycle([other.public for other in net.others])
    yield from (net.tx(voter, "member/retire", RetireMember(next(subjects), True, FAR_MS)) for voter in cycle(net.voters))


@case("member/rotate")
def rotate(net: Network) -> Iterator[Signed]:
    _standing(net)
    for number, author in enumerate(net.voters + net.others):
        new = key_of("rotated", number)
        yield net.tx(author, "member/rotate", RotateKey(new.public, new.sign(rotation_preimage(net.chain, author.public))))


# The network, jobs ------------------------------------------------------------------------------------------------------


@case("network/upgrade")
def upgrade(net: Network) -> Iterator[Signed]:
    heights = cycle(range(net.state.height + 100, net.state.height + 900))
    yield from (net.tx(voter, "network/upgrade", ModuleUpgrade("members", 2, next(heights))) for voter in cycle(net.voters))


@case("network/limit")
def limit(net: Network) -> Iterator[Signed]:
    most = cycle(range(1_000_000, 1_001_000))
    yield from (net.tx(voter, "network/limit", NetworkLimit(PARAMETERS_LIMIT, next(most))) for voter in cycle(net.voters))


def _full_line(net: Network, start: bytes | None = None) -> None:
    """Fill the queue of jobs up to its last place."""
    spec = (replace(SAMPLED, initial_model=start) if start else SAMPLED).encode()
    line = tuple(
        QueuedJob(hashlib.sha256(b"waiting %d" % number).digest(), spec, "waiting", net.voters[number].public, 1)
        for number in range(31)
    )
    net.state = net.state.with_modules(jobs=replace(net.state.jobs, queue=line))


@case("job/start, job/stop")
def start_and_stop(net: Network) -> Iterator[Signed]:
    """Start jobs; each author then takes its job out of the queue."""
    net.decide(net.tx(net.voters[0], "job/start", StartJob(SAMPLED.encode())))
    _full_line(net)
    for author in cycle(net.authors[40:]):
        signed = net.tx(author, "job/start", StartJob(replace(SAMPLED, name="n" * 64).encode()))
        yield signed
        yield net.tx(author, "job/stop", StopJob(job_id(author.public, codec.decode_message(signed.body, (Transaction,)))))


@case("job/attest-start-model")
def hold(net: Network) -> Iterator[Signed]:
    _full_line(net, b"s" * 32)
    jobs = [waiting.job for waiting in net.state.jobs.queue]
    yield from (net.tx(voter, "job/attest-start-model", AttestStartModel(job)) for job in jobs for voter in net.voters)


# Audits -----------------------------------------------------------------------------------------------------------------


def _auditors(net: Network, place: int) -> list[Identity]:
    """Return the auditors that were drawn for the proposal of the trainer at this place."""
    return [net.voters[(place + step) % len(net.voters)] for step in range(1, AUDITORS_MAX + 1)]


def _audited(net: Network, rounds: int = 20) -> bytes:
    """Make a job with `rounds` × 200 proposals under audit, each with the largest number of auditors. Return its id."""
    signed = net.tx(net.voters[0], "job/start", StartJob(SAMPLED.encode()))
    net.decide(signed)
    key = job_id(net.voters[0].public, codec.decode_message(signed.body, (Transaction,)))
    keys = tuple(voter.public for voter in net.voters)
    proposal = Proposal(key, 0, bytes(32), bytes(32), 100, bytes(32), None)
    pending = [tuple(sorted(auditor.public for auditor in _auditors(net, place))) for place in range(len(keys))]
    drawn = {trainer: AuditableProposal(proposal, auditors) for trainer, auditors in zip(keys, pending, strict=True)}
    audits = JobAudits({number: RoundAudits(67, 66, keys, drawn) for number in range(rounds)})
    job = replace(net.state.jobs.jobs[key], round=rounds)
    state = net.state.with_modules(jobs=replace(net.state.jobs, jobs={key: job}))
    net.state = state.with_modules(audits=AuditsState({key: audits}))
    return key


@case("job/rollback")
def roll_back(net: Network) -> Iterator[Signed]:
    """Let each voter request one anchor after another; none gets a quorum."""
    key, numbers = _audited(net), range(ANCHORS_MAX)
    anchors = tuple(ModelAnchor(number, number, bytes(32)) for number in numbers)
    job = replace(net.state.jobs.jobs[key], rounds_in_model=20, anchors=anchors)
    net.state = net.state.with_modules(jobs=replace(net.state.jobs, jobs={key: job}))
    for turn in count():
        for place, voter in enumerate(net.voters):
            yield net.tx(voter, "job/rollback", RequestRollback(key, numbers[(turn + place) % ANCHORS_MAX]))


@case("audit/report")
def report(net: Network) -> Iterator[Signed]:
    yield from _matches(net, _audited(net), range(20))


@case("audit/report of lies")
def accuse(net: Network) -> Iterator[Signed]:
    key = _audited(net)
    yield from (lie for number in range(CHALLENGES_OPEN_MAX) for lie in _lies(net, key, number))


@case("audit/report beside disputes")
def report_beside(net: Network) -> Iterator[Signed]:
    key = _disputed(net)
    yield from _matches(net, key, range(CHALLENGES_OPEN_MAX, 20))


def _matches(net: Network, key: bytes, rounds: range) -> Iterator[Signed]:
    for number in rounds:
        for place, trainer in enumerate(net.voters):
            for auditor in _auditors(net, place):
                yield net.tx(auditor, "audit/report", AuditFinding(key, number, trainer.public, ReplayFinding.MATCH, 0))


def _lies(net: Network, key: bytes, number: int) -> Iterator[Signed]:
    """Report a lie of each of f voters in that round."""
    for place in range(faults_tolerated(VOTERS_MAX)):
        finding = AuditFinding(key, number, net.voters[place].public, ReplayFinding.MISMATCH, 0)
        yield net.tx(_auditors(net, place)[0], "audit/report", finding)


def _disputed(net: Network) -> bytes:
    """Make the same job with as many disputes as the auditors of these lies can open."""
    key = _audited(net)
    for number in range(CHALLENGES_OPEN_MAX):
        net.decide(*_lies(net, key, number))
    return key


@case("audit/volunteer")
def volunteer(net: Network) -> Iterator[Signed]:
    key = _audited(net)
    yield from (net.tx(voter, VOLUNTEER_KIND, AuditVolunteering(key, number)) for number in range(4) for voter in net.voters[67:])


@case("audit/verdict")
def rule(net: Network) -> Iterator[Signed]:
    """Return verdicts of half of the judges, which settle the disputes."""
    key = _disputed(net)
    for number in range(CHALLENGES_OPEN_MAX):
        for trainer in net.voters[: faults_tolerated(VOTERS_MAX)]:
            for judge in net.voters[100:140]:
                yield net.tx(judge, "audit/verdict", AuditFinding(key, number, trainer.public, ReplayFinding.MATCH, 0))


@case("audit/open-loss")
def losses(net: Network) -> Iterator[Signed]:
    """Return openings for proposals that each have sealed losses of the largest number of auditors."""
    key = _audited(net)
    opened, unopened = list[tuple[Identity, LossOpening]](), dict[int, dict[bytes, UnopenedLosses]]()
    for number in range(5):
        unopened[number] = {}
        for trainer in net.voters:
            secret, said = hashlib.sha256(trainer.public).digest(), 1_000_000
            place = key, number, trainer.public
            promise = commit_loss(*place, secret, said)
            auditors = [auditor.public for auditor in net.voters[:AUDITORS_MAX] if auditor is not trainer]
            reports = {auditor: seal_loss(said, *place, auditor, promise, bytes([1]) * 32) for auditor in auditors}
            unopened[number][trainer.public] = UnopenedLosses(promise, reports, VOTERS_MAX)
            opened.append((trainer, LossOpening(key, number, trainer.public, secret, said)))
    state, job = net.state.module_state(AuditsState), replace(net.state.jobs.jobs[key], round=200)
    audits = replace(state, jobs={key: replace(state.jobs[key], unopened_losses=unopened, rounds={})})
    net.state = net.state.with_modules(audits=audits, jobs=replace(net.state.jobs, jobs={key: job}))
    yield from (net.tx(trainer, LOSS_OPENING_KIND, opening) for trainer, opening in opened)


# Curation ---------------------------------------------------------------------------------------------------------------


def _serving(net: Network) -> Identity:
    return net.voters[0]


def _enrolments(net: Network, first: int, count: int) -> tuple[EnrolmentEntry, ...]:
    peer = _serving(net).public
    people = [key_of("annotator", number) for number in range(first, first + count)]
    return tuple(EnrolmentEntry(who.public, "ann", False, net.signed(who, EnrolStatement("ann", peer, False))) for who in people)


def _wishes(net: Network, people: Sequence[int], count: int = 1) -> tuple[LeaseRequest, ...]:
    session = SessionStatement(_serving(net).public, bytes(16), FAR_MS)
    return tuple(
        LeaseRequest(who.public, bytes(16), FAR_MS, net.signed(who, session), count)
        for who in (key_of("annotator", n) for n in people)
    )


def _project(net: Network, author: Identity, asked: ProjectSpec = ASKED, pages: int = PAGES, gold: bytes | None = None) -> bytes:
    net.decide(net.tx(author, "curation/create-project", CreateProject(asked)))
    key = project_id(author.public, net.nonces[author.public])
    net.decide(
        *(
            net.tx(author, "curation/add-page", AddTaskPage(key, bytes(32), 100, bytes(32), PAGE_TASKS_MAX, gold))
            for _ in range(pages)
        )
    )
    return key


def _curating(net: Network, projects: int = PROJECTS, asked: ProjectSpec = ASKED) -> list[bytes]:
    """Make projects with tasks, and enrolled annotators."""
    keys = [_project(net, author, asked) for author in net.voters[1 : projects + 1]]
    for first in range(0, ANNOTATORS, BATCH_MAX):
        net.decide(_batch(net, enrolments=_enrolments(net, first, BATCH_MAX)))
    return keys


def _first_of(net: Network, author: Identity) -> bytes:
    """Return the id of the author's first project."""
    return next(key for key, project in net.state.module_state(CurationState).projects.items() if project.author == author.public)


def _batch(net: Network, **parts: Any) -> Signed:
    return net.tx(_serving(net), "curation/statements", StatementBatch(**{name: tuple(items) for name, items in parts.items()}))


def _leased(net: Network, asked: ProjectSpec = ASKED) -> list[tuple[int, bytes]]:
    """Return (annotator, assignment) of leases, eight for each annotator."""
    _curating(net, asked=asked)
    for first in range(0, ANNOTATORS, BATCH_MAX):
        net.decide(_batch(net, leases=_wishes(net, range(first, first + BATCH_MAX), LEASES_MAX)))
    rows = net.state.module_state(CurationState).annotators
    found = []
    for number in range(ANNOTATORS):
        row = rows.get_record(key_of("annotator", number).public)
        assert row is not None
        found += [(number, lease) for lease in row.leases]
    return found


def _commits(net: Network, leases: Sequence[tuple[int, bytes]]) -> list[AnswerCommitment]:
    made = []
    for number, lease in leases:
        who, digest = key_of("annotator", number), commitment_to(lease, SALT, (0,))
        made.append(AnswerCommitment(lease, who.public, digest, net.signed(who, AnnotationStatement(lease, digest))))
    return made


def _cut(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[first : first + BATCH_MAX] for first in range(0, len(items), BATCH_MAX))


@case("curation/create-project")
def found(net: Network) -> Iterator[Signed]:
    asked = replace(ASKED, options=tuple(f"{number:x}" * 64 for number in range(16)))
    yield from (net.tx(author, "curation/create-project", CreateProject(asked)) for author in net.authors[:256])


@case("curation/add-page")
def page(net: Network) -> Iterator[Signed]:
    key = _project(net, net.voters[1], pages=1)
    yield from (
        net.tx(net.voters[1], "curation/add-page", AddTaskPage(key, bytes(32), 100, bytes(32), PAGE_TASKS_MAX))
        for _ in range(TRANSACTIONS_PER_BLOCK_MAX)
    )


@case("curation/reveal-gold")
def gold(net: Network) -> Iterator[Signed]:
    leaves = [gold_leaf(SALT, (0,)) for _ in range(PAGE_TASKS_MAX)]
    proofs = [tuple(merkle.merkle_proof(leaves, index)) for index in range(PAGE_TASKS_MAX)]
    answers = tuple(GoldAnswerProof(index, (0,), SALT, proofs[index]) for index in range(PAGE_TASKS_MAX))
    key = _project(net, net.voters[1], pages=64, gold=merkle.merkle_root(leaves))
    yield from (net.tx(net.voters[1], "curation/reveal-gold", RevealGold(key, number, answers)) for number in range(64))


@case("curation/set-phase")
def move(net: Network) -> Iterator[Signed]:
    key = _curating(net)[0]
    yield from (
        net.tx(net.voters[1], "curation/set-phase", SetProjectPhase(key, phase))
        for phase in cycle((ProjectPhase.PAUSED, ProjectPhase.OPEN))
    )


@case("curation/vote-to-stop")
def stop(net: Network) -> Iterator[Signed]:
    keys = _curating(net)
    yield from (net.tx(voter, "curation/vote-to-stop", VoteToStopProject(key)) for key in keys for voter in net.voters[:66])


@case("curation/redact")
def redact(net: Network) -> Iterator[Signed]:
    _leased(net)
    author = net.voters[1]
    for place in range(PAGES * PAGE_TASKS_MAX):
        number, index = divmod(place, PAGE_TASKS_MAX)
        old = bytes(32) if index == 0 else index.to_bytes(32)
        said = Redaction(_first_of(net, author), number, index, old, (index + 1).to_bytes(32), 100)
        yield net.tx(author, "curation/redact", said)


@case("curation/review-task")
def review(net: Network) -> Iterator[Signed]:
    author = net.voters[1]
    _leased(net)
    state, key = net.state.module_state(CurationState), _first_of(net, author)
    tasks = {
        task_id(key, row.number): replace(row, stage=TaskStage.REVIEW, index_slot=None)
        for _, row in state.tasks.items()
        if row.project == key
    }
    project = state.projects.get_record(key)
    assert project is not None
    projects = state.projects.with_rows({key: replace(project, review=len(tasks), begun=0)})
    net.state = net.state.with_modules(curation=replace(state, tasks=state.tasks.with_rows(tasks), projects=projects))
    yield from (net.tx(author, "curation/review-task", ReviewTask(task, (0,))) for task in tasks)


@case("curation/statements of enrolments")
def enrolments(net: Network) -> Iterator[Signed]:
    yield from (_batch(net, enrolments=_enrolments(net, first, BATCH_MAX)) for first in range(0, 4 * BATCH_MAX, BATCH_MAX))


@case("curation/statements of one enrolment")
def single_enrolments(net: Network) -> Iterator[Signed]:
    yield from (_batch(net, enrolments=_enrolments(net, number, 1)) for number in range(TRANSACTIONS_PER_BLOCK_MAX))


@case("curation/statements of lease wishes")
def leases(net: Network) -> Iterator[Signed]:
    _curating(net)
    yield from (_batch(net, leases=_wishes(net, range(first, first + BATCH_MAX), LEASES_MAX)) for first in cycle((0, BATCH_MAX)))


@case("curation/statements of lease wishes in vain")
def vain(net: Network) -> Iterator[Signed]:
    _had(net)
    yield from (_batch(net, leases=_wishes(net, range(ASSIGNED_MAX), LEASES_MAX)) for _ in range(TRANSACTIONS_PER_BLOCK_MAX))


@case("curation/statements of one lease wish in vain")
def vain_one(net: Network) -> Iterator[Signed]:
    _had(net)
    yield from (_batch(net, leases=_wishes(net, range(1), 1)) for _ in range(TRANSACTIONS_PER_BLOCK_MAX))


def _had(net: Network) -> None:
    """Make 256 projects with a list of begun tasks that all these annotators have had."""
    _curating(net)
    state = net.state.module_state(CurationState)
    # This number of annotators has had each task.
    everybody = tuple(key_of("annotator", number).public for number in range(ASSIGNED_MAX))
    rows: dict[bytes, TaskRow] = {}
    projects: dict[bytes, Project] = {}
    places: dict[bytes, Any] = {}
    for number in range(256):
        key = hashlib.sha256(b"project %d" % number).digest()
        projects[key] = Project(net.voters[1].public, ASKED, ProjectPhase.OPEN, 1, 16, 16, 16)
        for place in range(16):
            rows[task_id(key, place)] = TaskRow(key, place, TaskStage.BEGUN, 2, 1, 0, 0, 0, place, everybody)
            places[index_slot_key(key, BEGUN_LIST, place)] = IndexSlot(place)
    after = replace(
        state,
        open=tuple(projects),
        tasks=state.tasks.with_rows(rows),
        projects=state.projects.with_rows(projects),
        places=state.places.with_rows(places),
    )
    net.state = net.state.with_modules(curation=after)


@case("curation/statements of commits")
def commits(net: Network) -> Iterator[Signed]:
    yield from (_batch(net, commits=part) for part in _cut(_commits(net, _leased(net))))


@case("curation/statements of openings")
def openings(net: Network) -> Iterator[Signed]:
    leases = _leased(net)
    for part in _cut(_commits(net, leases)):
        net.decide(_batch(net, commits=part))
    yield from (_batch(net, openings=part) for part in _cut([AnswerOpening(lease, SALT, (0,)) for _, lease in leases]))


@case("curation/statements of releases")
def releases(net: Network) -> Iterator[Signed]:
    yield from (_batch(net, releases=part) for part in _cut([ReleaseAssignment(lease) for _, lease in _leased(net)]))


@case("curation/statements of skips")
def skips(net: Network) -> Iterator[Signed]:
    yield from (_batch(net, skips=part) for part in _cut([SkipAssignment(lease, "r" * 64) for _, lease in _leased(net)]))


@case("curation/statements of nothing, with leases that expire")
def expire(net: Network) -> Iterator[Signed]:
    _leased(net)
    net.decide(later_ms=10_000_000)
    yield from (_batch(net) for _ in range(TRANSACTIONS_PER_BLOCK_MAX))


@case("curation/statements of nothing, with a project that closes")
def closing(net: Network) -> Iterator[Signed]:
    leases = _leased(net)
    for part in _cut(_commits(net, leases)):
        net.decide(_batch(net, commits=part))
    for part in _cut([AnswerOpening(lease, SALT, (0,)) for _, lease in leases]):
        net.decide(_batch(net, openings=part))
    for author in net.voters[1 : PROJECTS + 1]:
        net.decide(net.tx(author, "curation/set-phase", SetProjectPhase(_first_of(net, author), ProjectPhase.CLOSED)))
    net.decide(later_ms=OPENING_MS + 1)
    yield from (_batch(net) for _ in range(TRANSACTIONS_PER_BLOCK_MAX))


# Runs of clients --------------------------------------------------------------------------------------------------------


def _client_spec(net: Network) -> bytes:
    """Finish a job, and return the specification of a run that changes its model."""
    spec = replace(SAMPLED, audit=AuditMode.FULL, local_steps=2)
    base, done = _finished(net, spec)
    net.state = net.state.with_modules(jobs=replace(net.state.jobs, jobs={base: done}))
    return make_run_spec(spec, AdapterSettings(rank=1, base=ModelReference(base, done.round, done.model_root)), seed=0).encode()


@case("client/open")
def open_runs(net: Network) -> Iterator[Signed]:
    spec = _client_spec(net)
    yield from (net.tx(author, "client/open", OpenRun(spec)) for author in net.authors[:ON_REQUEST_MAX])


@case("client/end")
def end_runs(net: Network) -> Iterator[Signed]:
    yield from (net.tx(author, "client/end", EndRun(key)) for author, key in _runs(net))


def _runs(net: Network) -> list[tuple[Identity, bytes]]:
    """Open as many runs as are allowed. Return each with its owner."""
    spec, opened = _client_spec(net), list[tuple[Identity, bytes]]()
    for author in net.authors[:ON_REQUEST_MAX]:
        signed = net.tx(author, "client/open", OpenRun(spec))
        net.decide(signed)
        opened.append((author, job_id(author.public, codec.decode_message(signed.body, (Transaction,)))))
    return opened


def _saving_runs(net: Network) -> list[tuple[Identity, bytes]]:
    """Fill the tables of runs and of checkpoints. Return the unfinished runs, each of which can have one more checkpoint."""
    opened, runs, jobs = _runs(net), dict(net.state.module_state(ClientsState).runs), dict(net.state.jobs.jobs)
    models = tuple(ModelAnchor(number, number, hashlib.sha256(b"model %d" % number).digest()) for number in range(1, 64))
    checkpoints = {f"weights/{of.round}": Checkpoint(of, 0) for of in models}
    for number, (_, key) in enumerate(opened):
        over = hashlib.sha256(b"run %d" % number).digest()
        runs[key] = replace(runs[key], checkpoints=checkpoints)
        runs[over] = ClientRun(net.authors[-number - 1].public, checkpoints=checkpoints, is_over=True, base=runs[key].base)
        jobs[key] = replace(jobs[key], saved_models=models)
        jobs[over] = replace(jobs[key], phase=JobPhase.FINISHED)
    clients = replace(net.state.module_state(ClientsState), runs=dict(sorted(runs.items())))
    net.state = net.state.with_modules(clients=clients, jobs=replace(net.state.jobs, jobs=dict(sorted(jobs.items()))))
    return opened


@case("client/save")
def save_models(net: Network) -> Iterator[Signed]:
    yield from (net.tx(author, "client/save", SaveModel(key, "last", 0)) for author, key in _saving_runs(net))


@case("client/expire")
def expire_models(net: Network) -> Iterator[Signed]:
    for number, (author, key) in zip(range(512), cycle(_saving_runs(net)), strict=False):
        yield net.tx(author, "client/expire", SetExpiry(key, f"weights/{1 + number // ON_REQUEST_MAX}", 1 << 50))


@case("client/limit")
def client_limit(net: Network) -> Iterator[Signed]:
    most = cycle(range(1_000_000, 1_001_000))
    yield from (net.tx(voter, "client/limit", ClientLimit(FLOPS_LIMIT, next(most))) for voter in cycle(net.voters))


@case("client/step")
def request_steps(net: Network) -> Iterator[Signed]:
    """Request a step of each run."""
    opened = _runs(net)
    brief = StepBrief(0, bytes(32), 1, OptimizerStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0))
    yield from (net.tx(author, "client/step", RequestStep(key, brief)) for author, key in opened)


# RLHF -------------------------------------------------------------------------------------------------------------------


def _planned(net: Network, authors: Sequence[Identity], claim: bool = False) -> list[bytes]:
    plans, keys = dict[bytes, TuningPlan](), list[bytes]()
    for number, author in enumerate(authors):
        key = hashlib.sha256(b"plan %d" % number).digest()
        keys.append(key)
        said = PreferenceSetClaim(PreferenceSetSource(bytes(32), 1), bytes(32), 0) if claim else None
        plans[key] = TuningPlan(
            author.public, 1, None, (PlanStage(stage_job_id(key, 0), "ppo", 2, SAMPLED.encode()),), 1, paused_at=1, claim=said
        )
    state = net.state.module_state(RlhfState)
    net.state = net.state.with_modules(rlhf=replace(state, plans=dict(sorted(plans.items()))))
    return keys


def _finished(net: Network, spec: JobSpec) -> tuple[bytes, Job]:
    net.decide(net.tx(net.voters[0], "job/start", StartJob(spec.encode())))
    ((key, job),) = net.state.jobs.jobs.items()
    return key, replace(job, phase=JobPhase.FINISHED, round=job.rounds, rounds_in_model=job.rounds)


@case("rlhf/start, rlhf/cancel")
def start_and_cancel(net: Network) -> Iterator[Signed]:
    """Start plans; each author then cancels its plan."""
    spec = replace(SAMPLED, audit=AuditMode.FULL, local_steps=2)
    base, done = _finished(net, spec)
    net.state = net.state.with_modules(jobs=replace(net.state.jobs, jobs={base: done}))
    reward = replace(spec, objective="reward", rounds=2, base=ModelReference(base, 1_000, done.model_root))
    for author in cycle(net.authors):
        signed = net.tx(author, "rlhf/start", StartPlan(reward.encode()))
        yield signed
        yield net.tx(author, "rlhf/cancel", CancelPlan(job_id(author.public, codec.decode_message(signed.body, (Transaction,)))))


@case("rlhf/pause, rlhf/resume")
def pause_and_resume(net: Network) -> Iterator[Signed]:
    (key,) = _planned(net, net.voters[:1])
    yield from (
        net.tx(net.voters[0], kind, content)
        for kind, content in cycle((("rlhf/resume", ResumePlan(key)), ("rlhf/pause", PausePlan(key))))
    )


@case("rlhf/cancel by voters")
def cancel(net: Network) -> Iterator[Signed]:
    keys = _planned(net, net.voters[:4])
    yield from (net.tx(voter, "rlhf/cancel", CancelPlan(key)) for key in keys for voter in net.voters[4:70])


@case("rlhf/attest-set")
def say_set(net: Network) -> Iterator[Signed]:
    keys = _planned(net, net.voters[:4], claim=True)
    yield from (net.tx(voter, "rlhf/attest-set", AttestPreferenceSet(key, None)) for key in keys for voter in net.voters[:60])


@case("rlhf/report-accuracy")
def report_accuracy(net: Network) -> Iterator[Signed]:
    """Let all voters report on the trained reward models of the plans that may run at once."""
    _, done = _finished(net, replace(SAMPLED, audit=AuditMode.FULL, local_steps=2))
    keys = _planned(net, net.voters[:4])
    plans = net.state.module_state(RlhfState).plans
    trained = {
        key: replace(plans[key], stages=(replace(plans[key].stages[0], spec=b""),), paused_at=None) for key in sorted(keys)
    }
    jobs = {trained[key].current.job: done for key in keys}
    net.state = net.state.with_modules(
        rlhf=replace(net.state.module_state(RlhfState), plans=trained),
        jobs=replace(net.state.jobs, jobs=dict(sorted(jobs.items()))),
    )
    yield from (
        net.tx(voter, "rlhf/report-accuracy", ReportAccuracy(key, PairAccuracy(1, 1))) for key in keys for voter in net.voters
    )


def run(only: str) -> Iterator[Row]:
    for kind, make in CASES.items():
        if only in kind:
            with tempfile.TemporaryDirectory(prefix="folkmoot-costs-") as folder:
                net = Network(Path(folder))
                yield net.measure(kind, make(net))


def show(rows: Sequence[Row]) -> None:
    screen = Screen(title=f"a full block of each kind of transaction; at most {SECONDS_MAX} s")
    for heading in ("kind", "transactions", "kB", "cost", "seconds", "of that the root"):
        screen.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in rows:
        figures = (row.transactions, row.kilobytes, row.cost, f"{row.seconds:.3f}", f"{row.root_seconds:.3f}")
        screen.add_row(row.kind, *map(str, figures))
    Console(width=130).print(screen)


def main() -> int:
    parser = Parser("block_costs", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="measure only kinds whose name contains this text, such as member/"
    )
    options = parser.parse_args()
    started, rows = time.time(), list[Row]()
    for row in run(options.only):
        rows.append(row)
        print(row.text, file=sys.stderr, flush=True)
        write(options.json, started, {"rows": [asdict(row) for row in rows]})
    show(rows)
    return conclude(verdict(row.seconds <= SECONDS_MAX, row.text) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
