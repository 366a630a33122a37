"""A gateway that proposes false updates of its programs' steps. It is honest in all else, also as a voter.

`python -m scenarios.lying_gateway ATTACK run …` runs a complete peer.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import trio

from clients.ledger.clients_module import OBJECTIVE
from clients.records import BODY_BYTES_MAX, ListedBody, Manifest, RequestBody, StepBrief, StepDeclaration
from demo.lying_trainer import Liar, decode_update, encode_update
from peer.cli import build_parser
from peer.commands import local_commands
from peer.commands.command_line_parser import settings_from_options
from peer.daemon.daemon import ParticipantContext
from peer.roles.trainer import Trainer
from protocol import codec
from training.round_context import OpenRoundContext, RoundContext
from training.worker_protocol import BriefFiles, ProposeReply, ProposeRequest, WorkerRequest

LOSS_LIE: Final = 10_000  # millionths
RATE_LIE: Final = 2.0  # factor
# Attack -> reason for which re-executors refuse the proposal.
ATTACKS: Final = {"flipped-sum": "replay", "other-rate": "replay", "other-loss": "loss", "other-batch": "replay"}


class LyingGateway(Liar):
    check_proposal, reexecute, replay = Trainer.check_proposal, Trainer.reexecute, Trainer.replay

    async def ask_worker(self, round: RoundContext, request: WorkerRequest[Any]) -> Any:
        done = await super().ask_worker(round, request)
        if not isinstance(request, ProposeRequest) or self.attack != "other-batch" or round.spec.objective != OBJECTIVE:
            return done
        # The declaration is that of the true batch, so re-execution of the update alone finds the lie.
        brief = await trio.to_thread.run_sync(make_other_batch, request.brief, self.text_folder)
        other = await super().ask_worker(round, replace(request, brief=brief))
        return replace(other, declaration=done.declaration)

    def _corrupt(
        self, round: OpenRoundContext, request: ProposeRequest, done: ProposeReply
    ) -> tuple[ProposeRequest, ProposeReply]:
        if round.spec.objective != OBJECTIVE or self.attack == "other-batch":
            return request, done
        if self.attack == "other-loss":
            said = codec.decode(StepDeclaration, done.declaration)
            return request, replace(done, declaration=codec.encode(replace(said, loss=said.loss + LOSS_LIE)))
        gradient = decode_update(round, Path(request.payload_out), Path(request.buffer_out))
        # A proposal has no rate: all peers apply that of the ledger. A larger gradient is all that its trainer can propose.
        lie = {"flipped-sum": -1.0, "other-rate": RATE_LIE}[self.attack]
        return request, encode_update(round, request, done, gradient * gradient.dtype.type(lie))


def make_other_batch(brief: BriefFiles, folder: Path) -> BriefFiles:
    """Return a brief with as many tokens, in whose first request each token is to predict itself."""
    step = codec.decode(StepBrief, brief.encoded)
    first, *rest = codec.decode(Manifest, Path(brief.files[step.manifest]).read_bytes()).bodies
    body = codec.decode(RequestBody, Path(brief.files[first.digest]).read_bytes(), BODY_BYTES_MAX)
    examples = tuple(replace(example, targets=example.tokens) for example in body.examples)
    data = codec.encode(replace(body, examples=examples))
    digest, file = _stored(data, folder)
    manifest, place = _stored(codec.encode(Manifest((ListedBody(digest, len(data)), *rest))), folder)
    return BriefFiles(codec.encode(replace(step, manifest=manifest)), {**brief.files, digest: file, manifest: place})


def _stored(data: bytes, folder: Path) -> tuple[bytes, str]:
    digest = hashlib.sha256(data).digest()
    path = folder / f"other-{digest.hex()}"
    path.write_bytes(data)
    return digest, str(path)


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
