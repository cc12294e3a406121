"""``vf-train --plan``: where its inputs come from, what it prints and refuses, and that it loads no
torch."""

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from support.training import digits, metrics_of, run, small_trainer, toy_env
from verifiers.errors import ConfigError
from verifiers_trainer.cli.capacity import (
    SMOLLM2_SIZES,
    architecture,
    capacity_plan,
    plan_text,
    read_run,
    remedies,
)
from verifiers_trainer.cli.throughput import (
    EMBEDDED_CACHE_CPU,
    EMBEDDED_CACHE_SHARE,
    StepTime,
    cache_tokens,
)
from verifiers_trainer.cli.train import train_command
from verifiers_trainer.engines.embedded import engine
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer

WORDS = (
    "--model builtin:tiny --env.id reverse-text --trainer.args.batch_size 64"
    " --trainer.args.use_lora false".split()
)
STEP = {
    "rollouts/generated": 8, "rollouts/trained": 4, "tokens/prompt": 80, "tokens/completion": 40, "time/train": 2.0,
    "time/wait_generation": 4.0, "time/step": 8.0, "time/sync": 0.5, "throughput/train_tokens_per_s": 30.0,
    "throughput/generated_tokens_per_s": 5.0, "groups/live": 1, "groups/dead": 1, "groups/backfilled": 1,
}  # fmt: skip
"""Of two groups of four, one is dropped and one trained."""


@pytest.fixture
def earlier(tmp_path):
    """A run of three steps, the first of which is slower; the last wrote a checkpoint."""
    rows = [
        {**STEP, "step": 1, "time/train": 90.0},
        {**STEP, "step": 2},
        {"step": 2, "eval_runtime": 3.0},
    ]
    last = {
        **STEP,
        "step": 3,
        "time/step": 10.0,
        "time/checkpoint": 2.0,
        "throughput/generated_tokens_per_s": 4.0,
    }
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, last])
    )
    return tmp_path


def test_an_earlier_run_by_hand(earlier):
    assert read_run(earlier) == {
        "prompt_tokens": 10.0,
        "completion_tokens": 5.0,
        "surplus": 2.0,
        "trained": 1.0,
        "computed_tokens": 15.0,  # 60 tokens of four rollouts
        "train_tokens_per_s": 30.0,
        "sampled_tokens_per_s": 10.0,  # 80 tokens in 8 s of waiting
        "sync_s": 0.5,
        "other_s": 1.5,  # of 8 s: 4 waiting, 2 training, 0.5 of weights
    }
    assert read_run(earlier, samplers=2)["sampled_tokens_per_s"] == pytest.approx(80 / 15 / 2)
    assert read_run(earlier, trainers=2)["computed_tokens"] == 30.0  # as many again by the other


def write(folder, rows):
    lines = (json.dumps({"step": number, **row}) + "\n" for number, row in enumerate(rows, 1))
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_what_was_generated_and_not_trained_is_counted_once(tmp_path):
    """By hand, a batch_size of 16: a batch of two of its four groups, one of them with an error;
    before it a group became too old, and eight rollouts without any signal are in no step."""
    warm = {**STEP, "rollouts/generated": 160}
    dead = {"step": 1, "dead/batches": 1, "dead/rollouts": 4}
    short = {
        "batch/short": 1,
        "batch/fill": 0.5,
        "groups/live": 2,
        "groups/dead": 3,
        "groups/backfilled": 3,
    }
    short |= {
        "rollouts/generated": 20,
        "rollouts/trained": 7,
        "groups/dropped_stale": 1,
        "staleness/max": 1,
    }
    write(tmp_path, [warm, dead, dead | {"dead/batches": 2, "dead/rollouts": 8}, STEP | short])
    numbers = read_run(tmp_path)
    assert numbers["surplus"] == (20 + 4 + 8) / 16
    assert numbers["trained"] == 7 / 16
    assert numbers["completion_tokens"] == 40 / 20
    assert numbers["sampled_tokens_per_s"] == 32 * 2 / 4
    # negative control: of a batch before, others are not this one's
    write(tmp_path, [warm, STEP | short])
    assert read_run(tmp_path)["surplus"] == (20 + 4) / 16


