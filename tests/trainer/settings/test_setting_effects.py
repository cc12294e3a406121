"""Each of these settings is changed once, and what it promises is seen to happen."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import verifiers as vf
from support.embedded import small_model
from support.fake_vllm import FakeVLLM
from support.training import (
    StepLog,
    first_batch,
    metrics_of,
    run,
    small_config,
    small_policy,
    small_trainer,
    toy_env,
)
from verifiers.checks.audit.profile import write_useful
from verifiers.checks.audit.report import RowProfile
from verifiers.errors import ConfigError, DatasetError
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.batch import Group, build
from verifiers_trainer.algorithm.group import apply_length_rules
from verifiers_trainer.algorithm.losses import LossInput
from verifiers_trainer.policy import checkpoint_files, loading, preparation
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer
from verifiers_trainer.policy.preparation import num_prompt_tokens
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer


def batch_of(trainer):
    try:
        return first_batch(trainer)
    finally:
        trainer.close()


def records_of(batch):
    return [record for group in batch.groups for record in group.rollouts]


# --- rows -----------------------------------------------------------------------------------------


def test_only_the_kept_rows_are_trained_and_the_evaluation_set_stays(tmp_path):
    env = toy_env()
    kept = list(env.train_table)[3:5]
    profiles = [RowProfile(example.example_id, example.hash, 1, 2) for example in kept]
    write_useful(tmp_path / "useful.jsonl", kept, profiles, env, "m")
    assert len(trained_examples(tmp_path, env)) == 40  # negative control
    assert trained_examples(tmp_path, env, keep_rows=str(tmp_path / "useful.jsonl")) == [
        row.hash for row in kept
    ]
    assert len(env.eval_table) == 8
    with pytest.raises(ConfigError, match=r"nothing\.jsonl' cannot be read"):
        small_trainer(tmp_path, toy_env(), keep_rows=str(tmp_path / "nothing.jsonl"))


def trained_examples(folder, env, **settings):
    trainer = small_trainer(folder, env, **settings)
    try:
        return [example.hash for example in trainer.training_run.examples]
    finally:
        trainer.close()


# --- model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [True, False])
def test_liger_is_applied_to_a_named_model_unless_switched_off(tmp_path, monkeypatch, wanted):
    asked = []
    monkeypatch.setattr(loading, "_apply_liger", asked.append)
    folder = tmp_path / "model"
    small_policy().save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    RLTrainer(str(folder), toy_env(), small_config(tmp_path, use_liger=wanted))
    assert len(asked) == wanted


@pytest.mark.parametrize(("kept", "dtype"), [("fp32", torch.float32), ("model", torch.bfloat16)])
def test_trained_weights_are_kept_in_float32_or_as_loaded(tmp_path, kept, dtype):
    trainer = small_trainer(tmp_path, model=small_policy().to(torch.bfloat16), master_weights=kept)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {dtype}


def test_every_lora_field_reaches_the_adapter():
    fields = {
        "lora_rank": 3,
        "lora_alpha": 9,
        "lora_dropout": 0.1,
        "lora_target_modules": ["q_proj"],
        "lora_modules_to_save": ["norm"],
        "lora_use_rslora": True,
    }
    model = build_tiny_model()
    made = preparation.lora_config(RLConfig(**fields), model)
    assert (made.r, made.lora_alpha, made.lora_dropout, made.use_rslora) == (3, 9, 0.1, True)
    assert (made.target_modules, made.modules_to_save) == ({"q_proj"}, ["norm"])
    plain = preparation.lora_config(RLConfig(), model)
    assert (plain.modules_to_save, plain.use_rslora) == (None, False)


def test_a_lora_config_replaces_the_fields(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=7, target_modules=["v_proj"], task_type="CAUSAL_LM")
    trainer = small_trainer(tmp_path, use_lora=True, lora_rank=2, lora_config=lora)
    assert trainer.model.peft_config["default"].r == 7
    peft_lora = LoraConfig(r=5, target_modules=["v_proj"], task_type="CAUSAL_LM")
    trainer = small_trainer(tmp_path, use_lora=True, lora_config=lora, peft_config=peft_lora)
    assert trainer.model.peft_config["default"].r == 5


@pytest.mark.parametrize("wanted", [True, False])
def test_gradient_checkpointing_computes_the_forward_pass_again_and_the_same(tmp_path, wanted):
    trainer = small_trainer(
        tmp_path, gradient_checkpointing=wanted, deterministic=True, max_steps=1
    )
    calls = []
    trainer.model.model.layers[0].mlp.register_forward_pre_hook(
        lambda module, inputs: calls.append(torch.is_grad_enabled())
    )
    log = run(trainer)
    plain = run(small_trainer(tmp_path / "plain", deterministic=True, max_steps=1))
    assert log.losses == plain.losses
    rows = int(log.steps[0]["packing/rows"])
    assert sum(calls) == (2 * rows if wanted else rows)


# --- lengths --------------------------------------------------------------------------------------


def long_and_short():
    rows = [{"question": "a" * (20 if n % 2 else 2)} for n in range(20)]
    return vf.SingleTurnEnv(dataset=rows, rubric=toy_env().rubric)


def test_prompts_above_the_limit_are_not_used(tmp_path, caplog):
    assert len(small_trainer(tmp_path, long_and_short()).examples) == 20
    trainer = small_trainer(tmp_path, long_and_short(), max_prompt_len=24)
    assert {example.row["question"] for example in trainer.examples} == {"aa"}
    assert (
        "10 of 20 examples have prompts of more than max_prompt_len = 24 tokens and are not used"
        in caplog.text
    )
    with pytest.raises(DatasetError, match="every prompt is longer"):
        assert small_trainer(tmp_path, long_and_short(), max_prompt_len=3).examples


def test_prompts_above_the_limit_keep_their_end_when_asked(tmp_path, caplog):
    # the first two prompts, of which one is long
    settings = {"zero_variance": "keep", "deterministic": True}
    trainer = small_trainer(tmp_path, long_and_short(), max_prompt_length=24, **settings)
    untruncated = small_trainer(tmp_path, long_and_short(), **settings)
    longest = max(len(record.turns[0].prompt_ids) for record in records_of(batch_of(untruncated)))
    cut = [record.turns[0].prompt_ids for record in records_of(batch_of(trainer))]
    assert longest > 24
    assert max(map(len, cut)) == 24
    ends = {tuple(ids[-3:].tolist()) for ids in cut}
    assert len(ends) == 1  # the template's last tokens, which the answer follows
    assert "are cut at their beginning" in caplog.text


@pytest.mark.parametrize("system", [None, "be brief"])
def test_prompts_of_several_turns_keep_the_end_of_their_text(tmp_path, caplog, system):
    class Turns(vf.MultiTurnEnv):
        def env_response(self, messages, state):
            return [{"role": "user", "content": "again"}]

    questions = ["ab", "abcdefghijklmnopqrst", "z" * 30]
    env = Turns(
        dataset=[{"question": q} for q in questions],
        rubric=toy_env().rubric,
        max_turns=2,
        system_prompt=system,
    )
    shortened = [{"role": "system", "content": ""}] * bool(system) + [
        {"role": "user", "content": "abcdef"}
    ]
    limit = num_prompt_tokens({"prompt": shortened}, build_tiny_tokenizer(), env)
    trainer = small_trainer(
        tmp_path,
        env,
        max_prompt_length=limit,
        shuffle_dataset=False,
        zero_variance="keep",
        max_seq_len=256,
    )
    kept = [example.row["prompt"][-1]["content"] for example in trainer.examples]
    assert all(
        question.endswith(end) and end for question, end in zip(questions, kept, strict=True)
    ), kept
    assert "truncate_prompt_tokens" not in trainer.args.sampling()
    assert (
        f"{3 if system else 2} of 3 examples have prompts of more than max_prompt_len"
        in caplog.text
    )
    turns = [record.turns for record in records_of(batch_of(trainer))]
    assert max(len(turn[0].prompt_ids) for turn in turns) <= limit
    assert any(len(turn[1].prompt_ids) > limit for turn in turns)
    for first, second in turns:  # one conversation: the second turn begins with the whole first
        assert second.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()


def test_a_completion_is_bounded_after_the_first_prompt(tmp_path):
    trainer = small_trainer(tmp_path, max_tokens=None, max_completion_len=3, zero_variance="keep")
    assert {record.num_sampled for record in records_of(batch_of(trainer))} <= {1, 2, 3}
    free = small_trainer(tmp_path, max_tokens=None, zero_variance="keep")
    assert max(record.num_sampled for record in records_of(batch_of(free))) > 3


def turn(prompt, sampled):
    return Turn(np.arange(prompt) + 1, np.arange(sampled) + 1, np.full(sampled, -0.5), 0)


def record(reward, *turns):
    return Rollout(turns, reward, {}, Status("stop"))


def group_of_lengths(*turns_of):
    """A group whose first member is worth 1, the others 0."""
    return Group(0, 1, tuple(record(float(n == 0), *turns) for n, turns in enumerate(turns_of)))


def built(**settings):
    return RLConfig(batch_size=4, rollouts_per_example=2, micro_batch_size=2, **settings)


def test_the_whole_rollout_after_its_first_prompt_counts_as_completion():
    two_turns = (turn(4, 3), turn(10, 3))
    group = group_of_lengths(two_turns, (turn(4, 3),))
    assert build([group], [], built(max_completion_len=9)).stats["rollouts/overlong"] == 0
    assert build([group], [], built(max_completion_len=8)).stats["rollouts/overlong"] == 1


def test_the_denominator_of_a_constant_length_is_the_longest_completion():
    group = group_of_lengths((turn(4, 3),), (turn(4, 3),))

    def weight(**settings):
        rows = build([group], [], built(aggregation="constant_length", **settings)).rows_R[0]
        return max(float(row.weight.max()) for row in rows)

    assert weight(max_completion_len=100) == pytest.approx(1 / (2 * 100))
    assert weight(max_seq_len=1000) == pytest.approx(1 / (2 * 1000))


def state_with(reward, prompt, sampled):
    from verifiers.rollouts.state import TrajectoryStep
    from verifiers.types import ResponseTokens

    ids = (
        np.arange(prompt, dtype=np.int32),
        np.arange(sampled, dtype=np.int32),
        np.zeros(sampled, np.float32),
    )
    step = TrajectoryStep(tokens=ResponseTokens(*ids, version=0))
    return vf.State(reward=reward, trajectory=[step])


@pytest.mark.parametrize(
    ("overlong", "is_counted"), [("mask", [True, True]), ("drop", [False, True])]
)
def test_overlong_rollouts_count_in_the_baseline_or_not(overlong, is_counted):
    settings = built(max_seq_len=10, overlong=overlong)
    states = state_with(1.0, 4, 20), state_with(0.0, 4, 2)
    rewards = np.array([apply_length_rules(state.rollout(), settings).reward for state in states])
    assert (~np.isnan(rewards)).tolist() == is_counted


# --- sampling -------------------------------------------------------------------------------------


def test_a_turn_ends_at_a_stop_text(tmp_path):
    letters = [chr(n) for n in range(97, 123)]
    stopped = batch_of(small_trainer(tmp_path, max_tokens=24, stop=letters, zero_variance="keep"))
    for played in records_of(stopped):
        assert not re.search("[a-z]", played.text["completion"][-1]["content"] or "")
    free = batch_of(small_trainer(tmp_path, max_tokens=24, zero_variance="keep"))
    assert any(
        re.search("[a-z]", played.text["completion"][-1]["content"] or "")
        for played in records_of(free)
    )


def test_penalties_reach_the_sampler(tmp_path):
    def repeats(**settings):
        trainer = small_trainer(
            tmp_path, max_tokens=40, deterministic=True, zero_variance="keep", **settings
        )
        ids = [played.turns[0].completion_ids for played in records_of(batch_of(trainer))]
        return sum(len(tokens) - len(set(tokens.tolist())) for tokens in ids)

    assert repeats(frequency_penalty=2.0, presence_penalty=2.0) < repeats()


def test_another_distribution_than_the_trained_one_is_said_or_refused(caplog):
    RLConfig(top_p=0.9).resolve()
    assert "top_p: tokens are not sampled from the distribution that is trained" in caplog.text
    caplog.clear()
    RLConfig().resolve()
    assert not caplog.text
    with pytest.raises(
        ConfigError, match="truncated_sampling='refuse' and frequency_penalty, top_k"
    ):
        RLConfig(top_k=5, frequency_penalty=0.5, truncated_sampling="refuse").resolve()
    RLConfig(truncated_sampling="refuse").resolve()


def test_guided_sampling_is_refused_where_nothing_can_guide():
    with pytest.raises(ConfigError, match="guided_regex needs a server"):
        RLConfig(guided_regex="a+").resolve()


# --- pipeline -------------------------------------------------------------------------------------


class Busy:
    """How many calls run at once."""

    def __init__(self):
        self.now = self.most = 0

    async def __aenter__(self):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)

    async def __aexit__(self, *_):
        self.now -= 1


@pytest.mark.parametrize(("limit", "most"), [(1, [1]), (2, [2]), (None, range(3, 17))])
def test_scoring_is_bounded(tmp_path, limit, most):
    busy = Busy()

    async def slow(completion, **_):
        async with busy:
            return len(completion[-1]["content"] or "")

    batch_of(
        small_trainer(tmp_path, toy_env(slow), max_concurrent_scoring=limit, zero_variance="keep")
    )
    assert busy.most in most


def test_tool_calls_are_bounded_for_all_rollouts_together(tmp_path):
    with small_trainer(tmp_path, max_concurrent_tools=1) as trainer:
        trainer.start_engine()
        slot = trainer.run_context().tool_slot
        free = small_trainer(tmp_path).args.max_concurrent_tools
    busy = Busy()

    async def calls():
        async def call_tool():
            async with slot, busy:
                pass

        await asyncio.gather(*(call_tool() for _ in range(4)))

    asyncio.run(calls())
    assert busy.most == 1
    assert free is None


def test_the_engine_gets_its_settings(tmp_path):
    trainer = small_trainer(
        tmp_path, tool_call_parser="none", embedded_mode="padded", embedded_concurrency=3
    )
    with trainer:
        trainer.start_engine()
        engine = trainer.engine
        assert engine._concurrency == 3
        assert engine._parser is None
        assert engine._generator._max_rows == 3
    with small_trainer(tmp_path) as trainer:
        trainer.start_engine()
        assert trainer.engine._parser is not None


# --- evaluation, logging, saving ------------------------------------------------------------------


@pytest.mark.parametrize(("size", "most"), [(2, [2]), (None, range(3, 9))])
def test_evaluation_rollouts_at_a_time(tmp_path, size, most):
    busy = Busy()

    class Slow(vf.SingleTurnEnv):
        async def get_model_response(self, *args, **keywords):
            async with busy:
                return await super().get_model_response(*args, **keywords)

    env = Slow(
        dataset=[{"question": "a"}], eval_dataset=[{"question": "b"}] * 8, rubric=toy_env().rubric
    )
    chosen = {} if size is None else {"per_device_eval_batch_size": size}
    with small_trainer(tmp_path, env, **chosen) as trainer:
        trainer.evaluate()
    assert busy.most in most


def test_an_evaluation_set_of_its_own(tmp_path):
    rows = [{"question": "xyz"}, {"question": "uvw"}, {"question": "rst"}]
    trainer = RLTrainer(
        small_policy(), toy_env(), small_config(tmp_path), build_tiny_tokenizer(), eval_dataset=rows
    )
    with trainer:
        trainer.evaluate(num_examples=2)
        assert [part["prompts"][0][-1]["content"] for part in trainer.eval_dataloader] == ["xyz"]
    lines = (tmp_path / "eval" / "step-0" / "results.jsonl").read_text()
    assert "xyz" in lines
    assert "rst" not in lines


def test_evaluation_before_the_first_step(tmp_path):
    def evaluated(folder, **settings):
        run(small_trainer(folder, max_steps=2, eval_strategy="steps", eval_steps=1, **settings))
        return [line["step"] for line in metrics_of(folder) if "eval_reward" in line]

    assert evaluated(tmp_path / "a", eval_on_start=True) == [0, 1, 2]
    assert evaluated(tmp_path / "b") == [1, 2]


def test_a_training_set_of_its_own(tmp_path):
    rows = [{"question": "xyz"}, {"question": "uvw"}]
    # else a second pass may be faster
    config = small_config(tmp_path, zero_variance="keep", deterministic=True)
    trainer = RLTrainer(small_policy(), toy_env(), config, build_tiny_tokenizer(), dataset=rows)
    assert {played.text["prompt"][-1]["content"] for played in records_of(batch_of(trainer))} == {
        "xyz",
        "uvw",
    }


def test_a_loss_and_an_advantage_by_keyword(tmp_path):
    trainer = RLTrainer(
        small_policy(),
        toy_env(),
        small_config(tmp_path),
        build_tiny_tokenizer(),
        loss="reinforce",
        advantage="rloo",
    )
    assert (trainer.args.loss, trainer.args.advantage) == ("reinforce", "rloo")


def test_rollouts_are_printed_when_asked(tmp_path, capsys):
    run(
        small_trainer(
            tmp_path, max_steps=2, log_completions=True, num_completions_to_print=2, logging_steps=2
        )
    )
    printed = capsys.readouterr().out
    assert "Step 2" in printed
    assert "Step 1" not in printed
    run(small_trainer(tmp_path / "quiet", max_steps=2, log_completions=True))
    assert "Step" not in capsys.readouterr().out


def test_one_sibling_of_each_example_is_logged_when_asked(tmp_path):
    def logged(folder, **settings):
        run(small_trainer(folder, max_steps=1, log_completions=True, **settings))
        lines = (Path(folder) / "completions" / "step-1.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        trained = [row["group"] for row in rows if row["trained"]]
        return len(trained), len(rows) // len({row["group"] for row in rows})

    assert logged(tmp_path / "one", log_unique_prompts=True) == (2, 1)
    assert logged(tmp_path / "all") == (8, 4)


def test_checkpoints_of_every_nth_step_stay(tmp_path):
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    run(small_trainer(tmp_path / "a", **settings, keep_every=2))
    assert [step for step, _ in checkpoint_files.steps_in(tmp_path / "a")] == [5, 4, 2]
    run(small_trainer(tmp_path / "b", **settings))
    assert [step for step, _ in checkpoint_files.steps_in(tmp_path / "b")] == [5]


def test_the_folder_of_what_is_sent_to_a_server(tmp_path):
    settings = {
        "use_lora": True,
        "weight_sync": "lora_dir",
        "max_steps": 1,
        "zero_variance": "keep",
    }
    for options, folder in (
        ({}, tmp_path / "run" / "sync"),
        ({"sync_dir": str(tmp_path / "mine")}, tmp_path / "mine"),
    ):
        with FakeVLLM(small_model(), build_tiny_tokenizer()) as server:
            trainer = small_trainer(
                tmp_path / "run", model=small_model(), inference=server.url, **settings, **options
            )
            with trainer:
                trainer.start_engine()
                assert list(folder.glob("policy-*"))


# --- objective and bounds -------------------------------------------------------------------------


def test_the_floor_of_the_ratio_reaches_the_loss(tmp_path):
    """A token that has become less likely still gets the weight of the floor."""
    # log π, log μ, advantage, mask, sample
    token = (torch.tensor([value]) for value in (-3.0, -1.0, 1.0, True, 0))
    row = LossInput(*token)
    weights = [
        float(small_trainer(tmp_path, ratio_floor=floor).criterion(row).losses[0])
        for floor in (0.0, 0.5)
    ]
    assert weights[1] / weights[0] == pytest.approx(0.5 / np.exp(-2.0), rel=1e-5)


def test_a_rollout_that_takes_too_long_is_a_failure_of_its_own(tmp_path):
    class Slow(vf.SingleTurnEnv):
        async def get_model_response(self, state, *args, **keywords):
            if state["prompt"][-1]["content"] == "slow":
                await asyncio.sleep(20)
            return await super().get_model_response(state, *args, **keywords)

    env = Slow(
        dataset=[{"question": "slow"}, {"question": "a"}, {"question": "b"}],
        rubric=toy_env().rubric,
    )
    settings = {
        "shuffle_dataset": False,
        "zero_variance": "keep",
        "max_off_policy_steps": 0,
        "max_error_fraction": 1.0,
    }
    trainer = small_trainer(tmp_path, env, rollout_timeout=0.5, **settings)
    batch = batch_of(trainer)
    errors = {record.text["prompt"][-1]["content"]: record.error for record in records_of(batch)}
    assert errors["slow"].text.startswith("RolloutTimeout: ")
    assert errors["a"] is None
    assert batch.stats["rollouts/timeouts"] == 4
    assert small_trainer(tmp_path).args.rollout_timeout is None  # then generation_timeout bounds it


# --- combinations that cannot be ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_prompt_len": 2048}, "max_prompt_len 2048 leaves no room"),
        ({"max_completion_len": 4096}, "max_completion_len 4096 leaves no room"),
        (
            {"prompt_overflow": "cut"},
            "prompt_overflow must be one of skip, truncate_left, or None, not 'cut'",
        ),
        ({"stale_policy": "dropp"}, "not 'dropp', did you mean \"drop\""),
        ({"master_weights": "bf16"}, "master_weights must be one of fp32, model, not 'bf16'"),
        ({"overlong": "cut"}, "overlong must be one of mask, drop, not 'cut'"),
        (
            {"tool_call_parser": "llama"},
            "tool_call_parser must be one of auto, hermes, llama3_json, qwen3_coder, none, not"
            " 'llama', did you mean",
        ),
        (
            {"truncated_sampling": "allow"},
            "truncated_sampling must be one of warn, refuse, not 'allow'",
        ),
        ({"presence_penalty": 3.0}, "presence_penalty must be a number from -2 to 2, not 3.0"),
        ({"frequency_penalty": -3.0}, "frequency_penalty must be a number from -2 to 2, not -3.0"),
        (
            {"max_concurrent_scoring": 0},
            "max_concurrent_scoring must be a whole number from 1 to 1000000000, or None, not 0",
        ),
        (
            {"max_concurrent_tools": 0},
            "max_concurrent_tools must be a whole number from 1 to 1000000000, or None, not 0",
        ),
        (
            {"embedded_concurrency": 0},
            "embedded_concurrency must be a whole number from 1 to 1000000, or None, not 0",
        ),
        (
            {"keep_every": 0},
            "keep_every must be a whole number from 1 to 1000000000, or None, not 0",
        ),
        (
            {"num_completions_to_print": -1},
            "num_completions_to_print must be a whole number from 0 to 1000000, not -1",
        ),
        ({"sampling_args": {"stop": ["x"]}}, "set stop instead"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(settings, said):
    with pytest.raises(ConfigError) as raised:
        RLConfig(**settings).resolve()
    assert said in str(raised.value)


def test_what_half_precision_asks_for_is_said_once(caplog):
    with caplog.at_level(logging.WARNING):
        config = RLConfig(bf16=True)
        config.resolve()
    assert caplog.text.count("computes in float32") == (not torch.cuda.is_available())


# --- stale rollouts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy_name", "slow_ones_are_trained"), [("wait", True), ("drop", False)]
)
def test_slow_rollouts_are_waited_for_or_dropped(tmp_path, policy_name, slow_ones_are_trained):
    """The first two examples take as long as many steps of the others."""

    class Slow(vf.SingleTurnEnv):
        async def get_model_response(self, state, *args, **keywords):
            if "slow" in state["prompt"][-1]["content"]:
                await asyncio.sleep(1.5)
            return await super().get_model_response(state, *args, **keywords)

    rows = [{"question": "slow"}] * 2 + [{"question": f"q{n}"} for n in range(60)]
    env = Slow(dataset=rows, rubric=toy_env().rubric)
    settings = {
        "shuffle_dataset": False,
        "max_off_policy_steps": 2,
        "zero_variance": "keep",
        "oversample": 8.0,
    }
    trainer = small_trainer(tmp_path, env, max_steps=6, stale_policy=policy_name, **settings)
    trained = []

    def note(*_, **__):
        trained.extend(played.text["prompt"][-1]["content"] for played in records_of(trainer.batch))

    log = StepLog()
    log.on_step_end = note
    trainer.add_callback(log)
    trainer.train()
    assert ("slow" in trained) is slow_ones_are_trained
    assert max(line["staleness/max"] for line in metrics_of(tmp_path)) <= 2
