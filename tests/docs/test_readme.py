"""Every block of the READMEs is executed or parsed, by the convention of the documentation
(``support.doc_blocks``).

What their shell blocks show is run on the pages of ``docs``; here the options of their commands are
checked.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import verifiers as vf
from support import doc_blocks

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
READMES = [README, ROOT / "packages/core/README.md"]
BLOCKS = doc_blocks.blocks_of(README)
COMMANDS = sorted(
    {
        line.partition("#")[0].strip()
        for block in BLOCKS
        if block.language == "bash"
        for line in block.code.splitlines()
        if re.match(r"(\w+=\S+ )?vf-", line)
    }
)


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_and_toml_blocks_do_what_they_say(page, tmp_path):
    if any(block.language == "toml" for block in doc_blocks.blocks_of(page)):
        pytest.importorskip("verifiers_trainer")
    with doc_blocks.reader(tmp_path) as reader:
        reader.try_out([block for block in doc_blocks.blocks_of(page) if block.language != "bash"])
        names = reader.names
    if page == README:
        assert isinstance(names["load_environment"](), vf.Environment)
    assert len(names["results"]) > 0


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_commands_exist(command, tmp_path):
    """``--help`` after them: a wrong option or a missing argument is found, and nothing runs."""
    words = [word for word in shlex.split(command) if "=" not in word or word.startswith("-")]
    options = {
        word.partition("=")[0]
        for word in words[1:]
        if re.match(r"--?[a-z]", word) and "." not in word
    }
    tool = [
        Path(sys.executable).parent / words[0],
        *(["quickstart"] if "quickstart" in words else []),
    ]
    said = subprocess.run(
        [*tool, "--help"], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert not [
        option for option in options if not re.search(rf"(^|[\s,]){option}\b", said, re.M)
    ], said


def test_it_shows_a_learning_curve_and_the_viewer():
    text = README.read_text(encoding="utf-8")
    assert {"docs/pictures/quickstart.png", "docs/pictures/view.png"} <= set(
        re.findall(r"!\[[^]]+\]\((.+?)\)", text)
    )


def test_every_linked_file_exists():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
