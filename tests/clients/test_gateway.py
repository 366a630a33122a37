"""A gateway over HTTP: a real daemon in a process of its own, with a real worker, and programs without the SDK."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from clients.gateway.http_routes import ROUTES
from clients.gateway.model_queue import GAP_SECONDS
from clients.ledger.clients_module import FLOPS_ALLOWED, STEPS_ALLOWED
from clients.records import ClientLoss, Example, RequestBody
from protocol.api import TrainRequest
from protocol.errors import UserError
from protocol.limits import PARAMETERS_ALLOWED
from storage.api_key_store import ApiKey, ApiKeyStore
from tests.clients.programs import PROTOBUF, Answer, Json, Program, gradient_request, read_losses, read_samples
from tests.clients.runs import body, floats, tokens
from tests.clients.test_daemon import MODEL, SETTINGS, certain
from tests.clients.test_wire import CLASSES
from tests.peer.processes import Daemon, command, daemons, poll
from tests.web.room import Room, said
from tests.web.test_defence import complete_body, path_of
from training.data.default_text import default_text
from web.held_replies import HOLD_SECONDS, HeldReplies

pytestmark = pytest.mark.real("sockets, a daemon and its worker")
BATCHES = [certain(body(examples=4, seed=seed)) for seed in range(3)]


@dataclass
class Gateway:
    daemon: Daemon
    port: int = 0

    def start(self) -> None:
        """Start the daemon, each time at the same address, and wait until it serves."""
        written = self.daemon.directory / "services" / "serve" / "address"
        written.unlink(missing_ok=True)
        self.daemon.start("run", "--role", "full", "--web-listen", f"127.0.0.1:{self.port}")

        async def is_served() -> bool:
            return written.exists() and written.read_text() != ""

        trio.run(self.daemon.answers)
        trio.run(poll, is_served)
        self.port = int(written.read_text().rpartition(":")[2])

    async def train_base(self, folder: Path) -> None:
        text = folder / "text"
        text.write_bytes(default_text()[:20_000])
        await self.daemon.client.start_job(TrainRequest("base", str(text), 2, 0, SETTINGS))

        async def is_finished() -> bool:
            return any(job.state == "finished" for job in await self.daemon.client.jobs())

        await poll(is_finished)

    def program(self, key: str = "tml-any") -> Program:
        return Program("127.0.0.1", self.port, key).begin()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    status, _, error = command("init", "--network", "lab", "--listen", "127.0.0.1:0", "--data-dir", str(folder / "peer"))
    assert status == 0, error
    with daemons([folder / "peer"]) as (daemon,):
        made = Gateway(daemon)
        made.start()
        trio.run(made.train_base, folder)
        yield made


def test_a_loop_of_pipelined_requests_lowers_the_loss(gateway: Gateway) -> None:
    program = gateway.program()
    capabilities = program.send("GET", "get_server_capabilities").json["supported_models"]
    assert [(model["model_name"], model["max_context_length"]) for model in capabilities] == [("base", MODEL["context"])]
    model, losses = program.create_model(), []
    assert model == f"{program.session}:train:0"
    assert program.post("get_info", {"model_id": model}).json["lora_rank"] == 4
    for step in range(3):
        sent = [program.request_losses(model, 3 * step + 1 + part, BATCHES[part]) for part in range(2)]
        accepted = program.request_step(model, 3 * step + 3)
        loss = 0.0
        for request, batch in zip(sent, BATCHES, strict=False):
            result = program.result_of(request)
            assert (result.status, result.content_type) == (200, PROTOBUF)
            said, logprobs = read_losses(result.data)
            assert [len(each) for each in logprobs] == [example.length for example in batch.examples]
            assert said == pytest.approx(-sum(float(each.sum(dtype=np.float64)) for each in logprobs), rel=1e-6)
            loss += said
        assert program.result_of(accepted).json == {"metrics": {"round:max": step, "refused_rounds:max": 0}}
        losses.append(loss)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.97 * losses[0]
    # Losses alone have the same form, and add nothing to a step.
    alone = read_losses(program.result_of(program.request_losses(model, 10, BATCHES[0], forward_only=True)).data)
    assert len(alone[1]) == 4 and alone[0] < losses[0]
    assert "no gradient" in program.result_of(program.request_step(model, 11)).fault


def example(length: int = 2, token: int = 1, **inputs: list[float]) -> Example:
    text = tokens([token] * length)
    return Example(text, text, {name: floats(values) for name, values in ({"weights": [1.0] * length} | inputs).items()})


def request(*examples: Example, loss: ClientLoss = ClientLoss.CROSS_ENTROPY, **config: float) -> RequestBody:
    return RequestBody(loss, config, examples)


def altered(change: Any) -> bytes:
    """Return a valid request after a change of its first example. The test sets the model and the number."""
    message = CLASSES["ForwardBackwardRequest"].FromString(gradient_request("m", 1, request(example(), example())))
    change(message.data[0])
    data: bytes = message.SerializeToString()
    return data


def set_image(datum: Any) -> None:
    datum.model_input.add().image.format = "png"


def set_sparse(datum: Any) -> None:
    datum.loss_fn_inputs["weights"].sparse_csr.values = floats([1.0, 1.0])


def set_negative(datum: Any) -> None:
    datum.model_input.add().encoded_text.tokens = np.array([-1], "<i4").tobytes()


def set_type(datum: Any) -> None:
    datum.loss_fn_inputs["weights"].dtype = 4  # bfloat16


def set_matrix(datum: Any) -> None:
    datum.loss_fn_inputs["target_tokens"].shape[:] = [2, 1]


FAULTY: list[tuple[RequestBody | bytes, dict[str, Any], str]] = [  # a request, other fields, and the value in the fault
    (request(example()), {"loss_fn": "stable_reinforce"}, "unknown loss 'stable_reinforce'"),
    (request(example(token=60_000)), {}, "tokens contain 60000, but the vocabulary has 257 tokens"),
    (request(example(), example(MODEL["context"] + 1)), {}, "example 1: 25 tokens are more than the model's context of 24"),
    (request(example(weights=[1.0, float("nan")])), {}, "weights contain nan at token 1"),
    (request(example(weights=[1.0])), {}, "1 weights for 2 tokens"),
    (request(example(mask=[1.0, 1.0])), {}, "mask"),
    (request(example(), beta=1.0), {}, "has no setting 'beta'"),
    (request(example(logprobs=[0.0] * 2, advantages=[0.0] * 2), loss=ClientLoss.PPO), {}, "weights"),
    (altered(set_image), {}, "chunk 2 is of the kind 'image'"),
    (altered(set_sparse), {}, "the tensor is sparse"),
    (altered(set_matrix), {}, "the tensor has the shape 2 × 1"),
    (altered(set_negative), {}, "chunk 2 contains -1: a token id is in 0..65535"),
    (altered(set_type), {}, "the tensor has the data type 4"),
    (request(example(weights=[1.0, float("inf")])), {}, "weights contain inf at token 1"),
    (request(example(), clip_high_threshold=float("nan")), {}, "setting 'clip_high_threshold' is nan"),
]


def test_what_is_wrong_in_a_request_fails_its_future_and_the_next_one_goes_on(gateway: Gateway) -> None:
    program = gateway.program()
    model, sent = program.create_model(), list[tuple[Answer, str]]()
    for number, (faulty, fields, fault) in enumerate(FAULTY, 1):
        if isinstance(faulty, bytes):
            message = CLASSES["ForwardBackwardRequest"].FromString(faulty)
            message.model_id, message.seq_id = model, number
            sent.append((program.post("forward_backward", message.SerializeToString()), fault))
        else:
            sent.append((program.request_losses(model, number, faulty, **fields), fault))
    rates = [
        ("not nan", float("nan")),
        ("not inf", float("inf")),
        ("not None", None),
        ("not 11", 11),
        ("not -1", -1),
        ("too large: 1000", 10**400),
    ]
    for number, (fault, rate) in enumerate(rates, len(FAULTY) + 1):
        sent.append((program.request_step(model, number, rate), fault))
    other = program.request_step(model, number + 1, adam_params={}, optimizer_params={"type": "dimuon", "learning_rate": 0.1})
    sent.append((other, "optimizer 'dimuon' is not supported"))
    sent.append((program.request_step(model, number + 2), "this step has no gradient"))
    valid = program.request_losses(model, number + 3, BATCHES[0])
    step = program.request_step(model, number + 4)
    for accepted, fault in sent:
        assert fault in program.result_of(accepted).fault
    assert program.result_of(valid).content_type == PROTOBUF
    assert program.result_of(step).json["metrics"]["round:max"] == 0


def test_models_that_cannot_be_created_are_failed_futures(gateway: Gateway) -> None:
    program = gateway.program()
    wanted: list[tuple[dict[str, Any], str]] = [
        ({"lora_config": {"rank": 0}}, "rank must be a whole number in 1..1024, not 0"),
        ({"lora_config": {"rank": -1}}, "rank must be a whole number in 1..1024, not -1"),
        ({"lora_config": {"rank": 17}}, "rank 17 is more than the model's width 16"),
        ({"lora_config": {"rank": 1025}}, "rank must be a whole number in 1..1024, not 1025"),
        ({"lora_config": {"train_attn": False, "train_mlp": False, "train_unembed": False}}, "no matrix would have an adapter"),
        ({"base": "nobody"}, "nobody"),
        ({"base": ""}, "base_model '' has 0 characters"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer 'dimuon' is not supported"),
    ]
    accepted = [program.request_model(number, **fields) for number, (fields, _) in enumerate(wanted)]
    for number, (reply, (_, fault)) in enumerate(zip(accepted, wanted, strict=True)):
        assert fault in program.result_of(reply).fault
        missing = program.post("get_info", {"model_id": f"{program.session}:train:{number}"})
        assert missing.status == 404 and "was not created" in missing.json["detail"]
    again = [program.request_model(9, lora_config={"seed": 2**70}) for _ in range(2)]
    assert again[0] == again[1], "the same session and number are the same model"
    assert program.result_of(again[0]) == program.result_of(again[1])


def test_missing_weights_are_ones(gateway: Gateway) -> None:
    program, batch = gateway.program(), BATCHES[0]
    model, without = program.create_model(), replace(batch, examples=tuple(replace(each, inputs={}) for each in batch.examples))
    results = [program.result_of(program.request_losses(model, number, sent)) for number, sent in ((1, batch), (2, without))]
    assert results[0].content_type == PROTOBUF and results[0].data == results[1].data


def test_requests_in_another_order_are_computed_in_theirs_and_once(gateway: Gateway) -> None:
    program = gateway.program()
    model = program.create_model()
    began = time.monotonic()
    late = {number: program.request_losses(model, number, BATCHES[number % 3]) for number in (2, 3)}
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(program.retrieve, late[3].json["request_id"])
        time.sleep(1.0)
        assert not held.done(), "a reply to a pending request is held"
        first = program.request_losses(model, 1, BATCHES[1])
        assert program.request_losses(model, 1, BATCHES[2]) == first
        result = held.result()
    assert result.content_type == PROTOBUF and time.monotonic() - began < min(HOLD_SECONDS, GAP_SECONDS)
    losses = [read_losses(program.result_of(late.get(number, first)).data)[0] for number in (1, 2, 3)]
    alone = [
        read_losses(program.result_of(program.request_losses(model, 4 + place, BATCHES[place], forward_only=True)).data)[0]
        for place in range(3)
    ]
    assert losses == [alone[1], alone[2], alone[0]]
    assert program.result_of(program.request_step(model, 7)).json["metrics"]["round:max"] == 0


def test_models_with_the_same_data_take_their_steps(gateway: Gateway) -> None:
    program = gateway.program()
    models = [program.create_model(number) for number in range(3)]
    for round in range(2):
        steps = []
        for model in models:
            program.request_losses(model, 2 * round + 1, BATCHES[0])
            steps.append(program.request_step(model, 2 * round + 2))
        for step in steps:
            assert program.result_of(step).json == {"metrics": {"round:max": round, "refused_rounds:max": 0}}


def test_a_poll_for_an_unknown_request_is_not_found(gateway: Gateway) -> None:
    program = gateway.program()
    for unknown in ("none", f"{program.session}:train:0#1", "#" + "9" * 100):
        missing = program.retrieve(unknown)
        assert missing.status == 404 and missing.json["detail"].startswith("no request")
    assert program.post("forward_backward", b"no protobuf").status == 400


async def test_a_poll_that_its_client_gives_up_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, hold = list[HeldReplies](), HeldReplies.hold

    async def record(held: HeldReplies, *arguments: Any) -> Any:
        seen.append(held)
        return await hold(held, *arguments)

    monkeypatch.setattr(HeldReplies, "hold", record)
    async with Room(tmp_path).serving() as (_, site):
        program = await said(Program(site.host, site.port).begin)
        await said(program.request_model)
        accepted = await said(program.request_step, f"{program.session}:train:0", 2)  # it waits for number 1
        polls = [await trio.open_tcp_stream(site.host, site.port) for _ in range(3)]
        content = b'{"request_id": "%s"}' % accepted.json["request_id"].encode()
        for poll in polls:
            await poll.send_all(
                b"POST /tinker/api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-any\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
            )
        began = trio.current_time()
        while len(seen) < len(polls):  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert seen[0]._waiting.keys() == {accepted.json["request_id"]}
        for poll in polls:
            await poll.aclose()
        while seen[0]._waiting:  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert trio.current_time() - began < GAP_SECONDS / 2


def test_a_killed_gateway_answers_each_request_once_at_its_address(gateway: Gateway) -> None:
    program = gateway.program()
    model = program.create_model()
    results, sent, number = dict[str, Answer](), list[Answer](), 1
    for seconds in (0.0, 0.4):
        sent.append(program.request_losses(model, number, BATCHES[0]))
        results[sent[-1].json["request_id"]] = program.result_of(sent[-1])
        sent += [program.request_losses(model, number + 1, BATCHES[1]), program.request_step(model, number + 2)]
        number += 3
        time.sleep(seconds)
        gateway.daemon.kill()
        gateway.start()
    sent += [program.request_losses(model, number, BATCHES[2]), program.request_step(model, number + 1)]
    after = {each.json["request_id"]: program.result_of(each) for each in sent}
    assert all(after[name] == result for name, result in results.items())
    rounds = [result.json["metrics"]["round:max"] for result in after.values() if result.content_type != PROTOBUF]
    assert rounds == [0, 1, 2], "each step was decided once"


# Samples -----------------------------------------------------------------------------------------------------------------

GREEDY = {"max_tokens": 6, "temperature": 0.0, "stop": []}
STOP, LENGTH = 0, 1


def test_samples_of_a_run_are_those_of_the_step_at_which_its_sampler_was_made(gateway: Gateway) -> None:
    program = gateway.program()
    base = program.post(
        "create_sampling_session", {"session_id": program.session, "sampling_session_seq_id": 7, "base_model": "base"}
    )
    sampler, model, prompt = base.json["sampling_session_id"], program.create_model(), [84, 104, 101, 32]
    assert program.send("GET", f"samplers/{sampler}").json == {"sampler_id": sampler, "base_model": "base", "model_path": None}

    def draw(sampler: str, number: int = 0) -> tuple[Any, list[float]]:
        accepted = program.request_samples(sampler, number, prompt, sampling_params=GREEDY, prompt_logprobs=True)
        result = program.result_of(accepted)
        assert result.content_type == PROTOBUF
        (sample,), scores = read_samples(result.data)
        assert len(sample[0]) == len(sample[1]) == 6 and sample[2] == LENGTH and math.isnan(scores[0])
        return sample, scores[1:]

    def make_sampler(number: int, place: int) -> str:
        ids = {"model_id": model, "seq_id": number, "sampling_session_seq_id": place}
        made: str = program.result_of(program.post("save_weights_for_sampler", ids)).json["sampling_session_id"]
        return made

    first = make_sampler(1, 0)
    assert first == f"{program.session}:sample:0" and draw(first) == draw(sampler), "the first adapters change nothing"
    for step in range(3):  # the gateway keeps the models of two rounds
        program.request_losses(model, 2 + 2 * step, BATCHES[0])
        program.result_of(program.request_step(model, 3 + 2 * step, 0.1))
    second = make_sampler(8, 1)
    assert draw(second)[1] != draw(first, 1)[1] == draw(sampler, 1)[1], "each sampler keeps its model"
    example = Example(tokens(prompt[:-1]), tokens(prompt[1:]), {"weights": floats([1.0] * 3)})
    (logprobs,) = read_losses(program.result_of(program.request_losses(model, 9, request(example), forward_only=True)).data)[1]
    assert logprobs.tolist() == pytest.approx(draw(second, 1)[1], abs=1e-5), "a sampler has the model that a pass computes with"


def test_a_seed_determines_samples_and_a_stop_ends_them(gateway: Gateway) -> None:
    program = gateway.program()
    ids = {"session_id": program.session, "sampling_session_seq_id": 0, "base_model": "base"}
    sampler = program.post("create_sampling_session", ids).json["sampling_session_id"]

    def draw(number: int, **options: Any) -> list[tuple[list[int], list[float], int]]:
        accepted = program.request_samples(sampler, number, [84], num_samples=3, sampling_params={"max_tokens": 8} | options)
        assert len(accepted.json["sample_sequence_ids"]) == 3
        return read_samples(program.result_of(accepted).data)[0]

    free = draw(0, seed=5, stop=[])
    assert free == draw(1, seed=5, stop=[]) != draw(2, seed=6, stop=[]) and len({tuple(sample[0]) for sample in free}) > 1
    token = free[0][0][3]
    stopped = draw(3, seed=5, stop=[token])
    cut = free[0][0][: free[0][0].index(token) + 1]
    assert stopped[0][0] == cut and stopped[0][2] == STOP
    assert draw(0, seed=99) == free, "the same number is the same request"


def test_faults_of_samples_are_failures_of_their_futures(gateway: Gateway) -> None:
    program = gateway.program()
    ids = {"session_id": program.session, "sampling_session_seq_id": 0, "base_model": "base"}
    sampler = program.post("create_sampling_session", ids).json["sampling_session_id"]
    faults: list[tuple[list[int], Json, str]] = [
        ([1] * 99, {}, "the prompt has 99 tokens, and the model's context is 24"),
        ([400], {}, "contain 400, but the vocabulary has the tokens 0 to 256"),
        ([1], {"num_samples": 65}, "num_samples must be a whole number from 1 to 64, not 65"),
        ([1], {"sampling_params": {"temperature": None}}, "temperature must be a number"),
        ([1], {"sampling_params": {"temperature": float("nan")}}, "temperature must be a number of at most 1e6, not nan"),
        ([1], {"sampling_params": {"top_p": float("inf")}}, "top_p must be a number of at most 1e6, not inf"),
        ([-1], {}, "contain -1, but"),
        ([], {}, "the prompt has no tokens"),
        ([1] * 20_000, {}, "the prompt has 20000 tokens, and the model's context is 24"),
        ([1], {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "a chunk of type 'image'"),
        ([1], {"topk_prompt_logprobs": 3}, "topk_prompt_logprobs 3 is not supported"),
    ]
    for number, (prompt, given, fault) in enumerate(faults):
        accepted = program.request_samples(sampler, number, prompt, **given)
        assert len(accepted.json["sample_sequence_ids"]) == given.get("num_samples", 1), "the SDK asserts this"
        assert fault in program.result_of(accepted).fault
    too_large = program.request_samples(sampler, 99, [1] * 400_000)
    assert too_large.status == 413 and "larger than 1048576 bytes" in too_large.json["detail"]
    assert program.request_samples("other", 0, [1]).status == program.send("GET", "samplers/other").status == 404
    for wrong in ({"base_model": "none"}, {"model_path": "tinker://x"}):
        asked = {"session_id": program.session, "sampling_session_seq_id": 1} | wrong
        assert program.post("create_sampling_session", asked).status == 404
    assert program.retrieve(f"{sampler}#77").status == 410, "the SDK requests these samples again"


# Checkpoints -------------------------------------------------------------------------------------------------------------


def test_a_loop_continues_from_a_checkpoint_as_if_it_had_not_stopped(gateway: Gateway) -> None:
    program = gateway.program()
    model = program.create_model()

    def step(model: str, number: int) -> tuple[float, int]:
        """Take a step, and return its loss and its round."""
        losses = program.request_losses(model, number, BATCHES[0])
        update = program.result_of(program.request_step(model, number + 1, 0.02)).json["metrics"]
        return read_losses(program.result_of(losses).data)[0], update["round:max"]

    def post(call: str, **fields: Any) -> Answer:
        return program.result_of(program.post(call, fields))

    first = [step(model, 1 + 2 * number)[0] for number in range(2)]
    path = post("save_weights", model_id=model, seq_id=5, path="two", overwrite=False).json["path"]
    assert path == f"tinker://{model}/weights/two"
    wanted = [step(model, 6 + 2 * number)[0] for number in range(3)]
    assert len({*first, *wanted}) == 5, "each step changes the loss"
    # In the same model, with the moments: the same losses again. The run is another one.
    assert post("load_weights", model_id=model, seq_id=12, path=path, optimizer=True).json["model_id"] == model
    again = [step(model, 13 + 2 * number) for number in range(3)]
    assert [loss for loss, _ in again] == pytest.approx(wanted, rel=1e-6) and [round for _, round in again] == [0, 1, 2]
    # In new models, with and without the moments.
    for place, optimizer in ((1, True), (2, False)):
        asked = {"session_id": program.session, "model_seq_id": place, "path": path, "optimizer": optimizer}
        assert post("load_weights", **asked).json["model_id"] == f"{program.session}:train:{place}"
    assert program.post("get_info", {"model_id": f"{program.session}:train:2"}).json["lora_rank"] == 4
    kept, fresh = ([step(f"{program.session}:train:{place}", 1 + 2 * number)[0] for number in range(2)] for place in (1, 2))
    assert kept == pytest.approx(wanted[:2], rel=1e-6)
    assert fresh[0] == pytest.approx(wanted[0], rel=1e-6) and fresh[1] != pytest.approx(wanted[1], rel=1e-5)
    # A gradient of the model before belongs to no step of the loaded one.
    program.request_losses(model, 19, BATCHES[1])
    post("load_weights", model_id=model, seq_id=20, path=path, optimizer=False)
    assert "no gradient" in program.result_of(program.request_step(model, 21)).fault
    # A model of another rank has that of the weights after the load.
    other = program.create_model(3, lora_config={"rank": 8, "seed": 3})
    assert program.post("get_info", {"model_id": other}).json["lora_rank"] == 8
    post("load_weights", model_id=other, seq_id=1, path=path, optimizer=False)
    assert program.post("get_info", {"model_id": other}).json["lora_rank"] == 4
    assert program.send("GET", f"training_runs/{other}").json["lora_rank"] == 4


def test_checkpoints_are_listed_sampled_and_deleted(gateway: Gateway) -> None:
    program = gateway.program()
    model, prompt = program.create_model(), [84, 104, 101, 32]

    def save(call: str, number: int, name: object, **fields: Any) -> Answer:
        return program.result_of(program.post(call, {"model_id": model, "seq_id": number, "path": name, **fields}))

    def draw(place: int, **given: Any) -> Any:
        ids = {"session_id": program.session, "sampling_session_seq_id": place} | given
        sampler = program.post("create_sampling_session", ids).json["sampling_session_id"]
        return read_samples(program.result_of(program.request_samples(sampler, 0, prompt, sampling_params=GREEDY)).data)[0]

    path = save("save_weights_for_sampler", 1, "samp").json["path"]
    assert path == f"tinker://{model}/sampler_weights/samp"
    program.request_losses(model, 2, BATCHES[0])
    program.result_of(program.request_step(model, 3, 0.2))
    save("save_weights", 4, "one", ttl_seconds=9_000)
    assert f"there are weights {path!r} already" in save("save_weights_for_sampler", 5, "samp").fault
    assert save("save_weights", 6, "one", overwrite=True).status == 200
    for number, name in enumerate(("", "a/b", "a b", "x?y", "x#y", "é", "n" * 49, ".", "..", None, 5), 7):
        assert "must have 1 to 48 letters" in save("save_weights", number, name).fault
    for number, lifetime in enumerate((0, -1, 2**60, "1", 1.5), 20):
        assert "ttl_seconds must be a whole number" in save("save_weights", number, "two", ttl_seconds=lifetime).fault
    assert draw(0, model_path=path) == draw(1, base_model="base") != draw(2, model_path=f"tinker://{model}/weights/one")
    assert program.send("GET", f"samplers/{program.session}:sample:0").json["model_path"] == path

    listed = program.send("GET", f"training_runs/{model}/checkpoints").json["checkpoints"]
    every = program.send("GET", "checkpoints?limit=1&offset=0").json
    assert {each["checkpoint_id"]: each["checkpoint_type"] for each in listed} == {
        "weights/one": "training",
        "sampler_weights/samp": "sampler",
    }
    assert every["checkpoints"] == listed[:1] and every["cursor"]["total_count"] >= 2 and listed[0]["size_bytes"] > 0
    info = program.post("weights_info", {"tinker_path": path}).json
    assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == ("base", 4, True)

    place = f"training_runs/{model}/checkpoints/weights/one"
    for lifetime, expires in ((7_200, True), (None, False)):
        assert program.send("PUT", f"{place}/ttl", {"ttl_seconds": lifetime}).status == 200
        (found,) = (
            each for each in program.send("GET", "checkpoints").json["checkpoints"] if each["tinker_path"].endswith("one")
        )
        assert (found["expires_at"] is not None) == expires
    assert program.send("PUT", f"{place}/ttl", {"ttl_seconds": "long"}).status == 400
    assert program.send("DELETE", place).status == 200
    assert program.send("DELETE", place).status == program.send("PUT", f"{place}/ttl", {"ttl_seconds": 1}).status == 404
    fault = program.result_of(
        program.post("load_weights", {"model_id": model, "seq_id": 30, "path": f"tinker://{model}/weights/one"})
    )
    assert "were not saved, or they have expired" in fault.fault
    assert program.post("weights_info", {"tinker_path": f"tinker://{model}/weights/one"}).status == 404
    # A finished session ends the runs. Their checkpoints stay.
    program.post(f"sessions/{program.session}/finish", {"reason": {"type": "success"}})
    other = gateway.program()
    asked = {"session_id": other.session, "model_seq_id": 0, "path": path, "optimizer": False}
    assert other.result_of(other.post("load_weights", asked)).json["path"] == path


def test_a_step_beyond_the_limit_that_voters_set_fails_in_its_future(gateway: Gateway) -> None:
    peer, program = gateway.daemon.client, gateway.program()
    model, before = program.create_model(), {view.name: view.maximum for view in trio.run(peer.limits)}
    assert before == {"parameters": PARAMETERS_ALLOWED, "client_flops": FLOPS_ALLOWED, "client_steps": STEPS_ALLOWED}
    told = trio.run(peer.set_limit, "client_flops", 1_000)
    assert told == "decided: a step of a client run may need at most 1000 floating-point operations"
    program.result_of(program.request_losses(model, 1, BATCHES[0]))
    fault = program.result_of(program.request_step(model, 2)).fault
    assert fault.startswith("step 0 needs 6 · ") and "this network allows 1000: send fewer tokens, or" in fault
    trio.run(peer.set_limit, "client_flops", FLOPS_ALLOWED)
    program.result_of(program.request_losses(model, 3, BATCHES[0]))
    assert program.result_of(program.request_step(model, 4)).json["metrics"]["refused_rounds:max"] == 0
    trio.run(peer.set_limit, "client_steps", 1)
    program.result_of(program.request_losses(model, 5, BATCHES[0]))
    assert "has had 1 steps, and this network allows 1" in program.result_of(program.request_step(model, 6)).fault
    trio.run(peer.set_limit, "client_steps", STEPS_ALLOWED)
    with pytest.raises(UserError, match="unknown limit 'layers': this network has parameters, client_flops, client_steps"):
        trio.run(peer.set_limit, "layers", 1)
    with pytest.raises(UserError, match="client_steps 1000001: voters can allow at most 1000000"):
        trio.run(peer.set_limit, "client_steps", 1_000_001)


def test_an_audit_of_an_export_replays_steps_and_names_runs_that_nobody_can_re_execute(gateway: Gateway, tmp_path: Path) -> None:
    program, data = gateway.program(), str(gateway.daemon.directory)
    model = program.create_model()
    program.result_of(program.request_losses(model, 1, BATCHES[0]))
    assert "metrics" in program.result_of(program.request_step(model, 2)).json
    assert command("export", str(tmp_path / "run"), "--data-dir", data)[0] == 0
    status, out, error = command("audit", str(tmp_path / "run"))
    assert status == 0 and "the export is sound" in out, error
    told = [line for line in out.splitlines() if "update replayed from payloads, but not re-executed: peers delete" in line]
    jobs = {job.job[:16]: job for job in trio.run(gateway.daemon.client.jobs)}
    whose = "the requests of a person's own program after each round, unless one keeps them with `keep_batches_gb`"
    assert told and all(line.endswith(whose) for line in told)
    assert all(jobs[line.split()[1].rstrip(":")].name.endswith("-run") for line in told), "the base has no such line"
    run = told[-1].split()[1].rstrip(":")[:8]
    status, _, error = command("sample", "The ", "--job", run, "--data-dir", data)
    assert status == 2 and f"its objective is 'client'; `peer model DIR --job {run}` writes its model" in error


def test_keys_divide_a_gateway(gateway: Gateway) -> None:
    """The last test of this file, since a peer with keys serves no program without one."""
    open_to_all = gateway.program("tml-whatever")
    before = open_to_all.create_model()
    store = ApiKeyStore(gateway.daemon.directory / "api_keys.sqlite")
    anna, ben = (gateway.program(store.create_key(ApiKey(name, 1, 1, 1 << 20, 100))) for name in ("anna", "ben"))
    for route in ROUTES.routes:
        call, content = path_of(route, False).removeprefix("/tinker/api/v1/"), b"" if route.takes_bytes else complete_body(route)
        for key in ("tml-whatever", "tml-", "x"):
            assert replace(open_to_all, key=key).send(route.method, call, content).status == 401, route.path
    assert open_to_all.retrieve(f"{before}#0").status == 401
    small = request(example(40 // 2))
    model = anna.create_model()
    result = anna.request_losses(model, 1, small)
    assert anna.result_of(result).content_type == PROTOBUF
    for stranger in (model, before):
        ids = {"model_id": stranger}
        assert ben.post("get_info", ids).status == 404
        assert ben.request_losses(stranger, 2, small).status == ben.request_step(stranger, 2).status == 404
        assert ben.retrieve(f"{stranger}#0").status == 404
    assert replace(ben, session=anna.session).request_model(0).status == 404
    assert "the key 'anna' has 1 models, its quota" in anna.result_of(anna.request_model(1)).fault
    sent = [anna.request_losses(model, number, small) for number in range(2, 8)]
    assert "has used up its quota of 100 tokens a minute" in anna.result_of(sent[-1]).fault
    store.revoke_key("anna")
    assert anna.retrieve(result.json["request_id"]).status == 401
    assert ben.post("client/config", {}).json["parallel_fwdbwd_chunks"] is False
