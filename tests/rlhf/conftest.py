from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> None:
    """As in a worker by default; also faster for tensors this small."""
    torch.set_num_threads(1)
