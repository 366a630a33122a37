"""`hivemind.Optimizer` (github.com/learning-at-home/hivemind, MIT) with small updates: one global batch per epoch, or H of them.

It is built for large batches over slow links. Here each epoch is one optimizer step, so matchmaking takes most of the time. With
local steps every peer steps by its own gradients, and after H of them the parameters are averaged. The learning rate follows the
batches. The package would follow the epochs, of which there are fewer, so the rate would not have decayed at the end. It runs in
an environment of its own, see `environment.HIVEMIND`.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

import hivemind
import torch
from hivemind.compression import Float16Compression

from benchmarks.rivals.hivemind_swarm import REQUEST_SHARE, START_SECONDS_MAX, join
from benchmarks.rivals.sockets import Traffic
from benchmarks.rivals.work import DELAYED, FRUGAL, LOCAL, PLAIN, Replica, Work, meet
from training.replicated.tensor_layout import layout_of

STOP_SECONDS_MAX = 60.0
AVERAGING_SECONDS_MAX = 60.0  # the package's own default
# Settings that its guides advise when bytes count, with updates of progress that suit steps of a second.
QUICK: dict[str, Any] = {
    "state_averaging_compression": Float16Compression(),
    "tracker_opts": {"min_refresh_period": 0.1, "default_refresh_period": 0.3, "max_refresh_period": 1.0},
}
SYNCHRONOUS: dict[str, Any] = {**QUICK, "grad_compression": Float16Compression(), "average_state_every": 10}
OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    FRUGAL: SYNCHRONOUS,
    DELAYED: {**SYNCHRONOUS, "offload_optimizer": True, "delay_optimizer_step": True, "delay_grad_averaging": True},
    LOCAL: {**QUICK, "use_local_updates": True, "average_state_every": 1},
}


class ClippedAdamW(torch.optim.AdamW):
    """AdamW with clipped averaged gradients, like the others."""

    clip = 1.0

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.clip)
        return super().step(closure)


def main() -> None:
    work, rank = Work.load(sys.argv[1]), int(sys.argv[2])
    replica = Replica(work, rank)
    dht = join(work, rank)
    done = Done()
    optimizer = _optimizer(work, replica, dht, done)
    traffic = Traffic(os.getpid())
    assert meet(work, rank, "ready", START_SECONDS_MAX), "a process did not start"
    begun = time.perf_counter()
    while done.batches < replica.spec.rounds and time.perf_counter() - begun < work.seconds_max:
        if done.batches <= work.warm:  # the last time counts
            started, before, epoch, first = time.perf_counter(), traffic.sent(), optimizer.local_epoch, done.batches
        replica.engine.accumulate_gradient(replica.share(done.batches, rank))
        optimizer.step(batch_size=replica.spec.batch)
        done.batches += 1
    seconds, sent = time.perf_counter() - started, traffic.sent() - before
    replica.report((done.batches - first) * replica.spec.batch, optimizer.local_epoch - epoch, seconds, sent)
    traffic.close()
    meet(work, rank, "done", STOP_SECONDS_MAX)  # a process that leaves early makes the others wait for it
    os._exit(0)  # its own shutdown waits for threads that wait for peers that are gone


class Done:
    batches = 0


def _optimizer(work: Work, replica: Replica, dht: Any, done: Done) -> Any:
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for tensor in layout_of(replica.spec).tensors:
        leaf = torch.nn.Parameter(replica.parameters.detach()[tensor.elements].view(tensor.shape))
        leaf.grad = replica.gradients[tensor.elements].view(tensor.shape)
        groups[tensor.decayed].append(leaf)
    spec = replica.spec
    ClippedAdamW.clip = spec.gradient_clip
    patience = {"request_timeout": REQUEST_SHARE * work.matchmaking_seconds}
    averager = partial(hivemind.optim.grad_averager.GradientAverager, **patience)  # does not get `averager_opts`
    return hivemind.Optimizer(
        dht=dht,
        run_id="folkmoot-benchmark",
        target_batch_size=work.local_steps * work.peers * spec.batch,
        batch_size_per_step=spec.batch,
        params=[{"params": leaves, "weight_decay": spec.weight_decay if decayed else 0.0} for decayed, leaves in groups.items()],
        optimizer=lambda groups: ClippedAdamW(groups, lr=spec.inner_rate, betas=(spec.beta1, spec.beta2)),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: replica.rate(min(done.batches, spec.rounds - 1)) / spec.inner_rate
        ),
        matchmaking_time=work.matchmaking_seconds,
        averaging_timeout=AVERAGING_SECONDS_MAX,
        averager_opts=patience,
        grad_averager_factory=None if work.setup == LOCAL else averager,
        **OPTIONS[work.setup],
    )


if __name__ == "__main__":
    main()
