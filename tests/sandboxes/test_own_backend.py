"""A backend of a stranger: one class in one file of a distribution of its own, the one of the page
about sandboxes. Core finds it by its entry point, and every attack runs against it."""

import asyncio
import sys

import pytest

import verifiers as vf
from support.doc_blocks import blocks_of
from support.import_graph import REPOSITORY
from support.isolated import isolating, needs_sandbox
from verifiers.sandbox import backend_for, choice
from verifiers.sandbox.probe import attempt, bait
from verifiers.sandbox.probe.attacks import ATTACKS
from verifiers.testing import ScriptedClient

PAGE = REPOSITORY / "docs/environments/sandbox.md"
FAST = {"environment", "proc environ", "private file", "loopback", "kill"}


def installed(folder, source):
    """Install a distribution with the backend ``cage`` into a folder."""
    info = folder / "stranger-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[verifiers.sandboxes]\ncage = cage:Cage\n")
    (folder / "cage.py").write_text(source)


@pytest.fixture
def cage(tmp_path, monkeypatch):
    """Installs the class of the page, with a part of it replaced."""
    needs_sandbox("bubblewrap")
    (source,) = (block.code for block in blocks_of(PAGE) if block.marks.get("file") == "cage.py")
    monkeypatch.syspath_prepend(tmp_path)

    def install(part="", by=""):
        assert part in source
        installed(tmp_path, source.replace(part, by) if part else source)

    yield install
    sys.modules.pop("cage", None)


async def outcomes(names):
    backend = await backend_for("cage")
    with bait() as baits:
        return [await attempt(backend, attack, baits) for attack in ATTACKS if attack.name in names]


def test_it_is_found_by_its_entry_point_and_used_by_its_name(cage):
    assert "cage" not in choice.backend_names(), "the control: nothing of it is known before"
    cage()
    env = vf.PythonEnv("", dataset=[{"question": "?"}], sandbox="cage")
    script = [vf.ToolCall("c1", "python", {"code": "6 * 7"}), "Done."]
    results = env.evaluate(ScriptedClient(script), model="scripted")
    assert "42" in results["completions"][0][1].content


def test_the_attacks_take_it_without_a_line_for_it(cage):
    def names():
        return {getattr(param, "values", [param])[0] for param in isolating()}

    before = names()
    cage()
    assert names() == before | {"cage"}
    assert {"bubblewrap", "sandlock", "docker", "podman", "gvisor", "nsjail"} <= before
    assert not before & {"e2b", "modal", "daytona", "prime", "unsafe_subprocess"}


def test_attacks_on_it_are_stopped(cage):
    cage()
    tried = asyncio.run(outcomes(FAST))
    assert len(tried) == len(FAST)
    assert [outcome for outcome in tried if outcome.reached] == []


@pytest.mark.slow
def test_every_attack_on_it_is_stopped(cage):
    cage()
    tried = asyncio.run(outcomes({attack.name for attack in ATTACKS}))
    assert len(tried) == len(ATTACKS)
    assert [outcome for outcome in tried if outcome.reached] == []


def test_negative_control_a_backend_with_a_hole_is_found_out(cage):
    cage(" --unshare-net")
    (outcome,) = asyncio.run(outcomes({"loopback"}))
    assert outcome.reached
