"""``GRPOConfig`` and ``GRPOTrainer``: ``RLTrainer`` under the names and with the defaults of GRPO
scripts.

The one rule implemented here is the batch size: an optimizer step takes
``per_device_train_batch_size`` x processes x ``gradient_accumulation_steps`` rollouts, and a batch
``updates_per_batch`` times as many; when ``batch_size`` is set, a batch is ``batch_size`` x
``gradient_accumulation_steps``. ``steps_per_generation`` counts micro-batches, so
``updates_per_batch`` is that over ``gradient_accumulation_steps``. Other spellings of settings are
in ``settings.compat``.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from verifiers.environments.base import Environment
from verifiers.environments.single_turn import SingleTurnEnv
from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import maybe_await
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.rubrics.arguments import function_name
from verifiers.rubrics.values import NOT_APPLICABLE
from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.run.step import number_of
from verifiers_trainer.settings import compat
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

    from verifiers.data.sources import DatasetLike

log = logging.getLogger(__name__)

LARGEST_MICRO_BATCH = 8


class GRPOConfig(RLConfig):
    """``RLConfig`` with the defaults of GRPO scripts: the loss of Dr. GRPO, all parameters, a small
    KL penalty.

    Accepts GRPO's names: ``num_generations``, ``per_device_train_batch_size``,
    ``max_completion_length`` and others.

        args = vf.GRPOConfig(learning_rate=1e-5, per_device_train_batch_size=8, num_generations=16)
    """

    DEFAULTS = {
        "beta": 0.001,
        "learning_rate": 1e-6,
        "loss": "dr_grpo",
        "mask_ratio_high": float("inf"),
        "mask_ratio_low": 0.0,
        "mask_truncated_completions": True,
        "max_grad_norm": 0.01,
        "num_completions_to_print": 5,
        "report_to": "wandb",
        "rollouts_per_example": 8,
        "save_steps": 500,
        "sync_ref_model": True,
        "use_lora": False,
    }
    """Defaults that differ from ``RLConfig``."""

    # GRPO's names are not fields: a type checker accepts any name, the constructor checks
    if TYPE_CHECKING:

        def __init__(self, **settings: object) -> None: ...

    def _derive_batch(self, world_size: int) -> None:
        """Set ``batch_size`` to the rollouts of a batch, gradient accumulation included."""
        steps, micro = self.gradient_accumulation_steps, self.micro_batch_size
        self._derive_updates_of_generation(steps, micro * world_size)
        if self.is_given("batch_size"):
            steps = steps if self.is_given("gradient_accumulation_steps") else 1
            batch = self.batch_size * steps
            if not self.is_given("micro_batch_size"):
                fitting = [
                    n for n in range(1, LARGEST_MICRO_BATCH + 1) if batch % (n * world_size) == 0
                ]
                self.derive(micro_batch_size=max(fitting, default=micro))
            product = f"batch_size {self.batch_size} x gradient_accumulation_steps {steps}"
        else:
            updates = self.updates_per_batch
            batch = micro * world_size * steps * updates
            product = (
                f"per_device_train_batch_size {micro} x processes {world_size} x"
                f" gradient_accumulation_steps {steps}"
                + f" x updates_per_batch {updates}"
                * (updates != 1)
            )
        if batch != self.batch_size or steps != 1:
            self.batch_is = f" ({product})"
        self.derive(batch_size=batch, gradient_accumulation_steps=1)
        self._explicit.add("batch_size")

    def _derive_updates_of_generation(self, accumulation: int, micro_batch: int) -> None:
        """Set ``updates_per_batch`` to ``steps_per_generation``, which counts micro-batches, over
        those of a step; ``generation_batch_size`` counts their rollouts."""
        steps = self.other_spelling("steps_per_generation")
        name = f"steps_per_generation {steps}"
        rollouts = self.other_spelling("generation_batch_size")
        if steps is None and rollouts is not None and not self.is_given("batch_size"):
            name = f"generation_batch_size {rollouts} ({micro_batch} a micro-batch)"
            if rollouts < accumulation * micro_batch:
                return  # several generations make up a step, which here is one batch
            steps = rollouts / micro_batch
        if steps is None or (accumulation == 1 and rollouts is None):
            return
        if steps % accumulation:
            raise ConfigError(
                f"{name} is not a multiple of gradient_accumulation_steps"
                f" {accumulation}: a batch is divided among whole optimizer steps"
            )
        # of the one micro-batch that a step is from here on
        self.steps_per_generation = int(steps // accumulation)


OTHERWISE = {
    "tools": "an environment has the tools: env=vf.ToolEnv(tools=[…], dataset=…, rubric=…)",
    "rollout_func": "an environment plays the rollouts: env=, a vf.MultiTurnEnv with env_response;"
    " verifiers_integrations.trl plays environments in TRL's own trainer",
    "environment_factory": "an environment is env=, a vf.MultiTurnEnv or vf.StatefulToolEnv, whose"
    " setup_state is reset",
    "reward_processing_classes": "reward_funcs are functions, which load what they need themselves",
    "quantization_config": "args.model_init_kwargs = {'quantization_config': …}",
}
"""Arguments of TRL's trainer that are none here -> what to use."""

