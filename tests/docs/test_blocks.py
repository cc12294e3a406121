"""Every code block of the documentation is executed or parsed, page by page, from the top to the
bottom.

The convention is in ``support.doc_blocks``. Blocks that cannot run here say why, and are counted.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import doc_blocks, warm_commands
from support.isolated import needs_sandbox

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_site" not in page.parts)
NAMES = [page.relative_to(DOCS).as_posix() for page in PAGES]
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _marks(page):
    return [pytest.mark.slow] if doc_blocks.is_slow(page) else []


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=_marks(page))
        for page, name in zip(PAGES, NAMES, strict=True)
    ],
)
def test_page_does_what_it_says(page, tmp_path, capsys):
    blocks = doc_blocks.blocks_of(page, page.relative_to(DOCS).as_posix())
    if any(block.language == "toml" for block in blocks):
        pytest.importorskip("verifiers_trainer")
    if doc_blocks.needs_sandbox(page):
        needs_sandbox()
    with doc_blocks.reader(tmp_path) as reader:
        reader.try_out(blocks if doc_blocks.is_slow(page) else doc_blocks.without_slow(blocks))
    with capsys.disabled():
        for line in reader.skipped:
            print(f"\n  not run: {line}", end="")


@pytest.mark.slow
@pytest.mark.parametrize("page", [DOCS / "guide.md"], ids=["guide.md"])
def test_page_with_slow_blocks_does_what_it_says(page, tmp_path):
    for package in ("verifiers_trainer", "xllamacpp"):
        pytest.importorskip(package)
    with doc_blocks.reader(tmp_path) as reader:
        reader.try_out(doc_blocks.blocks_of(page))


def test_slow_blocks_are_tried_out_too():
    assert [
        page.name
        for page in PAGES
        if not doc_blocks.is_slow(page)
        and any("slow" in block.marks for block in doc_blocks.blocks_of(page))
    ] == ["guide.md"]


def test_few_blocks_are_not_run():
    blocks = [
        block
        for page in PAGES
        for block in doc_blocks.blocks_of(page)
        if block.language in ("python", "bash")
    ]
    skipped = [block for block in blocks if "not run" in block.marks]
    print(f"{len(blocks)} blocks of code, {len(skipped)} not run")
    assert len(skipped) <= 0.2 * len(blocks), [block.location for block in skipped]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor and path.suffix == ".md":
            assert anchor in _anchors(path), (
                f"{page.name} links to {target}#{anchor}, and there is no such heading"
            )


def _anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_every_page_is_reached_from_the_index():
    reached, queue = set(), [DOCS / "index.md"]
    while queue:
        page = queue.pop()
        reached.add(page)
        for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if (
                path.suffix == ".md"
                and DOCS in path.parents
                and path.exists()
                and path not in reached
            ):
                queue.append(path)
    assert {page.name for page in PAGES if page not in reached} == set()


# --- negative controls: a wrong page is found -----------------------------------------------------


def _try(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with doc_blocks.reader(tmp_path) as reader:
        reader.try_out(doc_blocks.blocks_of(page))
    return reader


def test_blocks_share_names_and_folder(tmp_path):
    text = (
        "```python\nx = 2\n```\n\n<!-- file: note.txt -->\n```text\nhello\n```\n\n```bash\ncat"
        " note.txt\n```\n\n"
    )
    text += (
        "<!-- output -->\n```text\nhel…\n```\n\n```python\nassert x == 2\nawait"
        " __import__('asyncio').sleep(0)\n```\n"
    )
    _try(tmp_path, text)


@pytest.mark.parametrize(
    "command",
    ["vf-init --help", "vf-compare no such | cat; exit 7", "echo x | vf-eval --", "cd ..; vf-view"],
)
def test_a_command_of_a_page_does_what_the_installed_one_does(tmp_path, command):
    installed = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    of_pages = {**installed, "PATH": f"{warm_commands.folder()}{os.pathsep}{installed['PATH']}"}
    runs = [
        subprocess.run(
            ["bash", "-c", command],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        for env in (installed, of_pages)
    ]
    first, second = [(run.returncode, run.stdout, run.stderr) for run in runs]
    assert second == first


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nassert 1 == 2\n```", "assert|^$"),
        ("```bash\nvf-eval --no-such-option\n```", "ended with 2, not 0"),
        ("<!-- exit: 2 -->\n```bash\ntrue\n```", "ended with 0, not 2"),
        ("```python\nprint('one')\n```\n\n<!-- output -->\n```text\ntwo\n```", "no such line"),
        (
            "```python\nprint('a 1')\n```\n\n<!-- output: numbers differ -->\n```text\nb 1\n```",
            "no such line",
        ),
        ("```ruby\nputs 1\n```", "no language"),
        ("<!-- not run -->\n```bash\ntrue\n```", "say why"),
        ("```toml\n[[eval]]\nenv_idd = 'x'\n```", "env_id"),
    ],
)
def test_a_page_that_says_something_untrue_is_found(tmp_path, text, said):
    with pytest.raises(AssertionError, match=said):
        _try(tmp_path, text + "\n")


def test_numbers_that_may_differ_and_blocks_that_are_slow(tmp_path):
    output = "<!-- output: numbers differ -->\n```text\nreward 0.512 ± 0.01\n```\n"
    text = "```python\nprint('reward 0.5 ± 1e-5')\n```\n\n" + output
    _try(tmp_path, text)
    page = tmp_path / "page.md"
    page.write_text("<!-- slow: hours -->\n" + text + "\n```python\nx = 1\n```\n")
    assert not doc_blocks.is_slow(page)
    assert [block.code for block in doc_blocks.without_slow(doc_blocks.blocks_of(page))] == [
        "x = 1\n"
    ]
    page.write_text("Text.\n\n<!-- slow: hours -->\n\nText.\n\n" + text)
    assert doc_blocks.is_slow(page)


def test_a_training_file_with_an_unknown_key_is_found(tmp_path):
    pytest.importorskip("verifiers_trainer")
    from verifiers.errors import ConfigError

    with pytest.raises(ConfigError, match="max_stepz"):
        _try(
            tmp_path,
            "```toml\nmodel = 'builtin:tiny'\n[env]\nid = 'reverse-text'\n[trainer.args]\nmax_stepz"
            " = 2\n```\n",
        )


def test_what_is_not_run_is_counted(tmp_path):
    reader = _try(tmp_path, "<!-- not run: needs a GPU -->\n```bash\nfalse\n```\n")
    assert reader.skipped == ["page.md:2: needs a GPU"]
