"""The pages that a peer serves to annotators, to its operators, and to everybody who watches."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from protocol.verdicts import VERDICT_MEANINGS
from web.routes import HtmlPage, PageSet

PAGES: Final = PageSet(
    Path(__file__).parent,
    (
        HtmlPage("annotate", "Annotate"),
        HtmlPage("live", "Watch"),
        HtmlPage("leaderboard", "Leaderboard"),
        HtmlPage("review", "Review", True),
        HtmlPage("admin", "Admin", True),
        HtmlPage("join", "Join"),
    ),
    {"reasons": VERDICT_MEANINGS},
)
