"""Every benchmark runs with `--quick` and prints its ratio, all but three with the long tests. No
test of a time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("[!_]*.py"))
NEEDS_TRAINER = {name for name in SCRIPTS if name.startswith("trainer_")} | {"samples.py"}


def run(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("OPENAI")
    }
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_there_is_a_script_for_each_figure_that_is_claimed():
    assert {
        "rollouts.py",
        "latency.py",
        "turns.py",
        "memory.py",
        "peers.py",
        "startup.py",
        "journal.py",
        "samples.py",
        "client.py",
        "trainer_step.py",
        "trainer_overlap.py",
        "trainer_learning.py",
        "trainer_recipes.py",
        "trainer_imitation.py",
        "trainer_parts.py",
    } <= set(SCRIPTS)


SHORT = ("client.py", "journal.py", "rollouts.py")


@pytest.mark.parametrize(
    "script",
    [
        script if script in SHORT else pytest.param(script, marks=pytest.mark.slow)
        for script in SCRIPTS
    ],
)
def test_a_quick_run_prints_its_ratio_and_leaves_nothing_behind(script, tmp_path):
    if script in NEEDS_TRAINER:
        pytest.importorskip("torch", reason="needs the trainer")
    ended = run(script, tmp_path, "--quick")
    if ended.returncode == 77:  # needs what this machine lacks
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^\w+: .*over.*: \d+\.\d\dx", ended.stdout, re.MULTILINE), ended.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_readme_says_how_to_run_it(script):
    assert f"benchmarks/{script}" in (BENCHMARKS / "README.md").read_text()


def test_quick_numbers_are_not_stored(tmp_path):
    ended = run("journal.py", tmp_path, "--quick", "--store")
    assert ended.returncode == 2
    assert "not worth storing" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(path.name for path in BENCHMARKS.glob("gpu/[!_]*.py")))
def test_the_scripts_for_a_gpu_work_without_one(script, tmp_path):
    pytest.importorskip("torch", reason="needs the trainer")
    options = ["--no-trl", "--steps", "3"] if script == "training.py" else []
    ended = run(f"gpu/{script}", tmp_path, "--cpu", "--tiny", *options)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"\d+ tokens/s|\d+ GB/s|\d+ ms", ended.stdout), ended.stdout
    assert list(tmp_path.iterdir()) == []