NAMES_OF_TRL = {
    "reward": ("reward/mean",),
    "reward_std": ("reward/std",),
    "kl": ("kl_ref",),
    "frac_reward_zero_std": ("groups/dead", "groups"),
    "completions/mean_length": ("tokens/completion", "rollouts/generated"),
    "completions/max_length": ("tokens/longest",),
    "completions/clipped_ratio": ("rollouts/truncated", "rollouts/generated"),
    "sampling/importance_sampling_ratio/mean": ("ratio/mean",),
    "sampling/importance_sampling_ratio/max": ("ratio/max",),
}
"""Metric of TRL -> the metric here, or two of which it is the ratio; and ``rewards/<f>/mean``."""


def named_as_in_trl(metrics: Mapping[str, float], functions: Sequence[str]) -> dict[str, float]:
    """The metrics of a step under TRL's names, as far as they were recorded; with the names of the
    reward functions."""
    groups = metrics.get("groups/live", 0) + metrics.get("groups/dead", 0)
    with_groups = {**metrics, "groups": groups}
    table = NAMES_OF_TRL | {f"rewards/{name}/mean": (f"reward/{name}",) for name in functions}
    return {
        name: with_groups[ours[0]] / (with_groups[ours[1]] if len(ours) == 2 else 1)
        for name, ours in table.items()
        if ours[0] in with_groups and (len(ours) == 1 or with_groups.get(ours[1]))
    }


