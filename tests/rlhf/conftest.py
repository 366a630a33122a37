from __future__ import annotations

import pytest
import torch

from peer import features


@pytest.fixture(autouse=True, scope="package")
def worker_defaults() -> None:
    """As in a worker: one thread, which is also faster for tensors this small, and objectives that are known."""
    torch.set_num_threads(1)
    features.register_features()
