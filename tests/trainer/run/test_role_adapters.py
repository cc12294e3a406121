"""``lora_per_role``: each role has an adapter, which its own samples alone train and with which its
own turns are sampled."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from peft import PeftModel

import verifiers as vf
from support.pipeline import pipeline_config
from support.training import (
    files_hash,
    letter_tasks,
    losses_of,
    metrics_of,
    pair,
    run,
    small_policy,
    small_trainer,
    toy_env,
)
from support.training_child import SAVED
from verifiers.errors import CheckpointError, ConfigError, ModelNotFound, RunMismatch
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.turn import Turn
from verifiers.testing import ScriptedClient
from verifiers_trainer.algorithm.diagnostics import RatioMeter
from verifiers_trainer.engines import role_adapters
from verifiers_trainer.engines.embedded import engine
from verifiers_trainer.engines.lora import LowRank
from verifiers_trainer.engines.role_adapters import parameters_of, roles_of, select
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.policy.exporting import export
from verifiers_trainer.policy.folder_client import folder_client, load_folder
from verifiers_trainer.policy.loading import get_model
from verifiers_trainer.policy.scoring import scored
from verifiers_trainer.run.proof import verify
from verifiers_trainer.run.sanity_checks import Agreement, Agreements

ROLES = {"use_lora": True, "lora_per_role": True, "zero_variance": "keep"}
BY_OTHERS = ("grad_norm", "loss", "entropy")
"""Metrics that each role has under its own name too."""


def trainer_of(folder, env=None, **settings):
    return small_trainer(folder, env or pair(), **{**ROLES, **settings})


def of_role(model, role):
    """The weights of a role's adapter, bit for bit."""
    return [weight.detach().clone() for weight in parameters_of(model)[role]]


def are_equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- what trains an adapter -----------------------------------------------------------------------


def sampled(tmp_path, steps=3):
    """Groups of each step, sampled once: the tokens are the same for whoever trains on them. Every
    group has a signal for each role."""
    with trainer_of(tmp_path / "sampler") as trainer:
        rows = [example.row for example in trainer.examples]
        groups = [trainer.sample(rows[2 * n : 2 * n + 2]) for n in range(steps)]
    rewards = iter([{"left": n % 3, "right": n % 2} for n in range(8)] * steps)
    rewarded = partial(changed, change=lambda r: replace(r, role_rewards=next(rewards)))
    return [[rewarded(group) for group in part] for part in groups]


def changed(group, change):
    return replace(group, rollouts=tuple(change(rollout) for rollout in group.rollouts))


def without_signal(rollout):
    """The right role's advantages are 0."""
    return replace(rollout, role_rewards=rollout.role_rewards | {"right": 1.0})


def without_samples(rollout):
    """The right role's reward is unknown, so that it has no samples."""
    return replace(rollout, role_rewards=rollout.role_rewards | {"right": math.nan})


def without_turns(rollout):
    """The right role took no turn."""
    turns = Transcript(turn for turn in rollout.transcript if turn.role == "left")
    rewards = {"left": rollout.role_rewards["left"]}
    return replace(rollout, transcript=turns, role_rewards=rewards)


def with_longer_turns(rollout):
    """The right role says four times as much."""

    def longer(turn):
        ids, logprobs = np.tile(turn.completion_ids, 4), np.tile(turn.sampler_logprobs, 4)
        again = Turn(turn.prompt_ids, ids, logprobs, -1, role="right")  # no policy sampled it so
        return again if turn.role == "right" else turn

    return replace(rollout, transcript=Transcript(map(longer, rollout.transcript)))


def trained_on(folder, steps, **settings):
    """The trained policy, its metrics, and the optimizer's averages of the left role."""
    with trainer_of(folder, max_grad_norm=0.05, learning_rate=1e-2, **settings) as trainer:
        numbers = []
        for groups in steps:
            trainer.forward_backward(trainer.batch_of(groups))
            numbers.append(trainer.optim_step())
        averages = [
            trainer.optimizer.state[weight]["exp_avg_sq"].clone()
            for weight in parameters_of(trainer.model).get("left", [])
        ]
        return trainer.model, numbers, averages


