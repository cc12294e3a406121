"""Rules over several settings of a training run: refused combinations, each with a fix.

A check takes a configuration and the number of processes and returns its problems as sentences;
``RLConfig.resolve`` and the commands collect all of them. Checks have no side effects. ``fields``
has the limits of single settings.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.runtime.suggest import close_match, closest
from verifiers_trainer.algorithm.advantages import ADVANTAGES
from verifiers_trainer.algorithm.contexts import CONTEXTS
from verifiers_trainer.algorithm.losses import BOUNDS, OBJECTIVES, bounds_read, loss_parameters
from verifiers_trainer.distributed.launcher import FLAGS
from verifiers_trainer.settings.batch_rules import check_batch
from verifiers_trainer.settings.fields import (
    SAMPLING_FIELDS,
    SELF,
    Configuration,
    plain,
    problem_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

INFERENCE = ("auto", "embedded", "vllm")
"""Values of ``inference`` that are not URLs."""

Check = Callable[[Configuration, int], list[str]]

TRACKERS = ("wandb", "trackio", "tensorboard")
ANCHORED_ON_SAMPLER = frozenset(
    name for name, objective in OBJECTIVES.items() if objective.ratio == "ρ"
)
"""Losses in ρ = π/μ, which includes the gap between trainer and sampler."""
ANCHORED_ON_BATCH = frozenset(
    name for name, objective in OBJECTIVES.items() if objective.ratio == "r"
)
"""Losses in r: π/o with anchor="recomputed", ρ otherwise."""
CORRECTIONS = ("tis_cap", "sequence_mask_cap", "geo_mask", "opsm_delta")
"""Settings that weigh tokens, or drop samples, by the gap between the sampler and the policy of the
batch."""
SELECTING = ("min_reward", "max_per_example", "drop_duplicates")
"""Settings that select the finished rollouts to imitate."""
CHANGE_REWARDS = ("reward_weights_schedule", "zero_truncated_completions")
"""Settings that change rewards after the environment computed its advantages."""
WEIGHTED_BY_RATIO = frozenset("cispo distill masked_is importance_sampling".split())
"""Losses for which π/μ is a weight of the token: right for a reshaped μ too."""
CREDITED = ("mean", "best", "none")
"""Advantages for which credit per turn is defined."""


def check_mini_batch(config: Configuration, world_size: int) -> list[str]:
    """Check ``ppo_mini_batch_size``, which counts examples, against the batch and
    ``updates_per_batch``."""
    updates, mini_batch = config.updates_per_batch, config.other_spelling("ppo_mini_batch_size")
    sizes = (updates, config.batch_size, config.rollouts_per_example)
    if (
        mini_batch is None
        or not all(isinstance(size, int) and size > 0 for size in sizes)
        or updates > sizes[1]
    ):
        return []  # the others are reported by check_batch and check_fields
    examples = config.batch_size // config.rollouts_per_example
    if not isinstance(mini_batch, int) or mini_batch < 1 or examples % mini_batch:
        return [
            f"ppo_mini_batch_size is {mini_batch!r}, the examples of one update; it must divide the"
            f" {examples} of a batch (batch_size {config.batch_size} / rollouts_per_example"
            f" {config.rollouts_per_example})"
        ]
    if config.is_given("updates_per_batch") and updates * mini_batch != examples:
        return [
            f"ppo_mini_batch_size {mini_batch} means {examples // mini_batch} updates of a batch,"
            f" and updates_per_batch is {updates}: give one of them"
        ]
    return []


def check_fields(config: Configuration, world_size: int) -> list[str]:
    """Check each setting that is not the default against its line in ``fields``."""
    values = {line.name: getattr(config, line.name) for line in dataclasses.fields(config)}
    changed = {
        line.name: values[line.name]
        for line in dataclasses.fields(config)
        if values[line.name] is not line.default  # not equality: True is no 1
    }
    return [problem for name, value in changed.items() if (problem := problem_of(name, value))]


def check_objective(config: Configuration, world_size: int) -> list[str]:
    """Check the loss with its parameters and bounds, the advantage, and the KL penalty."""
    problems = []
    try:
        ADVANTAGES.resolve(config.advantage)
    except ConfigError as error:
        reason = str(error)
        if preset := close_match(config.advantage, OBJECTIVES, 1.0):
            reason = (
                f"{config.advantage!r} is a loss: set loss = {preset!r}, whose advantage is"
                f" {OBJECTIVES[preset].advantage!r}"
            )
        problems.append(f"advantage cannot be used: {reason}")
    if config.kl_type == "k1":
        problems.append(
            "kl_type is 'k1', whose gradient in the loss is zero in expectation (that of log π"
            " under π), so it would not hold the policy near the reference: use 'k2' (gradient of"
            " KL(π‖ref)) or 'k3' (of KL(ref‖π))"
        )
    try:
        accepted = loss_parameters(config.loss)
    except ConfigError as error:
        return [*problems, f"loss cannot be used: {error}"]
    for name in [
        name for name in config.loss_kwargs if accepted is not None and name not in accepted
    ]:
        problems.append(
            f"loss_kwargs has {name!r}, which the loss {config.loss} does not"
            f" take{closest(name, accepted or ())}; it takes"
            f" {', '.join(sorted(accepted or ())) or 'none'}"
        )
    return problems + _check_unread(config, accepted or ()) + _check_bounds(config)


def _check_unread(config: Configuration, accepted: Collection[str]) -> list[str]:
    """Refuse bounds that the caller set and the loss does not read."""
    reads = bounds_read(config.loss)
    problems = []
    for name in BOUNDS:
        value = getattr(config, name)
        if name not in reads and value is not None and config.is_given(name):
            hint = f" (its own {name} is a key of loss_kwargs)" if name in accepted else ""
            problems.append(
                f"{name} is {value!r}, a bound that the loss {config.loss!r} does not read{hint}:"
                f" leave it out. Bounds that it reads: {', '.join(reads) or 'none'}"
            )
    return problems


def _check_bounds(config: Configuration) -> list[str]:
    values = [getattr(config, name) for name in BOUNDS]
    if not all(value is None or isinstance(value, int | float) for value in values):
        return []  # reported by check_fields
    bounds, problems = config.bounds(), []
    if not config.mask_ratio_low < 1 < config.mask_ratio_high:
        problems.append(
            f"mask_ratio_low {config.mask_ratio_low} and mask_ratio_high {config.mask_ratio_high}"
            " must lie on both sides of 1"
        )
    reads = bounds_read(config.loss)
    for name in [name for name in bounds if reads[name] == "ratio_cap"]:
        if bounds[name] < max(1, config.ratio_floor):
            problems.append(
                f"{name} is {bounds[name]}, the cap of the ratio: at least 1 and not below"
                " ratio_floor"
            )
        if (
            name != "ratio_cap"
            and config.is_given("ratio_cap")
            and config.ratio_cap != bounds[name]
        ):
            problems.append(
                f"ratio_cap and {name} are one bound of the loss {config.loss!r}: give one of them"
            )
    if "delta" in bounds and bounds["delta"] <= 1 + bounds["epsilon_high"]:
        problems.append(
            f"delta is {bounds['delta']}; it must be above 1 + epsilon_high ="
            f" {1 + bounds['epsilon_high']:g}"
        )
    return problems


def check_anchor(config: Configuration, world_size: int) -> list[str]:
    """Check the anchor and the corrections."""
    name = config.loss if isinstance(config.loss, str) and config.loss in OBJECTIVES else None
    problems = []
    if config.tis_cap is not None and name in ANCHORED_ON_SAMPLER:
        problems.append(
            f"tis_cap weighs tokens by o/μ, and the loss {name!r} weighs them by π/μ already, so"
            " the gap to the sampler would count twice: leave tis_cap out, or use ppo, gspo, sapo,"
            " vespo or dro with anchor='recomputed'"
        )
    elif config.tis_cap is not None and config.anchor == "sampler":
        problems.append(
            "tis_cap weighs tokens by o/μ, and with anchor='sampler' the ratio of the loss is π/μ,"
            " so the gap to the sampler would count twice: set anchor='recomputed', or leave"
            " tis_cap out"
        )
    corrects = any(getattr(config, correction) is not None for correction in CORRECTIONS)
    if config.anchor == "recomputed" and not corrects:
        if name is not None and name not in ANCHORED_ON_BATCH:
            problems.append(
                f"anchor is 'recomputed', and the loss {name!r} uses the sampler's"
                " log-probabilities only: leave it out, or use"
                f" {', '.join(sorted(ANCHORED_ON_BATCH))}"
            )
        elif (
            config.num_iterations == config.updates_per_batch == 1
            and config.max_off_policy_steps != 0
        ):
            problems.append(
                "anchor is 'recomputed' and a batch is one optimizer step, so that every ratio of"
                " the loss is 1 and nothing corrects for tokens of older policies: set tis_cap"
                " (such as 2.0), leave anchor out, or set max_off_policy_steps=0"
            )
    return problems + _check_geo_mask(config.geo_mask)


def _check_geo_mask(pair: Sequence[float] | None) -> list[str]:
    if pair is None:
        return []
    numbers = (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(n, int | float) for n in pair)
    )
    if not numbers or not 0 < pair[0] < 1 < pair[1]:
        return [
            f"geo_mask is {pair!r}; it must be two numbers on both sides of 1, such as (0.99, 1.01)"
        ]
    return []


def check_components(config: Configuration, world_size: int) -> list[str]:
    """Check the settings of the losses that read no reward, and those that only such
    a loss reads."""
    problems = []
    if config.component != "ce":
        selecting = [name for name in SELECTING if getattr(config, name) != config.default_of(name)]
        problems += [
            f"{name} selects rollouts to imitate: leave it out, or set loss='sft'"
            for name in selecting
        ]
    if config.component != "rl":
        unread = [name for name in CORRECTIONS if getattr(config, name) is not None]
        unread += ["credit"] if config.credit == "turn" else []
        unread += ["entropy_coef"] if config.entropy_coef else []
        advice = f"leave it out with loss={config.loss!r}"
        problems += [f"{name} is of losses that read rewards: {advice}" for name in unread]
    return problems


def check_teacher(config: Configuration, world_size: int) -> list[str]:
    """Require a teacher where the loss reads it, and a loss that reads the teacher."""
    problems = _check_context(config)
    if config.teacher is None:
        if config.component == "ref_kl":
            problems.append(f"the loss {config.loss!r} needs a teacher: set teacher")
        return problems
    names = list(config.teachers.values())
    if not names or not all(isinstance(name, str) and name for name in names):
        return [
            f"teacher is {config.teacher!r}; it must be a folder, a name, a URL or 'self', or a"
            " table that maps tasks to such texts"
        ]
    if config.component != "ref_kl" and not config.beta:
        problems.append(
            "teacher is set, and no part of the loss reads it: set loss='distill', or beta"
        )
    if config.component == "ref_kl" and config.beta:
        problems.append(
            f"beta adds a penalty towards the teacher, which is what loss={config.loss!r} is: leave"
            " it out"
        )
    is_url = any(map(_is_url, names))
    if config.loss == "gkd" and is_url:
        problems.append(
            "teacher is a server, which scores sampled tokens alone, and loss='gkd' compares whole"
            " distributions: set loss='distill', or give the teacher's folder"
        )
    if is_url and config.temperature != 1:
        problems.append(
            "teacher is a server, whose log-probabilities are those of temperature 1, and"
            f" temperature is {config.temperature:g}: set temperature=1, or give the teacher's"
            " folder"
        )
    if SELF not in names and config.sync_ref_model and config.is_given("sync_ref_model"):
        problems.append(
            "sync_ref_model updates the reference, which is the teacher here: leave one of them out"
        )
    return problems + (_check_self(config) if SELF in names else [])


def _check_context(config: Configuration) -> list[str]:
    """Check what the teacher reads, and how much of its distribution is compared."""
    problems = []
    if config.teacher_top_k is not None and config.loss != "gkd":
        problems.append(
            f"teacher_top_k is of loss='gkd', which compares distributions, and loss is"
            f" {plain(config.loss)!r}: leave it out"
        )
    if config.teacher_context is None:
        return problems
    try:
        CONTEXTS.resolve(config.teacher_context)
    except ConfigError as error:
        problems.append(f"teacher_context cannot be used: {error}")
    if config.teacher is None:
        problems.append(
            "teacher_context is what a teacher reads, and there is none: set teacher, such as"
            " teacher='self' with loss='gkd'"
        )
    if config.prompt_overflow == "truncate_left":
        problems.append(
            "prompt_overflow='truncate_left' cuts prompts, and teacher_context renders them whole:"
            " set prompt_overflow='skip'"
        )
    return problems


def _check_self(config: Configuration) -> list[str]:
    """Check a teacher that is the policy: it must know more, and compute what the policy does."""
    problems = []
    if config.teacher_context is None:
        problems.append(
            "teacher is 'self', which without a context is the policy itself, with nothing to"
            " teach: set teacher_context, such as 'answer', or give another teacher"
        )
    if not config.disable_dropout:
        problems.append(
            "teacher is 'self', and disable_dropout=False makes it differ from the policy by"
            " chance: leave disable_dropout out"
        )
    is_split = [
        kind
        for kind, flag in FLAGS.items()
        if getattr(config, kind.lower()) or os.environ.get(flag, "").lower() in ("1", "true")
    ]
    if is_split and len(config.teachers) > 1:
        problems.append(
            f"teacher is 'self' for some tasks, and {is_split[0]} splits the policy: processes"
            " would wait for each other in rows of other tasks; give one teacher for all, or start"
            f" without {is_split[0]}"
        )
    return problems


def check_quantize(config: Configuration, world_size: int) -> list[str]:
    """Check what a base in four bits excludes: weights with a gradient, merging, other transfers of
    weights than the adapter's."""
    if config.quantize is None:
        return []
    sets = f"quantize is {config.quantize!r}, and"
    problems = []
    if not config.use_lora:
        problems.append(f"{sets} use_lora=False trains all weights: leave one of them out")
    if config.merge_adapter:
        problems.append(
            f"{sets} merge_adapter=True trains the merged model as any model: leave one of them out"
        )
    if "quantization_config" in (config.model_init_kwargs or {}):
        problems.append(f"{sets} model_init_kwargs has a quantization_config: give one of them")
    if config.weight_sync not in ("auto", "lora_dir"):
        problems.append(
            f"{sets} weight_sync={config.weight_sync!r} sends whole weights: use 'lora_dir', which"
            " sends the adapter, or 'auto'"
        )
    for kind, flag in FLAGS.items():
        if getattr(config, kind.lower()) or os.environ.get(flag, "").lower() in ("1", "true"):
            problems.append(
                f"{sets} {kind} would split the four-bit weights over processes, which keeps the"
                " numbers that belong to a weight apart from it: start without it (DDP), each"
                " process holds the base"
            )
    return problems


