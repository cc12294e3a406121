"""What stops a training run, and what must not: signals, numbers, distributions, batches,
pipelines."""

import queue
import re
import threading
import time

import numpy as np
import pytest
import torch

import verifiers as vf
from support.pipeline import Policy, advance, counting_env, indices, pipeline, turn_of_each
from support.training import StepLog, run, small_trainer, toy_env
from verifiers.data.examples import Example
from verifiers.errors import ConfigError, NoLearningSignal, TooManyFaults
from verifiers_trainer.policy.preparation import why_no_prompt_fits
from verifiers_trainer.run import sanity_checks
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer

# --- nothing to learn from ------------------------------------------------------------------------


def test_equal_rewards_are_a_warning_with_a_histogram_and_then_the_end(tmp_path, caplog):
    same = toy_env(lambda completion, **_: 1.0)
    with pytest.raises(
        NoLearningSignal, match=r"in 3 batches \(\d+ rollouts\) since the start of"
    ) as raised:
        small_trainer(tmp_path, same, no_signal_steps=3, oversample=1.0).train()
    assert set(raised.value.histogram) == {1.0}
    # after one batch and after two
    assert caplog.text.count("no group had two different rewards") == 2
    assert "max_seq_len" not in str(raised.value)


def test_prompts_that_do_not_fit_are_named_where_nothing_can_be_learned(tmp_path, caplog):
    rows = [{"prompt": [{"role": "user", "content": "x" * n}], "answer": ""} for n in (1, 90, 90)]
    same = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))
    settings = {"no_signal_steps": 1, "oversample": 1.0, "max_seq_len": 64}
    with pytest.raises(NoLearningSignal, match="Raise max_seq_len, or shorten the prompts"):
        small_trainer(tmp_path, same, **settings).train()
    said = re.search(
        r"prompt of (\d+) of (\d+) rollouts does not fit max_seq_len = 64", caplog.text
    )
    assert 0 < int(said[1]) < int(said[2])


@pytest.mark.parametrize("max_seq_len", [2, 4, 32])
def test_a_run_whose_prompts_all_do_not_fit_ends_with_its_first_batch(tmp_path, max_seq_len):
    """And the control: a prompt that fits is looked for in the whole dataset."""
    scored = []

    def unscored(completion, **_):
        scored.append(completion)
        return 0.0

    long = toy_env(unscored, system_prompt="x" * 100)
    ends = rf"no prompt fits max_seq_len = {max_seq_len}, so that .* the shortest of 40 has 1\d\d"
    trainer = small_trainer(tmp_path, long, max_seq_len=max_seq_len, max_tokens=1)
    with pytest.raises(NoLearningSignal, match=ends):
        trainer.train()
    assert len(scored) <= 4 * trainer.args.batch_size
    examples = [*trainer.training_run.examples, Example(40, "", {"prompt": ""})]
    assert why_no_prompt_fits(examples, trainer.processing_class, long, max_seq_len) == ""


def test_when_half_of_the_rewards_raise_the_final_error_says_how_many_and_where(tmp_path, caplog):
    calls = []

    def right(completion, **_):
        calls.append(completion)
        if len(calls) % 2:
            raise ValueError("no number")
        return 1.0

    settings = {"no_signal_steps": 2, "oversample": 1.0, "max_error_fraction": 1.0}
    with pytest.raises(NoLearningSignal) as raised:
        small_trainer(tmp_path, toy_env(right), **settings).train()
    location = f"right (test_trainer_faults.py:{right.__code__.co_firstlineno + 3})"
    said = re.search(
        rf"(\d+) of (\d+) rollouts unscored: ValueError in {re.escape(location)}; no group",
        str(raised.value),
    )
    unscored, total = map(int, said.groups())
    assert 0.4 < unscored / total < 0.6
    assert "Correct what leaves rewards unknown" in str(raised.value)
    assert "temperature" not in str(raised.value)
    assert (
        f"rollouts unscored: ValueError in {location}; no group had two different rewards"
        in caplog.text
    )


