"""No message and no page installs a distribution of this project by its name: on the public index
it is another's."""

import re

import pytest

from support.import_graph import REPOSITORY

WHERE = REPOSITORY / "packages/core/src/verifiers/runtime/install_lines.py"
BY_NAME = re.compile(
    r"(?:pip install|uv add)\b[^`;\n]*?(?<![\w/.-])"
    r"(?:verifiers(?:-agents|-integrations|-sandboxes|-trainer)?|vf-[a-z][\w-]*)(?:\[[^\]]*\])?(?![\w/.\[-])(?! @ )"
)
FILES = sorted(
    {
        *REPOSITORY.glob("packages/**/src/**/*.py"),
        *REPOSITORY.glob("packages/**/src/**/*.tmpl"),
        *REPOSITORY.glob("packages/**/README.md"),
        *REPOSITORY.glob("examples/**/*.py"),
        *REPOSITORY.glob("examples/**/*.md"),
        *REPOSITORY.glob("docs/**/*.md"),
        *REPOSITORY.glob("*.md"),
    }
    - {WHERE, REPOSITORY / "CHANGELOG.md"}
)


def test_nothing_is_installed_by_a_name_of_the_public_index():
    assert len(FILES) > 300
    texts = {
        path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8") for path in FILES
    }
    assert [
        f"{name}: {match[0]}" for name, text in texts.items() for match in BY_NAME.finditer(text)
    ] == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install 'verifiers[math]'",
        'pip install "verifiers"',
        "uv pip install skyrl==0.3 verifiers",
        "`pip install --no-deps verifiers-trainer`",
        "uv add vf-gsm8k",
    ],
)
def test_such_a_line_would_be_found(line):
    """Negative control."""
    assert BY_NAME.search(line)


@pytest.mark.parametrize(
    "line",
    [
        "uv pip install -e 'packages/core[math]'",
        "pip install 'verifiers[math] @ git+https://host/r'",
        "uv add --editable ../verifiers/packages/core",
        "a plain `pip install` takes what the index calls `verifiers`",
        "pip install polars\nimport verifiers",
    ],
)
def test_a_line_that_names_a_place_is_not(line):
    assert not BY_NAME.search(line)