def check_roles(config: Configuration, world_size: int) -> list[str]:
    """Check what adapters of roles exclude: what is not plain LoRA, several processes, what
    computes with one policy, and rollouts that were not sampled by them."""
    if not config.lora_per_role:
        return []
    refused = {
        "use_lora=False trains all weights": not config.use_lora,
        "lora_modules_to_save trains modules beside an adapter": config.lora_modules_to_save,
        "dropout makes them differ from what samples (disable_dropout=False)": (
            not config.disable_dropout
        ),
        "train_vision=True adapts layers that are not computed row by row": config.train_vision,
        f"inference={config.inference!r} serves one policy": config.server_url is not None,
        "embedded_mode='static' computes one policy": config.embedded_mode == "static",
        "torch_compile compiles one policy": config.torch_compile,
        "teacher teaches one policy": config.teacher is not None,
        "saved_runs are rollouts of one policy": config.saved_runs is not None,
        f"loss={plain(config.loss)!r} imitates all roles alike": config.component == "ce",
        f"{world_size} processes exchange the gradients of one": world_size > 1,
        **{
            f"{kind} splits one policy": (
                getattr(config, kind.lower()) or os.environ.get(flag, "").lower() in ("1", "true")
            )
            for kind, flag in FLAGS.items()
        },
    }
    return [
        f"lora_per_role=True trains an adapter for each role, and {reason}: leave one of them out"
        for reason, is_set in refused.items()
        if is_set
    ]