def test_when_most_rewards_raise_the_error_counts_them_by_cause(tmp_path):
    def right(completion, **_):
        raise ValueError("no number")

    with pytest.raises(
        TooManyFaults,
        match=r"rollouts failed: ValueError in right \(test_trainer_faults.py:\d+\); the",
    ):
        small_trainer(tmp_path, toy_env(right)).train()


# --- numbers that are none ------------------------------------------------------------------------


def steep(row):
    """Finite itself, with a gradient that is no number."""
    return (row.log_pi - row.log_pi.detach()).abs().sqrt()


def test_without_the_check_a_gradient_that_is_no_number_ruins_every_weight(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path, loss=steep, max_steps=1, generation_timeout=10.0)
    monkeypatch.setattr(RLTrainer, "scale_is_too_large", lambda self: True)
    run(trainer)
    ruined = [
        name for name, parameter in trainer.model.named_parameters() if parameter.isnan().all()
    ]
    assert len(ruined) > 3


# --- another distribution than the one that was sampled -------------------------------------------


class Cold(type(toy_env())):
    """Samples at another temperature than is trained."""

    async def get_model_response(self, state, prompt, **options):
        return await super().get_model_response(
            state, prompt, **options, sampling_args={"temperature": 0.7}
        )


def test_log_probabilities_of_another_distribution_stop_the_run_before_its_first_step(tmp_path):
    env = Cold(dataset=[{"question": "a"}, {"question": "b"}], rubric=toy_env().rubric)
    trainer = small_trainer(tmp_path, env, max_steps=2)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(
        ConfigError, match=r"disagree by .* nats per token .* tokenizer, chat\s+template"
    ):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_without_the_self_test_it_is_trained_and_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sanity_checks.Agreement, "check", lambda *args: {})
    env = Cold(dataset=[{"question": "a"}, {"question": "b"}], rubric=toy_env().rubric)
    log = run(small_trainer(tmp_path, env, max_steps=2))
    assert len(log.steps) == 2
    assert log.steps[0]["sampler/log_ratio_abs"] > 1e-2


def cold_later(calls):
    """An environment whose rollouts are sampled at another temperature once 16 are done."""

    class ColdLater(type(toy_env())):
        async def get_model_response(self, state, prompt, **options):
            calls.append(prompt)
            if len(calls) > 16:
                options["sampling_args"] = {"temperature": 0.7}
            return await super().get_model_response(state, prompt, **options)

    return ColdLater(
        dataset=[{"question": letter} for letter in "abcdefgh"], rubric=toy_env().rubric
    )


@pytest.mark.parametrize("lag", [0, 1])
def test_an_environment_that_changes_its_sampling_later_stops_the_run_at_that_step(tmp_path, lag):
    """Also where the batches hold no token of the present weights: on a rollout of the next one."""
    settings = {
        "max_steps": 6,
        "max_off_policy_steps": lag,
        "zero_variance": "keep",
        "deterministic": True,
        "max_tokens": 16,  # of a few tokens alone nothing is known
    }
    trainer = small_trainer(tmp_path, cold_later([]), **settings)
    log = StepLog()
    with pytest.raises(
        ConfigError,
        match=rf"identical weights \(version {2 - lag}\), sampler and trainer disagree by",
    ):
        log.watch(trainer).train()
    assert [step["sampler/log_ratio_abs"] < 1e-4 for step in log.steps] == [True] * (2 - lag)


def test_without_the_check_in_every_step_it_is_trained(tmp_path):
    """Negative control: what a check of the first step alone lets pass."""
    settings = {"max_steps": 3, "max_off_policy_steps": 0, "zero_variance": "keep"}
    trainer = small_trainer(tmp_path, cold_later([]), **settings)
    trainer.checks_sampler = False
    log = run(trainer)
    assert [step["sampler/log_ratio_abs"] > 1e-2 for step in log.steps] == [False, False, True]


