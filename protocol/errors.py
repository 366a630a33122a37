"""The few exceptions of the project; who is at fault decides which one it is (after h11)."""

from __future__ import annotations

from pathlib import Path


class FolkmootError(Exception):
    """Base of everything this project raises on purpose."""


class LocalProtocolError(FolkmootError):
    """We were about to break the protocol ourselves: a bug of ours."""


class RemoteProtocolError(FolkmootError):
    """A peer broke the protocol. It costs that peer its connection and is counted under `reason`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class UserError(FolkmootError):
    """Something a person can mend. The text is one line: what happened, the offending value, the way out."""


class NotRunningError(UserError):
    """No peer runs on this data directory."""

    def __init__(self, text: str, directory: Path) -> None:
        super().__init__(text)
        self.directory = directory


class StorageError(UserError):
    """The data directory cannot be trusted or written any more; the peer stops rather than vote on it."""


class MissingBlobError(StorageError):
    """A blob is not here, or not any more: what only passes may be fetched again, what is kept may not be missing."""


class LostVotesError(StorageError):
    """What this peer signed may be missing on its disk for good: only a new key makes that harmless."""