def check_reference(config: Configuration, world_size: int) -> list[str]:
    """Require a KL penalty for a synchronised reference."""
    is_teacher = isinstance(config.teacher, str | dict) and SELF in config.teachers.values()
    if (
        config.sync_ref_model
        and config.is_given("sync_ref_model")
        and not (config.beta or is_teacher)
    ):
        return [
            "sync_ref_model=True and beta is 0: without a penalty there is no reference; set beta,"
            " or leave it out"
        ]
    return []


def check_iterations(config: Configuration, world_size: int) -> list[str]:
    """Require whole batches: a checkpoint does not save the position within a batch."""
    factors = {name: getattr(config, name) for name in ("updates_per_batch", "num_iterations")}
    if not all(isinstance(value, int) and value > 0 for value in factors.values()):
        return []  # reported by check_fields
    n, steps = math.prod(factors.values()), config.max_steps
    by_epochs = config.is_given("num_train_epochs") and not config.is_given("max_steps")
    if by_epochs or not isinstance(steps, int) or steps <= 0 or steps % n == 0:
        return []
    product = " x ".join(f"{name} {value}" for name, value in factors.items() if value > 1)
    near = f"{steps // n * n} or {(steps // n + 1) * n}" if steps > n else f"{n}"
    return [
        f"max_steps {steps} is not a multiple of the {n} steps of a batch ({product}): a batch"
        f" would be left half used; use {near}"
    ]


