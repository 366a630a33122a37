"""Annotators of the demo, and those of a client that shares no code with the peer, at real daemons that serve."""

from __future__ import annotations

import hashlib
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgpack
import pytest
import trio
from nacl.signing import SigningKey

from curation.rpc import CurationRpc, ImportRequest
from curation.simulated_annotators import (
    CARELESS_ACCURACY,
    HttpReply,
    ServingPeerClient,
    SimulatedAnnotator,
    accuracies,
    make_annotators,
    make_tasks,
    shuffle_sentence,
)
from demo import annotation_demo
from demo.network_demo import make_directories
from peer import cli
from peer.daemon.daemon import running_daemon
from peer.settings.config import load_settings
from protocol.identity import Identity
from tests.waiting import in_time, patience, patience_seconds
from training.data.default_text import default_text

Reply = tuple[int, Any]
TASKS = "".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(3))


@dataclass
class Site:
    """A serving peer, as strangers see it."""

    address: str
    api: CurationRpc

    async def ask(self, method: str, path: str, body: Any = None, token: str = "") -> Reply:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = Request(self.address + path, json.dumps(body).encode() if body else None, headers, method=method)

        def send() -> Reply:
            try:
                with in_time(), urlopen(request, timeout=patience_seconds()) as reply:
                    return reply.status, json.loads(reply.read())
            except HTTPError as problem:
                with problem:
                    return problem.code, json.loads(problem.read())["code"]

        return await trio.to_thread.run_sync(send)

    async def project(self, folder: Path, votes: int, tasks: str = TASKS) -> str:
        file = folder / f"{votes}.jsonl"
        file.write_text(tasks)
        return (
            await self.api.import_tasks(ImportRequest(str(file), "", "", "label", ("glad", "sad"), False, votes, 1, "", False))
        ).project


class Annotator:
    def __init__(self, site: Site, name: str) -> None:
        self.site, self.name, self.secret, self.token = site, name, SigningKey(hashlib.sha256(name.encode()).digest()), ""

    @property
    def key(self) -> str:
        return bytes(self.secret.verify_key).hex()

    def sign(self, tag: str, *fields: Any) -> str:
        return self.secret.sign(
            b"folkmoot/2/" + tag.encode() + b"\0" + self.chain + msgpack.packb([tag, *fields])
        ).signature.hex()

    async def sign_up(self) -> Reply:
        _, network = await self.site.ask("GET", "/api/v1/network")
        self.chain, self.peer = bytes.fromhex(network["chain_id"]), bytes.fromhex(network["peer_key"])
        return await self.site.ask(
            "POST",
            "/api/v1/annotators",
            {"key": self.key, "name": self.name, "signature": self.sign("enrol", self.name, self.peer, False)},
        )

    async def begin(self) -> None:
        assert await self.sign_up() == (201, {"annotator": self.key})
        _, said = await self.site.ask("POST", "/api/v1/challenges", {"key": self.key})
        signature = self.sign("session", self.peer, bytes.fromhex(said["nonce"]), said["expires_ms"])
        status, reply = await self.site.ask("POST", "/api/v1/sessions", {"key": self.key, **said, "signature": signature})
        assert status == 201
        self.token = reply["token"]

    async def tasks(self, limit: int = 1) -> list[Any]:
        while True:  # a decision may take longer than one call
            status, reply = await self.site.ask("GET", f"/api/tasks?limit={limit}", token=self.token)
            assert status == 200
            if reply["tasks"]:
                return cast(list[Any], reply["tasks"])

    async def submit(self, assignment: str, answer: list[int], salt: bytes = bytes(16)) -> Reply:
        said = hashlib.sha256(b"folkmoot/answer\0" + bytes.fromhex(assignment) + salt + msgpack.packb(answer)).digest()
        signature = self.sign("annotation", bytes.fromhex(assignment), said)
        return await self.site.ask(
            "POST",
            "/api/submit",
            {"assignment": assignment, "answer": answer, "salt": salt.hex(), "signature": signature},
            self.token,
        )


@pytest.fixture
async def site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Site]:
    directory = tmp_path / "peer"
    assert (
        await trio.to_thread.run_sync(
            cli.main, ["init", "--network", "lab", "--listen", "127.0.0.1:0", "--data-dir", str(directory)]
        )
        == 0
    )
    values = {"data_directory": directory, "role": "annotator", "sign_up": "open", "web_listen": "127.0.0.1:0"}
    async with running_daemon(load_settings(values, {"HOME": str(tmp_path)}).config) as daemon:
        while not (told := [event.text for event in await daemon.api.events(0, 0.1) if event.kind == "serve"]):
            pass
        yield Site(told[0].split()[-1].rstrip("/"), cast(CurationRpc, daemon.api))


@pytest.mark.real("sockets")
async def test_a_person_labels(site: Site, tmp_path: Path) -> None:
    with patience():
        project = await site.project(tmp_path, votes=1)
        ann = Annotator(site, "ann")
        await ann.begin()
        task, *_ = await ann.tasks(3)
        assert (task["kind"], task["options"], task["many"], task["project"]) == ("label", ["glad", "sad"], False, project)
        status, receipt = await ann.submit(task["assignment"], [1])
        assert (status, receipt["annotation"]) == (201, task["assignment"])
        assert await ann.submit(task["assignment"], [1]) == (200, receipt)
        assert await ann.submit(task["assignment"], [0]) == (409, "already-answered")
        assert await ann.submit(task["assignment"], [2]) == (422, "misfit")
        _, annotation = await site.ask("GET", f"/api/v1/annotations/{task['assignment']}")
        assert (annotation["state"], annotation["label"]) == ("settled", [1])
        assert await site.ask("POST", "/api/v1/sessions", {"key": ann.key}) == (400, "malformed")


