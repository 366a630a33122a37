"""The exceptions of the project. The side at fault, this peer or another peer, determines the class, as in h11."""

from __future__ import annotations

from pathlib import Path


class FolkmootError(Exception):
    """Base of all exceptions that this project raises on purpose."""


class LocalProtocolError(FolkmootError):
    """This peer was about to violate the protocol: a bug."""


class RemoteProtocolError(FolkmootError):
    """A peer violated the protocol. Its connection is closed, and `reason` is counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class UserError(FolkmootError):
    """An error that a person can correct. The text has the event, the offending value and the remedy.

    The text is one line. Only an error about a person's file may have more, such as one for each invalid line.
    """


class NotRunningError(UserError):
    """No peer runs on this data directory."""

    def __init__(self, text: str, directory: Path) -> None:
        super().__init__(text)
        self.directory = directory


class StorageError(UserError):
    """The data directory is damaged or cannot be written. The peer stops, so that it signs no vote that it cannot store."""


class MissingBlobError(StorageError):
    """A blob is not on this disk, or is larger than the caller allows. The caller decides whether this is a failure."""


class LostVotesError(StorageError):
    """The disk may have lost this peer's own signatures for good. Only a new key is safe then."""
