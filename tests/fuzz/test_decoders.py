from __future__ import annotations

import pytest

from protocol.messages import AGREEMENT_MESSAGES, GOSSIP_MESSAGES, LINK_MESSAGES
from tests.fuzz import checks, links, wire
from tests.fuzz.decoders import LOCAL, decoders
from training.worker_protocol import REQUESTS, messages_from_worker, messages_to_worker

pytestmark = pytest.mark.virtual  # synchronous tests that run Trio

VALUES = 10  # of each type in the default suite; `python -m tests.fuzz --minutes 10` looks further
NUMBER = 1  # seed of the random sequence: each run of the suite is the same


def test_every_message_of_every_protocol_is_found() -> None:
    of_worker = {*messages_to_worker(REQUESTS), *messages_from_worker(REQUESTS)}
    assert {*AGREEMENT_MESSAGES, *GOSSIP_MESSAGES, *LINK_MESSAGES} | of_worker <= {*wire.messages()}


@pytest.mark.parametrize("kind", [*wire.messages(), *wire.records()], ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_value_decodes_to_itself(kind: type) -> None:
    checks.decodes_to_itself(kind, VALUES, NUMBER)


@pytest.mark.parametrize("kind", [*wire.messages(), *wire.records()], ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_number_length_or_count_one_outside_its_bounds_is_refused(kind: type) -> None:
    checks.keeps_to_its_bounds(kind, values=2, number=NUMBER)


@pytest.mark.parametrize("name", decoders())
def test_changed_bytes_are_refused_as_documented_or_are_the_only_form_of_another_value(name: str) -> None:
    checks.survives_mutations(decoders()[name], VALUES, NUMBER)


@pytest.mark.parametrize("name", decoders())
def test_random_bytes_are_refused_as_documented(name: str) -> None:
    checks.survives_random_bytes(decoders()[name], NUMBER)


@pytest.mark.parametrize("name", sorted(decoders().keys() - LOCAL))
def test_no_length_prefix_makes_a_decoder_take_more_memory_than_its_bound(name: str) -> None:
    checks.keeps_to_its_memory(decoders()[name], values=2, number=NUMBER)


@pytest.mark.real("sockets")
def test_links_hear_any_messages_in_any_order() -> None:
    links.hear_anything(values=5, number=NUMBER)
