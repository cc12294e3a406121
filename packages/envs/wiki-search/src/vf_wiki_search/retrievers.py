"""Retrieval of pages for a query: BM25 by default, dense vectors with an extra.

A retriever is built once per corpus and shared by all rollouts; searches do not modify it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import verifiers as vf
from verifiers.runtime.install_lines import install_line
from vf_wiki_search.corpus import Corpus, Page

RETRIEVERS = ("bm25", "dense", "chroma")


class Retriever(Protocol):
    """Returns pages for a query, the best first."""

    def search(self, query: str, num_pages: int) -> list[Page]: ...


def make_retriever(name: str, corpus: Corpus) -> Retriever:
    """A retriever of ``RETRIEVERS`` over a corpus. *Raises* ConfigError for another name or a
    missing extra."""
    if name == "bm25":
        return Bm25(corpus)
    if name == "dense":
        return Dense(corpus)
    if name == "chroma":
        return Chroma(corpus)
    raise vf.ConfigError(
        f"retriever must be one of {', '.join(map(repr, RETRIEVERS))}, not {name!r}",
        key="retriever",
    )


def words_of(text: str) -> list[str]:
    """Lower-case words without the plural s.

    >>> words_of("The highest points of Malta: 253 m")
    ['the', 'highest', 'point', 'of', 'malta', '253', 'm']
    """
    words = re.findall(r"[^\W_]+", text.lower())
    return [
        word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
        for word in words
    ]


class Bm25:
    """Okapi BM25 (Robertson and Zaragoza 2009) over whole pages; words of the title have weight
    ``TITLE``."""

    TITLE = 5

    def __init__(self, corpus: Corpus):
        import bm25s

        self._pages = corpus.pages
        self._index = bm25s.BM25()
        self._index.index(
            [words_of(page.title) * self.TITLE + words_of(page.text) for page in self._pages],
            show_progress=False,
        )

    def search(self, query: str, num_pages: int) -> list[Page]:
        """Pages that share a word with the query."""
        words = words_of(query)
        if not words:
            return []
        scores = self._index.get_scores(words)
        best = np.argsort(-scores, kind="stable")[:num_pages]
        return [self._pages[index] for index in best if scores[index] > 0]


class Dense:
    """Cosine of sentence embeddings (MiniLM, int8, on the CPU through ONNX) of sections; ranks
    pages by the best."""

    def __init__(self, corpus: Corpus):
        self._embed = _embedder()
        self._owners = [page for page in corpus.pages for _ in page.sections]
        self._vectors = section_vectors(corpus)

    def search(self, query: str, num_pages: int) -> list[Page]:
        """The pages of the nearest sections."""
        order = np.argsort(-(self._vectors @ self._embed([query])[0]), kind="stable")
        return _distinct((self._owners[index] for index in order), num_pages)


class Chroma:
    """The same embeddings in a chromadb collection in memory."""

    def __init__(self, corpus: Corpus):
        try:
            import chromadb
        except ImportError as error:
            raise vf.ConfigError(
                f'retriever="chroma" needs: {install_line("vf-wiki-search", "chroma")}'
            ) from error
        vectors = section_vectors(corpus)
        self._embed = _embedder()
        self._owners = {section_id: page for page in corpus.pages for section_id in page.sections}
        self._collection = chromadb.EphemeralClient(
            chromadb.Settings(anonymized_telemetry=False)
        ).create_collection(f"pages-{id(self)}", metadata={"hnsw:space": "cosine"})
        ids = list(self._owners)
        for start in range(0, len(ids), 1000):
            part = slice(start, start + 1000)
            self._collection.add(ids=ids[part], embeddings=vectors[part])

    def search(self, query: str, num_pages: int) -> list[Page]:
        """The pages of the nearest sections."""
        limit = min(4 * num_pages, len(self._owners))
        result = self._collection.query(
            query_embeddings=self._embed([query]), n_results=limit, include=[]
        )
        return _distinct((self._owners[section_id] for section_id in result["ids"][0]), num_pages)


def section_vectors(corpus: Corpus) -> np.ndarray:
    """Unit vectors of all sections in order, float32 [sections, 384]; cached on disk, because they
    take minutes.

    *Raises* ConfigError when the extra is missing.
    """
    embed = _embedder()
    texts = [
        f"{page.title}. {title}. {text}"
        for page in corpus.pages
        for title, text in page.sections.values()
    ]
    path = _cache_folder() / f"{hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:32]}.npy"
    if path.is_file():
        return np.load(path, allow_pickle=False)
    vectors = embed(texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npy", delete=False) as file:
        np.save(file, vectors, allow_pickle=False)
    Path(file.name).replace(path)
    return vectors


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vf-wiki-search"


def _distinct(pages: Iterable[Page], num_pages: int) -> list[Page]:
    distinct: dict[str, Page] = {}
    for page in pages:
        distinct.setdefault(page.page_id, page)
        if len(distinct) == num_pages:
            break
    return list(distinct.values())


@functools.cache
def _embedder() -> Any:
    """texts -> float32 [texts, dimensions] of unit length. *Raises* ConfigError when the extra is
    missing."""
    try:
        from vf_wiki_search.embedding import Embedder
    except ImportError as error:
        raise vf.ConfigError(
            f"dense retrieval needs: {install_line('vf-wiki-search', 'dense')}"
        ) from error
    return Embedder()
