"""The worker process of a program with the feature: it adds only the line in the list of features."""

from __future__ import annotations

from peer.features import FEATURES
from peer.worker.main import main
from tests.notes.feature import NOTES

if __name__ == "__main__":
    FEATURES.append(NOTES)
    main()
