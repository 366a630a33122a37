"""Programs that call a gateway without the SDK. The library `protobuf` makes their requests and reads the results."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from clients.records import RequestBody
from tests.clients.test_wire import CLASSES, written
from tests.waiting import in_time, patience_seconds
from web.held_replies import HOLD_SECONDS

Json = dict[str, Any]
PROTOBUF = "application/x-protobuf"


def gradient_request(model: str, number: int, request: RequestBody, **fields: Any) -> bytes:
    """Return the body of a request for a gradient, with other values of these fields."""
    message = written(request)
    message.model_id, message.seq_id = model, number
    for name, value in fields.items():
        setattr(message, name, value)
    data: bytes = message.SerializeToString()
    return data


def read_losses(data: bytes) -> tuple[float, list[Any]]:
    """Return the sum of losses and the log-probabilities of each example from a result."""
    message = CLASSES["ForwardBackwardOutput"].FromString(data)
    assert message.metrics.keys() == {"loss:sum"} and len(message.loss_fn_outputs) == 1
    tensor = message.loss_fn_outputs[0].fields["logprobs"]
    ends = np.frombuffer(tensor.offsets, dtype="<i8") // 4
    logprobs = np.frombuffer(tensor.data, dtype="<f4")
    return message.metrics["loss:sum"], [logprobs[begin:end] for begin, end in pairwise(ends)]


def read_samples(data: bytes) -> tuple[list[tuple[list[int], list[float], int]], list[float]]:
    """Return tokens, log-probabilities and stop reason of each sample, and the log-probabilities of the prompt."""
    message = CLASSES["SampleResponse"].FromString(data)
    samples = [
        (np.frombuffer(each.tokens, "<i4").tolist(), np.frombuffer(each.logprobs, "<f4").tolist(), each.stop_reason)
        for each in message.sequences
    ]
    return samples, np.frombuffer(message.prompt_logprobs, "<f4").tolist()


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    data: bytes

    @property
    def json(self) -> Any:
        assert self.content_type.endswith("json"), self
        return json.loads(self.data)

    @property
    def fault(self) -> str:
        """The text of a failed future, whose category is `user`."""
        assert self.status == 200 and self.json.keys() == {"error", "category"} and self.json["category"] == "user", self
        error: str = self.json["error"]
        return error


@dataclass
class Program:
    """A program with one session at a gateway. Its calls block, and each has a connection of its own."""

    host: str
    port: int
    key: str = "tml-any"
    session: str = ""

    def send(self, method: str, call: str, body: Json | bytes | None = None) -> Answer:
        headers = {"X-API-Key": self.key, "Content-Type": PROTOBUF if isinstance(body, bytes) else "application/json"}
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=HOLD_SECONDS + patience_seconds())
        with closing(connection), in_time():
            connection.request(method, f"/tinker/api/v1/{call}", data, headers)
            reply = connection.getresponse()
            return Answer(reply.status, reply.headers.get_content_type(), reply.read())

    def post(self, call: str, body: Json | bytes) -> Answer:
        return self.send("POST", call, body)

    def begin(self) -> Program:
        self.session = self.post("create_session", {"tags": [], "sdk_version": "0", "type": "create_session"}).json["session_id"]
        return self

    def request_model(self, number: int = 0, base: str = "base", **fields: Any) -> Answer:
        lora = {"rank": 4, "seed": 3} | fields.pop("lora_config", {})
        ids = {"session_id": self.session, "model_seq_id": number, "base_model": base, "type": "create_model"}
        return self.post("create_model", ids | {"lora_config": lora} | fields)

    def create_model(self, number: int = 0, **fields: Any) -> str:
        model: str = self.result_of(self.request_model(number, **fields)).json["model_id"]
        return model

    def request_losses(self, model: str, number: int, request: RequestBody, **fields: Any) -> Answer:
        return self.post("forward_backward", gradient_request(model, number, request, **fields))

    def request_step(self, model: str, number: int, rate: object = 1e-2, **fields: Any) -> Answer:
        terms = {"learning_rate": rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
        return self.post("optim_step", {"model_id": model, "seq_id": number, "adam_params": terms, "type": "optim_step"} | fields)

    def request_samples(self, sampler: str, number: int, prompt: list[int], /, **given: Any) -> Answer:
        ids = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
        }
        return self.post("asample", {"num_samples": 1, "sampling_params": {}, "type": "sample"} | ids | given)

    def retrieve(self, request: str) -> Answer:
        """Ask for a result once."""
        return self.post("retrieve_future", {"request_id": request, "allow_metadata_only": True})

    def result_of(self, accepted: Answer) -> Answer:
        """Wait for the result of a request."""
        assert accepted.status == 200, accepted
        while True:
            reply = self.retrieve(accepted.json["request_id"])
            assert reply.status == 200, reply
            if reply.content_type == PROTOBUF or reply.json.get("type") != "try_again":
                return reply
