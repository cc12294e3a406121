"""Runs the code of a documentation page as its reader would: from the top, in one folder, with one
set of names.

What a reader brings is given: a folder, and an endpoint with a model (a ``FakeServer`` in the usual
environment variables). Python blocks share their names, shell blocks their folder. A comment
directly above a block, which no renderer shows, says what is particular about it:

    <!-- not run: reason -->    left out, counted, and listed by the test
    <!-- file: path -->         the reader saves it; a Python file is also tried out by being imported
    <!-- output -->             what the block before it printed: these lines, in this order; … stands for anything
    <!-- output: numbers differ --> the same, and any number stands for any other: the output is sampled
    <!-- exit: 2 -->            the code that a shell block ends with
    <!-- model: text -->        what the model says from here on; ``reversed``: the last user message, backwards
    <!-- slow: reason -->       above a block: it and its output are left out of the fast run of the page;
                                elsewhere: the page takes longer than ten seconds
    <!-- needs: bubblewrap -->  anywhere: the page is left out where that sandbox does not work

The languages are python, bash, toml (given to the reader that the product itself would use), and
text, none (shown) and pycon (shown: examples of docstrings, which ``tests/core/test_docstrings.py``
runs).
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import linecache
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import warm_commands
from verifiers.testing import FakeServer
from verifiers.testing.replies import last_user_text

SHOWN_URL = "http://127.0.0.1:8000/v1"
MODELS = ("my-model", "gpt-4.1-mini", "gpt-4.1-nano", "scripted")
LANGUAGES = ("python", "bash", "toml", "text", "pycon", "")
LIMIT_S = 300
_BLOCK = re.compile(
    r"^(?P<marks>(?:<!--(?:(?!-->).)*-->\n+)*)```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.M | re.S
)
_MARK = re.compile(r"<!--\s*(not run|file|output|exit|model|slow)(?::\s*(.*?))?\s*-->", re.S)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    code: str
    marks: dict[str, str]

    @property
    def location(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path, name: str = "") -> list[Block]:
    """The blocks of a page, in order."""
    text, blocks = page.read_text(encoding="utf-8"), []
    for match in _BLOCK.finditer(text):
        language, _, options = match["info"].strip().partition(" ")
        marks = {mark: said or "" for mark, said in _MARK.findall(match["marks"])}
        if "no-run" in options:
            marks["not run"] = "said on the block"
        line = text.count("\n", 0, match.start("info")) + 1
        blocks.append(Block(name or page.name, line, language, match["code"], marks))
    return blocks


def is_slow(page: Path) -> bool:
    """Return whether the whole page is slow; a mark above a block is that block's."""
    return "<!-- slow:" in _BLOCK.sub("", page.read_text(encoding="utf-8"))


def needs_sandbox(page: Path) -> bool:
    """Return whether blocks of the page run in bubblewrap."""
    return "<!-- needs: bubblewrap -->" in page.read_text(encoding="utf-8")


def without_slow(blocks: list[Block]) -> list[Block]:
    """Leave out the slow blocks and what they print."""
    kept, is_left_out = [], False
    for block in blocks:
        is_left_out = "slow" in block.marks or (is_left_out and "output" in block.marks)
        if not is_left_out:
            kept.append(block)
    return kept


