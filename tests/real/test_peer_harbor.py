"""The real ``harbor run`` over our twenty tasks, in our sandbox: its verdicts are those of
``HarborEnv``.

Run by ``python3 tests/real/peers.py harbor``, on Python 3.12.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("harbor", reason="harbor is not installed: python3 tests/real/peers.py harbor")

import verifiers as vf
from support.atif_rollouts import KINDS, played
from support.harbor_tasks import write_task
from support.isolated import needs_sandbox
from support.root_files import MARK, write_root
from verifiers.testing import ScriptedClient
from vf_shell_tasks import IMAGE, TASKS

pytestmark = pytest.mark.real
SANDBOX = "verifiers_agents.harbor_sandbox:Sandbox"


def harbor_run(path, agent, out, *words):
    """The rewards by task, the exceptions by task, and what it printed, on one line."""
    needs_sandbox()
    command = [
        Path(sys.executable).with_name("harbor"),
        "run",
        "--path",
        path,
        "--agent",
        agent,
        "--env",
        SANDBOX,
    ]
    # it would look for prices on the network first
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ran = subprocess.run(
        [*command, "-o", out, "-n", "4", *words],
        capture_output=True, text=True, check=False, timeout=540, env={**os.environ, **local},
    )  # fmt: skip
    trials = [json.loads(file.read_text()) for file in Path(out).glob("*/*/result.json")]
    printed = " ".join((ran.stdout + ran.stderr).replace("│", " ").split())
    names = {trial["task_name"].rpartition("/")[2]: trial for trial in trials}
    failed = {
        name: trial["exception_info"] for name, trial in names.items() if trial["exception_info"]
    }
    rewards = {
        name: (trial["verifier_result"] or {}).get("rewards") for name, trial in names.items()
    }
    return {name: reward["reward"] for name, reward in rewards.items() if reward}, failed, printed


def ours(agent):
    env = vf.HarborEnv(eval_path=TASKS, agent=agent, images={IMAGE: "host"})
    results = env.evaluate(ScriptedClient("never called"), "m", max_concurrent=4)
    return {output["task"]: output["reward"] for output in results.outputs}


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_its_verdicts_on_twenty_tasks_are_ours(agent, reward, tmp_path):
    rewards, failed, printed = harbor_run(TASKS, agent, tmp_path, "--ek", f"host_images={IMAGE}")
    assert failed == {}, printed
    assert rewards == ours(agent) == {folder.name: reward for folder in TASKS.iterdir()}


def test_what_the_sandbox_cannot_give_is_refused_in_one_sentence(tmp_path):
    asks = write_task(tmp_path / "tasks" / "asks", "[environment]\nnetwork_mode = 'public'\n")
    image = "host_images=debian:bookworm"
    *_, printed = harbor_run(asks, "oracle", tmp_path / "a", "--ek", image)
    assert "asks: the sandbox has no network; set [environment] network_mode" in printed
    *_, printed = harbor_run(asks, "oracle", tmp_path / "b", "--ek", "without_network=true")
    assert "asks: its image 'debian:bookworm' is not here" in printed
    rewards, failed, _ = harbor_run(
        asks, "oracle", tmp_path / "c", "--ek", image, "--ek", "without_network=true"
    )
    assert (rewards, failed) == ({"asks": 1.0}, {})


def test_a_dockerfile_with_commands_is_built_for_it(tmp_path):
    dockerfile = "FROM debian:bookworm\nENV A=right\nWORKDIR /app\nRUN echo $A > made.txt\n"
    solution = "#!/bin/sh\ncp made.txt out.txt\n"
    task = write_task(
        tmp_path / "built",
        '[environment]\nnetwork_mode = "no-network"\n',
        dockerfile=dockerfile,
        solution=solution,
    )
    rewards, failed, _ = harbor_run(
        task, "oracle", tmp_path / "out", "--ek", "host_images=debian:bookworm"
    )
    assert (rewards, failed) == ({"built": 1.0}, {})


def test_an_image_of_a_folder_is_its_root_file_system(tmp_path):
    """Its programs and files are the image's: the host has no such mark, and the
    image no ``awk``."""
    write_root(tmp_path / "images" / "debian_bookworm")
    dockerfile = (
        "FROM debian:bookworm\nWORKDIR /app\nRUN rm -r /etc/old && cat /etc/mark > made.txt\n"
    )
    solution = "#!/bin/sh\ncommand -v awk || [ -e /etc/old ] || cp made.txt out.txt\n"
    test = f"""#!/bin/bash
if [ "$(cat /app/out.txt)" = "{MARK}" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
    toml = '[environment]\nnetwork_mode = "no-network"\n'
    task = write_task(tmp_path / "built", toml, dockerfile=dockerfile, solution=solution, test=test)
    images = f"images={tmp_path / 'images'}"
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        rewards, failed, printed = harbor_run(task, agent, tmp_path / agent, "--ek", images)
        assert (rewards, failed) == ({"built": reward}, {}), printed


@pytest.mark.parametrize("kind", KINDS)
def test_its_validator_accepts_what_we_export(kind, tmp_path):
    from harbor.utils.trajectory_validator import TrajectoryValidator

    played(kind).to_atif(tmp_path)
    for path in sorted(tmp_path.glob("0*.json")):
        validator = TrajectoryValidator()
        assert validator.validate(path), validator.get_errors()


def test_negative_control_its_validator_refuses_another_shape(tmp_path):
    from harbor.utils.trajectory_validator import TrajectoryValidator

    (document,) = played("tools").to_atif()
    document["steps"][1]["source"] = "user"  # what only an agent may have
    assert not TrajectoryValidator().validate(document)
