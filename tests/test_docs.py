"""The documents agree with the code.

`python -m tests.test_docs` prints the tables and test vectors of docs/protocol/ from the code; with `--write` it puts them into
the pages, where their headings are.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import re
import subprocess
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from clients import records as client_records
from clients.ledger import clients_module
from consensus.block import Block, BlockHeader, block_digest, encode_block, encode_header, make_header
from consensus.evidence import Evidence
from consensus.light_client import TrustedBlock
from consensus.voter_set import VoterSet
from curation import limits as curation_limits
from curation.estimation.fixed_point import log2, negative_power_of_two
from curation.estimation.reputation import annotator_weight, divide_points
from curation.ledger import curation_state as curation
from curation.ledger import transaction_types
from curation.ledger.curation_module import project_id
from curation.service.annotators.annotator_api import AnnotationReceipt
from curation.tasks import task_pages
from curation.tasks.answers import answer_commitment
from curation.tasks.task_pages import AnnotationTask, assignment_id, task_id, task_leaf
from ledger import jobs, members, model_anchors
from ledger.audits import audit_state as audits
from ledger.audits import loss_commitments, sortition
from ledger.audits.transitions import AUDIT_TRANSITIONS
from ledger.blocks.application import CompactBody, CompactRoundCertificate, WholeBody, compact_body
from ledger.blocks.mempool import signed_digest, transaction_digest
from ledger.core.genesis import Founder, Genesis, ModuleVersion
from ledger.jobs import JobsState
from ledger.ledger_state import EMPTY_BODY, BlockBody, newest_module_versions
from ledger.members import Invitation, Member, MembersState, rotation_preimage
from ledger.network_governance import NetworkState
from ledger.row_proofs import RowProof, RowProofFile
from ledger.tables import Table
from peer import features
from peer.features import FEATURES, modules_of
from peer.settings.invitation import InvitationString
from protocol import limits, merkle, messages
from protocol.codec import Between, encode, is_added
from protocol.identity import Identity, Signed, peer_id, sign_message, signing_preimage
from protocol.messages import NO_VIEW, Certificate, Commit, Prepare, Timeout, TimeoutCertificate, TimeoutEnvelope, Transaction
from protocol.name_validation import REFUSED_CHARACTERS
from protocol.refusal_reasons import REASON_MEANINGS
from protocol.verdicts import OBJECTIVE_CODES_FIRST, OBJECTIVE_CODES_MAX, ReplayFinding, Verdict
from rlhf.data import tokenized_records
from rlhf.data.preference_sets import InstructionExample, PreferencePair
from rlhf.data.tokenized_records import draw_pairs, draw_pairs_by_epoch
from rlhf.ledger import preference_set_attestation, tuning_plans
from rlhf.ledger.rlhf_module import RlhfState
from rlhf.objectives import rollouts
from rlhf.objectives.policy_monitors import PolicyHistory, RoundMedians
from rlhf.objectives.ppo import KlControllerState, PpoSettings, RolloutDeclaration
from rlhf.objectives.supervised_objectives import DpoTerms, InstructTerms, MeanRewardSettings
from rounds.round_state import RoundCertificate
from tests.curation.whole_estimates import final_confusions, run_dawid_skene
from tests.ledger.world import PlainJobs
from tests.packages import PACKAGES
from tools.reference.http_api import METHOD_STATUS, route_section
from training import random_stream
from training.corpus import DataManifest
from training.data.token_sequences import batch_offsets
from training.data.tokenizer import ByteTokenizer
from training.job_spec import JobSpec
from training.replicated import codec, error_feedback, outer_optimizer
from training.replicated.error_feedback import FeedbackRecord, accumulate_feedback, buffer_digest
from training.replicated.model_directory import ModelManifest, ModelState
from training.replicated.tensor_layout import layout_from_shapes
from training.transformer import ModelSpec
from web.site import load_site

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PROTOCOL = sorted((DOCS / "protocol").glob("*.md"))
DECISIONS = DOCS / "decisions"
ARCHITECTURE = DOCS / "architecture.md"
HTTP_API = DOCS / "reference" / "http-api.md"
SITE = load_site(FEATURES)
ROUTES = SITE.routes
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
MODULES = modules_of(PlainJobs())


def transactions() -> dict[str, type]:
    """Return the transactions of all features, by kind."""
    return {kind: content for module in modules_of(PlainJobs()) for kind, content in module.contents.items()}


RECORDS: tuple[type, ...] = (
    Signed,
    Block,
    BlockHeader,
    BlockBody,
    Evidence,
    WholeBody,
    CompactBody,
    CompactRoundCertificate,
    RoundCertificate,
    Genesis,
    ModuleVersion,
    Founder,
    Invitation,
    InvitationString,
    TrustedBlock,
    NetworkState,
    MembersState,
    Member,
    JobsState,
    jobs.QueuedJob,
    jobs.Job,
    model_anchors.ModelAnchor,
    model_anchors.UndoneRounds,
    audits.AuditsState,
    audits.JobAudits,
    sortition.NonceCommitment,
    audits.RoundAudits,
    audits.AuditableProposal,
    audits.Dispute,
    loss_commitments.SealedLoss,
    loss_commitments.UnopenedLosses,
    loss_commitments.LossComparisons,
    audits.MemberAuditRecord,
    audits.AuditLogEntry,
    JobSpec,
    jobs.ModelReference,
    client_records.AdapterSettings,
    client_records.StepBrief,
    client_records.OptimizerStep,
    client_records.Manifest,
    client_records.ListedBody,
    client_records.RequestBody,
    client_records.Example,
    client_records.StepDeclaration,
    clients_module.ClientsState,
    clients_module.ClientRun,
    clients_module.OpenStep,
    clients_module.StepOutcome,
    ModelSpec,
    ModelState,
    FeedbackRecord,
    ModelManifest,
    DataManifest,
    RowProofFile,
    RowProof,
    transaction_types.EnrolStatement,
    transaction_types.SessionStatement,
    transaction_types.AnnotationStatement,
    AnnotationReceipt,
    transaction_types.GoldAnswerProof,
    transaction_types.EnrolmentEntry,
    transaction_types.LeaseRequest,
    transaction_types.AnswerCommitment,
    transaction_types.AnswerOpening,
    transaction_types.SkipAssignment,
    AnnotationTask,
    task_pages.PageEntry,
    task_pages.TaskPageBlob,
    curation.CurationState,
    curation.ExpiryQueue,
    curation.Project,
    curation.ProjectSpec,
    curation.TaskPageRow,
    curation.GoldRow,
    curation.TaskRow,
    curation.IndexSlot,
    curation.Annotator,
    curation.Assignment,
    curation.AnnotatorSkill,
    curation.PeerAnnotators,
    curation.ExpiryEntry,
    curation.ProjectCloseProgress,
    curation.AgreementCounts,
    PpoSettings,
    InstructTerms,
    DpoTerms,
    MeanRewardSettings,
    RolloutDeclaration,
    KlControllerState,
    RlhfState,
    PolicyHistory,
    RoundMedians,
    tuning_plans.TuningPlan,
    preference_set_attestation.PreferenceSetClaim,
    preference_set_attestation.PreferenceSetSource,
    preference_set_attestation.AttestedPreferenceSet,
    tuning_plans.PlanStage,
)
# Names that two records share.
NAMES: dict[type, str] = {task_pages.PageEntry: "TaskEntry"}


# Tables --------------------------------------------------------------------------------------------------------------


def of_messages() -> list[type]:
    """Return every dataclass of protocol/messages.py, in order. Private ones are base classes, which are never sent."""
    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    return [kind for kind in kinds if kind.__module__ == messages.__name__ and not kind.__name__.startswith("_")]


def table_of(kind: type) -> list[str]:
    hints = typing.get_type_hints(kind, include_extras=True)
    rows = [(field, described(hints[field.name]) + ", added" * is_added(field)) for field in dataclasses.fields(kind)]
    fields = [f"| `{field.name}` | {text} |" for field, text in rows]
    return ["| field | type |", "|---|---|", *fields] if fields else ["(no fields)"]


def described(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        bound = arguments[1]
        if isinstance(bound, Between):
            return f"int {number(bound.low)}..{number(bound.high)}"
        size = number(bound.low) if bound.low == bound.high else f"{number(bound.low)}..{number(bound.high)}"
        return f"{described(arguments[0])}, {size}"
    if origin in (typing.Union, types.UnionType):
        return f"{described(next(item for item in arguments if item is not type(None)))}, or nil"
    if origin is tuple:
        return f"array of ({described(arguments[0])})"
    if origin is dict:
        return f"map of ({described(arguments[0])}) to ({described(arguments[1])})"
    if origin is Table:
        return f"table of ({described(arguments[0])})"
    return NAMES.get(kind, str(kind.__name__))


def number(value: int) -> str:
    for exponent in (53, 31):
        if value in (2**exponent, 2**exponent - 1):
            return f"2^{exponent}" + ("−1" if value % 2 else "")
    return str(value)


def heading(kind: type) -> str:
    tag = getattr(kind, "TAG", None)
    return f"### {NAMES.get(kind, kind.__name__)}" + (f" `{tag}`" if tag else "")


def limit_rows() -> list[str]:
    rows = re.findall(r"^([A-Z_]+): Final = .*?  # (.+)$", inspect.getsource(limits), re.MULTILINE)
    return [f"| `{name}` | {getattr(limits, name)} | {reason} |" for name, reason in rows]


def curation_limit_rows() -> list[str]:
    reasons = dict(re.findall(r"^([A-Z_]+): Final = .*?  # (.+)$", inspect.getsource(curation_limits), re.MULTILINE))
    values = ((name, value) for name, value in vars(curation_limits).items() if name.isupper())
    return [f"| `{name}` | {value} | {reasons.get(name, '')} |" for name, value in values]


def verdict_rows() -> list[str]:
    rows = re.findall(r"^    ([A-Z]+) = (\d+)(?:  # (.+))?$", inspect.getsource(Verdict), re.MULTILINE)
    return [f"| {code} | `{name.lower()}` | {reason or 'the proposal is good'} |" for name, code, reason in rows]


def finding_rows() -> list[str]:
    rows = re.findall(r"^    ([A-Z]+) = (\d+)  # (.+)$", inspect.getsource(ReplayFinding), re.MULTILINE)
    return [f"| {code} | `{name.lower()}`: {reason} |" for name, code, reason in rows]


def sections() -> Iterable[tuple[str, list[str]]]:
    for kind in (*of_messages(), *RECORDS):
        yield heading(kind), table_of(kind)
    for kind in dict.fromkeys(transactions().values()):
        names = ", ".join(f"`{name}`" for name, content in transactions().items() if content is kind)
        yield f"### {kind.__name__} {names}", table_of(kind)


def transition_rows() -> list[str]:
    return [
        f"| {stage} | {event} | {moved.after} | {f'`{moved.result}`' if moved.result else ''} | {'; '.join(moved.effects)} |"
        for (stage, event), moved in AUDIT_TRANSITIONS.items()
    ]


def kind_rows() -> list[str]:
    """Return the rows of the table of transactions: each kind, with a link to its section."""
    titles = {title.split()[1]: title for title, _ in sections()}
    return [f"| `{kind}` | {_link(content.__name__, titles[content.__name__])} |" for kind, content in transactions().items()]


def _link(name: str, title: str) -> str:
    [page] = [page.name for page in PROTOCOL if f"{title}\n" in page.read_text()]
    return f"[{name}]({page}#{anchor_of(title.lstrip('# '))})"


# Test vectors --------------------------------------------------------------------------------------------------------


SIGNER = Identity(bytes(range(32)))
SECOND = Identity(bytes(range(32, 64)))
CHAIN = hashlib.sha256(b"chain").digest()


def vectors() -> dict[str, str]:
    return {**of_values(), **of_agreement(), **of_ledger(), **of_training(), **of_curation(), **of_a_close(), **of_rlhf()}


def of_values() -> dict[str, str]:
    signed = sign_message(SIGNER, CHAIN, Prepare(bytes(32), 7, 1, hashlib.sha256(b"block").digest()))
    founders = {SIGNER.public: Founder("ann", ("trainer",)), SECOND.public: Founder("bo", ())}
    return {
        "integers": encode((0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, -1, -32, -33, -128, -129, -32_769)).hex(),
        "other values": encode((None, False, True, 1.5, "", "é", "x" * 32, b"", b"ab", ())).hex(),
        "map": encode({b"b": 1, b"a": 2}).hex(),
        "public key": SIGNER.public.hex(),
        "peer id": peer_id(SIGNER.public),
        "body of the prepare": signed.body.hex(),
        "preimage": signing_preimage("prepare", CHAIN, signed.body).hex(),
        "signature": signed.signature.hex(),
        "merkle root": merkle.merkle_root([merkle.leaf_hash(leaf) for leaf in (b"a", b"b", b"c")]).hex(),
        "genesis": encode(
            genesis := Genesis("example", 1_700_000_000_000, bytes(16), founders, newest_module_versions(MODULES))
        ).hex(),
        "chain id": genesis.chain_id.hex(),
        "voter set hash": genesis.voters.hash.hex(),
    }


def of_agreement() -> dict[str, str]:
    voters, digest = VoterSet.from_keys([SIGNER.public, SECOND.public]), hashlib.sha256(b"block").digest()
    block = Block(1, CHAIN, 1_700_000_000_000, SIGNER.public, voters.hash, voters.hash, bytes(32), None, {}, EMPTY_BODY)
    timeout = sign_message(SIGNER, CHAIN, Timeout(voters.hash, 7, 1, NO_VIEW, None))
    commit = sign_message(SIGNER, CHAIN, Commit(voters.hash, 7, 1, digest))
    prepares = {
        key.public: sign_message(key, CHAIN, Prepare(voters.hash, 7, 2, digest))
        for key in sorted((SIGNER, SECOND), key=lambda key: key.public)
    }
    later = Certificate(prepares[SIGNER.public].body, {key: prepare.signature for key, prepare in prepares.items()})
    return {
        "block": encode_block(block).hex(),
        "header": encode_header(make_header(block)).hex(),
        "block digest": block_digest(encode_block(block)).hex(),
        "commit certificate": encode(Certificate(commit.body, {SIGNER.public: commit.signature})).hex(),
        "timeout certificate": encode(TimeoutCertificate((timeout,), None)).hex(),
        "timed out, with a later certificate": encode(TimeoutEnvelope(timeout, later)).hex(),
    }


def of_ledger() -> dict[str, str]:
    signed = sign_message(SIGNER, CHAIN, Transaction(1, 100, "member/resign", encode(members.ResignAsVoter())))
    return {
        "empty body": encode(BlockBody((), (), ())).hex(),
        "short form of the empty body": compact_body(EMPTY_BODY).hex(),
        "signed transaction": encode(signed).hex(),
        "digest in notices": transaction_digest(signed).hex(),
        "digest in short bodies": signed_digest(signed).hex(),
        "ticket": sortition.sortition_ticket(b"j" * 32, 3, bytes(16), b"k" * 32, b"t" * 32).hex(),
        "rotation signature": SECOND.sign(rotation_preimage(CHAIN, SIGNER.public)).hex(),
    }


def of_training() -> dict[str, str]:
    layout = layout_from_shapes([("a", (3, 3)), ("b", (5,))])
    job, root = hashlib.sha256(b"job").digest(), hashlib.sha256(b"root").digest()
    header = codec.PayloadHeader(job, 2, SIGNER.public, root, 10, 8, 1)
    m = accumulate_feedback(np.full(14, 0.5, np.float32), np.arange(-7, 7, dtype=np.float32) * np.float32(1 / 8), 0.95)
    buffer = codec.quantize_vector(dataclasses.replace(header, bits=error_feedback.ESTIMATE_BITS), m, layout)
    payload = codec.encode_payload(header, buffer.dequantize(), layout)
    e = buffer.dequantize() - codec.decode_payload(payload, header, layout).dequantize()
    parameters, momentum, gradient = (np.array([value], np.float32) for value in (1.0, 0.25, 0.125))
    outer_optimizer.OuterNesterov(0.7, 0.5).step(parameters, [momentum], gradient, decayed=True)
    drawn = batch_offsets(header.job, 2, SIGNER.public, 0, batch=2, tokens=1_000, context=128, seed=0)
    return {
        "m": m.astype("<f4").tobytes().hex(),
        "buffer": buffer.encode().hex(),
        "buffer digest": buffer_digest(buffer).hex(),
        "estimate": error_feedback.update_estimate(None, codec.decode_payload(payload, header, layout)).encode().hex(),
        "payload": payload.hex(),
        "next e": e.astype("<f4").tobytes().hex(),
        "outer step": (parameters.astype("<f4").tobytes() + momentum.astype("<f4").tobytes()).hex(),
        "stream": random_stream.random_bytes(16, "initial", 0, "embedding.weight", 0).hex(),
        "batch": " ".join(map(str, drawn)),
    }


def of_curation() -> dict[str, str]:
    project = project_id(SECOND.public, 1)
    task = task_id(project, 0)
    assignment = assignment_id(task, SIGNER.public)
    said = answer_commitment(assignment, bytes(range(16)), (1,))
    enrol = transaction_types.EnrolStatement("ann", SECOND.public, False)
    session = transaction_types.SessionStatement(SECOND.public, bytes(range(16)), 1_700_000_000_000)
    annotation = transaction_types.AnnotationStatement(assignment, said)
    signed = sign_message(SIGNER, CHAIN, enrol)
    return {
        "project id": project.hex(),
        "task id": task.hex(),
        "assignment id": assignment.hex(),
        "leaf of a task": task_leaf(bytes(16), AnnotationTask("Is this a sentence?")).hex(),
        "commitment": said.hex(),
        "signed bytes of the enrol": signing_preimage("enrol", CHAIN, signed.body).hex(),
        "signature of the enrol": signed.signature.hex(),
        "body of the session": encode(session).hex(),
        "signature of the session": sign_message(SIGNER, CHAIN, session).signature.hex(),
        "body of the annotation": encode(annotation).hex(),
        "signature of the annotation": sign_message(SIGNER, CHAIN, annotation).signature.hex(),
    }


def of_a_close() -> dict[str, str]:
    said = ("1011001110001101", "1011001010001111", "1011000111001101")
    votes = np.array([(task, who, int(said[who][task])) for task in range(16) for who in range(3)], dtype=np.int64)
    whole = run_dawid_skene(2, 16, 3, votes, np.array([(0, 1), (1, 0)], dtype=np.int64))
    found = final_confusions(whole, np.ones(len(votes), dtype=np.int64))
    weights = [annotator_weight([[(int(seen), int(right)) for seen, right in classes]]) for classes in found]
    points = divide_points(112, {bytes([who]): 16 * share for who, share in enumerate(weights)})
    lines = {
        "logarithms of 1, 3, 1000003 and 2^61 + 1": log2(np.array([1, 3, 1_000_003, 2**61 + 1])),
        "powers of 0, 1, 5000, 2^24 − 1, 3 · 2^24 + 777 and 40 · 2^24": negative_power_of_two(
            np.array([0, 1, 5_000, 2**24 - 1, 3 * 2**24 + 777, 40 * 2**24])
        ),
        "chances of class 1 of each task": whole.posterior()[:, 1],
        "seen and right, of each annotator and class": found.ravel(),
        "weights": np.array(weights),
        "points of each annotator": np.array(list(points.values())),
    }
    return {name: " ".join(map(str, numbers.tolist())) for name, numbers in lines.items()}


def of_rlhf() -> dict[str, str]:
    place = rollouts.RolloutId(hashlib.sha256(b"job").digest(), 2, SIGNER.public)
    noise = rollouts.noise_bytes(place, 1, 3, 16)
    texts = ("One", "", "Two and three", "One", "Five")
    some = [PreferencePair(number.to_bytes(8, "big"), text, "yes", "no", 1_000) for number, text in enumerate(texts)]
    set_ = JobSpec(name="reward", objective="reward", data=bytes(32), held_out_permille=0)
    asked = rollouts.draw_prompts(
        place, 4, rollouts.PreferenceSetPrompts(tokenized_records.tokenize_pairs(set_, some, ByteTokenizer()), 6)
    )
    features.register_features()
    given = [InstructionExample(b"1", "ab", "xy"), InstructionExample(b"2", "c", "z\n")]
    of_given = tokenized_records.tokenize_responses(
        dataclasses.replace(set_, objective="instruct", objective_settings=encode(InstructTerms())), given, ByteTokenizer()
    )
    numbers = tokenized_records.response_batch(of_given.train, of_given.train_split, np.array([0, 1]))
    learned = [bytes(array.astype(np.uint8).ravel()).hex() for array in numbers]
    step = (hashlib.sha256(b"job").digest(), 2, SIGNER.public, 3)
    return {
        "records of a step": " ".join(map(str, draw_pairs(*step, count=4, pairs=1_000, seed=0))),
        "pairs in turn": " ".join(map(str, draw_pairs_by_epoch(*step, steps=8, count=4, pairs=50, seed=0))),
        "inputs, next tokens and which of them are of a response": " ".join(learned),
        "prompts of a set": " ".join(bytes(prompt.tolist()).hex() for prompt in asked),
        "prompts": " ".join(map(str, rollouts.prompt_numbers(place, 0, 3, 1_000 - 16 + 1))),
        "prompts of the next draw": " ".join(map(str, rollouts.prompt_numbers(place, 1, 3, 1_000 - 16 + 1))),
        "noise": noise.hex(),
        "blob": rollouts.encode_rollouts([[97, 10], [10]]).hex(),
        "order": " ".join(map(str, rollouts.epoch_order(place, 4, 0))),
    }


def shown(value: str) -> list[str]:
    width = 96
    if " " in value:
        return [f"    {line}" for line in textwrap.wrap(value, width)]
    return [f"    {value[start : start + width]}" for start in range(0, len(value), width)]


def folder_rows() -> list[str]:
    """Return a row for each package of the product, with the first line of its docstring."""
    return [f"| `{package}/` | {first_line(ROOT / package)} |" for package in sorted(PACKAGES)]


def first_line(package: Path) -> str:
    said = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    assert said, package
    return said.splitlines()[0]


def with_folders(page: str) -> str:
    return _put(page, r"\| folder \| contents \|\n\|---\|---\|\n", r"(?:\|[^\n]*\n)*", folder_rows())


def rewritten(page: str) -> str:
    """Return the page with its tables, limits and test vectors taken from the code."""
    for title, table in sections():
        page = _put(page, rf"{re.escape(title)}\n\n", r"(?:\|[^\n]*\n|\(no fields\)\n)*", table)
    page = _put(page, r"\| kind \| content \|\n\|---\|---\|\n", r"(?:\|[^\n]*\n)*", kind_rows())
    page = _put(page, r"\| state \| event \| [^\n]*\n\|---\|---\|---\|---\|---\|\n", r"(?:\|[^\n]*\n)*", transition_rows())
    page = _put(page, r"\| limit \| value \| reason \|\n\|---\|---\|---\|\n", r"(?:\|[^\n]*\n)*", limit_rows())
    page = _put(page, r"\| bound \| value \| reason \|\n\|---\|---\|---\|\n", r"(?:\|[^\n]*\n)*", curation_limit_rows())
    for name, value in vectors().items():
        page = _put(page, rf"{re.escape(name)}:\n", r"(?:[ \t]+[^\n]+\n)*", shown(value))
    return page


def _put(page: str, before: str, old: str, lines: list[str]) -> str:
    return re.sub(f"(?m)^({before}){old}", lambda found: found[1] + "\n".join([*lines, ""]), page)


# Checks --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def protocol() -> str:
    return "\n".join(page.read_text() for page in PROTOCOL)


@pytest.mark.parametrize(("title", "table"), list(sections()), ids=[title for title, _ in sections()])
def test_every_message_record_and_transaction_is_documented_field_by_field(protocol: str, title: str, table: list[str]) -> None:
    section = re.split(rf"^{re.escape(title)}$", protocol, flags=re.MULTILINE)
    assert len(section) == 2, f"{title} is not in docs/protocol/ exactly once"
    documented = [line for line in re.split(r"^#+ ", section[1], flags=re.MULTILINE)[0].splitlines() if line.startswith("|")]
    assert documented == [line for line in table if line.startswith("|")]


def test_every_limit_is_documented_with_its_value_and_reason(protocol: str) -> None:
    names = {name for name, value in vars(limits).items() if name.isupper() and isinstance(value, (int, float))}
    rows = limit_rows()
    assert names == {row.split("`")[1] for row in rows}, "a limit without a reason beside it"
    assert not [row for row in rows if row not in protocol.splitlines()]


def test_every_package_of_the_product_is_in_the_architecture() -> None:
    page = ARCHITECTURE.read_text()
    assert with_folders(page) == page


@pytest.mark.parametrize("rows", [curation_limit_rows, kind_rows, transition_rows])
def test_every_bound_of_curation_transaction_and_transition_of_an_audit_is_documented(
    protocol: str, rows: Callable[[], list[str]]
) -> None:
    assert not [row for row in rows() if row not in protocol.splitlines()]


def test_every_problem_of_the_http_api_is_documented_with_its_status() -> None:
    documented = dict(re.findall(r"^\| `([a-z-]+)` \| (\d{3}) \|", HTTP_API.read_text(), re.MULTILINE))
    assert documented == {code: str(status) for code, status in {**SITE.problem_statuses, **METHOD_STATUS}.items()}


def test_every_call_of_the_http_api_is_documented(protocol: str) -> None:
    page = HTTP_API.read_text()
    assert not [route.path for route in ROUTES if route_section(route) not in page]
    assert set(re.findall(r"`(GET|POST|PUT|DELETE) (/[^`?]*)", protocol + page)) == {
        (route.method, route.path) for route in ROUTES
    }


def test_the_characters_that_no_name_holds_are_those_of_the_code(protocol: str) -> None:
    listed = protocol.split("hold none of these characters:\n")[1].split(". They")[0]
    documented: set[int] = set()
    for first, last in re.findall(r"([0-9A-F]+)(?:–([0-9A-F]+))?", listed.replace("U+", "")):
        documented |= set(range(int(first, 16), int(last or first, 16) + 1))
    assert documented == {code for code in range(sys.maxunicode + 1) if re.match(f"[{REFUSED_CHARACTERS}]", chr(code))}


def test_every_verdict_and_finding_is_documented(protocol: str) -> None:
    rows = [*verdict_rows(), *finding_rows()]
    assert len(rows) == len(Verdict) + len(ReplayFinding) - 2 * OBJECTIVE_CODES_MAX
    assert not [row for row in rows if row not in protocol.splitlines()]
    assert protocol.count(f"\n| {OBJECTIVE_CODES_FIRST}..{OBJECTIVE_CODES_FIRST + OBJECTIVE_CODES_MAX - 1} | the") == 2


@pytest.mark.parametrize(("name", "value"), list(vectors().items()), ids=list(vectors()))
def test_test_vectors_are_what_the_code_computes(protocol: str, name: str, value: str) -> None:
    found = re.search(rf"^{re.escape(name)}:((?:\n[ \t]+[^\n]+)+)$", protocol, re.MULTILINE)
    assert found, f"no test vector {name!r}"
    joined = " ".join(found[1].split())
    assert (joined if " " in value else joined.replace(" ", "")) == value


def test_no_setting_of_a_policy_has_the_name_of_a_job_field() -> None:
    """`--set` tells them apart by their names."""
    names = [{field.name for field in dataclasses.fields(kind)} for kind in (PpoSettings, JobSpec)]
    assert names[0].isdisjoint(names[1])


def test_every_role_is_documented_and_no_other() -> None:
    section = (DOCS / "how-to" / "found-a-network.md").read_text().split("\n## Choose a role\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == features.roles().keys()


def test_every_reason_of_a_refusal_has_a_meaning() -> None:
    source = "\n".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    used = set(re.findall(r'(?:RemoteProtocolError|\.refuse|\._refuse|count_refusal)\(\s*"([a-z-]+)"', source))
    assert {"bad-signature", "handshake-timeout", "gave-way"} < used, "the pattern no longer finds the reasons"
    assert not used - REASON_MEANINGS.keys()
    assert [reason for reason in REASON_MEANINGS if source.count(f'"{reason}"') < 2] == [], "declared, but not used"


def test_every_decision_is_listed_once_and_has_its_four_parts() -> None:
    files = sorted(path.name for path in DECISIONS.glob("[0-9]*.md"))
    index = (DECISIONS / "README.md").read_text()
    assert sorted(re.findall(r"\]\((\d{4}-[a-z0-9-]+\.md)\)", index)) == files
    assert [name[:4] for name in files] == [f"{number:04}" for number in range(1, len(files) + 1)]
    for name in files:
        page = (DECISIONS / name).read_text()
        parts = re.findall(r"^\*\*(\w+)\.\*\*", page, re.MULTILINE)
        assert parts == ["Context", "Alternatives", "Decision", "Consequences"], name
        said = re.match(r"# \d+\. .+\n\nStatus: (accepted|superseded by \[\d+\])", page)
        assert said, f"{name} says no status behind its title"
        is_superseded = said[1] != "accepted"
        assert is_superseded == (re.search(rf"\({name}\) \(superseded by [\d, ]+\)", index) is not None), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{target} in {page}"
        if anchor:
            assert anchor in heading_anchors(file), f"{target} in {page}"


def test_every_file_of_figures_is_linked_by_a_page() -> None:
    linked = {
        (page.parent / target).resolve() for page in PAGES for target in re.findall(r"\]\(([^)\s#]+\.json)\)", page.read_text())
    }
    assert sorted(file for file in (DOCS / "results").rglob("*.json") if file.resolve() not in linked) == []


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def named_commits() -> dict[str, set[str]]:
    """Return the commits named by documents and files of figures, with their places. A plus marks changed files."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        for name in re.findall(r"(?<![\w…])(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7}(?![\w…])", page.read_text()):
            found.setdefault(name, set()).add(page.relative_to(ROOT).as_posix())
    for file in (DOCS / "results").rglob("*.json"):
        for name in re.findall(r'"commit": "([0-9a-f]{40})\+?"', file.read_text()):
            found.setdefault(name, set()).add(file.relative_to(ROOT).as_posix())
    return found


