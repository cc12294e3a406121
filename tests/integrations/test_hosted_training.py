"""The files of hosted training through ``vf-train``: every key its client knows means something, or
says why not."""

import tomllib

import pytest

from verifiers_trainer.cli.settings import read_settings
from verifiers_trainer.cli.sources import read_words

EVERY_KEY = """
name = "my-run"
model = "Qwen/Qwen3-4B-Instruct-2507"
max_steps = 100
batch_size = 128
rollouts_per_example = 8
learning_rate = 1e-4
lora_alpha = 16
oversampling_factor = 1.5
max_async_level = 4
trajectory_strategy = "interleaved"
env_files = ["secrets.env"]

[sampling]
max_tokens = 2048
temperature = 0.7

[[env]]
id = "primeintellect/reverse-text"
name = "rt"
args = { unit = "word" }

[eval]
interval = 25
num_examples = 30
rollouts_per_example = 4
eval_base_model = true

[[eval.env]]
id = "primeintellect/reverse-text"

[val]
num_examples = 64
interval = 5

[checkpoints]
interval = 50
keep_cloud = 5

[wandb]
entity = "my-team"
project = "p"
"""


@pytest.fixture
def settings_of(tmp_path):
    def read(text):
        path = tmp_path / "lab.toml"
        path.write_text(text)
        assignments, problems = read_words(["@", str(path)])
        settings, more = read_settings(assignments)
        return settings, [*problems, *more]

    return read


def test_every_key_is_a_setting_or_is_named_with_the_reason(settings_of):
    settings, problems = settings_of(EVERY_KEY)
    assert problems == []
    assert (settings.model, settings.env_id) == (
        "Qwen/Qwen3-4B-Instruct-2507",
        "primeintellect/reverse-text",
    )
    assert settings.env_args == {"unit": "word"}
    expected = {
        "run_name": "my-run", "max_steps": 100, "batch_size": 128, "rollouts_per_example": 8, "learning_rate": 1e-4,
        "lora_alpha": 16, "oversample": 1.5, "max_off_policy_steps": 4, "max_tokens": 2048, "temperature": 0.7,
        "eval_steps": 25, "eval_num_examples": 30, "eval_rollouts_per_example": 4, "eval_on_start": True,
        "eval_strategy": "steps", "save_steps": 50, "project": "p", "report_to": "wandb", "micro_batch_size": 8,
    }  # fmt: skip
    assert dict(settings.config) == expected
    ignored = dict(settings.ignored)
    names = "trajectory_strategy env_files env.name eval.env val checkpoints.keep_cloud wandb.entity".split()
    assert sorted(ignored) == sorted(names)
    assert ignored["wandb.entity"] == "set WANDB_ENTITY"


@pytest.mark.parametrize("key", ["checkpoint_id", "buffer"])
def test_what_would_change_the_run_is_refused(settings_of, key):
    line = 'checkpoint_id = "x"\n' if key == "checkpoint_id" else "[buffer]\neasy_threshold = 0.8\n"
    text = line + EVERY_KEY if key == "checkpoint_id" else EVERY_KEY + line
    assert tomllib.loads(text)
    _, problems = settings_of(text)
    assert [key in problem for problem in problems] == [True]


def test_outside_the_hosted_format_its_own_keys_are_no_settings(settings_of):
    _, problems = settings_of(
        'model = "m"\nval = 1\n[env]\nid = "x"\n[trainer.args]\nmax_steps = 1\n[wandb]\nentity ='
        ' "e"\n'
    )
    assert len(problems) == 2
