"""What people are told each time they choose something whose limits are known."""

from __future__ import annotations

SAMPLED_AUDITS = (
    "audit=sampled needs a steady uplink of least_uplink (2 Mbit/s unless the job says more): a trainer with less, or away "
    "for minutes while its states are asked for, is suspended as if it hid them. A liar that falsifies one of several local "
    "steps is found late: 1 of 4 raised the loss to 1.04 times until then, 2 of 7 to 1.06, and at most 1.03 counts as "
    "defended. audit=full suspends nobody, and takes no such step"
)
NOBODY_LIES = (
    "audits are off and liars=0: nobody is assumed to lie, and one trainer that does moves the model anywhere; take audit=full "
    "unless you trust every trainer"
)
