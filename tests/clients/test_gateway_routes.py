"""The fields that programs fill in calls of a gateway."""

from __future__ import annotations

import pytest

from clients.gateway.checkpoints import PATH_CHARACTERS_MAX, SAMPLER_WEIGHTS, checkpoint_path
from clients.gateway.http_routes import ID, NUMBER, ROUTES, SAMPLE_NUMBER, SESSION_ID
from clients.gateway.model_queue import CreateSampler
from clients.gateway.tinker_api import request_id, sampler_id
from protocol import codec
from protocol.limits import NAME_CHARACTERS_MAX
from web.calls import HttpProblem
from web.routes import Route

ID_CHARACTERS_MAX = 128
LONGEST_SESSION = "s" * SESSION_ID.schema["maxLength"]


@pytest.mark.parametrize("route", ROUTES.routes, ids=lambda route: route.operation)
def test_no_id_is_long(route: Route) -> None:
    """An id is a part of other ids, which are stored in several rows and repeated for each sample."""
    for field in (*route.path_fields, *route.body_fields):
        if field.name.endswith("_id") and field.kind not in (NUMBER, SAMPLE_NUMBER):
            assert field.parse_value({field.name: "x" * 24}) == "x" * 24, "sessions that this gateway names have 24"
            for value in ("x" * (ID_CHARACTERS_MAX + 1), "", "a\n", None, 1):
                with pytest.raises(HttpProblem, match=f"{field.name} must be a line of 1 to [0-9]+ printable characters"):
                    field.parse_value({field.name: value})


def test_the_longest_session_has_valid_models_samplers_requests_and_checkpoints() -> None:
    assert not SESSION_ID.is_valid(LONGEST_SESSION + "s")
    most, most_samples = NUMBER.schema["maximum"], SAMPLE_NUMBER.schema["maximum"]
    model, sampler = f"{LONGEST_SESSION}:train:{most}", sampler_id(LONGEST_SESSION, most)
    for name in (model, sampler, request_id(model, most), request_id(sampler, most_samples)):
        assert ID.is_valid(name)
    assert codec.decode(CreateSampler, codec.encode(CreateSampler(sampler))).sampler == sampler
    path = checkpoint_path(model, f"{SAMPLER_WEIGHTS}/{'n' * NAME_CHARACTERS_MAX}")
    assert len(path) <= PATH_CHARACTERS_MAX
