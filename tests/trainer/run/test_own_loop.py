"""A loop in the trainer's verbs is ``train``, bit for bit; what it accumulates is one step, and what
it saves is all that it goes on from."""

import functools
import json

import numpy as np
import pytest
import torch

from support.own_loops import own_loop, untimed
from support.training import metrics_of, rows, small_trainer, weights_hash
from verifiers.errors import CheckpointError, ConfigError, NonFiniteLoss, RunMismatch

RUN = {"deterministic": True, "max_steps": 4, "max_grad_norm": 0.05, "lr_scheduler_type": "linear"}
RUN |= {"max_off_policy_steps": 0}
KINDS = {
    "all weights": {},
    "generation one step ahead": {"max_off_policy_steps": 1},
    "lora": {"use_lora": True},
    "several steps of a batch": {"updates_per_batch": 2, "num_iterations": 2},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(hash of the weights, metrics) of ``train`` with the settings of a kind, once for all tests."""

    @functools.cache
    def run_of(kind):
        folder = tmp_path_factory.mktemp("train")
        trainer = small_trainer(folder, **RUN | KINDS[kind])
        trainer.train()
        return weights_hash(trainer.model), untimed(folder)

    return run_of


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_ones_own_is_train(tmp_path, trained, kind):
    settings = RUN | KINDS[kind]
    weights, metrics = trained(kind)
    with small_trainer(tmp_path / "own", **settings) as own:
        own_loop(own, 4)
    assert weights_hash(own.model) == weights
    assert untimed(tmp_path / "own") == metrics
    assert not own.is_open
    # negative control: without clipping the run is another
    with small_trainer(tmp_path / "other", **settings | {"max_grad_norm": 0.0}) as other:
        own_loop(other, 4)
    assert weights_hash(other.model) != weights


def test_gradients_of_several_parts_are_those_of_their_batch(tmp_path):
    settings = RUN | {"micro_batch_size": 1, "max_seq_len": 32, "max_steps": 2}
    at_once, in_parts = (small_trainer(tmp_path / name, **settings) for name in ("one", "parts"))
    with at_once, in_parts:
        own_loop(at_once, 2)
        own_loop(in_parts, 2, parts=3)
    assert weights_hash(in_parts.model) == weights_hash(at_once.model)
    one, parts = (untimed(tmp_path / name) for name in ("one", "parts"))
    for line, line_of_parts in zip(one, parts, strict=True):
        same = ("grad_norm", "tokens/trained", "learning_rate", "policy_version")
        assert [line[name] for name in same] == [line_of_parts[name] for name in same]
        close = ("loss", "entropy", "ratio/mean", "ratio/max", "sampler/log_ratio_abs")
        for name in close:
            assert line_of_parts[name] == pytest.approx(line[name], rel=1e-5, abs=1e-9)


def test_forward_backward_tells_loss_metrics_and_log_probabilities(tmp_path):
    with small_trainer(tmp_path, **RUN) as trainer:
        batch = trainer.next_batch()
        output = trainer.forward_backward(batch)
        metrics = trainer.optim_step()
    assert output.loss == metrics["loss"]
    assert {"entropy", "ratio/mean"} <= output.metrics.keys()
    assert trainer.policy_version == metrics["staleness/max"] + 1 == 1
    for row, logprobs in zip(batch.rows_R[0], output.logprobs, strict=True):
        mask = torch.from_numpy(row.loss_mask)
        sampled = torch.from_numpy(row.sampler_logprobs)[mask]
        torch.testing.assert_close(logprobs[mask], sampled, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["all weights", "generation one step ahead", "lora"])
def test_a_saved_state_is_all_that_a_run_goes_on_from(tmp_path, trained, kind):
    settings, state = RUN | KINDS[kind], tmp_path / "states" / "two"
    weights, metrics = trained(kind)
    with small_trainer(tmp_path / "own", **settings) as own:
        own_loop(own, 2)
        own.save_state(state)
        own_loop(own, 3)
        assert weights_hash(own.model) != weights
        own.load_state(state)  # in the middle, which drops what was trained since
        assert own.policy_version == 2
        own_loop(own, 4)
    assert weights_hash(own.model) == weights
    assert untimed(tmp_path / "own") == metrics
    # the format is that of a checkpoint: either goes on from what the other wrote
    resumed = small_trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(state))
    assert weights_hash(resumed.model) == weights


def test_rollouts_of_ones_own_are_of_the_present_policy_and_train(tmp_path):
    def trained(folder):
        with small_trainer(folder, **RUN) as trainer:
            for version in range(2):
                groups = trainer.sample(rows(2), rollouts_per_example=3)
                assert [len(group.rollouts) for group in groups] == [3, 3]
                rollouts = [rollout for group in groups for rollout in group.rollouts]
                assert not np.isnan([rollout.reward for rollout in rollouts]).any()
                assert {rollout.oldest_version for rollout in rollouts} == {version}
                trainer.forward_backward(trainer.batch_of(groups))
                trainer.optim_step()
            more = [trainer.sample(rows(1)) for _ in range(2)]
        return weights_hash(trainer.model), more

    weights, (first, second) = trained(tmp_path / "a")
    texts = [[rollout.completion for rollout in group[0].rollouts] for group in (first, second)]
    assert texts[0] != texts[1], "each call samples anew"
    assert trained(tmp_path / "b")[0] == weights
    lines = metrics_of(tmp_path / "a")
    assert [line["rollouts/generated"] for line in lines] == [6, 6]
    assert all(line["sampler/disagreement"] < 2 for line in lines)


def test_a_step_without_a_token_that_carries_loss_changes_no_weight(tmp_path):
    with small_trainer(tmp_path, **RUN) as trainer:
        own_loop(trainer, 1)
        before = weights_hash(trainer.model)
        assert trainer.forward_backward([]).loss == 0
        assert trainer.optim_step()["grad_norm"] == 0
        assert (weights_hash(trainer.model), trainer.policy_version) == (before, 2)


def test_a_loss_that_is_no_number_drops_its_gradients_alone(tmp_path):
    settings = RUN | {"max_steps": 2}
    with small_trainer(tmp_path / "a", **settings) as undisturbed:
        own_loop(undisturbed, 2)
    with small_trainer(tmp_path / "b", **settings) as trainer:
        own_loop(trainer, 1)
        batch = trainer.next_batch()
        (row, *_) = batch.rows_R[0]
        sampled = row.sampler_logprobs.copy()
        row.sampler_logprobs[row.loss_mask] = np.nan
        with pytest.raises(NonFiniteLoss):
            trainer.forward_backward(batch)
        with pytest.raises(ConfigError, match="optim_step has no gradients"):
            trainer.optim_step()
        row.sampler_logprobs[:] = sampled
        trainer.forward_backward(batch)
        trainer.optim_step()
    assert weights_hash(trainer.model) == weights_hash(undisturbed.model)


def test_verbs_out_of_order_say_what_comes_before(tmp_path):
    other = tmp_path / "notes"
    other.mkdir()
    (other / "mine.txt").write_text("kept")
    with small_trainer(tmp_path / "run", **RUN) as trainer:
        with pytest.raises(ConfigError, match="call forward_backward before it"):
            trainer.optim_step()
        batch = trainer.next_batch()
        with pytest.raises(ConfigError, match="next_batch was called twice without optim_step"):
            trainer.next_batch()
        trainer.forward_backward(batch)
        with pytest.raises(ConfigError, match="save_state came between forward_backward and"):
            trainer.save_state(tmp_path / "state")
        trainer.optim_step()
        with pytest.raises(ConfigError, match="notes has other content than a state"):
            trainer.save_state(other)
        trainer.save_state(tmp_path / "state")
        trainer.save_state(tmp_path / "state")  # replaces its own
    assert (other / "mine.txt").read_text() == "kept"


def test_a_state_that_is_refused_changes_nothing(tmp_path):
    with small_trainer(tmp_path / "straight", **RUN) as straight:
        own_loop(straight, 2)
    with small_trainer(tmp_path / "other", **RUN | {"temperature": 0.9}) as other:
        own_loop(other, 1)
        other.save_state(tmp_path / "other-state")
    with small_trainer(tmp_path / "own", **RUN) as own:
        own_loop(own, 1)
        for folder, error in (("nowhere", CheckpointError), ("other-state", RunMismatch)):
            with pytest.raises(error):
                own.load_state(tmp_path / folder)
        assert (own.is_open, own.state.global_step) == (True, 1)
        own_loop(own, 2)
    assert weights_hash(own.model) == weights_hash(straight.model)
    assert untimed(tmp_path / "own") == untimed(tmp_path / "straight")


def test_what_a_verb_cannot_take_is_said(tmp_path):
    with small_trainer(tmp_path, **RUN) as trainer:
        for number in (0, -1, 1.5, True):
            with pytest.raises(
                ConfigError, match="rollouts_per_example must be a whole number of at least 1"
            ):
                trainer.sample(rows(1), rollouts_per_example=number)
        groups = trainer.sample(rows(1), rollouts_per_example=2)
        with pytest.raises(ConfigError, match=r"got Group and takes .*: make a batch of groups by"):
            trainer.forward_backward(groups)
        assert trainer.forward_backward(trainer.batch_of(groups)) is not None


def test_after_a_training_save_state_is_that_of_transformers(tmp_path):
    trainer = small_trainer(tmp_path / "run", **RUN | {"max_steps": 1})
    trainer.train()
    trainer.save_state()
    stored = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert stored["global_step"] == 1
    with pytest.raises(ConfigError, match="save_state came after the end of a training"):
        trainer.save_state(tmp_path / "late")
    assert not (tmp_path / "late").exists()
    assert not list((tmp_path / "run").glob("earlier-*"))
    # negative control: before the first step there is a state
    with small_trainer(tmp_path / "new", **RUN) as new:
        new.save_state(tmp_path / "first")
    assert (tmp_path / "first" / "MANIFEST.json").is_file()
