"""The payload of a trainer's update, in one canonical byte string (docs/protocol/codec.md).

A payload has a level of 1 to 16 bits for every element, a scale for every chunk, and one exponent. With one bit a payload is the
scaled sign of EF-signSGD (Karimireddy 2019, arXiv:1901.09847). The codec uses only numpy, and gives the same bits on all
machines.
"""

from training.replicated.codec.payload import (
    PayloadHeader,
    QuantizedUpdate,
    decode_payload,
    encode_payload,
    payload_bytes,
    quantize_vector,
    read_payload,
)
from training.replicated.codec.quantization import EXPONENT_MAX, EXPONENT_MIN, LEVEL_MAX, SCALE_BITS

__all__ = [
    "EXPONENT_MAX",
    "EXPONENT_MIN",
    "LEVEL_MAX",
    "SCALE_BITS",
    "PayloadHeader",
    "QuantizedUpdate",
    "decode_payload",
    "encode_payload",
    "payload_bytes",
    "quantize_vector",
    "read_payload",
]
