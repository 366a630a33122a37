"""Training loops on the SDK `tinker`. They run in an environment of its own and import nothing of this project.

`python tuning_loop.py PLAN` reads a JSON file: `base_url`, `key`, `base` (the model to tune), `loop` (a name in `LOOPS`), `texts`
(lists of token ids), and the loop's own values. It prints a line of JSON for each event. An exception ends it with a traceback.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import tinker
from tinker import types

RANK, SEED = 8, 11
STOP_POLL_SECONDS = 0.2
RESULT_SECONDS_MAX = 600.0  # of a call whose future is awaited

Plan = dict[str, Any]
Texts = Sequence[Sequence[int]]
PROMPT_TOKENS = 8


def main() -> None:
    plan: Plan = json.loads(Path(sys.argv[1]).read_text())
    service = tinker.ServiceClient(base_url=plan["base_url"], api_key=plan["key"])
    LOOPS[plan["loop"]](service, plan)
    if hasattr(service, "close"):  # since 0.38
        service.close("success").result(RESULT_SECONDS_MAX)


def tell(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def examples(texts: Texts) -> list[types.Datum]:
    """Return examples that predict each token of a text from those before it."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(list(text[:-1])),
            loss_fn_inputs={"target_tokens": list(text[1:]), "weights": [1.0] * (len(text) - 1)},
        )
        for text in texts
    ]


def open_model(service: Any, plan: Plan) -> Any:
    model = service.create_lora_training_client(plan["base"], rank=plan.get("rank", RANK), seed=SEED)
    tell("created", name=model.get_info().model_data.model_name)
    return model


def adam(plan: Plan) -> Any:
    return types.AdamParams(**plan["adam"])


def logprobs(result: Any) -> list[list[float]]:
    return [list(output["logprobs"].data) for output in result.loss_fn_outputs]


def tell_forward(model: Any, plan: Plan, of: str, event: str = "forward") -> float:
    """Tell the log-probabilities of all texts, and return their loss."""
    found = model.forward(examples(plan["texts"]), "cross_entropy").result(RESULT_SECONDS_MAX)
    loss: float = found.metrics["loss:sum"]
    tell(event, of=of, loss=loss, logprobs=logprobs(found))
    return loss


def loss_of(future: Any) -> float:
    loss: float = future.result(RESULT_SECONDS_MAX).metrics["loss:sum"]
    return loss


def take_step(model: Any, plan: Plan, number: int, *batches: Texts) -> None:
    """Add the gradients of some batches up, in one step, and tell the sum of their losses."""
    started = time.monotonic()
    passes = [model.forward_backward(examples(batch), "cross_entropy") for batch in batches]
    step = model.optim_step(adam(plan))
    loss = sum(map(loss_of, passes))
    metrics = step.result(RESULT_SECONDS_MAX).metrics
    tell("step", number=number, loss=loss, began=started, seconds=time.monotonic() - started, metrics=metrics)


def run_every_call(service: Any, plan: Plan) -> None:
    """Use each call of the SDK that the gateway serves."""
    tell("capabilities", models=[model.model_name for model in service.get_server_capabilities().supported_models])
    model, texts, numbers = open_model(service, plan), plan["texts"], count()
    tell_forward(model, plan, "base")
    for _ in range(plan["steps"]):
        take_step(model, plan, next(numbers), texts)
    half = len(texts) // 2
    take_step(model, plan, next(numbers), texts[:half], texts[half:])

    many = plan["many"]
    result = model.forward_backward(examples(many), "cross_entropy")
    step = model.optim_step(adam(plan))
    tell("many", lengths=list(map(len, logprobs(result.result(RESULT_SECONDS_MAX)))))
    step.result(RESULT_SECONDS_MAX)
    tell("step", number=next(numbers))

    if importlib.util.find_spec("torch") is None:
        raise SystemExit("this environment has no torch, which the SDK needs for custom losses: run `make foreign`")
    custom = model.forward_backward_custom(examples(texts), mean_square)
    step = model.optim_step(adam(plan))
    tell("custom", metrics=custom.result(RESULT_SECONDS_MAX).metrics)
    step.result(RESULT_SECONDS_MAX)
    tell("step", number=next(numbers))
    tell_forward(model, plan, "saved")
    use_checkpoints(service, model, plan, numbers)


