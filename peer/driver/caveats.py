"""What people are told each time they choose something whose limits are known."""

from __future__ import annotations

SAMPLED_AUDITS = (
    "audit=sampled is not for links slower than a LAN yet: a trainer whose states reach its auditors too late is suspended "
    "as if it hid them; take audit=full there, which suspends nobody, or audit=off liars=0 among people who trust one another"
)
NOBODY_LIES = (
    "audits are off and liars=0: nobody is assumed to lie, and one trainer that does moves the model anywhere; take audit=full "
    "unless you trust every trainer"
)
