"""Warnings for people who choose settings with known risks."""

from __future__ import annotations

SAMPLED_AUDITS_RISK = (
    "with audit=sampled, each trainer needs a steady uplink of uplink_mbit_min (default 2 Mbit/s). A trainer with less, or one "
    "that is away while auditors request its buffers, is suspended as if it withheld them, and rounds are undone. A false update "
    "that an audit finds is undone with all later rounds; one that no audit draws stays in the model. audit=full accepts no "
    "false update, and suspends no trainer for a slow link"
)
SAMPLED_AUDITS_WITHOUT_TOLERANCE_RISK = (
    "audits are sampled and byzantine_max=0: no trainer is assumed to be faulty, and a false update may be found too late"
)
NO_AUDITS_WITHOUT_TOLERANCE_RISK = (
    "audits are off and byzantine_max=0: no trainer is assumed to be faulty, and a single faulty one can change the model at "
    "will; use audit=full unless you trust every trainer"
)
