"""`python -m scenarios.uplink`: one peer with a narrow uplink has a file that all others want, and must not send a copy to each.

Thirteen voters use a proxy; the first one's uplink is a tenth of the others'. With `peer train --from FOLDER` it starts a job
from its own model, which every voter fetches and checks before the job begins. The last voter must have it in at most half of the
time that a copy for each would take over this uplink.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import trio

from demo.demo_peers import DemoPeer
from peer.settings.data_directory import DataDirectory
from protocol.api import TrainRequest
from protocol.errors import UserError
from scenarios import network
from scenarios.emulation.link_profiles import steady_profile
from scenarios.network import Network
from scenarios.proxy import Proxy, running_proxy
from scenarios.trials import Trial, arguments, duration, report, table_of
from training.formats import checkpoint

PEERS, NARROW = 13, 10
SHARE_MAX = 0.5  # of the time that a copy for each would take over the otherwise idle narrow uplink
DOWN_MBIT, ROUND_TRIP_MS = 100.0, 30.0
LINKED_SECONDS_MAX = 120.0
FETCHED_SECONDS_MAX = 900.0
POLL_SECONDS = 0.05
WIDTH, HIDDEN, VOCABULARY = 256, 1024, 256  # one layer: 1.1 million parameters, 4.5 MB
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 64,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "max_position_embeddings": 32,
    "num_attention_heads": WIDTH // 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": WIDTH // 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": VOCABULARY,
}


def write_model(folder: Path) -> int:
    """Write a model, and return the number of its parameters."""
    folder.mkdir()
    attention = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
    mlp = {"mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH), "mlp.down_proj": (WIDTH, HIDDEN)}
    norms = {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
    layer = {f"model.layers.0.{name}.weight": shape for name, shape in (*attention.items(), *mlp.items(), *norms.items())}
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), **layer, "model.norm.weight": (WIDTH,)}
    drawn = np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as stream:
        checkpoint.write_safetensors(
            stream, ((name, (drawn.normal(size=shape) * 0.1).astype("<f4")) for name, shape in shapes.items())
        )
    return sum(map(prod, shapes.values()))


async def case(options: argparse.Namespace, model: Path, size: int) -> Trial:
    trial = Trial("three at a time, and passed on")
    async with running_proxy() as through:
        dressed = partial(dress, through, options.uplink)
        async with network.running(options.peers, seed=options.seed, folder=options.keep, dress=dressed) as peers:
            if not await network.holds(partial(are_linked, peers), LINKED_SECONDS_MAX):
                raise UserError(f"not all are linked after {LINKED_SECONDS_MAX:.0f} s")
            await fetch(peers, model, size, trial)
            trial.figures["sent by it, MB"] = (await peers.peers[0].client.stats()).bytes_sent["blobs"] / 1e6
    if not trial.problems:
        direct = (options.peers - 1) * size * 8 / (options.uplink / NARROW * 1e6)
        trial.figures |= {"a copy for each": direct, "share": (share := trial.figures["last"] / direct)}
        trial.require(share <= SHARE_MAX, f"the last receiver has it after {share:.0%} of the time of a copy for each")
    return trial


def dress(through: Proxy, uplink: float, peer: DemoPeer) -> None:
    """Give a peer its uplink. The first peer starts the job."""
    peer.trains = peer.number == 0
    through.dress(peer, steady_profile("", uplink if peer.number else uplink / NARROW, DOWN_MBIT, ROUND_TRIP_MS))


async def are_linked(peers: Network) -> bool:
    return all([(await peer.client.status()).links == len(peers.peers) - 1 for peer in peers.peers])


async def fetch(peers: Network, model: Path, size: int, trial: Trial) -> None:
    """Start the job, and wait until every voter has its first model."""
    first, *others = peers.peers
    await first.client.start_job(
        TrainRequest("own", "", 1, 0, {"byzantine_max": "0", "audit": "off"}, initial_model=str(model), model_folder=str(model))
    )
    begun = time.time()
    took = dict[str, float]()
    with trio.move_on_after(FETCHED_SECONDS_MAX):
        while len(took) < len(others):
            for peer in others:
                if peer.name not in took and has_file(DataDirectory(peer.directory).blobs, size):
                    took[peer.name] = time.time() - begun
            await trio.sleep(POLL_SECONDS)
    trial.require(len(took) == len(others), f"{len(others) - len(took)} do not have it after {FETCHED_SECONDS_MAX:.0f} s")
    if took:
        times = sorted(took.values())
        trial.figures |= {"first": times[0], "median": times[len(times) // 2], "last": times[-1]}


def has_file(folder: Path, size: int) -> bool:
    """Return whether the folder has a complete file of this size. Incomplete files have other names."""
    return any(entry.stat().st_size == size for entry in os.scandir(folder) if entry.is_file() and "." not in entry.name)


async def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="folkmoot-uplink-") as folder:
        model = Path(folder, "model")
        size = 4 * write_model(model)
        trial = await case(options, model, size)
    failures = [f"{trial.what}: {problem}" for problem in trial.problems]
    title = f"{size / 1e6:.1f} MB to {options.peers - 1} peers, {options.uplink:g} Mbit/s, of one with a tenth of that; seconds"
    return report(options, title, *table_of([trial]), failures, {"trials": [asdict(trial)], "bytes": size})


def main() -> int:
    parser = arguments("uplink", __doc__, peers=PEERS)
    parser.add_argument(
        "--uplink",
        type=duration,
        default=40.0,
        metavar="MBIT",
        help="uplink in Mbit/s of all peers except one, which has a tenth",
    )
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
