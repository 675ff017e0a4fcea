"""Pages that lie outside of `docs`: README, CHANGELOG and others, each of which a page of `docs` includes.

    ```{include} ../README.md
    ```

Links of such a page are relative to where it lies, and lead to files that have another place on the site. MyST's own
directive changes those to one directory alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INCLUDE = re.compile(r"^```\{include\} (\S+)\n```$", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[#)])")


def read(app: Any, docname: str, source: list[str]) -> None:
    """Sphinx's event `source-read`: puts included pages into `source`, and changes links to pages that are included."""
    page = HERE / f"{docname}.md"
    for included in INCLUDE.findall(source[0]):
        app.env.note_dependency(str((page.parent / included).resolve()))
    source[0] = as_page(page, source[0])


def as_page(page: Path, text: str) -> str:
    """`text` of the page of the site at `page`, with included pages and with links that lead to pages of the site."""

    def included(match: re.Match[str]) -> str:
        path = (page.parent / match[1]).resolve()
        return _moved(path.read_text().rstrip("\n"), path.parent, page.parent)

    return INCLUDE.sub(included, _moved(text, page.parent, page.parent))


def _moved(text: str, before: Path, after: Path) -> str:
    """`text` of a page in the directory `before`, with links for one in `after`."""
    on_site = pages()

    def link(match: re.Match[str]) -> str:
        path = (before / match[1]).resolve()
        if not path.exists():  # an address, or code that looks like a link
            return match[1]
        return Path(os.path.relpath(on_site.get(path, path), after)).as_posix()

    return LINK.sub(link, text)


def pages() -> dict[Path, Path]:
    """The files outside that pages of the site include: each by its path."""
    found = {page: INCLUDE.findall(page.read_text()) for page in HERE.glob("*.md")}
    return {(page.parent / path).resolve(): page for page, paths in found.items() for path in paths}
