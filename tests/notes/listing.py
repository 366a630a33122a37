"""A temporary line in the list of features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from peer.features import FEATURES
from tests.notes.feature import NOTES
from training import engine_implementations, transformer
from training.objectives import registry


@contextmanager
def listed() -> Iterator[None]:
    """Register the feature, and remove its registrations at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_known", dict(registry._known))
        patch.setattr(transformer, "_known", dict(transformer._known))
        patch.setattr(engine_implementations, "_places", dict(engine_implementations._places))
        FEATURES.append(NOTES)
        try:
            yield
        finally:
            FEATURES.remove(NOTES)
