"""What people are told each time they choose something whose limits are known."""

from __future__ import annotations

SAMPLED_AUDITS = (
    "audit=sampled is not for links slower than a LAN yet: a trainer whose states reach its auditors too late is suspended "
    "as if it hid them; take audit=full there, which suspends nobody, or audit=off among people who trust one another"
)
