"""Each environment package works in a virtual environment of its own that holds core and nothing
else it does not name.

That is what shows a missing dependency: the workspace's own environment holds everything. Packages
are built and installed as a user would (no editable installs, no workspace), then evaluated against
a real loopback server. Needs uv and a package index or a filled cache; skipped, with the reason,
where there are none.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from verifiers.testing import FakeServer

ROOT = Path(__file__).resolve().parents[2]
ENVS = ROOT / "packages" / "envs"
IDS = sorted(folder.name for folder in ENVS.iterdir() if (folder / "pyproject.toml").is_file())
BUILT = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")

pytestmark = [pytest.mark.slow, pytest.mark.real]


def reply(request):
    """An answer, and to a judge's prompt a verdict: a score in an answer is the answer's, which no
    judge may quote."""
    return "<score>5</score>" if "<score>" in request.prompt[-1]["content"] else "Fine."


def run(*command, cwd, **variables):
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI", "VIRTUAL_ENV"))
    }
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def uv(tmp_path_factory):
    """uv, where it can install something."""
    program = shutil.which("uv")
    if program is None:
        pytest.skip("uv is not installed")
    folder = tmp_path_factory.mktemp("probe")
    probe = run(
        program, "pip", "install", "--no-deps", "--target", folder / "probe", "click", cwd=folder
    )
    if probe.returncode:
        pytest.skip(f"uv can install nothing here: {probe.stderr.strip().splitlines()[-1]}")
    return program


@pytest.fixture(scope="module")
def wheels(uv, tmp_path_factory):
    """A folder with the wheels of core and of every environment, built from copies."""
    folder = tmp_path_factory.mktemp("wheels")
    for source in (ROOT / "packages" / "core", *(ENVS / env_id for env_id in IDS)):
        copy = folder / "sources" / source.name
        shutil.copytree(source, copy, ignore=BUILT)
        built = run(uv, "build", "--wheel", "--no-sources", "--out-dir", folder, copy, cwd=folder)
        assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.parametrize("env_id", IDS)
def test_it_installs_and_evaluates_alone(env_id, uv, wheels, tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    assert run(uv, "venv", "--quiet", tmp_path / "venv", cwd=tmp_path).returncode == 0
    wanted = f"vf-{env_id}"
    (core,), (package,) = (
        wheels.glob("verifiers-*.whl"),
        wheels.glob(f"{wanted.replace('-', '_')}-*.whl"),
    )
    # this core, no other of the name
    installed = run(uv, "pip", "install", "--python", python, core, package, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    listed = run(uv, "pip", "list", "--python", python, cwd=tmp_path).stdout
    assert [line.split()[0] for line in listed.splitlines() if line.startswith("vf-")] == [wanted]
    with FakeServer(reply) as server:
        command = [
            tmp_path / "venv" / "bin" / "vf-eval",
            env_id,
            "-n",
            "2",
            "-r",
            "1",
            "-b",
            server.url,
            "-m",
            "fake",
        ]
        ended = run(*command, cwd=tmp_path)
        asked = len(server.hits)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert asked >= 2
    rows = list((tmp_path / "outputs").rglob("results.jsonl"))
    assert len(rows) == 1
    assert rows[0].read_text(encoding="utf-8").count("\n") == 2
