"""Run the notebooks of ``examples`` and store what their cells show.

    python docs/notebooks.py                  all of them
    python docs/notebooks.py evaluate         one

A plain runner, without Jupyter: the cells share their names and run, like in Jupyter, inside a
running event loop, so ``await`` at the top of a cell works and blocking calls must work too. Stored
are the printed text and what the last expression of a cell shows, as text, HTML or PNG.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import inspect
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples"
SHOWN = {"text/html": "_repr_html_", "image/png": "_repr_png_"}


def run(path: Path) -> dict[str, Any]:
    """Execute every code cell of a notebook in a temporary folder; return the notebook with the new
    outputs.

    *Raises* what a cell raises.
    """
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            asyncio.run(_run_cells(path.name, notebook["cells"], folder))
        finally:
            os.chdir(before)
    return notebook


async def _run_cells(name: str, cells: list[dict[str, Any]], folder: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(code_cells, 1):
        printed, shown = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            shown = await _run_cell(f"{name}[{number}]", "".join(cell["source"]), names)
        cell["execution_count"], cell["outputs"] = number, []
        if text := printed.getvalue():
            cell["outputs"].append(
                {"name": "stdout", "output_type": "stream", "text": text.splitlines(True)}
            )
        if shown is not None:
            data = {kind: value.replace(folder, "…") for kind, value in _displayed(shown).items()}
            cell["outputs"].append(
                {
                    "data": data,
                    "execution_count": number,
                    "metadata": {},
                    "output_type": "execute_result",
                }
            )


async def _run_cell(name: str, source: str, names: dict[str, Any]) -> Any:
    """Execute a cell; return the value of its last expression, None when it has none or ends with a
    semicolon."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    result = eval(compile(tree, name, "exec", flags=flags), names)
    if inspect.iscoroutine(result):
        await result
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval", flags=flags), names)
    value = await value if inspect.iscoroutine(value) else value
    return None if source.rstrip().endswith(";") else value


def _displayed(value: Any) -> dict[str, str]:
    data = {"text/plain": re.sub(r" at 0x[0-9a-f]+", "", repr(value))}
    for kind, method in SHOWN.items():
        shown = getattr(value, method)() if hasattr(value, method) else None
        if shown is not None:
            data[kind] = base64.b64encode(shown).decode() if isinstance(shown, bytes) else shown
    return data


def main(names: list[str]) -> None:
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        path.write_text(
            json.dumps(run(path), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        sys.stdout.write(f"{path.name}: {path.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1:])
