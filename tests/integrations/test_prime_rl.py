"""prime-rl: its files of both ages, and the calls it makes on an environment, with a real engine
behind them."""

import asyncio
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import openai
import pytest

import verifiers as vf
from support.embedded import serving
from verifiers.types import RolloutInput
from verifiers_integrations.prime_rl import emit, is_prime_rl, read
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

ROOT = Path(__file__).parents[2]

ORCHESTRATOR = """
[environment]
id = "vf-math-python"  # or your custom environment ID

[environment.args]
# Example args forwarded to the Environment
split = "train"
rollouts_per_example = 8
max_concurrent = 512
"""
ONE_FILE = """
inference_gpu_ids = [0, 1, 2, 3, 4, 5]
trainer_gpu_ids = [6, 7]
max_steps = 500
seq_len = 4096

[model]
name = "Qwen/Qwen3-4B-Instruct-2507"

[wandb]
project = "wiki-search"
name = "first"

[ckpt]
interval = 50

[orchestrator]
batch_size = 512
rollouts_per_example = 16

[orchestrator.sampling]
max_tokens = 512
temperature = 1.0

[[orchestrator.env]]
id = "primeintellect/wiki-search"
name = "wiki"
args = { max_turns = 10 }

[trainer.optim]
lr = 1e-6

[inference.parallel]
dp = 6
"""
THREE = {
    "orch.toml": (
        """
max_steps = 20
batch_size = 128
micro_batch_size = 16
seq_len = 2048
rollouts_per_example = 16
mask_truncated_completions = true
[model]
name = "m"
[environment]
id = "reverse-text"
[sampling]
max_tokens = 128
"""
    ),
    "train.toml": '[model]\nname = "m"\n[optim]\nlr = 3e-6\n',
    "infer.toml": '[model]\nname = "m"\n[parallel]\ntp = 2\n',
}
SETUP = """
inference_gpu_ids = [0]
trainer_gpu_ids = [1]
max_steps = 500

[model]
name = "Qwen/Qwen3-4B-Instruct-2507"

[trainer.optim]
lr = 1e-5
weight_decay = 0.0

[trainer.model.experimental.lora]
rank = 8
alpha = 32
dropout = 0.0
target_modules = ["q_proj", "k_proj", "v_proj"]

[orchestrator]
batch_size = 512
rollouts_per_example = 16
seq_len = 4096
mask_truncated_completions = false
zero_truncated_completions = true
oversampling_factor = 2.0

[orchestrator.sampling]
max_tokens = 512

[[orchestrator.env]]
id = "primeintellect/wiki-search"

[inference.model]
enable_auto_tool_choice = true
tool_call_parser = "hermes"
"""
"""The keys of the file that ``prime lab setup --prime-rl`` left in a workspace."""
TRAINER_2025 = """
max_steps = 20
[model]
name = "m"
impl = "liger_kernel"
[model.ac]
freq = 1
[model.experimental.lora]
rank = 32
alpha = 64
modules_to_save = ["lm_head"]
[optim]
lr = 1e-5
"""
PARTS = {
    "trainer": "[optim]\nlr = 3e-6\n",
    "orchestrator": ORCHESTRATOR + '[model]\nname = "m"\n',
} | {"inference": "[parallel]\ntp = 2\n"}
OURS = sorted(ROOT.glob("packages/core/src/verifiers/templates/configs/vf-rl/*.toml"))
TEMPLATES = sorted(ROOT.glob("packages/core/src/verifiers/templates/configs/prime-rl/*.toml"))


def file(folder, text, name="x.toml"):
    path = folder / name
    path.write_text(text)
    return path


# --- files


def test_the_orchestrator_block_of_2025_is_read(tmp_path):
    assert read(file(tmp_path, ORCHESTRATOR)) == {
        "env": {"id": "vf-math-python", "args": {"split": "train"}},
        "trainer": {
            "args": {"rollouts_per_example": 8, "max_concurrent": 512}
        },  # of the run, not of the environment
    }


