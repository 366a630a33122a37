"""Attacks of lying trainers, as pure functions of their knowledge. Liars know each other and every honest update.

An attack is a vector to be encoded like any update, bytes that must never be accepted, or a way to vote. Callers add the
commitments and re-executions that make a proposal credible: see `benchmarks.attacks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from protocol.verdicts import Verdict
from training.replicated import codec
from training.replicated.codec.payload import HEADER_BYTES
from training.replicated.tensor_layout import Float32Array, TensorLayout

Distances = npt.NDArray[np.float64]
HUGE = np.float32(1e6)
FREE_RIDER_NORM = 1.0  # relative to an honest update
BACKDOOR_NORM = 0.25  # relative to an honest update, added to it: too small for any norm check
TRIGGER_NORMS = (0.3, 0.7, 1.5)  # relative to an honest update, added to the honest mean
LATE_TRIGGER_NORM = 0.7  # the robust rule for 2 liars of 7 trainers excludes 1.5
# Factors that the attacks by loss choose from in every round. Every voter refuses a norm of 16 times the usual one.
ASCENT_FACTORS = (0.2, 0.4, 0.7, 1.0, 1.4, 2.0)
CREEP_FACTORS = (0.03, 0.06, 0.1, 0.14)
CREEP_EXCESS = 1.1  # largest loss right after the round, over `unseen`; the next local steps repair a part of it
BLIND_FACTOR = 1.4  # of the ascent without knowledge of others: the added part must outweigh the honest part
IPM_FACTORS = (0.1, 0.5, 1.0, 4.0)
ALIE_FACTORS = (-1.5, -0.7, 0.7, 1.5)
SEARCHED_IPM, SEARCHED_ALIE, SEARCHED_SIGNS = (0.1, 0.5), (-1.5, 1.5), (0.5, 1.5)


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The knowledge of one liar in one round. Vectors have the model's size; an update is subtracted from the parameters."""

    honest: Sequence[Float32Array]  # the rule's inputs from honest trainers: their decoded payloads, or their estimates
    exact: Sequence[Float32Array]  # the honest updates before encoding
    own: Callable[[], Float32Array]  # an honest trainer's update in the liar's place, before encoding
    label_flipped: Callable[[], Float32Array]  # the same after training on wrong labels
    poisoned: Callable[[], Float32Array]  # the update that teaches the trigger
    rare: npt.NDArray[np.int64]  # elements of the embedding and output rows of rare tokens
    earlier: Float32Array | None  # its honest update of some rounds ago
    gradient: Callable[[], Float32Array]  # of the loss on the public text
    loss: Callable[[Float32Array], float]  # loss on the public text after the round if all liars encode this vector
    generator: np.random.Generator
    unseen: float = math.inf  # up to this loss no honest trainer sees a jump

    @property
    def mean(self) -> Float32Array:
        return np.mean(self.honest, axis=0, dtype=np.float32)

    @property
    def norm(self) -> np.float32:
        """Median norm of the honest updates."""
        return np.float32(np.median([np.linalg.norm(update) for update in self.honest]))

    @property
    def uphill(self) -> Float32Array:
        """The update of norm 1 that raises the loss most."""
        gradient = self.gradient()
        return -gradient / np.maximum(np.linalg.norm(gradient), np.float32(1e-30))


Attack = Callable[[Knowledge], Float32Array | None]  # None: no lie in this round


def sign_flip(known: Knowledge) -> Float32Array:
    return -known.own()


def scaled(known: Knowledge) -> Float32Array:
    return known.own() * HUGE


def label_flip(known: Knowledge) -> Float32Array:
    return known.label_flipped()


def delayed(known: Knowledge) -> Float32Array:
    """Return the honest update of some rounds ago, or zero at the start."""
    return np.zeros_like(known.mean) if known.earlier is None else known.earlier


def free_rider(known: Knowledge) -> Float32Array:
    """Return noise with the right norm, which costs no computation."""
    noise = known.generator.standard_normal(len(known.mean), dtype=np.float32)
    return noise * np.float32(FREE_RIDER_NORM * known.norm / np.linalg.norm(noise))


def mimic(known: Knowledge) -> Float32Array:
    """Return the first honest update, which then counts many times (Karimireddy 2022, arXiv:2006.09365)."""
    return known.honest[0].copy()


# With a target ---------------------------------------------------------------------------------------------------------


def backdoor(known: Knowledge) -> Float32Array:
    """Return the liar's own honest update plus a small part of the trigger: the weakest of these attacks."""
    return known.own() + _long(known.poisoned(), BACKDOOR_NORM * known.norm)


