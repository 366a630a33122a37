"""How many sequences fit into memory at once, by counting what a forward pass keeps for the backward one."""

from __future__ import annotations

from training.engine_implementations import layer_implementation
from training.engine_resources import EngineResources, ParallelMode
from training.engines.pytorch.layers import TorchBlock
from training.engines.pytorch.model import NAME
from training.job_spec import JobSpec
from training.replicated.tensor_layout import layout_of
from training.transformer import ModelSpec

FLOAT_BYTES = 4
MB = 1_000_000
# float32 numbers for each parameter: itself, its gradient, whether it decays, and two moments
KEPT = 5
OF_VOCABULARY = 3  # logits, their logarithms, and their gradient


def sequence_bytes(model: ModelSpec, recompute: bool) -> int:
    """What one sequence of a micro-batch takes. With recompute, layers keep their inputs, and one at a time the rest."""
    blocks: list[type[TorchBlock]] = [layer_implementation(NAME, name) for name in (model.attention, model.feed_forward)]
    layer = sum(block.saved_floats(model) for block in blocks)
    layers = layer + model.layers * model.width if recompute else model.layers * layer
    return FLOAT_BYTES * model.context * (layers + OF_VOCABULARY * model.vocabulary + 2 * model.width)


def sequences_that_fit(spec: JobSpec, resources: EngineResources) -> int | None:
    """In one micro-batch, 1 at least: less than a sequence cannot be trained on. None: there is no bound."""
    if not resources.memory_mb_max:
        return None
    parts = resources.gpus if resources.parallel is ParallelMode.FSDP else 1
    left = resources.memory_mb_max * MB - KEPT * FLOAT_BYTES * layout_of(spec).size // parts
    return max(1, left // sequence_bytes(spec.model, resources.recompute))
