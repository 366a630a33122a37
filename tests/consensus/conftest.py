"""Fixtures for one replica under test."""

from __future__ import annotations

import pytest

from tests.consensus.bench import Bench, follower


@pytest.fixture
def bench() -> Bench:
    return follower()
