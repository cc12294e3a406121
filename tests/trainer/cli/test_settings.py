"""Settings of ``vf-train``: documented files as they are, every mistake at once, and the way back
to TOML."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

import verifiers as vf
from support.guide_files import HOSTED, VF_RL
from verifiers.cli.common.reader import key_lines, parse_value
from verifiers.errors import ConfigError
from verifiers.runtime.values import describe, fits
from verifiers_trainer.algorithm.losses import OBJECTIVES
from verifiers_trainer.cli.plan import _load
from verifiers_trainer.cli.settings import TrainSettings, read_settings, to_toml
from verifiers_trainer.cli.sources import read_arguments, read_toml
from verifiers_trainer.grpo import GRPOConfig
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.fields import field_names

CONFIGS = sorted((Path(__file__).parents[3] / "configs" / "vf-train").glob("*.toml"))


@pytest.fixture
def read(tmp_path):
    """(settings, problems) of a file's text and the words behind it."""

    def reader(text: str, *words: str, num_gpus: int = 0) -> tuple[TrainSettings, list[str]]:
        path = tmp_path / "run.toml"
        path.write_text(text)
        files, overrides, problems = read_arguments(["@", str(path), *words])
        settings, found_problems = read_settings([*read_toml(files[0]), *overrides], num_gpus)
        return settings, [
            problem.replace(str(path), "run.toml") for problem in problems + found_problems
        ]

    return reader


def test_a_warm_up_of_0_in_a_file_leaves_the_other_spelling_to_decide(read):
    text = "model = 'm'\n[env]\nid = 'e'\n[trainer.args]\nwarmup_ratio = 0.1\nwarmup_steps = 0\n"
    settings, problems = read(text)
    assert (settings.config["warmup_steps"], problems) == (0.1, [])
    # a flag means what it says
    assert read(text, "--trainer.args.warmup_steps", "0")[0].config["warmup_steps"] == 0


# --- the documented formats -----------------------------------------------------------------------


def test_the_documented_vf_rl_file_parses_as_it_is(read):
    settings, problems = read(VF_RL)
    assert problems == []
    assert (settings.model, settings.env_id) == (
        "Qwen/Qwen3-4B-Instruct-2507",
        "primeintellect/wiki-search",
    )
    assert settings.env_args == {"max_turns": 10}
    assert settings.config == {
        "run_name": "wiki-search",
        "micro_batch_size": 4,
        "rollouts_per_example": 16,
        "batch_size": 1024,
        "max_steps": 500,
        "max_tokens": 512,
        "max_seq_len": 4096,
    }
    assert [key for key, _ in settings.ignored] == [
        "inference.gpus",
        "inference.args.enable_auto_tool_choice",
        "inference.args.tool_call_parser",
        "trainer.gpus",
    ]


def test_the_documented_hosted_file_parses_as_it_is_and_means_the_same(read):
    settings, problems = read(HOSTED)
    assert problems == []
    assert (settings.model, settings.env_id) == (
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "primeintellect/alphabet-sort",
    )
    assert settings.env_args == {"min_turns": 3, "max_turns": 5, "power_per_turn": False}
    assert settings.config == {
        "max_steps": 500,
        "batch_size": 256,
        "rollouts_per_example": 8,
        "max_tokens": 512,
        "run_name": "qwen3-30b-i-alphabet-sort",
        "project": "alphabet-sort",
        "report_to": "wandb",
        "micro_batch_size": 8,
    }
    assert "trainer.args.micro_batch_size" in dict(settings.derived)


def test_the_micro_batch_of_a_hosted_file_divides_its_batch(read):
    settings, _ = read("max_steps = 5\nbatch_size = 36")
    assert settings.config["micro_batch_size"] == 6


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_file_is_usable(path):
    settings, problems = read_settings(read_toml(str(path)), num_gpus=1)
    assert problems == []
    RLConfig(**settings.config).resolve()


def test_the_shipped_files_are_there():
    names = {path.name for path in CONFIGS}
    assert names >= {"tiny-cpu.toml", "smollm2-reverse-text.toml", "alphabet-sort.toml"}
    assert names >= {"smollm2-sums.toml", "smollm2-stories.toml", "smollm2-json.toml"}


