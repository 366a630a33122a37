"""Who belongs: members, their roles and nonces, invitations, approvals, and the voter sets of the next two heights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from consensus.quorum import faults_tolerated
from consensus.voters import VoterSet
from ledger.genesis import Founder, Genesis, Roles, check_roles
from ledger.transactions import Context, Modules, Refused
from protocol import codec
from protocol.codec import Count, Digest, Key, Length, SignatureBytes
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, open_signed, short_id
from protocol.limits import MEMBERS_MAX, VOTERS_MAX
from protocol.messages import Name, Transaction


@dataclass(frozen=True, slots=True)
class Invitation:
    """A voter's signed permission for whoever holds `token`'s secret key to become a member, once."""

    TAG: ClassVar[str] = "invitation"
    token: Key
    expires: Count  # last height at which it admits


@dataclass(frozen=True, slots=True)
class Admit:
    """`member/admit`, signed by the newcomer itself; the token's signature ties the invitation to this newcomer."""

    invitation: Signed
    token_signature: SignatureBytes  # over `token_preimage`
    name: Name
    roles: Roles


@dataclass(frozen=True, slots=True)
class Register:
    """`member/register`: the author's roles from now on."""

    roles: Roles


@dataclass(frozen=True, slots=True)
class Stand:
    """`member/stand`: the author has caught up, shows a recent state root, and wants to vote."""

    height: Count
    state_root: Digest


@dataclass(frozen=True, slots=True)
class Approve:
    """`member/approve`, by a voter: this member may vote."""

    candidate: Key


@dataclass(frozen=True, slots=True)
class Leave:
    """`member/leave`: the author stops voting."""


@dataclass(frozen=True, slots=True)
class Member:
    name: Name
    roles: Roles
    admitted: Count  # height; 0 for founders
    invited_by: Key | None
    nonce: Count  # of its last decided transaction


@dataclass(frozen=True, slots=True)
class MembersState:
    members: Annotated[dict[Key, Member], Length(0, MEMBERS_MAX)]
    previous: Annotated[tuple[Key, ...], Length(1, VOTERS_MAX)]  # decided this height
    voters: Annotated[tuple[Key, ...], Length(1, VOTERS_MAX)]  # decide the next height
    upcoming: Annotated[tuple[Key, ...], Length(1, VOTERS_MAX)]  # decide the one after it
    standing: Annotated[dict[Key, tuple[Key, ...]], Length(0, MEMBERS_MAX)] = field(
        default_factory=dict
    )  # candidate -> approvals
    leaving: Annotated[tuple[Key, ...], Length(0, VOTERS_MAX)] = ()
    tokens: Annotated[dict[Key, Count], Length(0, MEMBERS_MAX)] = field(default_factory=dict)  # used invitations -> expiry


def token_preimage(chain_id: bytes, newcomer: bytes) -> bytes:
    return b"folkmoot/token\x00" + chain_id + newcomer


Content = Admit | Register | Stand | Approve | Leave
KINDS: dict[str, type[Content]] = {
    "member/admit": Admit,
    "member/register": Register,
    "member/stand": Stand,
    "member/approve": Approve,
    "member/leave": Leave,
}


class MembersModule:
    name = "members"
    kinds = frozenset(KINDS)

    def state_type(self) -> type:
        return MembersState

    def genesis(self, genesis: Genesis) -> MembersState:
        def member(founder: Founder) -> Member:
            return Member(founder.name, founder.roles, admitted=0, invited_by=None, nonce=0)

        keys = genesis.voters.keys
        return MembersState({key: member(founder) for key, founder in genesis.founders.items()}, keys, keys, keys)

    def apply(self, modules: Modules, transaction: Transaction, author: bytes, context: Context) -> MembersState:
        state: MembersState = modules[self.name]
        content: Content = codec.decode(KINDS[transaction.kind], transaction.content)
        match content:
            case Admit():
                return _admit(state, content, author, transaction.nonce, context)
            case Register():
                check_roles(content.roles)
                return _with_member(state, author, replace(state.members[author], roles=content.roles))
            case Stand():
                return _stand(state, content, author, context)
            case Approve():
                return _approve(state, content.candidate, author)
            case Leave():
                return _leave(state, author)