class GRPOTrainer(RLTrainer):
    """``RLTrainer`` whose settings are a ``GRPOConfig``.

    trainer = vf.GRPOTrainer(model=model, processing_class=tokenizer, env=env,
    args=vf.grpo_defaults("my-run"))

    With TRL's arguments it makes the environment, of one turn, from rewards and rows:

        trainer = vf.GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=rows)

    A reward function gets lists over the siblings of an example: ``prompts``, ``completions``, each
    column that it names (or all, with ``**kwargs``), and returns a number for each; None leaves a
    completion to the other functions, and without another its reward is unknown.

    Args:
        model: As ``RLTrainer``'s, as are the arguments that are not listed.
        env: The environment, or None with ``reward_funcs``.
        args: The settings.
        arguments: Further positional arguments of ``RLTrainer``.
        reward_funcs: A function or several; their rewards are added, with ``args.reward_weights``.
        train_dataset: Rows with ``prompt``, messages or a text, and columns for the functions.
    """

    config_class = GRPOConfig

    def __init__(
        self,
        model: PreTrainedModel | PeftModel | str,
        env: Environment | str | Sequence[Environment | str] | None = None,
        args: RLConfig | None = None,
        *arguments: Any,
        reward_funcs: Callable[..., object] | Sequence[Callable[..., object]] | None = None,
        train_dataset: DatasetLike | None = None,
        **keywords: Any,
    ):
        for name in OTHERWISE.keys() & keywords.keys():
            if keywords.pop(name) is not None:
                raise ConfigError(f"GRPOTrainer takes no {name}=: {OTHERWISE[name]}", key=name)
        calls = CallsOfRewards()
        if reward_funcs is not None:
            if env is not None or train_dataset is None:
                raise ConfigError(
                    "GRPOTrainer takes env, or reward_funcs with train_dataset", key="reward_funcs"
                )
            env = environment_of(
                reward_funcs, train_dataset, keywords.pop("eval_dataset", None), calls
            )
        elif train_dataset is not None:
            raise ConfigError(
                "train_dataset goes with reward_funcs; an environment has its rows, which dataset="
                " replaces",
                key="train_dataset",
            )
        super().__init__(model, env, args, *arguments, **keywords)
        self._calls, calls.trainer = calls, weakref.ref(self)
        if reward_funcs is not None and self.args.recipe is None:
            log.warning("%s", DIFFERENT)

    def step_metrics(self, batch: TrainBatch) -> Mapping[str, float]:
        """What reward functions logged with ``log_metric``, the mean of all calls since the last
        step."""
        logged, self._calls.logged = self._calls.logged, {}
        return {
            **super().step_metrics(batch),
            **{name: fmean(values) for name, values in logged.items()},
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As ``RLTrainer.log``; the metrics of a step also under TRL's names, for callbacks and
        trackers."""
        if "loss" in logs:
            logs = named_as_in_trl(self.last_step, self._function_names) | logs
        super().log(logs, start_time)

    def _record_evaluation(self, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
        """As of ``RLTrainer``; the mean of each reward function also under TRL's name."""
        metrics = super()._record_evaluation(compute)
        means = {
            f"eval_rewards/{name}/mean": metrics[f"eval_{name}"]
            for name in self._function_names
            if f"eval_{name}" in metrics
        }
        return metrics | means

    @property
    def _function_names(self) -> list[str]:
        rubric = getattr(self.env, "rubric", None)
        return [] if rubric is None else list(rubric.get_reward_func_names())


DIFFERENT = (
    "GRPOConfig differs from TRL's in its defaults: loss dr_grpo with beta 0.001 (dapo, 0),"
    " max_off_policy_steps 1 (0), zero_variance drop (keep), disable_dropout true (false),"
    " mask_truncated_completions true (false), max_grad_norm 0.01 (1), no max_completion_len (512);"
    " recipe='trl' takes TRL's"
)


@dataclass(slots=True)
class CallsOfRewards:
    """What TRL passes to a reward function beside its data: the trainer's state, and two functions
    to log with."""

    trainer: Callable[[], GRPOTrainer | None] = lambda: None
    logged: dict[str, list[float]] = field(default_factory=dict)

    def arguments(self, states: Sequence[State]) -> dict[str, Any]:
        def log_metric(name: str, value: float) -> None:
            self.logged.setdefault(name, []).append(number_of(name, value))

        def log_extra(column: str, values: Sequence[object]) -> None:
            for state, value in zip(states, values, strict=True):
                state[column] = value

        trainer = self.trainer()
        trainer_state = None if trainer is None else trainer.state
        return dict(zip(LOGGING, (trainer_state, log_metric, log_extra), strict=True))


LOGGING = ("trainer_state", "log_metric", "log_extra")
ARGUMENTS = ("prompts", "completions", "completion_ids")
"""What a reward function of TRL may take, besides the columns of the rows."""


def environment_of(
    reward_funcs: Callable[..., object] | Sequence[Callable[..., object]],
    train_dataset: DatasetLike,
    eval_dataset: DatasetLike | None = None,
    calls: CallsOfRewards | None = None,
) -> Environment:
    """The environment of one turn that TRL's arguments describe. Prompts that are texts are
    completed without a chat template.

    *Raises* ConfigError for a reward that is no function, such as the name of a reward model.
    """
    calls = calls or CallsOfRewards()
    functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    if wrong := [function for function in functions if not callable(function)]:
        raise ConfigError(
            f"reward_funcs has {wrong[0]!r}, which is no function: load a reward model in your"
            " script, and give a function reward(prompts, completions) that calls it and returns"
            " its scores, or let a judge score, env=vf.SingleTurnEnv(rubric=vf.JudgeRubric(…))",
            key="reward_funcs",
        )
    rows: Any = train_dataset
    first = next(iter(rows), None)
    is_text = isinstance(first, Mapping) and isinstance(first.get("prompt"), str)
    columns = set(first) if isinstance(first, Mapping) else set()
    for function in functions:
        if missing := _required(function) - columns - {*ARGUMENTS, *LOGGING, "answer"}:
            raise ConfigError(
                f"the reward function {function_name(function)!r} needs {', '.join(sorted(missing))},"
                f" and there are {', '.join((*ARGUMENTS, *sorted(columns - {'prompt'})))}",
                key="reward_funcs",
            )
    return SingleTurnEnv(
        dataset=train_dataset,
        eval_dataset=eval_dataset,
        message_type="completion" if is_text else "chat",
        rubric=Rubric([_of_siblings(function, calls) for function in functions]),
    )


def _required(function: Callable[..., object]) -> set[str]:
    """The names of the parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {p.name for p in parameters if p.default is p.empty and p.kind not in kinds}


def _of_siblings(function: Callable[..., object], calls: CallsOfRewards) -> Callable[..., object]:
    """A reward function of TRL as a function of a group."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    async def reward(
        prompts: Sequence[object], completions: Sequence[object], states: Sequence[State]
    ) -> list[Any]:
        rows = [state.record.row for state in states]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        values = {"prompts": list(prompts), "completions": list(completions), **columns}
        values |= calls.arguments(states)
        sampled = [state.record.turns for state in states]
        if all(sampled):  # an endpoint of an evaluation may return no tokens
            values["completion_ids"] = [turns[-1].completion_ids.tolist() for turns in sampled]
        arguments = values if takes_all else {n: v for n, v in values.items() if n in parameters}
        rewards = await maybe_await(function(**arguments))
        return [_value(reward) for reward in rewards]

    reward.__name__ = reward.__qualname__ = function_name(function)
    return reward


