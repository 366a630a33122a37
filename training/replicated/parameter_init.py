"""Initial parameters, from integers and correctly rounded operations only: bit-equal on every machine.

(`torch.randn` and numpy's normal generator reach the C library's logarithm, which is not.)
"""

from __future__ import annotations

import math

import numpy as np

from training import random_stream
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, TensorBlock, TensorInfo, layout_of
from training.transformer import EMBEDDING

# Deviations in units of 1/√input. Measured on the default job, 30 rounds of two trainers: 2.17 bits/byte held out, against
# 2.20 with 1/√width for the embedding and 2.62 with GPT-2's 0.02 for it, where the tokens drown in what the layers add.
EMBEDDING_GAIN = 0.8  # the output layer is often the same matrix: first logits have a deviation below 1
LINEAR_GAIN = 0.5
RESIDUAL = ("output.weight", "down.weight")  # they write into the residual stream, which 2 × layers of them add up in


def initial_parameters(spec: JobSpec) -> Float32Array:
    """The flat vector of a job's first round. Scratch jobs start at zero."""
    return np.concatenate([initial_block(spec, block) for block in layout_of(spec).blocks])


def initial_block(spec: JobSpec, block: TensorBlock) -> Float32Array:
    tensor = layout_of(spec).slots_by_name[block.tensor]
    if len(tensor.shape) == 1:
        return np.full(block.size, tensor.name.endswith("norm.weight"), dtype=np.float32)
    factor = np.float32(_deviation(tensor, spec) / random_stream.IRWIN_HALL_DEVIATION)
    integers = random_stream.irwin_hall_integers(
        block.size, "initial", spec.seed, tensor.name, block.elements.start - tensor.offset
    )
    values: Float32Array = integers.astype(np.float32) * factor  # the integers stay below 2^24: exact
    return values


def _deviation(tensor: TensorInfo, spec: JobSpec) -> float:
    if tensor.name == EMBEDDING:
        return EMBEDDING_GAIN / math.sqrt(spec.model.width)
    deviation = LINEAR_GAIN / math.sqrt(tensor.shape[1])
    return deviation / math.sqrt(2 * spec.model.layers) if tensor.name.endswith(RESIDUAL) else deviation
