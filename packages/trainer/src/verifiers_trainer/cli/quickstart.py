"""``vf-train quickstart``: a complete training run on a laptop CPU, in minutes, without other
packages.

The run builds a model of half a million parameters, teaches it the answer format by a supervised
warm-up, evaluates it on held-out examples, trains it by reinforcement learning, and evaluates it
again. ``PRESETS`` has the settings of each supported environment. Engine, pipeline, loss and
trainer are those of every run: this module selects their settings, prints progress, and writes a
summary.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import set_seed
from transformers.utils import logging as transformers_logging

import verifiers as vf
from verifiers.results import GenerateOutputs
from verifiers.results.statistics import clustered_stderr, mean
from verifiers.runtime.json import canonical_json
from verifiers.runtime.terminal import escape_control
from verifiers_trainer.pipeline.warmup import warm_up
from verifiers_trainer.policy.builtin_models import TINY
from verifiers_trainer.policy.checkpoint_files import write_json
from verifiers_trainer.policy.loading import get_model_and_tokenizer
from verifiers_trainer.run.evaluation import name_of_weights, run_rollouts
from verifiers_trainer.run.metrics_files import METRICS, read_metrics
from verifiers_trainer.run.plot import draw_learning_curve
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of the quickstart for an environment: ``PRESETS["reverse-text"].noun
    == "words"``."""

    noun: str
    """Plural noun for the examples."""
    exact: str
    """Metric that is 1 for a correct completion and less for any other."""
    env_args: Mapping[str, Any]
    target: float
    """Mean sampled reward at which the warm-up stops: the model knows the format but
    not the task."""
    warm_up: Mapping[str, Any]
    """Further arguments of ``warm_up``."""
    batches: int
    recipe: str
    """The setting ``recipe`` where no loss is given."""
    training: Mapping[str, object]
    """Settings of ``RLConfig`` that differ from ``_config``."""


EXAMPLES: dict[str, Any] = {"num_train_examples": 2000, "num_eval_examples": 200}
THREE_TERMS = {
    "min_terms": 3,
    "max_terms": 3,
    "max_digits": 1,
    "allow_parentheses": False,
    "allow_negation": False,
}
PRESETS: dict[str, Preset] = {
    "reverse-text": Preset(
        noun="words",
        exact="exact_match",
        env_args={"unit": "word", "min_chars": 3, "max_chars": 6, **EXAMPLES},
        target=0.76,
        warm_up={"max_steps": 300, "probe_every": 10, "rows_per_step": 32, "learning_rate": 1e-3},
        batches=140,
        recipe="best_of_group",
        training={"max_seq_len": 48, "max_tokens": 12, "learning_rate": 2e-4},
    ),
    "curriculum-sums": Preset(
        noun="sums",
        exact="correct_answer",
        env_args={"min_difficulty": 1, "max_difficulty": 1, "system_prompt": "", **EXAMPLES},
        target=0.30,
        warm_up={"max_steps": 600, "probe_every": 20, "learning_rate": 1e-3},
        batches=100,
        recipe="best_of_group",
        training={"max_seq_len": 48, "max_tokens": 8},
    ),
    "reasoning-gym": Preset(
        noun="problems",
        exact="generator_score",
        env_args={
            "gym": [
                {"name": "basic_arithmetic", "config": {**THREE_TERMS, "operators": ["+", "-"]}}
            ],
            "system_prompt": "",
            "num_train_examples": 2000,
            "num_eval_examples": (
                280
            ),  # about 80 of them are also training problems and are left out
        },
        target=0.30,
        warm_up={"max_steps": 600, "probe_every": 40, "learning_rate": 1e-3},
        batches=250,
        recipe="policy_gradient",
        training={"max_seq_len": 64, "max_tokens": 8},
    ),
}
"""By environment id."""
DEFAULT_ENVIRONMENT = "reverse-text"
EVAL_ROLLOUTS = 4
NUM_TRANSCRIPTS = 3
AUDIT_BUDGET_S = 10.0
"""For the line of the best non-solution in the learning curve."""


