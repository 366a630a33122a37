"""The payload of a trainer's update, in one canonical byte string (docs/protocol/codec.md): numpy only, same bits everywhere.

Every element, or the largest of every chunk, as one level of 1 to 8 bits; one scale per chunk; one exponent. With one bit it is
the scaled sign of EF-signSGD (Karimireddy 2019, arXiv:1901.09847).
"""

from training.replicated.codec.entries import Entries
from training.replicated.codec.header import Header, Mode
from training.replicated.codec.levels import LEVEL_MAX
from training.replicated.codec.payload import decode, encode, payload_bytes_max, quantize, read
from training.replicated.codec.scales import EXPONENT_MAX, EXPONENT_MIN, SCALE_BITS
from training.replicated.codec.update import Update

__all__ = [
    "EXPONENT_MAX",
    "EXPONENT_MIN",
    "LEVEL_MAX",
    "SCALE_BITS",
    "Entries",
    "Header",
    "Mode",
    "Update",
    "decode",
    "encode",
    "payload_bytes_max",
    "quantize",
    "read",
]
