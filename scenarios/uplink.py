"""`python -m scenarios.uplink`: one peer with a narrow uplink has a file that all others want: does it carry one copy for each?

Thirteen voters over a proxy; the first one's uplink is a tenth of the others'. It starts a job from a model of its own
(`peer train --from FOLDER`), which every voter fetches and checks before the job may begin. Two networks do so: one speaks wire
version 2 only, and there every receiver is served at once; the other one speaks the version of today.
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
from protocol.identity import WIRE_VERSIONS
from scenarios import network, proxy
from scenarios.network import Network
from scenarios.proxy import Proxy, running_proxy
from scenarios.trials import Trial, arguments, duration, report, table_of
from training.formats import safetensors_writer
from transport.emulation.link_profiles import steady_profile
from transport.swarm import Swarm

VERSION = "FOLKMOOT_WIRE_VERSION"  # the highest that a peer of this scenario speaks
DIRECT = 2  # before receivers were told of one another
PEERS, NARROW = 13, 10
SHARE_MAX = 0.5  # of the time of direct-only
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
    """Its parameters."""
    folder.mkdir()
    attention = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
    mlp = {"mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH), "mlp.down_proj": (WIDTH, HIDDEN)}
    norms = {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
    layer = {f"model.layers.0.{name}.weight": shape for name, shape in (*attention.items(), *mlp.items(), *norms.items())}
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), **layer, "model.norm.weight": (WIDTH,)}
    drawn = np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as stream:
        safetensors_writer.write_safetensors(
            stream, ((name, (drawn.normal(size=shape) * 0.1).astype("<f4")) for name, shape in shapes.items())
        )
    return sum(map(prod, shapes.values()))


async def case(options: argparse.Namespace, version: int, model: Path, size: int) -> Trial:
    trial = Trial("every receiver at once" if version == DIRECT else "three at a time, and passed on")
    folder = options.keep / str(version) if options.keep else None
    async with running_proxy() as through:
        dressed = partial(dress, through, options.uplink, version)
        async with network.running(options.peers, seed=options.seed, folder=folder, dress=dressed) as peers:
            if not await network.holds(partial(are_linked, peers), LINKED_SECONDS_MAX):
                raise UserError(f"not all are linked after {LINKED_SECONDS_MAX:.0f} s")
            await fetch(peers, model, size, trial)
            trial.figures["sent by it, MB"] = (await peers.peers[0].client.stats()).bytes_sent["blobs"] / 1e6
    return trial


def dress(through: Proxy, uplink: float, version: int, peer: DemoPeer) -> None:
    """The first one is who starts the job."""
    peer.trains = peer.number == 0
    through.dress(peer, steady_profile("", uplink if peer.number else uplink / NARROW, DOWN_MBIT, ROUND_TRIP_MS))
    peer.module = ("scenarios.uplink", *peer.module)
    peer.environment[VERSION] = str(version)


async def are_linked(peers: Network) -> bool:
    return all([(await peer.client.status()).links == len(peers.peers) - 1 for peer in peers.peers])


async def fetch(peers: Network, model: Path, size: int, trial: Trial) -> None:
    """Until every voter has the model that the job starts from."""
    first, *others = peers.peers
    await first.client.start_job(
        TrainRequest("own", "", 1, 0, {"byzantine_max": "0", "audit": "off"}, base=str(model), folder=str(model))
    )
    begun = time.time()
    took = dict[str, float]()
    with trio.move_on_after(FETCHED_SECONDS_MAX):
        while len(took) < len(others):
            for peer in others:
                if peer.name not in took and has_file(DataDirectory(peer.directory).blobs, size):
                    took[peer.name] = time.time() - begun
            await trio.sleep(POLL_SECONDS)
    trial.require(len(took) == len(others), f"{len(others) - len(took)} have not got it after {FETCHED_SECONDS_MAX:.0f} s")
    if took:
        times = sorted(took.values())
        trial.figures |= {"first": times[0], "median": times[len(times) // 2], "last": times[-1]}


def has_file(folder: Path, size: int) -> bool:
    """One of so many bytes, whole under its digest."""
    return any(entry.stat().st_size == size for entry in os.scandir(folder) if entry.is_file() and "." not in entry.name)


async def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="folkmoot-uplink-") as folder:
        model = Path(folder, "model")
        size = 4 * write_model(model)
        trials = []
        for version in (DIRECT, WIRE_VERSIONS[-1]):
            trials.append(await case(options, version, model, size))
            print(f"{trials[-1].what}: {trials[-1].problems or trials[-1].figures}", file=sys.stderr, flush=True)
    direct, turns = trials
    if not any(trial.problems for trial in trials):
        turns.figures["share"] = share = turns.figures["last"] / direct.figures["last"]
        turns.require(share <= SHARE_MAX, f"the last receiver has it after {share:.0%} of the time")
    failures = [f"{trial.what}: {problem}" for trial in trials for problem in trial.problems]
    title = f"{size / 1e6:.1f} MB to {options.peers - 1} peers, {options.uplink:g} Mbit/s, of one with a tenth of that; seconds"
    return report(options, title, *table_of(trials), failures, {"trials": [asdict(trial) for trial in trials], "bytes": size})


def speak(version: int) -> None:
    """From now on every swarm of this process speaks no later version."""
    defaults = Swarm.__init__.__kwdefaults__
    assert defaults is not None
    defaults["versions"] = tuple(known for known in WIRE_VERSIONS if known <= version)


def main() -> int:
    if sys.argv[1:2] == [proxy.__name__]:  # a peer of the scenario
        del sys.argv[1]
        speak(int(os.environ[VERSION]))
        return proxy.main()
    parser = arguments("uplink", __doc__, peers=PEERS)
    parser.add_argument("--uplink", type=duration, default=40.0, metavar="MBIT", help="of all but one peer, whose is a tenth")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
