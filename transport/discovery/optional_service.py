"""What a peer does beside its links where its operator asks for it. It may fail, and nothing else stops."""

from __future__ import annotations

from collections.abc import Callable


class OptionalService:
    """`name`: of the setting. `tell` hears what a person should know, whenever that changes."""

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self.name, self._tell = name, tell
        self.works, self.text = False, "it has only started"

    def set_status(self, works: bool, text: str) -> None:
        if (works, text) != (self.works, self.text):
            self.works, self.text = works, text
            self._tell(f"{self.name}: {text}")

    def report_missing_package(self, error: ModuleNotFoundError) -> None:
        self.set_status(False, f"the package {error.name} is not installed; the extra `{self.name}` has it")

    async def run(self) -> None:
        """Returns only where there is nothing to do."""
        raise NotImplementedError
