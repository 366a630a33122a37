"""Classes of peers, by which links give way."""

from __future__ import annotations

import enum


class PeerClass(enum.IntEnum):
    """The order in which links give way: strangers first."""

    STRANGER = 0  # any key that knows the chain id; a new one costs nothing
    GUEST = 1  # holds an invitation of a voter that admits it; there are no more of them than open invitations
    MEMBER = 2
    VOTER = 3
