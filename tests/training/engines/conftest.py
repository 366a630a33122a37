from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training.data.default_text import default_text


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> None:
    """Use one thread, the default of a worker, which is also faster for small tensors."""
    torch.set_num_threads(1)


@pytest.fixture(scope="package")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(default_text()[:50_000])
    return path