def _value(reward: object) -> object:
    """A value of a function of TRL as a rubric's: None leaves the completion to the other
    functions, and a scalar of any library is its number."""
    if reward is None:
        return NOT_APPLICABLE
    return reward.item() if hasattr(reward, "item") else reward


def grpo_defaults(run_name: str = "grpo", **overrides: object) -> GRPOConfig:
    """Settings for examples, in ``outputs/<run_name>``; ``overrides`` (under any of their names)
    take precedence.

    Args:
        run_name: Name of the run and of its folder.
        overrides: Settings under any of their names, which take precedence.

    Other values count as defaults: ``num_train_epochs``, for example, may still derive
    ``max_steps``.
    """
    settings = {
        "run_name": run_name,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "max_steps": 500,
        "bf16": True,
        "max_grad_norm": 0.01,
        "max_seq_len": 4096,
        "micro_batch_size": 8,
        "rollouts_per_example": 8,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "save_strategy": "steps",
        "save_steps": 500,
        "logging_steps": 1,
        "log_completions": True,
        "report_to": "wandb",
    }
    canonical = compat.canonical(
        overrides, lambda name: settings.get(name, GRPOConfig.default_of(name))
    )
    config = GRPOConfig(**{**settings, **canonical})
    config._explicit = {"run_name", *canonical}
    return config


def lora_defaults(r: int = 8, alpha: int = 16, **options: object) -> LoraConfig:
    """A ``peft.LoraConfig`` over the attention projections; ``options`` are its other fields.

    Args:
        r: Rank.
        alpha: Scale: the adapter's output is multiplied by alpha / r.
        options: The other fields of ``peft.LoraConfig``.
    """
    from peft import LoraConfig

    defaults: dict[str, Any] = {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "task_type": "CAUSAL_LM",
    }
    return LoraConfig(**{"r": r, "lora_alpha": alpha} | defaults | options)