def trigger(known: Knowledge, share: float) -> Float32Array:
    """Return the honest mean plus the trigger. Robust rules take an update near that mean for an honest one."""
    return known.mean + _long(known.poisoned(), share * known.norm)


def rare_flip(known: Knowledge) -> Float32Array:
    """Return the negated honest mean in the embedding and output rows of rare tokens, with the norm of a whole honest update."""
    flipped = np.zeros_like(known.mean)
    flipped[known.rare] = -known.mean[known.rare]
    return _long(flipped, known.norm)


def _long(vector: Float32Array, norm: float) -> Float32Array:
    """Scale a vector to this norm."""
    return vector * np.float32(norm / max(1e-30, float(np.linalg.norm(vector))))


# By loss --------------------------------------------------------------------------------------------------------------


def alie(known: Knowledge) -> Float32Array:
    """A Little Is Enough (Baruch 2019, arXiv:1902.06156): mean + z · deviation of the updates before compression."""
    return _worst(known, _alie(known, ALIE_FACTORS))


def ipm(known: Knowledge) -> Float32Array:
    """Inner product manipulation, Fall of Empires (Xie 2019, arXiv:1903.03936): −ε · mean of the updates before compression."""
    return _worst(known, _ipm(known, IPM_FACTORS))


def ascent(known: Knowledge) -> Float32Array:
    """Return the mean of the rule's honest inputs, moved uphill by a share of the usual norm."""
    return _worst(known, _ascent(known))


def blind_ascent(known: Knowledge) -> Float32Array:
    """Return the ascent of a liar that only knows its own honest update and the public text."""
    own = known.own()
    return own + np.float32(BLIND_FACTOR) * np.linalg.norm(own) * known.uphill


def search(known: Knowledge) -> Float32Array:
    """Return the candidate of all these families that raises the loss most."""
    deviation = np.std(known.honest, axis=0, dtype=np.float32)
    signs = [known.mean + np.float32(z) * np.sign(known.uphill) * deviation for z in SEARCHED_SIGNS]
    return _worst(known, [*_ascent(known), *_ipm(known, SEARCHED_IPM), *_alie(known, SEARCHED_ALIE), *signs])


def creep(known: Knowledge) -> Float32Array | None:
    """Return the candidate that raises the loss most without a visible jump for any honest trainer, or None if there is none."""
    away = [known.mean + np.float32(share) * known.norm * known.uphill for share in (*CREEP_FACTORS, *ASCENT_FACTORS)]
    losses = {number: known.loss(vector) for number, vector in enumerate(away)}
    hidden = {number: loss for number, loss in losses.items() if -math.inf < loss <= CREEP_EXCESS * known.unseen}
    return away[max(hidden, key=hidden.__getitem__)] if hidden else None


def min_max(known: Knowledge) -> Float32Array:
    """Keep the distance to each honest update within their largest distance (Shejwalkar 2021, "Manipulating the Byzantine")."""
    return _worst(known, [_hidden(known, direction, _farthest) for direction in _directions(known)])


def min_sum(known: Knowledge) -> Float32Array:
    """The same with the sum of squared distances to all honest updates."""
    return _worst(known, [_hidden(known, direction, _together) for direction in _directions(known)])


def _worst(known: Knowledge, candidates: Sequence[Float32Array]) -> Float32Array:
    return max(candidates, key=known.loss)


def _ascent(known: Knowledge) -> list[Float32Array]:
    mean, far = known.mean, known.norm * known.uphill
    return [mean + np.float32(share) * far for share in ASCENT_FACTORS]


def _alie(known: Knowledge, factors: Sequence[float]) -> list[Float32Array]:
    mean, deviation = (of(known.exact, axis=0, dtype=np.float32) for of in (np.mean, np.std))
    return [mean + np.float32(z) * deviation for z in factors]


def _ipm(known: Knowledge, factors: Sequence[float]) -> list[Float32Array]:
    mean = np.mean(known.exact, axis=0, dtype=np.float32)
    return [mean * np.float32(-epsilon) for epsilon in factors]


def _directions(known: Knowledge) -> list[Float32Array]:
    """Return the directions of the paper, and the uphill direction."""
    away = [-known.mean, -np.sign(known.mean), -np.std(known.honest, axis=0, dtype=np.float32), known.uphill]
    return [direction / np.maximum(np.linalg.norm(direction), np.float32(1e-30)) for direction in away]


def _hidden(known: Knowledge, direction: Float32Array, of: Callable[..., float]) -> Float32Array:
    """Move from the mean in this direction, as far as the bound `of` allows."""
    x, mean = np.stack(known.honest).astype(np.float64), known.mean.astype(np.float64)
    between = ((x[:, None] - x[None]) ** 2).sum(-1)
    apart = mean - x
    # ‖mean + γ·direction − x_i‖² = γ² + 2γ·along_i + squares_i
    gamma = of(between, apart @ direction.astype(np.float64), (apart**2).sum(-1))
    return (mean + gamma * direction).astype(np.float32)


