"""An export holds the parameters that its jobs start from: whoever replays it makes the first models of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ledger.jobs import AttestStartModel
from peer.export.export_replay import audit_export
from peer.export.run_export import export_run, initial_model_digests, payload_path
from protocol.errors import UserError
from tests.peer.chain import LANGUAGE, Chain
from training.replicated.tensor_layout import layout_of


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    made = Chain(tmp_path / "chain")
    yield made
    made.close()


def started(chain: Chain, seed: int) -> tuple[bytes, bytes]:
    """A job that waits, and what it starts from."""
    values = np.random.default_rng(seed).normal(size=layout_of(LANGUAGE).size).astype("<f4")
    start = chain.blobs.add_bytes(values.tobytes())
    return chain.start(replace(LANGUAGE, name=f"own {seed}", initial_model=start)), start


def exported(chain: Chain, folder: Path) -> Path:
    export_run(chain.store, chain.blobs, chain.host, chain.genesis, folder)
    return folder


def test_the_first_root_is_computed_again_from_the_blob_and_another_byte_is_named(chain: Chain, tmp_path: Path) -> None:
    key, start = started(chain, 1)
    never, absent = started(chain, 2)
    chain.blobs.delete_blob(absent)
    for person in chain.people[:3]:
        chain.say(person, "job/attest-start-model", AttestStartModel(key))
    chain.play(key)
    chain.play(key)
    chain.settle()
    folder = exported(chain, tmp_path / "run")
    verdict = audit_export(folder)
    assert verdict.models.keys() == {key.hex()} and never in {waiting.job for waiting in chain.ledger.state.jobs.queue}
    file = folder / payload_path(start)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=f"{start.hex()}: its bytes do not have the digest"):
        audit_export(folder)
    file.unlink()
    with pytest.raises(UserError, match=f"{start.hex()}: No such file"):
        audit_export(folder)


def test_what_a_waiting_job_starts_from_is_exported_if_it_is_here(chain: Chain, tmp_path: Path) -> None:
    _, start = started(chain, 3)
    chain.settle()
    folder = exported(chain, tmp_path / "run")
    assert (folder / payload_path(start)).is_file() and audit_export(folder).models == {}
    decided = chain.store.get_decision(1)
    assert decided is not None and initial_model_digests(decided.decode().body) == {start: 4 * layout_of(LANGUAGE).size}
