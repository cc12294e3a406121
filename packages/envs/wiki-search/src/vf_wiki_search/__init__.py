"""wiki-search: questions about an encyclopaedia that is accessible only through tools.

The public interface is ``load_environment``; the README describes rewards and metrics.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import verifiers as vf
from verifiers.runtime.values import Count, CountOrAll, check_arguments
from vf_wiki_search.corpus import CORPORA, HUB_QUESTIONS, Corpus, hub_rows, load_corpus
from vf_wiki_search.matching import matches
from vf_wiki_search.retrievers import make_retriever

__all__ = ["SYSTEM_PROMPT", "load_environment"]

NUM_PAGES = 10
"""Results per search."""
HELD_OUT = 8
"""One in this many pages is used in held-out questions only."""

SYSTEM_PROMPT = (
    "You answer questions from an encyclopaedia. Find the page with search_pages, see what it holds"
    " with view_sections, and read the section you need with read_section. When you know the"
    " answer, write it alone inside <answer> and </answer> tags, as short as it stands in the"
    " encyclopaedia."
)


@check_arguments
def load_environment(
    num_train_examples: CountOrAll = -1,
    num_eval_examples: CountOrAll = 100,
    max_turns: Count = 10,
    corpus: str = "factbook",
    retriever: str = "bm25",
    judge_model: str | None = None,
    judge_base_url: str | None = None,
    judge_api_key_var: str = "OPENAI_API_KEY",
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.Environment:
    """The wiki-search environment.

    Args:
        num_train_examples: Training questions, -1 for all.
        num_eval_examples: Held-out questions, -1 for all; their pages do not occur in training
            questions.
        max_turns: Model calls, including those with tool calls.
        corpus: "factbook", shipped with the package, or "rare-wiki", pages and questions from the
            Hugging Face hub.
        retriever: "bm25"; "dense" (extra `dense`); "chroma" (extra `chroma`).
        judge_model: A model that compares the answers. Default: none; normalised answers must be
            equal.
        judge_base_url: Endpoint of the judge. Default: OpenAI's API.
        judge_api_key_var: Environment variable with the API key of the judge.
        seed: Determines order and choice of the questions; equal arguments give equal questions on
            every machine.
        system_prompt: Default: an instruction that names the tools and the tags. "" sends none.

    Raises:
        ConfigError: An invalid argument, by name; or an extra is missing.
        DatasetError: corpus="rare-wiki" without network.
    """
    if corpus not in CORPORA:
        load_corpus(corpus)  # raises ConfigError
    pages = _Pages(corpus, retriever)
    train, held_out = _questions(corpus, seed)
    parser = vf.XMLParser(["answer"], last=True)
    return vf.ToolEnv(
        tools=[pages.search_pages, pages.view_sections, pages.read_section],
        max_turns=max_turns,
        parallel_tool_calls=True,
        dataset=_first_rows("num_train_examples", train, num_train_examples),
        eval_dataset=_first_rows("num_eval_examples", held_out, num_eval_examples),
        system_prompt=(SYSTEM_PROMPT if system_prompt is None else system_prompt) or None,
        parser=parser,
        rubric=_make_rubric(parser, judge_model, judge_base_url, judge_api_key_var),
    )


class _Pages:
    """The three tools over one corpus; the index is built at the first search and shared by all
    environments."""

    def __init__(self, corpus: str, retriever: str):
        self._corpus_name, self._retriever_name = corpus, retriever
        _check_retriever(retriever)

    @property
    def _corpus(self) -> Corpus:
        return load_corpus(self._corpus_name)

    def search_pages(self, query: str) -> str:
        """Search the encyclopaedia for pages.

        Args:
            query: Words to look for.

        Returns:
            Up to ten pages, the best first, one per line: page id and title.
        """
        pages = _index(self._corpus_name, self._retriever_name).search(query, NUM_PAGES)
        return "\n".join(f"{page.page_id}: {page.title}" for page in pages) or "no page was found"

    def view_sections(self, page_id: str) -> str:
        """List the sections of a page.

        Args:
            page_id: The id of a page, from search_pages.

        Returns:
            One section per line: section id and title.
        """
        sections = self._corpus.page(page_id).sections
        return "\n".join(f"{section_id}: {title}" for section_id, (title, _) in sections.items())

    def read_section(self, section_id: str) -> str:
        """Read a section of a page.

        Args:
            section_id: The id of a section, from view_sections.

        Returns:
            The section's text.
        """
        return self._corpus.section(section_id)


@functools.cache
def _index(corpus: str, retriever: str) -> Any:
    return make_retriever(retriever, load_corpus(corpus))


def _check_retriever(name: str) -> None:
    """Raise early what would fail at the first search."""
    if name != "bm25":
        make_retriever(name, Corpus(load_corpus("factbook").pages[:1]))


def _questions(corpus: str, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training rows, held-out rows) in seeded order; the split is independent of the seed."""
    if corpus == "rare-wiki":
        rows = [
            _row(row["question"], row["answer"], str(row.get("filename", number)), {})
            for number, row in enumerate(hub_rows(HUB_QUESTIONS))
        ]
    else:
        lines = Path(__file__).with_name("questions.jsonl").read_text(encoding="ascii").splitlines()
        rows = [_row(q["question"], q["answer"], q["page_id"], q) for q in map(json.loads, lines)]
    random.Random(seed).shuffle(rows)
    held_out = [row for row in rows if _is_held_out(row["info"]["page_id"])]
    return [row for row in rows if not _is_held_out(row["info"]["page_id"])], held_out


