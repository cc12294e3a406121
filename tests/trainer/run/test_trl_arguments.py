"""``GRPOTrainer`` with the arguments of TRL's, and the names of TRL's settings."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verifiers_trainer", reason="the trainer is not installed")

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.testing import ScriptedClient
from verifiers_trainer.grpo import environment_of
from verifiers_trainer.settings.compat import INSTEAD, UNCHANGING, known_names

WORDS = ["ab", "cd", "ef", "gh"]
CHAT = [{"prompt": [{"role": "user", "content": f"say {w}"}], "word": w} for w in WORDS] * 2
TEXT = [{"prompt": f"say {w}", "word": w} for w in WORDS] * 2


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def near(prompts, completions, word, **columns):
    assert len(prompts) == len(completions) == len(word) == len(columns["answer"])
    return [float(w in text_of(c)) for c, w in zip(completions, word, strict=True)]


def length(completions, completion_ids, **columns):
    assert all(0 < len(ids) <= 8 for ids in completion_ids)
    return [len(text_of(c)) / 100 for c in completions]


def of_another_row(completions, solution):
    raise AssertionError("it is refused before the first rollout")


async def only_long(completions):
    return [1.0 if len(text_of(c)) > 3 else None for c in completions]


SEEN: list[int] = []


def of_the_trainer(completions, trainer_state, log_metric, log_extra):
    SEEN.append(trainer_state.global_step)
    log_metric("my/length", len(completions))
    log_extra("note", [f"a {n}" for n in range(len(completions))])
    return [float(len(text_of(c)) % 2) for c in completions]


def test_callbacks_see_trls_metrics_and_reward_functions_the_trainer(tmp_path):
    args = vf.GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=8, report_to="none", bf16=False, recipe="trl",
    )  # fmt: skip
    trainer = vf.GRPOTrainer(
        model="builtin:tiny", reward_funcs=[of_the_trainer, near], args=args, train_dataset=CHAT
    )
    trainer.train()
    assert set(SEEN) <= {0, 1, 2}
    first = next(row for row in trainer.state.log_history if "loss" in row)
    assert first["reward"] == first["reward/mean"]
    assert first["rewards/near/mean"] == first["reward/near"]
    assert first["completions/max_length"] == first["tokens/longest"] <= 8
    assert first["completions/mean_length"] <= 8
    assert 0 <= first["frac_reward_zero_std"] <= 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(rows) == len(steps) == 2, "the old names add no lines"
    assert any(row.get("my/length") == 4 for row in steps)
    trainer.close()


def test_defaults_that_differ_from_trls_are_said_with_the_switch(tmp_path, caplog):
    def made(**settings):
        caplog.clear()
        args = vf.GRPOConfig(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=8, num_generations=4,
            report_to="none", bf16=False, **settings,
        )  # fmt: skip
        trainer = vf.GRPOTrainer(
            model="builtin:tiny", reward_funcs=near, args=args, train_dataset=CHAT
        )
        trainer.close()
        return trainer.args

    own = made()
    assert "recipe='trl' takes TRL's" in caplog.text
    followed = made(recipe="trl")
    assert "recipe='trl'" not in caplog.text
    assert (own.zero_variance, own.max_off_policy_steps, own.disable_dropout) == ("drop", 1, True)
    assert (followed.zero_variance, followed.max_off_policy_steps) == ("keep", 0)
    assert (followed.disable_dropout, followed.beta, followed.max_completion_len) == (False, 0, 512)


def test_the_size_of_a_generation_is_its_steps_in_other_words():
    common = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    common |= {"num_generations": 8}
    counted = vf.GRPOConfig(**common, generation_batch_size=64)
    same = vf.GRPOConfig(**common, steps_per_generation=8)
    for config in (counted, counted, same):
        config.resolve()
    assert (counted.updates_per_batch, counted.batch_size) == (4, 64)
    assert (same.updates_per_batch, same.batch_size) == (4, 64)
    smaller = vf.GRPOConfig(**common, generation_batch_size=8)
    smaller.resolve()
    assert (smaller.updates_per_batch, smaller.batch_size) == (1, 16)
    with pytest.raises(ConfigError, match=r"generation_batch_size 24 .* not a multiple"):
        vf.GRPOConfig(**common, generation_batch_size=24).resolve()


def test_vllm_in_the_trainers_process_is_not_silent(caplog):
    vf.GRPOConfig(vllm_mode="colocate", vllm_gpu_memory_utilization=0.3)
    assert "vllm_mode has no effect" in caplog.text
    assert "vllm_gpu_memory_utilization has no effect" in caplog.text
    caplog.clear()
    vf.GRPOConfig()
    assert "vllm_mode" not in caplog.text


@pytest.mark.parametrize("rows", [CHAT, TEXT], ids=["chat", "text"])
def test_it_trains_on_reward_functions_and_rows(tmp_path, rows):
    args = vf.GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        report_to="none",
        bf16=False,
        reward_weights=[1.0, 3.0],
    )
    trainer = vf.GRPOTrainer(
        model="builtin:tiny", reward_funcs=[near, length], args=args, train_dataset=rows
    )
    trainer.train()
    numbers = next(row for row in trainer.state.log_history if "reward/length" in row)
    assert numbers["reward/mean"] == pytest.approx(
        numbers["reward/near"] + 3 * numbers["reward/length"]
    )
    assert 0 < numbers["reward/length"] <= 0.2
    started = json.loads((tmp_path / "settings.json").read_text())  # no checkpoint was written
    assert (started["max_steps"], started["configuration"]["rollouts_per_example"]) == (1, 4)


def test_weights_of_another_number_than_the_functions_are_refused():
    args = vf.GRPOConfig(reward_weights=[1.0, 2.0], report_to="none", bf16=False, max_steps=1)
    trainer = vf.GRPOTrainer(model="builtin:tiny", reward_funcs=near, args=args, train_dataset=CHAT)
    with pytest.raises(ConfigError, match=r"\[1.0, 2.0\], and the rubric has the functions near"):
        trainer.train()


def evaluated(functions):
    env = environment_of(functions, CHAT)
    replies = iter(["long enough", "no"])
    client = ScriptedClient(lambda request: next(replies))
    return env.evaluate(client, "m", num_examples=1, rollouts_per_example=2, max_concurrent=1)


def test_a_reward_of_none_alone_is_unknown_and_says_what_was_returned():
    results = evaluated(only_long)
    assert results.rewards[0] == 1.0
    assert results.rewards[1] != results.rewards[1]
    assert "'only_long' returned None" in results["errors"][1]["message"]


def test_a_reward_of_none_leaves_a_completion_to_the_other_functions():
    """As TRL does, whose sum over the functions skips None."""

    def size(completions, **columns):
        return [float(len(text_of(c))) for c in completions]

    results = evaluated([only_long, size])
    assert results.rewards == [1.0 + len("long enough"), 2.0]
    assert results["errors"] == [None, None]


def test_a_reward_that_is_no_number_is_quoted():
    def text(completions, **columns):
        return ["well"] * len(completions)

    results = evaluated(text)
    assert "returned 'well'; return a number" in results["errors"][0]["message"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"reward_funcs": near}, "with train_dataset"),
        ({"train_dataset": CHAT, "env": "reverse-text"}, "goes with reward_funcs"),
        (
            {"reward_funcs": of_another_row, "train_dataset": CHAT},
            "'of_another_row' needs solution, and there are prompts, completions,"
            " completion_ids, word",
        ),
        ({"reward_funcs": near, "train_dataset": CHAT, "tools": [near]}, "no tools=.*vf.ToolEnv"),
        ({"env": "reverse-text", "rollout_func": near}, "no rollout_func=.*vf.MultiTurnEnv"),
        ({"env": "reverse-text", "environment_factory": dict}, "no environment_factory=.*env="),
        ({"env": "reverse-text", "reward_processing_classes": []}, "reward_funcs are functions"),
        ({"env": "reverse-text", "quantization_config": {}}, "args.model_init_kwargs"),
        ({"reward_funcs": ["a/reward-model"], "train_dataset": CHAT}, "is no function"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, says):
    with pytest.raises(ConfigError, match=says):
        vf.GRPOTrainer(model="builtin:tiny", **arguments)


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_a_setting_of_trl_that_is_none_here_says_what_to_use(name):
    assert name not in known_names()
    with pytest.raises(ConfigError, match=name) as caught:
        vf.GRPOConfig(**{name: "another value"})
    assert INSTEAD[name] in str(caught.value)
    assert "did you mean" not in str(caught.value)
    args = vf.GRPOConfig(report_to="none", bf16=False)
    with pytest.raises(ConfigError, match=name):
        setattr(args, name, "another value")


DEFAULTS_OF_TRL = {  # 1.16.0
    name: value
    for line in (Path(__file__).parent / "grpo_config_of_trl.json").read_text().splitlines()
    for name, value in json.loads(line).items()
}
REFUSED = {"use_bias_correction_kl": True}  # on by default there, and none here


@pytest.mark.parametrize("name", sorted(DEFAULTS_OF_TRL.keys() | INSTEAD.keys()))
def test_the_default_of_trl_is_accepted(name, caplog):
    value = DEFAULTS_OF_TRL.get(name, UNCHANGING.get(name))
    if name in REFUSED:
        with pytest.raises(ConfigError, match=name):
            vf.GRPOConfig(**{name: value})
        value = UNCHANGING[name]
    args = vf.GRPOConfig(**{"report_to": "none", "bf16": False, name: value})
    args.resolve(1)
    setattr(args, name, value)
    assert all(record.getMessage().startswith(f"{name} has no effect") for record in caplog.records)


def test_every_unchanging_value_is_the_default_of_trl():
    stored = {name: DEFAULTS_OF_TRL[name] for name in UNCHANGING.keys() & DEFAULTS_OF_TRL.keys()}
    switched_off = {"router_aux_loss_coef": 0.0, "use_bias_correction_kl": False}
    assert {**stored, **switched_off} == {name: UNCHANGING[name] for name in stored}
