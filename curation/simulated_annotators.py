"""Simulated people of `peer demo --annotate`, and their tasks: sentences of the built-in text, intact or shuffled.

A simulated person sends the same HTTP requests as an annotator's program, and no daemon knows its accuracy. Its mistakes are
spread evenly over its answers: with random mistakes, luck would change the quality of labels.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from curation.ledger.transaction_types import AnnotationStatement, EnrolStatement, SessionStatement
from curation.limits import SALT_BYTES
from curation.tasks.answers import Answer, answer_commitment
from protocol import codec
from protocol.identity import Identity, signing_preimage

INTACT, SHUFFLED = OPTIONS = ("intact", "shuffled")  # options of the question: an answer is an index in OPTIONS
# A sentence of words and commas alone, since shuffling removes other punctuation marks.
SENTENCE = re.compile(r"(?<=\. )[A-Z][a-z]+(?:,? [a-z]+){7,15}\.(?= [A-Z]|$)")
ACCURACY_MIN, ACCURACY_MAX = 0.85, 0.95  # lowest and highest share of right answers, spread evenly over the people
CARELESS_ACCURACY = 0.5  # share of right answers of one careless person, if at least CARELESS_FROM people answer
CARELESS_FROM = 5  # smallest number of people with a careless person
REPLY_SECONDS_MAX = 30.0
PAUSE_SECONDS = 1.0  # wait after a reply that brings no progress
TASKS_AT_ONCE = 2  # tasks that a person leases at a time: with more, each task waits longer for its votes


# Tasks ---------------------------------------------------------------------------------------------------------------


def make_tasks(text: str, count: int, seed: int) -> dict[str, int]:
    """Return `count` sentences of the text with the index of their right answer in `OPTIONS`.

    Every other sentence is shuffled.
    """
    draw = random.Random(f"folkmoot/demo/tasks/{seed}")
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    sentences = list(dict.fromkeys(found for part in paragraphs for found in SENTENCE.findall(f". {part}")))
    chosen = draw.sample(sentences, count)
    return dict((sentence, 0) if number % 2 else (shuffle_sentence(sentence, draw), 1) for number, sentence in enumerate(chosen))


def shuffle_sentence(sentence: str, draw: random.Random) -> str:
    """Return the words of the sentence in another order, with a capital letter first and a full stop last."""
    words = sentence.rstrip(".").replace(",", "").lower().split()
    order = list(words)
    while order == words:
        draw.shuffle(order)
    return " ".join(order).capitalize() + "."


# People --------------------------------------------------------------------------------------------------------------


def accuracies(people: int) -> list[float]:
    """Return the accuracy of each person."""
    careless = [CARELESS_ACCURACY] if people >= CARELESS_FROM else []
    others = people - len(careless)
    step = (ACCURACY_MAX - ACCURACY_MIN) / max(1, others - 1)
    return [round(ACCURACY_MAX - step * number, 3) for number in range(others)] + careless


@dataclass(frozen=True)
class HttpReply:
    status: int
    body: Any


@dataclass(frozen=True)
class ServingPeerClient:
    """HTTP client of a serving peer. Its calls block, so each runs in a thread."""

    host: str
    port: int

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}/"

    def send_request(self, method: str, path: str, body: Mapping[str, object] | None = None, token: str = "") -> HttpReply:
        """Send a request and return the reply.

        Raises `OSError` or `http.client.HTTPException` if no reply comes, and `ValueError` if the reply is no JSON.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=REPLY_SECONDS_MAX)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers | ({"Content-Type": "application/json"} if data else {}))
            response = connection.getresponse()
            return HttpReply(response.status, json.loads(response.read()))
        finally:
            connection.close()