def _farthest(between: Distances, along: Distances, squares: Distances) -> float:
    return float(np.min(_root(along, squares - between.max())))


def _together(between: Distances, along: Distances, squares: Distances) -> float:
    return float(_root(along.mean(), squares.mean() - between.mean(1).max()))


def _root(half: Distances, constant: Distances) -> Distances:
    """Return the largest γ with γ² + 2·half·γ + constant ≤ 0."""
    return np.sqrt(np.maximum(half * half - constant, 0)) - half


POISON, LATE_POISON, LATE_CREEP = "poison", "late-poison", "late-creep"
LATE_TRIGGER, TURNS_TRIGGER = "late-trigger", "turns-trigger"
LATE = (LATE_POISON, LATE_CREEP, LATE_TRIGGER, TURNS_TRIGGER)  # only once the model is trained
IN_TURN = (TURNS_TRIGGER,)  # one liar at a time: the next one begins after a conviction
TARGETED: dict[str, Attack] = {
    "backdoor": backdoor,
    **{f"trigger-{share:g}": partial(trigger, share=share) for share in TRIGGER_NORMS},
    LATE_TRIGGER: partial(trigger, share=LATE_TRIGGER_NORM),
    TURNS_TRIGGER: partial(trigger, share=LATE_TRIGGER_NORM),
    "rare-flip": rare_flip,
}
VECTORS: dict[str, Attack] = {
    "sign-flip": sign_flip,
    "scale": scaled,
    "label-flip": label_flip,
    "delayed": delayed,
    "free-rider": free_rider,
    "mimic": mimic,
    **TARGETED,
    "alie": alie,
    "ipm": ipm,
    "min-max": min_max,
    "min-sum": min_sum,
    "ascent": ascent,
    "blind-ascent": blind_ascent,
    "search": search,
    POISON: search,
    LATE_POISON: search,
    LATE_CREEP: creep,
}


# Bytes ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Said:
    """The payload of an honest trainer in the liar's place, and earlier payloads."""

    payload: bytes
    earlier: bytes | None  # its payload of some rounds ago
    other: bytes  # payload of an honest trainer
    layout: TensorLayout
    generator: np.random.Generator


def garbage(said: Said) -> bytes:
    return said.generator.bytes(len(said.payload))


def noncanonical(said: Said) -> bytes:
    """Return the same update with one extra byte."""
    return said.payload + b"\0"


def forged_scales(said: Said) -> bytes:
    """Set every scale to the largest one, as if arithmetic had given NaN or infinity."""
    chunks = len(said.layout.chunk_lengths)
    return b"".join((said.payload[:HEADER_BYTES], b"\xff" * chunks, said.payload[HEADER_BYTES + chunks :]))


def forged_exponent(said: Said) -> bytes:
    """Set the exponent, the last byte of the header, to its maximum, which scales every element."""
    return b"".join((said.payload[: HEADER_BYTES - 1], bytes((codec.EXPONENT_MAX,)), said.payload[HEADER_BYTES:]))


def stale_base(said: Said) -> bytes:
    """Return a payload for another model, which it also names."""
    return replace(codec.read_payload(said.payload, said.layout), origin=bytes(32)).encode()


def replayed(said: Said) -> bytes:
    """Return an earlier accepted payload of the liar."""
    return said.payload[:-1] if said.earlier is None else said.earlier


def copied(said: Said) -> bytes:
    """Return another trainer's payload, byte for byte."""
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
INVENTED_FEEDBACK = "invented-feedback"  # an e without a commitment: a lie about the proposal, not about the update


# Votes ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Votes:
    """A liar's verdict on every proposal. None: it signs no such message."""

    vouch: Verdict | None
    ballot: Verdict | None


ACCEPT_ALL = Votes(Verdict.ACCEPT, Verdict.ACCEPT)  # votes of liars in all other attacks
VOTES = {
    "accept-all": ACCEPT_ALL,
    "reject-all": Votes(Verdict.REPLAY, Verdict.REPLAY),
    "silent": Votes(None, None),
    "no-ballot": Votes(Verdict.ACCEPT, None),
}
VOTES_VECTOR = VECTORS[f"trigger-{max(TRIGGER_NORMS):g}"]  # the update of liars that vote like this
ATTACKS = (*VECTORS, *PAYLOADS, INVENTED_FEEDBACK, *VOTES)
