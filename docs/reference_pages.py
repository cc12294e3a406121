"""Writes the generated pages of ``docs/reference``, so that they cannot say anything else than the code does.

    python docs/reference_pages.py            write them
    python docs/reference_pages.py --check    exit 1 when one of them is not what the code says

``commands.md`` is what every command says to ``--help``, ``settings.md`` the fields of a training run and of an
evaluation with their comments, ``modules.md`` the first line of every module and of every public name. The full
docstrings are on the built site (``docs/conf.py``).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "reference"
PACKAGES = {
    "verifiers": "packages/core/src",
    "verifiers_trainer": "packages/trainer/src",
    "verifiers_sandboxes": "packages/sandboxes/src",
}
ROOT = Path(__file__).parents[1]
COMMANDS = (
    "vf-eval",
    "vf-init",
    "vf-install",
    "vf-setup",
    "vf-train",
    "vf-train quickstart",
    "vf-vllm",
    "vf-view",
    "vf-tui",
)
MADE = "\nThis page is made by `python docs/reference_pages.py`.\n"


# --- commands ---------------------------------------------------------------------------------------------------


def commands() -> str:
    """What each installed command says about itself."""
    parts = ["# Commands\n" + MADE]
    scripts = {script.name: script.value for script in importlib.metadata.entry_points(group="console_scripts")}
    for command in COMMANDS:
        name, *words = command.split()
        if name in scripts:
            parts.append(f"## {command}\n\n```text\n{_help(scripts[name], name, words)}\n```\n")
    return "\n".join(parts)


def _help(entry_point: str, name: str, words: Sequence[str]) -> str:
    module, _, function = entry_point.partition(":")
    code = (
        f"import sys; sys.argv = {[name, *words, '--help']!r}; from {module} import {function}; sys.exit({function}())"
    )
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


# --- settings ---------------------------------------------------------------------------------------------------


def settings() -> str:
    """The fields of ``RLConfig`` with default and meaning, and those of an evaluation."""
    parts = [
        "# Settings\n" + MADE,
        "## Training: RLConfig\n\nKeys of `[trainer.args]`, keywords of `vf.RLConfig` and `vf.GRPOConfig`. Every field "
        "of `transformers.TrainingArguments` is one too; shown here are those with another default and our own. Other "
        "names of them: [older spellings](compat.md).\n\nA training is resumed with the same settings; those that may "
        "change have the reason in the column *may change*.\n",
        _training_table(),
        "### Settings of transformers that may change\n\nAll others must be the same.\n",
        _rows(("setting", "may change"), sorted(_inherited_that_may_change())),
        "## What GRPOConfig sets differently\n",
        _rows(("setting", "default"), sorted(_grpo_defaults().items())),
        "## Evaluations: options of evaluate and generate\n",
        _table(importlib.import_module("verifiers.runs.options"), "RunOptions"),
    ]
    return "\n".join(parts)


def _grpo_defaults() -> dict[str, str]:
    defaults = importlib.import_module("verifiers_trainer.grpo").GRPOConfig.DEFAULTS
    return {f"`{name}`": f"`{value!r}`" for name, value in defaults.items()}


def _training_table() -> str:
    module = importlib.import_module("verifiers_trainer.settings.fields")
    defaults = {field.name: _default(field) for field in dataclasses.fields(module.RLFields)}
    rows = [
        (f"`{name}`", f"`{defaults[name]}`", text, _may_change(module, name))
        for name, text in _documented(module, "RLFields")
    ]
    return _rows(("setting", "default", "meaning", "may change"), rows)


def _inherited_that_may_change() -> Iterator[tuple[str, str]]:
    module = importlib.import_module("verifiers_trainer.settings.fields")
    for name in module.Inherited.__annotations__:
        if reason := _may_change(module, name):
            yield f"`{name}`", reason


def _may_change(module: Any, name: str) -> str:
    """Why a resumed training may have another value; empty where it must be the same."""
    if module.marker(name, module.OnceSet):
        return "from None to a value"
    mark = module.marker(name, module.MayChange)
    if mark is None or not mark.keys:
        return mark.because if mark else ""
    return f"entries {', '.join(f'`{key}`' for key in sorted(mark.keys))}: {mark.because}"


def _table(module: Any, cls: str) -> str:
    defaults = {field.name: _default(field) for field in dataclasses.fields(getattr(module, cls))}
    rows = [(f"`{name}`", f"`{defaults[name]}`", said) for name, said in _documented(module, cls)]
    return _rows(("setting", "default", "meaning"), rows)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return repr(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"


def _documented(module: Any, cls: str) -> Iterator[tuple[str, str]]:
    """(field, the text below it) in the order of the class."""
    source = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    body = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == cls).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield node.target.id, _cell(str(text))


# --- modules ----------------------------------------------------------------------------------------------------


def modules() -> str:
    """Public names and modules with the first sentence of their docstrings."""
    parts = ["# Names and modules\n" + MADE, "## Names of vf\n\n`import verifiers as vf`.\n", _names()]
    for package, source in PACKAGES.items():
        parts.append(f"## Modules of {package}\n")
        parts.append(_rows(("module", ""), list(_modules(ROOT / source / package, package))))
    return "\n".join(parts)


def _names() -> str:
    vf = importlib.import_module("verifiers")
    rows = []
    for name in sorted({*vf.__all__, *vf._TRAINER, *vf._INTEGRATIONS}, key=str.lower):
        value = getattr(vf, name)
        is_ours = str(getattr(value, "__module__", "")).startswith(tuple(PACKAGES))
        rows.append((f"`vf.{name}`", _first(value.__doc__ or "") if is_ours else ""))
    return _rows(("name", ""), rows)


def _modules(folder: Path, package: str) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).with_suffix("").parts
        if "templates" in inside or any(part.startswith("_") and part != "__init__" for part in inside):
            continue
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield f"`{'.'.join([package, *(part for part in inside if part != '__init__')])}`", _first(text)


def _first(text: str) -> str:
    """The first sentence or line of a docstring, as a cell."""
    paragraph = _cell(text.strip().split("\n\n", 1)[0])
    return paragraph.split(". ", 1)[0].rstrip(".:")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


PAGES = {"commands.md": commands, "settings.md": settings, "modules.md": modules}


def main(arguments: Sequence[str]) -> int:
    """Write or check the pages; the exit code."""
    stale = []
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        path, made = FOLDER / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == made:
            continue
        stale.append(name)
        if "--check" not in arguments:
            path.write_text(made, encoding="utf-8")
    said = "not what the code says; run python docs/reference_pages.py" if "--check" in arguments else "written"
    sys.stdout.write(f"{', '.join(stale)}: {said}\n" if stale else "up to date\n")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