def test_every_documented_training_setting_is_known(read):
    documented = (
        "learning_rate = 1e-5\nlr_scheduler_type = 'constant'\nwarmup_steps = 10\nmax_steps ="
        " 5\nmax_grad_norm = 1\nbf16 = true\ngradient_checkpointing = true\nuse_liger ="
        " false\nuse_lora = true\nlora_rank = 8\nlora_alpha = 16\ntemperature = 1\ntop_p ="
        " 0.9\ntop_k = 5\nmin_p = 0.1\nrepetition_penalty = 1.1"
    )
    _, problems = read(f"model = 'm'\nenv.id = 'e'\n[trainer.args]\n{documented}")
    assert problems == []


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong", "line", "suggestion"),
    [
        ('model = "Qwen', 'modle = "Qwen', 1, "model"),
        ('id = "primeintellect/wiki-search"', 'idd = "x"', 4, "id"),
        ("[inference]\ngpus", "[inference]\ngpu", 10, "gpus"),
        ("tool_call_parser", "tool_call_parse", 14, "tool_call_parser"),
        ("[trainer]\ngpus", "[trainer]\ngpuss", 17, "gpus"),
        ("max_steps", "max_step", 24, "max_steps"),
        ("[trainer.args]", "[trainer.arg]", 19, "args"),
        ("[inference.args]", "[inferense.args]", 12, "inference"),
    ],
)
def test_a_misspelt_key_is_refused_with_its_line_and_the_right_one(
    read, right, wrong, line, suggestion
):
    assert right in VF_RL
    _, problems = read(VF_RL.replace(right, wrong))
    assert f"run.toml:{line}: " in problems[0]
    assert f'did you mean "{suggestion}"?' in problems[0]


@pytest.mark.parametrize(
    ("right", "wrong", "suggestion"),
    [
        ("max_steps", "max_stps", "max_steps"),
        ("max_tokens", "max_token", "max_tokens"),
        ("[sampling]", "[samplin]", "sampling"),
        ("project", "projct", "project"),
    ],
)
def test_a_misspelt_key_of_the_hosted_format_is_refused(read, right, wrong, suggestion):
    _, problems = read(HOSTED.replace(right, wrong))
    assert any(f"{suggestion}" in problem and "did you mean" in problem for problem in problems)


ONE_LAYOUT = "model = 'm'\n{}\n[env]\nid = 'e'\n{}"


@pytest.mark.parametrize(
    ("key", "table", "says"),
    [
        ("learning_rate = 1e-4", "[trainer.args]\nmax_steps = 3",
         'is a key of the layout with top-level keys; beside [trainer] or [inference] it is'
         ' "trainer.args.learning_rate": a file has one layout'),
        ("", "[sampling]\nmax_tokens = 64\n[trainer.args]\nmax_steps = 3",
         'it is "trainer.args.max_tokens": a file has one layout'),
        ("max_steps = 3\nweight_decay = 0.1", "",
         "weight_decay is not among the top-level keys of a file: write all settings of this file"
         " into [trainer.args], or give this one as --trainer.args.weight_decay"),
    ],
)  # fmt: skip
def test_a_file_in_both_layouts_is_told_which_layout_has_the_key(read, key, table, says):
    _, (problem,) = read(ONE_LAYOUT.format(key, table))
    assert says in problem
    # the negative controls: each layout alone, and the flag
    for text in (ONE_LAYOUT.format("learning_rate = 1e-4", ""),
                 ONE_LAYOUT.format("", "[trainer.args]\nlearning_rate = 1e-4")):  # fmt: skip
        settings, problems = read(text, "--trainer.args.weight_decay", "0.1")
        assert (settings.config["weight_decay"], problems) == (0.1, [])