def use_nonce(state: MembersState, transaction: Transaction, author: bytes) -> MembersState:
    """Every transaction of a member carries the next nonce: none is decided twice or out of order."""
    member = state.members.get(author)
    expected = member.nonce + 1 if member else 1
    if transaction.nonce != expected:
        raise Refused(f"nonce {transaction.nonce} of {short_id(author)}, expected {expected}")
    if member is None:
        if transaction.kind != "member/admit":
            raise Refused(f"{short_id(author)} is not a member")
        return state
    return _with_member(state, author, replace(member, nonce=transaction.nonce))


def end_block(state: MembersState, height: int) -> MembersState:
    """Moves the voter sets on by one height: changes decided in block h act at h+2, one of them a block."""
    voters = set(state.upcoming)
    standing, leaving = dict(state.standing), state.leaving
    joins = _joins(state)
    if leaving:
        voters.discard(leaving[0])
        leaving = leaving[1:]
    elif joins:
        voters.add(min(joins))
        del standing[min(joins)]
    tokens = {token: expires for token, expires in state.tokens.items() if expires >= height}
    return replace(
        state,
        previous=state.voters,
        voters=state.upcoming,
        upcoming=tuple(sorted(voters)),
        standing=standing,
        leaving=leaving,
        tokens=tokens,
    )


def change_due(state: MembersState) -> bool:
    """Whether an empty block would move the voter sets."""
    return bool(state.leaving or _joins(state)) or not state.previous == state.voters == state.upcoming


def _joins(state: MembersState) -> list[bytes]:
    """Candidates with a quorum of approvals, as long as there is room for one."""
    if len(state.upcoming) >= VOTERS_MAX:
        return []
    quorum, voters = VoterSet(state.voters).quorum, set(state.voters)
    return [key for key, approvals in state.standing.items() if len(voters.intersection(approvals)) >= quorum]


def _with_member(state: MembersState, key: bytes, member: Member) -> MembersState:
    return replace(state, members={**state.members, key: member})


def _admit(state: MembersState, admit: Admit, author: bytes, nonce: int, context: Context) -> MembersState:
    if author in state.members:
        raise Refused(f"{short_id(author)} is a member already")
    if len(state.members) >= MEMBERS_MAX:
        raise Refused(f"the network has {MEMBERS_MAX} members, the most it can hold")
    check_roles(admit.roles)
    invitation = open_signed(admit.invitation, context.chain_id, context.verifier, (Invitation,))
    if admit.invitation.signer not in state.voters:
        raise Refused(f"the invitation is signed by {short_id(admit.invitation.signer)}, who does not vote")
    if invitation.expires < context.height or invitation.token in state.tokens:
        raise Refused("the invitation has expired or was used")
    if not context.verifier.verify(invitation.token, token_preimage(context.chain_id, author), admit.token_signature):
        raise RemoteProtocolError("bad-signature", "invitation token")
    member = Member(admit.name, admit.roles, context.height, admit.invitation.signer, nonce)
    return replace(_with_member(state, author, member), tokens={**state.tokens, invitation.token: invitation.expires})


def _stand(state: MembersState, stand: Stand, author: bytes, context: Context) -> MembersState:
    if author in state.upcoming:
        raise Refused(f"{short_id(author)} votes already")
    if context.certified_roots.get(stand.height) != stand.state_root:
        raise Refused(f"{short_id(author)} shows no recent certified root")
    return replace(state, standing={author: (), **state.standing})


def _approve(state: MembersState, candidate: bytes, author: bytes) -> MembersState:
    if author not in state.voters:
        raise Refused(f"{short_id(author)} does not vote, so it cannot approve")
    if candidate not in state.standing:
        raise Refused(f"{short_id(candidate)} does not stand as a voter")
    approvals = tuple(sorted({*state.standing[candidate], author}))
    return replace(state, standing={**state.standing, candidate: approvals})


def _leave(state: MembersState, author: bytes) -> MembersState:
    if author not in state.upcoming or author in state.leaving:
        raise Refused(f"{short_id(author)} does not vote")
    if len(state.upcoming) - len(state.leaving) <= 1:
        raise Refused("the last voter cannot leave")
    return replace(state, leaving=(*state.leaving, author))


def warning_for_removal(voters: int) -> str | None:
    before, after = faults_tolerated(voters), faults_tolerated(voters - 1)
    return f"with {voters - 1} voters f falls from {before} to {after}" if after < before else None
