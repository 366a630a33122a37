"""What a demo had to show and did not."""

from __future__ import annotations

from dataclasses import dataclass

from consensus.quorum import faults_tolerated
from demo.demo_peers import Demo
from demo.rlhf_result import RlhfResult
from features.text_tables import pluralize
from ledger.audits.audit_state import MemberAuditRecord

TARGET_BITS_PER_BYTE = 3.6  # with the default flags; otherwise the loss must end below its start


@dataclass(frozen=True)
class PeerOutcomes:
    """What was decided of each peer, by its name in the demo."""

    accepted: dict[str, int]
    rejected: dict[str, dict[str, int]]
    expelled: dict[str, int]
    audit_records: dict[str, MemberAuditRecord]  # after sampled audits
    suspensions: dict[str, int]  # of those that had any, before or after votes

    def audit_record(self, name: str) -> MemberAuditRecord:
        return self.audit_records.get(name, MemberAuditRecord())


def check_outcomes(demo: Demo, equal: bool, finished: bool, outcome: PeerOutcomes) -> list[str]:
    options, failures = demo.options, []
    tolerated = faults_tolerated(len(demo.peers))
    if options.malicious > tolerated:
        failures.append(
            f"{options.malicious} liars of {len(demo.peers)} voters are beyond the bound f = {tolerated}: nothing is promised"
        )
    if not finished:
        failures.append("the job did not finish")
    if not equal:
        failures.append("honest peers hold different roots")
    for peer in demo.peers:
        failures += _of_liar(peer.name, demo, outcome) if peer.lies else _of_honest(peer.name, outcome)
    return failures


def _of_honest(name: str, outcome: PeerOutcomes) -> list[str]:
    standing, failures = outcome.audit_record(name), []
    if name in outcome.suspensions:
        failures.append(f"{name} is honest and was suspended")
    if standing.refuted:
        failures.append(f"{name} is honest and its challenge was found false")
    if name in outcome.expelled:
        failures.append(f"{name} is honest and was expelled")
    return failures


def _of_liar(name: str, demo: Demo, outcome: PeerOutcomes) -> list[str]:
    attack, failures = demo.options.attack, []
    accepted, rejected = outcome.accepted.get(name, 0), outcome.rejected.get(name, {})
    if demo.is_sampled:
        failures += _unpunished(name, attack, outcome)
    elif accepted and attack != "equivocate":  # one of its two proposals is honest, and may have its accepts before both are seen
        failures.append(f"the network accepted {pluralize(accepted, 'proposal')} of {name}")
    elif not (accepted or rejected):
        failures.append(f"{name} was never named")
    if attack == "silent" and not rejected.get("absent"):
        failures.append(f"{name} was not named absent")
    if attack == "equivocate" and name not in outcome.expelled:
        failures.append(f"{name} was not expelled")
    return failures


def _unpunished(name: str, attack: str, outcome: PeerOutcomes) -> list[str]:
    """Sampled audits come after the vote: a lie may be accepted, but then it must be found out."""
    standing, accepted = outcome.audit_record(name), outcome.accepted.get(name, 0)
    if attack == "false-challenge":
        return [] if standing.refuted else [f"no challenge of {name} was found false"]
    if name in outcome.suspensions or (outcome.rejected.get(name) and not accepted):
        return []
    return [f"{name} was not suspended, {accepted} of its proposals were accepted"]


def check_loss(demo: Demo, held_out: dict[int, float]) -> list[str]:
    if len(held_out) < 2:
        return ["the held-out loss was not measured"]
    first, last = held_out[min(held_out)], held_out[max(held_out)]
    if last >= first:
        return [f"held-out loss did not fall: {first:.3f} → {last:.3f} bits/byte"]
    if demo.is_default and last > TARGET_BITS_PER_BYTE:
        return [f"held-out loss {last:.3f} bits/byte is above {TARGET_BITS_PER_BYTE}"]
    return []


def check_policy_value(rlhf: RlhfResult | None) -> list[str]:
    if rlhf is None:
        return ["what was tuned was not measured"]
    return [] if rlhf.value > rlhf.reference_value else ["the tuned policy is no better than its reference"]
