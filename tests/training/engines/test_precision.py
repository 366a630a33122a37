"""What `precision: bf16` changes: matrix products of the steps, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.engines.test_engine import JOB, SPEC, TRAINER, delta_of, difference, engine_of
from training.job_spec import AuditMode, Precision
from training.replicated.tensor_layout import initial_parameters

HALF = replace(SPEC, precision=Precision.BF16, audit=AuditMode.OFF)


def test_bf16_moves_an_update_by_more_than_audits_tolerate_and_by_less_than_half_of_it(text: Path) -> None:
    engine, start = engine_of(text, HALF), initial_parameters(HALF)
    delta, losses = engine.local_steps(start, JOB, 3, TRAINER)
    assert 1e-3 < difference(delta, delta_of(engine_of(text))) < 0.5
    assert delta.dtype == np.float32 and engine.model.gradients.dtype == torch.float32
    assert losses[0] == pytest.approx(engine_of(text).local_steps(start, JOB, 3, TRAINER)[1][0], rel=1e-2)


def test_what_is_measured_is_computed_in_float32(text: Path) -> None:
    start = initial_parameters(SPEC)
    assert engine_of(text, HALF).compute_main_metric(start) == engine_of(text).compute_main_metric(start)
