from __future__ import annotations

import pytest
import torch

from peer import features


@pytest.fixture(autouse=True, scope="package")
def worker_defaults() -> None:
    """Set up a worker's defaults: one thread, which is also faster for small tensors, and the known objectives."""
    torch.set_num_threads(1)
    features.register_features()
