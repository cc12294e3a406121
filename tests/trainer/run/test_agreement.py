"""Each fault between the policy that sampled and the policy that is trained ends the run within one
step, with what is known of it; sound runs are never accused."""

import pytest
import torch

from support.embedded import small_model
from support.planted import CLIENT, REPLICA, plant_client, plant_raw, plant_replica, talks
from support.training import run, small_trainer
from verifiers.errors import ConfigError

TALK = {"max_tokens": 6, "max_seq_len": 200, "zero_variance": "keep", "max_off_policy_steps": 0}


def trainer_of(folder, **settings):
    """With an adapter that has learnt something, as one that was resumed has."""
    adapted = {"use_lora": True, "lora_rank": 4, "learning_rate": 1e-2}
    trainer = small_trainer(folder, talks(), small_model(), **{**TALK, **adapted, **settings})
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.1)
    return trainer


def plant(monkeypatch, fault):
    if fault in CLIENT:
        plant_client(monkeypatch, fault)
    elif fault in REPLICA:
        plant_replica(monkeypatch, fault)
    else:
        plant_raw(monkeypatch)


@pytest.mark.parametrize("fault", [*CLIENT, *REPLICA, "raw log-probabilities"])
def test_a_planted_fault_ends_the_run_within_a_step(tmp_path, monkeypatch, fault):
    plant(monkeypatch, fault)
    temperature = 0.7 if fault.startswith("raw") else 1.0
    trainer = trainer_of(tmp_path, max_steps=3, temperature=temperature)
    with pytest.raises(ConfigError, match=r"disagree by .* nats per token") as raised:
        trainer.train()
    # weights that stand still are as good as new until the first step has moved the others
    assert trainer.state.global_step == (fault == "stale weights")
    said = str(raised.value)
    assert "in answer 1" in said
    assert "furthest: " in said
    if fault == "a temperature of .9 for 1":
        assert "look sampled at temperature 0.9." in said
    assert ("bfloat16 explains it" in said) == (fault == "another dtype")


def test_without_a_fault_the_same_run_agrees(tmp_path):
    log = run(trainer_of(tmp_path, max_steps=3))
    assert [step["sampler/disagreement"] < 1 for step in log.steps] == [True] * 3
    assert [step["sampler/noise"] for step in log.steps] == [2.5e-5] * 3


RAGGED = {"max_tokens": 12, "max_off_policy_steps": 1}
SOUND = [
    RAGGED,
    {"num_iterations": 2},
    {"use_lora": False, "learning_rate": 1e-3},
    {"temperature": 0.6, "history": "exact"},
    {"packing": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("settings", SOUND)
def test_fifty_sound_runs_raise_no_alarm(tmp_path, settings, seed, half):
    """Ragged and late, several updates per batch, all weights, token histories; the last steps are
    resumed."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4, "seed": seed, **settings}
    log = run(trainer_of(tmp_path, **settings, bf16=half))
    again = trainer_of(tmp_path, **{**settings, "max_steps": 6}, bf16=half)
    log.steps += run(again, resume_from_checkpoint=True).steps
    assert len(log.steps) == 6
    assert not [step for step in log.steps if "alarm/mismatch" in step]
    assert sum("sampler/disagreement" in step for step in log.steps) >= 2