def run(
    output_dir: str | Path = "outputs/quickstart",
    *,
    environment: str = DEFAULT_ENVIRONMENT,
    seed: int = 0,
    batches: int | None = None,
    loss: str | None = None,
    console: Console | None = None,
    results: Console | None = None,
) -> dict[str, Any]:
    """Train in ``environment``, a key of ``PRESETS``; return the content of ``summary.json`` in
    ``output_dir``.

    ``before`` and ``after`` each have ``mean_reward``, ``exact`` (share of exactly correct
    completions) and their 95% intervals over held-out examples. ``batches`` defaults to that of the
    preset; a ``loss`` replaces its recipe. ``results``: where the table of both is printed; default
    ``console``. *Raises* ``ConfigError`` for invalid settings.
    """
    preset = _preset(environment)
    batches = preset.batches if batches is None else batches
    console = console or Console()
    started = time.perf_counter()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    set_seed(seed)
    output = _new_folder(Path(output_dir))
    env = vf.load_environment(environment, seed=seed, **preset.env_args)
    audited = vf.audit_environment(env, search_steps=0, budget_s=AUDIT_BUDGET_S).best_non_solution
    env.non_solution_reward = None if audited is None else audited.reward
    model, tokenizer = get_model_and_tokenizer(TINY, model_kwargs={"seed": seed})
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"[bold]Quickstart[/bold]: {environment}, a model of {size / 1e6:.2f} M parameters, seed"
        f" {seed}"
    )
    config = _config(output, seed, batches, loss, preset)
    method = f"loss {loss}" if loss else f"recipe {config.recipe}"
    with RLTrainer(
        model, env, config, tokenizer, callbacks=[_Display(console, batches, preset.exact)]
    ) as trainer:
        warm_steps = _warm_up(trainer, console, preset)
        before = _measure(trainer, "before", preset, console)
        console.print(
            f"3/4 reinforcement learning: {batches} batches of {config.batch_size} rollouts,"
            f" {method}, {config.steps_per_batch} optimizer steps each"
        )
        rl_started = time.perf_counter()
        trainer.train()
        rl_seconds = time.perf_counter() - rl_started
        after = _measure(trainer, "after", preset, console)
        trainer.save_model(str(output / "model"))
    plot = output / "learning_curve.png"
    draw_learning_curve(
        output / METRICS, plot, f"{environment}: {TINY}, {method}, seed {seed}", preset.exact
    )
    summary = {
        "environment": environment,
        "environment_args": dict(preset.env_args),
        "model": TINY,
        "seed": seed,
        "batches": batches,
        "steps": config.max_steps,
        "recipe": config.recipe,
        "loss": config.loss,
        "warm_up_steps": warm_steps,
        "before": statistics_of(before, preset.exact),
        "after": statistics_of(after, preset.exact),
        "seconds": time.perf_counter() - started,
        "rl_seconds": rl_seconds,
        "non_solution_reward": env.non_solution_reward,
        "plot": str(plot),
        "output_dir": str(output),
    }
    write_json(output / "summary.json", summary)
    results = results or console
    _report(summary, preset, results)
    _transcripts(before, after, results)
    _next_steps(summary, results)
    return summary


def _preset(environment: str) -> Preset:
    if environment not in PRESETS:
        *former, last = PRESETS
        raise vf.ConfigError(
            f"the quickstart supports {', '.join(former)} and {last}, not {environment!r}: train in"
            " any other environment with vf-train @ file.toml"
        )
    return PRESETS[environment]


def _config(output: Path, seed: int, batches: int, loss: str | None, preset: Preset) -> RLConfig:
    common: dict[str, Any] = {
        "batch_size": 128,
        "rollouts_per_example": 8,
        "micro_batch_size": 8,
        "micro_batch_tokens": 1536,  # all of an update in one row
        "zero_truncated_completions": True,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.08,
        "use_lora": False,
        "save_total_limit": 1,
        "disable_tqdm": True,  # ``_Display`` shows batches
    }
    method = {"recipe": preset.recipe} if loss is None else {"loss": loss}
    config = RLConfig(
        output_dir=str(output),
        run_name="quickstart",
        seed=seed,
        **(common | method | dict(preset.training)),
    )
    config.max_steps = config.save_steps = batches * config.steps_per_batch
    return config