def use_checkpoints(service: Any, model: Any, plan: Plan, numbers: Iterator[int]) -> None:
    """Save a model, continue from it in five ways, draw samples of it, and delete it."""
    path = wait(model.save_state("half", ttl_seconds=86_400)).path
    for_samples = wait(model.save_weights_for_sampler("half")).path

    def next_loss(model: Any, way: str) -> None:
        take_step(model, plan, next(numbers), plan["texts"])
        tell("continued", way=way, loss=tell_forward(model, plan, way))

    next_loss(model, "unsaved")
    with_moments = wait(service.create_training_client_from_state_with_optimizer(path))
    tell("created", name=with_moments.get_info().model_data.model_name)
    without = wait(service.create_training_client_from_state(path))
    tell("created", name=without.get_info().model_data.model_name)
    next_loss(with_moments, "new client with moments")
    next_loss(without, "new client without moments")
    wait(model.load_state_with_optimizer(path))
    tell("loaded")
    next_loss(model, "same client with moments")
    wait(model.load_state(path))
    tell("loaded")
    next_loss(model, "same client without moments")

    samplers = {
        "base": service.create_sampling_client(base_model=plan["base"]),
        "saved": service.create_sampling_client(model_path=for_samples),
        "same client without moments": model.save_weights_and_get_sampling_client(),
    }
    for name, sampler in samplers.items():
        tell_samples(wait(sampler), plan, name)
    wait(model.save_state("half", overwrite=True))
    use_lists(service, path, for_samples)


def tell_samples(sampler: Any, plan: Plan, of: str) -> None:
    prompt = types.ModelInput.from_ints(plan["texts"][0][:PROMPT_TOKENS])
    greedy = types.SamplingParams(max_tokens=PROMPT_TOKENS, temperature=0.0)
    drawn = sampler.sample(prompt, 2, greedy, include_prompt_logprobs=True).result(RESULT_SECONDS_MAX)
    tell(
        "sampled",
        of=of,
        tokens=[list(each.tokens) for each in drawn.sequences],
        logprobs=[list(each.logprobs) for each in drawn.sequences],
        prompt_logprobs=list(drawn.prompt_logprobs),
        computed=list(sampler.compute_logprobs(prompt).result(RESULT_SECONDS_MAX)),
    )


def use_lists(service: Any, path: str, for_samples: str) -> None:
    """List all that the program has made, and delete a checkpoint."""
    rest = service.create_rest_client()
    described = rest.get_weights_info_by_tinker_path(path).result(RESULT_SECONDS_MAX)
    run = rest.get_training_run_by_tinker_path(path).result(RESULT_SECONDS_MAX).training_run_id
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(RESULT_SECONDS_MAX)
    listed = rest.list_checkpoints(run).result(RESULT_SECONDS_MAX).checkpoints
    rest.delete_checkpoint_from_tinker_path(path).result(RESULT_SECONDS_MAX)
    left = rest.list_user_checkpoints().result(RESULT_SECONDS_MAX).checkpoints
    tell("checkpoints", listed=sorted(each.tinker_path for each in listed), left=[each.tinker_path for each in left])
    runs, sessions = rest.list_training_runs().result(RESULT_SECONDS_MAX), rest.list_sessions().result(RESULT_SECONDS_MAX)
    session = rest.get_session(sessions.sessions[0]).result(RESULT_SECONDS_MAX)
    bases = [rest.get_sampler(each).result(RESULT_SECONDS_MAX).base_model for each in session.sampler_ids]
    tell(
        "listed",
        paths=[path, for_samples],
        runs=sorted(each.training_run_id for each in runs.training_runs),
        runs_of_session=sorted(session.training_run_ids),
        sessions=len(sessions.sessions),
        bases=[described.base_model, *bases],
        rank=described.lora_rank,
    )


