"""Members, their roles and nonces, invitations, approvals, and the voter sets of the next two heights.

A member's key loses everything but its vote at once when the member is expelled, is retired or rotates to another key. The vote
ends with a change of the voter sets. At most max(1, f) changes act per block, in this order: expulsions; rotations; leaves and
retirements in order of arrival; joins. A change that is decided in block h acts at h+2.

Open rounds keep the voters and trainers with which they were opened. Ballots of such a key still count in them while the
present voters can close them (`ledger.jobs`). The next rounds open without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, NamedTuple

from consensus.voter_set import VoterSet, faults_tolerated
from ledger.core.genesis import Genesis, Roles, check_roles
from ledger.core.module import BlockContext, DecodedTransaction, Module, Refused, StateChange, StateReader
from protocol.codec import Between, Count, Digest, Key, Length, SignatureBytes
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, open_signed, short_id
from protocol.limits import MEMBERS_MAX, VOTERS_MAX
from protocol.messages import Name, Transaction
from protocol.name_validation import check_name

ROTATIONS_MAX = 16  # rotations of one member's key: old keys stay in the table of members, which no single member may fill
PRESENT_MEMBERS_MAX = MEMBERS_MAX * 2 // 5  # members of a network, each counted once, under its present key
# Unexpired invitations that one voter has revoked. Each is dropped when it expires, so no voter fills the table of the others.
REVOKED_INVITATIONS_MAX = 64
# Old keys in the table of members: beyond this number, only voters can rotate.
OLD_KEYS_MAX = MEMBERS_MAX - PRESENT_MEMBERS_MAX - VOTERS_MAX * ROTATIONS_MAX


@dataclass(frozen=True, slots=True)
class Invitation:
    """A voter's signed permission for the holder of `token`'s secret key to become a member, once."""

    TAG: ClassVar[str] = "invitation"
    token: Key
    expires: Count  # milliseconds since the Unix epoch; admits members while the parent block's time is not later


@dataclass(frozen=True, slots=True)
class AdmitMember:
    """`member/admit`, signed by the new member itself. The token's signature binds the invitation to the new member's key."""

    invitation: Signed
    token_signature: SignatureBytes  # signature of the token's key over `token_preimage`
    name: Name
    roles: Roles


@dataclass(frozen=True, slots=True)
class RevokeInvitation:
    """`member/revoke`, by the voter that signed the invitation: it no longer admits anyone."""

    invitation: Signed


@dataclass(frozen=True, slots=True)
class RegisterRoles:
    """`member/register`: the author's roles from now on."""

    roles: Roles


@dataclass(frozen=True, slots=True)
class RenameMember:
    """`member/rename`: the author's new name. Names need not be unique."""

    name: Name


@dataclass(frozen=True, slots=True)
class StandAsVoter:
    """`member/stand`: the author has caught up, proves it with a recent state root, and asks to become a voter."""

    height: Count
    state_root: Digest


@dataclass(frozen=True, slots=True)
class ApproveVoter:
    """`member/approve`, by a voter: this candidate may become a voter."""

    candidate: Key


@dataclass(frozen=True, slots=True)
class ResignAsVoter:
    """`member/resign`: the author stops voting."""


@dataclass(frozen=True, slots=True)
class RetireMember:
    """`member/retire`, by a voter: a vote to retire a member whose peer is gone.

    It replaces the voter's former vote to retire a member.
    """

    subject: Key
    lower_tolerance: bool  # True: the vote counts even if fewer faulty voters are tolerated without the subject
    expires: Count  # milliseconds since the Unix epoch; the vote counts while the parent block's time is not later


@dataclass(frozen=True, slots=True)
class RotateKey:
    """`member/rotate`, signed by the old key: the author's key becomes `new_key`."""

    new_key: Key
    signature: SignatureBytes  # the new key's signature over `rotation_preimage`


