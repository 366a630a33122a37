"""Attention to a window of tokens: it sees exactly these, in training and with a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.engines.test_engine import SPEC, delta_of, difference, engine_of, kept_bytes
from tests.training.engines.test_model import model_of, tokens
from tests.training.engines.test_sampling import whole_logits
from training.engines.pytorch.engine import FLOAT_BYTES, sequence_bytes
from training.engines.pytorch.layers import KEYS, ForwardPass, KVCache
from training.engines.pytorch.sampling import DecodingState

WINDOW = 6
WINDOWED = replace(SPEC, model=SPEC.model.with_window(WINDOW))


def test_a_token_outside_the_window_has_exactly_no_gradient_and_the_last_one_inside_has_one() -> None:
    model = model_of(WINDOWED)
    x_BTC = torch.randn(1, 20, SPEC.model.width, generator=torch.Generator().manual_seed(1), requires_grad=True)
    out_BTC = model.blocks[0].forward(x_BTC, model.layers[0], ForwardPass())
    for place in (3, 12, 19):
        (gradient_BTC,) = torch.autograd.grad(out_BTC[0, place].square().sum(), x_BTC, retain_graph=True)
        moves = gradient_BTC[0].abs().sum(dim=-1) != 0
        assert moves.tolist() == [max(0, place - WINDOW + 1) <= other <= place for other in range(20)]


def test_a_window_of_the_whole_context_is_no_window() -> None:
    wide = replace(SPEC, model=replace(SPEC.model, attention="sliding-window", window=SPEC.model.context))
    x_BT = tokens(2, SPEC.model.context)
    with torch.no_grad():
        assert torch.allclose(model_of(wide).features(x_BT), model_of().features(x_BT), atol=1e-5)
        assert not torch.allclose(model_of(WINDOWED).features(x_BT), model_of().features(x_BT), atol=1e-2)


@pytest.mark.parametrize("window", [1, WINDOW, 32])
def test_a_cache_gives_the_logits_of_a_window_over_the_whole_sequence(window: int) -> None:
    model = model_of(replace(WINDOWED, model=replace(WINDOWED.model, window=window)))
    sequence = tokens(1, 31)[0].tolist()
    whole, course = whole_logits(model, sequence), DecodingState(model, sequence[:5])
    for place in range(5, len(sequence)):
        torch.testing.assert_close(course.logits()[0], whole[place - 1], atol=1e-5, rtol=0)
        course.append([0], [sequence[place]])
    plain = KVCache(model.spec)  # as rollouts use it: several tokens first, then one at a time
    with torch.no_grad():
        parts = [model.features(part, plain) for part in torch.tensor([sequence]).split([9, 7, *[1] * 15], dim=1)]
        torch.testing.assert_close(model.logits(torch.cat(parts, dim=1))[0], whole, atol=1e-5, rtol=0)


class LargestTensor(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize(("length", "keys", "start"), [(20, 20, 0), (7, 30, 23), (1, 9, 8), (4, 64, 30)])
def test_the_mask_is_made_in_a_byte_for_each_pair_of_tokens(length: int, keys: int, start: int) -> None:
    """A job may have a long context, so a matrix of distances would not fit into a trainer's memory."""
    attention, largest = model_of(WINDOWED).blocks[0], LargestTensor()
    with largest:
        mask_TT = attention._mask(length, keys, ForwardPass(start=start), torch.device("cpu"))  # type: ignore[attr-defined]
    seen = [[start + token - WINDOW < key <= start + token for key in range(keys)] for token in range(length)]
    assert mask_TT.tolist() == seen and largest.bytes == length * keys


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="other libraries may add in other orders")
@pytest.mark.parametrize("layers", [{}, {"feed_forward": "experts", "experts": 3}])
def test_logits_behind_a_window_do_not_depend_on_how_the_tokens_before_were_read(layers: dict[str, Any]) -> None:
    """The sequence ends behind a block of the cache, whose padding has no keys within the window."""
    model = model_of(replace(WINDOWED, model=replace(WINDOWED.model, context=160, window=1, **layers)))
    sequence = tokens(1, KEYS + 6)[0].tolist()
    course = DecodingState(model, sequence[:1])
    for place in range(1, len(sequence)):
        logits, anew = course.logits(), DecodingState(model, sequence[:place])
        while anew.prefill_step():
            pass
        assert torch.isfinite(logits).all() and torch.equal(logits, anew.logits()), place
        course.append([0], [sequence[place]])


def test_honest_replays_with_a_window_agree_and_the_estimate_of_memory_has_the_mask(text: Path) -> None:
    update = delta_of(engine_of(text, WINDOWED))
    assert difference(delta_of(engine_of(text, replace(WINDOWED, micro_batch=1))), update) < 1e-4
    assert difference(delta_of(engine_of(text, SPEC)), update) > 1e-2
    model, plain = replace(WINDOWED.model, context=128), replace(SPEC.model, context=128)
    assert sequence_bytes(model, False) - sequence_bytes(plain, False) == FLOAT_BYTES * model.layers * 128**2
    assert kept_bytes(model, False) < sequence_bytes(model, False) < 1.5 * kept_bytes(model, False)