def test_a_batch_of_several_steps_is_one_batch(tmp_path):
    """Of two batches of two parts that are passed over twice, the second, whose later steps have
    other numbers."""

    def steps(generated: int) -> list[dict[str, float]]:
        return [
            STEP
            | {
                "batch/step": number,
                "batch/pass": (number + 1) // 2,
                "rollouts/generated": generated,
            }
            | {"tokens/longest": 10 * number, "time/wait_generation": 4.0 * (number == 1)}
            for number in (1, 2, 3, 4)
        ]

    write(tmp_path, [*steps(80), *steps(8)])
    numbers = read_run(tmp_path)
    assert (numbers["surplus"], numbers["trained"]) == (2, 1)
    assert (numbers["sync_s"], numbers["sampled_tokens_per_s"]) == (4 * 0.5, 80 / 4)
    assert numbers["computed_tokens"] == 2 * 60 / 8  # of the first pass
    assert numbers["longest_tokens"] == 20


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"oversample": 1.0},
        {"max_off_policy_steps": 0},
        {"updates_per_batch": 2, "num_iterations": 2, "max_steps": 12},
        {"zero_variance": "keep"},
    ],
    ids=str,
)
def test_surplus_and_share_are_those_of_the_rollouts_that_a_run_saved(tmp_path, settings):
    """Oracle: the files of rollouts. Many questions give every answer the same reward."""

    def sometimes(completion, prompt, **_):
        return 0.5 if prompt[-1]["content"] < "t" else digits(completion)

    env = toy_env(sometimes)
    settings = {
        "max_steps": 8,
        "max_tokens": 8,
        "log_completions": True,
        "batch_size": 16,
    } | settings
    run(small_trainer(tmp_path, env, **settings))
    steps = settings.get("updates_per_batch", 1) * settings.get("num_iterations", 1)
    first_pass = [
        1 + step for step in range(steps, settings["max_steps"]) if step % 4 < 2 or steps == 1
    ]
    files = [tmp_path / "completions" / f"step-{step}.jsonl" for step in first_pass]
    files += [
        file
        for file in (tmp_path / "completions").glob("dropped-*")
        if int(file.stem.split("-")[1]) > steps
    ]
    rollouts = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    num_batches = settings["max_steps"] // steps - 1
    numbers = read_run(tmp_path)
    assert numbers["surplus"] == pytest.approx(len(rollouts) / num_batches / 16)
    assert numbers["trained"] == pytest.approx(
        sum(row["trained"] for row in rollouts) / num_batches / 16
    )
    trained_s = sum(
        row["time/train"]
        for row in metrics_of(tmp_path)
        if row["step"] > steps and "time/train" in row
    )
    tokens = (
        16 * numbers["trained"] * numbers["computed_tokens"] * settings.get("num_iterations", 1)
    )
    assert tokens / numbers["train_tokens_per_s"] == pytest.approx(trained_s / num_batches)


def test_the_longest_rollout_is_that_of_the_earlier_run(earlier):
    metrics = earlier / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row | {"tokens/longest": 12}) + "\n" for row in rows))
    assert read_run(earlier)["longest_tokens"] == 12
    alone = [*WORDS, "--trainer.args.max_off_policy_steps", "0", "--trainer.args.max_tokens", "900"]
    lengths = ["completion_tokens=10"]
    # assumed to be the bound on a turn
    assert capacity_plan(alone).inputs["longest_tokens"].value == 900
    shorter = capacity_plan(alone, overrides=[*lengths, "longest_tokens=10"])
    assert capacity_plan(alone, overrides=lengths).time.step_s > shorter.time.step_s


@pytest.mark.parametrize("batch_size", [32, 128, 512])
def test_a_tiny_model_is_limited_by_generation_whose_longest_rollout_is_waited_for(batch_size):
    """As in docs/reference/measured-plans.md, where it was measured."""
    synchronous = ["--trainer.args.max_off_policy_steps", "0"]
    words = [*WORDS, *synchronous, "--trainer.args.batch_size", str(batch_size)]
    lengths = ["prompt_tokens=302", "completion_tokens=102", "surplus=1", "longest_tokens=600"]
    plan = capacity_plan(words, overrides=lengths)
    assert plan.time.bottleneck == "generation"
    assert batch_size * 102 / plan.time.concurrent == pytest.approx(600)  # decoding steps
    # negative control
    before = ["longest_tokens=0", "token_overhead_s=0", "decode_overhead_s=0.005"]
    equal = capacity_plan(words, overrides=[*lengths, *before])
    assert batch_size == 32 or equal.time.bottleneck == "training"