@dataclass(frozen=True, slots=True)
class Member:
    """One key of a member. The key stays in the table for ever: an expelled or rotated key is never admitted again."""

    name: Name
    roles: Roles
    admitted: Count  # height of the block that admitted the key; 0 for founders
    invited_by: Key | None
    nonce: Count  # nonce of its last decided transaction
    rotations: Annotated[int, Between(0, ROTATIONS_MAX)] = 0  # number of keys that the member had before this one
    successor: Key | None = None  # next key of the member after a rotation
    expelled: Count | None = None  # height of the block with the evidence that expelled the key
    # Height at which a quorum last retired the member; afterwards only people approve it as a voter, no policy.
    retired: Count | None = None


@dataclass(frozen=True, slots=True)
class MembersState:
    members: Annotated[dict[Key, Member], Length(0, MEMBERS_MAX)]
    previous: Annotated[tuple[Key, ...], Length(1, VOTERS_MAX)]  # voters that decided this height
    voters: Annotated[tuple[Key, ...], Length(1, VOTERS_MAX)]  # voters of the next height
    upcoming: Annotated[tuple[Key, ...], Length(1, VOTERS_MAX)]  # voters of the height after the next one
    candidates: Annotated[dict[Key, tuple[Key, ...]], Length(0, MEMBERS_MAX)] = field(
        default_factory=dict
    )  # candidate -> voters that approve it
    resigning_voters: Annotated[tuple[Key, ...], Length(0, VOTERS_MAX)] = ()
    # Token of a used invitation -> expiry.
    used_tokens: Annotated[dict[Key, Count], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    revoked_tokens: Annotated[
        dict[Key, Annotated[dict[Key, Count], Length(1, REVOKED_INVITATIONS_MAX)]], Length(0, PRESENT_MEMBERS_MAX)
    ] = field(default_factory=dict)  # voter -> token of an invitation that the voter signed and revoked -> expiry
    retirement_votes: Annotated[dict[Key, RetireMember], Length(0, VOTERS_MAX)] = field(default_factory=dict)  # voter -> its vote

    def is_current_key(self, key: bytes) -> bool:
        """Return whether this is the present key of a member."""
        member = self.members.get(key)
        return member is not None and member.expelled is None and member.successor is None

    def may_be_awaited(self, key: bytes) -> bool:
        """Return whether a round may wait for this present key: its member was not retired, or has registered or stood again."""
        member = self.members.get(key)
        was_retired = member is not None and member.retired is not None
        return self.is_current_key(key) and not (was_retired and self.has_no_duties(key))

    def is_departed_key(self, key: bytes) -> bool:
        """Return whether no peer waits for this known key: the key was replaced, or its member has no duties."""
        return key in self.members and (not self.is_current_key(key) or self.has_no_duties(key))

    def has_no_duties(self, key: bytes) -> bool:
        """Return whether this member is not a voter, not a candidate, and has no role."""
        return key not in self.upcoming and key not in self.candidates and not self.members[key].roles

    def current_key(self, key: bytes) -> bytes:
        """Return the present key of the member that has or had this key, after at most `ROTATIONS_MAX` rotations."""
        member = self.members.get(key)
        return key if member is None or member.successor is None else self.current_key(member.successor)

    def is_expelled(self, key: bytes) -> bool:
        member = self.members.get(key)
        return member is not None and member.expelled is not None

    @property
    def round_voters(self) -> tuple[bytes, ...]:
        """The voters of a round that opens now: the present keys of the next height's voters, without expelled ones.

        If all of these are expelled, return the voters of the height after the next. One of them remains, because the last
        voter is never expelled.
        """
        for keys in (self.voters, self.upcoming):
            left = sorted(self.current_key(key) for key in keys if not self.is_expelled(key))
            if left:
                return tuple(left)
        raise AssertionError("a voter set has a member")


def token_preimage(chain_id: bytes, newcomer: bytes) -> bytes:
    return b"folkmoot/token\x00" + chain_id + newcomer


def rotation_preimage(chain_id: bytes, old_key: bytes) -> bytes:
    return b"folkmoot/rotation\x00" + chain_id + old_key


MemberTransaction = (
    AdmitMember
    | RevokeInvitation
    | RegisterRoles
    | RenameMember
    | StandAsVoter
    | ApproveVoter
    | ResignAsVoter
    | RetireMember
    | RotateKey
)
ADMIT_KIND = "member/admit"  # kind of the only transaction whose author is not a member yet
MEMBER_TRANSACTIONS: dict[str, type[MemberTransaction]] = {
    ADMIT_KIND: AdmitMember,
    "member/revoke": RevokeInvitation,
    "member/register": RegisterRoles,
    "member/rename": RenameMember,
    "member/stand": StandAsVoter,
    "member/approve": ApproveVoter,
    "member/resign": ResignAsVoter,
    "member/retire": RetireMember,
    "member/rotate": RotateKey,
}


@dataclass(frozen=True, slots=True)
class MemberExpelled:
    """A fact: the block's evidence expels the member with this key."""

    key: bytes


@dataclass(frozen=True, slots=True)
class MemberRekeyed:
    """A fact: a member has rotated from this key to another one."""

    old: bytes
    new: bytes


class MembersModule(Module[MembersState]):
    name = "members"
    contents = MEMBER_TRANSACTIONS
    # Cost of each transaction, in signature checks. Each one copies the table of members, and `member/admit` and
    # `member/rotate` read all its rows.
    costs: ClassVar[Mapping[str, int]] = {**dict.fromkeys(MEMBER_TRANSACTIONS, 3), ADMIT_KIND: 24, "member/rotate": 24}
    state_type = MembersState

    def genesis_state(self, genesis: Genesis) -> MembersState:
        keys, founders = genesis.voters.keys, genesis.founders.items()
        members = {key: Member(of.name, of.roles, admitted=0, invited_by=None, nonce=0) for key, of in founders}
        return MembersState(members, keys, keys, keys)

    def apply_transaction(
        self, state: MembersState, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        content: MemberTransaction = said.content
        facts = (MemberRekeyed(said.author, content.new_key),) if isinstance(content, RotateKey) else ()
        return StateChange(self._applied(state, content, said.author, said.transaction.nonce, context), facts)

    def settle_block(self, state: MembersState, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(advance_voter_sets(state, context.height, context.time_ms))

    def _applied(
        self, state: MembersState, content: MemberTransaction, author: bytes, nonce: int, context: BlockContext
    ) -> MembersState:
        match content:
            case AdmitMember():
                return _admit(state, content, author, nonce, context)
            case RevokeInvitation():
                return _revoke(state, content.invitation, author, context)
            case RegisterRoles():
                check_roles(content.roles)
                return _with_member(state, author, replace(state.members[author], roles=content.roles))
            case RenameMember():
                check_name(content.name)
                return _with_member(state, author, replace(state.members[author], name=content.name))
            case StandAsVoter():
                if any(state.current_key(key) == author for key in state.upcoming):
                    raise Refused(f"{short_id(author)} is already a voter")
                if context.certified_roots.get(content.height) != content.state_root:
                    shown = f"the state root of height {content.height}"
                    raise Refused(f"{short_id(author)} must show a recent certified root, and {shown} is not one")
                return replace(state, candidates={author: (), **state.candidates})
            case ApproveVoter(candidate):
                if author not in state.voters:
                    raise Refused(f"{short_id(author)} is not a voter, so it cannot approve candidates")
                if candidate in state.upcoming:
                    raise Refused(f"{short_id(candidate)} is already a voter, or becomes one within two heights")
                if candidate not in state.candidates:
                    raise Refused(f"{short_id(candidate)} is not a candidate for a vote")
                approvals = tuple(sorted({*state.candidates[candidate], author}))
                return replace(state, candidates={**state.candidates, candidate: approvals})
            case ResignAsVoter():
                if author not in state.upcoming or author in state.resigning_voters:
                    raise Refused(f"{short_id(author)} is not a voter, or already resigns")
                if len(_staying(state)) <= 1:
                    raise Refused("the last voter cannot resign")
                return replace(state, resigning_voters=(*state.resigning_voters, author))
            case RetireMember():
                return _retire(state, content, author, context)
            case RotateKey():
                return _rotate(state, content, author, context)


def use_nonce(state: MembersState, transaction: Transaction, author: bytes) -> MembersState:
    """Return the state with the author's nonce incremented. Nonces ensure that transactions are decided once and in order.

    Raises `Refused` for another nonce or a stranger, and `RemoteProtocolError` for an expelled or replaced key.
    """
    member = state.members.get(author)
    if member is not None and not state.is_current_key(author):
        # This refusal is permanent and therefore not `Refused`: peers neither keep nor relay the transaction.
        gone = "is expelled" if member.expelled else "was replaced by a new key"
        raise RemoteProtocolError("not-a-member", f"{short_id(author)} {gone}")
    expected = member.nonce + 1 if member else 1
    if transaction.nonce != expected:
        raise Refused(f"nonce {transaction.nonce} of {short_id(author)}, expected {expected}")
    if member is None:
        if transaction.kind != ADMIT_KIND:
            raise Refused(f"{short_id(author)} is not a member")
        return state
    return _with_member(state, author, replace(member, nonce=transaction.nonce))


# Voter sets ----------------------------------------------------------------------------------------------------------


class VoterChange(NamedTuple):
    """One change of the voter set: a removed voter, an added voter, or both for a rotated key."""

    removed: bytes | None
    added: bytes | None


def advance_voter_sets(state: MembersState, height: int, time_ms: int) -> MembersState:
    """Advance the voter sets by one height. Changes decided in block h act at h+2, at most max(1, f) of them per block.

    Expired retirement votes, used tokens and revoked tokens are dropped. `time_ms` is the parent block's time, with which the
    expiry of invitations is compared.
    """
    wishes = {voter: wish for voter, wish in state.retirement_votes.items() if wish.expires >= time_ms}
    state = replace(state, retirement_votes=wishes)
    subject = _to_retire(state)
    if subject is not None:
        # The retired member loses its roles and its candidacy at once, and its vote as if it resigned. It stays a member, and
        # may register and stand again.
        state = replace(
            _with_member(state, subject, replace(state.members[subject], roles=(), retired=height)),
            candidates={key: approvals for key, approvals in state.candidates.items() if key != subject},
            resigning_voters=(*state.resigning_voters, subject) if subject in state.upcoming else state.resigning_voters,
            retirement_votes={voter: wish for voter, wish in wishes.items() if wish.subject != subject},
        )
    changes = _changes(state)[: max(1, faults_tolerated(len(state.upcoming)))]
    gone, came = {change.removed for change in changes}, {change.added for change in changes}
    voters = {*state.upcoming, *came} - gone - {None}
    revoked = {inviter: _unexpired(tokens, time_ms) for inviter, tokens in state.revoked_tokens.items()}
    return replace(
        state,
        previous=state.voters,
        voters=state.upcoming,
        upcoming=tuple(sorted(key for key in voters if key is not None)),
        candidates={key: approvals for key, approvals in state.candidates.items() if key not in came},
        resigning_voters=tuple(key for key in state.resigning_voters if key not in gone),
        retirement_votes={voter: wish for voter, wish in state.retirement_votes.items() if voter in state.upcoming},
        used_tokens=_unexpired(state.used_tokens, time_ms),
        revoked_tokens={inviter: tokens for inviter, tokens in revoked.items() if tokens},
    )


def _unexpired(tokens: dict[bytes, int], time_ms: int) -> dict[bytes, int]:
    return {token: expires for token, expires in tokens.items() if expires >= time_ms}


def is_voter_change_due(state: MembersState) -> bool:
    """Return whether an empty block would change the voter sets."""
    return bool(_changes(state)) or not state.previous == state.voters == state.upcoming


def _changes(state: MembersState) -> list[VoterChange]:
    """Return all waiting changes of the voter set in the order in which they act. Expulsions and rotations are sorted by age."""
    members = state.members
    expelled = sorted((members[key].expelled or 0, key) for key in state.upcoming if state.is_expelled(key))
    rotated = [(members[key].successor, key) for key in state.upcoming if not state.is_expelled(key)]
    in_order = sorted((members[new].admitted, old, new) for new, old in rotated if new is not None)
    return [
        *(VoterChange(key, None) for _, key in expelled),
        *(VoterChange(old, new) for _, old, new in in_order),
        *(VoterChange(key, None) for key in state.resigning_voters),
        *(VoterChange(None, key) for key in _joins(state)),
    ]


def _joins(state: MembersState) -> list[bytes]:
    """Return the candidates with a quorum of approvals, up to the number of free places in the voter set."""
    if not state.candidates:
        return []
    quorum, voters = VoterSet(state.voters).quorum, set(state.voters)
    joins = sorted(key for key, approvals in state.candidates.items() if len(voters.intersection(approvals)) >= quorum)
    return joins[: max(0, VOTERS_MAX - len(state.upcoming))]


def _staying(state: MembersState) -> set[bytes]:
    """Return the voters that remain after all resignations and expulsions have acted. There is always one."""
    return {key for key in state.upcoming if key not in state.resigning_voters and not state.is_expelled(key)}


# Retirement ----------------------------------------------------------------------------------------------------------


def _retire(state: MembersState, retire: RetireMember, author: bytes, context: BlockContext) -> MembersState:
    """Record a retirement vote.

    Raises `Refused` if the vote has no effect with the present voters. Each block checks the votes again.
    """
    subject = retire.subject
    if author not in state.voters:
        raise Refused(f"{short_id(author)} is not a voter, so it cannot retire members")
    if not state.is_current_key(subject):
        raise Refused(f"{short_id(subject)} is not the current key of a member")
    if subject == author:
        raise Refused(f"{short_id(author)} cannot retire itself: `peer resign` ends its vote")
    if any(state.members[key].successor == subject for key in state.upcoming):
        raise Refused(f"{short_id(subject)} is rotating its key: retire it when the rotation is complete")
    if subject in state.resigning_voters:
        raise Refused(f"{short_id(subject)} is already leaving the voters")
    if state.has_no_duties(subject):
        raise Refused(f"{short_id(subject)} has no vote, no candidacy and no role: there is nothing to retire")
    if _is_last(state, subject):
        raise Refused(f"{short_id(subject)} is the last voter, which cannot be retired")
    if not retire.lower_tolerance and lowers_tolerance(state, subject):
        warning = warning_for_removal(len(_staying(state)))
        raise Refused(f"{warning}: add a voter first, or let a quorum vote with --lower-tolerance")
    if retire.expires < context.time_ms:
        raise Refused("the retirement vote has already expired: check this peer's clock, then vote again")
    return replace(state, retirement_votes={**state.retirement_votes, author: retire})


def _to_retire(state: MembersState) -> bytes | None:
    """Return the member that a quorum of the present voters wants to retire, if the remaining voters allow it.

    There is at most one such member: two quorums share a voter, and each voter has one vote.
    """
    if not state.retirement_votes:
        return None
    for subject in {wish.subject for wish in state.retirement_votes.values()}:
        if (
            retirement_vote_count(state, subject) >= VoterSet(state.voters).quorum
            and subject not in state.resigning_voters
            and not _is_last(state, subject)
        ):
            return subject
    return None


def retirement_vote_count(state: MembersState, subject: bytes) -> int:
    """Return the number of votes to retire this member. Without `lower_tolerance`, a vote counts only if f stays the same."""
    assert state.retirement_votes.keys() <= set(state.voters), "retirement votes end with their author's vote"
    lowers = lowers_tolerance(state, subject)
    return sum(wish.subject == subject and (wish.lower_tolerance or not lowers) for wish in state.retirement_votes.values())


def lowers_tolerance(state: MembersState, subject: bytes) -> bool:
    """Return whether f is smaller without this voter, after all resignations and expulsions. Waiting joins are not counted."""
    left = len(_staying(state))
    return subject in state.upcoming and faults_tolerated(left - 1) < faults_tolerated(left)


def _is_last(state: MembersState, subject: bytes) -> bool:
    return subject in state.upcoming and not _staying(state) - {subject}


# Expulsion and rotation ----------------------------------------------------------------------------------------------


def expel_member(state: MembersState, culprit: bytes, height: int) -> MembersState:
    """Expel a member, which loses everything but its vote at once. The vote ends with the next change of the voter set.

    A replaced key expels its member only while it is in a known voter set. Rotation is therefore no escape, and a stolen old key
    is harmless once it has left the voter sets. Raises `Refused` for the last voter, and for a key that is expelled or unknown.
    """
    known = {*state.previous, *state.voters, *state.upcoming}
    if culprit not in state.members or (state.members[culprit].successor is not None and culprit not in known):
        raise Refused(f"{short_id(culprit)} is not the key of a member")
    person = state.current_key(culprit)
    if state.is_expelled(culprit) or state.is_expelled(person):
        raise Refused(f"{short_id(culprit)} is already expelled")
    keys = {key for key in (culprit, person, *known) if state.current_key(key) == person}
    if not _staying(state) - keys:
        raise Refused(f"{short_id(culprit)} is the last voter, which cannot be expelled")
    changed = {key: replace(state.members[key], roles=(), expelled=height) for key in keys}
    return replace(_without(state, keys), members={**state.members, **changed})


def _rotate(state: MembersState, rotate: RotateKey, author: bytes, context: BlockContext) -> MembersState:
    """Rotate a key. The new key is the member at once, and its vote follows in turn. Approvals and candidacy of the old key end.

    A thief may have made them with the old key. The owner can approve and stand again.
    """
    member = state.members[author]
    if rotate.new_key in state.members:
        raise Refused(f"{short_id(rotate.new_key)} is or was the key of a member: use a new key")
    # Members that are not voters leave room for rotations of voters: a voter that lost its vote log can vote again only with a
    # new key.
    old_keys = sum(other.successor is not None for other in state.members.values())
    has_room = len(state.members) < MEMBERS_MAX and (author in state.upcoming or old_keys < OLD_KEYS_MAX)
    if member.rotations >= ROTATIONS_MAX:
        raise Refused(f"{short_id(author)} cannot rotate its key again: it has rotated {ROTATIONS_MAX} times, the maximum")
    if not has_room:
        raise Refused(f"{short_id(author)} cannot rotate its key: the network has no room for further old keys")
    if author in state.resigning_voters or any(state.members[key].successor == author for key in state.upcoming):
        raise Refused(f"{short_id(author)} is resigning or waits for its vote after a rotation: rotate the key after that")
    if not context.verifier.verify(rotate.new_key, rotation_preimage(context.chain_id, author), rotate.signature):
        raise RemoteProtocolError("bad-signature", "rotation")
    renewed = replace(member, admitted=context.height, nonce=0, rotations=member.rotations + 1)
    retired = replace(member, roles=(), successor=rotate.new_key)
    return replace(_without(state, {author}), members={**state.members, author: retired, rotate.new_key: renewed})


def _without(state: MembersState, keys: Set[bytes]) -> MembersState:
    """Return the state without all candidacies, approvals, revocations and retirement votes by these keys or about them.

    The invitations of these keys no longer admit members, even if they were not revoked.
    """
    standing = {
        candidate: tuple(key for key in approvals if key not in keys)
        for candidate, approvals in state.candidates.items()
        if candidate not in keys
    }
    leaving = tuple(key for key in state.resigning_voters if key not in keys)
    revoked = {inviter: tokens for inviter, tokens in state.revoked_tokens.items() if inviter not in keys}
    retiring = {voter: wish for voter, wish in state.retirement_votes.items() if voter not in keys and wish.subject not in keys}
    return replace(state, candidates=standing, resigning_voters=leaving, revoked_tokens=revoked, retirement_votes=retiring)


# Transactions --------------------------------------------------------------------------------------------------------


def _with_member(state: MembersState, key: bytes, member: Member) -> MembersState:
    return replace(state, members={**state.members, key: member})


def _admit(state: MembersState, admit: AdmitMember, author: bytes, nonce: int, context: BlockContext) -> MembersState:
    if author in state.members:
        raise Refused(f"{short_id(author)} is already a member")
    present = [member for member in state.members.values() if member.successor is None]
    if len(present) >= PRESENT_MEMBERS_MAX:
        raise Refused(f"the network already has {PRESENT_MEMBERS_MAX} members, the maximum")
    check_roles(admit.roles)
    check_name(admit.name)
    invitation = open_signed(admit.invitation, context.chain_id, context.verifier, (Invitation,))
    if admit.invitation.signer not in state.voters or not state.is_current_key(admit.invitation.signer):
        signer = short_id(admit.invitation.signer)
        raise Refused(f"the invitation is signed by {signer}, which is not a voter: ask a voter for a new one")
    inviter = state.current_key(admit.invitation.signer)
    invited = sum(member.invited_by is not None and state.current_key(member.invited_by) == inviter for member in present)
    if invited >= PRESENT_MEMBERS_MAX // len(state.voters):
        full = f"{short_id(inviter)} has already invited {invited} members, the maximum"
        raise Refused(f"{full}: ask another voter for an invitation")
    gone = _gone(state, invitation, admit.invitation.signer, context)
    if gone:
        what_to_do = "ask for a new one, stop this peer, and `peer join` the new one with the same --data-dir"
        raise Refused(f"the invitation {gone}: {what_to_do}")
    if not context.verifier.verify(invitation.token, token_preimage(context.chain_id, author), admit.token_signature):
        raise RemoteProtocolError("bad-signature", "invitation token")
    member = Member(admit.name, admit.roles, context.height, admit.invitation.signer, nonce)
    return replace(_with_member(state, author, member), used_tokens={**state.used_tokens, invitation.token: invitation.expires})


def _gone(state: MembersState, invitation: Invitation, inviter: bytes, context: BlockContext) -> str:
    """Return why an invitation is no longer valid, as the rest of a sentence. Empty: the invitation is valid."""
    if invitation.expires < context.time_ms:
        return "has expired"
    if invitation.token in state.used_tokens:
        return "was used"
    return "was revoked" if invitation.token in state.revoked_tokens.get(inviter, {}) else ""


def _revoke(state: MembersState, signed: Signed, author: bytes, context: BlockContext) -> MembersState:
    """Revoke an invitation of the author. Another voter that signs the same token revokes only its own invitation."""
    if author not in state.voters:
        raise Refused(f"{short_id(author)} is not a voter, so its invitations admit no members")
    if signed.signer != author:
        raise Refused(f"the invitation is signed by {short_id(signed.signer)}, and only its signer can revoke it")
    invitation = open_signed(signed, context.chain_id, context.verifier, (Invitation,))
    gone = _gone(state, invitation, author, context)
    if gone:
        raise Refused(f"the invitation {gone}, so there is nothing to revoke")
    known = state.revoked_tokens.get(author, {})
    if len(known) >= REVOKED_INVITATIONS_MAX:
        raise Refused(f"{short_id(author)} has already revoked {REVOKED_INVITATIONS_MAX} unexpired invitations, the maximum")
    return replace(state, revoked_tokens={**state.revoked_tokens, author: {**known, invitation.token: invitation.expires}})


def warning_for_removal(voters: int) -> str | None:
    before, after = faults_tolerated(voters), faults_tolerated(voters - 1)
    return f"{voters - 1} voters tolerate {after} faulty, {voters} tolerate {before}" if after < before else None