def check_credit(config: Configuration, world_size: int) -> list[str]:
    """Check the settings of credit per turn, and of advantages that the environment computes."""
    is_own = callable(config.advantage) or ":" in str(config.advantage)
    if config.credit == "turn" and not is_own and config.advantage not in CREDITED:
        return [
            "credit='turn' compares the returns of a turn with those of the siblings, and"
            f" advantage is {config.advantage!r}: use {' or '.join(map(repr, CREDITED))},"
            " or a function of yours, which gets the returns of each turn as a group"
        ]
    if config.advantage == "environment":
        names = [name for name in CHANGE_REWARDS if getattr(config, name)]
        return [
            f"advantage='environment' is computed of the rubric's rewards, which {n} changes:"
            " use one"
            for n in names
        ]
    if config.credit != "turn" and config.gamma != 1.0:
        return [
            f"gamma is {config.gamma!r}, which discounts from turn to turn: it needs credit='turn'"
        ]
    return []


def check_schedules(config: Configuration, world_size: int) -> list[str]:
    """Check the difficulty schedule, the reward weights and the weights of environments."""
    problems = _check_difficulties(config.difficulty_schedule)
    weights = config.reward_weights_schedule
    if weights is not None and not _is_weights_schedule(weights):
        problems.append(
            f"reward_weights_schedule is {weights!r}; it must map epochs, or 'default', to a list"
            " of weights or to weights by name"
        )
    shares = config.env_weights
    if shares is not None and (
        not shares or not all(_positive(share) for share in shares.values())
    ):
        problems.append(
            f"env_weights is {shares!r}; it must map names of environments to numbers above 0"
        )
    if shares is not None and config.difficulty_schedule is not None:
        problems.append(
            "env_weights and difficulty_schedule both select the next example: give one of them"
        )
    return problems


