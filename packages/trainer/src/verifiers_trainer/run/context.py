"""``TrainingRun``: the state that all parts of a training run share, built from the trainer's
arguments.

Wrong arguments raise ``ConfigError`` before any work. Rules between settings are in ``settings``;
loading and preparing the model is in ``policy.preparation``.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verifiers.data.examples import Example, examples_from
from verifiers.data.sources import DatasetLike
from verifiers.environments.base import Environment
from verifiers.environments.multi_agent import MultiAgentEnv
from verifiers.environments.registry import load_environment
from verifiers.errors import ConfigError, DatasetError
from verifiers.storage.files import share_modes
from verifiers_trainer.algorithm.advantages import ADVANTAGES
from verifiers_trainer.algorithm.losses import LOSSES
from verifiers_trainer.algorithm.packing import PackedRow
from verifiers_trainer.algorithm.state import object_of
from verifiers_trainer.algorithm.teacher_view import teacher_views
from verifiers_trainer.distributed import fsdp
from verifiers_trainer.distributed.ranks import Ranks
from verifiers_trainer.engines.processing import processing_of, save_texts
from verifiers_trainer.engines.role_client import PREFIX
from verifiers_trainer.pipeline.mixture import joined
from verifiers_trainer.pipeline.offline import (
    OfflineRollouts,
    holds_rollouts,
    read_groups,
    rows_of,
    stand_in,
)
from verifiers_trainer.pipeline.teacher_context import TeacherContext
from verifiers_trainer.policy import adapters, preparation
from verifiers_trainer.policy.forward_checks import quiet
from verifiers_trainer.policy.loading import without_progress_bars
from verifiers_trainer.policy.logprobs import TeacherStates
from verifiers_trainer.policy.reference import Reference
from verifiers_trainer.policy.teacher import AnyTeacher, TaskTeachers, members_of, open_teacher
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.cross_field_rules import CHANGE_REWARDS

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


log = logging.getLogger(__name__)


@dataclass
class TrainingRun:
    """The policy, settings, environments and processes of a run. ``open`` creates it."""

    settings: RLConfig
    """The private copy in force, the same object as ``trainer.args``."""
    model: Any
    """The policy in this process; under FSDP or DeepSpeed it holds parts of the parameters."""
    tokenizer: Any
    env: Any
    eval_env: Any
    ranks: Ranks
    dataset: Any = None
    """Training rows; None = the environment's."""
    eval_rows: Any = None
    """Evaluation rows; None = the environment's."""
    offline: OfflineRollouts | None = None
    """Finished rollouts to train on; None when the policy generates rollouts."""
    reference: AnyTeacher | TaskTeachers | None = None
    """The teacher, or those of the tasks, or the reference policy of the KL penalty ``beta``; None
    without any."""
    full_copy: fsdp.WholeCopy | None = None
    """Rank 0's whole copy of a policy split over processes; None when it is not split."""
    _examples: Sequence[Example] | None = field(default=None, repr=False)

    @classmethod
    def open(
        cls,
        model: Any,
        env: Any,
        settings: RLConfig,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: Any = None,
        eval_env: object = None,
        eval_rows: DatasetLike | None = None,
        peft_config: PeftConfig | None = None,
    ) -> TrainingRun:
        """Load and check the inputs of a run; derive ``micro_batch_tokens`` and ``max_steps`` where
        unset.

        Raises ``ConfigError`` for an environment that cannot be trained on, and the errors of
        ``preparation.load``.
        """
        env, dataset = environment_of(env), settings.saved_runs if dataset is None else dataset
        eval_env = load_environment(eval_env) if isinstance(eval_env, str) else (eval_env or env)
        is_offline = holds_rollouts(dataset)
        if not is_offline and (
            settings.component == "ce" or dataset is settings.saved_runs is not None
        ):
            raise ConfigError(_nothing_to_imitate(settings))
        if not is_offline:
            if settings.keep_rows is not None:
                env.set_kwargs(keep_rows=os.path.abspath(settings.keep_rows))
            check_environment(env, settings.num_env_workers)
            choose_advantage(env, settings)
        if settings.lora_per_role:
            settings.set_fields({"adapter_roles": roles_of(env, eval_env, is_offline)})
        ranks = Ranks.of(settings)
        adapters.adopt_settings(model, settings)
        model, tokenizer = preparation.load(model, tokenizer, settings)
        offline = None
        if is_offline:
            vocabulary = model.config.get_text_config().vocab_size
            groups = read_groups(dataset, tokenizer, settings, vocabulary)
            offline, dataset = OfflineRollouts(groups, settings), rows_of(groups)
            if env is None:
                env = eval_env = stand_in(dataset)
        choose_history(env, settings)
        preparation.ensure_chat_template(tokenizer, env, settings)
        preparation.probe_template(tokenizer, env, settings, processing_of(model))
        model = preparation.prepare(model, settings, peft_config)
        room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        prompts = TeacherContext.of(settings, tokenizer, processing_of(model), room)
        settings.set_fields({"teacher_prompts": prompts})
        run = cls(settings, model, tokenizer, env, eval_env, ranks, dataset, eval_rows, offline)
        if settings.micro_batch_tokens is None and preparation.has_packed_kernel(model):
            settings.micro_batch_tokens = settings.micro_batch_size * settings.max_seq_len
        if settings.max_steps < 0 or settings.is_given("num_train_epochs"):
            settings.max_steps = settings.steps_for(
                len(run.examples), None if offline is None else offline.num_batches
            )
        return run

    @property
    def folder(self) -> Path:
        """The run's directory, ``output_dir``."""
        return self.settings.folder

    @property
    def examples(self) -> Sequence[Example]:
        """The training examples; read on first use. Raises ``DatasetError`` when there are none."""
        if self._examples is None:
            read = examples_of(self.env, self.dataset)
            self._examples = preparation.within_prompt_limit(
                read, self.tokenizer, self.env, self.settings, processing_of(self.model)
            )
        return self._examples

    def why_no_prompt_fits(self) -> str:
        """A sentence if no prompt of the examples fits ``max_seq_len``, else ""."""
        return preparation.why_no_prompt_fits(
            self.examples,
            self.tokenizer,
            self.env,
            self.settings.max_seq_len,
            processing_of(self.model),
        )

    @property
    def num_steps_per_epoch(self) -> int:
        """Batches of a pass over the examples."""
        return math.ceil(
            len(self.examples) * self.settings.rollouts_per_example / self.settings.batch_size
        )

    # --- copies of the policy ---------------------------------------------------------------------

    def copy_policy(self, is_split: bool) -> None:
        """Copy the policy before training: the reference, or rank 0's whole copy of a split policy.

        The reference of a split policy is split as well, so ``open_reference`` creates it when
        training begins.
        """
        if not is_split:
            self.open_reference()
            return
        fsdp.untie_originals(self.model)
        # on the device that samples from it or sends it, else in host memory
        read_as_files = self.settings.server_url is not None and self.settings.weight_sync not in (
            "nccl",
            "ipc",
        )
        device = torch.device("cpu") if read_as_files else self.settings.device
        self.full_copy = fsdp.WholeCopy(self.model, keep=self.ranks.is_main, device=device)

    def open_reference(self) -> None:
        """Load the teacher, or copy the present weights as the reference if ``beta`` needs it; the
        first time."""
        if self.reference is None and self.settings.teacher is not None:
            self.reference = open_teacher(self.settings, self.model, self.tokenizer)
        elif self.reference is None:
            self.reference = Reference.of(self.model, self.settings)

    @property
    def references(self) -> list[AnyTeacher]:
        """Who scores the sampled tokens before a step: the reference policy, or the teachers by
        their numbers in a row; none where whole distributions are compared."""
        return [] if self.settings.loss == "gkd" else members_of(self.reference)

    def teacher_states(self, row: PackedRow) -> list[TeacherStates]:
        """The whole distributions of the teachers of a row, which the loss "gkd" reads; none for
        other losses."""
        if self.settings.loss != "gkd":
            return []
        members, top_k = members_of(self.reference), self.settings.teacher_top_k
        return [
            members[view.teacher].states(view, self.settings.device, top_k)
            for view in teacher_views(row)
        ]

    @property
    def whole_model(self) -> PreTrainedModel:
        """The policy with whole parameters, for rank 0 alone: the model itself unless
        it is split."""
        if self.full_copy is None:
            return self.model
        if not fsdp.is_managed(self.model):  # not split yet: a warm-up may have changed the weights
            self.full_copy.refresh(self.model, trained_only=False)
        return self.full_copy.model

    @contextmanager
    def policy_of_rank_0(self) -> Iterator[torch.nn.Module]:
        """The policy for a pass of rank 0 alone: of a split policy the whole copy, because another
        forward pass between backward and update changes its gradients."""
        if self.full_copy is None:
            yield self.model
            return
        half = torch.bfloat16 if self.settings.bf16 else torch.float16
        model, is_half = self.whole_model, bool(self.settings.bf16 or self.settings.fp16)
        with quiet(model), torch.autocast(model.device.type, half, enabled=is_half):
            yield model

    def renew(self, *, trained_only: bool = True) -> None:
        """Copy the policy's weights to ``whole_model``; a collective, and a no-op unless the model
        is split."""
        if self.full_copy is not None:
            self.full_copy.refresh(self.model, trained_only=trained_only)

    def save_model(self, folder: Path, *, merged: bool = False) -> None:
        """Write model (for PEFT the adapter alone, unless ``merged``) and tokenizer; rank 0 alone
        writes."""
        if not self.ranks.is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        model = self.whole_model
        with without_progress_bars():  # a training has a line of its own
            if hasattr(model, "peft_config") and not merged:
                with preparation.config_to_save(model):
                    adapters.record_base(model, self.tokenizer, self.folder)
            write = preparation.save_merged if merged else preparation.save_weights
            write(model, folder)
        save_texts(model, self.tokenizer, folder)
        share_modes([*folder.glob("*.safetensors"), *folder.glob(f"{PREFIX}*/*.safetensors")])


