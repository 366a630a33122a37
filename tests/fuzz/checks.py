"""Properties of every decoder, checked for any number of examples."""

from __future__ import annotations

import tracemalloc
from random import Random

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.errors import RemoteProtocolError
from tests.fuzz.decoders import READ_BYTES_FIXED, Decoder
from tests.fuzz.mutations import bombs, mutate, placed
from tests.fuzz.strategies import outside, strategy_of

MUTATIONS = 15  # of each valid value
BOMB_BYTES = 16 << 10
BOMBS = 4  # in each of a few valid values: measuring memory is slow
RANDOM_LENGTHS = (0, 1, 2, 3, 8, 40, 200, 1_000)


def profile(values: int) -> settings:
    return settings(max_examples=values, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def decodes_to_itself(kind: type, values: int, number: int) -> None:
    @seed(number)
    @profile(values)
    @given(strategy_of(kind))
    def check(value: object) -> None:
        encoded = codec.encode(value)
        assert codec.decode(kind, encoded, len(encoded)) == value

    check()


def keeps_to_its_bounds(kind: type, values: int, number: int) -> None:
    @seed(number)
    @profile(values)
    @given(strategy_of(kind))
    def check(value: object) -> None:
        for what, plain in outside(kind, value):
            data = codec.encode(plain)
            try:
                codec.decode(kind, data, len(data))
            except RemoteProtocolError as error:
                assert error.reason in ("oversized", "mistyped"), what
            else:
                raise AssertionError(f"{kind.__name__} is read with {what}")

    check()


def survives_mutations(decoder: Decoder, values: int, number: int) -> None:
    @seed(number)
    @profile(values)
    @given(decoder.valid, st.integers(0, 2**32))
    def check(valid: bytes, mutations: int) -> None:
        random = Random(mutations)
        assert decoder.accepts(valid) or not decoder.always
        for _ in range(MUTATIONS):
            decoder.accepts(mutate(valid, random))

    check()


def survives_random_bytes(decoder: Decoder, number: int) -> None:
    random = Random(number)
    for length in RANDOM_LENGTHS:
        decoder.accepts(random.randbytes(length))


def keeps_to_its_memory(decoder: Decoder, values: int, number: int) -> None:
    random = Random(number)

    @seed(number)
    @profile(values)
    @given(decoder.valid)
    def check(valid: bytes) -> None:
        decoder.accepts(valid)  # the bound excludes data that are built once and kept
        for bomb in random.sample(bombs(BOMB_BYTES), BOMBS):
            data = placed(valid, random, bomb)
            bound = decoder.bytes_factor * len(data) + READ_BYTES_FIXED
            assert _peak(decoder, data) <= bound, f"{len(data)} bytes with {bomb[:5].hex()} inside take more than {bound}"

    check()


def _peak(decoder: Decoder, data: bytes) -> int:
    tracemalloc.start()
    try:
        decoder.accepts(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