# --- batches that do not come out even ------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "micro", "processes"), [(64, 8, 3), (30, 8, 1), (2, 1, 3)])
def test_a_batch_that_cannot_be_shared_is_refused_with_its_numbers(batch_size, micro, processes):
    config = RLConfig(batch_size=batch_size, rollouts_per_example=2, micro_batch_size=micro)
    with pytest.raises(ConfigError) as raised:
        config.resolve(processes)
    assert (
        f"batch_size {batch_size} is not divisible by micro_batch_size x processes ="
        f" {micro * processes}" in str(raised.value)
    )


def test_cut_to_a_multiple_of_the_processes_samples_are_lost():
    samples, processes = np.arange(23), 4
    usual = [samples[rank::processes][: len(samples) // processes] for rank in range(processes)]
    assert sum(map(len, usual)) == 20


def lost(name, turn):
    return "lost" if name in ("q0", "q1") and turn < 1 + 2 * (name == "q1") else str(turn % 2)


def known_number(completion, **_):
    return float(completion[-1]["content"])  # "lost" is none, so that reward is unknown


def test_a_group_that_lost_a_sibling_is_trained_without_it_and_one_that_lost_half_is_replaced():
    policy = Policy(turn_of_each(lost))
    settings = {"max_off_policy_steps": 0, "min_group_fraction": 0.75, "max_error_fraction": 1.0}
    with pipeline(policy, counting_env(reward=known_number), **settings) as source:
        batch = source.next_batch()
        advance(source, policy)
    assert indices(batch) == [0, 2]  # 0 with three of four, 1 replaced by 2
    assert np.isnan(batch.groups[0].rewards).sum() == 1
    assert np.isnan(batch.advantages_G[0]).sum() == 1
    assert batch.num_tokens == sum(
        r.num_sampled for g in batch.groups for r in g.rollouts if not np.isnan(r.reward)
    )


def test_counted_as_zero_a_lost_sibling_lowers_the_baseline_of_the_others():
    rewards_known = np.array([1.0, 1.0, 0.0])
    assert np.append(rewards_known, 0.0).mean() < rewards_known.mean()


# --- a pipeline that ends -------------------------------------------------------------------------


def test_the_end_of_the_generator_is_the_end_of_training_within_a_second(monkeypatch):
    from verifiers_trainer.pipeline import pipeline as module

    async def gone(env, jobs, context, play):
        raise LookupError("the generator is gone")

    monkeypatch.setattr(module, "generate_group", gone)
    with pipeline(Policy(), generation_timeout=60.0) as source:
        started = time.monotonic()
        with pytest.raises(LookupError, match="the generator is gone"):
            source.next_batch()
    assert time.monotonic() - started < 5


def test_waited_for_through_a_queue_a_dead_generator_is_a_timeout_that_hides_its_cause():
    batches = queue.Queue()

    def generate():
        raise LookupError("the generator is gone")

    threading.excepthook, before = (lambda *args: None), threading.excepthook
    try:
        worker = threading.Thread(target=generate)
        worker.start()
        with pytest.raises(queue.Empty) as raised:
            batches.get(timeout=0.5)
    finally:
        worker.join()
        threading.excepthook = before
    assert "generator" not in str(raised.value)


# --- the same step, cut otherwise -----------------------------------------------------------------


def test_one_row_of_eight_and_eight_rows_of_one_train_the_same(tmp_path):
    settings = {"deterministic": True, "max_off_policy_steps": 0, "max_steps": 2}
    packed = run(small_trainer(tmp_path / "packed", **settings))
    single = run(small_trainer(tmp_path / "single", **settings, packing=False, micro_batch_size=1))
    assert packed.steps[0]["packing/rows"] < single.steps[0]["packing/rows"]
    for step, single_step in zip(packed.steps, single.steps, strict=True):
        assert step["loss"] == pytest.approx(single_step["loss"], rel=1e-4, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(single_step["grad_norm"], rel=1e-4)
