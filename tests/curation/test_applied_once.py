"""A peer applies a batch several times, and remembers what it did; never where it would do anything else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from curation.ledger.curation_state import CurationState
from curation.ledger.transaction_types import StatementBatch
from ledger.core.module import Refused
from tests.curation.room import ONE, PEER, Room, annotators


def test_a_batch_acts_once_on_a_state_and_anew_on_any_other() -> None:
    room, (ann,) = Room(), annotators(1)
    room.project(ONE, tasks=2)
    batch = StatementBatch(enrolments=(room.enrolment(ann),), leases=(room.wish(ann),))
    signed, before = room.tx(PEER, "curation/statements", batch), room.state
    first, second = (room.rules.apply_transaction(before, signed).module_state(CurationState) for _ in range(2))
    assert first is second and first.annotators_count == 1
    again = room.rules.apply_transaction(before.with_modules(curation=first), signed).module_state(CurationState)
    assert (again.annotators_count, again.passed_over) == (1, 1)
    peer = replace(before.members.members[PEER.public], roles=())
    members = replace(before.members, members={**before.members.members, PEER.public: peer})
    with pytest.raises(Refused, match="only members with the role"):
        room.rules.apply_transaction(before.with_modules(members=members), signed)