def test_all_mistakes_are_reported_together(read):
    text = VF_RL.replace("max_steps", "max_stepz").replace("gpus = 1", 'gpus = "two"')
    _, problems = read(text, "--trainer.args.temperatur", "0.5", "--modle", "x")
    assert len(problems) == 5
    assert sum("gpus" in problem for problem in problems) == 2
    assert any(
        problem.startswith("--trainer.args.temperatur:") and '"temperature"' in problem
        for problem in problems
    )
    assert any(problem.startswith("--modle:") and '"model"' in problem for problem in problems)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('max_steps = "ten"', "a whole number"),
        ("max_steps = 2.5", "a whole number"),
        ("use_lora = 1", "true or false"),
        ("learning_rate = true", "a number"),
        ("lora_target_modules = [1]", "a list or a text"),
        ("sampling_args = 3", "a table"),
        ("run_name = 2024", "a text"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_what_is_expected(read, line, expected):
    _, problems = read(f'model = "m"\nenv.id = "e"\n[trainer.args]\n{line}')
    value = line.split(" = ")[1].strip('"')
    assert len(problems) == 1
    assert problems[0].startswith("run.toml:4: ")
    assert expected in problems[0]
    assert value.lower() in problems[0].lower()


@pytest.mark.parametrize("name", ["max_steps", "lr"])
def test_a_training_setting_outside_its_section_is_told_where_it_belongs(read, name):
    _, problems = read(VF_RL.replace("[trainer]\n", f"[trainer]\n{name} = 3\n"))
    assert f"trainer.args.{name}" in problems[0]
    _, problems = read(f"{name} = 3\n" + VF_RL)
    assert f"trainer.args.{name}" in problems[0]


@pytest.mark.parametrize(
    "section", ["env = 'reverse-text'", "trainer = 3", "inference = 1", "eval = 2", "env.args = 1"]
)
def test_a_section_that_is_no_table_is_refused(read, section):
    _, problems = read(section)
    assert any("must be a table" in problem for problem in problems)


def test_a_plain_setting_has_no_parts(read):
    _, problems = read(VF_RL, "--trainer.args.max_steps.x", "3")
    assert problems == [
        "--trainer.args.max_steps.x: max_steps is not a table; it must be a whole number from 1 to"
        " 1000000000000, or -1 for passes alone"
    ]


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        ("--model.x", "1", "model is not a table; it must be a text that is not empty"),
        ("--env.id.x", "1", "env.id is not a table; it must be a text that is not empty"),
        ("--trainer.algorithm.x", "1", "trainer.algorithm is not a table; it must be one of rl, grpo"),
        ("--sampling.temperature.x", "1", "temperature is not a table; it must be a number"),
        ("--checkpoints.intervl", "1", "unknown key 'intervl' in [checkpoints], did you mean \"interval\"?"),
        ("--model=", "", "model must be a text that is not empty, not ''"),
    ],
)  # fmt: skip
def test_a_key_of_any_table_is_checked_by_its_annotation(read, word, value, says):
    _, (problem,) = read(VF_RL, *filter(None, (word, value)))
    assert says in problem


def test_a_flag_of_the_hosted_layout_without_effect_says_why_in_any_run(read):
    settings, problems = read(VF_RL, "--checkpoints.keep_cloud", "3", "--model", "2024")
    assert (problems, settings.model) == ([], "2024")
    assert "save_total_limit" in dict(settings.ignored)["checkpoints.keep_cloud"]
    # in a file it is a key of the other layout
    assert read(VF_RL + "\n[checkpoints]\nkeep_cloud = 3")[1] != []


def test_a_flag_sets_an_entry_of_a_setting_of_the_server(read):
    settings, problems = read(VF_RL, "--inference.args.hf_overrides.rope_theta", "5")
    assert problems == []
    assert settings.server_args["hf_overrides"] == {"rope_theta": 5}


def test_several_environments_are_a_mixture_and_foreign_sections_are_refused_by_name(read):
    settings, problems = read('model = "m"\n[[env]]\nid = "a"\n[[env]]\nid = "b"')
    assert problems == []
    assert [table.id for table in settings.mixture] == ["a", "b"]
    _, problems = read('model = "m"\nenv.id = "e"\n[orchestrator]\nseq_len = 5')
    assert "prime-rl" in problems[0]


def test_each_environment_has_its_branching_and_the_printed_file_has_it(read):
    forks = {"at": 1, "branches": 2}
    text = 'model = "m"\n[env]\nid = "reverse-text"\nbranching = { at = 1, branches = 2 }'
    settings, problems = read(text)
    assert problems == []
    assert [table.branching for table in settings.environments] == [forks]
    assert _load(settings).branching == vf.Branching(at=1, branches=2)
    assert [table.to_dict()["branching"] for table in settings.environments] == [forks]
    several = (
        'model = "m"\n[[env]]\nid = "a"\nbranching = { at = 1, branches = 2 }\n[[env]]\nid = "b"'
    )
    settings, problems = read(several)
    assert problems == []
    assert [table.branching for table in settings.environments] == [forks, None]
    settings, _ = read(text.replace("branches", "branch"))
    with pytest.raises(vf.ConfigError, match="must have at and branches"):
        _load(settings)
    assert "branching" in read('model = "m"\nenv = { id = "e", branching = 3 }')[1][0]


def test_what_is_missing_is_said(read):
    _, problems = read("[trainer.args]\nmax_steps = 3")
    assert [problem.split(" ")[0] for problem in problems] == ["model", "env.id"]


