"""A folder of labels with proofs convinces everybody that knows the chain. A change of any file in it is noticed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from curation.import_export.export_proofs import verify_folder
from curation.rpc import CurationRpc
from peer import cli
from protocol.errors import UserError
from tests.web.room import Room, assigned, enrolled, said, settled

TASKS = 3


async def proven(folder: Path) -> tuple[Path, str]:
    """Return an export of a real peer, with a project of tasks settled by two votes each, and the chain id."""
    room = Room(folder)
    async with room.serving() as (daemon, site):
        api: CurationRpc = daemon.api  # type: ignore[assignment]
        project = await room.project(daemon, TASKS, votes=2)
        people = await enrolled(site, "ann", "bob")
        answers = [(person, task["assignment"]) for person in people for task in await assigned(site, person, TASKS)]
        for person, assignment in answers:
            assert (await said(person.submit, site, assignment, [0])).status == 201
        for _, assignment in answers:
            await settled(site, assignment)
        await api.set_project_phase(project.project, "paused")  # the block with this command certifies the labels
        view = await api.export_task_proofs(project.project, str(folder / "labels"))
        await api.export_tasks(project.project, str(folder / "plain.jsonl"))
        assert view.tasks == TASKS
        return folder / "labels", (await daemon.api.status()).chain_id


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def lie(folder: Path) -> None:
        before = (folder / name).read_bytes()
        after = change(before)
        assert after != before
        (folder / name).write_bytes(after)

    return lie


def without_last_line(data: bytes) -> bytes:
    return b"".join(data.splitlines(keepends=True)[:-1])


def first_line_twice(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([lines[0], lines[0], *lines[2:]])


def flipped(place: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[place] ^= 1
        return bytes(changed)

    return change


LABELS = "labels.jsonl"
LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "label": (changed(LABELS, lambda data: data.replace(b'"label": [0]', b'"label": [1]', 1)), f"{LABELS}:1: label is [1]"),
    "vote": (changed(LABELS, lambda data: data.replace(b'"answer": [0]', b'"answer": [1]', 1)), f"{LABELS}:1: votes"),
    "text": (changed(LABELS, lambda data: data.replace(b"text 1", b"text 7")), f"{LABELS}:2: text is 'text 7'"),
    "spaces": (changed(LABELS, lambda data: data.replace(b" ", b"  ", 1)), f"{LABELS}:1: this line is not in the canonical form"),
    "no JSON": (changed(LABELS, lambda data: b"?" + data), f"{LABELS}:1: this line is not valid JSON"),
    "last line left out": (changed(LABELS, without_last_line), "2 lines, but the project has 3 settled tasks"),
    "a line twice": (changed(LABELS, first_line_twice), f"{LABELS}:2: task is"),
    "a line more": (changed(LABELS, lambda data: data + b"{}\n"), f"{LABELS}:4: this line has no proof"),
    "a row": (changed("labels.proof", flipped(40)), f"{LABELS}:1"),
    "a proof": (changed("labels.proof", flipped(-40)), f"{LABELS}:3"),
    "a proof that is none": (changed("labels.proof", flipped(4)), f"{LABELS}:1: its proof cannot be read"),
    "a page's proof that is none": (changed("pages.proof", flipped(4)), "pages.proof: page 0: its proof cannot be read"),
    "proofs cut": (changed("labels.proof", lambda data: data[:-1]), "ends within a proof"),
    "page": (changed("pages/0", flipped(60)), "pages/0 differs from the decided page"),
    "row of a page": (changed("pages.proof", flipped(60)), "pages.proof: page 0"),
    "project": (changed("project.proof", flipped(-60)), "its content does not match its digest"),
    "page away": (lambda folder: (folder / "pages/0").unlink(), f"{LABELS}:1: this line is not in the canonical form"),
    "no proofs": (lambda folder: (folder / "labels.proof").unlink(), "cannot read"),
}


@pytest.mark.real("sockets")
async def test_every_label_is_proven_offline_and_each_lie_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, chain = await proven(tmp_path)
    assert (folder / LABELS).read_bytes() == (tmp_path / "plain.jsonl").read_bytes(), "as any export writes them"
    shutil.rmtree(tmp_path / "peer")
    found = verify_folder(folder, chain)
    assert (found.lines, found.without_text) == (TASKS, 0)
    assert await said(cli.main, ["tasks", "verify", str(folder), "--chain-id", chain, "--data-dir", str(tmp_path / "none")]) == 0
    assert "3 labels, all as decided" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="belongs to another network"):
        verify_folder(folder, "00" * 32)
    for name, (lie, says) in LIES.items():
        other = shutil.copytree(folder, tmp_path / "copy")
        lie(other)
        with pytest.raises(UserError) as refused:
            verify_folder(other, chain)
        assert says in str(refused.value), name
        shutil.rmtree(other)


@pytest.mark.real("processes")
def test_a_folder_that_is_none_is_one_line_and_no_peer_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tasks", "verify", str(tmp_path / "none"), "--data-dir", str(tmp_path / "no peer")]) == 2
    assert "cannot read" in capsys.readouterr().err
