"""The layers are a contract of import-linter in ``pyproject.toml``; functions' and type-only
imports count."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.import_graph import CORE, REPOSITORY, TRAINER, imports

LINT = Path(sys.executable).with_name("lint-imports")
MAX_FILES_AT_THE_TOP = 12


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LINT), "--no-cache", "--no-logo"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_layer_imports_downwards_and_no_packages_form_a_ring():
    ran = lint(REPOSITORY)

    assert ran.returncode == 0, ran.stdout


def test_an_import_that_goes_up_would_be_found(tmp_path):
    """Negative control: a module of a low layer that imports a higher one inside a function."""
    package = tmp_path / "house"
    for name in ("low", "high"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "low/module.py").write_text(
        "def call():\n    from house.high import module\n    return module\n"
    )
    (package / "high/module.py").touch()
    (tmp_path / "pyproject.toml").write_text(
        '[tool.importlinter]\nroot_packages = ["house"]\n[[tool.importlinter.contracts]]\nname ='
        ' "layers"\ntype = "layers"\ncontainers = ["house"]\nlayers = ["high", "low"]\n'
    )

    ran = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path.insert(0, '.'); sys.argv = ['lint-imports', '--no-cache']\n"
         "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "house.low is not allowed to import house.high" in ran.stdout


@pytest.mark.parametrize("package", [CORE, TRAINER], ids=lambda path: path.name)
def test_few_files_lie_at_the_top_of_a_package(package):
    assert len(list(package.glob("*.py"))) <= MAX_FILES_AT_THE_TOP


def test_the_root_module_imports_what_makes_old_names_work_and_nothing_else_of_its_package():
    targets = [t for t in imports(CORE)["verifiers"] if t.startswith("verifiers")]

    assert sorted(targets) == ["verifiers.legacy.modules", "verifiers.legacy.moved"]
