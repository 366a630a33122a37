"""All that a peer answers to people, put together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from features.calls import under_one_roof
from features.parts import Desk
from peer.serving.accounts import Accounts
from peer.serving.administering import Administering
from peer.serving.annotating import Annotating
from peer.serving.custody import Custody
from peer.serving.doors import Doors
from peer.serving.fetching import Fetching
from peer.serving.importing import Imports
from peer.serving.live import Live
from peer.serving.operating import Operating
from peer.serving.operators import Operators
from peer.serving.reading import Reading
from peer.serving.reviewing import Reviewing
from peer.serving.watching import Watching


@dataclass(frozen=True)
class Served:
    site: Any  # a `web.site.Site`
    beside: tuple[Callable[[], Awaitable[None]], ...]  # run for as long as it is served


def put_together(desk: Desk) -> Served:
    doors, fetching, live = Doors(desk.folder), Fetching(desk), Live(desk)
    annotating = Annotating(desk, doors, fetching)
    operators = Operators(desk.folder, doors, annotating.is_annotator)
    imports = Imports(desk, operators)
    site = under_one_roof(
        (
            annotating,
            Reading(desk),
            Custody(desk, Accounts(desk.folder), annotating),
            Operating(desk, operators, imports),
            Reviewing(desk, operators),
            Administering(desk, doors, operators, lambda: annotating.gatherer.waiting),
            live,
            Watching(desk, annotating.gatherer),
        )
    )
    return Served(site, (annotating.gatherer.run, annotating.follow, fetching.run, live.follow_labels, imports.run))