def test_where_the_run_has_its_own_the_environment_keeps_what_is_written_for_it(tmp_path):
    read_back = read(file(tmp_path, "rollouts_per_example = 16\n" + ORCHESTRATOR))
    assert read_back["trainer"]["args"] == {"rollouts_per_example": 16, "max_concurrent": 512}
    assert read_back["env"]["args"] == {"split": "train", "rollouts_per_example": 8}


def test_one_file_is_read(tmp_path):
    run = read(file(tmp_path, ONE_FILE))
    assert run["model"] == "Qwen/Qwen3-4B-Instruct-2507"
    assert run["env"] == {
        "id": "primeintellect/wiki-search",
        "args": {"max_turns": 10},
        "name": "wiki",
    }
    assert run["trainer"] == {
        "gpus": 2,
        "args": {
            "max_steps": 500,
            "max_seq_len": 4096,
            "save_steps": 50,
            "batch_size": 512,
            "rollouts_per_example": 16,
            "max_tokens": 512,
            "temperature": 1.0,
            "learning_rate": 1e-6,
            "use_lora": False,
        },
    }
    assert run["inference"] == {"gpus": 6, "args": {"data_parallel_size": 6}}
    assert run["wandb"] == {"project": "wiki-search", "name": "first"}


def test_the_file_of_a_workspace_is_read(tmp_path):
    run = read(file(tmp_path, SETUP))
    assert run["inference"]["args"] == {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    assert run["trainer"]["args"] == {
        "max_steps": 500, "batch_size": 512, "rollouts_per_example": 16, "max_seq_len": 4096, "max_tokens": 512,
        "mask_truncated_completions": False, "zero_truncated_completions": True, "oversample": 2.0,
        "learning_rate": 1e-5, "weight_decay": 0.0, "use_lora": True, "lora_rank": 8, "lora_alpha": 32,
        "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "k_proj", "v_proj"],
    }  # fmt: skip


def test_a_trainers_file_of_2025_is_read(tmp_path):
    run = read(file(tmp_path, THREE["orch.toml"]), file(tmp_path, TRAINER_2025, "train.toml"))
    args = run["trainer"]["args"]
    assert (args["use_liger"], args["gradient_checkpointing"], args["max_steps"]) == (
        True,
        True,
        20,
    )
    assert (args["use_lora"], args["lora_rank"], args["lora_alpha"]) == (True, 32, 64)
    assert args["lora_modules_to_save"] == ["lm_head"]
    again = read(*emit(run, "2025", tmp_path / "out").paths)
    assert again == run


def test_an_orchestrators_own_file_of_the_newer_age_is_read(tmp_path):
    text = """
        batch_size = 8
        [sampling]
        max_tokens = 4
        [[env]]
        id = "a"
        [[env]]
        id = "b"
        args = { n = 1 }
        [model]
        name = "m"
    """
    run = read(file(tmp_path, text))
    assert run["env"] == [{"id": "a", "args": {}}, {"id": "b", "args": {"n": 1}}]
    assert run["trainer"]["args"] == {"batch_size": 8, "max_tokens": 4}


def test_three_files_are_one_run(tmp_path):
    run = read(*(file(tmp_path, text, name) for name, text in THREE.items()))
    assert run["trainer"]["args"]["learning_rate"] == 3e-6
    assert run["inference"]["args"] == {"tensor_parallel_size": 2}
    assert run["model"] == "m"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "[weight_broadcast]\ntype = 'nccl'",
            "weight_broadcast: a key of prime-rl without a counterpart here",
        ),
        (
            "[environment]\nid = 'x'\nname = 'y'\nweight = 2",
            "environment.weight: a key of prime-rl",
        ),
        ("[orchestrator.buffer]\nsize = 1", "orchestrator.buffer"),
        ("[trainer.optim]\nlr = 1.0\nbetas1 = 0.9", "trainer.optim.betas1"),
        ("[trainer.model.lora]\nrank = 8\nbias = true", "trainer.model.lora.bias"),
        ("[trainer.model.ac]\nfreq = 2", "trainer.model.ac"),
        ("[model]\nimpl = 'custom'", "model.impl"),
        ("[orchestrator.train]\nnum_workers = 2", "orchestrator.train.num_workers"),
        ("[environment.args]\na = 1", "environment has no id"),
        (
            "max_steps = 3\n[orchestrator]\nmax_steps = 4",
            "orchestrator.max_steps is 4, but 3 earlier",
        ),
        ("max_steps = ", "is not valid TOML"),
        ("sampling = 3\n[environment]\nid = 'x'", "sampling must be a table"),
    ],
)
def test_what_has_no_counterpart_is_named(tmp_path, text, problem):
    with pytest.raises(vf.ConfigError, match=re.escape(problem)):
        read(file(tmp_path, text))


