"""Handwritten digits in a few kilobytes, a small network for them, and rounds of training by many, in numpy alone.

The data is the copy of UCI's "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998, CC BY 4.0,
doi:10.24432/C50P49) that scikit-learn 1.9.1 ships as datasets/data/digits.csv.gz: 1797 images of 8 × 8 pixels 0..16, and labels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training.replicated.tensor_layout import Float32Array, TensorLayout, layout_from_shapes

FILE = Path(__file__).with_name("digits.csv.gz")
SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
CLASSES = 10
TEST_SHARE = 0.2
SHAPES = [("hidden.weight", (32, 64)), ("hidden.bias", (32,)), ("output.weight", (10, 32)), ("output.bias", (10,))]

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Digits:
    """Pixels scaled to −1..1, (images, 64), with labels."""

    train: Float32Array
    train_labels: Labels
    test: Float32Array
    test_labels: Labels


def load(seed: int) -> Digits:
    """Return the data, split at random into a training and a test part."""
    data = FILE.read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256, f"{FILE} is damaged"
    rows = np.loadtxt(FILE, delimiter=",", dtype=np.float32)
    rows = np.random.default_rng((seed, 1)).permutation(rows)
    pixels, labels, cut = (rows[:, :-1] / 8 - 1).astype(np.float32), rows[:, -1].astype(np.int64), int(TEST_SHARE * len(rows))
    return Digits(pixels[cut:], labels[cut:], pixels[:cut], labels[:cut])


def layout() -> TensorLayout:
    return layout_from_shapes(SHAPES)


def initial(generator: np.random.Generator) -> Float32Array:
    parts = [generator.standard_normal(shape) / np.sqrt(shape[1]) if len(shape) > 1 else np.zeros(shape) for _, shape in SHAPES]
    return np.concatenate([part.ravel() for part in parts]).astype(np.float32)


def gradients(parameters: Float32Array, x: Float32Array, y: Labels) -> Float32Array:
    """Return the gradient (trainers, parameters) of the mean cross-entropy of each trainer's batch.

    x is (trainers, batch, 64), and y is (trainers, batch).
    """
    views = layout().tensor_views(parameters)
    before = x @ views["hidden.weight"].T + views["hidden.bias"]
    hidden = np.maximum(before, 0)
    error = _softmax(hidden @ views["output.weight"].T + views["output.bias"])
    np.put_along_axis(error, y[..., None], np.take_along_axis(error, y[..., None], -1) - 1, -1)
    error /= np.float32(x.shape[1])
    back = (error @ views["output.weight"]) * (before > 0)
    parts = (back.swapaxes(1, 2) @ x, back.sum(axis=1), error.swapaxes(1, 2) @ hidden, error.sum(axis=1))
    return np.concatenate([part.reshape(len(x), -1) for part in parts], axis=1)


def accuracy(parameters: Float32Array, digits: Digits) -> float:
    """Return the accuracy on the test part, in per cent."""
    guessed = np.argmax(_logits(parameters, digits.test), axis=1)
    return 100 * float(np.mean(guessed == digits.test_labels))


def loss(parameters: Float32Array, x: Float32Array, y: Labels) -> float:
    """Return the mean cross-entropy in nats, or infinity if the model's outputs are not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        logits = _logits(parameters, x).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        nats = float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y]))
    return nats if np.isfinite(nats) else np.inf


def _logits(parameters: Float32Array, x: Float32Array) -> Float32Array:
    views = layout().tensor_views(parameters)
    hidden = np.maximum(x @ views["hidden.weight"].T + views["hidden.bias"], 0)
    return hidden @ views["output.weight"].T + views["output.bias"]


def _softmax(logits: Float32Array) -> Float32Array:
    with np.errstate(invalid="ignore", over="ignore"):  # an attack can make a model's outputs infinite
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True)


# Images of each trainer ----------------------------------------------------------------------------------------------


def shared(digits: Digits, trainers: int) -> list[npt.NDArray[np.int64]]:
    """Give all images to every trainer (IID)."""
    return [np.arange(len(digits.train)) for _ in range(trainers)]


def dirichlet(digits: Digits, trainers: int, alpha: float, generator: np.random.Generator) -> list[npt.NDArray[np.int64]]:
    """Spread each class over the trainers by Dirichlet shares (Hsu 2019, arXiv:1909.06335). A smaller alpha concentrates it."""
    owned: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(trainers)]
    for label in range(CLASSES):
        images = generator.permutation(np.flatnonzero(digits.train_labels == label))
        shares = generator.dirichlet(np.full(trainers, alpha))
        for mine, part in zip(owned, np.split(images, (np.cumsum(shares)[:-1] * len(images)).astype(np.int64)), strict=True):
            mine.append(part)
    anything = np.arange(len(digits.train))
    return [np.concatenate(mine) if sum(map(len, mine)) else generator.choice(anything, 1) for mine in owned]
