"""Render the files of a new environment package from templates.

A template is a folder below ``templates/environment``: a README, a test, and a package of several
modules. The single-module variant of the package is made by joining these modules. Reads only the
shipped templates; ``cli.init`` writes the files.
"""

from __future__ import annotations

import ast
import importlib.resources
import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verifiers.environments.local_sources import normalize_name
from verifiers.environments.registry import parse_env_id
from verifiers.errors import ConfigError
from verifiers.runtime.syntax import parse_python

if TYPE_CHECKING:
    from verifiers.cli.table import Questions

Template = Literal["single", "multi", "tool", "stateful", "python"]
TEMPLATES = {
    "single": (
        "Questions with a short answer: a single-turn environment for verifiers that runs offline."
    ),
    "multi": "Guess a number: a multi-turn environment for verifiers that runs offline.",
    "tool": "Questions about a shop: an environment with tools for verifiers that runs offline.",
    "stateful": (
        "Orders for a bank: an environment with tools that change a state, for verifiers; runs"
        " offline."
    ),
    "python": (
        "Questions to answer with Python in a sandbox: an environment for verifiers that runs"
        " offline."
    ),
}
"""Template -> summary of the package that it creates."""

TABLE = "table"
TABLE_SUMMARY = "Questions of a table with their answers: a single-turn environment for verifiers."
"""The template of ``--from``, which needs rows."""

MODULES = ("data", "rewards")
"""The modules of a package besides ``__init__``, in the order in which they are joined."""

GITIGNORE = "__pycache__/\n*.egg-info/\nbuild/\ndist/\n.venv/\noutputs/\n"


@dataclass(frozen=True, slots=True)
class Names:
    """The spellings of an environment's name: ``Names("word-game")`` has ``vf_word_game``."""

    id: str

    @property
    def module(self) -> str:
        """The import name."""
        return f"vf_{self.underscored}"

    @property
    def underscored(self) -> str:
        """The id as a part of Python names."""
        return self.id.replace("-", "_")


def parse_name(text: str) -> Names:
    """The names of a new environment: a normalised id, without a leading ``vf-``.

    *Raises* ``ConfigError`` for a name with an owner, a version, or other characters.

    >>> parse_name("vf-Custom_Environment").id
    'custom-environment'
    """
    rule = (
        f"{text!r} cannot be the name of an environment: use ASCII letters, digits, '-', '_' and"
        " '.', beginning and ending with a letter or digit, at most 100 of them"
    )
    try:
        parts = parse_env_id(text)
    except ValueError:
        raise ConfigError(rule) from None
    if parts.owner or parts.version:
        raise ConfigError(
            f"{text!r}: a new environment has neither owner nor version; name it {parts.name!r}"
        )
    name = normalize_name(parts.name).removeprefix("vf-")
    if not name or name.startswith("-") or name.endswith("-"):
        raise ConfigError(rule)
    return Names(name)


def render(
    names: Names,
    template: str,
    *,
    folder: str,
    multi_file: bool = False,
    tests: bool = True,
    member: bool = False,
    source: str | None = None,
    questions: Questions | None = None,
    judge_model: str | None = None,
) -> dict[str, str]:
    """Text of every file by its path inside the package's folder.

    ``folder``: that folder's path in the README. ``member``: the package joins the workspace of
    ``verifiers`` itself, depends on that copy and has its licence; otherwise the author chooses a
    licence. ``source``: source of ``verifiers`` for uv otherwise, as a TOML table; None means the
    package index. ``questions``: of a table, with the template ``TABLE``, whose default judge is
    ``judge_model``. Of them only counts and a decimal mark get into code and texts.
    """
    source = "{ workspace = true }" if member else source
    values = {
        "id": names.id,
        "module": names.module,
        "folder": folder,
        "summary": TABLE_SUMMARY if template == TABLE else TEMPLATES[template],
        "license": 'license = "Apache-2.0"\n' if member else "",
        "sources": f"\n[tool.uv.sources]\nverifiers = {source}\n" if source else "",
    }
    if questions is not None:
        values |= _table_values(questions, judge_model)
    modules = {
        name: _filled(f"{template}/package/{name}.py", values) for name in ("__init__", *MODULES)
    }
    if not multi_file and questions is None:
        modules = {"__init__": join_modules(modules)}
    files = {"pyproject.toml": _filled("common/pyproject.toml", values)}
    files |= {f"src/{names.module}/{name}.py": text for name, text in modules.items()}
    files[f"src/{names.module}/py.typed"] = ""
    if questions is not None:
        files[f"src/{names.module}/rows.jsonl"] = questions.jsonl()
    files["README.md"] = _filled(f"{template}/README.md", values)
    if not member:
        files[".gitignore"] = GITIGNORE
        test = f"python -m pytest {folder}\n" if tests else ""
        files["AGENTS.md"] = _filled("common/AGENTS.md", values | {"test": test})
    if tests:
        files[f"tests/test_{names.underscored}.py"] = _filled(f"{template}/test.py", values)
    return files


def _table_values(questions: Questions, judge_model: str | None) -> dict[str, str]:
    sign = {",": "comma", ".": "point"}.get(questions.decimal_mark)
    return {
        "num_rows": str(len(questions.answers)),
        "num_held_out": str(questions.num_held_out),
        "decimal_mark": questions.decimal_mark,
        "numbers": f"Numbers are compared by their value, with a decimal {sign}." if sign else "",
        "judge_model": "None" if judge_model is None else json.dumps(judge_model),
        "judge_text": "`null`" if judge_model is None else f"`{json.dumps(judge_model)}`",
    }


def join_modules(modules: Mapping[str, str]) -> str:
    """``__init__`` with the bodies of its sibling modules instead of its imports from them."""
    lines = modules["__init__"].splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("from ."))
    body = _below_imports(text)
    head = text[: len(text) - len(body)].rstrip()
    bodies = "\n\n\n".join([*(_below_imports(modules[name]).rstrip() for name in MODULES), body])
    return f"{head}\n\n{bodies}"


def _below_imports(source: str) -> str:
    """The code of a module after its docstring and imports."""
    statements = parse_python(source).body
    first = next(s for s in statements if not isinstance(s, ast.Expr | ast.Import | ast.ImportFrom))
    return "".join(source.splitlines(keepends=True)[first.lineno - 1 :])


def _filled(path: str, values: Mapping[str, str]) -> str:
    template = importlib.resources.files("verifiers") / "templates" / "environment" / f"{path}.tmpl"
    return string.Template(template.read_text(encoding="utf-8")).substitute(values)
