"""Known peers: invitations and their standing, remembered addresses, and the peer that a typed name denotes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock

from features.name_resolution import resolve_peer
from features.peer_names import SHORT_ID_LENGTH, PeerNames
from ledger.core.genesis import Founder, Genesis
from ledger.members import Invitation, Member, MembersState, ResignAsVoter, RevokeInvitation, token_preimage
from peer.api.rpc_handlers import make_peer_api
from peer.api.running_peer import RunningPeer
from peer.runtime.membership.membership import PeerClassifier
from peer.settings import data_directory, invitation
from peer.settings.data_directory import ADDRESSES_KEPT, SAVE_SECONDS
from peer.settings.invitation import (
    DAY_MS,
    InvitationBook,
    IssuedInvitation,
    invitation_text,
    make_admission,
    make_invitation,
    parse_invitation,
)
from protocol.api import INVITATION_DAYS_MAX
from protocol.errors import RemoteProtocolError, StorageError, UserError
from protocol.identity import Identity, peer_id, short_id, sign_message
from protocol.messages import GuestInvitation
from tests.ledger.world import FAR_MS, MODULES, PEOPLE, TOKEN, World
from tests.peer.network import network, running
from tests.sim.keys import FastSigner, FastVerifier
from transport.peer_policy import PeerClass


@asynccontextmanager
async def inviter(folder: Path, observers: int = 0) -> AsyncIterator[tuple[RunningPeer, RunningPeer]]:
    """Yield the only voter and the last peer, which may be the same one."""
    async with network(folder, 1, observers) as founders:
        first, last = (running(seat) for seat in (founders.seats[0], founders.seats[-1]))
        first.addresses = last.addresses = lambda: ("192.0.2.7:7700",)
        yield first, last


async def test_what_a_peer_made_is_listed_without_its_secret(tmp_path: Path) -> None:
    async with inviter(tmp_path) as (peer, _):
        api = make_peer_api(peer)
        text = await api.create_invitation(3)
        (view,) = await api.invitations()
        token = Identity(parse_invitation(text).token_seed)
        assert (view.token, view.state, view.addresses) == (peer_id(token.public), "open", ("192.0.2.7:7700",))
        assert view.expires_ms - view.made_ms == 3 * DAY_MS
        stored = (peer.driver.store.path.parent / "invitations").read_bytes()
        assert token.seed not in stored and token.public in stored


async def test_a_revoked_invitation_admits_nobody_and_says_so_in_the_list(tmp_path: Path) -> None:
    async with inviter(tmp_path, observers=1) as (peer, newcomer):
        api = make_peer_api(peer)
        texts = [await api.create_invitation(7) for _ in range(2)]
        first, second = await api.invitations()
        assert (
            await api.revoke_invitation(first.token[:6])
            == f"invitation {first.token[:8]} is revoked: it admits no member from now on"
        )
        assert [view.state for view in await api.invitations()] == ["revoked", "open"]
        with pytest.raises(UserError, match="was revoked, so"):
            await api.revoke_invitation(first.token)
        revoked, still_open = (make_admission(parse_invitation(text), newcomer.driver.signer.public, "ben") for text in texts)
        with pytest.raises(UserError, match="the invitation was revoked: ask for a new one"):
            await newcomer.submitter.submit("member/admit", revoked)
        await newcomer.submitter.submit("member/admit", still_open)
        assert [view.state for view in await api.invitations()] == ["revoked", "used"]
        with pytest.raises(UserError, match="was used, so"):
            await api.revoke_invitation(second.token)
        with pytest.raises(UserError, match="this peer is not a voter, so it cannot invite"):
            await make_peer_api(newcomer).create_invitation(7)


@pytest.mark.parametrize("text", ["", "1", "folkmoot1:abc"])  # no token has a 1, and all other prefixes may be valid
async def test_what_names_no_invitation_or_two_is_refused(tmp_path: Path, text: str) -> None:
    async with inviter(tmp_path) as (peer, _):
        api = make_peer_api(peer)
        for _ in range(2):
            await api.create_invitation(7)
        with pytest.raises(UserError, match=r"unknown invitation|matches 2 invitations"):
            await api.revoke_invitation(text)


@pytest.mark.parametrize("days", [0, -1, INVITATION_DAYS_MAX + 1, 2**40])
async def test_how_long_an_invitation_lives_is_bounded(tmp_path: Path, days: int) -> None:
    async with inviter(tmp_path) as (peer, _):
        api = make_peer_api(peer)
        with pytest.raises(UserError, match=rf"--days {days} is outside 1..90"):
            await api.create_invitation(days)
        assert await api.invitations() == ()


@pytest.fixture
def world() -> World:
    return World()


def test_what_became_of_an_invitation_follows_from_the_state(world: World) -> None:
    me, stranger = Identity(bytes(32)), world.genesis.voters.keys[0]

    def made(signed_by: Identity, expires: int) -> IssuedInvitation:
        return IssuedInvitation(sign_message(signed_by, world.chain, Invitation(stranger, expires)), 1, ())

    assert made(me, world.state.time_ms - 1).outcome(world.state) == "expired"
    assert made(me, world.state.time_ms).outcome(world.state) == "without effect: its key does not vote"


async def test_the_book_is_there_after_a_restart_and_forgets_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invitation, "INVITATIONS_KEPT", 2)
    book = InvitationBook(tmp_path / "invitations")
    made = [
        IssuedInvitation(sign_message(Identity(bytes(32)), bytes(32), Invitation(bytes([n]) * 32, n)), n, ("a:1",))
        for n in range(3)
    ]
    for item in made:
        await book.add_invitation(item)
    assert book.issued == InvitationBook(tmp_path / "invitations").issued == tuple(made[1:])
    assert (tmp_path / "invitations").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"\x91\x93", b"\x91\x93\x93\xc4\x01a\xc4\x01a\xc4\x01a\x01\x90"])
def test_a_damaged_book_is_one_line_that_says_what_to_do(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "invitations"
    file.write_bytes(damage)
    with pytest.raises(StorageError, match=r"invitations is damaged \(.*: move it away"):
        InvitationBook(file)


async def test_a_person_says_where_newcomers_dial(tmp_path: Path) -> None:
    async with inviter(tmp_path) as (peer, _):
        api = make_peer_api(peer)
        made = parse_invitation(await api.create_invitation(7, ("peer.lab:7700", "[2001:db8::7]:1", "peer.lab:7700")))
        assert made.addresses == ("peer.lab:7700", "[2001:db8::7]:1")
        for said, why in (
            (("peer.lab:0",), "port 0"),
            (("peer.lab",), "not an address"),
            (("a:1",) * 9, "at most"),
        ):
            with pytest.raises(UserError, match=f"^--address: .*{why}"):
                await api.create_invitation(7, said)
        assert len(peer.invitations.issued) == 1


async def test_a_machine_that_nobody_reaches_invites_nobody_unless_told_where(tmp_path: Path) -> None:
    async with inviter(tmp_path) as (peer, _):
        api = make_peer_api(peer)
        peer.addresses = tuple
        with pytest.raises(UserError, match=r"only loopback addresses of this machine.*invite --address HOST:PORT.*advertise"):
            await api.create_invitation(7, ())
        assert peer.invitations.issued == ()
        assert parse_invitation(await api.create_invitation(7, ("10.0.0.1:7700",))).addresses == ("10.0.0.1:7700",)


@pytest.mark.parametrize("address", ["a b:1", "peer.lab:0"])
def test_an_invitation_to_dial_what_is_no_address_is_refused(address: str) -> None:
    made = make_invitation(
        Identity(bytes(32)),
        Genesis("lab", 1, bytes(16), {Identity(bytes(32)).public: Founder("anna", ())}, MODULES),
        1,
        (address,),
    )
    with pytest.raises(UserError, match=address):
        parse_invitation(invitation_text(made))


ME, OTHER, NEW, THIRD = PEOPLE[0], PEOPLE[1], PEOPLE[8], PEOPLE[9]


def standings(world: World, me: FastSigner = ME) -> PeerClassifier:
    return PeerClassifier(me.public, world.chain, FastVerifier(), world.ledger.applied)


def shown(world: World, holder: FastSigner, by: FastSigner = ME, expires: int = FAR_MS) -> GuestInvitation:
    return GuestInvitation(world.invitation(by, TOKEN, expires), TOKEN.sign(token_preimage(world.chain, holder.public)))


def test_whoever_shows_an_open_invitation_is_a_guest_until_it_is_used_and_a_member_then(world: World) -> None:
    of = standings(world)
    assert of.classify(OTHER.public) is PeerClass.VOTER
    assert of.classify(NEW.public) is PeerClass.STRANGER
    of.admit_guest(NEW.public, shown(world, NEW))
    assert of.classify(NEW.public) is PeerClass.GUEST
    world.decide(world.admission(NEW))
    assert of.classify(NEW.public) is PeerClass.MEMBER


def test_one_invitation_makes_one_guest(world: World) -> None:
    of = standings(world)
    for holder in (NEW, THIRD):
        of.admit_guest(holder.public, shown(world, holder))
    assert (of.classify(NEW.public), of.classify(THIRD.public)) == (PeerClass.STRANGER, PeerClass.GUEST)


@pytest.mark.parametrize("wrong", ["a member that does not vote", "revoked", "expired"])
def test_an_invitation_that_admits_nobody_makes_no_guest(wrong: str, world: World) -> None:
    of, by, expires = standings(world), ME, FAR_MS
    if wrong == "revoked":
        world.decide(world.tx(ME, "member/revoke", RevokeInvitation(world.invitation())))
    elif wrong == "expired":
        expires = 1
        world.decide()
    else:
        by = THIRD
    of.admit_guest(NEW.public, shown(world, NEW, by, expires))
    assert of.classify(NEW.public) is PeerClass.STRANGER


def test_an_invitation_in_the_hands_of_somebody_else_is_no_honest_peers(world: World) -> None:
    of = standings(world)
    with pytest.raises(RemoteProtocolError) as caught:
        of.admit_guest(THIRD.public, shown(world, NEW))
    assert caught.value.reason == "bad-signature"
    assert of.classify(THIRD.public) is PeerClass.STRANGER


def test_a_guest_whose_invitation_is_revoked_is_a_stranger_again(world: World) -> None:
    of = standings(world)
    of.admit_guest(NEW.public, shown(world, NEW))
    world.decide(world.tx(ME, "member/revoke", RevokeInvitation(world.invitation())))
    assert of.classify(NEW.public) is PeerClass.STRANGER


def test_to_a_newcomer_nobody_is_a_stranger_and_a_voter_that_left_stays_a_member(world: World) -> None:
    assert standings(world, NEW).classify(THIRD.public) is PeerClass.MEMBER
    of = standings(world)
    world.decide(world.tx(OTHER, "member/resign", ResignAsVoter()))
    for _ in range(3):
        world.decide()
    assert of.classify(OTHER.public) is PeerClass.MEMBER


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def entry(number: int, port: int) -> str:
    return f"{peer_id(key(number))}@127.0.0.1:{port}"


async def test_members_addresses_are_on_disk_soon_and_forgotten_ones_stay(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)  # virtual time does not wait for threads
    file, known, gone = tmp_path / "addresses", {key(1): "127.0.0.1:1"}, set[bytes]()
    assert data_directory.load_addresses(file) == ()
    async with trio.open_nursery() as nursery:
        members = SimpleNamespace(members=known, is_departed_key=gone.__contains__)
        applied = SimpleNamespace(current=SimpleNamespace(members=members))
        nursery.start_soon(data_directory.save_addresses_periodically, file, lambda: known, applied)
        await trio.sleep(SAVE_SECONDS / 2)
        assert data_directory.load_addresses(file) == (entry(1, 1),)
        known.clear()
        known |= {key(2): "127.0.0.1:2"}
        await trio.sleep(SAVE_SECONDS)
        assert set(data_directory.load_addresses(file)) == {entry(1, 1), entry(2, 2)}, (
            "who is away now may be the one to dial later"
        )
        known[key(1)] = "127.0.0.1:9"
        await trio.sleep(SAVE_SECONDS)
        assert set(data_directory.load_addresses(file)) == {entry(1, 9), entry(2, 2)}, "one address a peer, the last one"
        del known[key(1)]
        known[key(3)] = "127.0.0.1:9"
        await trio.sleep(SAVE_SECONDS)
        assert set(data_directory.load_addresses(file)) == {entry(3, 9), entry(2, 2)}, "one peer an address, the last one"
        known |= {key(number): f"127.0.0.1:{number}" for number in range(3, 3 + 2 * ADDRESSES_KEPT)}
        await trio.sleep(SAVE_SECONDS)
        assert len(data_directory.load_addresses(file)) == ADDRESSES_KEPT
        for number in range(4, 3 + 2 * ADDRESSES_KEPT):
            del known[key(number)]
        assert {entry(2, 2), entry(4, 4)} <= set(data_directory.load_addresses(file))
        gone |= {key(2), key(4)}
        await trio.sleep(SAVE_SECONDS)
        assert not {entry(2, 2), entry(4, 4)} & set(data_directory.load_addresses(file)), "one that is linked, and one of earlier"
        nursery.cancel_scope.cancel()


def test_what_cannot_be_read_of_the_file_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    lines = (entry(1, 1), f"{peer_id(key(2))}@[fe80::1%a b]:7700", "nonsense", f"nobody@{entry(3, 3)}", "", entry(4, 4))
    file.write_bytes("".join(f"{line}\n" for line in lines).encode() + b"\xff\xfe\n")
    told: list[str] = []
    assert data_directory.load_addresses(file, told.append) == (entry(1, 1), entry(4, 4))
    (line,) = told
    assert str(file) in line and "5 lines" in line and "\n" not in line
    file.write_text(f"{entry(1, 1)}\n")
    data_directory.load_addresses(file, told.append)
    assert len(told) == 1


KEYS = [person.public for person in PEOPLE[:4]]


def known(*names: str) -> MembersState:
    members = World().state.members
    called = {key: replace(members.members[key], name=name) for key, name in zip(KEYS, names, strict=False)}
    return replace(members, members={**members.members, **called})


def test_a_name_is_enough_and_so_are_the_first_letters_of_an_id() -> None:
    members = known("anna", "ben", "carl ä", "dora")
    assert [resolve_peer(text, members) for text in (" ben ", "carl ä")] == [KEYS[1], KEYS[2]]
    assert resolve_peer(short_id(KEYS[3]).upper(), members) == resolve_peer(peer_id(KEYS[3]), members) == KEYS[3]


def test_a_name_of_two_is_refused_with_the_ids_of_both() -> None:
    with pytest.raises(
        UserError, match=rf"'ben' matches 2 members: .*{short_id(KEYS[1])} is called ben.*; type more of the peer id"
    ):
        resolve_peer("ben", known("anna", "ben", "ben", "dora"))


@pytest.mark.parametrize("text", ["", " ", "xyz", "Ben"])
def test_what_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="unknown member"):
        resolve_peer(text, known("anna", "ben"))


def test_whoever_takes_anothers_id_for_a_name_is_never_meant_by_it() -> None:
    members = known("anna", peer_id(KEYS[0]), short_id(KEYS[0]))
    assert resolve_peer(peer_id(KEYS[0]), members) == KEYS[0]
    with pytest.raises(UserError, match="matches 2 members"):
        resolve_peer(short_id(KEYS[0]), members)
    stranger = PEOPLE[9].public
    assert resolve_peer(peer_id(stranger), known(peer_id(stranger))) == stranger


def test_a_key_that_was_changed_means_its_owner_and_an_expelled_one_has_no_name() -> None:
    world = World()
    world.decide(world.rotation(PEOPLE[0], PEOPLE[8]))
    assert resolve_peer(short_id(KEYS[0]), world.state.members) == PEOPLE[8].public
    members = known("anna", "ben")
    members = replace(members, members={**members.members, KEYS[1]: replace(members.members[KEYS[1]], expelled=3)})
    with pytest.raises(UserError, match="unknown member 'ben'"):
        resolve_peer("ben", members)
    assert resolve_peer(short_id(KEYS[1]), members) == KEYS[1]


def test_a_long_list_of_namesakes_is_cut() -> None:
    world = World(voters=12)
    with pytest.raises(UserError) as caught:
        resolve_peer("founder", world.state.members)
    assert "matches 12 members" in str(caught.value) and str(caught.value).count("founder") == 9 and ", …;" in str(caught.value)


@pytest.mark.parametrize("characters", [1, 6, SHORT_ID_LENGTH - 1, SHORT_ID_LENGTH, SHORT_ID_LENGTH + 1, 20, 51, 52])
@pytest.mark.parametrize("change", [str, str.upper])
def test_no_advice_names_a_peer_as_another_s_id_reads(characters: int, change: Callable[[str], str]) -> None:
    """Commands take such a name as the id or its prefix, so the advice would act on the peer that the liar chose."""
    victim, liar = PEOPLE[0].public, PEOPLE[1].public
    table = {victim: Member("anna", (), 0, None, 0), liar: Member(change(peer_id(victim)[:characters]), (), 0, None, 0)}
    members = MembersState(table, (victim,), (victim,), (victim,))
    assert short_id(liar) in PeerNames(present_of(members))[peer_id(liar)]
    advice = PeerNames(present_of(members)).replace_ids(f"to agree, run `peer retire {short_id(liar)}`")
    assert resolve_peer(advice.split("`")[1].split()[-1], members) == liar


def present_of(members: MembersState) -> dict[str, str]:
    return {peer_id(key): member.name for key, member in members.members.items()}


def test_an_id_of_nobody_is_no_name_either() -> None:
    me = PEOPLE[0].public
    assert (
        short_id(me)
        in PeerNames(present_of(MembersState({me: Member(peer_id(PEOPLE[5].public), (), 0, None, 0)}, (me,), (me,), (me,))))[
            peer_id(me)
        ]
    )
