"""How many sequences fit into memory at once, by counting what a forward pass keeps for the backward one."""

from __future__ import annotations

from training.engine_resources import EngineResources, ParallelMode
from training.job_spec import JobSpec
from training.replicated.tensor_layout import layout_of
from training.transformer import ModelSpec

FLOAT_BYTES = 4
MB = 1_000_000
# float32 numbers for each parameter: itself, its gradient, whether it decays, and two moments
KEPT = 5
# Of a layer, for each token: normalised inputs, queries, keys, values, what heads found, both sums of the residual stream; gate,
# up, the gate's activation, and their product; roots of norms and sums of the attention's weights. A test counts them.
OF_WIDTH, OF_KV_WIDTH, OF_HIDDEN, OF_HEADS = 9, 3, 4, 2
OF_VOCABULARY = 3  # logits, their logarithms, and their gradient


def sequence_bytes(model: ModelSpec, recompute: bool) -> int:
    """What one sequence of a micro-batch takes. With recompute, layers keep their inputs, and one at a time the rest."""
    kv_width = model.kv_heads * model.width // model.heads
    layer = OF_WIDTH * model.width + OF_KV_WIDTH * kv_width + OF_HIDDEN * model.hidden + OF_HEADS * model.heads
    layers = layer + model.layers * model.width if recompute else model.layers * layer
    return FLOAT_BYTES * model.context * (layers + OF_VOCABULARY * model.vocabulary + 2 * model.width)


def sequences_that_fit(spec: JobSpec, resources: EngineResources) -> int | None:
    """In one micro-batch, 1 at least: less than a sequence cannot be trained on. None: there is no bound."""
    if not resources.memory_mb_max:
        return None
    parts = resources.gpus if resources.parallel is ParallelMode.FSDP else 1
    left = resources.memory_mb_max * MB - KEPT * FLOAT_BYTES * layout_of(spec).size // parts
    return max(1, left // sequence_bytes(spec.model, resources.recompute))