def test_gpus_count_only_where_there_are_some(read):
    assert "trainer.gpus" in dict(read(VF_RL)[0].ignored)
    assert "trainer.gpus" not in dict(read(VF_RL, num_gpus=2)[0].ignored)
    settings, problems = read(VF_RL, "--trainer.gpus", "2", num_gpus=2)
    assert problems == []
    assert settings.gpus == {"inference": 1, "trainer": 2}


def test_a_file_that_is_absent_or_no_toml_is_refused(tmp_path):
    (tmp_path / "good.toml").write_text("")
    with pytest.raises(
        ConfigError,
        match=r"god\.toml cannot be read: No such file or directory; .*holds good\.toml",
    ):
        read_toml(str(tmp_path / "god.toml"))
    (tmp_path / "bad.toml").write_text("a = 1\nmodel = = 2\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_toml(str(tmp_path / "bad.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(str(tmp_path / "binary.toml"))


# --- overrides ------------------------------------------------------------------------------------


def test_overrides_win_in_the_order_given(read):
    words = [
        "--trainer.args.max_steps",
        "10",
        "--env.args.max_turns=5",
        "--model",
        "x",
        "--trainer.args.max-steps=11",
    ]
    settings, problems = read(VF_RL, *words)
    assert problems == []
    assert (settings.model, settings.config["max_steps"], settings.env_args) == (
        "x",
        11,
        {"max_turns": 5},
    )


def test_values_of_overrides_are_toml_or_else_text(read):
    words = [
        "--env.args.names=['a', 'b']",
        "--env.args.deep.level",
        "2",
        "--env.args.name",
        "builtin:tiny",
        "--env.args.on",
        "--no-env.args.off",
        "--trainer.args.run_name=2024",
        "--trainer.args.sampling_args.seed=3",
    ]
    settings, problems = read(VF_RL, *words)
    assert problems == []
    assert settings.env_args == {
        "max_turns": 10,
        "names": ["a", "b"],
        "deep": {"level": 2},
        "name": "builtin:tiny",
        "on": True,
        "off": False,
    }
    assert settings.config["run_name"] == "2024"
    assert settings.config["sampling_args"] == {"seed": 3}


def test_a_whole_section_can_be_an_override(read):
    settings, problems = read(
        VF_RL, "--env.args", "{max_turns = 2}", "--trainer.args={max_steps = 1}"
    )
    assert problems == []
    assert (settings.env_args["max_turns"], settings.config["max_steps"]) == (2, 1)


def test_top_level_hosted_keys_work_as_overrides_of_any_file(read):
    settings, problems = read(VF_RL, "--max_steps", "3", "--sampling.temperature", "0.5")
    assert problems == []
    assert (settings.config["max_steps"], settings.config["temperature"]) == (3, 0.5)


def test_wandb_is_switched_on_and_off(read):
    settings, problems = read(VF_RL, "--wandb.project", "p", "--wandb.name", "n")
    assert problems == []
    assert (settings.config["report_to"], settings.config["project"]) == ("wandb", "p")
    assert settings.config["run_name"] == "wiki-search"
    assert read(HOSTED, "--no-wandb")[0].config["report_to"] == "none"
    assert "must be a table" in read("wandb = 3")[1][0]


def test_words_that_are_no_options_are_refused():
    files, _, problems = read_arguments(["run.toml", "train", "@"])
    assert files == ["run.toml"]
    assert problems == [
        "'train' is neither a TOML file nor an option",
        "@ must be followed by the name of a TOML file",
    ]


def test_a_file_may_follow_the_sign_with_or_without_a_space():
    assert read_arguments(["@", "a.toml", "@b.toml"])[0] == ["a.toml", "b.toml"]


def test_a_setting_of_trl_in_a_file_says_what_to_use(read):
    assert read(VF_RL.replace("[trainer.args]", "[trainer.args]\nuse_vllm = false"))[1] == []
    _, problems = read(VF_RL.replace("[trainer.args]", "[trainer.args]\nuse_vllm = true"))
    assert problems[0].startswith("run.toml:20: ")
    assert '[trainer.args] has another way for use_vllm: inference="vllm"' in problems[0]


def test_an_eval_section_switches_evaluation_on(read):
    settings, problems = read(VF_RL + "\n[eval]\nnum_examples = 16\nsteps = 5")
    assert problems == []
    assert settings.config["eval_num_examples"] == 16
    assert (settings.config["eval_steps"], settings.config["eval_strategy"]) == (5, "steps")
    assert "eval_strategy" not in read(VF_RL)[0].config
    _, problems = read(VF_RL + "\n[eval]\nnum_example = 16")
    assert 'did you mean "num_examples"' in problems[0]


# --- back to TOML ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [VF_RL, HOSTED, VF_RL + "\n[eval]\nsteps = 5"])
def test_dumped_settings_read_back_as_the_same_run(read, text):
    settings, _ = read(
        text,
        "--env.args.text",
        'quote " and \\ and \u00e9',
        "--trainer.args.sampling_args={stop = ['x']}",
    )
    config = RLConfig(**settings.config)
    dumped = to_toml(settings, config)
    again, problems = read(dumped)
    assert problems == []
    assert (again.model, again.env_id, again.env_args) == (
        settings.model,
        settings.env_id,
        settings.env_args,
    )
    same = RLConfig(**again.config)
    for name in field_names():
        if name not in ("logging_dir", "accelerator_config"):
            assert getattr(same, name) == getattr(config, name), name
    assert to_toml(again, same) == dumped


def test_a_dump_keeps_where_the_run_samples_and_trains(read):
    words = ("--inference.gpus=3", "--trainer.gpus=2", "--inference.args.enforce_eager=true")
    settings, problems = read(VF_RL, *words, "--inference.args.tensor_parallel_size=2")
    assert problems == []
    again, problems = read(to_toml(settings, RLConfig(**settings.config)))
    assert problems == []
    assert (dict(again.gpus), dict(again.server_args)) == (
        dict(settings.gpus),
        dict(settings.server_args),
    )
    assert dict(again.gpus) == {"inference": 3, "trainer": 2}
    assert again.server_args["enforce_eager"] is True


@pytest.mark.parametrize("kind", [RLConfig, GRPOConfig])
@pytest.mark.parametrize(
    "bounds", ["", "epsilon = 0.01", "epsilon_high = 3.0", "mask_ratio_high = 4.0"]
)
@pytest.mark.parametrize("loss", OBJECTIVES)
def test_dumped_settings_train_the_same_objective(read, kind, bounds, loss):
    """Bounds of the loss's source stay its own, and bounds that it does not read are
    not written."""
    if bounds and bounds.split()[0] not in OBJECTIVES[loss].reads:
        return
    text = (
        "model = 'm'\nenv.id = 'e'\n[trainer]\nalgorithm ="
        f" '{'rl' if kind is RLConfig else 'grpo'}'"
    )
    teacher = "\nteacher = 't'" if OBJECTIVES[loss].component == "ref_kl" else ""
    settings, _ = read(
        f"{text}\n[trainer.args]\nrun_name = 'x'\nbatch_size = 16\nloss ="
        f" '{loss}'\n{bounds}{teacher}"
    )
    config = kind(**settings.config)
    again, problems = read(to_toml(settings, config))
    assert problems == []
    same = RLConfig(**again.config)
    for config_made in (config, same):
        config_made.resolve()
    assert same.objective() == config.objective()
    assert same.resume_values() == config.resume_values()


def test_a_dump_without_a_run_name_names_the_folder_and_keeps_secrets_to_itself(read):
    settings, _ = read("model = 'm'\nenv.id = 'e'\n[trainer.args]\nhub_token = 'hf_secret'")
    config = RLConfig(**settings.config)
    dumped = tomllib.loads(to_toml(settings, config))
    assert dumped["trainer"]["args"]["output_dir"] == config.output_dir
    assert "hf_secret" not in to_toml(settings, config)


# --- the pieces -----------------------------------------------------------------------------------


def test_lines_of_keys_are_found_whatever_stands_around_them():
    text = 'text = """\nmodel = 1\n"""\nmodel = 2\n[a . "b"]  # note\nc.d = 1\n[[e]]\nf = 1'
    lines = key_lines(text)
    assert lines[("model",)] == 4
    assert lines[("a", "b", "c", "d")] == 6
    assert lines[("e", "f")] == 8


def test_values_fit_their_annotations():
    assert fits(1, float)
    assert fits(None, int | None)
    assert not fits(True, int)
    assert not fits("1", int)
    assert fits({"a": 1}, dict[str, int])
    assert describe(dict | str | None) == "a table or a text"
    assert parse_value("a\nb = 2") == "a\nb = 2"


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainSettings("m", "e", {}, {}).model = "n"  # type: ignore[misc]
