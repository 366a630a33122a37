"""What this peer answers to people: `protocol.api.PeerApi` over the running parts of the daemon."""

from __future__ import annotations

import enum
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_type_hints

import trio

from consensus.chain_proof import Anchor
from consensus.voters import VoterSet
from ledger.audits.state import CHALLENGES_OPEN_MAX, Due, Entry, JobAudits, Standing
from ledger.core.genesis import TRAINER, Genesis
from ledger.jobs import Job, Phase, Start, Stop, job_id
from ledger.members import Approve, Leave, Member, MembersState, Retire, Revoke, warning_for_removal, wishes_about
from ledger.state import State
from peer.api.memory import process_memory_mb
from peer.api.naming import find
from peer.driver.auditing import suspension
from peer.driver.author import Author
from peer.driver.condition import heights_behind, state_of, why_stalled
from peer.driver.driver import Driver
from peer.driver.membership import NOT_DECIDED
from peer.driver.witness import why_disputed, why_halted, why_waiting
from peer.export.writing import export, exported_state, missing_payloads
from peer.roles.trainer import Trainer
from peer.settings.config import Config, nearest
from peer.settings.invitation import DAY_MS, invitation_text, make_invitation
from peer.settings.invitations import InvitationBook, Made
from peer.worker.supervisor import Worker
from protocol import codec
from protocol.addresses import dialable, is_loopback, parse_address
from protocol.api import (
    INVITATION_DAYS_MAX,
    AuditsView,
    AuditView,
    DialView,
    EventView,
    ExportView,
    InvitationView,
    JobView,
    LinkView,
    PeerView,
    RoundView,
    StandingView,
    StatsView,
    StatusView,
    SuspensionView,
    TrainRequest,
)
from protocol.errors import FolkmootError, UserError
from protocol.identity import peer_id, short_id
from protocol.limits import ADVERTISED_MAX
from protocol.reasons import Verdict
from storage.store import StoredRound
from training import tasks
from training.data import corpus as data
from training.data import default_text, shards, tokenizer
from training.replicated.aggregate import is_plain_mean
from training.spec import BYTES, Audit, JobSpec, ModelSpec, Objective, completed
from transport.network import DialInfo, LinkInfo, Priority
from transport.swarm import Swarm

BUILT_IN = ""  # `TrainRequest.data` for the text inside every Python
LOCAL = "local"
NOT_SET_BY_NAME = frozenset({"data", "tokenizer", "model", "objective", "name"})  # they follow from what else was said
WISH_DAYS = 7  # how long a wish to retire somebody counts: whoever came back since is not retired by surprise
ROUNDS_SHOWN_MAX = 10_000
FETCHING_SECONDS_MAX = 600.0  # of all updates that an export lacks: it is told what is missing then
FETCHING_ONE_SECONDS_MAX = 20.0  # of one of them, which nobody may hold any more


