"""`peer demo --annotate`: real daemons, and a simulated crowd that speaks HTTP to them."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from curation.demo.simulated_annotators import (
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
from protocol.identity import Identity
from training.data.default_text import default_text

NOWHERE = ServingPeerClient("127.0.0.1", 9)


@pytest.fixture
def signals() -> Iterator[None]:
    """As they were before the demo set them."""
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
    monkeypatch.setattr("curation.demo.simulated_annotators.ACCURACY_MIN", 1.0)
    monkeypatch.setattr("curation.demo.simulated_annotators.ACCURACY_MAX", 1.0)
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
    assert said.count("serves annotators at http://127.0.0.1:") == 4 and "all roots are equal" in said


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
