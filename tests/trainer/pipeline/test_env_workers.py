"""``num_env_workers``: environments in processes of their own, the policy and what is
trained here."""

from __future__ import annotations

import os
import sys
import time

import pytest

import verifiers as vf
from support.pipeline import GROUP, Policy, pipeline, steps
from support.training import run, small_trainer, toy_env
from verifiers.errors import ConfigError

ENVIRONMENT = """
import os
import verifiers as vf

class Game(vf.SingleTurnEnv):
    async def setup_state(self, state):
        state = await super().setup_state(state)
        state["info"] = {**(state.get("info") or {}), "pid": os.getpid()}
        return state

def number(completion):
    text = completion[-1]["content"]
    return float(text) if text in "01" else len(text) / 10

def pid(state):
    return float(os.getpid())

def load_environment(count: int = 6):
    rows = [{"question": f"q{i}"} for i in range(count)]
    return Game(dataset=rows, rubric=vf.Rubric(funcs=[number, pid], weights=[1.0, 0.0]))
"""


@pytest.fixture
def game(tmp_path, monkeypatch):
    (tmp_path / "env_worker_game.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "env_worker_game", raising=False)
    return vf.load_environment("env_worker_game")


def pids(batches):
    return {
        int(record.metrics["pid"])
        for batch in batches
        for group in batch.groups
        for record in group.rollouts
    }


def test_rollouts_are_played_and_scored_elsewhere_and_trained_here(game):
    policy = Policy()
    with pipeline(policy, game, num_env_workers=2, max_off_policy_steps=0) as source:
        batches = steps(source, policy, 4)
        workers = pids(batches)
    assert len(workers) == 2
    assert os.getpid() not in workers
    for batch in batches:
        assert [group.rewards.mean() for group in batch.groups] == [0.5, 0.5]
        assert {len(record.turns) for group in batch.groups for record in group.rollouts} == {1}
    for worker in workers:  # none is left behind
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
    with pipeline(here := Policy(), game, max_off_policy_steps=0) as source:
        assert pids(steps(source, here, 1)) == {os.getpid()}, "negative control"


def test_seeds_are_those_of_this_process_and_new_in_each_pass(game):
    def seeds(**settings):
        policy = Policy()
        with pipeline(policy, game, max_off_policy_steps=0, **settings) as source:
            steps(source, policy, 6)  # two passes over six examples
        return sorted(request.seed for request in policy.requests[: 12 * GROUP])

    mine = seeds()
    assert len(set(mine)) == 12 * GROUP
    assert seeds(num_env_workers=1) == mine


def test_a_trainer_trains_so(tmp_path, game):
    trainer = small_trainer(tmp_path / "run", game, num_env_workers=1)
    log = run(trainer)
    assert len(log.steps) == 2
    assert os.getpid() not in {int(step["reward/pid"]) for step in log.steps}
    assert max(step["sampler/log_ratio_abs"] for step in log.steps) < 1e-3


def test_closing_with_rollouts_in_flight_is_quiet(game, capfd):
    policy = Policy()
    policy.held = True
    with pipeline(policy, game, num_env_workers=1, max_off_policy_steps=2) as source:
        deadline = time.monotonic() + 20
        while policy.in_flight < 6 * GROUP and time.monotonic() < deadline:
            time.sleep(0.01)
        assert policy.in_flight == 6 * GROUP
        source.close()
    assert "socket" not in capfd.readouterr().err


def test_an_environment_made_by_hand_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"num_env_workers is 2.*made by hand; give its id"):
        small_trainer(tmp_path, toy_env(), num_env_workers=2)
    with pytest.raises(
        ConfigError, match="env_worker_backend must be one of process, ray, not 'rey'"
    ):
        small_trainer(tmp_path, toy_env(), env_worker_backend="rey")


def test_the_backend_is_the_one_asked_for(game, monkeypatch):
    from verifiers.runs.workers.channels import ProcessChannel
    from verifiers.runs.workers.ray import RayChannel

    num_opened = 0

    async def open_channel():
        nonlocal num_opened
        num_opened += 1
        return await ProcessChannel.open()

    monkeypatch.setattr(RayChannel, "open", open_channel)
    for backend in ("process", "ray"):
        with pipeline(
            Policy(), game, num_env_workers=1, env_worker_backend=backend, max_off_policy_steps=0
        ):
            assert num_opened == (backend == "ray")
