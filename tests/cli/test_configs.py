"""Every shipped configuration file is accepted by the command it is for."""

from pathlib import Path

import pytest

from verifiers.cli.evaluate.command import run_command
from verifiers.clients import load_endpoints

ROOT = Path(__file__).parents[2]
EVAL_FILES = sorted((ROOT / "configs/eval").glob("*.toml"))


def test_endpoint_registry_is_read():
    assert "local-server" in load_endpoints(ROOT / "configs/endpoints.toml")


@pytest.mark.parametrize("file", EVAL_FILES, ids=lambda file: file.stem)
def test_evaluation_file_resolves(file, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert run_command([str(file), "--dry-run", "-m", "local-server"]) == 0
    assert "rollouts" in capsys.readouterr().out
