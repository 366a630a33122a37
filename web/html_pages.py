"""Pages for people: what a feature names in `Feature.pages`. Each is rendered once: what changes comes by HTTP calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

TEMPLATES: Final = Path(__file__).with_name("templates")  # that all features may extend and include
STATIC: Final = Path(__file__).with_name("static")
VENDOR: Final = Path(__file__).with_name("vendor")


@dataclass(frozen=True, slots=True)
class HtmlPage:
    name: str  # of its path, its template, its script and its style sheet
    title: str  # in the navigation, too
    is_for_operators: bool = False  # other pages do not lead there

    @property
    def path(self) -> str:
        return f"/{self.name}"


@dataclass(frozen=True, slots=True)
class PageSet:
    """The pages of one feature."""

    # It has `templates/NAME.html`, `static/NAME.js` and `static/NAME.css` of each page. Files of `static` are under `/static/`.
    folder: Path
    pages: tuple[HtmlPage, ...]
    values: Mapping[str, Any] = field(default_factory=dict)  # that the templates show


def render_page(page: HtmlPage, page_set: PageSet, all_pages: Iterable[HtmlPage]) -> str:
    """The HTML of a page; `all_pages`, of all features, are its navigation."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader((page_set.folder / "templates", TEMPLATES))
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return templates.get_template(f"{page.name}.html").render(page=page, pages=tuple(all_pages), **page_set.values)
