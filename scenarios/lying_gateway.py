"""A gateway that proposes false updates of its programs' steps. It is honest in all else, also as a voter.

`python -m scenarios.lying_gateway ATTACK run …` runs a complete peer.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from clients.ledger.clients_module import OBJECTIVE
from clients.records import StepDeclaration
from demo.lying_trainer import Liar, decode_update, encode_update
from peer.cli import build_parser
from peer.commands import local_commands
from peer.commands.command_line_parser import settings_from_options
from peer.daemon.daemon import ParticipantContext
from peer.roles.trainer import Trainer
from protocol import codec
from training.replicated.tensor_layout import Float32Array
from training.round_context import OpenRoundContext
from training.worker_protocol import ProposeReply, ProposeRequest

LOSS_LIE: Final = 10_000  # millionths
RATE_LIE: Final = 2.0  # factor
# Attack -> reason for which re-executors refuse the proposal.
ATTACKS: Final = {"flipped-sum": "replay", "other-rate": "replay", "other-loss": "loss", "other-batch": "replay"}


class LyingGateway(Liar):
    check_proposal, reexecute, replay = Trainer.check_proposal, Trainer.reexecute, Trainer.replay
    _earlier: Float32Array | None = None

    def _corrupt(
        self, round: OpenRoundContext, request: ProposeRequest, done: ProposeReply
    ) -> tuple[ProposeRequest, ProposeReply]:
        if round.spec.objective != OBJECTIVE:
            return request, done
        if self.attack == "other-loss":
            said = codec.decode(StepDeclaration, done.declaration)
            return request, replace(done, declaration=codec.encode(replace(said, loss=said.loss + LOSS_LIE)))
        gradient = decode_update(round, Path(request.payload_out), Path(request.buffer_out))
        match self.attack:
            case "flipped-sum":
                gradient = -gradient
            case "other-rate":
                gradient = gradient * gradient.dtype.type(RATE_LIE)
            case "other-batch":  # that of the step before, which had another model
                gradient, self._earlier = gradient[::-1].copy() if self._earlier is None else self._earlier, gradient
        return request, encode_update(round, request, done, gradient)


def main(arguments: list[str]) -> int:
    attack, *rest = arguments
    assert attack in ATTACKS, attack

    def make_liar(context: ParticipantContext) -> LyingGateway:
        assert context.worker is not None, "a gateway is a trainer"
        return LyingGateway(context.worker, context.text_folder, attack=attack)

    options = build_parser().parse_args(rest)
    return local_commands.run_peer_with_config(settings_from_options(options).config, console=False, make_participant=make_liar)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