@dataclass
class Reader:
    """Somebody who tries out one page."""

    folder: Path
    server: FakeServer
    says: list[str]
    names: dict[str, Any] = field(default_factory=dict)
    printed: str = ""
    skipped: list[str] = field(default_factory=list)

    def try_out(self, blocks: list[Block]) -> None:
        """Every block in order. Raises ``AssertionError`` that names the block for what is not as
        the page says."""
        for block in blocks:
            assert block.language in LANGUAGES, (
                f"{block.location}: no language {block.language!r} is known here"
            )
            if "model" in block.marks:
                self.says[0] = block.marks["model"]
            if "not run" in block.marks:
                assert block.marks["not run"], f"{block.location}: say why it is not run"
                self.skipped.append(f"{block.location}: {block.marks['not run']}")
                continue
            self._try(block)

    def _try(self, block: Block) -> None:
        code = block.code.replace(SHOWN_URL, self.server.url)
        if "output" in block.marks:
            self._compare(block)
            return
        if "file" in block.marks:
            path = self.folder / block.marks["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, encoding="utf-8")
        if block.language == "python":
            self.printed = self._python(block, code)
        elif block.language == "bash":
            self.printed = self._bash(block, code)
        elif block.language == "toml":
            read_toml(block, code)

    def _python(self, block: Block, code: str) -> str:
        """What the block prints. ``await`` at the top is allowed, as in a notebook."""
        name = f"<{block.location}>"
        code = "\n" * block.line + code  # so that a traceback gives the page's line
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        self.names.setdefault("__name__", "page")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            result = eval(compiled, self.names)
            if asyncio.iscoroutine(result):
                asyncio.run(result)
        return out.getvalue()

    def _bash(self, block: Block, code: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", code],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
        printed = done.stdout.decode("utf-8", "replace")
        expected = int(block.marks.get("exit", "0"))
        assert done.returncode == expected, (
            f"{block.location} ended with {done.returncode}, not {expected}:\n{printed}"
        )
        return printed

    def _compare(self, block: Block) -> None:
        printed, position = _squeezed(self.printed), 0
        for line in block.code.splitlines():
            for part in filter(None, map(_squeezed, line.split("…"))):
                pattern = re.escape(part)
                if block.marks["output"]:
                    assert block.marks["output"] == "numbers differ", (
                        f"{block.location}: {block.marks['output']!r}"
                    )
                    pattern = _NUMBER.pattern.join(map(re.escape, _NUMBER.split(part)))
                match = re.compile(pattern).search(printed, position)
                assert match, (
                    f"{block.location} shows {line!r}, and what was printed has no such"
                    f" line:\n{self.printed}"
                )
                position = match.end()


_NUMBER = re.compile(r"\d[\d.,]*(?:e-?\d+)?")


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def read_toml(block: Block, code: str) -> None:
    """Read a file by its own reader: an evaluation, a registry, an environment's defaults, or a
    training."""
    content = tomllib.loads(code)
    if {"eval", "ablation"} & content.keys() and "trainer" not in content:
        from verifiers.cli.evaluate.toml_args import read_files

        problems = read_files([_saved(block, code)]).problems
    elif "endpoint" in content:
        from verifiers.clients.endpoints import load_endpoints

        problems = [] if load_endpoints(_saved(block, code)) else ["no endpoint"]
    elif "tool" in content or "project" in content:
        return  # an environment's pyproject, which the block after it installs or checks
    else:
        from verifiers_trainer.cli.plan import make_plan

        make_plan(["@", _saved(block, code)])
        return
    assert not problems, f"{block.location}: {problems}"


def _saved(block: Block, code: str) -> str:
    """The path of the block as a file."""
    path = Path(block.marks.get("file", f"page-line-{block.line}.toml"))
    path.write_text(code, encoding="utf-8")
    return str(path)


def _answer(says: list[str]) -> Any:
    def reply(request: Any) -> str:
        asked = last_user_text(request)
        if "<score>" in str(request.prompt) and says[0] != "silent":  # a judge
            return "<score>8</score>"
        if says[0] == "reversed":
            return f"<reversed_text>{asked.strip().split()[-1][::-1]}</reversed_text>"
        return says[0]

    return reply


@contextlib.contextmanager
def reader(folder: Path) -> Iterator[Reader]:
    """A reader in ``folder``, with an endpoint and its variables."""
    says = ["reversed"]
    with FakeServer(_answer(says), models=MODELS) as server:
        tools = Path(sys.executable).parent
        variables = {
            "OPENAI_BASE_URL": server.url,
            "OPENAI_API_KEY": "any",
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "NO_COLOR": "1",
            "COLUMNS": "120",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PATH": os.pathsep.join([warm_commands.folder(), str(tools), os.environ["PATH"]]),
        }
        before, here = dict(os.environ), Path.cwd()
        os.environ.update(variables)
        os.chdir(folder)
        try:
            yield Reader(folder, server, says)
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(before)
