"""``RLConfig``: every setting of a training run, checked all at once before any work.

``resolve`` derives values from other settings and reports every violated rule in one
``ConfigError`` with the nearest valid values. It runs when training starts, so a setting that is
changed after construction (``config.temperature = 0.7``) takes effect, with everything derived from
it.

To add a setting, add one line to ``fields``. Rules over several settings are in
``cross_field_rules``, alternative names in ``compat``.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

# not from the root, whose types are those of every model
from transformers.training_args import TrainingArguments

from verifiers.clients.payload import explicit
from verifiers.errors import ConfigError
from verifiers.runtime.suggest import check_keywords, close_match
from verifiers.types import SamplingArgs
from verifiers_trainer.algorithm.batch import TeacherPrompts
from verifiers_trainer.algorithm.losses import BOUNDS, bounds_read, named_objective
from verifiers_trainer.distributed import deepspeed
from verifiers_trainer.settings import compat, recipes
from verifiers_trainer.settings.compat import INSTEAD, known_names
from verifiers_trainer.settings.cross_field_rules import (
    ANCHORED_ON_BATCH,
    CHECKS,
    CORRECTIONS,
    INFERENCE,
)
from verifiers_trainer.settings.fields import (
    RESHAPING,
    Configuration,
    plain,
    problem_of,
    resume_values,
)
from verifiers_trainer.settings.sampling import reshaping_arguments

log = logging.getLogger(__name__)


TIS_CAP = 2.0
"""``tis_cap`` where top_p and the like reshape the sampled distribution. *Source*: TIS, Yao et al.
2025, "Your efficient RL framework secretly brings you off-policy RL training"."""


@dataclass
class RLFields(Configuration, TrainingArguments):  # type: ignore[misc]  # the defaults of ``Settings`` win
    """The fields of ``RLConfig``."""


class RLConfig(RLFields):
    """Settings of ``RLTrainer``; also takes every field of ``transformers.TrainingArguments``.

    *Raises* ``ConfigError`` for unknown names, with the nearest known name.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {}
    """Defaults that a subclass overrides."""
    batch_is = ""
    """How ``batch_size`` was derived, for messages; empty when the caller set it."""
    _bf16_requested = False
    component = "rl"
    """The part of the loss that trains the rollouts: "rl", "ce" or "ref_kl"; derived
    from ``loss``."""
    teacher_prompts: TeacherPrompts | None = None
    """What teachers read, which ``TrainingRun.open`` sets; None: what the policy read."""
    adapter_roles: tuple[str, ...] = ()
    """The roles with an adapter of their own, by its number, which ``TrainingRun.open`` sets with
    ``lora_per_role``."""

    def _init(self, **settings: object) -> None:
        settings = compat.changing(settings, type(self).__name__)
        check_keywords(settings, known_names(), type(self).__name__)
        other_spellings = {name: settings[name] for name in settings if name in compat.SPELLINGS}
        settings = compat.canonical(settings, self.default_of)
        # transformers' own error does not name the setting
        for name in ("eval_strategy", "save_strategy"):
            if name in settings and (problem := problem_of(name, settings[name])):
                raise ConfigError(problem)
        try:
            super().__init__(**{**compat.canonical(self.DEFAULTS, self.default_of), **settings})
        except ValueError as error:  # transformers' own checks
            raise ConfigError(str(error)) from error
        self._other_spellings, self._explicit = other_spellings, set(settings)
        self._derive_objective()

    # a type checker reads the fields themselves, so it knows every setting and its type
    if not TYPE_CHECKING:
        __init__ = functools.wraps(RLFields.__init__)(_init)

    @classmethod
    def default_of(cls, name: str) -> Any:
        """Return the default of a field; None for a default factory."""
        return cls.DEFAULTS.get(name, getattr(cls, name, None))

    def __post_init__(self) -> None:
        if self.output_dir is None:
            self.output_dir = str(
                Path("outputs") / (self.run_name or time.strftime("train-%Y%m%d-%H%M%S"))
            )
        self._set_precision()
        if self.report_to is None:
            self.report_to = "none"
        if self.learning_rate is None:
            self.learning_rate = 1e-5 if self.use_lora else 1e-6
        if self.torch_compile and self.tf32 is None:
            self.tf32 = False  # transformers would switch it on, for the head as well
        for name, duplicate in compat.DUPLICATES:
            setattr(self, duplicate, getattr(self, name))
        super().__post_init__()
        if self.deepspeed_plugin is not None:
            deepspeed.load_models_whole()

    def _set_precision(self) -> None:
        """Use half precision where the accelerator supports it, else float32; warn if half
        precision was requested."""
        if self.use_cpu or not (torch.cuda.is_available() or torch.backends.mps.is_available()):
            if self.bf16 or self.fp16:
                log.warning(
                    "no accelerator is used, so training computes in float32, not in bf16 or fp16"
                )
            self._bf16_requested = self._bf16_requested or bool(self.bf16)
            self.use_cpu, self.bf16, self.fp16 = True, False, False
        elif self.bf16 is None:
            self.bf16 = (
                not self.fp16 and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
            )

    @property
    def keeps_base_in_bf16(self) -> bool:
        """Whether a LoRA run on a CPU holds its frozen weights in bfloat16: generation is several
        times as fast.

        Needs ``bf16=True`` and a CPU with instructions for it.
        """
        # missing in older versions of torch
        features: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        has_bf16 = any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
        return bool(self.use_cpu and has_bf16 and self._bf16_requested and self.is_given("bf16"))

    def __setattr__(self, name: str, value: object) -> None:
        if name in INSTEAD:
            compat.changing({name: value}, type(self).__name__)
            return
        if "_explicit" not in self.__dict__ or name not in known_names():
            self._warn_of_misspelling(name)
            super().__setattr__(name, value)
            return
        values = compat.settings_of(name, value, lambda field: getattr(self, field))
        self.set_fields(values)
        self._explicit.update(values)
        if values.keys() & {"loss", "recipe"}:
            self._derive_objective()
        if name in compat.SPELLINGS:
            self._other_spellings[name] = value

    def __getattr__(self, name: str) -> Any:
        """Read a setting under another name; Python calls this for missing attributes only."""
        if name in compat.SPELLINGS:
            return compat.read(
                name, self.__dict__.get("_other_spellings", {}), lambda field: getattr(self, field)
            )
        raise AttributeError(f"{type(self).__name__} has no setting {name!r}")

    def set_fields(self, values: Mapping[str, object]) -> None:
        """Set these fields alone: not the second field of a setting, and not as if the caller had
        set them."""
        for name, value in values.items():
            super().__setattr__(name, value)

    def derive(self, **settings: object) -> None:
        """Set settings without marking them as set by the caller."""
        for name, value in settings.items():
            self.set_fields(compat.settings_of(name, value, lambda field: getattr(self, field)))

    def _warn_of_misspelling(self, name: str) -> None:
        if "_explicit" not in self.__dict__ or name.startswith("_") or hasattr(self, name):
            return
        if near := close_match(name, known_names()):
            kind = type(self).__name__
            log.warning(
                "%s has no setting %r, so setting it changes nothing; did you mean %r?",
                kind,
                name,
                near,
            )

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output_dir or "outputs")

    def private_copy(self) -> RLConfig:
        """Return a copy that can be changed without changing this configuration."""
        result = copy.copy(self)
        result._explicit, result._other_spellings = set(self._explicit), dict(self._other_spellings)
        return result

    def is_given(self, name: str) -> bool:
        """Whether the caller set this field, at construction or afterwards."""
        return name in self._explicit

    def is_chosen(self, name: str) -> bool:
        """Whether the caller set this field, or chose a recipe that has a value for it."""
        return self.is_given(name) or name in recipes.settings_of(self.recipe)

    def other_spelling(self, name: str) -> Any:
        """The value that the caller gave under a name of ``compat``; None if it
        was not given."""
        return self._other_spellings.get(name)

    @property
    def server_url(self) -> str | None:
        """URL of the inference server, or of several with commas between them; None for the
        embedded engine.

        With ``inference="auto"`` and no URL, the engine looks for a server when it starts.
        """
        if self.inference == "embedded":
            return None
        if self.inference not in INFERENCE:
            return self.inference
        if self.inference_base_url:
            return self.inference_base_url
        if (
            self.inference == "vllm"
            or self.is_given("vllm_server_host")
            or self.is_given("vllm_server_port")
        ):
            return f"http://{self.vllm_server_host}:{self.vllm_server_port}"
        return None

    def sampling(self) -> SamplingArgs:
        """The sampling arguments of every training request.

        Neutral values are sent as well: a server would use a default of its own for what is left
        out.
        """
        parameters: dict[str, object] = {
            "max_tokens": self.max_turn_tokens,
            "temperature": self.temperature,
            "stop": self.stop or None,
            "guided_regex": self.guided_regex or None,
        }
        parameters |= {name: explicit(name, getattr(self, name)) for name in sorted(RESHAPING)}
        if self.prompt_overflow == "truncate_left" and self.max_prompt_len is not None:
            parameters |= {"truncate_prompt_tokens": self.max_prompt_len, "truncation_side": "left"}
        parameters |= self.sampling_args
        return {name: value for name, value in parameters.items() if value is not None}

    @property
    def reshaping(self) -> list[str]:
        """The sampling arguments in force that make the sampled distribution another than the
        trained distribution."""
        return reshaping_arguments(self.sampling())

    @property
    def teachers(self) -> dict[str, str]:
        """Task -> teacher, in the order that numbers them; of one teacher for all the task is ""."""
        if isinstance(self.teacher, dict):
            return self.teacher
        return {} if self.teacher is None else {"": self.teacher}

    @property
    def max_turn_tokens(self) -> int | None:
        """Maximum tokens of a turn; None = the remainder of ``max_seq_len``."""
        bounds = [
            bound for bound in (self.max_tokens, self.max_completion_len) if bound is not None
        ]
        return min(bounds, default=None)

    def bounds(self) -> dict[str, Any]:
        """Every bound that the loss reads, by setting, with the value in force.

        A bound that the caller set wins over that of the loss's source. Without
        ``epsilon_high``, a clip is as wide above as below.
        """
        values = {name: getattr(self, name) for name in bounds_read(self.loss)} | dict(
            self.bounds_of_the_source()
        )
        if values.get("epsilon_high", 0) is None and "epsilon" in values:
            values["epsilon_high"] = values["epsilon"]
        setting = {
            bounds_read(self.loss)[name]: name
            for name, value in values.items()
            if value is not None
        }
        return {name: values[name] for name in setting.values()}

    def bounds_of_the_source(self) -> Mapping[str, float]:
        """Bounds of the loss's source, by setting, that the caller did not replace; ``epsilon``
        replaces both."""
        objective = named_objective(self.loss)
        replaced = {"epsilon_high"} if self.is_given("epsilon") else set()
        source_bounds = {} if objective is None else objective.bounds
        return {
            name: value
            for name, value in source_bounds.items()
            if name not in replaced and not self.is_given(name)
        }

    def loss_parameters(self) -> dict[str, Any]:
        """Parameters of the loss, under its own names: the bounds it reads, and ``loss_kwargs``,
        which win."""
        parameter = bounds_read(self.loss)
        return {parameter[name]: value for name, value in self.bounds().items()} | self.loss_kwargs

    def objective(self) -> str:
        """State in one line what is minimised: the loss with its parameters, aggregation,
        advantage, KL and anchor."""
        objective = named_objective(self.loss)
        loss = objective.loss if objective is not None and objective.loss != self.loss else ""
        bounds = ", ".join(f"{name} {value}" for name, value in self.loss_parameters().items())
        if self.aggregation == "constant_length":
            length = f" {self.max_completion_len or self.max_seq_len}"
        else:
            length = ""
        credit = f" per turn, gamma {self.gamma:g}" if self.credit == "turn" else ""
        reference = "the first policy"
        if self.sync_ref_model:
            reference = f"one updated every {self.ref_model_sync_steps} steps"
        teacher = ", ".join(f"{t} {name}".strip() for t, name in self.teachers.items())
        if self.teacher_context is not None:
            teacher += f" after {plain(self.teacher_context)}"
        if self.teacher_top_k is not None:
            teacher += f", top {self.teacher_top_k} and the rest"
        if self.teacher is not None:
            reference = f"the teacher {teacher}"
        corrections = [
            f"{name} {value}" for name in CORRECTIONS if (value := getattr(self, name)) is not None
        ]
        parts = (
            f"loss {plain(self.loss)}" + f" = {loss}" * bool(loss) + f" ({bounds})" * bool(bounds),
            f"aggregation {self.aggregation}{length}",
            f"advantage {plain(self.advantage)}{credit}",
            f"KL {self.beta:g} x {self.kl_type} to {reference}" if self.beta else "no KL",
            *([f"entropy bonus {self.entropy_coef:g}"] if self.entropy_coef else []),
            *([f"teacher {teacher}"] if self.component == "ref_kl" else []),
            ", ".join([f"anchor {self.anchor}", *corrections]),
        )
        return "; ".join(parts)

    def resume_values(self) -> dict[str, object]:
        """Return the settings that must match when the training is resumed, as JSON values.

        Complete by default: every setting without ``Free`` in ``fields``, but for bounds that the
        loss does not read; a loss by its function, and which of its parameters are those of its
        source.
        """
        objective = named_objective(self.loss)
        values = resume_values(self) | {"loss_defaults": []}
        if objective is None:
            return values
        source_bounds = self.bounds_of_the_source()
        values |= {
            "loss": objective.loss,
            "loss_defaults": [objective.reads[name] for name in source_bounds],
        }
        unread = BOUNDS.keys() - (objective.reads.keys() - source_bounds.keys())
        return {name: value for name, value in values.items() if name not in unread}

    def resolve(self, world_size: int = 1) -> None:
        """Derive values from other settings and check all of them together.

        *Raises* ``ConfigError`` with every violated rule and how to fix it.
        """
        problems = self.problems(world_size)
        if problems:
            listed = "\n".join(f"  - {problem}" for problem in problems)
            raise ConfigError(
                f"{len(problems)} setting(s) of the training cannot be used:\n{listed}"
            )
        if self.truncated_sampling == "warn" and self.reshaping:
            limits = f"anchor = {self.anchor}, tis_cap = {self.tis_cap}"
            what = "tokens are not sampled from the distribution that is trained"
            log.warning("%s: %s; %s", ", ".join(self.reshaping), what, limits)

    def problems(self, world_size: int = 1) -> list[str]:
        """Derive values from other settings; return every violated rule as a sentence."""
        self._derive(world_size)
        return [problem for check in CHECKS for problem in check(self, world_size)]

    def _derive(self, world_size: int) -> None:
        """Derive settings that the caller did not set, from the current values of the others."""
        derived: dict[str, object] = {}
        has_default = not self.is_given("learning_rate") and "learning_rate" not in self.DEFAULTS
        if self.learning_rate is None or has_default:
            derived["learning_rate"] = 1e-5 if self.use_lora else 1e-6
        if not self.is_given("output_dir") and self.run_name:
            derived["output_dir"] = str(Path("outputs") / self.run_name)
        self.derive(**derived)
        self._derive_objective()
        self._derive_anchor()
        self._derive_batch(world_size)
        self._derive_updates()
        if not self.is_given("max_steps"):  # the default, in whole batches
            steps = max(1, self.steps_per_batch)  # 0 is refused with the other problems
            self.derive(max_steps=math.ceil(self.default_of("max_steps") / steps) * steps)
        self._set_precision()
        self.mixed_precision = "bf16" if self.bf16 else "fp16" if self.fp16 else "no"

    def _derive_objective(self) -> None:
        """Set what the recipe means, then what the loss's name means, unless the
        caller set others."""
        recipe = recipes.settings_of(self.recipe)
        values = {
            name: recipe.get(name, self.default_of(name))
            for name in recipes.NAMES
            if not self.is_given(name)
        }
        self.derive(**values)
        objective = named_objective(self.loss)
        self.component = "rl" if objective is None else objective.component
        for name in ("aggregation", "advantage"):
            if not self.is_chosen(name):
                self.derive(
                    **{
                        name: self.default_of(name)
                        if objective is None
                        else getattr(objective, name)
                    }
                )
        if not self.is_given("rollouts_per_example"):  # imitated rollouts have no siblings
            self.derive(
                rollouts_per_example=(
                    1 if self.component == "ce" else self.default_of("rollouts_per_example")
                )
            )
        # a penalty of losses that read rewards
        for name, off in (("beta", 0.0), ("sync_ref_model", False)):
            if not self.is_given(name):
                default = recipe.get(name, self.default_of(name))
                self.derive(**{name: default if self.component == "rl" else off})

    def _derive_anchor(self) -> None:
        """Where top_p and the like reshape the sampled distribution, take the clipped ratio to the
        policy of the batch.

        The ratio to the sampler is then a weight of the token (``tis_cap``), which no clip is
        around.
        """
        clips = (
            bool(self.reshaping) and isinstance(self.loss, str) and self.loss in ANCHORED_ON_BATCH
        )
        for name, value in (("anchor", "recomputed"), ("tis_cap", TIS_CAP)):
            if not self.is_given(name) and not self.is_given("anchor"):
                self.derive(**{name: value if clips else self.default_of(name)})

    def _derive_batch(self, world_size: int) -> None:
        """Derive ``batch_size``, in subclasses that compute it from other settings."""

    def _derive_updates(self) -> None:
        """Set ``updates_per_batch`` by the examples of an update, where these were given
        (``ppo_mini_batch_size``)."""
        examples = self.other_spelling("ppo_mini_batch_size")
        if isinstance(examples, int) and examples > 0 and not self.is_given("updates_per_batch"):
            self.derive(
                updates_per_batch=max(1, self.batch_size // (self.rollouts_per_example * examples))
            )

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps on each batch: as many updates per pass, times the passes over it."""
        return self.updates_per_batch * self.num_iterations

    @property
    def counts_epochs(self) -> bool:
        """Whether passes over the examples decide the number of steps, and not ``max_steps``."""
        return self.max_steps <= 0 or (
            self.is_given("num_train_epochs") and not self.is_given("max_steps")
        )

    def steps_for(self, num_examples: int, num_batches: int | None = None) -> int:
        """Optimizer steps of the run: ``max_steps``, unless the caller set ``num_train_epochs``
        alone.

        ``num_batches`` is the number of batches in one epoch; None = derived from ``num_examples``.
        Each batch is trained for ``steps_per_batch`` steps.
        """
        if not self.counts_epochs:
            return self.max_steps
        if num_batches is None:
            per_epoch = num_examples * self.rollouts_per_example / self.batch_size
        else:
            per_epoch = num_batches
        return max(1, math.ceil(self.num_train_epochs * per_epoch)) * self.steps_per_batch
