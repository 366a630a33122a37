"""The pages for people: each is declared here alone, and rendered once, since all that changes comes by the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from protocol.verdicts import VERDICT_MEANINGS

TEMPLATES: Final = Path(__file__).with_name("templates")


@dataclass(frozen=True, slots=True)
class HtmlPage:
    name: str  # of its path, its template and its script
    title: str  # in the navigation, too
    is_for_operators: bool = False  # other pages do not lead there

    @property
    def path(self) -> str:
        return f"/{self.name}"

    @property
    def operation(self) -> str:
        """Its name among `web.routes`, where calls of the API have other ones."""
        return f"page_{self.name}"


PAGES: Final = (
    HtmlPage("annotate", "Annotate"),
    HtmlPage("live", "Watch"),
    HtmlPage("leaderboard", "Leaderboard"),
    HtmlPage("review", "Review", True),
    HtmlPage("admin", "Admin", True),
    HtmlPage("join", "Join"),
)
START_PAGE: Final = PAGES[0]  # where `/` leads


def render_page(page: HtmlPage) -> str:
    templates = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return templates.get_template(f"{page.name}.html").render(page=page, pages=PAGES, reasons=VERDICT_MEANINGS)