def test_every_problem_is_named_at_once(tmp_path):
    with pytest.raises(vf.ConfigError, match=r"slurm.*\n.*ckpt\.keep"):
        read(file(tmp_path, "slurm = true\n[ckpt]\nkeep = 1"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('model = "builtin:tiny"\nenv = "reverse-text"', "run.toml is a file of vf-train, not of"),
        ('env = "reverse-text"', "run.toml is a file of vf-train, not of prime-rl"),
        ('[project]\nname = "x"', "run.toml is perhaps no file of prime-rl: none of its keys"),
        ("train = 3", "run.toml is no file of prime-rl: a value has another shape"),
    ],
)
def test_a_file_of_another_program_says_so(tmp_path, text, said):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(vf.ConfigError, match=said):
        read(path)


def test_formats_are_told_apart():
    assert is_prime_rl(tomllib.loads(ONE_FILE))
    assert is_prime_rl(tomllib.loads(ORCHESTRATOR))
    assert all(is_prime_rl(tomllib.loads(text)) for text in THREE.values())
    ours = (ROOT / "configs/vf-train/tiny-cpu.toml").read_text()
    assert not is_prime_rl(tomllib.loads(ours))


@pytest.mark.parametrize("era", ["v0.4", "2025"])
@pytest.mark.parametrize(
    "text", [ORCHESTRATOR, ONE_FILE.replace('name = "wiki"\n', "")], ids=["2025", "v0.4"]
)
def test_what_is_emitted_reads_back_equal(tmp_path, text, era, capsys):
    run = read(file(tmp_path, text))
    emitted = emit(run, era, tmp_path / "out")
    again = read(*emitted.paths)
    if era == "2025":  # how many devices each part has stands in the command there
        for role in ("trainer", "inference"):
            gpus = run.get(role, {}).pop("gpus", None)
            assert gpus is None or f"--{role}-gpus {gpus}" in emitted.command
    said = capsys.readouterr()
    if era == "v0.4" and run["trainer"]["args"].pop("max_concurrent", None):
        assert "left out: trainer.args.max_concurrent (" in said.err
    assert again == run
    assert said.out.strip() == emitted.command


def test_the_command_names_the_files(tmp_path):
    run = read(file(tmp_path, ONE_FILE))
    assert emit(run, "v0.4", tmp_path).command == f"uv run rl @ {tmp_path}/rl.toml"
    three = emit(run, "2025", tmp_path).command
    assert (
        three
        == f"uv run rl --trainer @ {tmp_path}/train.toml --orchestrator @ {tmp_path}/orch.toml "
        f"--inference @ {tmp_path}/infer.toml --trainer-gpus 2 --inference-gpus 6"
    )