def test_measured_before_setting_and_given_before_measured(earlier):
    plan = capacity_plan(
        [*WORDS, "--inference.gpus", "3"], "H100", str(earlier), ["env_s=2", "completion_tokens=7"]
    )
    origins = {name: plan_input.origin for name, plan_input in plan.inputs.items()}
    expected = {
        "surplus": "measured",
        "completion_tokens": "given",
        "samplers": "setting",
        "trainers": "assumed",
    }
    assert expected.items() <= origins.items()
    assert origins["flops"] == "data sheet"
    assert plan.inputs["completion_tokens"].value == 7
    assert plan.run.samplers == 3


def test_an_earlier_run_is_recommended_where_none_is_given(earlier):
    assert "inputs are assumed: --plan-from RUN" in plan_text(capacity_plan(WORDS))
    assert "inputs are assumed: --plan-with NAME" in plan_text(
        capacity_plan(WORDS, run=str(earlier))
    )


def test_the_prediction_of_the_run_itself_is_its_step(earlier):
    def of_batch(size: int) -> StepTime:
        words = (
            f"--trainer.args.batch_size {size} --trainer.args.rollouts_per_example 4"
            " --trainer.args.share_prompts false"
        )
        return capacity_plan([*WORDS, *words.split()], run=str(earlier)).time

    itself = of_batch(4)
    assert itself.generate_s == pytest.approx(4 * 2 * 5 / 10)
    assert itself.train_s == pytest.approx(4 * 15 / 30)
    assert itself.step_s == pytest.approx(4 + 2 + 0.5 + 1.5)
    assert of_batch(16).train_s == pytest.approx(4 * itself.train_s)
    assert of_batch(16).generate_s == pytest.approx(4 * itself.generate_s)


def test_the_builtin_models_have_these_sizes():
    model = build_tiny_model()
    assert architecture("builtin:tiny").parameters == sum(p.numel() for p in model.parameters())
    assert architecture("builtin:tiny").vocabulary == len(build_tiny_tokenizer())
    assert architecture("builtin:smollm2-135m") == SMOLLM2_SIZES


def test_the_cache_of_the_embedded_engine_is_bounded_as_in_the_engine():
    bounds = EMBEDDED_CACHE_SHARE, EMBEDDED_CACHE_CPU
    assert bounds == (engine._ACCELERATOR_KV_SHARE, engine._CPU_KV_BYTES)
    on_cpu = capacity_plan(WORDS).run
    assert cache_tokens(on_cpu) * 4 * on_cpu.model.kv_numbers == EMBEDDED_CACHE_CPU
    plan = capacity_plan(WORDS, "H100", overrides=["samplers=0"])
    held = sum(plan.memory["trainer"][part] for part in ("weights", "gradients", "optimizer"))
    assert held > 0
    cached = cache_tokens(plan.run) * 2 * plan.run.model.kv_numbers
    assert cached == pytest.approx(EMBEDDED_CACHE_SHARE * (80e9 - held))


