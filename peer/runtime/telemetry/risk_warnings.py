"""Warnings for people who choose settings with known risks."""

from __future__ import annotations

SAMPLED_AUDITS_RISK = (
    "audit=sampled needs a steady uplink of uplink_mbit_min (2 Mbit/s unless the job says more): a trainer with less, or away "
    "for minutes while its buffers are asked for, is suspended as if it hid them, and rounds are undone. A lie that an audit "
    "finds is taken out of the model with the rounds since; one that no audit draws stays. audit=full suspends nobody for a slow "
    "link, and takes no false step"
)
SAMPLED_AUDITS_WITHOUT_TOLERANCE_RISK = (
    "audits are sampled and byzantine_max=0: nobody is assumed to lie, and nothing says that one who does is found in time"
)
NO_AUDITS_WITHOUT_TOLERANCE_RISK = (
    "audits are off and byzantine_max=0: nobody is assumed to lie, and one trainer that does moves the "
    "model anywhere; take audit=full "
    "unless you trust every trainer"
)
