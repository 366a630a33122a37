"""A worker's text, asked for to its end."""

from __future__ import annotations

from dataclasses import replace

from peer.worker.main import Jobs
from training.tasks import Generate, Generated


def whole(jobs: Jobs, request: Generate) -> Generated:
    told = ""
    while True:
        done = jobs.answer(replace(request, text=1, told=len(told)))
        assert isinstance(done, Generated)
        told += done.text
        if done.is_over:
            return replace(done, text=told)