@pytest.mark.real("sockets")
async def test_of_two_answers_at_once_the_first_is_opened(site: Site, tmp_path: Path) -> None:
    """Both were kept under one name. The second answer's salt does not open the first one's commitment."""
    with patience():
        await site.project(tmp_path, votes=2, tasks=TASKS.splitlines(True)[0])
        ann, bob = Annotator(site, "ann"), Annotator(site, "bob")
        replies: list[int] = []

        async def send(salt: bytes) -> None:
            replies.append((await ann.submit(assignment, [1], salt))[0])

        for who in (ann, bob):
            await who.begin()
        assignment = (await ann.tasks())[0]["assignment"]
        async with trio.open_nursery() as nursery:
            for salt in (b"a" * 16, b"b" * 16):
                nursery.start_soon(send, salt)
        assert Counter(replies) == {201: 1, 409: 1}
        assert (await bob.submit((await bob.tasks())[0]["assignment"], [1]))[0] == 201
        annotation: Any = {}
        while annotation.get("state") != "settled":
            _, annotation = await site.ask("GET", f"/api/v1/annotations/{assignment}")
        assert annotation["label"] == [1]


NOWHERE = ServingPeerClient("127.0.0.1", 9)


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore signals to their state before the demo."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.real("processes")
@pytest.mark.usefixtures("signals")
def test_a_crowd_labels_sentences_and_all_peers_hold_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(annotation_demo, "TASKS", 4)
    monkeypatch.setattr("curation.simulated_annotators.ACCURACY_MIN", 1.0)
    monkeypatch.setattr("curation.simulated_annotators.ACCURACY_MAX", 1.0)
    file = tmp_path / "r.json"
    status = cli.main(
        ["demo", "--annotate", "--crowd", "3", "--web-port", "0", "--report", str(tmp_path / "run"), "--json", str(file)]
    )
    said = capsys.readouterr().out
    assert status == 0, said
    found = json.loads(file.read_text())["annotate"]
    assert set(found) == {"tasks", "settled", "right", "review", "votes", "annotators", "roots"}
    assert (found["tasks"], found["settled"], found["right"], found["review"], found["votes"]) == (4, 4, 4, 0, 2.0)
    assert len(found["roots"]) == 4 and len(set(found["roots"].values())) == 1
    people = found["annotators"]
    assert sum(row["annotations"] for row in people.values()) == sum(row["accepted"] for row in people.values()) == 8
    assert said.count("serves annotators at http://127.0.0.1:") == 4 and "all peers have equal state roots" in said


def test_tasks_are_sentences_of_the_built_in_text_and_half_of_them_shuffled() -> None:
    source = default_text().decode()
    tasks, text = make_tasks(source, 40, 0), " ".join(source.split())
    assert len(tasks) == 40 and sum(tasks.values()) == 20 and tasks == make_tasks(source, 40, 0) != make_tasks(source, 40, 1)
    assert all((sentence in text) == (label == 0) for sentence, label in tasks.items())


def test_a_shuffled_sentence_has_the_same_words_in_another_order() -> None:
    found = shuffle_sentence("One two, three four.", random.Random(0))
    assert found[0].isupper() and found.endswith(".") and found != "One two three four."
    assert sorted(found.lower().rstrip(".").split()) == ["four", "one", "three", "two"]


def test_each_person_is_right_as_often_as_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = {f"text {number}": number % 2 for number in range(200)}
    crowd = make_annotators(12, [NOWHERE], truth, 0)
    assert [person.accuracy for person in crowd] == accuracies(12) and crowd[-1].accuracy == CARELESS_ACCURACY
    monkeypatch.setattr(ServingPeerClient, "send_request", lambda *_, **__: HttpReply(201, {}))
    for person in crowd:
        for number, text in enumerate(truth):
            person.submit_answer(number.to_bytes(32, "big").hex(), text)
        said = [answer for answer, _ in person.sent_answers.values()]
        right = sum(answer == (label,) for answer, label in zip(said, truth.values(), strict=True))
        assert abs(right - 200 * person.accuracy) <= 1


def test_an_assignment_gets_one_answer_however_often_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr(
        ServingPeerClient, "send_request", lambda self, method, path, body=None, token="": sent.append(body) or HttpReply(503, {})
    )
    person = SimulatedAnnotator("ann", Identity(bytes(32)), 0.5, NOWHERE, {"a text": 0}, 0.0)
    for _ in range(3):
        person.submit_answer("00" * 32, "a text")
    assert sent[0] == sent[1] == sent[2]


def test_peers_serve_on_ports_behind_one_another_and_are_founders_that_serve(tmp_path: Path) -> None:
    options = cli.build_parser().parse_args(["demo", "--annotate", "--web-port", "7780"])
    demo = annotation_demo.Demo(options, tmp_path, annotation_demo.make_demo_peers(options, tmp_path))
    assert [peer.serves[1] for peer in demo.peers] == [f"127.0.0.1:{port}" for port in range(7780, 7784)]
    make_directories(demo)
    genesis = annotation_demo.PeerDisk(demo.peers[0].directory)
    members = genesis.state.members.members.values()
    genesis.close()
    assert [member.roles for member in members] == [("annotator",)] * 4
