"""The setting `compile`: the same loss, or the one that is there where a compiler fails."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.engines.test_engine import SPEC, delta_of, difference, engine_of
from tests.training.engines.test_memory import engine_with


def test_where_a_compiler_fails_the_loss_is_computed_as_it_is_and_that_is_said_once(
    text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(loss: Any) -> Any:
        def raises(*arguments: Any) -> Any:
            raise RuntimeError("no compiler was found\nmore of it")

        return raises

    monkeypatch.setattr(torch, "compile", fails)
    with caplog.at_level(logging.WARNING, "peer"):
        assert np.array_equal(delta_of(engine_with(text, SPEC, compile=True)), delta_of(engine_of(text)))
    assert [record.getMessage() for record in caplog.records] == ["job 't': its loss is not compiled: no compiler was found"]


def test_what_runs_out_of_memory_is_no_failure_of_the_compiler(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The micro-batch is halved as without it, and the compiled loss goes on."""
    sizes = list[int]()

    def scarce(loss: Any) -> Any:
        def lacks(model: Any, x_BT: torch.Tensor, y_BT: torch.Tensor) -> Any:
            sizes.append(len(x_BT))
            if len(x_BT) > 2:
                raise RuntimeError("not enough memory: you tried to allocate 1 bytes")
            return loss(model, x_BT, y_BT)

        return lacks

    monkeypatch.setattr(torch, "compile", scarce)
    delta_of(engine_with(text, SPEC, compile=True))
    assert sizes == [4] + [2] * 2 * SPEC.local_steps


@pytest.mark.real("processes")
@pytest.mark.large
@pytest.mark.filterwarnings("default")
def test_a_compiled_loss_gives_the_same_update_to_rounding(text: Path) -> None:
    assert difference(delta_of(engine_with(text, SPEC, compile=True)), delta_of(engine_of(text))) < 1e-4