@pytest.mark.parametrize(
    ("run", "era", "problem"),
    [
        ({"trainer": {"args": {"loss": "cispo"}}}, "v0.4", "no key for trainer.args.loss"),
        (
            {"trainer": {"args": {"zero_truncated_completions": True}}},
            "v0.4",
            "trainer.args.zero_truncated_completions",
        ),
        (
            {"trainer": {"args": {"oversample": 1.5}}},
            "2025",
            "2025 has no key for trainer.args.oversample",
        ),
        ({"inference": {"args": {"swap_space": 4}}}, "v0.4", "inference.args.swap_space"),
        ({"env": [{"id": "a"}, {"id": "b"}]}, "2025", "have one environment"),
        ({}, "v9", "era is 'v9'"),
        ({"model": "builtin:tiny"}, "v0.4", "cannot load 'builtin:tiny'"),
    ],
)
def test_what_prime_rl_has_no_key_for_is_refused(tmp_path, run, era, problem):
    with pytest.raises(vf.ConfigError, match=problem):
        emit(run, era, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_of_ours_is_emitted_by_the_command(tmp_path):
    ours = (
        'model = "m"\n[env]\nid = "x"\n[trainer]\ngpus = 1\n[trainer.args]\nrun_name ='
        ' "r"\nbatch_size = 8\n'
    )
    path = file(tmp_path, ours)
    command = [sys.executable, "-X", "importtime", "-m", "verifiers_integrations.prime_rl"]
    ran = subprocess.run(
        [*command, path, "--out", tmp_path / "out"], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "verifiers_integrations.prime_rl.writing" in loaded
    assert not {"torch", "transformers"} & loaded, "they take seconds"
    assert ran.stdout.startswith("uv run rl @ ")
    assert tomllib.loads((tmp_path / "out/rl.toml").read_text()) == {
        "trainer_gpu_ids": [0],
        "model": {"name": "m"},
        "wandb": {"name": "r"},
        "orchestrator": {"batch_size": 8, "lora_name": "r", "env": [{"id": "x"}]},
        "trainer": {"model": {"lora": {"rank": 8, "alpha": 32}}, "optim": {"lr": 1e-5}},
    }, "prime-rl trains all weights unless it is told of the adapter that our run has by default"


def test_a_run_of_all_weights_is_emitted_without_an_adapter(tmp_path):
    run = {"model": "m", "trainer": {"args": {"use_lora": False}}}
    for era in ("v0.4", "2025"):
        assert "lora" not in "".join(
            path.read_text() for path in emit(run, era, tmp_path / era).paths
        )


@pytest.mark.parametrize("era", ["v0.4", "2025"])
@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_every_training_file_that_is_shipped_becomes_prime_rls(path, era, tmp_path, capsys):
    ours = tomllib.loads(path.read_text())
    run = read(*emit(path, era, tmp_path).paths)
    told = {"use_lora": True, "lora_rank": 8, "lora_alpha": 32, "learning_rate": 1e-5}
    asked = {**told, **ours["trainer"]["args"]}
    name = asked.pop("run_name")
    if era == "v0.4":
        del asked["micro_batch_size"]
        assert (
            "left out: trainer.args.micro_batch_size (it fills micro batches"
            in capsys.readouterr().err
        )
    assert run["trainer"]["args"] == asked
    assert (run["model"], run["env"], run["wandb"]["name"]) == (
        ours["model"],
        {"args": {}, **ours["env"]},
        name,
    )
    assert run.get("inference", {}).get("args", {}) == ours["inference"].get("args", {})


def test_the_newer_files_of_2026_are_read(tmp_path):
    """Of prime-rl's change notes: ``orchestrator.train``, ``group_size``, ``[deployment]``."""
    text = """
        [deployment]
        num_train_gpus = 1
        num_infer_gpus = 2
        [model]
        name = "m"
        [ckpt]
        [orchestrator]
        batch_size = 8
        group_size = 4
        max_async_level = 2
        [orchestrator.train.sampling]
        max_completion_tokens = 512
        [[orchestrator.train.env]]
        id = "alphabet-sort"
        [trainer.model]
        impl = "auto"
        [inference]
        gpu_memory_utilization = 0.5
    """
    run = read(file(tmp_path, text))
    assert (run["trainer"]["gpus"], run["inference"]) == (
        1,
        {"gpus": 2, "args": {"gpu_memory_utilization": 0.5}},
    )
    assert run["env"] == {"id": "alphabet-sort", "args": {}}
    assert run["trainer"]["args"] == {
        "batch_size": 8, "rollouts_per_example": 4, "max_off_policy_steps": 2, "max_tokens": 512, "use_lora": False,
    }  # fmt: skip


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_shipped_file_is_read_and_emitted(path, tmp_path):
    run = read(path)
    assert run["env"]["id"].endswith(path.stem)
    assert read(*emit(run, "v0.4", tmp_path).paths) == run


# --- calls


@pytest.fixture(scope="module")
def engine():
    with serving(max_seq_len=1024) as engine:
        yield engine


@pytest.fixture
def client(engine):
    return openai.AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=0)


EXTRA = {
    "return_tokens_as_token_ids": True,
    "top_k": -1,
    "min_p": 0.0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
}
SAMPLING = {
    "max_tokens": 6,
    "temperature": 1.0,
    "top_p": 1.0,
    "logprobs": True,
    "extra_body": EXTRA,
}


def talk(count, broken=False):
    class Talk(vf.MultiTurnEnv):
        async def env_response(self, messages, state):
            return [{"role": "user", "content": "more"}]

    def length(completion):
        return 1 / 0 if broken else float(len(completion[0]["content"] or ""))

    rows = [{"question": f"say {n}", "answer": str(n)} for n in range(count)]
    return Talk(dataset=rows, max_turns=2, rubric=vf.Rubric(funcs=[length]))


def checked_turns(rollout, merged=False):
    assert len(rollout["trajectory"]) == 2
    for step in rollout["trajectory"]:
        tokens = step["tokens"]
        assert len(tokens["prompt_ids"]) == len(tokens["prompt_mask"]) > 0
        sizes = {len(tokens[f"completion_{name}"]) for name in ("ids", "mask", "logprobs")}
        assert sizes == {len(tokens["completion_ids"])}
        assert 0 < len(tokens["completion_ids"]) <= 6
        assert all(value <= 0 for value in tokens["completion_logprobs"])
        assert tokens["is_truncated"] in (True, False)


async def test_calls_of_2025(engine, client):
    env = vf.load_environment("reverse-text")
    rows = env.get_dataset(seed=1).select(range(2)).to_list()
    inputs = {
        name: [row[name] for row in rows for _ in range(2)]
        for name in ("prompt", "answer", "task", "info")
    }
    out = await env.a_generate(
        inputs=inputs, client=client, model=engine.served_model, sampling_args=SAMPLING
    )
    assert len(out.prompt) == len(out.completion) == len(out.state) == len(out.reward) == 4
    assert all(len(values) == 4 for values in out.metrics.values())
    processed = env.process_env_results_vllm(
        prompts=out.prompt,
        completions=out.completion,
        states=out.state,
        rewards=out.reward,
        processing_class=build_tiny_tokenizer(),
        max_seq_len=1024,
        mask_env_responses=True,
        zero_truncated_completions=False,
        mask_truncated_completions=False,
    )
    assert processed.source == ["sampled"] * 4
    for index, state in enumerate(out.state):
        tokens = state["trajectory"][0]["tokens"]
        assert processed.prompt_ids[index] == tokens["prompt_ids"]
        assert processed.completion_ids[index] == tokens["completion_ids"]
        assert processed.completion_logprobs[index] == pytest.approx(tokens["completion_logprobs"])
        assert processed.completion_mask[index] == [1] * len(tokens["completion_ids"])
    assert processed.rewards == out.reward


@pytest.mark.parametrize("age", ["v0.3", "v0.4"])
async def test_calls_of_v03_and_v04(engine, client, age):
    env = vf.EnvGroup(envs=[talk(2), talk(3)], env_names=["first", "second"])
    env.set_max_seq_len(512)
    env.set_interleaved_rollouts(True)
    dataset = env.get_dataset(seed=3)
    assert sorted(dataset["example_id"]) == list(range(5)), "example ids are unique over the group"
    assert set(dataset["task"]) == {"first", "second"}
    example = dataset.to_list()[0]
    siblings = [RolloutInput(**example) for _ in range(3)]
    if age == "v0.3":
        keywords = {
            "gen_sampling_args": SAMPLING,
            "gen_sem": asyncio.Semaphore(4),
            "score_sem": asyncio.Semaphore(4),
        }
    else:
        keywords = {"sampling_args": SAMPLING, "max_retries": 0, "state_columns": ["trajectory"]}
    rollouts = await env.run_group(
        group_inputs=siblings, client=client, model=engine.served_model, **keywords
    )
    if age == "v0.3":
        single = await env.run_rollout(
            asyncio.Semaphore(1), RolloutInput(**example), client, engine.served_model, SAMPLING
        )
    else:
        single = await env.run_rollout(
            RolloutInput(**example), client, engine.served_model, sampling_args=SAMPLING, max_retries=0,
            state_columns=["trajectory"],
        )  # fmt: skip
    for rollout in (*rollouts, single):
        assert (rollout["example_id"], rollout["task"]) == (example["example_id"], example["task"])
        assert isinstance(rollout["reward"], float)
        assert (rollout["error"], rollout["is_truncated"] in (True, False)) == (None, True)
        assert rollout["timing"]["total_ms"] > 0
        assert rollout["metrics"]["length"] == rollout["reward"]
        assert rollout["prompt"][-1]["content"].startswith("say")
        assert [m["role"] for m in rollout["completion"]] == ["assistant", "user", "assistant"]
        checked_turns(rollout)


async def test_a_failed_rollout_says_so_and_an_unknown_reward_is_no_number(engine, client):
    group = await talk(1, broken=True).run_group(
        group_inputs=[{"prompt": "x", "example_id": 0, "task": "t"}] * 2, client=client, model=engine.served_model,
        sampling_args=SAMPLING, max_retries=0, state_columns=["trajectory"],
    )  # fmt: skip
    assert all(rollout["error"] is not None for rollout in group)
    assert sum(rollout["reward"] for rollout in group) != 0, "NaN is loud in an average"


# --- vf-train


def test_vf_train_understands_both_ages(tmp_path):
    from verifiers_trainer.cli.settings import read_settings
    from verifiers_trainer.cli.sources import read_words

    for text in (THREE["orch.toml"], ONE_FILE, SETUP):
        assignments, problems = read_words(["@", str(file(tmp_path, text))])
        settings, more = read_settings(assignments)
        assert [*problems, *more] == []
        wanted = read(tmp_path / "x.toml")
        assert (settings.model, settings.env_id) == (wanted["model"], wanted["env"]["id"])
        assert dict(settings.env_args) == wanted["env"]["args"]
        assert settings.config.items() >= wanted["trainer"]["args"].items()


def test_vf_train_takes_a_file_per_part_as_prime_rl_does(tmp_path):
    """The launch of 2025, word by word: ``--trainer @ F --orchestrator @ F --inference @ F
    --trainer-gpus 2 …``."""
    from verifiers_trainer.cli.settings import read_settings
    from verifiers_trainer.cli.sources import read_words

    paths = {name: file(tmp_path, text, f"{name}.toml") for name, text in PARTS.items()}
    words = [word for name, path in paths.items() for word in (f"--{name}", "@", str(path))]
    assignments, problems = read_words(
        [*words, "--trainer-gpus", "2", "--inference-gpus", "6", "--wandb.name", "r"]
    )
    settings, more = read_settings(assignments, num_gpus=8)
    assert [*problems, *more] == []
    assert (settings.model, settings.env_id, settings.gpus) == (
        "m",
        "vf-math-python",
        {"trainer": 2, "inference": 6},
    )
    assert dict(settings.env_args) == {"split": "train"}
    assert (settings.config["rollouts_per_example"], settings.config["max_concurrent"]) == (8, 512)
    assert (settings.config["learning_rate"], settings.config["run_name"]) == (3e-6, "r")
    assert settings.server_args == {"tensor_parallel_size": 2}


def test_vf_train_reads_the_three_files_as_one_run(tmp_path):
    from verifiers_trainer.cli.settings import read_settings
    from verifiers_trainer.cli.sources import read_words

    words = [
        word for name, text in THREE.items() for word in ("@", str(file(tmp_path, text, name)))
    ]
    settings, _ = read_settings(read_words(words)[0])
    assert (settings.model, settings.env_id, settings.config["learning_rate"]) == (
        "m",
        "reverse-text",
        3e-6,
    )


EVALUATED = """
[model]
name = "m"
[orchestrator]
batch_size = 64
[orchestrator.eval]
interval = 20
[orchestrator.eval.sampling]
temperature = 0.0
max_completion_tokens = 2048
[[orchestrator.eval.env]]
id = "reverse-text"
num_examples = 256
group_size = 4
[[orchestrator.env]]
id = "reverse-text"
[trainer.loss]
kl_tau = 0.01
adv_tau = 1.0
"""


def test_the_evaluation_and_the_loss_are_read(tmp_path):
    document = read(file(tmp_path, EVALUATED))
    assert document["eval"] == {
        "steps": 20,
        "num_examples": 256,
        "rollouts_per_example": 4,
        "sampling_args": {"temperature": 0.0, "max_tokens": 2048},
    }
    args = document["trainer"]["args"]
    assert (args["loss"], args["loss_kwargs"]) == ("ipo", {"log_ratio_penalty": 0.01})


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('env]]\nid = "reverse-text"\nnum', 'env]]\nid = "gsm8k"\nnum', r"vf.RLTrainer\(eval_env="),
        ("num_examples", "args = {a = 1}\nnum_examples", "orchestrator.eval.env.args: a key"),
        ("kl_tau", 'type = "custom"\nkl_tau', "trainer.loss.type is 'custom'; it may be default"),
        ("adv_tau = 1.0", "teacher_tau = 0.5", "trainer.loss.teacher_tau: a key of prime-rl"),
        ("kl_tau", 'type = "gspo"\nkl_tau', "trainer.loss.kl_tau: a key of prime-rl"),
        ("interval", "cancel_inflight = true\ninterval", "orchestrator.eval.cancel_inflight: a"),
    ],
)
def test_an_evaluation_or_a_loss_without_a_counterpart_is_refused(tmp_path, before, after, said):
    text = EVALUATED.replace(before, after, 1)
    assert text != EVALUATED
    with pytest.raises(vf.ConfigError, match=said):
        read(file(tmp_path, text))


