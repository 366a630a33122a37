"""What a block changed, told once and to everybody."""

from __future__ import annotations

from dataclasses import replace

from ledger.jobs import RequestRollback, StopJob
from ledger.ledger_state import LedgerState
from ledger.members import ApproveVoter, RenameMember, ResignAsVoter, StandAsVoter
from peer.runtime.telemetry.node_observer import block_events, member_names
from protocol.identity import short_id
from protocol.verdicts import Verdict
from tests.ledger.world import PEOPLE, UNAUDITED, World

FOUNDERS, NEW = PEOPLE[:4], PEOPLE[8]
NAMES = [short_id(person.public) for person in PEOPLE]


class Telling(World):
    """Notes the news of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def decide_body(self, body: bytes) -> LedgerState:
        before = self.state
        self.told += [item.text for item in block_events(before, super().decide_body(body))]
        return self.state


def test_who_comes_stands_and_goes_is_told() -> None:
    world = Telling()
    world.decide(world.admission(NEW))
    assert world.told == [f"{NAMES[8]} was admitted as a member, invited by {NAMES[0]}"]
    world.decide(world.tx(NEW, "member/rename", RenameMember("erin")))
    assert world.told[1:] == [f"{NAMES[8]} is called erin, and was newcomer before"]
    height = world.state.height - 1
    world.decide(world.tx(NEW, "member/stand", StandAsVoter(height, world.state.certified_roots[height])))
    world.decide(*(world.tx(person, "member/approve", ApproveVoter(NEW.public)) for person in FOUNDERS[:3]))
    world.decide(world.tx(FOUNDERS[3], "member/resign", ResignAsVoter()))
    for _ in range(3):
        world.decide()
    assert world.told[2:] == [
        f"{NAMES[8]} votes now, as one of 5",
        f"{NAMES[3]} votes no more; 4 voters are left",
    ]


def test_a_new_key_of_a_member_is_nobody_new() -> None:
    world = Telling()
    world.decide(world.admission(NEW))
    world.told.clear()
    world.decide(world.rotation(NEW, PEOPLE[9]), world.rotation(PEOPLE[0], PEOPLE[10]))
    for _ in range(3):
        world.decide()
    assert world.told == []


def test_jobs_that_begin_and_end_are_told() -> None:
    world = Telling()
    job = world.start()
    assert world.told == [f"job language of {NAMES[0]} begins: 2 rounds"]
    world.decide(world.tx(PEOPLE[0], "job/stop", StopJob(job)))
    assert world.told[1:] == ["job language ended early, after 0 rounds"]


def test_a_job_that_ends_without_progress_is_told_as_such() -> None:
    world = Telling()
    key = world.start(spec=UNAUDITED + b":99")
    for _ in range(8):
        world.decide(closings=(world.closing(key, dict.fromkeys(world.job(key).trainers, Verdict.NORM)),))
    assert world.told[1:] == ["job unaudited ended early, after 8 rounds: its last 8 accepted nothing"]


def test_who_asks_for_a_rollback_is_told_with_the_command_for_the_others() -> None:
    world = Telling()
    key = world.start(spec=UNAUDITED + b":99")
    for _ in range(9):
        world.decide(closings=(world.closing(key, dict.fromkeys(world.job(key).trainers, Verdict.ACCEPT)),))
    for _ in range(2):
        world.decide(world.tx(FOUNDERS[1], "job/rollback", RequestRollback(key, 8)))
    asks = f"{NAMES[1]} asks that job unaudited goes back to @8; whoever agrees says `rollback {key.hex()[:8]} 8`"
    assert world.told[1:] == [asks]


def test_a_founder_says_its_name_for_the_first_time_and_its_id_stays_beside_it() -> None:
    dora, world = FOUNDERS[3], World()
    before, after = world.state, world.decide(world.tx(dora, "member/rename", RenameMember("dora")))
    unnamed = replace(before.members.members[dora.public], name=NAMES[3])
    members = replace(before.members, members=before.members.members | {dora.public: unnamed})
    (told,) = block_events(before.with_modules(members=members), after)
    assert told.text == f"{NAMES[3]} is called dora"
    assert member_names(after.members).replace_ids(told.text) == told.text, "nobody reads that dora is called dora"
