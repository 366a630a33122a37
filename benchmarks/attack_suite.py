"""What lying trainers send, as pure functions of what they know. Liars know everything: each other, and every honest update.

An attack is a vector to be encoded like any update, or bytes that should never be accepted. What it takes to be believed beyond
that (commitments, re-execution) is for who calls: see `benchmarks.attacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from training.replicated import codec
from training.replicated.codec.header import HEADER_BYTES
from training.replicated.layout import Float32Array, Layout

HUGE = np.float32(1e6)
FREE_RIDER_NORM = 1.0  # times that of an honest update
BACKDOOR_NORM = 0.25  # times that of an honest update, added to it: below what any norm check sees
# Factors that the optimised attacks choose from, in every round anew. A norm 16 times the usual is refused by every voter.
FOE_FACTORS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
ALIE_FACTORS = (-3.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 3.0)


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Of one liar in one round. Vectors have the model's size."""

    honest: Sequence[Float32Array]  # what the honest payloads say, decoded
    own: Callable[[], Float32Array]  # what an honest trainer in the liar's place would encode
    label_flipped: Callable[[], Float32Array]  # the same, had it trained on wrong labels
    poisoned: Callable[[], Float32Array]  # the update that the backdoor needs
    earlier: Float32Array | None  # what it would have encoded some rounds ago
    damage: Callable[[Float32Array], float]  # how far the aggregate goes astray if all liars send this
    generator: np.random.Generator

    @property
    def mean(self) -> Float32Array:
        return np.mean(self.honest, axis=0, dtype=np.float32)


Attack = Callable[[Knowledge], Float32Array]


def sign_flip(known: Knowledge) -> Float32Array:
    return -known.own()


def scaled(known: Knowledge) -> Float32Array:
    return known.own() * HUGE


def label_flip(known: Knowledge) -> Float32Array:
    return known.label_flipped()


def delayed(known: Knowledge) -> Float32Array:
    """An honest update of some rounds ago (none at the start: the model as it is)."""
    return np.zeros_like(known.mean) if known.earlier is None else known.earlier


def free_rider(known: Knowledge) -> Float32Array:
    """Noise with the right norm, which costs nothing."""
    noise = known.generator.standard_normal(len(known.mean), dtype=np.float32)
    return noise * np.float32(FREE_RIDER_NORM * _usual_norm(known) / np.linalg.norm(noise))


def mimic(known: Knowledge) -> Float32Array:
    """All liars say what the first honest trainer says (Karimireddy 2022, arXiv:2006.09365): it counts many times."""
    return known.honest[0].copy()


def backdoor(known: Knowledge) -> Float32Array:
    """An honest update with something small beside it that only shows where the trigger is."""
    hidden = known.poisoned()
    return known.own() + hidden * np.float32(BACKDOOR_NORM * _usual_norm(known) / max(1e-30, float(np.linalg.norm(hidden))))


def alie(known: Knowledge) -> Float32Array:
    """A Little Is Enough (Baruch 2019, arXiv:1902.06156): mean + z · deviation, with the z that does the most damage."""
    mean, deviation = known.mean, np.std(known.honest, axis=0, dtype=np.float32)
    return _most_damaging(known, [mean + np.float32(z) * deviation for z in ALIE_FACTORS])


def foe(known: Knowledge) -> Float32Array:
    """Fall of Empires, inner product manipulation (Xie 2019, arXiv:1903.03936): −ε · mean, with the worst ε."""
    mean = known.mean
    return _most_damaging(known, [mean * np.float32(-epsilon) for epsilon in FOE_FACTORS])


def _most_damaging(known: Knowledge, candidates: Sequence[Float32Array]) -> Float32Array:
    return max(candidates, key=known.damage)


def _usual_norm(known: Knowledge) -> float:
    return float(np.median([np.linalg.norm(update) for update in known.honest]))


VECTORS: dict[str, Attack] = {
    "sign-flip": sign_flip,
    "scale": scaled,
    "label-flip": label_flip,
    "delayed": delayed,
    "free-rider": free_rider,
    "mimic": mimic,
    "backdoor": backdoor,
    "alie": alie,
    "foe": foe,
}


# Bytes ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Said:
    """What an honest trainer in the liar's place would send, as bytes, and what it has sent before."""

    payload: bytes
    earlier: bytes | None  # its payload of some rounds ago
    other: bytes  # what an honest trainer sends
    layout: Layout
    generator: np.random.Generator


def garbage(said: Said) -> bytes:
    return said.generator.bytes(len(said.payload))


def noncanonical(said: Said) -> bytes:
    """The same update in one byte more."""
    return said.payload + b"\0"


def forged_scales(said: Said) -> bytes:
    """The largest scale everywhere: what arithmetic that gave NaN or infinity would come to."""
    chunks = len(said.layout.chunk_lengths)
    return b"".join((said.payload[:HEADER_BYTES], b"\xff" * chunks, said.payload[HEADER_BYTES + chunks :]))


def forged_exponent(said: Said) -> bytes:
    """Every element times as much as the format can say: the last byte of the header is the exponent."""
    return b"".join((said.payload[: HEADER_BYTES - 1], bytes((codec.EXPONENT_MAX,)), said.payload[HEADER_BYTES:]))


def stale_base(said: Said) -> bytes:
    """Computed on another model, and it says so."""
    return replace(codec.read(said.payload, said.layout), origin=bytes(32)).encode()


def replayed(said: Said) -> bytes:
    """A payload of its own that was accepted before."""
    return said.payload[:-1] if said.earlier is None else said.earlier


def copied(said: Said) -> bytes:
    """Another's work, byte for byte."""
    return said.other


PAYLOADS: dict[str, Callable[[Said], bytes]] = {
    "garbage": garbage,
    "noncanonical": noncanonical,
    "forged-scales": forged_scales,
    "forged-exponent": forged_exponent,
    "stale-base": stale_base,
    "replay": replayed,
    "copy": copied,
}
INVENTED_FEEDBACK = "invented-feedback"  # e that was never committed to: a lie about the proposal, not about the update
ATTACKS = (*VECTORS, *PAYLOADS, INVENTED_FEEDBACK)