def _check_difficulties(schedule: Sequence[Any] | None) -> list[str]:
    if schedule is None:
        return []
    pairs = (
        isinstance(schedule, list | tuple)
        and schedule
        and all(
            isinstance(entry, list | tuple) and len(entry) == 2 and _positive(entry[0])
            for entry in schedule
        )
    )
    if not pairs:
        return [
            f"difficulty_schedule is {schedule!r}; it must be pairs (epoch, difficulty) with epochs"
            " above 0"
        ]
    epochs = [entry[0] for entry in schedule]
    if any(later <= earlier for earlier, later in itertools.pairwise(epochs)):
        return [
            f"difficulty_schedule has epochs {', '.join(f'{e:g}' for e in epochs)}; they must rise"
        ]
    return []


def _is_weights_schedule(schedule: object) -> bool:
    return (
        isinstance(schedule, Mapping)
        and bool(schedule)
        and all(key == "default" or str(key).isdecimal() for key in schedule)
        and all(
            isinstance(weights, Mapping | list | tuple) and weights for weights in schedule.values()
        )
    )


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def check_combinations(config: Configuration, world_size: int) -> list[str]:
    """Check settings that exclude each other."""
    problems = []
    if config.deterministic and config.embedded_mode not in ("auto", "deterministic"):
        problems.append(
            f"deterministic=True needs embedded_mode='deterministic', not {config.embedded_mode!r}"
        )
    if config.skip_solved and config.difficulty_schedule:
        problems.append(
            "skip_solved and difficulty_schedule both select the examples: give one of them"
        )
    if config.curriculum != "uniform":
        problems += [
            f"curriculum={config.curriculum!r} and {name} both select the examples: give one of"
            " them"
            for name in ("skip_solved", "difficulty_schedule", "env_weights")
            if getattr(config, name)
        ]
    length, tokens = config.max_seq_len, "other tokens"
    for name, content in {
        "max_tokens": "a prompt",
        "max_prompt_len": tokens,
        "max_completion_len": tokens,
    }.items():
        value = getattr(config, name)
        if isinstance(value, int) and isinstance(length, int) and value >= length:
            problems.append(
                f"{name} {value} leaves no room for {content} in max_seq_len {length}: lower one or"
                " raise the other"
            )
    if config.guided_regex is not None and config.server_url is None:
        problems.append(
            "guided_regex needs a server with constrained sampling; the embedded engine has none"
        )
    if config.truncated_sampling == "refuse" and config.reshaping:
        problems.append(
            f"truncated_sampling='refuse' and {', '.join(config.reshaping)}: tokens would not be"
            " sampled from the distribution that is trained"
        )
    further = {**config.sampling_args, **(config.sampling_args.get("extra_body") or {})}
    for name in sorted(SAMPLING_FIELDS & further.keys()):
        problems.append(
            f"sampling_args has {name!r}, which is a setting of the training: set {name} instead"
        )
    for tracker in trackers(config.report_to):
        if tracker not in TRACKERS:
            choices = (*TRACKERS, "auto", "none")
            problems.append(
                f"report_to has {tracker!r}{closest(tracker, choices)}; it may have"
                f" {', '.join(choices)}"
            )
    return problems


