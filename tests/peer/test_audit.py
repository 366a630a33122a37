"""An export proves a run to anybody: the audit reproduces a whole export, and finds and names any changed byte."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from consensus.block import Block, block_digest, decode_block, encode_block
from consensus.voter_set import VoterSet
from ledger.ledger_state import EMPTY_BODY, LedgerState, decode_body
from peer.commands import local_commands
from peer.export import run_export as export_module
from peer.export.export_replay import ExportVerdict, audit_export
from peer.export.run_export import GENESIS, MANIFEST, Models, block_path, export_run, list_files, write_models
from protocol import codec
from protocol.errors import StorageError, UserError
from protocol.identity import peer_id
from protocol.messages import Certificate, Commit, Decision, Vouch
from storage.regular_files import read_regular
from tests.consensus.certificates import certificate_of
from tests.peer.chain import Chain, lived, unfinished
from training.formats import checkpoint
from training.model_store import JobModelStore


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    made = lived(tmp_path_factory.mktemp("chain"))
    yield made
    made.close()


def exported(chain: Chain, folder: Path) -> Path:
    export_run(chain.store, chain.blobs, chain.host, chain.genesis, folder)
    return folder


@pytest.fixture(scope="module")
def whole(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(chain, tmp_path_factory.mktemp("export") / "run")


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def blame(folder: Path) -> str:
    """Return the file that the audit names, relative to the export."""
    with pytest.raises(UserError) as error:
        audit_export(folder)
    text = str(error.value)
    assert "\n" not in text and text.startswith(f"{folder}/"), text
    return text.removeprefix(f"{folder}/").partition(": ")[0]


# Exports that hold ----------------------------------------------------------------------------------------------------


def test_an_untouched_export_is_reproduced_to_the_certified_root(chain: Chain, whole: Path) -> None:
    seen: list[tuple[int, int]] = []
    verdict = audit_export(whole, lambda done, total: seen.append((done, total)))
    state = chain.ledger.state
    assert verdict == ExportVerdict(
        network="chain",
        chain_id=chain.id.hex(),
        blocks=state.height,
        signatures=4 * state.height,
        rounds=3,
        proposals=3 + 1 + 4,
        state_root=state.state_root.hex(),
        models=verdict.models,
        names={job: state.jobs.jobs[bytes.fromhex(job)].name for job in verdict.models},
        initial_models={},
        vouch_counts=verdict.vouch_counts,
        requested_updates={},
        members={peer_id(person.public): "founder" for person in chain.people},
    )
    assert seen == [(n, state.height) for n in range(1, state.height + 1)]


def test_an_audit_counts_the_accepted_updates_with_vouches_and_their_voters(chain: Chain, whole: Path) -> None:
    expected = Counter[tuple[str, str]]()
    for height in range(1, chain.ledger.state.height + 1):
        decided = chain.store.get_decision(height)
        assert decided is not None
        for closing in decode_body(decided.decode().body).round_certificates:
            accepted = {signed.signer for signed in closing.proposals}
            for signed in closing.vouches:
                for judged in codec.decode_message(signed.body, (Vouch,)).judgements:
                    if judged.trainer in accepted - {signed.signer}:
                        expected[closing.job.hex(), peer_id(signed.signer)] += 1
    vouched = audit_export(whole).vouch_counts
    assert {(job, peer): count for job, of in vouched.items() for peer, count in of.vouchers.items()} == expected
    assert sorted(of.updates for of in vouched.values()) == [1, 3 + 4]


def test_the_audit_command_names_the_voters_that_vouched(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert local_commands.run_audit(argparse.Namespace(directory=str(whole))) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "vouched for by" in line]
    found = [
        re.fullmatch(r"job (\w{16}): (\d updates?) re-executed before the vote, vouched for by (.*)", line) for line in lines
    ]
    assert sorted(match[2] for match in found if match) == ["1 update", "7 updates"]
    for match in found:
        assert match is not None
        counts = [int(part.rsplit(" ", 1)[1]) for part in match[3].split(", ")]
        assert counts == sorted(counts, reverse=True)
        assert all(part.startswith("founder (") for part in match[3].split(", ")), "four are called so"


def test_the_exported_model_is_the_one_that_training_ended_with(chain: Chain, whole: Path) -> None:
    (file,) = whole.glob("*.safetensors")
    _, parameters, origin = checkpoint.read_checkpoint(file)
    model = chain.host.open_model(origin.job, 2)
    assert (origin.round, origin.model_root) == (2, model.root)
    assert parameters.tobytes() == model.parameters.tobytes()
    assert audit_export(whole).models == {origin.job.hex(): model.root.hex()}


def test_two_exports_of_one_run_have_the_same_bytes(chain: Chain, whole: Path, tmp_path: Path) -> None:
    again = exported(chain, tmp_path / "again")
    assert list_files(again) == list_files(whole)
    assert all((again / name).read_bytes() == (whole / name).read_bytes() for name in list_files(whole))


def test_a_run_whose_last_round_is_not_certified_yet_exports_the_model_before_it(tmp_path: Path) -> None:
    chain = unfinished(tmp_path / "chain")
    folder = exported(chain, tmp_path / "export")
    verdict = audit_export(folder)
    assert verdict.state_root != chain.ledger.state.state_root.hex() and verdict.rounds == 2
    (file,) = folder.glob("*.safetensors")
    assert checkpoint.read_checkpoint(file)[2].round == 1
    chain.close()


def test_a_run_without_a_job_is_exported_and_audited(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "chain")
    with pytest.raises(UserError, match="no block is decided yet"):
        exported(chain, tmp_path / "export")
    chain.decide(EMPTY_BODY)
    chain.decide(EMPTY_BODY)
    folder = exported(chain, tmp_path / "export")
    assert audit_export(folder).models == {}
    (folder / block_path(2)).unlink()
    assert blame(folder) == block_path(2), "what is left is a sound run, but not the one that the manifest is of"
    chain.close()


def test_an_export_does_not_touch_a_folder_that_holds_something(chain: Chain, copy: Path) -> None:
    before = {name: (copy / name).read_bytes() for name in list_files(copy)}
    for folder in (copy, copy / GENESIS):
        with pytest.raises(UserError, match="not an empty folder"):
            exported(chain, folder)
    assert {name: (copy / name).read_bytes() for name in list_files(copy)} == before


def test_a_folder_that_is_no_export_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{tmp_path} is not an export"):
        audit_export(tmp_path)


# One changed byte -----------------------------------------------------------------------------------------------------


def positions(size: int, count: int, seed: str) -> list[int]:
    chosen = random.Random(seed)
    return sorted({0, size - 1, *(chosen.randrange(size) for _ in range(count))})


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_one_flipped_byte_anywhere_in_any_file_is_found_and_the_file_named(whole: Path, copy: Path) -> None:
    missed = []
    for name in list_files(whole):
        original = (whole / name).read_bytes()
        for number, at in enumerate(positions(len(original), 3, name)):
            flip(copy / name, at, number % 8)
            named = blame(copy)
            if named != name:
                missed.append((name, at, named))
            (copy / name).write_bytes(original)
    assert missed == []
    audit_export(copy)


def test_each_signature_counts_also_those_beyond_the_quorum_and_of_the_parent(whole: Path, copy: Path) -> None:
    """Four have signed where three are enough. Each of the four signatures must be right, and each of the parent's four."""
    name = block_path(2)
    original = (whole / name).read_bytes()
    decision = codec.decode(Decision, original)
    parent = decode_block(decision.block).parent_certificate
    assert parent is not None
    for certificate in (decision.certificate, parent):
        assert len(certificate.signatures) == 4
        for signature in certificate.signatures.values():
            flip(copy / name, original.index(signature) + 40)
            assert blame(copy) == name
            (copy / name).write_bytes(original)