@dataclass
class Service:
    """Implements `PeerApi`."""

    config: Config
    genesis: Genesis
    driver: Driver
    network: Swarm
    addresses: Callable[[], tuple[str, ...]]  # where others reach this peer, as far as it knows
    role_name: str
    worker: Worker | None
    stop_daemon: Callable[[], None]
    set_standing: Callable[[bool], None]  # whether this peer, where it does not vote, asks to
    challenge_due: Callable[[Due], Awaitable[str]]
    author: Author
    invited: InvitationBook
    started: float

    # Looking ---------------------------------------------------------------------------------------------------------

    async def status(self) -> StatusView:
        driver, members = self.driver, self.driver.state.members
        voters, member = VoterSet(members.voters), members.members.get(driver.signer.public)
        links = self.network.connected()
        problem = driver.witness.membership_problem or (NOT_DECIDED if member is None else "")
        halted = why_halted(driver.replica, member, problem)
        stalled = why_stalled(driver.node, links, driver.witness.awaits_seconds, driver.now())
        waiting, suspended = why_waiting(driver.node, links) or stalled, suspension(driver.signer.public, driver.state)
        behind, ago = heights_behind(driver.node, links), await self._seconds_since_decision()
        return StatusView(
            peer=peer_id(driver.signer.public),
            name=self._name(),
            network=self.genesis.network,
            chain_id=driver.chain_id.hex(),
            role=self.role_name,
            version=version("folkmoot"),
            address=(self.addresses() or (self.network.address,))[0],
            unreached=tuple(map(_dial, self.network.unreached())),
            data_directory=str(self.config.data_directory),
            process=os.getpid(),
            height=driver.state.height,
            view=driver.replica.view,
            state_root=driver.state.root.hex(),
            voter=driver.signer.public in voters,
            voters=len(voters),
            tolerated=voters.faults_tolerated,
            quorum=voters.quorum,
            links=len(links),
            halted=halted,
            uptime_seconds=time.monotonic() - self.started,
            waiting=waiting,
            suspended=suspended,
            disputed=why_disputed(driver.replica),
            unaudited=unaudited(driver.state),
            state=state_of(halted, waiting, behind, ago, suspended),
            decided_seconds_ago=ago,
            behind=behind,
            late=driver.witness.why_late(driver.state.jobs.running()),
        )

    async def _seconds_since_decision(self) -> float | None:
        """Seconds since the last decision; after a restart since the time in its block."""
        driver, at = self.driver, self.driver.witness.last_decision_at
        if at is None:
            last = await trio.to_thread.run_sync(driver.store.decision, driver.state.height)
            at = None if last is None else last.decode().time_ms / 1_000
        return None if at is None else max(0.0, driver.now() - at)

    def _name(self) -> str:
        """What the operator calls this peer now, else what the network knows it as."""
        member = self.driver.state.members.members.get(self.driver.signer.public)
        return self.config.name or (member.name if member else "")

    async def stats(self) -> StatsView:
        driver, traffic = self.driver, self.network.traffic()
        first = driver.witness.first_decision_at
        refused = dict(self.network.refused())
        for reason, count in driver.node.refused.items():
            refused[reason] = refused.get(reason, 0) + count
        evidence = await trio.to_thread.run_sync(driver.store.evidence)
        known = driver.state.audits.standings
        processes = [os.getpid(), self.worker.pid if self.worker else None]
        return StatsView(
            status=await self.status(),
            decisions=driver.witness.decisions,
            decision_ms_p50=_percentile(tuple(driver.witness.decision_seconds), 50),
            decision_ms_p99=_percentile(tuple(driver.witness.decision_seconds), 99),
            seconds_to_first_decision=None if first is None else first - driver.witness.started_at,
            bytes_sent=_by_kind(traffic.sent, traffic.blobs_sent, traffic.reveals_sent),
            bytes_received=_by_kind(traffic.received, traffic.blobs_received, traffic.reveals_received),
            refused=refused,
            evidence=tuple(f"{peer_id(first.signer)}" for first, _ in evidence),
            transactions_pending=len(driver.ledger.pool),
            worker=_worker_state(self.worker),
            memory_mb=sum(process_memory_mb(process) for process in processes if process is not None),
            expelled=tuple(peer_id(key) for key in driver.state.members.members if driver.state.members.is_expelled(key)),
            standing=_standing(driver.signer.public, known[driver.signer.public]) if driver.signer.public in known else None,
        )

    async def peers(self) -> tuple[PeerView, ...]:
        members = self.driver.state.members
        links = {link.peer: link for link in self.network.links()}
        known = sorted(set(members.members) | set(links) | {self.driver.signer.public})
        return tuple(self._peer(key, links.get(key)) for key in known)

    def _peer(self, key: bytes, link: LinkInfo | None) -> PeerView:
        members = self.driver.state.members
        member = members.members.get(key)
        accepted = sum(job.accepted.get(key, 0) for job in self.driver.state.jobs.jobs.values())
        seen = [f"{accepted} proposals accepted"] if accepted else []
        if key in members.standing:
            seen.append(f"stands as a voter: {self._approvals(key)}")
        if wishes := wishes_about(members, key):
            seen.append(f"{wishes} of {VoterSet(members.voters).quorum} want it retired")
        if member and member.retired is not None and key not in members.upcoming:
            seen.append(f"retired at height {member.retired}")
        return PeerView(
            peer=peer_id(key),
            name=member.name if member else "",
            roles=member.roles if member else (),
            member=members.speaks(key),
            voter=key in members.voters,
            leader=key == self.driver.replica.leader,
            me=key == self.driver.signer.public,
            link=_link(link) if link else None,
            approvals=tuple(peer_id(k) for k in members.standing.get(key, ())),
            record=", ".join(seen),
            gone=_gone(member),
        )

    def _approvals(self, candidate: bytes) -> str:
        members = self.driver.state.members
        return f"{len(members.standing[candidate])} of {VoterSet(members.voters).quorum} approvals"

    async def jobs(self) -> tuple[JobView, ...]:
        jobs = sorted(self.driver.state.jobs.jobs.items(), key=lambda item: item[1].started)
        audits = self.driver.state.audits.jobs
        return tuple(_job(key, job, audits.get(key, JobAudits())) for key, job in jobs)

    async def rounds(self, last: int) -> tuple[RoundView, ...]:
        store = self.driver.store
        stored = await trio.to_thread.run_sync(store.rounds, max(1, min(last, ROUNDS_SHOWN_MAX)))
        measured = {job: await trio.to_thread.run_sync(store.measured, job) for job in {item.job for item in stored}}
        views = []
        for item in stored:
            during, after = (measured[item.job].get(number, {}) for number in (item.round, item.round + 1))
            views.append(
                RoundView(
                    job=item.job.hex(),
                    round=item.round,
                    height=item.height,
                    verdicts={peer_id(trainer): verdict for trainer, verdict in item.verdicts.items()},
                    ballots=tuple(peer_id(voter) for voter in item.ballots),
                    stepped=item.stepped,
                    plain_mean=item.stepped and self._is_plain_mean(item),
                    model_root=item.model_root.hex(),
                    held_out_bits_per_byte=after.get("held_out_bits_per_byte"),
                    training_nats=during.get("training_nats"),
                    seconds=during.get("seconds"),
                    decision_ms=during.get("decision_ms"),
                )
            )
        return tuple(views)

    def _is_plain_mean(self, closed: StoredRound) -> bool:
        job = self.driver.state.jobs.jobs.get(closed.job)
        accepted = sum(verdict == Verdict.ACCEPT.label for verdict in closed.verdicts.values())
        return job is not None and is_plain_mean(accepted, (spec := _spec(job)).rule, spec.liars)

    async def audits(self, last: int) -> AuditsView:
        state = self.driver.state
        log = state.audits.log[-max(1, last) :]
        standings = tuple(_standing(key, standing) for key, standing in sorted(state.audits.standings.items()))
        return AuditsView(standings, tuple(_audit(entry, state.members) for entry in log), suspensions(state))

    async def events(self, after: int, wait_seconds: float) -> tuple[EventView, ...]:
        return await self.driver.events.after(after, min(wait_seconds, 60.0))

    # Doing -----------------------------------------------------------------------------------------------------------

    async def train(self, request: TrainRequest) -> str:
        self._require_member()
        try:
            spec = await trio.to_thread.run_sync(self._job_spec, request)
        except OSError as error:  # of the text that was named
            raise UserError(f"{data.shown(request.data)} cannot be read: {error.strerror}; name another file or folder") from None
        transaction = await self.author.submit("job/start", Start(spec.encode()))
        return job_id(self.driver.signer.public, transaction).hex()

    def _job_spec(self, request: TrainRequest) -> JobSpec:
        """Makes the job's blobs: shards, manifest and tokenizer. `UserError` for text or values that cannot be used."""
        said = parse_overrides(request.overrides) | ({"rounds": request.rounds} if request.rounds else {})
        spec = replace(JobSpec(name=request.name or "text", data=bytes(32), liars=self._tolerated()), **completed(said))
        if request.data == LOCAL:
            if request.vocabulary > BYTES:
                raise UserError(f"--vocabulary {request.vocabulary}: with local data the tokens are bytes; leave it out")
            if self.worker is not None and not self.config.local_data:
                raise UserError("this peer has no text of its own: name it with `peer run --local-data PATH`")
            spec = replace(spec, data=None, audit=Audit.OFF).checked()
            if self.worker is not None:
                own = self.config.local_data
                data.require_enough(spec, sum(map(len, data.read_text(Path(own).expanduser()))), own)
            return spec
        keep = self.driver.blobs.add
        if request.data and shards.is_token_folder(Path(request.data).expanduser()):
            return _job_on_tokens(spec, request, keep)
        pieces, bpe = _pieces(request.data), None
        if request.vocabulary > BYTES:
            made = tokenizer.train_bpe(pieces(), request.vocabulary)
            bpe = tokenizer.BpeTokenizer(made)
            spec = replace(spec, tokenizer=keep(made), model=replace(spec.model, vocabulary=request.vocabulary))
        spec.checked()
        manifest = data.split(pieces(), keep)
        data.require_enough(spec, manifest.size, request.data or "the built-in text")
        if bpe is not None:
            manifest = replace(manifest, tokens=self._digest_of_tokens(spec, manifest, bpe))
        return replace(spec, data=keep(manifest.encode())).checked()

    def _digest_of_tokens(self, spec: JobSpec, manifest: data.Manifest, bpe: tokenizer.BpeTokenizer) -> bytes:
        """Once here, so that everybody else can tell that it works on the same ones."""
        with tempfile.TemporaryDirectory(prefix="tokens-", dir=self.driver.store.path.parent) as folder:
            text = Path(folder) / "text"
            data.assemble(manifest, self.driver.blobs.read, text)
            return data.digest_of(data.open_tokens(spec, text, bpe))

    def _tolerated(self) -> int:
        trainers = sum(TRAINER in member.roles for member in self.driver.state.members.members.values())
        return min(VoterSet(self.driver.state.members.voters).faults_tolerated, max(0, (trainers - 1) // 2))

    async def test(self) -> str:
        self._require_member()
        spec = JobSpec(name="test", objective=Objective.SCRATCH, rounds=1, liars=0)
        transaction = await self.author.submit("job/start", Start(spec.encode()))
        return job_id(self.driver.signer.public, transaction).hex()

    async def cancel(self, job: str) -> str:
        running, wanted = self.driver.state.jobs.running(), job.strip()
        fits = (key for key, item in running.items() if wanted == item.name or key.hex().startswith(wanted.lower()))
        found = list(fits) if wanted else []
        if len(found) != 1:
            names = ", ".join(f"{key.hex()[:8]} {item.name!r}" for key, item in running.items()) or "none"
            raise UserError(f"{job!r} fits {len(found)} running jobs (running: {names})")
        await self.author.submit("job/stop", Stop(found[0]))
        after = self.driver.state.jobs.jobs[found[0]]
        if after.phase is Phase.FINISHED:
            return f"job {after.name!r} is ended"
        voters = VoterSet(self.driver.state.members.voters)
        wanted = f"{len(after.stops)} of the {voters.quorum} voters needed want job {after.name!r} to end"
        return f"{wanted}; its author can end it alone, the others have to say the same"

    async def invite(self, days: int, addresses: tuple[str, ...] = ()) -> str:
        if not 1 <= days <= INVITATION_DAYS_MAX:
            raise UserError(f"--days {days} is outside 1..{INVITATION_DAYS_MAX}")
        if self.driver.signer.public not in self.driver.state.members.voters:
            raise UserError("only a voter can invite, and this peer does not vote (`peers` shows who does)")
        decided = await trio.to_thread.run_sync(self.driver.store.decision, self.driver.state.height)
        anchor = Anchor(decided.height, decided.digest) if decided else None
        now_ms = self._now_ms
        expires_ms = now_ms + days * DAY_MS
        made = make_invitation(self.driver.signer, self.genesis, expires_ms, self._addresses(addresses), anchor)
        await self.invited.add(Made(made.invitation, now_ms, made.addresses))  # first: what was handed out can be taken back
        return invitation_text(made)

    @property
    def _now_ms(self) -> int:
        """The later one of this clock and the last block's: an idle network's time stands still."""
        return max(time.time_ns() // 1_000_000, self.driver.state.time_ms)

    async def invitations(self) -> tuple[InvitationView, ...]:
        state = self.driver.state
        return tuple(
            InvitationView(made.token, made.outcome(state), made.made_ms, made.invitation.expires, made.addresses)
            for made in self.invited.made
        )

    async def revoke(self, token: str) -> str:
        made = self.invited.find(token)
        await self.author.submit("member/revoke", Revoke(made.signed))
        return f"invitation {made.token[:8]} is revoked: it admits nobody any more"

    async def connect(self, address: str) -> str:
        dialable(address.rpartition("@")[2], "connect")
        return f"connected to {short_id(await self.network.connect(address))} at {address}"

    def _addresses(self, said: tuple[str, ...]) -> tuple[str, ...]:
        """For an invitation: what the operator names, else where this peer is reached, and others that it has reached itself."""
        if len(said) > ADVERTISED_MAX:
            raise UserError(f"--address: {len(said)} addresses are too many, an invitation holds {ADVERTISED_MAX}")
        for address in said:
            dialable(address, "--address")
        mine = said or self.addresses()
        if not mine:
            known = f"this peer listens on {self.config.listen}, and knows no address of this machine but loopback"
            raise UserError(f"{known}; say where newcomers reach it: `invite --address HOST:PORT`, or the setting `advertise`")
        others = sorted(link.address for link in self.network.links() if link.dialed)
        if not all(_is_local(address) for address in mine):  # whoever joins is on another machine, then
            others = [address for address in others if not _is_local(address)]
        return tuple(dict.fromkeys((*mine, *others)))[:ADVERTISED_MAX]

    async def approve(self, peer: str) -> str:
        candidate = find(peer, self.driver.state.members)
        await self.author.submit("member/approve", Approve(candidate))
        members = self.driver.state.members
        if candidate not in members.standing:
            return f"{short_id(candidate)} has the approvals it needs and votes from the second height on"
        return f"{short_id(candidate)} has {self._approvals(candidate)}"

    async def retire(self, peer: str, lower_tolerance: bool) -> str:
        subject = find(peer, self.driver.state.members)
        before = self.driver.state.members.retiring.get(self.driver.signer.public)
        await self.author.submit("member/retire", Retire(subject, lower_tolerance, self._now_ms + WISH_DAYS * DAY_MS))
        members = self.driver.state.members
        if self.driver.signer.public not in members.retiring:  # they go when they have acted
            text = f"{short_id(subject)} is retired: it loses its vote and roles, nothing waits for it, and it stays a member"
            return f"{text}. Should it come back, it trains at once, and votes when people have approved it anew"
        wanted = f"{wishes_about(members, subject)} of the {VoterSet(members.voters).quorum} voters needed want"
        text = f"{wanted} {short_id(subject)} retired; each wish counts for {WISH_DAYS} days"
        if before is not None and before.subject != subject:
            text += f". Your wish about {short_id(before.subject)} is withdrawn by this one"
        return text

    async def challenge(self, trainer: str, round: int | None) -> str:
        self._require_member()
        state, accused = self.driver.state, find(trainer, self.driver.state.members)
        current = state.members.current
        found = [
            due
            for due in self.driver.rules.audits.challengeable(self.driver.signer.public, state)
            if current(due.trainer) == current(accused) and round in (None, due.round)
        ]
        if not found:
            which = f"proposal of {short_id(accused)}" + ("" if round is None else f" in round {round}")
            must = "be accepted in a job with audit=sampled, its window open, its trainer not suspended since"
            me = f"in good standing, with no challenge spent on that round and fewer than {CHALLENGES_OPEN_MAX} disputes open"
            raise UserError(f"no {which} can be challenged from here now: it must {must}, and this peer a re-executor {me}")
        try:
            return await self.challenge_due(max(found, key=lambda due: (state.jobs.jobs[due.job].started, due.round)))
        except FolkmootError as error:
            raise UserError(str(error)) from None

    async def leave(self) -> str:
        warning = warning_for_removal(len(self.driver.state.members.voters))
        self.set_standing(False)  # first: the peer must not ask for its vote again as soon as it is without
        try:
            await self.author.submit("member/leave", Leave())
        except UserError:
            self.set_standing(self.config.stand)
            raise
        text = "this peer stops voting in two heights; start it with --no-stand, or it asks for its vote again"
        return text + (f"; {warning}" if warning else "")

    async def sample(self, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        role = self.driver.workshop.role
        if not isinstance(role, Trainer):
            raise UserError("this peer has no worker to generate with: ask one with --role trainer")
        key, job = self._latest_job()
        opened = self.driver.workshop.view((key, job.round), job)
        directory = str(self.driver.host.directory(key, job.round))
        done = await role.ask(opened, tasks.Generate(key, directory, prompt, tokens, temperature, seed))
        return done.text.decode(errors="replace")

    def _latest_job(self) -> tuple[bytes, Job]:
        jobs = [
            (job.started, key, job)
            for key, job in self.driver.state.jobs.jobs.items()
            if _spec(job).objective is Objective.LANGUAGE
        ]
        if not jobs:
            raise UserError("no model has been trained yet: start one with `train`")
        _, key, job = max(jobs, key=lambda item: item[:2])
        return key, job

    async def export(self, path: str) -> ExportView:
        """What others hold of the updates that this peer lacks is fetched first, one by one: votes come before."""
        driver, folder = self.driver, Path(path)
        await trio.to_thread.run_sync(exported_state, driver.store, driver.host, self.genesis, folder)
        missing = await trio.to_thread.run_sync(missing_payloads, driver.store, driver.blobs)
        with trio.move_on_after(FETCHING_SECONDS_MAX):
            for digest, size in missing.items():
                with trio.move_on_after(FETCHING_ONE_SECONDS_MAX):
                    await driver.network.fetch(digest, size, ())
        return await trio.to_thread.run_sync(export, driver.store, driver.blobs, driver.host, self.genesis, folder)

    async def stop(self) -> None:
        self.stop_daemon()

    def _require_member(self) -> None:
        members, me = self.driver.state.members, self.driver.signer.public
        if members.is_expelled(me):
            raise UserError("this peer was expelled: the network has proof that its key signed what no honest peer signs")
        if not members.speaks(me):
            raise UserError("this peer is not a member yet: it follows the log until its admission is decided")


def parse_overrides(texts: dict[str, str]) -> dict[str, Any]:
    """Typed values of job fields that a person typed; model fields as `model.width`."""
    overrides: dict[str, Any] = {}
    model: dict[str, Any] = {}
    for name, text in texts.items():
        owner, target, field = (ModelSpec, model, name[6:]) if name.startswith("model.") else (JobSpec, overrides, name)
        kinds = get_type_hints(owner)
        if field not in kinds or field in NOT_SET_BY_NAME:
            free = [
                *sorted(set(get_type_hints(JobSpec)) - NOT_SET_BY_NAME),
                *(f"model.{name}" for name in get_type_hints(ModelSpec)),
            ]
            raise UserError(f"{name!r} is not a field of a job{nearest(name, free)}")
        target[field] = _typed(kinds[field], name, text)
    if model:
        overrides["model"] = replace(ModelSpec(), **model)
    return overrides


def _typed(kind: Any, name: str, text: str) -> Any:
    if type(None) in get_args(kind):
        if text == "none":
            return None
        kind = get_args(kind)[0]
    try:
        value = kind(text)
    except ValueError:
        if issubclass(kind, enum.Enum):
            raise UserError(f"{name} = {text!r} is none of {', '.join(kind)}") from None
        raise UserError(f"{name} = {text!r} is not a {'whole ' if kind is int else ''}number") from None
    if kind is int and abs(value) > codec.INTEGER_MAX:
        raise UserError(f"{name} = {data.shown(text)} is too large: no whole number is beyond {codec.INTEGER_MAX}")
    return value


def _job_on_tokens(spec: JobSpec, request: TrainRequest, keep: Callable[[bytes], bytes]) -> JobSpec:
    """A job whose text is tokenized already, with that tokenizer and its vocabulary."""
    if request.vocabulary:
        raise UserError(f"--vocabulary {request.vocabulary}: {request.data} is tokenized already, and brings its own")
    folder = shards.open_folder(Path(request.data).expanduser())
    said = request.overrides.get("model.vocabulary")
    if said is not None and spec.model.vocabulary != folder.vocabulary:
        raise UserError(f"--set model.vocabulary={said}: the tokens of {request.data} are of {folder.vocabulary}; leave it out")
    made = None if folder.tokenizer is None else keep(folder.tokenizer)
    spec = replace(spec, tokenizer=made, model=replace(spec.model, vocabulary=folder.vocabulary)).checked()
    if folder.tokens < data.bytes_needed(spec):
        few = f"{request.data} has {folder.tokens} tokens, but context {spec.model.context}"
        raise UserError(f"{few} needs at least {data.bytes_needed(spec)}; give more")
    manifest = data.split(folder.pieces(), keep, tokenized=True)
    return replace(spec, data=keep(manifest.encode())).checked()


def _pieces(source: str) -> Callable[[], Any]:
    if source == BUILT_IN:
        return lambda: iter([default_text.default_text()])
    return lambda: data.read_text(Path(source).expanduser())


def _spec(job: Job) -> JobSpec:
    return JobSpec.decode(job.spec)


def unaudited(state: State) -> tuple[str, ...]:
    """Names of running jobs whose updates nobody re-executes, neither before a ballot nor after a round."""
    return tuple(job.name for key, job in state.jobs.running().items() if not job.audited and key not in state.audits.jobs)


def suspensions(state: State) -> tuple[SuspensionView, ...]:
    """Who may not train in running jobs, and why, however much was logged since."""
    found = []
    for key, job in state.jobs.running().items():
        audits = state.audits.jobs.get(key, JobAudits())
        for trainer, until in sorted(audits.suspended.items()):
            if until > job.round:
                found.append(SuspensionView(until, _audit(audits.causes[trainer], state.members)))
    return tuple(found)


def _standing(key: bytes, standing: Standing) -> StandingView:
    return StandingView(peer_id(key), **asdict(standing))


def _audit(entry: Entry, members: MembersState) -> AuditView:
    return AuditView(
        height=entry.height,
        job=entry.job.hex(),
        round=entry.round,
        trainer=peer_id(members.current(entry.trainer)),
        auditor=peer_id(members.current(entry.auditor)),
        step=entry.step,
        result=entry.result.value,
        finding="" if entry.finding is None else entry.finding.label,
        relative_error=None if entry.relative_error_ppm is None else entry.relative_error_ppm / 1e6,
    )


def _job(key: bytes, job: Job, audits: JobAudits) -> JobView:
    spec = _spec(job)
    return JobView(
        job=key.hex(),
        name=job.name,
        objective=spec.objective.value,
        state=job.phase.value,
        round=job.round,
        rounds=job.rounds,
        model_root=job.model_root.hex(),
        audit=spec.audit.value,
        data=spec.data.hex() if spec.data else "" if spec.objective is Objective.SCRATCH else LOCAL,
        accepted={peer_id(trainer): count for trainer, count in job.accepted.items()},
        rejected={peer_id(trainer): dict(reasons) for trainer, reasons in job.rejected.items()},
        started_height=job.started,
        suspended={peer_id(trainer): until for trainer, until in audits.suspended.items() if until > job.round},
        audits_open=_open_audits(audits),
    )


def _open_audits(audits: JobAudits) -> int:
    reports = [drawn for of in audits.rounds.values() for drawn in of.drawn.values()]
    return sum(len(drawn.steps) for drawn in reports) + len(audits.disputes)


def _is_local(address: str) -> bool:
    return is_loopback(parse_address(address)[0])


def _worker_state(worker: Worker | None) -> str:
    if worker is None:
        return ""
    restarts = f", restarted {worker.restarts} times" if worker.restarts else ""
    return (f"{worker.ready.engine}, {worker.ready.threads} threads" if worker.ready else "starting") + restarts


def _gone(member: Member | None) -> str:
    if member is None:
        return ""
    if member.expelled is not None:
        return f"expelled at height {member.expelled}"
    return f"now {short_id(member.successor)}" if member.successor else ""


def _dial(dial: DialInfo) -> DialView:
    peer = peer_id(dial.peer) if dial.peer is not None else ""
    return DialView(dial.address, peer, dial.reason, dial.tries, dial.next_seconds, str(dial))


def _link(link: LinkInfo) -> LinkView:
    return LinkView(
        peer=peer_id(link.peer),
        address=link.address,
        outgoing=link.dialed,
        connected_seconds=max(0.0, trio.current_time() - link.connected_since),
        round_trip_ms=None if link.round_trip_seconds is None else 1_000 * link.round_trip_seconds,
        bytes_sent=sum(link.sent),
        bytes_received=sum(link.received),
    )


def _by_kind(counts: tuple[int, int, int], blobs: int, reveals: int) -> dict[str, int]:
    return {priority.name.lower(): counts[priority] for priority in Priority} | {"blobs": blobs, "reveals": reveals}


def _percentile(seconds: Sequence[float], percent: int) -> float | None:
    """In milliseconds; the nearest rank."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return 1_000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
