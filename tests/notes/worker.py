"""The worker process of a program with the feature: it has the line, and else nothing of its own."""

from __future__ import annotations

from peer.features import FEATURES
from peer.worker.main import main
from tests.notes.feature import NOTES

if __name__ == "__main__":
    FEATURES.append(NOTES)
    main()
