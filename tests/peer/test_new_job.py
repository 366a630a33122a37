"""What a peer adds to a job that a person starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ledger.core.genesis import ModuleVersion
from ledger.jobs import JOBS_OF_MODELS
from ledger.network import NetworkState
from peer.api.new_job import checked
from protocol.limits import BLOB_PART_BYTES
from training.host import ModelHost
from training.spec import InnerStatePolicy, JobSpec
from training.transformer import ModelSpec

SMALL = JobSpec(name="small", tokenizer=bytes(32), data=bytes(32))
LARGE = replace(SMALL, model=ModelSpec(vocabulary=8192, width=512))  # a buffer of more than a part
STATEFUL = replace(SMALL, model=ModelSpec(vocabulary=4096, width=512), inner_state=InnerStatePolicy.KEEP)  # an inner state


def peer_of(jobs: int) -> Any:
    state = {NetworkState: NetworkState((ModuleVersion("jobs", jobs),))}
    return SimpleNamespace(driver=SimpleNamespace(state=SimpleNamespace(of=state.__getitem__)))


@pytest.mark.parametrize(
    ("spec", "jobs", "has_parts"), [(SMALL, 3, False), (LARGE, 3, True), (STATEFUL, 3, True), (LARGE, 2, False)]
)
def test_objects_have_parts_where_they_may_be_large_and_the_network_knows_parts(
    tmp_path: Path, spec: JobSpec, jobs: int, has_parts: bool
) -> None:
    assert (spec.object_bytes_max > BLOB_PART_BYTES) is (spec is not SMALL)
    made = checked(peer_of(jobs), spec)
    assert made == replace(spec, parts=has_parts)
    assert (JOBS_OF_MODELS in ModelHost(tmp_path).terms(made.encode()).requires) is has_parts
    assert (JobSpec.decode(made.encode()).encode() == spec.encode()) is not has_parts
    assert not checked(peer_of(jobs), replace(made, model=SMALL.model)).parts, "also if the model gets smaller"