def _row(question: str, answer: str, page_id: str, source: dict[str, object]) -> dict[str, Any]:
    info = {
        "page_id": page_id,
        "section_id": source.get("section_id", ""),
        "kind": source.get("kind", ""),
    }
    return {"question": question, "answer": answer, "info": info}


def _is_held_out(page_id: str) -> bool:
    return int.from_bytes(hashlib.sha256(page_id.encode()).digest()[:4], "big") % HELD_OUT == 0


def _first_rows(name: str, rows: list[dict[str, object]], number: int) -> list[dict[str, object]]:
    if number > len(rows):
        raise vf.ConfigError(
            f"{name} is {number}; there are {len(rows)} such questions, -1 uses all", key=name
        )
    return rows if number == -1 else rows[:number]


def _make_rubric(
    parser: vf.Parser, judge_model: str | None, base_url: str | None, key_var: str
) -> vf.Rubric:
    # Coroutines run on the event loop: they take microseconds, less than a switch to a thread.
    async def exact_match(completion: vf.Messages, answer: str) -> float:
        """1 when the last answer block contains the right answer."""
        return float(matches(parser.parse_answer(completion), answer))

    async def evidence_read(state: vf.State, info: dict[str, object]) -> float:
        """1 when the section with the answer was read."""
        replies = [message for step in state["trajectory"] for message in step["completion"]]
        calls = [call for message in replies for call in message.tool_calls or ()]
        return float(
            any(
                call.name == "read_section" and info["section_id"] in call.arguments
                for call in calls
            )
        )

    metrics = [evidence_read] if judge_model is None else [exact_match, evidence_read]
    rubric = (
        vf.Rubric([exact_match], parser=parser)
        if judge_model is None
        else _judge(parser, judge_model, base_url, key_var)
    )
    for metric in metrics:
        rubric.add_metric(metric)
    return rubric


def _judge(parser: vf.Parser, model: str, base_url: str | None, key_var: str) -> vf.Rubric:
    where = {} if base_url is None else {"api_base_url": base_url}

    async def judged_correct(
        judge: Callable[..., Awaitable[str]],
        prompt: vf.Messages,
        completion: vf.Messages,
        answer: str,
        state: vf.State,
    ) -> float:
        """1 when the judge accepts the answer; unknown when its verdict is neither yes nor no."""
        if not parser.parse_answer(completion):
            return 0.0
        verdict = (await judge(prompt, completion, answer, state)).strip().strip(".!").casefold()
        if verdict not in ("yes", "no"):
            raise ValueError(
                f"the verdict of the judge {model} is neither yes nor no: {verdict[:80]!r}"
            )
        return float(verdict == "yes")

    client = vf.ClientConfig(api_key_var=key_var, **where)
    return vf.JudgeRubric(
        judge_client=client, judge_model=model, funcs=[judged_correct], parser=parser
    )