@pytest.mark.parametrize(
    "change", [without_signal, without_samples, without_turns, with_longer_turns]
)
def test_an_adapter_does_not_depend_on_the_samples_of_another_role(tmp_path, change):
    steps = sampled(tmp_path)
    others = [[changed(group, change) for group in groups] for groups in steps]
    both, numbers, averages = trained_on(tmp_path / "both", steps)
    alone, numbers_alone, averages_alone = trained_on(tmp_path / "alone", others)
    assert are_equal(of_role(both, "left"), of_role(alone, "left"))
    assert are_equal(averages, averages_alone)
    for name in BY_OTHERS:
        values = [line[f"{name}/left"] for line in numbers]
        assert values == [line[f"{name}/left"] for line in numbers_alone]
    # clipping was in force, and the left role has learned
    assert all(line["grad_norm/left"] > 0.05 for line in numbers)
    # the control: the other adapter is another
    assert not are_equal(of_role(both, "right"), of_role(alone, "right"))


def test_what_is_computed_again_for_the_gradient_has_the_adapter_of_its_row(tmp_path):
    steps = sampled(tmp_path, 2)
    plain, _, _ = trained_on(tmp_path / "plain", steps)
    again, _, _ = trained_on(tmp_path / "again", steps, gradient_checkpointing=True)
    for role in ("left", "right"):
        for first, second in zip(of_role(plain, role), of_role(again, role), strict=True):
            assert torch.allclose(first, second, atol=1e-5)


def test_one_adapter_in_all_roles_depends_on_all_samples(tmp_path):
    """The control of the test above: what it compares would differ."""
    steps = sampled(tmp_path)
    others = [[changed(group, without_samples) for group in groups] for groups in steps]
    policies = [
        trained_on(tmp_path / name, groups, lora_per_role=False)[0]
        for name, groups in (("both", steps), ("alone", others))
    ]
    weights = [[p for p in policy.parameters() if p.requires_grad] for policy in policies]
    assert not are_equal(*weights)


def test_a_role_without_samples_in_a_step_is_not_moved_by_its_momentum(tmp_path):
    steps = sampled(tmp_path)
    quiet = [steps[0], *([changed(group, without_turns) for group in groups] for groups in steps)]
    first, _, _ = trained_on(tmp_path / "first", quiet[:1])
    later, _, _ = trained_on(tmp_path / "later", quiet)
    assert are_equal(of_role(first, "right"), of_role(later, "right"))
    assert not are_equal(of_role(first, "left"), of_role(later, "left"))


def against_a_script():
    """One trained role, and one that a script plays."""
    return pair_of(vf.Role("right", client=ScriptedClient("rr")))


def pair_of(right):
    env = pair()
    return type(env)(
        ("left", right),
        dataset=[{"question": f"q{n}"} for n in range(8)],
        max_turns=2,
        rubric=env.rubric,
    )


def test_an_adapter_of_the_only_role_is_that_of_an_ordinary_run_bit_for_bit(tmp_path):
    settings = {
        "max_steps": 4,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 4,
        "beta": 0.1,
        "max_grad_norm": 0.05,
        "deterministic": True,
    }
    for name, per_role in (("role", True), ("plain", False)):
        run(trainer_of(tmp_path / name, against_a_script(), **settings, lora_per_role=per_role))
    role, plain = tmp_path / "role/checkpoint-4", tmp_path / "plain/checkpoint-4"
    assert losses_of(tmp_path / "role") == losses_of(tmp_path / "plain")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        of_roles = (role / "role-left" / file).read_bytes()
        expected = (plain / file).read_bytes()
        # the base is a folder of the run
        assert of_roles.replace(bytes(tmp_path / "role"), bytes(tmp_path / "plain")) == expected
    assert files_hash(role, "optimizer.safetensors") == files_hash(plain, "optimizer.safetensors")
    for line, ordinary in zip(metrics_of(role.parent), metrics_of(plain.parent), strict=True):
        for name, value in ordinary.items():
            if not name.startswith(("time", "throughput", "alarm")):
                assert line[name] == value or value != value, name
    # the control: the adapter was trained
    fresh = trainer_of(tmp_path / "fresh", against_a_script())
    assert not are_equal(
        of_role(load_folder(role, with_roles=True)[0], "left"), of_role(fresh.model, "left")
    )


