"""Initial parameters, from integers and correctly rounded operations only: bit-equal on every machine.

(`torch.randn` and numpy's normal generator reach the C library's logarithm, which is not.)
"""

from __future__ import annotations

import numpy as np

from training import random_stream
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, TensorBlock, layout_of
from training.transformer import LayerParameter, linear_deviation, model_tensors


def initial_parameters(spec: JobSpec) -> Float32Array:
    """The flat vector of a job's first round. Scratch jobs start at zero."""
    return np.concatenate([initial_block(spec, block) for block in layout_of(spec).blocks])


def initial_block(spec: JobSpec, block: TensorBlock) -> Float32Array:
    tensor = layout_of(spec).slots_by_name[block.tensor]
    known = model_tensors(spec.model).get(tensor.name)
    if known is not None:
        parameter = known.parameter
    else:  # of the objective: vectors begin at zero
        parameter = LayerParameter(
            tensor.name, tensor.shape, deviation=linear_deviation(tensor.shape[1]) if len(tensor.shape) > 1 else 0.0
        )
    if not parameter.deviation:
        return np.full(block.size, parameter.initial, dtype=np.float32)
    factor = np.float32(parameter.deviation / random_stream.IRWIN_HALL_DEVIATION)
    integers = random_stream.irwin_hall_integers(
        block.size, "initial", spec.seed, tensor.name, block.elements.start - tensor.offset
    )
    return integers.astype(np.float32) * factor  # the integers stay below 2^24: exact
