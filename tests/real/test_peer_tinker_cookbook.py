"""The real tinker-cookbook: its advantages and its data assembly of groups that environments
played.

Run by ``python3 tests/real/peers.py tinker-cookbook``.
"""

import math
import pickle

import pytest

pytest.importorskip(
    "tinker_cookbook", reason="not installed: python3 tests/real/peers.py tinker-cookbook"
)

from types import SimpleNamespace

from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages

from support.integration_envs import ScriptedTokens, tool_env
from support.peer_double import differences
from verifiers_integrations.common import generate_group, peer_task
from verifiers_integrations.tinker import TinkerClient, VerifiersGroupBuilder, to_trajectory_group

pytestmark = pytest.mark.real


class Engine(ScriptedTokens):
    """A sampling client that plays ``tool_env``."""

    def get_tokenizer(self):
        return self.tokenizer

    async def sample_async(self, prompt, num_samples, sampling_params):
        ids, logprobs, reason = await self(prompt.to_ints(), {})
        return SimpleNamespace(
            sequences=[SimpleNamespace(tokens=ids, logprobs=logprobs, stop_reason=reason)]
        )


async def group_of(*rewards):
    env, engine = tool_env(1), Engine()
    rows = [peer_task(env.get_dataset()[0])] * len(rewards)
    rollouts = await generate_group(env, rows, TinkerClient(engine), "m", {})
    for rollout, reward in zip(rollouts, rewards, strict=True):
        rollout["reward"] = reward
    return to_trajectory_group(rollouts), engine


def test_the_peer_has_what_was_recorded():
    assert differences("tinker_cookbook") == []


async def test_a_two_turn_rollout_becomes_one_datum_of_the_sampled_ids():
    group, _ = await group_of(1.0, math.nan, 0.0)
    (advantages,) = compute_advantages([group])
    assert advantages.tolist() == pytest.approx([0.5, 0.0, -0.5]), "the unknown one is not trained"
    data, _ = assemble_training_data([group], [advantages])
    rollouts = [
        [transition.ac.tokens for transition in trajectory.transitions]
        for trajectory in group.trajectories_G
    ]
    for datum in data:
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy().tolist()
        advantages = datum.loss_fn_inputs["advantages"].to_numpy()
        trained = [
            target for target, advantage in zip(targets, advantages, strict=True) if advantage != 0
        ]
        assert trained in [[*first, *second] for first, second in rollouts] or not trained
    assert sorted({len(rollout) for rollout in rollouts}) == [2]
    assert any((datum.loss_fn_inputs["advantages"].to_numpy() > 0).any() for datum in data)


async def test_a_group_is_played_from_a_pickled_builder():
    import verifiers as vf

    row = peer_task(vf.load_environment("reverse-text").get_dataset()[0])
    builder = pickle.loads(pickle.dumps(VerifiersGroupBuilder("reverse-text", row, 3)))
    group = await builder.play(TinkerClient(Engine(lambda prompt: "abc")))
    assert len(group.trajectories_G) == len(group.final_rewards_G) == 3