@pytest.mark.real("processes")
def test_every_commit_that_a_figure_names_is_in_the_history() -> None:
    """A figure can be measured again only if its commit can be checked out."""
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no whole history here")
    named = named_commits()
    assert len(named) > 10
    assert {
        name: sorted(where) for name, where in named.items() if git("merge-base", "--is-ancestor", name, "HEAD").returncode
    } == {}


def test_files_of_figures_name_no_path_of_the_machine_that_they_come_from() -> None:
    named = {
        file: re.findall(r"(?<![\w./-])/(?:tmp|home|root|work|Users)/\S*", file.read_text())
        for file in (DOCS / "results").rglob("*.json")
    }
    assert {file.relative_to(DOCS).as_posix(): paths for file, paths in named.items() if paths} == {}


def heading_anchors(page: Path) -> set[str]:
    return {anchor_of(title) for title in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)}


def anchor_of(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_named_in_the_documents_exist(page: Path) -> None:
    named = re.findall(r"`([a-z]+/[\w/.-]+\.(?:py|md))`", page.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for page in PROTOCOL:
            page.write_text(rewritten(page.read_text()))
        ARCHITECTURE.write_text(with_folders(ARCHITECTURE.read_text()))
        sys.exit()
    for title, table in sections():
        print("\n".join([title, "", *table, ""]))
    print("\n".join([*limit_rows(), "", *verdict_rows(), ""]))
    for name, value in vectors().items():
        print("\n".join([f"{name}:", *shown(value)]))
