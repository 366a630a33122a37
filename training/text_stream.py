"""A worker's text, asked for a slice at a time: what rounds need of the worker goes in between."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from training.worker_protocol import GenerateReply, GenerateRequest

Ask = Callable[[GenerateRequest], Awaitable[GenerateReply]]

_numbers = itertools.count(1)


async def stream_text(ask: Ask, request: GenerateRequest) -> AsyncGenerator[GenerateReply, None]:
    """Whoever reads slowly keeps nobody waiting, and whoever stops reading ends the text. To be closed (`aclosing`)."""
    request = replace(request, text_number=next(_numbers))
    while True:
        done = await ask(request)
        yield done
        if done.is_over:
            return
        request = replace(request, told_characters=request.told_characters + len(done.text))


async def generate_text(ask: Ask, request: GenerateRequest) -> GenerateReply:
    """The last slice, with the text of all of them."""
    parts = []
    async with aclosing(stream_text(ask, request)) as made:
        async for done in made:
            parts.append(done.text)
    return replace(done, text="".join(parts))
