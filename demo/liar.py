"""`python -m demo.liar ATTACK ACCOMPLICES run …`: a peer that takes part in everything and lies about its updates.

Only demos and scenarios start it. ACCOMPLICES are peer ids separated by commas, or `-` for none.
"""

from __future__ import annotations

import sys
from functools import partial

from demo.lying_trainer import ATTACKS, Liar
from peer.cli import build_parser
from peer.commands import local_commands
from peer.commands.command_line_parser import settings_from_options
from peer.daemon.daemon import ParticipantContext
from protocol import codec
from protocol.errors import UserError
from protocol.identity import parse_peer_id, sign_message
from protocol.messages import GossipEnvelope, Proposal
from transport.network import Priority


async def equivocate(context: ParticipantContext, first: Proposal, second: Proposal) -> None:
    """Shows one half of the network another proposal than the other half, behind the back of the driver's one way out."""
    for number, peer in enumerate(sorted(context.network.connected_peers())):
        signed = sign_message(context.signer, context.chain_id, (first, second)[number % 2])
        context.network.send(peer, codec.encode(GossipEnvelope(signed)), Priority.VOTE)


def main(arguments: list[str]) -> int:
    attack, accomplices, *rest = arguments
    if attack not in ATTACKS:
        raise UserError(f"{attack!r} is no attack; there are {', '.join(ATTACKS)}")
    options = build_parser().parse_args(rest)
    keys = frozenset(parse_peer_id(text) for text in accomplices.split(",") if text != "-")

    def make_liar(context: ParticipantContext) -> Liar:
        assert context.worker is not None, "a liar trains"
        lies = partial(equivocate, context)
        return Liar(context.worker, context.text_folder, attack=attack, accomplices=keys, equivocate=lies)

    return local_commands.run_peer_with_config(settings_from_options(options).config, console=False, make_participant=make_liar)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"peer: error: {error}")