def _new_folder(output: Path) -> Path:
    """Create and return ``output``, or ``output-2``, … when it holds an earlier quickstart."""
    number, path = 1, output
    while (path / METRICS).exists() or (path / "eval").exists():
        number += 1
        path = output.with_name(f"{output.name}-{number}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".writable").touch()
        (path / ".writable").unlink()
    except OSError as error:
        raise vf.ConfigError(
            f"cannot write to {path}: {error.strerror}; choose another --output-dir"
        ) from error
    return path


def _warm_up(trainer: RLTrainer, console: Console, preset: Preset) -> int:
    console.print(
        "1/4 warm-up: supervised steps on correct answers, until the model knows the format"
    )

    rows = [example.row for example in (trainer.env.train_table or [])[:64]]

    def reward() -> float:
        return _run_rollouts(trainer, rows).metadata["avg_reward"]

    def show(step: int, loss: float, mean_reward: float | None) -> None:
        if mean_reward is not None and (step % 20 == 0 or mean_reward >= preset.target):
            console.print(f"    step {step:3d}  loss {loss:.3f}  sampled reward {mean_reward:.3f}")

    steps = warm_up(
        trainer.model,
        trainer.tokenizer,
        trainer.env,
        reward=reward,
        target=preset.target,
        seed=trainer.args.seed,
        on_step=show,
        **preset.warm_up,
    )
    trainer.model.zero_grad()
    return steps


def _measure(trainer: RLTrainer, name: str, preset: Preset, console: Console) -> GenerateOutputs:
    rows = [row for row in _held_out(trainer.env) for _ in range(EVAL_ROLLOUTS)]
    results = _run_rollouts(trainer, rows, Path(str(trainer.args.output_dir)) / "eval" / name)
    step = "2/4" if name == "before" else "4/4"
    console.print(
        f"{step} {name}: {len(results)} rollouts on {len(set(results['example_ids']))} held-out"
        f" {preset.noun}, mean reward {results.metadata['avg_reward']:.3f}"
    )
    return results


def _run_rollouts(
    trainer: RLTrainer, rows: Sequence[object], folder: Path | None = None
) -> GenerateOutputs:
    context = trainer.run_context(trainer.args.eval_sampling_args)
    run, step = trainer.training_run, trainer.policy_version
    return run_rollouts(
        run,
        context,
        inputs=rows,
        folder=folder,
        model_name=name_of_weights(run, step, trainer.server.version),
        facts=trainer.checkpoints.facts(),
    )


def _held_out(env: vf.Environment) -> list[dict[str, object]]:
    """Return the evaluation rows that are not training rows: generators may produce the same
    example twice."""
    train_prompts = {canonical_json(example.row["prompt"]) for example in env.train_table or ()}
    return [
        example.row
        for example in env.eval_table
        if canonical_json(example.row["prompt"]) not in train_prompts
    ]


def statistics_of(results: GenerateOutputs, exact: str) -> dict[str, object]:
    """Return mean reward and share of exact completions (metric ``exact``), with standard errors
    and 95% intervals.

    Errors are clustered by example: rollouts of an example are not independent.
    """
    examples = results["example_ids"]
    reward = results["rewards"]
    is_exact = [
        value if math.isnan(value) else float(value == 1) for value in results["metrics"][exact]
    ]
    return {
        "mean_reward": mean(reward),
        "mean_reward_stderr": clustered_stderr(reward, examples),
        "mean_reward_interval": _interval(reward, examples),
        "exact": mean(is_exact),
        "exact_stderr": clustered_stderr(is_exact, examples),
        "exact_interval": _interval(is_exact, examples),
        "rollouts": len(results),
        "examples": len(set(examples)),
    }


def _interval(values: Sequence[float], examples: Sequence[object]) -> list[float]:
    centre, half = mean(values), 1.96 * clustered_stderr(values, examples)
    return [centre - half, centre + half]


class _Display(TrainerCallback):
    """Progress line on a terminal; elsewhere a line every 25 batches."""

    def __init__(self, console: Console, batches: int, exact: str):
        self.console, self.batches, self.exact = console, batches, f"reward/{exact}"
        self.progress: Progress | None = None

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None:
        if self.console.is_terminal:
            columns = (
                TextColumn("    {task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self.progress = Progress(*columns, console=self.console)
            self.task = self.progress.add_task("starting", total=self.batches)
            self.progress.start()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        batch, within = divmod(state.global_step, args.steps_per_batch)
        if within or batch % 5:
            return
        rows = read_metrics(Path(args.output_dir) / METRICS)
        recent = [row for row in rows if "reward/mean" in row][-10 * args.steps_per_batch :]
        numbers = {
            name: _recent(recent, name) for name in ("reward/mean", self.exact, "loss", "entropy")
        }
        line = (
            f"batch {batch:3d}/{self.batches}  reward {numbers['reward/mean']:.3f}  exact"
            f" {numbers[self.exact]:.3f}  loss {numbers['loss']:+.4f}  entropy"
            f" {numbers['entropy']:.3f}"
        )
        if self.progress is not None:
            self.progress.update(self.task, completed=batch, description=line)
        elif batch % 25 == 0:
            self.console.print(f"    {line}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if self.progress is not None:
            self.progress.stop()


def _recent(rows: Sequence[dict[str, Any]], name: str) -> float:
    return mean(math.nan if row.get(name) is None else float(row[name]) for row in rows)


def _report(summary: dict[str, Any], preset: Preset, console: Console) -> None:
    title = f"Held-out {preset.noun}, before and after {summary['batches']} batches"
    table = Table(title=title, title_justify="left")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="left" if not column else "right")
    before, after = summary["before"], summary["after"]
    for label, name in (("mean reward", "mean_reward"), ("exactly correct", "exact")):
        cells = [f"{s[name]:.3f} ± {s[f'{name}_stderr']:.3f}" for s in (before, after)]
        table.add_row(label, *cells, f"{after[name] - before[name]:+.3f}")
    console.print()
    console.print(table)
    console.print(
        "(± one standard error of the mean, clustered by example; a 95% interval extends 1.96 of"
        " them to each side)\n"
    )


def _transcripts(before: GenerateOutputs, after: GenerateOutputs, console: Console) -> None:
    first = {o["example_id"]: o for o in reversed(before.outputs)}
    last = {o["example_id"]: o for o in reversed(after.outputs)}
    for example in list(first)[:: max(1, len(first) // NUM_TRANSCRIPTS)][:NUM_TRANSCRIPTS]:
        prompt, answer = first[example]["prompt"][-1]["content"], first[example]["answer"]
        console.print(f"prompt: {prompt}   answer: {answer}", highlight=False, markup=False)
        for name, output in (("before", first[example]), ("after", last[example])):
            if output["completion"]:
                text = escape_control(str(output["completion"][-1]["content"]))
            else:
                text = ""
            console.print(
                f"  {name:6s} {output['reward']:.2f}  {text}", highlight=False, markup=False
            )


def _next_steps(summary: Mapping[str, object], console: Console) -> None:
    output = summary["output_dir"]
    another = next(name for name in PRESETS if name != summary["environment"])
    console.print(
        f"\nDone in {summary['seconds']:.0f} s, reinforcement learning in"
        f" {summary['rl_seconds']:.0f} s of them.\n  learning curve   {summary['plot']}\n  numbers "
        f"         {output}/summary.json, {output}/{METRICS}\n  rollouts        "
        f" {output}/completions/ (trained), {output}/eval/ (held-out)\n  model           "
        f" {output}/model\nNext commands:\n  vf-train quickstart --env {another}\n  vf-train"
        " quickstart --loss dr_grpo --seed 1\n  vf-train @ configs/vf-train/tiny-cpu.toml\n "
        " vf-eval alphabet-sort -n 5",
        highlight=False,
        markup=False,
    )
