"""A worker's text, asked for to its end."""

from __future__ import annotations

from dataclasses import replace

from peer.worker.main import WorkerRequestHandler
from training.worker_protocol import GenerateReply, GenerateRequest


def whole(jobs: WorkerRequestHandler, request: GenerateRequest) -> GenerateReply:
    told = ""
    while True:
        done = jobs.handle_request(replace(request, text_number=1, told_characters=len(told)))
        assert isinstance(done, GenerateReply)
        told += done.text
        if done.is_over:
            return replace(done, text=told)
