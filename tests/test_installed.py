"""`tools.installed` finds the packages of the product, and reports a missing one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest

from tools.installed import LIGHT_EXTRAS, required_distributions


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that hides an installed package."""
    find = metadata.distribution

    def hide_package(hidden: str) -> None:
        def distribution(name: str) -> metadata.Distribution:
            return find("a-package-that-is-not-installed" if name == hidden else name)

        monkeypatch.setattr(metadata, "distribution", distribution)

    return hide_package


def test_a_missing_direct_requirement_is_an_error(hide: Callable[[str], None]) -> None:
    hide("aiohttp")
    with pytest.raises(metadata.PackageNotFoundError):
        required_distributions(LIGHT_EXTRAS)


def test_a_missing_requirement_of_another_package_is_left_out(hide: Callable[[str], None]) -> None:
    before = required_distributions(LIGHT_EXTRAS).keys()
    hide("yarl")
    assert before - required_distributions(LIGHT_EXTRAS).keys() == {"yarl"}