def check_reshaped_sampling(config: Configuration, world_size: int) -> list[str]:
    """Refuse losses and corrections that compare with μ as if π = μ at first, where top_p and the
    like reshape μ.

    π/μ is then the mass that sampling kept: right as a weight of a token, wrong as a distance from
    the old policy.
    """
    if not config.reshaping:
        return []
    names = ", ".join(config.reshaping)
    problems = [
        f"{name} takes the gap between sampler and trainer for an error, and {names} causes one on"
        f" purpose: leave {name} out"
        for name in ("geo_mask", "opsm_delta")
        if getattr(config, name) is not None
    ]
    loss = config.loss if isinstance(config.loss, str) else None
    is_anchored = loss in ANCHORED_ON_BATCH and config.anchor == "recomputed"
    if loss in (ANCHORED_ON_BATCH | ANCHORED_ON_SAMPLER) - WEIGHTED_BY_RATIO and not is_anchored:
        if loss in ANCHORED_ON_BATCH:
            fix = "leave anchor out"
        else:
            fix = f"use {', '.join(sorted(WEIGHTED_BY_RATIO))} or ppo"
        problems.append(
            f"with {names} the ratio π/μ of a token begins at the mass that sampling kept, and the"
            f" loss {loss!r} drops tokens whose ratio is far from 1: {fix}"
        )
    return problems


def check_inference(config: Configuration, world_size: int) -> list[str]:
    """Check the inference server and the weight updates."""
    problems = []
    inference, url = config.inference, config.inference_base_url
    if inference not in INFERENCE and not _is_url(inference):
        problems.append(
            f"inference is {inference!r}{closest(str(inference), INFERENCE)}; it must be"
            f" {', '.join(INFERENCE)} or the URL of a server, such as http://127.0.0.1:8000/v1"
        )
    if url is not None and not _is_url(url):
        problems.append(
            f"inference_base_url is {url!r}; it must be a URL, such as http://127.0.0.1:8000/v1"
        )
    if url is not None and inference not in ("auto", "vllm"):
        problems.append(
            f"inference is {inference!r} and inference_base_url {url!r}: give one of them"
        )
    if config.deterministic and config.server_url is not None:
        problems.append(
            "deterministic=True needs the embedded engine (inference='embedded'): a server's"
            " samples depend on its other requests"
        )
    every, lag = config.sync_every, config.max_off_policy_steps
    if isinstance(every, int) and isinstance(lag, int) and every > lag + 1:
        problems.append(
            f"sync_every is {every}, so that rollouts would be older than max_off_policy_steps ="
            f" {lag} allows; use at most {lag + 1}"
        )
    return problems


def _is_url(text: object) -> bool:
    """Return whether ``text`` is one URL or a comma-separated list."""
    return isinstance(text, str) and all(
        part.strip().startswith(("http://", "https://")) for part in text.split(",") if part.strip()
    )


def trackers(report_to: str | Iterable[str] | None) -> list[str]:
    """Return the trackers in ``report_to``; "auto" is wandb where it is installed and configured,
    else none."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    configured = (
        bool({"WANDB_API_KEY", "WANDB_MODE"} & os.environ.keys()) and find_spec("wandb") is not None
    )
    names = ["wandb" if name == "auto" and configured else name for name in names]
    return [name for name in names if name not in ("none", "auto")]


CHECKS: tuple[Check, ...] = (
    *(
        check_batch,
        check_mini_batch,
        check_fields,
        check_objective,
        check_anchor,
        check_components,
        check_teacher,
    ),
    *(
        check_quantize,
        check_roles,
        check_reference,
        check_iterations,
        check_credit,
        check_schedules,
        check_combinations,
    ),
    *(check_reshaped_sampling, check_inference),
)