# --- arguments of the constructor -----------------------------------------------------------------


def either(first: str, a: object, second: str, b: object) -> Any:
    """Resolve an argument with two names. Raises ``ConfigError`` when both are set to different
    values."""
    if a is not None and b is not None and a is not b:
        raise ConfigError(f"{second} is another name of {first}; give one of them")
    return a if a is not None else b


def server_of(client: object) -> str | None:
    """The server URL of a client: a URL, an OpenAI client, or a client of core's; None for None.

    Raises ``ConfigError`` for a client without ``base_url``: weights must be pushed to its server.
    """
    if client is None:
        return None
    url = client if isinstance(client, str) else getattr(client, "base_url", None)
    if not url:
        raise ConfigError(
            f"client is {type(client).__name__}, which has no base_url: give a vLLM server's URL,"
            " or a client of it"
        )
    return str(url)


def final_settings(
    settings: RLConfig | None, default: type[RLConfig] = RLConfig, **overrides: object
) -> RLConfig:
    """A private copy of the settings (or of the defaults) with the ``overrides`` that are not None,
    checked together.

    Raises ``ConfigError``.
    """
    settings = settings if settings is not None else default()
    if not isinstance(settings, RLConfig):
        raise ConfigError(f"args must be an RLConfig, not {type(settings).__name__}")
    settings = settings.private_copy()
    for name, value in overrides.items():
        if value is not None:
            setattr(settings, name, value)
    settings.resolve(settings.world_size)
    for name, registry in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        choice = getattr(settings, name)
        if (algorithm := object_of(registry, choice)) is not choice:  # a class: one object of it
            settings.set_fields({name: algorithm})
    # the first device only: the model is never replicated in a process
    settings._n_gpu = min(settings.n_gpu, 1)
    return settings