CURRENT = """
max_steps = 20
[model]
name = "m"
[trainer.model.ac]
{ac}
[orchestrator]
max_inflight_rollouts = 64
[[orchestrator.train.env]]
name = "words"
{env}
[[orchestrator.eval.env]]
{env}
num_examples = 8
"""


@pytest.mark.parametrize("ac", ["", "freq = 1", 'mode = "full"'])
@pytest.mark.parametrize(
    "env", ['taskset = "reverse"', 'taskset = { id = "reverse", unit = "word" }', 'id = "reverse"']
)
def test_the_current_layout_is_read_where_it_has_a_counterpart(tmp_path, ac, env):
    file = tmp_path / "rl.toml"
    file.write_text(CURRENT.format(ac=ac, env=env))
    document = read(file)
    args = {"unit": "word"} if "unit" in env else {}
    assert document["env"] == {"id": "reverse", "args": args, "name": "words"}
    assert document["eval"] == {"num_examples": 8}
    assert document["trainer"]["args"] == {
        "max_steps": 20,
        "gradient_checkpointing": True,
        "max_concurrent": 64,
        "use_lora": False,
    }


@pytest.mark.parametrize(
    ("ac", "env", "named"),
    [
        ('mode = "selective"', 'taskset = "reverse"', "trainer.model.ac"),
        ("", 'taskset = "reverse"\nharness = { id = "mini" }', "orchestrator.train.env.harness"),
        ("", 'taskset = { unit = "word" }', "orchestrator.train.env has no id"),
        ("", 'id = "other"\ntaskset = "reverse"', "orchestrator.train.env.taskset"),
    ],
)
def test_what_the_current_layout_has_without_a_counterpart_is_named(tmp_path, ac, env, named):
    file = tmp_path / "rl.toml"
    file.write_text(CURRENT.format(ac=ac, env=env))
    with pytest.raises(vf.errors.ConfigError, match=named):
        read(file)
