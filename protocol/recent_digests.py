"""A bounded memory of digests."""

from __future__ import annotations

import contextlib
from collections import OrderedDict


class RecentDigests:
    """The digests that were added or found last, `count_max` of them. Each takes about 250 bytes.

    Threads may share it: each step is one operation of a dictionary, and another thread may have removed the digest in between.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        try:
            self._digests.move_to_end(digest)
        except KeyError:
            return False
        return True

    def add(self, digest: bytes) -> None:
        self._digests[digest] = None
        while len(self._digests) > self._count_max:
            with contextlib.suppress(KeyError):
                self._digests.popitem(last=False)