def wait(future: Any) -> Any:
    """Return the result of a future. Version 0.25 returns some clients without one."""
    return future.result(RESULT_SECONDS_MAX) if hasattr(future, "result") else future


def mean_square(data: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
    """Return a loss that the gateway does not have: the mean square of the log-probabilities."""
    import torch

    loss = torch.cat(list(logprobs)).square().mean()
    return loss, {"mean_square": float(loss)}


def run_beside_torch(service: Any, plan: Plan) -> None:
    """Tell the log-probabilities before and after some steps, which another loop repeats."""
    model = open_model(service, plan)
    tell_forward(model, plan, "no step", "first")
    for number in range(plan["steps"]):
        take_step(model, plan, number, plan["texts"])
    tell_forward(model, plan, "all steps", "last")


def run_refused(service: Any, plan: Plan) -> None:
    """Take a step for which all trainers lie. After the file `go` exists, take others."""
    model, go = open_model(service, plan), Path(plan["go"])
    tell_forward(model, plan, "before")
    try:
        take_step(model, plan, 0, plan["texts"])
    except tinker.RequestFailedError as error:
        tell_forward(model, plan, "after")
        tell("refused", message=error.message, category=error.category)
    else:
        raise SystemExit("the network has accepted the step of a liar")
    while not go.exists():
        time.sleep(STOP_POLL_SECONDS)
    for number in range(plan["steps"]):
        take_step(model, plan, number, plan["texts"])


def run_pipelined(service: Any, plan: Plan) -> None:
    """Tell the seconds of pairs of calls that are awaited one after the other, and of pairs that are submitted at once."""
    model, pairs = open_model(service, plan), plan["pairs"]
    batch, numbers = examples(plan["texts"]), count()
    take_step(model, plan, next(numbers), plan["texts"])
    started = time.monotonic()
    for _ in range(pairs):
        model.forward_backward(batch, "cross_entropy").result(RESULT_SECONDS_MAX)
        model.optim_step(adam(plan)).result(RESULT_SECONDS_MAX)
        tell("step", number=next(numbers))
    awaited = time.monotonic() - started
    started = time.monotonic()
    futures = [(model.forward_backward(batch, "cross_entropy"), model.optim_step(adam(plan))) for _ in range(pairs)]
    for gradient, step in futures:
        gradient.result(RESULT_SECONDS_MAX)
        step.result(RESULT_SECONDS_MAX)
        tell("step", number=next(numbers))
    tell("pairs", awaited=awaited, at_once=time.monotonic() - started)


def run_until_told(service: Any, plan: Plan) -> None:
    """Take steps until the file `stop` exists. After every second one, continue from a checkpoint, and draw samples."""
    model, stop = open_model(service, plan), Path(plan["stop"])
    for number in count():
        if stop.exists():
            return
        take_step(model, plan, number, plan["texts"])
        if number % 2:
            wait(model.load_state_with_optimizer(wait(model.save_state("last", overwrite=True)).path))
            tell("loaded")
            tell_samples(wait(model.save_weights_and_get_sampling_client()), plan, "last")


def run_idle(service: Any, plan: Plan) -> None:
    """Create models, and let them be until the file `stop` exists."""
    for _ in range(plan["models"]):
        open_model(service, plan)
    while not Path(plan["stop"]).exists():
        time.sleep(STOP_POLL_SECONDS)


LOOPS: dict[str, Callable[[Any, Plan], None]] = {
    "every-call": run_every_call,
    "beside-torch": run_beside_torch,
    "refused": run_refused,
    "pipelined": run_pipelined,
    "until-told": run_until_told,
    "idle": run_idle,
}

if __name__ == "__main__":
    main()
