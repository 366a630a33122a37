"""The losses of RLHF compared with those of TRL 1.12.0: `python -m benchmarks.rlhf_oracle --json FILE`.

TRL's own trainers run on small random models, in an environment of its own (`benchmarks.rivals.trl_oracle`). Then
`rlhf.pytorch.losses` recomputes the values of their variables, without ramps. `--write` stores the tensors of the first seed for
the tests, and `--stored` only compares with those.

TRL puts the score on the token after a stop token and gives that token a value. Our code puts the score on the stop token. Our
functions therefore get TRL's mask here, with that extra token, for rewards, advantages and values.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from torch import Tensor

from benchmarks.dispatch import REPOSITORY
from benchmarks.provenance import write
from benchmarks.rivals import environment
from benchmarks.rivals.environment import Unavailable
from benchmarks.verdicts import conclude, verdict
from rlhf.objectives.ppo import CLIP_RANGE
from rlhf.pytorch import losses
from scenarios.trials import Parser
from training.engines.pytorch.log_probabilities import log_probabilities

GOLDEN = REPOSITORY / "tests" / "rlhf" / "trl.safetensors"
BETA, VALUE_WEIGHT, DPO_BETA = 0.1, 0.1, 0.3  # as in `benchmarks.rivals.trl_oracle`
ROLLOUTS_MAX, LOSSES_MAX = 1e-6, 1e-5
TRL_SECONDS_MAX = 600.0  # a minute on an idle core


@dataclass
class Row:
    seed: int
    what: str
    largest: float  # largest difference, in units of the largest element for gradients and for values above 1
    most: float


class Compared:
    def __init__(self, seed: int, tensors: Mapping[str, Tensor]) -> None:
        self.seed, self.tensors = seed, tensors
        self.rows: list[Row] = []

    def of(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    def row(self, what: str, found: Tensor, wanted: Tensor, most: float) -> None:
        assert found.shape == wanted.shape, what
        largest = wanted.abs().max()
        difference = (found - wanted).abs().max() / (largest if "gradient" in what else largest.clamp(min=1))
        self.rows.append(Row(self.seed, what, float(difference.nan_to_num(math.inf)), most))


def compare(seed: int, tensors: Mapping[str, Tensor]) -> list[Row]:
    compared = Compared(seed, tensors)
    _rollouts(compared)
    for batch in range(_batches(tensors)):
        _batch(compared, batch)
    _reward_model(compared)
    _dpo(compared)
    return compared.rows


def _rollouts(compared: Compared) -> None:
    theirs = compared.of("ppo.rollouts.")
    response, with_end = ~theirs["padding_mask"], ~theirs["padding_mask_p1"]
    rewards = losses.token_rewards(
        theirs["logprobs"], theirs["ref_logprobs"], theirs["scores"], with_end, beta=BETA, score_clip=math.inf
    )
    advantages, returns = losses.gae_advantages(theirs["rewards"], theirs["values"], with_end)
    compared.row("rewards", rewards, theirs["rewards"], ROLLOUTS_MAX)
    compared.row("GAE", advantages, theirs["advantages"], ROLLOUTS_MAX)
    compared.row("returns", returns, theirs["returns"], ROLLOUTS_MAX)
    whitened = theirs["whitened"].masked_fill(~response, 0)
    compared.row("whitening", losses.whiten_advantages(theirs["advantages"], response), whitened, ROLLOUTS_MAX)


def _batch(compared: Compared, batch: int) -> None:
    theirs = compared.of(f"ppo.batch{batch}.")
    response, with_end = ~theirs["padding_mask"], ~theirs["padding_mask_p1"]
    logits, value = (theirs[name].clone().requires_grad_() for name in ("logits", "vpred"))
    logp = log_probabilities(logits, theirs["mb_responses"])
    of_policy = losses.policy_losses(logp, theirs["mb_logprobs"], theirs["mb_advantage"], response)
    of_value = losses.value_losses(value, theirs["mb_values"], theirs["mb_return"], with_end)
    policy_loss, value_loss = losses.token_mean(of_policy, response), losses.token_mean(of_value, with_end)
    loss = policy_loss + VALUE_WEIGHT * value_loss
    gradients = torch.autograd.grad(loss, (logits, value))
    where = f"batch {batch}: "
    compared.row(where + "policy loss", policy_loss.detach(), theirs["pg_loss"], LOSSES_MAX)
    compared.row(where + "value loss", value_loss.detach(), theirs["vf_loss"], LOSSES_MAX)
    compared.row(where + "loss", loss.detach(), theirs["loss"], LOSSES_MAX)
    compared.row(where + "gradient of the logits", gradients[0], theirs["gradient.logits"], LOSSES_MAX)
    compared.row(where + "gradient of the values", gradients[1], theirs["gradient.vpred"], LOSSES_MAX)


def _reward_model(compared: Compared) -> None:
    theirs = compared.of("reward.")
    scores = theirs["scores"].clone().requires_grad_()
    p = _probabilities(theirs["losses"])
    ours = losses.reward_model_losses(scores[0], scores[1], p)
    (gradient,) = torch.autograd.grad(ours.sum(), scores)
    compared.row("reward model: loss", ours.detach(), _mixed(theirs["losses"], p), LOSSES_MAX)
    compared.row("reward model: gradient", gradient, _mixed(theirs["gradients"], p).transpose(0, 1), LOSSES_MAX)


def _dpo(compared: Compared) -> None:
    theirs = compared.of("dpo.")
    logits = theirs["logits"].clone().requires_grad_()
    p, mask, tokens = _probabilities(theirs["losses"]), theirs["mask"][:, :, 1:], theirs["tokens"][:, :, 1:]
    first, second, reference_first, reference_second = (
        log_probabilities(of[side, :, :-1], tokens[side]).masked_fill(~mask[side], 0).sum(1)
        for of in (logits, theirs["reference"])
        for side in range(2)
    )
    ours = losses.dpo_losses(first, second, reference_first, reference_second, p, beta=DPO_BETA)
    (gradient,) = torch.autograd.grad(ours.sum(), logits)
    compared.row("DPO: loss", ours.detach(), _mixed(theirs["losses"], p), LOSSES_MAX)
    compared.row("DPO: gradient of the logits", gradient, _mixed(theirs["gradients"], p).transpose(0, 1), LOSSES_MAX)


def _probabilities(theirs: Tensor) -> Tensor:
    """Return soft labels. TRL only has labels 0 and 1; a p between them is a mean of both, and so are its gradients."""
    return torch.linspace(0, 1, len(theirs))


def _mixed(both_ways: Tensor, p: Tensor) -> Tensor:
    weights = p.view(-1, *[1] * (both_ways.dim() - 2))
    return weights * both_ways[:, 0] + (1 - weights) * both_ways[:, 1]


def _batches(tensors: Mapping[str, Tensor]) -> int:
    return sum(name.startswith("ppo.batch") and name.endswith(".loss") for name in tensors)


def cases(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the tokens or responses of each kind, because a comparison without one of them would be weak."""
    rollouts = {name.removeprefix("ppo.rollouts."): tensor for name, tensor in tensors.items() if "ppo.rollouts." in name}
    found = {
        "responses that stop": int(rollouts["padding_mask"].any(1).sum()),
        "responses that do not": int((~rollouts["padding_mask"].any(1)).sum()),
    }
    found |= dict.fromkeys(("above the edge, advantage > 0", "above the edge, advantage < 0"), 0)
    found |= dict.fromkeys(("below the edge, advantage > 0", "below the edge, advantage < 0", "values beyond an edge"), 0)
    for batch in range(_batches(tensors)):
        theirs = {name.removeprefix(f"ppo.batch{batch}."): tensor for name, tensor in tensors.items()}
        ratio = torch.exp(log_probabilities(theirs["logits"], theirs["mb_responses"]) - theirs["mb_logprobs"])
        advantage = theirs["mb_advantage"].masked_fill(theirs["padding_mask"], 0)
        for side, beyond in (("above", ratio > 1 + CLIP_RANGE), ("below", ratio < 1 - CLIP_RANGE)):
            found[f"{side} the edge, advantage > 0"] += int((beyond & (advantage > 0)).sum())
            found[f"{side} the edge, advantage < 0"] += int((beyond & (advantage < 0)).sum())
        moved = (theirs["vpred"] - theirs["mb_values"]).abs() > CLIP_RANGE
        found["values beyond an edge"] += int((moved & ~theirs["padding_mask_p1"]).sum())
    return found


