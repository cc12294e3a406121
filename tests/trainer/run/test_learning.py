"""The whole of it: rollouts, advantages, loss and optimizer make a policy better, and the numbers
say so honestly."""

import pytest
import torch

from support.training import first_batch, run, small_trainer, toy_env
from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.batch import build
from verifiers_trainer.algorithm.packing import filler_row
from verifiers_trainer.policy.logprobs import install_logprob_forward


def test_a_policy_learns_a_toy_task_one_step_off_policy(tmp_path):
    trainer = small_trainer(
        tmp_path,
        batch_size=32,
        rollouts_per_example=8,
        learning_rate=6e-3,
        max_tokens=6,
        max_steps=40,
    )

    before = trainer.evaluate()["eval_reward"]
    log = run(trainer)
    after = trainer.evaluate()["eval_reward"]
    trainer.close()

    assert before < 0.3
    assert after > 0.9
    rewards = [step["reward/mean"] for step in log.steps]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.9
    ages = [step["staleness/max"] for step in log.steps[1:]]
    assert set(ages) <= {0, 1}  # 0 where a group without signal was replaced while the step waited
    assert sum(ages) > 30


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_about_the_tokens_of_the_first_step(tmp_path, temperature):
    log = run(small_trainer(tmp_path, temperature=temperature, max_steps=1))

    assert log.steps[0]["sampler/log_ratio_abs"] < 1e-4
    assert log.steps[0]["ratio/max"] == pytest.approx(1, abs=1e-4)


def test_an_environment_that_samples_at_another_temperature_than_is_trained_is_refused(tmp_path):
    class Cold(type(toy_env())):
        async def get_model_response(self, state, prompt, **options):
            return await super().get_model_response(
                state, prompt, **options, sampling_args={"temperature": 0.7}
            )

    env = Cold(dataset=[{"question": "a"}, {"question": "b"}], rubric=toy_env().rubric)

    with pytest.raises(ConfigError, match=r"sampler and trainer disagree by .* temperature \(1\)"):
        run(small_trainer(tmp_path, env, max_steps=1))


# --- however a step is cut into rows, its gradient is the same ------------------------------------


@pytest.fixture(scope="module")
def one_batch(tmp_path_factory):
    """A trainer with its model, and the finished groups of one step."""
    with small_trainer(tmp_path_factory.mktemp("batch"), max_tokens=12) as trainer:
        yield trainer, first_batch(trainer)


def gradient(trainer, batch, **settings):
    """Gradients of one training step over the same groups, cut into rows as ``settings`` say."""
    for name, value in settings.items():
        setattr(trainer.args, name, value)
    rebuilt = build(batch.groups, [], trainer.args)
    install_logprob_forward(trainer.model)
    trainer.model.zero_grad()
    trainer.checks_sampler = False
    trainer.training_step(trainer.model, rebuilt)
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()]), len(rebuilt.rows_R[0])


def test_packing_row_size_and_order_do_not_change_the_gradient(one_batch):
    trainer, batch = one_batch
    together, rows = gradient(trainer, batch, packing=True, micro_batch_tokens=4096)
    alone, single = gradient(trainer, batch, packing=False)
    small, few = gradient(trainer, batch, packing=True, micro_batch_tokens=80)

    assert (rows, single) == (1, 8)
    assert 1 < few < 8
    assert together.norm() > 0
    for gradient_found in (alone, small):
        assert (gradient_found - together).norm() <= 1e-5 * together.norm()


def test_a_row_without_samples_runs_and_adds_nothing(one_batch):
    trainer, batch = one_batch
    before, _ = gradient(trainer, batch, packing=True, micro_batch_tokens=4096)
    loss = trainer.compute_loss(trainer.model, filler_row())
    loss.backward()

    after = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert float(loss.detach()) == 0
    assert torch.equal(before, after)
