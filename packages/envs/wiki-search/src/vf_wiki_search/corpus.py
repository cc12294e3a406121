"""Pages and sections for the three tools, from the shipped encyclopaedia or the hub.

A page has an id, a title and sections; the id of a section is ``page_id:section``. Searching is in
``retrievers``.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifiers as vf

HUB_PAGES = "willcb/rare-wiki-pages"
HUB_QUESTIONS = "willcb/wiki-trivia-questions"
CORPORA = ("factbook", "rare-wiki")


@dataclass(frozen=True, slots=True)
class Page:
    """``Page("malta", "Malta", {"malta:geography": ("Geography", "Location: Southern Europe,
    …")})``."""

    page_id: str
    title: str
    sections: Mapping[str, tuple[str, str]]
    """Section id -> (its title, its text), in the page's order."""

    @property
    def text(self) -> str:
        """The whole page as text, for an index."""
        return "\n\n".join(
            [self.title, *(f"{title}\n{text}" for title, text in self.sections.values())]
        )


class Corpus:
    """Pages by id, in a fixed order."""

    def __init__(self, pages: Iterable[Page]):
        self.pages = list(pages)
        self._by_id = {page.page_id: page for page in self.pages}

    def page(self, page_id: str) -> Page:
        """The page of this id. *Raises* ToolError, which the model reads, for an unknown id."""
        page = self._by_id.get(page_id.strip())
        if page is None:
            raise vf.ToolError(
                f"there is no page {_short_repr(page_id)}; page ids come from search_pages"
            )
        return page

    def section(self, section_id: str) -> str:
        """The text of a section. *Raises* ToolError, which the model reads, for an unknown id."""
        page = self._by_id.get(section_id.partition(":")[0].strip())
        if page is None or section_id.strip() not in page.sections:
            raise vf.ToolError(
                f"there is no section {_short_repr(section_id)}; section ids come from"
                " view_sections"
            )
        return page.sections[section_id.strip()][1]


def load_corpus(name: str) -> Corpus:
    """A corpus of ``CORPORA``. *Raises* ConfigError for another name, DatasetError when the hub is
    unreachable."""
    if name == "factbook":
        return _factbook()
    if name == "rare-wiki":
        return _rare_wiki()
    raise vf.ConfigError(
        f"corpus must be one of {', '.join(map(repr, CORPORA))}, not {name!r}", key="corpus"
    )


@functools.cache
def _factbook() -> Corpus:
    packed = Path(__file__).with_name("pages.jsonl.gz").read_bytes()
    pages = []
    for line in gzip.decompress(packed).decode("ascii").splitlines():
        page = json.loads(line)
        sections = {
            f"{page['page_id']}:{slug(title)}": (title, text)
            for title, text in page["sections"].items()
        }
        pages.append(Page(page["page_id"], page["title"], sections))
    return Corpus(pages)


@functools.cache
def _rare_wiki() -> Corpus:
    return Corpus(
        from_markdown(str(row["id"]), row["title"], row["content"]) for row in hub_rows(HUB_PAGES)
    )


def from_markdown(page_id: str, title: str, content: str) -> Page:
    """A page whose sections begin at Markdown headings; text before the first is the section
    "Summary".

    >>> list(from_markdown("7", "Owl", "A bird.\\n# Food\\nMice.").sections.items())
    [('7:summary', ('Summary', 'A bird.')), ('7:food', ('Food', 'Mice.'))]
    """
    parts = re.split(r"^#{1,6} ++(.+)$", content, flags=re.MULTILINE)
    sections: dict[str, tuple[str, str]] = {}
    counts: Counter[str] = Counter()
    for heading, text in zip(["Summary", *parts[1::2]], parts[0::2], strict=True):
        if text.strip():
            section_id = base = f"{page_id}:{slug(heading)}"
            while section_id in sections:
                counts[base] += 1
                section_id = f"{base}-{counts[base] + 1}"
            sections[section_id] = (heading.strip(), text.strip())
    return Page(page_id, title, sections)


def hub_rows(name: str) -> list[dict[str, Any]]:
    """All rows of a dataset of the hub. *Raises* DatasetError naming the alternative that works
    offline."""
    from datasets import load_dataset

    try:
        return list(load_dataset(name, split="train"))
    except Exception as error:
        raise vf.DatasetError(
            f"the dataset {name} could not be loaded ({type(error).__name__}: {str(error)[:200]}); "
            'without network use corpus="factbook", which comes with the package'
        ) from error


def slug(title: str) -> str:
    """``People and Society`` -> ``people-and-society``."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"


def _short_repr(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