def environment_of(env: object) -> Any:
    """Load an environment by id, or join a list into one group; pass others through."""
    if isinstance(env, str):
        return load_environment(env)
    if isinstance(env, list | tuple):
        return joined([environment_of(member) for member in env])
    return env


def check_environment(env: object, num_workers: int = 0) -> None:
    """Raise ``ConfigError`` unless ``env`` has a reward function, and workers, if any, can build it
    by id."""
    if env is None:
        raise ConfigError("env is missing: give an environment, or the id of one, to train in")
    if not isinstance(env, Environment):
        raise ConfigError(f"env must be an environment or the id of one, not {type(env).__name__}")
    if not env.get_reward_funcs():
        raise ConfigError(
            f"the environment {_name_of(env)} has no reward function: nothing to train on"
        )
    env.rubric.check_needs()
    if num_workers and env.loaded_from is None:
        raise ConfigError(
            f"num_env_workers is {num_workers}: a worker builds its environment by id, and this "
            f"{type(env).__name__} was made by hand; give its id, or use num_env_workers=0"
        )


ROLE_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Names of roles that may be those of folders."""


def roles_of(env: object, eval_env: object, is_offline: bool) -> tuple[str, ...]:
    """The roles with an adapter of their own (``lora_per_role``), in the order of the environment.

    Raises ``ConfigError`` where there are none, and for a role without adapter and client.
    """
    if is_offline:
        raise ConfigError(
            "lora_per_role=True trains what each role samples, and finished rollouts are trained"
            " on: leave it out, or pass an environment without dataset"
        )
    played: dict[str, None] = {}
    for member in preparation.members(env):  # type: ignore[arg-type]  # an environment, by now
        if not isinstance(member, MultiAgentEnv):
            raise ConfigError(
                f"lora_per_role=True trains an adapter for each role, and {_name_of(member)} has no"
                " roles (it is no MultiAgentEnv): leave it out"
            )
        for role in member.roles.values():
            if role.client is not None:
                continue
            if role.name not in member.trained_roles:
                raise ConfigError(
                    f"lora_per_role=True, and the role {role.name!r} of {_name_of(member)} has"
                    " neither an adapter nor a client to play it: name it in trained_roles, or"
                    " give it a client"
                )
            if not ROLE_NAME.fullmatch(role.name):
                raise ConfigError(
                    f"lora_per_role=True saves the adapter of a role in a folder of its name, and"
                    f" {role.name!r} has other characters than letters, digits, - and _: rename it"
                )
            played[role.name] = None
    if not played:
        raise ConfigError(
            f"lora_per_role=True, and no role of {_name_of(env)} is trained: each has a client"  # type: ignore[arg-type]
        )
    for member in preparation.members(eval_env):  # type: ignore[arg-type]
        policies = ["the model"]
        if isinstance(member, MultiAgentEnv):
            policies = [role.name for role in member.roles.values() if role.client is None]
        if missing := [name for name in policies if name not in played]:
            raise ConfigError(
                f"lora_per_role=True, and the evaluation environment {_name_of(member)} asks"
                f" {missing[0]}, which no adapter plays; there are those of {', '.join(played)}"
            )
    return tuple(played)


def _nothing_to_imitate(settings: RLConfig) -> str:
    """The error for finished rollouts that are not there."""
    if settings.saved_runs:
        return (
            f"saved_runs is {settings.saved_runs!r}, and there is no such folder: give folders of"
            " saved runs"
        )
    return (
        f"the loss {settings.loss!r} imitates finished rollouts, and there are none: set saved_runs"
        " to folders of saved runs, or pass dataset=… (for an environment's own answers:"
        " pipeline.warmup.answer_columns)"
    )


def choose_advantage(env: Environment, settings: RLConfig) -> None:
    """Use the environment's own advantages where its rubric has a ``@vf.advantage`` method and no
    setting prevents it.

    Raises ``ConfigError`` for ``advantage="environment"`` without such a method.
    """
    rubrics = [member.rubric for member in preparation.members(env)]
    is_free = (
        not settings.is_chosen("advantage")
        and settings.credit == "rollout"
        and settings.component == "rl"
    )
    unchanged = not any(getattr(settings, name) for name in CHANGE_REWARDS)
    if is_free and unchanged and all(rubric.has_advantages for rubric in rubrics):
        settings.derive(advantage="environment")
    check_advantage(env, settings.advantage)


def choose_history(env: Environment, settings: RLConfig) -> None:
    """Use exact history where a member of the environment asks for it (``AgentEnv``) and no setting
    says otherwise."""
    asks = any(getattr(member, "history", None) == "exact" for member in preparation.members(env))
    if asks and not settings.is_given("history"):
        settings.derive(history="exact")


def check_advantage(env: Environment, advantage: object) -> None:
    """Raise ``ConfigError`` for "environment" where the environment has no advantages; warn of
    unused advantages."""
    rubrics = [member.rubric for member in preparation.members(env)]
    if advantage != "environment":
        if any(rubric.has_advantages for rubric in rubrics):
            log.warning(
                "the @vf.advantage method of %s is not used: the setting advantage is %r",
                _name_of(env),
                advantage,
            )
    elif not all(rubric.has_advantages or rubric.scores_groups for rubric in rubrics):
        raise ConfigError(
            f"advantage='environment', and a rubric of {_name_of(env)} has no @vf.advantage method"
            " to compute it: write one, or set advantage='mean'"
        )


def examples_of(env: Environment, dataset: DatasetLike | None = None) -> list[Example]:
    """The examples of ``dataset``, or of the environment's training set.

    Raises ``DatasetError`` when there are none.
    """
    if dataset is not None:
        table: Any = examples_from(dataset, env.row_format)
    else:
        table = env.train_table if env.train_table is not None else env.eval_table
    if not len(table):
        raise DatasetError(f"the dataset of {_name_of(env)} is empty: nothing to train on")
    return list(table)


def _name_of(env: Environment) -> str:
    return env.env_id or type(env).__name__
