"""Prints the tensors' hash and the model root after several rounds, and numpy's vector units: run in restricted processes."""

from __future__ import annotations

import hashlib

import numpy as np

from tests.training.replicated.support import JOB, SMALL, buffer, proposed, trainer
from training.replicated import feedback
from training.replicated.layout import Float32Array
from training.replicated.model import ReplicatedModel

ROUNDS = 4
NOTHING = None, None


def final_model() -> ReplicatedModel:
    model = ReplicatedModel.initial(JOB, SMALL)
    sent: dict[bytes, tuple[Float32Array | None, bytes | None]] = {}
    for number in range(ROUNDS):
        items = []
        for key in (trainer(i) for i in range(5)):
            e = feedback.feedback_after(model.records.get(key), *sent.get(key, NOTHING), model.layout)
            m = feedback.accumulate(e, buffer(model.layout, "golden", number, key), SMALL.feedback_decay)
            items.append(proposed(model, key, m))
            sent[key] = m, items[-1].payload
        model = model.apply(items, {})
    return model


def tensors_hash(model: ReplicatedModel) -> str:
    return hashlib.sha256(model.parameters.tobytes() + model.momentum.tobytes()).hexdigest()


if __name__ == "__main__":
    final = final_model()
    extensions = np.show_config(mode="dicts")["SIMD Extensions"]
    print(tensors_hash(final), final.root.hex(), *extensions.get("found", []))