def theirs(seed: int, file: Path) -> None:
    """Write TRL's results to a file. Raises `Unavailable` if TRL cannot run."""
    command = [str(environment.interpreter("trl", environment.TRL)), "-m", "benchmarks.rivals.trl_oracle", str(file), str(seed)]
    surroundings = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=TRL_SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"TRL was not done after {TRL_SECONDS_MAX:.0f} s") from None
    if done.returncode:
        raise Unavailable((done.stderr.strip().splitlines() or [f"TRL ended with status {done.returncode}"])[-1])


def read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, and the versions of the programs that made them."""
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118 - no dictionary


def verdicts(rows: list[Row], found: Mapping[str, int]) -> Iterator[str]:
    for most, name in ((ROLLOUTS_MAX, "rewards, GAE, whitening"), (LOSSES_MAX, "losses and gradients")):
        worst = max((row for row in rows if row.most == most), key=lambda row: row.largest)
        yield verdict(worst.largest <= most, f"{name}: ≤ {most:g}: {worst.largest:.1e} ({worst.what}, seed {worst.seed})")
    for what, count in found.items():
        yield verdict(count > 0, f"{what}: some: {count}")


def show(rows: list[Row]) -> None:
    table = Table(title="largest difference from TRL, of all seeds")
    for heading in ("", "difference", "at most"):
        table.add_column(heading, justify="left" if not heading else "right")
    for what, most in dict.fromkeys((row.what, row.most) for row in rows):
        table.add_row(what, f"{max(row.largest for row in rows if row.what == what):.1e}", f"{most:g}")
    Console(width=100).print(table)


def main() -> int:
    parser = Parser("rlhf_oracle", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="seeds of models, prompts and samples"
    )
    parser.add_argument("--stored", action="store_true", help="compare with the results of --write, without an installation")
    parser.add_argument("--write", action="store_true", help="store the tensors of the first seed for the tests")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, rows, found, versions = time.time(), list[Row](), dict[str, int](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="folkmoot-trl-") as folder:
        for seed in options.seeds[:1] if options.stored else options.seeds:
            file = GOLDEN if options.stored else Path(folder) / f"{seed}.safetensors"
            if not options.stored:
                try:
                    theirs(seed, file)
                except Unavailable as error:
                    print(f"cannot run TRL on this machine: {error}", file=sys.stderr)
                    return 1
            tensors, versions = read(file)
            rows += compare(seed, tensors)
            found = {what: count + found.get(what, 0) for what, count in cases(tensors).items()}
            if options.write and seed == options.seeds[0] and not options.stored:
                GOLDEN.write_bytes(file.read_bytes())
            figures = {"seeds": list(options.seeds), "theirs": versions, "cases": found, "rows": [asdict(row) for row in rows]}
            write(options.json, started, figures)
    show(rows)
    return conclude(verdicts(rows, found))


if __name__ == "__main__":
    sys.exit(main())
