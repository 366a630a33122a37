"""A second implementation of docs/protocol/codec.md, in plain Python with strings of bits and exact fractions.

It is slow, is checked against the page rather than the code, and shares only the layout with the codec. `decode` reads a
payload and then requires that encoding it again gives the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

ORIGIN = struct.Struct("<32sQ32s32sII")
HEADER = struct.Struct("<B32sb")
TOP = {1: 1, 2: 3, 4: 15, 8: 127, 16: 32767}
RANGE = {2: 2, 4: 4}
LEAST, MOST = -84, 12


class Malformed(Exception):
    pass


@dataclass
class Said:
    """The content of a payload."""

    lengths: Sequence[int]  # of the chunks, from the layout
    fields: tuple[int, bytes]  # bits, origin
    exponent: int
    codes: list[int]
    levels: list[list[int]]  # of each chunk's elements; empty where its scale is zero

    def values(self) -> list[Fraction]:
        values: list[Fraction] = []
        for length, code, levels in zip(self.lengths, self.codes, self.levels, strict=True):
            values += [level * scale_of(code) * Fraction(2) ** self.exponent for level in levels or [0] * length]
        return values


def origin_of(job: bytes, round: int, trainer: bytes, base: bytes, local_steps: int, batch: int) -> bytes:
    return hashlib.sha256(b"folkmoot/payload\0" + ORIGIN.pack(job, round, trainer, base, local_steps, batch)).digest()


def scale_of(code: int) -> int:
    return (16 + code % 16) * 2 ** (code // 16) if code else 0


# Writing -------------------------------------------------------------------------------------------------------------


def write(said: Said) -> bytes:
    (bits, _), chunks = said.fields, zip(said.lengths, said.levels, strict=True)
    forms = ("".join(_form(level, bits) for level in levels) or "0" * bits * length for length, levels in chunks)
    return HEADER.pack(*said.fields, said.exponent) + bytes(said.codes) + b"".join(map(_bytes, forms))


def _form(level: int, bits: int) -> str:
    if bits == 8:
        return _binary(level % 256, 8)
    if bits == 16:  # the lower byte comes first
        return _binary(level % 256, 8) + _binary(level // 256 % 256, 8)
    return ("1" if level < 0 else "0") + _binary((abs(level) - 1) // 2, bits - 1)


def _binary(number: int, width: int) -> str:
    return f"{number:0{width}b}" if width else ""


def _bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[start : start + 8], 2) for start in range(0, len(bits), 8))


# Reading -------------------------------------------------------------------------------------------------------------


def read(payload: bytes, lengths: Sequence[int]) -> Said:
    """Return the content of `payload`. Raises Malformed."""
    try:
        said = _read(payload, lengths)
    except (struct.error, IndexError, ValueError) as error:
        raise Malformed(str(error)) from error
    _require_canonical(said)
    if write(said) != payload:
        raise Malformed("written otherwise")
    return said


def _read(payload: bytes, lengths: Sequence[int]) -> Said:
    *fields, exponent = HEADER.unpack_from(payload)
    bits, _ = fields
    if bits not in TOP:
        raise Malformed("bits")
    codes = list(payload[HEADER.size : HEADER.size + len(lengths)])
    if len(codes) < len(lengths):
        raise Malformed("short")
    body = "".join(f"{byte:08b}" for byte in payload[HEADER.size + len(lengths) :])
    levels, at = [], 0
    for code, length in zip(codes, lengths, strict=True):
        part = [_level(body[at + i * bits : at + (i + 1) * bits]) for i in range(length)]
        levels.append(part if code else [])
        at += -(-length * bits // 8) * 8
    return Said(lengths, (*fields,), exponent, codes, levels)


def _level(form: str) -> int:
    if len(form) == 16:
        return (int(form[8:] + form[:8], 2) + 32768) % 65536 - 32768
    if len(form) == 8:
        return (int(form, 2) + 128) % 256 - 128
    return (-1 if form[0] == "1" else 1) * (2 * int("0" + form[1:], 2) + 1)


def _require_canonical(said: Said) -> None:
    bits, _ = said.fields
    if not LEAST <= said.exponent <= MOST:
        raise Malformed("exponent")
    if max(said.codes) < 240 and (max(said.codes), said.exponent) != (0, LEAST):
        raise Malformed("not normalised")
    if any(levels and max(map(abs, levels)) != TOP[bits] for levels in said.levels):
        raise Malformed("range")


# Choosing what to say ------------------------------------------------------------------------------------------------


def said_of(fields: tuple[int, bytes], m: Sequence[float], lengths: Sequence[int]) -> Said:
    """Return the content that a payload of the elements `m` must have."""
    bits, _ = fields
    chunks, start = [], 0
    for length in lengths:
        chunks.append([Fraction(float(x)) for x in m[start : start + length]])
        start += length
    unit = _unit(max((abs(x) for chunk in chunks for x in chunk), default=Fraction(0)))
    exponent, codes = _codes([_scale(chunk, unit, bits) for chunk in chunks], unit, bits)
    levels = [
        [_nearest(element, scale_of(code) * Fraction(2) ** exponent, bits) for element in chunk] if code else []
        for chunk, code in zip(chunks, codes, strict=True)
    ]
    return Said(lengths, fields, exponent, codes, levels)


def _unit(largest: Fraction) -> int:
    """Return the exponent of the unit in which the largest value has 40 bits before the point."""
    unit = -40
    while largest and largest / Fraction(2) ** unit >= 2**40:
        unit += 1
    while largest and largest / Fraction(2) ** unit < 2**39:
        unit -= 1
    return unit


def _scale(elements: list[Fraction], unit: int, bits: int) -> int:
    grid = [round(abs(x) / Fraction(2) ** unit) for x in elements]  # ties go to the even one
    mean = sum(grid) // len(grid)
    if bits == 1:
        return mean
    return (min(max(grid), RANGE[bits] * mean) if bits in RANGE else max(grid)) // TOP[bits]


def _codes(scales: list[int], unit: int, bits: int) -> tuple[int, list[int]]:
    """Return the codes under the least exponent that keeps all of them at most 255."""
    half = Fraction(1, 2) if bits == 1 else Fraction(0)
    for exponent in range(unit, unit + 60):
        codes = [_code(Fraction(scale, 2 ** (exponent - unit)), half) for scale in scales]
        if max(codes) <= 255:
            break
    return (exponent, codes) if exponent >= LEAST and any(scales) else (LEAST, [0] * len(scales))


def _code(scale: Fraction, half: Fraction) -> int:
    shift = 0
    while scale / 2**shift >= 32:
        shift += 1
    mantissa = int(scale / 2**shift + half)  # 32 is the 16 of the next shift
    return max(0, 16 * shift + mantissa - 16)


def _nearest(element: Fraction, scale: Fraction, bits: int) -> int:
    """Return the level nearest to element / scale. Ties go to the even level at 8 bits and more, otherwise to the larger one."""
    ratio = abs(element) / scale
    level = round(ratio) if bits >= 8 else 2 * int(ratio / 2) + 1
    level = min(level, TOP[bits])
    return -level if element < 0 else level
