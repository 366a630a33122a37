from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consensus.ballots import RoundTerms
from ledger.blobs import Blobs
from peer.roles.base import OpenRound
from peer.roles.trainer import Trainer
from peer.roles.voter import Voter
from protocol.errors import UserError
from protocol.identity import Identity, Signed, sign
from protocol.messages import Proposal
from protocol.reasons import Verdict
from tests.peer.network import SCRATCH
from training.host import ModelHost
from training.replicated.codec import payload_bytes_max
from training.spec import Audit, JobSpec

JOB, ME = bytes(32), Identity(bytes([1]) * 32)


class World:
    """One open scratch round; `fetch` finds what is in the blobs and notes what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.published: list[Proposal] = []
        self.fetched: list[bytes] = []
        host = ModelHost(folder / "models")
        root = host.create(JOB, SCRATCH.encode())
        keys = frozenset({ME.public})
        self.round = OpenRound(
            me=ME.public,
            terms=RoundTerms(JOB, 0, root, keys, keys, keys, keys, True),
            spec=SCRATCH,
            model=host.model(JOB, 0),
            model_directory=host.directory(JOB, 0),
            blobs=Blobs(folder / "blobs", folder / "buffers"),
            fetch=self._fetch,
            publish=self._publish,
            measured=_measured,
            delivered=_delivered,
        )

    async def _fetch(self, digest: bytes, size_max: int, sources: Iterable[bytes]) -> None:
        self.fetched.append(digest)
        assert (self.round.blobs.size(digest) or 0) <= size_max

    async def _publish(self, proposal: Proposal) -> None:
        assert self.round.blobs.size(proposal.payload) == proposal.payload_bytes, "durable before it is sent"
        assert self.round.blobs.size(proposal.buffer) is not None
        self.published.append(proposal)

    async def proposed(self) -> Proposal:
        await Voter().propose(self.round)
        return self.published[-1]

    async def verdict(self, proposal: Proposal) -> Verdict:
        return (await Voter().judge(self.round, signed(proposal), proposal)).verdict


async def _measured(name: str, value: float) -> None:
    pass


async def _delivered(trainer: bytes) -> None:
    pass


def signed(proposal: Proposal) -> Signed:
    return sign(ME, bytes(32), proposal)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_voter_proposes_the_known_update_of_a_scratch_round_and_accepts_it(world: World) -> None:
    assert await world.verdict(await world.proposed()) is Verdict.ACCEPT


async def test_a_payload_that_is_too_large_is_not_even_fetched(world: World) -> None:
    large = replace(await world.proposed(), payload_bytes=payload_bytes_max(world.round.model.layout) + 1)
    assert await world.verdict(large) is Verdict.MALFORMED
    assert world.fetched == []


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"model_root": bytes(32)}, Verdict.STALE),
        ({"feedback": bytes(32)}, Verdict.COMMITMENT),
        ({"payload": "garbage"}, Verdict.MALFORMED),
        ({"buffer": "other"}, Verdict.REPLAY),
    ],
)
async def test_each_lie_about_a_scratch_update_has_its_reason(world: World, change: dict[str, Any], verdict: Verdict) -> None:
    honest = await world.proposed()
    if change.get("payload"):
        garbage = bytes(honest.payload_bytes)
        change = {"payload": world.round.blobs.add(garbage)}
    if change.get("buffer"):
        known = np.frombuffer(world.round.blobs.read(honest.buffer), dtype="<f4")
        change = {"buffer": world.round.blobs.add((-known).tobytes())}
    assert await world.verdict(replace(honest, **change)) is verdict


async def test_a_trainer_without_local_text_says_how_to_name_it(world: World, tmp_path: Path) -> None:
    class Asleep:
        async def ask(self, request: object) -> object:
            raise AssertionError("there is nothing to open")

    role = Trainer(Asleep(), tmp_path)  # type: ignore[arg-type]
    local = replace(world.round, spec=JobSpec(name="own", audit=Audit.OFF))
    with pytest.raises(UserError, match="--local-data PATH"):
        await role.propose(local)