def test_every_byte_of_the_manifest_counts(whole: Path, copy: Path) -> None:
    """The manifest's hashes identify the damaged file, so a change of a hash must not incriminate an intact file."""
    original = (whole / MANIFEST).read_bytes()
    for at in range(0, len(original), 197):
        flip(copy / MANIFEST, at)
        assert blame(copy) == MANIFEST, at
        (copy / MANIFEST).write_bytes(original)


# Missing, foreign and exchanged files ---------------------------------------------------------------------------------


def test_each_file_that_is_missing_is_named(whole: Path, copy: Path) -> None:
    for name in list_files(whole):
        (copy / name).unlink()
        if name == GENESIS:
            with pytest.raises(UserError, match=GENESIS):
                audit_export(copy)
        else:
            assert blame(copy) == name
        shutil.copyfile(whole / name, copy / name)


@pytest.mark.parametrize("name", ["blocks/00000099.msgpack", "payloads/" + "0" * 64, "more.safetensors", "blocks/x/y", "notes"])
def test_a_file_that_does_not_belong_is_named(copy: Path, name: str) -> None:
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_bytes(b"x")
    assert blame(copy) == name


def test_a_file_that_does_not_fit_into_memory_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = [path.name for path in (copy / "payloads").iterdir()][:1]

    def read(path: Path) -> bytes:
        if path.name == name:
            raise MemoryError
        return read_regular(path)

    monkeypatch.setattr("peer.export.export_replay.read_regular", read)
    with pytest.raises(StorageError, match=rf"payloads/{name}: it does not fit into the memory"):
        audit_export(copy)


def test_a_block_too_many_is_named(copy: Path, chain: Chain) -> None:
    last = chain.ledger.state.height
    shutil.copyfile(copy / block_path(last), copy / block_path(last + 1))
    assert blame(copy) == block_path(last + 1)