# --- who samples ----------------------------------------------------------------------------------


def shifted(trainer):
    """Adapters far from each other, in the parameters that train."""
    for seed, weights in enumerate(parameters_of(trainer.model).values()):
        generator = torch.Generator().manual_seed(seed)
        for weight in weights:
            weight.data = torch.randn(weight.shape, generator=generator) / 4


@pytest.mark.parametrize("settings", [{}, {"num_env_workers": 0, "history": "exact"}])
def test_each_turn_is_sampled_with_the_adapter_of_its_role(tmp_path, settings):
    trainer = trainer_of(tmp_path, max_tokens=12, **settings)
    shifted(trainer)
    with trainer:
        rows = [example.row for example in trainer.examples]
        groups = trainer.sample(rows[:4])
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        apart = {}
        for swap in (False, True):
            for turn in (turn for rollout in rollouts for turn in rollout.turns):
                if swap:
                    turn.extras["role"] = {"left": "right", "right": "left"}[turn.role]
            meter = scored(trainer.model, [r.turns for r in rollouts], 0, "cpu")
            apart[swap] = [meter.of_adapter(number).max_abs for number in (0, 1)]
            assert meter.of_adapter(0).num_current > 50
    assert max(apart[False]) < 1e-4
    # the control: the other role's adapter gives other numbers
    assert min(apart[True]) > 0.05


def test_an_environment_that_asks_for_no_role_is_refused_by_name(tmp_path):
    with (
        trainer_of(tmp_path) as trainer,
        pytest.raises(ModelNotFound, match="serves 'left', 'right', an adapter for each role"),
    ):
        trainer.generate(["abc"])


def counted(differences):
    """A meter of rows of two adapters; ``differences``: of the tokens of each."""
    meter = RatioMeter(0)
    for number, d in enumerate(differences):
        size = len(d)
        row = {
            "loss_mask": torch.ones(size, dtype=torch.bool),
            "weight": torch.ones(size),
            "version": torch.zeros(size, dtype=torch.int64),
            "seq_ids": torch.zeros(size, dtype=torch.int64),
            "token_ids": torch.arange(5, size + 5),
            "position_ids": torch.arange(size),
            "adapter": torch.tensor([number]),
        }
        log_mu = torch.full((size,), -1.0)
        meter.add(log_mu + torch.tensor(d), log_mu, None, row)
    return meter


def test_a_role_with_other_weights_is_found_among_the_tokens_of_the_others():
    meter = counted([[0.0] * 400, [0.02, -0.02] * 8])
    new = partial(Agreement, pipeline_config(), build_tiny_tokenizer())
    with pytest.raises(ConfigError, match="in the role 'right', with identical weights"):
        Agreements(new, ("left", "right")).check(meter, lambda *_: 0.002)
    # the control: over all tokens it is hidden
    assert new().check(meter, lambda *_: 0.002)["sampler/disagreement"] < 2
    quiet = counted([[0.001, -0.001] * 8, [0.002, -0.002] * 8])
    numbers = Agreements(new, ("left", "right")).check(quiet, lambda *_: 0.002)
    assert numbers["sampler/disagreement"] == numbers["sampler/disagreement/right"]
    assert numbers["sampler/disagreement"] > numbers["sampler/disagreement/left"]
    assert numbers["sampler/compared"] == 32


