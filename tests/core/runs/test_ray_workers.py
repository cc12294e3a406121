"""The same workers on a real Ray cluster of two nodes on this machine, one of which is killed half
way."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.testing import ScriptedClient

pytestmark = pytest.mark.slow

ENVIRONMENT = """
import time, os
from pathlib import Path
import ray
import verifiers as vf

class Slow(vf.SingleTurnEnv):
    def setup_state(self, state):
        state["node"] = ray.get_runtime_context().get_node_id()
        (Path(state["info"]["folder"]) / f"{state['example_id']}-{os.getpid()}").touch()
        time.sleep(0.05)

def length(completion):
    return float(len(completion[-1]["content"]))

def load_environment(folder: str, num: int = 60):
    rows = [{"question": f"q{i}", "info": {"folder": folder}} for i in range(num)]
    return Slow(dataset=rows, rubric=vf.Rubric([length]))
"""


@pytest.fixture
def cluster(monkeypatch):
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    node = made.add_node(num_cpus=2)
    made.wait_for_nodes()
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    try:
        yield made, node
    finally:
        ray.shutdown()
        made.shutdown()


def test_a_node_that_dies_costs_only_what_it_held(cluster, tmp_path, monkeypatch):
    made, node = cluster
    (tmp_path / "ray_game.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray_game", raising=False)
    env = vf.load_environment("ray_game", folder=str(tmp_path))

    def echo(request):
        return request.prompt[-1]["content"]

    async def kill_when_half_done():
        while len(list(tmp_path.glob("*-*"))) < 40:  # noqa: ASYNC110 - other processes write them
            await asyncio.sleep(0.02)
        await asyncio.to_thread(made.remove_node, node, False)

    async def both():
        killing = asyncio.create_task(kill_when_half_done())
        options = {
            "num_workers": 2,
            "worker_backend": "ray",
            "max_concurrent": 8,
            "rollouts_per_example": 2,
        }
        results = await env.evaluate(ScriptedClient(echo), "m", **options)
        await killing
        return results

    results = asyncio.run(both())
    rows = results["outputs"]
    assert [row["error"] for row in rows] == [None] * 120
    assert [row["reward"] for row in rows] == [float(len(f"q{i // 2}")) for i in range(120)]
    assert len({state["node"] for state in results["states"]}) == 2, "both nodes played"
    assert len(list(tmp_path.glob("*-*"))) > 60, (
        "what the lost node held was played again elsewhere"
    )


@pytest.fixture
def node_of_its_own(tmp_path, monkeypatch):
    """A cluster whose only node for workers has an empty folder where the driver has ``tmp_path /
    "environments"``.

    The node is in a mount namespace of its own, as on a machine that does not share the driver's
    disk. Its Python reads ``tmp_path / "site"`` first.
    """
    from support.namespaces import cannot

    if missing := cannot():
        pytest.skip(missing)
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    from ray.cluster_utils import Cluster

    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "shipped_game.py").write_text(ENVIRONMENT.replace("time.sleep(0.05)", "pass"))
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    shell = (
        f"mount --bind {tmp_path / 'empty'} {folder} && exec"
        f" {Path(sys.executable).with_name('ray')} start --block"
    )
    command = ["unshare", "--mount", "sh", "-c", f"{shell} --num-cpus 2 --address {made.address}"]
    with (tmp_path / "node.log").open("wb") as log:
        node = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        )
    try:
        yield made.address, folder
    finally:
        ray.shutdown()
        node.terminate()
        node.wait(60)
        made.shutdown()


def test_an_environment_that_a_node_lacks_is_named_with_the_node_and_can_be_shipped(
    node_of_its_own, tmp_path, monkeypatch
):
    import ray

    address, folder = node_of_its_own
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "shipped_game", raising=False)
    env = vf.load_environment("shipped_game", folder=str(tmp_path), num=4)
    options = {"num_workers": 1, "worker_backend": "ray"}
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    with pytest.raises(
        ConfigError, match=r"Ray node [0-9.]+: .*shipped_game.*ship the environment's folder"
    ):
        env.evaluate(ScriptedClient(lambda request: "abc"), "m", **options)
    ray.shutdown()
    shipped = {"working_dir": str(folder)}
    ray.init(address=address, logging_level="ERROR", log_to_driver=False, runtime_env=shipped)
    results = env.evaluate(ScriptedClient(lambda request: "abc"), "m", **options)
    assert results["reward"] == [3.0] * 4


@pytest.fixture
def without_verifiers(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\nsys.modules['verifiers'] = None\n"
    )


def test_a_node_without_this_project_is_named(
    without_verifiers, node_of_its_own, tmp_path, monkeypatch
):
    import ray

    address, folder = node_of_its_own
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "shipped_game", raising=False)
    env = vf.load_environment("shipped_game", folder=str(tmp_path), num=4)
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    with pytest.raises(ConfigError, match=r"Ray node [0-9.]+: .*verifiers.*install them there"):
        env.evaluate(
            ScriptedClient(lambda request: "abc"), "m", num_workers=1, worker_backend="ray"
        )
