"""`python -m demo.liar ATTACK ACCOMPLICES run …`: a peer that takes part in everything and lies about its updates.

Only demos and scenarios start it. ACCOMPLICES are peer ids separated by commas, or `-` for none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from demo.lying_trainer import ATTACKS, Liar
from peer.cli import build_parser
from peer.commands import local_commands
from peer.commands.command_line_parser import settings_from_options
from peer.runtime.driver import Driver
from peer.settings.config import Config
from peer.worker.supervisor import WorkerSupervisor
from protocol import codec
from protocol.errors import UserError
from protocol.identity import parse_peer_id, sign_message
from protocol.messages import GossipEnvelope, Proposal
from transport.network import Priority


class Equivocator:
    """Shows one half of the network another proposal than the other half, behind the back of the driver's one way out."""

    def __init__(self, driver: Callable[[], Driver]) -> None:
        self._driver = driver

    async def __call__(self, first: Proposal, second: Proposal) -> None:
        driver = self._driver()
        for number, peer in enumerate(sorted(driver.network.connected_peers())):
            signed = sign_message(driver.signer, driver.chain_id, (first, second)[number % 2])
            driver.network.send(peer, codec.encode(GossipEnvelope(signed)), Priority.VOTE)


def main(arguments: list[str]) -> int:
    attack, accomplices, *rest = arguments
    if attack not in ATTACKS:
        raise UserError(f"{attack!r} is no attack; there are {', '.join(ATTACKS)}")
    options = build_parser().parse_args(rest)
    keys = frozenset(parse_peer_id(text) for text in accomplices.split(",") if text != "-")

    def make_round_work(config: Config, worker: WorkerSupervisor | None, texts: Path, driver: Callable[[], Driver]) -> Liar:
        assert worker is not None, "a liar trains"
        return Liar(worker, texts, attack=attack, accomplices=keys, equivocate=Equivocator(driver))

    return local_commands.run_peer_with_config(
        settings_from_options(options).config, console=False, make_round_work=make_round_work
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"peer: error: {error}")