@dataclass
class SimulatedAnnotator:
    name: str
    identity: Identity
    accuracy: float
    site: ServingPeerClient
    truth: Mapping[str, int]  # index of the right answer in OPTIONS, by the task's text
    # sum of the answers' error rates, from a random start between 0 and 1: an answer is wrong if the sum passes a whole number
    mistakes: float
    token: str = ""
    chain_id: bytes = b""
    # answer and salt by assignment: a repeated request sends the same
    sent_answers: dict[str, tuple[Answer, bytes]] = field(default_factory=dict)

    def sign_statement(self, statement: EnrolStatement | SessionStatement | AnnotationStatement) -> str:
        return self.identity.sign(signing_preimage(statement.TAG, self.chain_id, codec.encode(statement))).hex()

    async def take_part(self, limiter: trio.CapacityLimiter) -> None:
        """Enrol this person and answer tasks, until the call is cancelled."""
        while True:
            try:
                wait = await trio.to_thread.run_sync(self.run_step, limiter=limiter, abandon_on_cancel=True)
            except (OSError, http.client.HTTPException, ValueError):
                wait = PAUSE_SECONDS
            await trio.sleep(wait)

    def run_step(self) -> float:
        """Do the next step of this person, and return the wait in seconds before the step after it."""
        if not self.token:
            return self.sign_in()
        found = self.site.send_request("GET", f"/api/tasks?limit={TASKS_AT_ONCE}", token=self.token)
        if found.status == 401:
            self.token = ""
        if found.status != 200:
            return PAUSE_SECONDS
        replies = [self.submit_answer(task["assignment"], task["text"]) for task in found.body["tasks"]]
        # 410: another annotator has the place in the task. After any other refusal, the person tries again later.
        return 0.0 if all(reply.status in (200, 201, 202, 410) for reply in replies) else PAUSE_SECONDS

    def sign_in(self) -> float:
        network = self.site.send_request("GET", "/api/v1/network").body
        self.chain_id, peer, key = bytes.fromhex(network["chain_id"]), bytes.fromhex(network["peer_key"]), self.identity.public
        wish = {"key": key.hex(), "name": self.name, "signature": self.sign_statement(EnrolStatement(self.name, peer, False))}
        if self.site.send_request("POST", "/api/v1/annotators", wish).status not in (200, 201):
            return PAUSE_SECONDS
        challenge = self.site.send_request("POST", "/api/v1/challenges", {"key": key.hex()}).body
        session = SessionStatement(peer, bytes.fromhex(challenge["nonce"]), challenge["expires_ms"])
        opened = self.site.send_request(
            "POST", "/api/v1/sessions", challenge | {"key": key.hex(), "signature": self.sign_statement(session)}
        )
        self.token = opened.body.get("token", "")
        return 0.0 if self.token else PAUSE_SECONDS

    def submit_answer(self, assignment: str, text: str) -> HttpReply:
        if assignment not in self.sent_answers:
            right = self.truth[text]
            before, self.mistakes = self.mistakes, self.mistakes + 1 - self.accuracy
            choice = right if int(before) == int(self.mistakes) else 1 - right
            self.sent_answers[assignment] = (choice,), secrets.token_bytes(SALT_BYTES)
        answer, salt = self.sent_answers[assignment]
        key = bytes.fromhex(assignment)
        signature = self.sign_statement(AnnotationStatement(key, answer_commitment(key, salt, answer)))
        body = {"assignment": assignment, "answer": list(answer), "salt": salt.hex(), "signature": signature}
        return self.site.send_request("POST", "/api/submit", body, self.token)


def make_annotators(
    people: int, sites: Sequence[ServingPeerClient], truth: Mapping[str, int], seed: int
) -> list[SimulatedAnnotator]:
    """Return the simulated people, distributed evenly over all peers."""
    return [
        SimulatedAnnotator(
            name=f"person {number + 1}",
            identity=Identity(hashlib.sha256(f"folkmoot/demo/{seed}/person/{number}".encode()).digest()),
            accuracy=accuracy,
            site=sites[number % len(sites)],
            truth=truth,
            mistakes=random.Random(f"folkmoot/demo/person/{seed}/{number}").random(),
        )
        for number, accuracy in enumerate(accuracies(people))
    ]
