"""The base class of optional services, which an operator enables. The failure of a service stops no other part of the peer."""

from __future__ import annotations

from collections.abc import Callable


class OptionalService:
    """A service with a status. `name` is its setting, and `tell` is called with each new status."""

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self.name, self._tell = name, tell
        self.works, self.text = False, "starting"

    def set_status(self, works: bool, text: str) -> None:
        if (works, text) != (self.works, self.text):
            self.works, self.text = works, text
            self._tell(f"{self.name}: {text}")

    def report_missing_package(self, error: ModuleNotFoundError) -> None:
        self.set_status(False, f"the package {error.name} is not installed: install the extra `{self.name}`")

    async def run(self) -> None:
        """Run the service. Return only if there is nothing to do."""
        raise NotImplementedError
