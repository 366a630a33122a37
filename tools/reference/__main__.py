"""`python -m tools.reference`: write the generated pages of docs/reference/."""

from __future__ import annotations

from tools.reference import render_pages

for page, text in render_pages():
    if not page.exists() or page.read_text() != text:
        page.write_text(text)
        print(f"wrote {page}")
