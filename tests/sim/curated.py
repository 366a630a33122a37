"""Invariants of curation, checked after every decided block.

Written apart from `curation`: names and commitments are hashed anew, signatures are checked anew, and sums go over all rows.
Signed and opened votes are read from the blocks alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol import codec
from protocol.identity import Verifier, short_id, signing_preimage
from tests.sim.invariants import Violation, faults_tolerated, quorum

TABLES = ("projects", "pages", "tasks", "places", "annotators", "assignments", "skills", "shares", "due", "closings", "golds")
LEASES_MAX = 8
# Allowed changes of an assignment's status within a block.
AFTER = {
    "leased": {"leased", "committed", "opened", "settled", "forfeited", "skipped", "expired", "released"},
    "released": {"released", "leased", "committed", "opened", "settled", "forfeited", "skipped", "expired"},
    "expired": {"expired", "committed", "opened", "settled", "forfeited"},
    "skipped": {"skipped"},
    "committed": {"committed", "opened", "settled", "forfeited"},
    "opened": {"opened", "settled"},
    "forfeited": {"forfeited"},
    "settled": {"settled"},
}
WITH_PLACE = ("leased", "committed", "opened", "settled")
VOTES = ("committed", "opened", "settled")
OF_A_LEASE = ("leased", "skipped", "expired", "released")  # then the row still names the peer that took the last lease

Rows = Mapping[bytes, Any]


def hashed(tag: str, *parts: bytes) -> bytes:
    return hashlib.sha256(tag.encode() + b"\x00" + b"".join(parts)).digest()


def task_of(project: bytes, number: int) -> bytes:
    return hashed("folkmoot/task-id", project, number.to_bytes(8, "big"))


def assignment_of(task: bytes, annotator: bytes) -> bytes:
    return hashed("folkmoot/assignment", task, annotator)


@dataclass
class Tables:
    """A state with its rows in dictionaries."""

    state: Any
    time_ms: int
    rows: dict[str, Rows] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = {name: dict(getattr(self.state, name).items()) for name in TABLES}


@dataclass
class Curated:
    """Checks of the states before and after each block."""

    chain_id: bytes
    verifier: Verifier
    _before: Tables | None = None
    _commits: dict[bytes, list[tuple[bytes, bytes, tuple[bytes, ...]]]] = field(default_factory=lambda: defaultdict(list))
    _wishes: dict[tuple[str, bytes], set[bytes]] = field(default_factory=lambda: defaultdict(set))  # members with this wish
    _openings: dict[bytes, set[tuple[bytes, tuple[int, ...]]]] = field(default_factory=lambda: defaultdict(set))
    _openers: dict[bytes, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    _releases: dict[bytes, set[bytes]] = field(default_factory=dict)  # of this block: assignment -> the peers that released it
    _again: Counter[tuple[bytes, bytes, bytes]] = field(
        default_factory=Counter
    )  # of this block: released tasks, leased to the same people
    _unsealed: int = 0  # votes that a peer other than the carrier opened
    _released: int = 0
    _late: int = 0  # answers to released tasks
    _leased_again: int = 0

    def on_block(self, height: int, body: bytes, before: Any, after: Any) -> None:
        """`before` and `after` are whole states."""
        if "curation" not in after.modules:
            return
        self._releases, self._again = defaultdict(set), Counter()
        enrolled, wished, is_looked_at = dict[bytes, list[Any]](), Counter[tuple[bytes, bytes, bytes | None]](), False
        for data, signer, _ in codec.unpack(body, len(body))[2]:
            _, _, _, kind, content = codec.unpack(data, len(data))
            if kind == "curation/statements":
                roles = {*_roles(before, signer), *_roles(after, signer)}
                if "annotator" not in roles:
                    raise Violation("curation consent", f"height {height}: {short_id(signer)} serves nobody, and has a batch")
                self._read(signer, codec.unpack(content, len(content)), before.time_ms, enrolled, wished)
                is_looked_at = True
            elif kind.startswith("curation/"):
                self._wishes[kind, content].add(signer)
        if self._before is None:
            self._before = Tables(before.modules["curation"], before.time_ms)
        old, new = self._before, self._before
        if after.modules["curation"] is not old.state:
            new = Tables(after.modules["curation"], before.time_ms)
            self._check_consent(old, new, after.members)
            self._check_votes(old, new, height, after.members.current_key)
            self._check_tasks(old, new, before.time_ms)
            self._check_lists(new)
            self._check_people(old, new, enrolled, wished)
            self._check_counts(old, new, after.members.current_key)
            self._check_points(old, new)
        self._check_queues(new, before.time_ms if is_looked_at else None)
        self._before = new

    def came_about(self) -> dict[str, int]:
        """Return counts for the figures of a campaign."""
        if self._before is None:
            return {}
        rows, projects = self._before.rows, self._before.rows["projects"].values()
        found = {
            "tasks settled": self._before.state.settled,
            "votes opened by their seals": self._unsealed,
            "votes forfeited": sum(row.state == "forfeited" for row in rows["assignments"].values()),
            "leases expired": sum(row.state == "expired" for row in rows["assignments"].values()),
            "leases released": self._released,
            "released tasks leased again": self._leased_again,
            "released tasks answered": self._late,
            "projects closed": len([row for row in projects if row.phase == "closed"]) - len(rows["closings"]),
            "texts redacted": self._before.state.redacted,
            "gold said": len(rows["golds"]),
            "points paid": sum(row.paid for row in projects),
        }
        return {what: count for what, count in found.items() if count}

    # Statements in blocks --------------------------------------------------------------------------------------------

    def _read(self, peer: bytes, batch: list[Any], now_ms: int, enrolled: dict[bytes, list[Any]], wished: Counter[Any]) -> None:
        """Read a batch in its order of execution: each opened vote was carried in this batch or before."""
        enrolments, leases, commits, openings = batch[:4]
        for annotator, name, custodial, signature in enrolments:
            if self._is_signed("enrol", [name, peer, custodial], annotator, signature):
                enrolled.setdefault(annotator, []).append((name, peer, custodial))
        for annotator, nonce, expires_ms, signature, count, _, project in leases:
            if expires_ms >= now_ms and self._is_signed("session", [peer, nonce, expires_ms], annotator, signature):
                wished[annotator, peer, project] += count
        for assignment, _, commitment, signature, *seals in commits:
            self._commits[assignment].append((commitment, signature, tuple(*seals)))
        for assignment, salt, answer in openings:
            self._openings[assignment].add((salt, tuple(answer)))
            self._openers[assignment].add(peer)
        for (assignment,) in batch[5]:
            self._releases[assignment].add(peer)

    def _is_signed(self, tag: str, fields: list[Any], signer: bytes, signature: bytes) -> bool:
        return self.verifier.verify(signer, signing_preimage(tag, self.chain_id, codec.encode([tag, *fields])), signature)

    def _check_consent(self, old: Tables, new: Tables, members: Any) -> None:
        """Check closures and redactions: by the author or by voters (a quorum for a project, f + 1 for a text)."""
        projects, voters = new.rows["projects"], set(members.voters)
        for key, row in projects.items():
            was = old.rows["projects"].get(key)
            if row.phase == "closed" and (was is None or was.phase != "closed"):
                moved = self._wishes["curation/set-phase", codec.encode([key, "closed"])]
                stopped = self._wishes["curation/vote-to-stop", codec.encode([key])] & voters
                if not _is_by(row.author, moved, members) and len(stopped) < quorum(len(voters)):
                    raise Violation("curation consent", f"project {key.hex()[:8]} is closed, {len(stopped)} voters wanted that")
        redacted = {key for key, row in new.rows["tasks"].items() if row.is_redacted}
        for key in redacted - {key for key, row in old.rows["tasks"].items() if row.is_redacted}:
            row = new.rows["tasks"][key]
            wished = [
                said
                for (kind, content), said in self._wishes.items()
                if kind == "curation/redact" and self._is_of(new, row, content)
            ]
            author = projects[row.project].author
            if not any(_is_by(author, said, members) or len(said & voters) > faults_tolerated(len(voters)) for said in wished):
                raise Violation("curation consent", f"task {key.hex()[:8]} is redacted, and too few wanted that")

    def _is_of(self, new: Tables, row: Any, content: bytes) -> bool:
        project, page, index, *_ = codec.unpack(content, len(content))
        of = new.rows["pages"].get(project + page.to_bytes(4, "big"))
        return project == row.project and of is not None and of.first + index == row.number

    # People ----------------------------------------------------------------------------------------------------------

    def _check_people(self, old: Tables, new: Tables, enrolled: Mapping[bytes, Iterable[Any]], wished: Counter[Any]) -> None:
        people, assignments = new.rows["annotators"], new.rows["assignments"]
        leases: dict[bytes, set[bytes]] = defaultdict(set)
        for key, row in assignments.items():
            if row.state == "leased":
                leases[row.annotator].add(key)
        for key, row in people.items():
            if key not in old.rows["annotators"] and (row.name, row.peer, row.custodial) not in enrolled.get(key, ()):
                raise Violation("curation consent", f"{short_id(key)} is enrolled, and did not sign it")
            if len(row.leases) > LEASES_MAX or len(set(row.leases)) < len(row.leases) or set(row.leases) != leases[key]:
                raise Violation("curation leases", f"{short_id(key)} has {len(leases[key])} leases, its row {len(row.leases)}")
        rows = [row for key, row in assignments.items() if key not in old.rows["assignments"]]
        fresh = Counter((row.annotator, row.peer, row.project) for row in rows)
        of_any = Counter[tuple[bytes, bytes]]()  # leases that no wish for their project explains
        for (annotator, peer, _), count in (fresh + self._again - wished).items():
            of_any[annotator, peer] += count
        if any(count > wished[(*who, None)] for who, count in of_any.items()):
            raise Violation("curation consent", "somebody has more leases, or of other projects, than it asked this peer for")

    # Votes -----------------------------------------------------------------------------------------------------------

    def _check_votes(self, old: Tables, new: Tables, height: int, current: Callable[[bytes], bytes]) -> None:
        before, tasks = old.rows["assignments"], new.rows["tasks"]
        if before.keys() - new.rows["assignments"].keys():
            raise Violation("curation votes", "an assignment is gone")
        for key, row in new.rows["assignments"].items():
            was, task = before.get(key), task_of(row.project, row.number)
            if row is was:
                continue
            if key != assignment_of(task, row.annotator) or row.annotator not in tasks[task].annotators:
                raise Violation("curation draws", f"assignment {key.hex()[:8]} is not of its task and annotator")
            if was is not None and row.state not in AFTER[was.state]:
                raise Violation("curation draws", f"assignment {key.hex()[:8]} was {was.state}, and is {row.state} again")
            self._check_releases(key, row, was, current)
            if was is not None and was.commitment is not None and row.commitment != was.commitment:
                raise Violation("curation votes", f"another commitment took the place of that of {key.hex()[:8]}")
            if (row.commitment is not None) != (row.state in (*VOTES, "forfeited")):
                raise Violation("curation votes", f"assignment {key.hex()[:8]} is {row.state}, commitment: {row.commitment!r}")
            if (row.answer is not None) != (row.state in ("opened", "settled")):
                raise Violation("curation votes", f"assignment {key.hex()[:8]} is {row.state}, answer: {row.answer!r}")
            if row.commitment is not None and (was is None or was.commitment is None):
                self._check_commitment(old, key, row, height)
            self._check_seals(key, row, was)
            if row.answer is not None and (was is None or was.answer is None):
                self._check_opening(old, new, key, row, task)
                self._unsealed += current(row.peer) not in map(current, self._openers[key])

    def _check_releases(self, key: bytes, row: Any, was: Any, current: Callable[[bytes], bytes]) -> None:
        """An annotator gets the same task again only after the peer that took the lease has released it."""
        is_released_by = {current(peer) for peer in self._releases[key]}.__contains__
        is_leased_again = (
            was is not None and row.state in OF_A_LEASE and (row.deadline_ms, row.peer) != (was.deadline_ms, was.peer)
        )
        if is_leased_again:
            self._again[row.annotator, row.peer, row.project] += 1
            self._leased_again += 1
            if was.state != "released" and not (was.state == "leased" and is_released_by(current(was.peer))):
                raise Violation(
                    "curation draws", f"assignment {key.hex()[:8]} was {was.state}, and is {row.state} of another lease"
                )
        if row.state == "released" and (was is None or was.state == "leased" or is_leased_again):
            self._released += 1
            if not is_released_by(current(row.peer)):
                raise Violation("curation consent", f"{key.hex()[:8]} is released, and not by the peer that took the lease")
        self._late += was is not None and was.state == "released" and row.state in VOTES

    def _check_commitment(self, old: Tables, key: bytes, row: Any, height: int) -> None:
        said = [signature for commitment, signature, _ in self._commits[key] if commitment == row.commitment]
        if not any(self._is_signed("annotation", [key, row.commitment], row.annotator, signature) for signature in said):
            raise Violation("curation consent", f"{short_id(row.annotator)} did not sign the commitment of {key.hex()[:8]}")
        if row.height != height:
            raise Violation("curation votes", f"a commitment of height {height} is dated {row.height}")
        task = old.rows["tasks"].get(task_of(row.project, row.number))
        is_told = (task is not None and task.opened) or task_of(row.project, row.number) in old.rows["golds"]
        if is_told and row.is_blind:
            raise Violation("curation votes", f"{key.hex()[:8]} counts as blind, and answers to its task could be seen")
        project = old.rows["projects"].get(row.project)
        if project is not None and project.phase == "closed":
            raise Violation("curation closed", f"a closed project took the commitment of {key.hex()[:8]}")

    def _check_seals(self, key: bytes, row: Any, was: Any) -> None:
        """Check that an unopened vote keeps its seals, even after its carrier has gone."""
        if row.state != "committed":
            if row.seals:
                raise Violation("curation seals", f"{key.hex()[:8]} is {row.state}, and keeps its seals")
        elif was is not None and was.state == "committed":
            if row.seals != was.seals:
                raise Violation("curation seals", f"{key.hex()[:8]} has other seals than before")
        elif not any(said == row.commitment and seals == row.seals for said, _, seals in self._commits[key]):
            raise Violation("curation seals", f"{key.hex()[:8]} has other seals than those that came with its commitment")

    def _check_opening(self, old: Tables, new: Tables, key: bytes, row: Any, task: bytes) -> None:
        answer = tuple(row.answer)
        encoded = codec.encode(list(answer))
        if not any(
            said == answer and hashed("folkmoot/answer", key, salt, encoded) == row.commitment
            for salt, said in self._openings[key]
        ):
            raise Violation("curation votes", f"{key.hex()[:8]} is opened with an answer that was not committed")
        was = old.rows["tasks"].get(task)
        asked = was.votes_asked if was is not None else 1
        if was is None or was.stage == "begun":
            mine = [assignment_of(task, who) for who in new.rows["tasks"][task].annotators]
            here = [new.rows["assignments"][of] for of in mine]
            gone = [old.rows["assignments"][of].state for of in mine if of in old.rows["assignments"]].count("forfeited")
            if sum(vote.commitment is not None for vote in here) - gone < asked:
                raise Violation("curation early", f"{key.hex()[:8]} is opened before all votes asked for are committed")
        if row.project not in old.rows["projects"]:
            return
        closing = old.rows["closings"].get(row.project)
        is_over = closing.start_ms <= old.time_ms if closing is not None else old.rows["projects"][row.project].phase == "closed"
        if is_over:
            raise Violation("curation closed", f"{key.hex()[:8]} was opened during or after the close of its project")

    # Tasks -----------------------------------------------------------------------------------------------------------

    def _check_tasks(self, old: Tables, new: Tables, now_ms: int) -> None:
        states: dict[bytes, Counter[str]] = defaultdict(Counter)
        for row in new.rows["assignments"].values():
            states[task_of(row.project, row.number)][str(row.state)] += 1
        for key, row in new.rows["tasks"].items():
            had, was = states[key], old.rows["tasks"].get(key)
            if len(set(row.annotators)) < len(row.annotators) or len(row.annotators) != had.total():
                raise Violation("curation draws", f"task {key.hex()[:8]} counts {len(row.annotators)} annotators")
            if row.places_taken != sum(had[state] for state in WITH_PLACE):
                raise Violation("curation places", f"task {key.hex()[:8]}: {row.places_taken} places taken, {dict(had)}")
            votes = sum(had[state] for state in VOTES)
            if (row.committed, row.opened, row.skipped) != (votes, had["opened"] + had["settled"], had["skipped"]):
                raise Violation(
                    "curation counts", f"task {key.hex()[:8]}: {row.committed}, {row.opened}, {row.skipped}; {dict(had)}"
                )
            most = new.rows["projects"][row.project].spec.votes
            if not row.places_taken <= row.votes_asked <= most or (row.stage == "opening" and row.committed != row.votes_asked):
                raise Violation(
                    "curation places", f"task {key.hex()[:8]} is {row.stage}: {row.places_taken} of {row.votes_asked}, of {most}"
                )
            if row.stage == "begun" and row.committed == row.votes_asked:
                raise Violation("curation places", f"task {key.hex()[:8]} has all its votes, and waits for more")
            if (row.label is not None) != (row.stage == "settled") or (row.stage != "settled" and had["settled"]):
                raise Violation("curation labels", f"task {key.hex()[:8]} is {row.stage}, with the label {row.label}")
            if row.is_redacted and row.stage not in ("redacted", "settled"):
                raise Violation("curation redacted", f"task {key.hex()[:8]} has no text, and is {row.stage}")
            if row.stage == "redacted" and (had["leased"] or had["committed"]):
                raise Violation("curation redacted", f"task {key.hex()[:8]} has no text, and somebody has it: {dict(had)}")
            is_open = new.rows["projects"][row.project].phase != "closed"
            if row.stage == "settled" and row.opened == most == 1 and not row.is_reviewed and is_open:
                vote = next(
                    vote.answer
                    for who in row.annotators
                    if (vote := new.rows["assignments"][assignment_of(key, who)]).state == "settled"
                )
                if tuple(vote) != tuple(row.label):
                    raise Violation("curation labels", f"task {key.hex()[:8]} has another label than its only vote")
            if was is not None and was.stage == "settled":
                self._check_settled(old, key, was, row, now_ms)

    def _check_settled(self, old: Tables, key: bytes, was: Any, row: Any, now_ms: int) -> None:
        closing = old.rows["closings"].get(row.project)
        is_closing = closing is not None and closing.start_ms <= now_ms and (not row.is_reviewed or key in old.rows["golds"])
        if row.stage != "settled" or (row.label != was.label and not is_closing):
            raise Violation("curation labels", f"task {key.hex()[:8]} was {was.label}, and is {row.stage}, {row.label}")
        if (row.height, row.annotators, row.opened) != (was.height, was.annotators, was.opened):
            raise Violation("curation labels", f"task {key.hex()[:8]} is settled, and changes")

    # Lists -----------------------------------------------------------------------------------------------------------

    def _check_lists(self, new: Tables) -> None:
        """Check that each task is either not drawn yet or has a row, and that the list has all tasks that can be drawn again."""
        rows: dict[bytes, dict[int, Any]] = defaultdict(dict)
        for row in new.rows["tasks"].values():
            rows[row.project][row.number] = row
        places = {key: row.number for key, row in new.rows["places"].items()}
        listed = 0
        for project, of in new.rows["projects"].items():
            tasks = rows[project]
            fresh = [places.get(project + b"f" + place.to_bytes(4, "big"), place) for place in range(of.fresh_drawn, of.tasks)]
            drawn = [number for number, row in tasks.items() if row.stage != "redacted" or row.annotators or number not in fresh]
            if len(drawn) != of.fresh_drawn or sorted([*drawn, *fresh]) != list(range(of.tasks)):
                raise Violation(
                    "curation draws",
                    f"project {project.hex()[:8]} has {len(tasks)} of {of.tasks} tasks drawn, not {of.fresh_drawn}",
                )
            begun = {number for number, row in tasks.items() if row.stage == "begun" and row.places_taken < row.votes_asked}
            there = {number: row.index_slot for number, row in tasks.items() if row.index_slot is not None}
            listing = {places.get(project + b"b" + place.to_bytes(4, "big")): place for place in range(of.begun)}
            if there != listing or begun != there.keys():
                raise Violation("curation lists", f"project {project.hex()[:8]} lists {sorted(there)}, begun are {sorted(begun)}")
            listed += of.begun + sum(
                project + b"f" + place.to_bytes(4, "big") in places for place in range(of.fresh_drawn, of.tasks)
            )
        if listed != len(places):
            raise Violation("curation lists", f"{len(places)} places have a row, {listed} are in a list")

    # Counts ----------------------------------------------------------------------------------------------------------

    def _check_counts(self, old: Tables, new: Tables, current: Callable[[bytes], bytes]) -> None:
        """`current` gives the key that a member has now."""
        state, rows = new.state, new.rows
        settled = Counter(row.project for row in rows["tasks"].values() if row.stage == "settled")
        reviewed = Counter(row.project for row in rows["tasks"].values() if row.stage == "review")
        committed = Counter(row.annotator for row in rows["assignments"].values() if row.commitment is not None)
        accepted, learned = Counter[bytes](), Counter[bytes]()
        for row in rows["assignments"].values():
            if row.state == "settled":
                label = rows["tasks"][task_of(row.project, row.number)].label
                accepted[row.annotator] += tuple(row.answer) == tuple(label)
                asked = rows["projects"][row.project].spec
                learned[row.project + row.annotator] += 0 if asked.kind == "ranking" else len(asked.options) if asked.many else 1
        counts = {
            "settled": (state.settled, settled.total()),
            "annotations": (state.annotations, committed.total()),
            "annotators": (state.annotators_count, len(rows["annotators"])),
        }
        for key, row in rows["projects"].items():
            counts[f"project {key.hex()[:8]}"] = ((row.settled, row.review), (settled[key], reviewed[key]))  # type: ignore[assignment]
        for key, row in rows["annotators"].items():
            counts[f"of {short_id(key)}"] = ((row.annotations, row.accepted), (committed[key], accepted[key]))  # type: ignore[assignment]
        for key, row in rows["skills"].items():
            counts[f"skill {key.hex()[64:72]}"] = (sum(row.counts), learned[key])
        shares, enrolled = Counter[bytes](), Counter(current(row.peer) for row in rows["annotators"].values())
        for key, row in rows["shares"].items():
            shares[current(key)] += row.annotators
        counts["shares"] = (shares, enrolled)  # type: ignore[assignment]
        for what, (said, seen) in counts.items():
            if said != seen:
                raise Violation("curation counts", f"{what}: {said} says the state, its rows say {seen}")
        if state.passed_over < old.state.passed_over:
            raise Violation("curation counts", "fewer statements were passed over than before")

    # Points ----------------------------------------------------------------------------------------------------------

    def _check_points(self, old: Tables, new: Tables) -> None:
        paid = 0
        for key, row in new.rows["projects"].items():
            was, paid = old.rows["projects"].get(key), paid + row.paid
            if was is None:
                continue
            if row.paid != was.paid and key not in old.rows["closings"]:
                raise Violation("curation points", f"project {key.hex()[:8]} pays {row.paid - was.paid}, and is not being closed")
            if was.phase == "closed" and (row.phase, row.tasks, row.fresh_drawn) != (was.phase, was.tasks, was.fresh_drawn):
                raise Violation("curation closed", f"project {key.hex()[:8]} is closed, and changes")
            if key in old.rows["closings"] and key not in new.rows["closings"]:
                self._check_paid(new, key, row)
        points = sum(row.points for row in new.rows["annotators"].values())
        if points != paid:
            raise Violation("curation points", f"annotators have {points} points, projects paid {paid}")
        if any(
            row.points < old.rows["annotators"][key].points
            for key, row in new.rows["annotators"].items()
            if key in old.rows["annotators"]
        ):
            raise Violation("curation points", "somebody lost points")
        if (set(new.state.open), set(new.state.closing)) != (
            {key for key, row in new.rows["projects"].items() if row.phase != "closed"},
            new.rows["closings"].keys(),
        ):
            raise Violation("curation closed", "the lists of projects are not those of their rows")

    def _check_paid(self, new: Tables, key: bytes, row: Any) -> None:
        """Check that all points are divided, unless there were no answers."""
        has_answers = any(vote.project == key and vote.state == "settled" for vote in new.rows["assignments"].values())
        if row.paid != (row.spec.price * row.settled if has_answers else 0):
            raise Violation("curation points", f"project {key.hex()[:8]} paid {row.paid}, for {row.settled} × {row.spec.price}")

    # Queues ----------------------------------------------------------------------------------------------------------

    def _check_queues(self, new: Tables, now_ms: int | None) -> None:
        """Check that nothing is due any more after a batch at `now_ms`."""
        due, waiting, count = new.rows["due"], dict[str, dict[bytes, int]](), 0
        for name in ("leases", "openings", "enrolments"):
            queue = getattr(new.state, name)
            keys = [name.encode() + place.to_bytes(8, "big") for place in range(queue.first, queue.last)]
            if any(key not in due for key in keys):
                raise Violation("curation queues", f"the queue {name} has a gap")
            times = [due[key].due_ms for key in keys]
            if times != sorted(times):
                raise Violation("curation queues", f"times of the queue {name} do not ascend")
            if now_ms is not None and times and times[0] <= now_ms:
                raise Violation("curation queues", f"the queue {name} has what is due since {now_ms - times[0]} ms")
            waiting[name] = {due[key].assignment: due[key].due_ms for key in keys}
            count += len(keys)
        if count != len(due):
            raise Violation("curation queues", f"{len(due)} rows are due, {count} are in a queue")
        for key, row in new.rows["assignments"].items():
            is_opening = row.state == "committed" and new.rows["tasks"][task_of(row.project, row.number)].stage == "opening"
            queue = "leases" if row.state == "leased" else "openings" if is_opening else None
            if queue is not None and waiting[queue].get(key) != row.deadline_ms:
                raise Violation("curation queues", f"nobody looks at {key.hex()[:8]} again, which is {row.state}")
        for key, row in new.rows["annotators"].items():
            if not row.annotations and key not in waiting["enrolments"]:
                raise Violation("curation queues", f"the place of {short_id(key)}, which never answered, does not expire")


def _is_by(author: bytes, said: set[bytes], members: Any) -> bool:
    """Return True if one of the signing keys `said` is a current or former key of the author."""
    return any(members.current_key(key) == members.current_key(author) for key in said)


def _roles(state: Any, key: bytes) -> tuple[str, ...]:
    member = state.members.members.get(key)
    return member.roles if member is not None else ()