def test_two_files_that_changed_places_are_named(whole: Path, copy: Path) -> None:
    names = list_files(whole)
    for left, right in ((0, 1), (1, 2), (-2, -1), (0, -1), (3, -4)):
        first, second = copy / names[left], copy / names[right]
        first.write_bytes((whole / names[right]).read_bytes())
        second.write_bytes((whole / names[left]).read_bytes())
        if (whole / names[left]).read_bytes() != (whole / names[right]).read_bytes():
            assert blame(copy) in (names[left], names[right])
        for name in (names[left], names[right]):
            shutil.copyfile(whole / name, copy / name)


# Forgeries with a matching manifest -----------------------------------------------------------------------------------


def forge_manifest(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    names = [name for name in list_files(folder) if name != MANIFEST]
    content["files"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def test_a_manifest_written_anew_hides_nothing(whole: Path, copy: Path) -> None:
    for name in [name for name in list_files(whole) if name not in (MANIFEST, GENESIS)]:
        flip(copy / name, len((whole / name).read_bytes()) // 2)
        forge_manifest(copy)
        assert blame(copy) == name
        shutil.copyfile(whole / name, copy / name)


def test_too_few_signatures_are_not_a_quorum(copy: Path) -> None:
    path = copy / block_path(3)
    decision = codec.decode(Decision, path.read_bytes())
    two = dict(list(decision.certificate.signatures.items())[:2])
    path.write_bytes(codec.encode(Decision(decision.block, Certificate(decision.certificate.vote, two))))
    forge_manifest(copy)
    with pytest.raises(UserError, match=rf"{block_path(3)}: no-quorum: 2 signatures, quorum 3"):
        audit_export(copy)


def other_parent(block: Block, change: str) -> Block:
    """Return a block that no honest voter prepares: the parent's certificate is missing, foreign-signed or of another block."""
    certificate = block.parent_certificate
    assert certificate is not None
    first = min(certificate.signatures)
    match change:
        case "missing":
            return replace(block, parent_certificate=None)
        case "forged":
            return replace(block, parent_certificate=Certificate(certificate.vote, certificate.signatures | {first: bytes(64)}))
        case "few":
            return replace(block, parent_certificate=Certificate(certificate.vote, {first: certificate.signatures[first]}))
    return replace(block, state_root=bytes(32))


@pytest.mark.parametrize(
    "change, complaint",
    [
        ("missing", "it carries no certificate of its parent"),
        ("forged", "bad-signature"),
        ("few", "no-quorum"),
        ("root", "it does not follow the block before it"),
    ],
)
def test_the_replay_knows_better_than_any_quorum(chain: Chain, copy: Path, whole: Path, change: str, complaint: str) -> None:
    """All four voters sign a second block 2 that does not follow from the earlier decisions."""
    original = codec.decode(Decision, (whole / block_path(2)).read_bytes())
    block = encode_block(other_parent(decode_block(original.block), change))
    voters = VoterSet(chain.ledger.state.members.voters)
    assert block_digest(block) != block_digest(original.block)
    (copy / block_path(2)).write_bytes(
        codec.encode(Decision(block, certificate_of(chain.id, Commit(voters.hash, 2, 0, block_digest(block)), chain.people)))
    )
    forge_manifest(copy)
    with pytest.raises(UserError, match=rf"{block_path(2)}: {complaint}"):
        audit_export(copy)


def test_a_model_that_the_peer_deletes_during_an_export_is_exported_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer runs in its own thread. A block is decided, and the model of the state that was read first is deleted."""
    chain = unfinished(tmp_path / "chain")

    (job,) = chain.ledger.state.jobs.jobs

    def too_late(folder: Path, host: JobModelStore, state: LedgerState, rounds: dict[bytes, int]) -> Models:
        monkeypatch.undo()
        (folder / "forgotten.safetensors").touch()  # belongs to a job that is not in the newer state
        shutil.rmtree(host.round_directory(job, rounds[job]))
        chain.play(job)
        return write_models(folder, host, state, rounds)

    monkeypatch.setattr(export_module, "write_models", too_late)
    verdict = audit_export(exported(chain, tmp_path / "export"))
    assert (verdict.state_root, verdict.rounds) == (chain.ledger.certified_root.hex(), 3)

    shutil.rmtree(chain.host.round_directory(job, 2))
    with pytest.raises(StorageError, match="cannot be read"):
        exported(chain, tmp_path / "another")
    assert not (tmp_path / "another").exists()
    chain.close()


def test_what_cannot_be_written_is_said(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, summary: object) -> None:
        raise OSError(28, "No space left on device", str(folder / MANIFEST))

    monkeypatch.setattr(export_module, "write_manifest", full)
    with pytest.raises(UserError, match=rf"cannot write {tmp_path}/e/{MANIFEST}: No space left"):
        exported(chain, tmp_path / "e")