def test_an_adapter_that_the_engine_has_an_old_copy_of_ends_the_run(tmp_path, monkeypatch):
    """A planted fault: one role is sampled with its first weights."""
    weights_of = role_adapters.weights_of

    def stale(model):
        weights = weights_of(model)
        copied = {
            name: LowRank(layer.a_RI.detach().clone(), layer.b_OR.detach().clone())
            for name, layer in weights["right"].layers.items()
        }
        return weights | {"right": replace(weights["right"], layers=copied)}

    monkeypatch.setattr(role_adapters, "weights_of", stale)
    settings = {"max_steps": 4, "learning_rate": 0.1}
    with pytest.raises(ConfigError, match="parameters of the model were replaced"):
        trainer_of(tmp_path / "start", **settings).train()
    # without that check the canary finds it, and says which role
    monkeypatch.setattr(engine, "are_parameters_of", lambda tensors, model: True)
    with pytest.raises(ConfigError, match="in the role 'right', asked by the canary"):
        trainer_of(tmp_path / "run", **settings).train()


# --- files ----------------------------------------------------------------------------------------

RUN = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "learning_rate": 1e-2,
    "log_completions": True,
    "log_tokens": 1000,
    "deterministic": True,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two roles."""
    folder = tmp_path_factory.mktemp("trained")
    run(trainer_of(folder, eval_strategy="steps", eval_steps=2, eval_num_examples=4, **RUN))
    return folder


def test_the_adapter_of_a_role_is_loaded_by_peft_and_by_our_own_loading(trained):
    checkpoint = trained / "checkpoint-4"
    ours, _ = load_folder(checkpoint, with_roles=True)
    assert set(roles_of(ours)) == {"left", "right"}
    ids = torch.arange(5, 25)[None]
    logits = {}
    for number, role in enumerate(roles_of(ours)):
        base = get_model(str(next(trained.glob("base-*"))))
        of_peft = PeftModel.from_pretrained(base, str(checkpoint / f"role-{role}")).eval()
        select(ours.get_base_model(), number)
        with torch.no_grad():
            logits[role] = of_peft(ids).logits
            assert torch.equal(logits[role], ours(ids).logits)
        merged, _ = load_folder(checkpoint / f"role-{role}")
        with torch.no_grad():
            assert torch.allclose(merged(ids).logits, logits[role], atol=1e-5)
    # the controls: adapters differ from each other, and one base was written
    assert not torch.allclose(logits["left"], logits["right"], atol=1e-4)
    assert len(list(trained.glob("base-*"))) == 1


@pytest.mark.parametrize("lag", [0, 1])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path, lag):
    settings = {**RUN, "max_off_policy_steps": lag}
    run(trainer_of(tmp_path / "whole", **settings))
    run(trainer_of(tmp_path / "parts", **{**settings, "max_steps": 2}))
    run(trainer_of(tmp_path / "parts", **settings), resume_from_checkpoint=True)
    whole, parts = (tmp_path / name / "checkpoint-4" for name in ("whole", "parts"))
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "parts")
    files = [name for name in SAVED if (whole / name).is_file()]
    assert "optimizer.safetensors" in files
    adapters = [f"role-{role}/adapter_model.safetensors" for role in ("left", "right")]
    assert files_hash(whole, *files, *adapters) == files_hash(parts, *files, *adapters)


def test_a_run_of_other_roles_is_not_continued(trained, tmp_path):
    only_left = against_a_script()
    with pytest.raises((RunMismatch, CheckpointError), match="roles was"):
        trainer_of(tmp_path, only_left, **RUN).train(
            resume_from_checkpoint=str(trained / "checkpoint-2")
        )


def test_saved_rollouts_are_verified_against_the_adapters_of_their_roles(trained, tmp_path):
    (name, numbers), *_ = verify(trained)
    assert name == "checkpoint-2"
    assert "agree" in numbers
    # the control: the adapters of two roles exchanged
    left, right = (trained / "checkpoint-2" / f"role-{role}" for role in ("left", "right"))
    model, tokenizer = load_folder(trained / "checkpoint-2", with_roles=True)
    weights = parameters_of(model)
    with torch.no_grad():
        for one, other in zip(weights["left"], weights["right"], strict=True):
            one.copy_(other * 3)
    from verifiers_trainer.run.proof import _saved_rollouts, compare_with

    _, turns = _saved_rollouts(trained)[2]
    with pytest.raises(ConfigError, match="in the role 'left'"):
        compare_with(model, tokenizer, turns, 2, what="a rollout")
    assert left.is_dir()
    assert right.is_dir()


def test_a_training_begins_with_the_adapters_of_another(trained, tmp_path):
    trainer = trainer_of(tmp_path, model=str(trained / "checkpoint-4"), beta=0.1, max_steps=1)
    saved, _ = load_folder(trained / "checkpoint-4", with_roles=True)
    assert roles_of(trainer.model) == ("left", "right")
    for role in ("left", "right"):
        assert are_equal(of_role(trainer.model, role), of_role(saved, role))
    run(trainer)
    assert not are_equal(of_role(trainer.model, "left"), of_role(saved, "left"))
    with pytest.raises(ConfigError, match="set lora_per_role=True to train them further"):
        small_trainer(tmp_path / "plain", pair(), str(trained / "checkpoint-4"), use_lora=True)
    with pytest.raises(ConfigError, match="is one adapter, and lora_per_role trains one for each"):
        trainer_of(tmp_path / "one", model=str(trained / "checkpoint-4/role-left"))
    with pytest.raises(ConfigError, match="has the adapters of left, right, and the environment"):
        trainer_of(tmp_path / "less", against_a_script(), model=str(trained / "checkpoint-4"))


def test_the_record_says_which_role(trained):
    rows = [line for line in metrics_of(trained) if "loss" in line]
    for row in rows:
        assert row["loss"] == pytest.approx(row["loss/left"] + row["loss/right"], abs=1e-6)
        squares = row["grad_norm/left"] ** 2 + row["grad_norm/right"] ** 2
        assert row["grad_norm"] == pytest.approx(math.sqrt(squares))
        assert {"entropy/left", "canary/disagreement/right"} <= row.keys()
    checksums = [(row["canary/checksum/left"], row["canary/checksum/right"]) for row in rows]
    assert len(set(checksums)) == len(checksums)
    evaluated = [line for line in metrics_of(trained) if "eval_left" in line]
    assert len(evaluated) == 2


# --- after the training ---------------------------------------------------------------------------


def test_a_folder_of_adapters_plays_each_role_with_its_own(trained):
    client = folder_client(str(trained))
    assert client.folder.name == "checkpoint-4"
    try:
        output = pair().evaluate(
            client, client.model, num_examples=4, sampling_args={"max_tokens": 12}, seed=3
        )
        assert not any(output["errors"])
        # each role alone, by its own folder: the adapter of the other is another model
        alone = {}
        for role in ("left", "right"):
            of_role = folder_client(str(client.folder / f"role-{role}"))
            alone[role] = pair().evaluate(
                of_role, of_role.model, num_examples=4, sampling_args={"max_tokens": 12}, seed=3
            )
            of_role.stop()
        for number, completion in enumerate(output["completions"]):
            for message in completion:
                of_role = alone[message["name"]]["completions"][number]
                assert message in of_role
        with pytest.raises(ConfigError, match="and no role asks"):
            toy_env().evaluate(client, client.model, num_examples=1)
    finally:
        client.stop()
    hashes = client.identity()["files"]
    assert {f"role-{role}/adapter_model.safetensors" for role in ("left", "right")} <= hashes.keys()


def test_the_adapters_are_exported_and_not_merged_into_one_model(trained, tmp_path):
    assert export(str(trained), tmp_path / "exported").name == "checkpoint-4"
    exported = load_folder(tmp_path / "exported", with_roles=True)[0]
    saved = load_folder(trained / "checkpoint-4", with_roles=True)[0]
    for role in ("left", "right"):
        assert are_equal(of_role(exported, role), of_role(saved, role))
    with pytest.raises(ConfigError, match="one merged model cannot be all of the roles"):
        export(str(trained), tmp_path / "merged", merged=True)
    one = export(str(trained / "checkpoint-4/role-left"), tmp_path / "one", merged=True)
    assert one.name == "role-left"
    assert (tmp_path / "one/model.safetensors").is_file()


def test_where_one_model_is_needed_the_adapters_of_roles_are_refused(trained):
    folder = trained / "checkpoint-4"
    for load in (load_folder, lambda folder: get_model(str(folder))):
        with pytest.raises(ConfigError, match=r"one model is needed here: .* role-left|role-left$"):
            load(folder)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_lora": False}, "use_lora=False trains all weights"),
        ({"lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save trains modules"),
        ({"disable_dropout": False}, "dropout makes them differ"),
        ({"inference": "http://127.0.0.1:1/v1"}, "serves one policy"),
        ({"embedded_mode": "static"}, "embedded_mode='static' computes one policy"),
        ({"torch_compile": True}, "torch_compile compiles one policy"),
        ({"teacher": "builtin:tiny", "beta": 0.1}, "teacher teaches one policy"),
        ({"saved_runs": "runs"}, "saved_runs are rollouts of one policy"),
    ],
)
def test_what_adapters_of_roles_exclude_is_refused_at_the_start(tmp_path, settings, reason):
    with pytest.raises(ConfigError, match=f"lora_per_role=True trains an adapter .*{reason}"):
        trainer_of(tmp_path, **settings)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (toy_env, "SingleTurnEnv has no roles"),
        (lambda: pair(trained_roles=["left"]), "'right' of Pair has neither an adapter nor"),
        (lambda: vf.EnvGroup([pair(), toy_env()]), "SingleTurnEnv has no roles"),
    ],
)
def test_an_environment_whose_roles_nobody_would_play_is_refused(tmp_path, env, reason):
    with pytest.raises(ConfigError, match=reason):
        trainer_of(tmp_path, env())


def test_a_role_whose_name_is_no_folder_is_refused(tmp_path):
    env = vf.MultiAgentEnv(
        ["a/b", "c"],
        dataset=[{"question": "q"}],
        rubric=vf.Rubric([lambda completion: 1.0]),
        max_turns=2,
    )
    with pytest.raises(ConfigError, match="'a/b' has other characters"):
        trainer_of(tmp_path, env)


def test_an_evaluation_that_asks_nobody_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="asks the model, which no adapter plays"):
        trainer_of(tmp_path, eval_env=toy_env())


def test_roles_whose_turns_are_one_conversation_are_refused(tmp_path):
    with trainer_of(tmp_path) as trainer:
        rows = [example.row for example in trainer.examples]
        (group,) = trainer.sample(rows[:1])

        def one_view(rollout):
            first, second = rollout.turns
            prompt = [*first.prompt_ids, *first.completion_ids, 5]
            again = Turn(prompt, second.completion_ids, second.sampler_logprobs, 0, role="left")
            again.extras["role"] = "right"
            return replace(rollout, transcript=Transcript([first, again]))

        with pytest.raises(ConfigError, match="turns of left and right continue each other"):
            trainer.batch_of([changed(group, one_view)])


# --- roles of one reward each ---------------------------------------------------------------------


def test_a_solver_with_several_attempts_has_one_adapter(tmp_path):
    env = letter_tasks()
    trainer = trainer_of(tmp_path, env, max_steps=2, max_tokens=3)
    run(trainer)
    assert roles_of(trainer.model) == ("proposer", "solver")
    rows = [line for line in metrics_of(tmp_path) if "loss" in line]
    assert any("loss/proposer" in row for row in rows)


@pytest.mark.parametrize("names", [("model", "layers"), ("q_proj", "lora_A")])
def test_a_role_may_have_the_name_of_a_module(tmp_path, names):
    env = vf.MultiAgentEnv(
        names,
        dataset=[{"question": "q"}] * 4,
        rubric=vf.Rubric([lambda completion: float(len(completion[-1].content))]),
        max_turns=2,
    )
    run(trainer_of(tmp_path, env, save_strategy="steps", save_steps=2))
    model, _ = load_folder(tmp_path / "checkpoint-2", with_roles=True)
    fresh = trainer_of(tmp_path / "again", env, model=small_policy())
    for role in names:
        assert not are_equal(of_role(model, role), of_role(fresh.model, role))