def test_the_sizes_of_a_folder_are_read_from_its_config(tmp_path):
    build_tiny_model(kv_heads=2).config.save_pretrained(tmp_path)
    sizes = architecture(str(tmp_path))
    assert sizes.parameters == sum(p.numel() for p in build_tiny_model(kv_heads=2).parameters())
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 8, "hidden_size": 4}))
    with pytest.raises(ConfigError, match=r"config\.json: .* dense .* num_experts = 8"):
        architecture(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no model's configuration"):
        architecture(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="num_attention_heads"):
        architecture(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "Abacus"}, "no data sheet of 'Abacus'"),
        ({"device": "8xH100"}, "--plan-on 'H100' --plan-with trainers=8"),
        ({"device": "2x RTX 4090"}, "--plan-on 'RTX 4090' --plan-with trainers=2"),
        ({"overrides": ["env_z=1"]}, "no input 'env_z', did you mean \"env_s\"?"),
        ({"overrides": ["length_spread=0"]}, "length_spread is no input any more: longest_tokens"),
        ({"overrides": ["env_s=soon"]}, "'soon' is not a number"),
        ({"overrides": ["surplus=0"]}, "surplus must be at least"),
        ({"overrides": ["trainers=3"]}, "not divisible by the 3 trainers"),
        ({"run": "/nowhere"}, "/nowhere/metrics.jsonl has no two batches"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        capacity_plan(WORDS, **options)
    capacity_plan(WORDS)  # negative control


def test_settings_change_what_they_should():
    def step(*more: str) -> float:
        return capacity_plan([*WORDS, *more], "H100", overrides=["row_overhead_s=0"]).time.train_s

    assert step("--trainer.args.beta", "0.1") > step()
    assert step("--trainer.args.recipe", "clipped_updates") > step()
    twice = capacity_plan([*WORDS, "--trainer.args.recipe", "clipped_updates"])
    assert twice.run.steps_per_batch == 8
    assert twice.run.values["num_iterations"] == 2


def test_the_command_prints_a_table_and_names_the_bottleneck(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(train_command, [*WORDS, "--plan", "--plan-on", "A100"])
    assert result.exit_code == 0, result.output
    for part in (
        "506,688 parameters",
        "data sheet",
        "bottleneck: generation",
        "inputs are assumed",
    ):
        assert part in result.stdout
    assert not list(tmp_path.iterdir())
    as_json = CliRunner().invoke(train_command, [*WORDS, "--plan", "--json"])
    assert json.loads(as_json.stdout)["plan"]["bottleneck"] == "generation"
    embedded = CliRunner().invoke(
        train_command, [*WORDS, "--plan", "--plan-on", "A100", "--engine", "embedded"]
    )
    assert "the first one also for inference" in embedded.stdout
    alone = CliRunner().invoke(train_command, [*WORDS, "--plan-on", "A100"])
    assert (alone.exit_code, "need --plan" in alone.stderr) == (2, True)


# --- what does not fit ----------------------------------------------------------------------------

SEVEN_BILLION = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "model_type": "llama",
}  # fmt: skip


@pytest.fixture
def seven_billion(tmp_path):
    """The words of an adapter run of a 7B model."""
    folder = tmp_path / "7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SEVEN_BILLION))
    return ["--model", str(folder), "--env.id", "reverse-text", "--plan"]


def test_a_run_that_goes_on_with_an_adapter_is_planned_by_its_base(seven_billion, tmp_path):
    words = seven_billion[:-1]
    rank = ["--trainer.args.use_lora", "true", "--trainer.args.lora_rank", "4"]
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    described = {"base_model_name_or_path": words[1], "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    goes_on = capacity_plan(["--model", str(folder), *words[2:]], "A100")
    assert goes_on.run.rank == 4
    assert goes_on.memory == capacity_plan([*words, *rank], "A100").memory
    merged = ["--model", str(folder), *words[2:], "--trainer.args.merge_adapter", "true"]
    full = ["--trainer.args.use_lora", "false"]
    assert capacity_plan([*merged, *full], "A100").memory == (
        capacity_plan([*words, *full], "A100").memory
    )


def in_gigabytes(plan) -> list[float]:
    return [sum(parts.values()) / 1e9 for parts in plan.memory.values()]


def test_an_adapter_run_of_a_7b_model_does_not_fit_a_card_of_24_gb_at_long_rollouts(seven_billion):
    """Before, a row of 1,024 tokens was counted, whatever ``max_seq_len`` allows."""
    words, sizes = seven_billion[:-1], {}
    checkpointed = [*words, "--trainer.args.gradient_checkpointing", "true"]
    for max_seq_len in (1024, 4096, 32768):
        longer = [*checkpointed, "--trainer.args.max_seq_len", str(max_seq_len)]
        plan = capacity_plan(longer, "RTX 4090")
        sizes[max_seq_len] = in_gigabytes(plan)[0]
        assert plan.fits == (max_seq_len < 32768)
    assert sizes[1024] < sizes[4096] < sizes[32768] / 2
    whole = capacity_plan([*words, "--trainer.args.max_seq_len", "4096"], "RTX 4090")
    assert not whole.fits, "without checkpointing"


@pytest.mark.parametrize(
    ("words", "device", "expected"),
    [
        ("--trainer.args.max_seq_len 4096", "RTX 4090", {"gradient_checkpointing = true"}),
        ("--trainer.args.use_lora false", "H100", {"use_lora = true", "FSDP2", "--plan-on 'B200'"}),
        (
            "--trainer.args.max_seq_len 32768 --trainer.args.gradient_checkpointing true",
            "RTX 4090",
            {"max_seq_len = "},
        ),
        (
            "--trainer.args.use_lora false --trainer.args.max_seq_len 8192",
            "RTX 4090",
            {"gradient_checkpointing = true and use_lora = true"},
        ),
    ],
)
def test_what_does_not_fit_exits_3_and_names_what_would_with_its_figure(
    seven_billion, words, device, expected
):
    words = [*seven_billion, *words.split(), "--plan-on", device]
    result = CliRunner().invoke(train_command, words)
    assert result.exit_code == 3
    assert "DOES NOT FIT" in result.stdout
    as_json = json.loads(CliRunner().invoke(train_command, [*words, "--json"]).stdout)
    remedies = as_json["plan"]["remedies"]
    assert not as_json["plan"]["fits"]
    for part in expected:
        assert any(part in remedy for remedy in remedies), remedies
    for remedy in remedies:
        assert f"  {remedy}" in result.stdout
        assert re.search(r": [\d.]+ GB$", remedy)


def test_a_remedy_that_is_named_fits_when_it_is_set(seven_billion):
    words = [*seven_billion[:-1], "--trainer.args.max_seq_len", "4096"]
    plan = capacity_plan(words, "RTX 4090")
    assert not plan.fits
    named = dict(remedy.split(": ") for remedy in remedies(plan.run))
    flags = ["--trainer.args.gradient_checkpointing", "true"]
    size = max(in_gigabytes(capacity_plan([*words, *flags], "RTX 4090")))
    assert named["gradient_checkpointing = true"] == f"{size:.0f} GB"


def test_a_base_in_four_bits_is_counted_on_the_trainer_alone(seven_billion):
    words = seven_billion[:-1]
    full = capacity_plan(words, "RTX 4090")
    four = capacity_plan([*words, "--trainer.args.quantize", "nf4"], "RTX 4090")
    model, adapter = full.run.model, 4 * full.run.trained
    matrices = model.layers * model.layer_matrices
    assert matrices / model.parameters > 0.8
    assert full.memory["trainer"]["weights"] - adapter == 2 * model.parameters
    in_four_bits = 2 * (model.parameters - matrices) + matrices * (0.5 + 1 / 64 + 4 / 64 / 256)
    assert four.memory["trainer"]["weights"] - adapter == pytest.approx(in_four_bits)
    assert four.memory["inference"] == full.memory["inference"]  # a server has its own base
    assert not full.fits
    named = dict(remedy.split(": ") for remedy in remedies(full.run))
    assert named["quantize = nf4"] == f"{max(in_gigabytes(four)):.0f} GB"


def test_where_nothing_helps_the_plan_says_so(seven_billion):
    words = [*seven_billion, "--plan-with", "memory=1e9"]
    result = CliRunner().invoke(train_command, words)
    assert result.exit_code == 3
    assert "no setting: choose a smaller model or a larger device" in result.stdout


def test_vllm_and_the_trainer_on_one_card_are_planned(seven_billion):
    shared = [*seven_billion, "--plan-on", "H100", "--plan-with", "shared=1"]
    shared += ["--trainer.args.max_seq_len", "1024"]
    result = CliRunner().invoke(train_command, shared)
    assert result.exit_code == 0, result.output
    assert "40% of the first one's memory for vLLM" in result.stdout
    assert "vLLM 32 GB" in result.stdout
    assert "by lora_dir" in result.stdout
    greedy = [*shared, "--inference.args.gpu_memory_utilization", "0.8"]
    result = CliRunner().invoke(train_command, greedy)
    assert result.exit_code == 3
    assert "inference.args.gpu_memory_utilization = 0.6" in result.stdout
    assert "inference.gpus = 1 for vLLM" in result.stdout


def test_flash_attention_is_read_from_the_settings():
    attention = ["--trainer.args.model_init_kwargs.attn_implementation", "flash_attention_2"]
    words = [*WORDS, *attention]
    plan = capacity_plan(words, "H100")
    assert plan.inputs["flash"].origin == "setting"
    assert plan.run.longest_row == 8 * 2048
    assert capacity_plan(WORDS, "H100").run.longest_row == 2048


def test_it_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from verifiers_trainer.cli.train import train_command\n"
        f"train_command({[*WORDS, '--plan']!r}, standalone_mode=False)\n"
    )
    check = (
        "try:\n    exec(CODE)\nexcept SystemExit:\n    pass\nsys.exit(bool({'torch',"
        " 'transformers'} & {*sys.modules}))"
    )
    script = f"import sys\nCODE = {code!r}\n{check}"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode
        == 0
    )
