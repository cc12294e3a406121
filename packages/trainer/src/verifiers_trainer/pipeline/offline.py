"""Train on finished rollouts: of a saved run, of results in memory, or of columns of a dataset.

Rollouts with recorded token ids and log-probabilities use them, with the recorded policy as the
anchor: ``ratio/*`` measures its distance from the trained policy, and the loss bounds it. Text
without sampled ids is tokenised once with the chat template, and anchored on the policy when the
batch is built, so its ratio is 1 and the loss is likelihood weighted by the advantage.
``offline/recorded`` is the share of recorded tokens.

Rollouts with equal prompts are siblings. ``OfflineRollouts`` replaces the pipeline; nothing is
generated.

The loss "sft" imitates them: ``imitated`` selects which, each is trained by itself, and rewards are
not compared.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.clients.reply import token_fault
from verifiers.data.messages import normalize_messages
from verifiers.environments.single_turn import SingleTurnEnv
from verifiers.errors import ConfigError, DatasetError, NoLearningSignal
from verifiers.results import GenerateOutputs, load_results
from verifiers.results.retokenise import text_turns
from verifiers.results.rows import output_to_state
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.turn import Turn
from verifiers.rubrics import Rubric
from verifiers.runtime.json import encode_row
from verifiers.types import Messages
from verifiers_trainer.algorithm.advantages import Minus
from verifiers_trainer.algorithm.batch import Group, TrainBatch, build
from verifiers_trainer.algorithm.group import apply_length_rules
from verifiers_trainer.algorithm.samples import NOT_SAMPLED, is_overlong
from verifiers_trainer.algorithm.statistics import IMITATES, reward_histogram
from verifiers_trainer.pipeline.health import Unscored
from verifiers_trainer.pipeline.schedule import PipelineState, amid_batch, forget_batch
from verifiers_trainer.settings.batch_rules import UNCOMPARED
from verifiers_trainer.settings.config import RLConfig

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


log = logging.getLogger(__name__)

COLUMNS = ("prompts", "completions", "rewards")
FAILED, BELOW = "failed", "below min_reward, or of unknown reward"
WITHOUT_TOKENS, TRUNCATED, LONGER = "without tokens", "truncated", "longer than {}"
"""Why a rollout is not imitated."""
UNKNOWN_VERSION = -1
"""Policy version of tokens sampled in another run."""


def holds_rollouts(dataset: object) -> bool:
    """Whether ``dataset`` holds rollouts: results, saved runs, or columns of prompts, completions,
    rewards."""
    if isinstance(dataset, str | Path):
        return Path(dataset).exists()
    if isinstance(dataset, list | tuple):
        return bool(dataset) and all(
            isinstance(run, str | Path) and Path(run).exists() for run in dataset
        )
    names = getattr(dataset, "column_names", None) or (
        dataset if isinstance(dataset, Mapping) else ()
    )
    return isinstance(dataset, GenerateOutputs) or {"completions", "rewards"} <= set(names)


def read_groups(
    dataset: object,
    tokenizer: PreTrainedTokenizerBase,
    config: RLConfig,
    vocabulary: int | None = None,
) -> list[Group]:
    """The groups of finished rollouts, in the order of their first rollouts; of those to imitate
    one a rollout.

    ``vocabulary``: number of token ids of the model. Raises ``DatasetError`` when there are none,
    and for recorded tokens that the model has not; ``ConfigError`` for columns of different
    lengths.
    """
    runs = dataset if isinstance(dataset, list | tuple) else [dataset]
    siblings: dict[str, list[Rollout]] = {}
    for run in runs:
        results = load_results(run) if isinstance(run, str | Path) else run
        pairs = (
            _from_results(results, tokenizer, config)
            if isinstance(results, GenerateOutputs)
            else None
        )
        for prompt, record in pairs if pairs is not None else _from_columns(results, tokenizer):
            _check_tokens(record, vocabulary)
            key = hashlib.sha256(encode_row({"prompt": _plain(prompt)})).hexdigest()
            siblings.setdefault(key, []).append(apply_length_rules(record, config))
    if not siblings:
        raise DatasetError("the dataset of finished rollouts is empty: nothing to train on")
    groups = list(siblings.values())
    if config.component == "ce":
        groups = [[record] for record in imitated(groups, config)]
    return [Group(index, index, tuple(records)) for index, records in enumerate(groups)]


def _check_tokens(rollout: Rollout, vocabulary: int | None) -> None:
    for turn in rollout.turns:
        arrays = turn.prompt_ids, turn.completion_ids, turn.sampler_logprobs
        if fault := token_fault(*arrays, *(() if vocabulary is None else (vocabulary,))):
            raise DatasetError(
                f"a finished rollout of example {rollout.row['example_id']} cannot be trained on:"
                f" {fault[1]}; give rollouts that this model sampled, or their texts"
            )


def imitated(siblings_G: Sequence[Sequence[Rollout]], config: RLConfig) -> list[Rollout]:
    """The rollouts to imitate, by the settings ``SELECTING`` and the bounds on length; logs how
    many are left out.

    If an example has more than ``max_per_example``, those with the highest rewards, the first of
    equal rollouts. Raises ``DatasetError`` when none is left.
    """
    left_out: Counter[str] = Counter()
    selected: list[Rollout] = []
    for siblings in siblings_G:
        seen: set[bytes] = set()
        usable = []
        for rollout in siblings:
            reason = _why_not(rollout, seen, config)
            if reason is None:
                usable.append(rollout)
            else:
                left_out[reason] += 1
        best = sorted(
            usable, key=lambda rollout: math.inf if math.isnan(rollout.reward) else -rollout.reward
        )
        selected += best[: config.max_per_example]
        left_out["beyond max_per_example"] += len(best) - len(best[: config.max_per_example])
    total = sum(map(len, siblings_G))
    reasons = (
        ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        or "none left out"
    )
    if not selected:
        rollouts = [rollout for siblings in siblings_G for rollout in siblings]
        raise DatasetError(
            f"no rollout to imitate is left of {total}: {reasons};"
            f" {_remedy(max(left_out, key=left_out.__getitem__), rollouts, config)}"
        )
    log.info("imitates %d of %d rollouts: %s", len(selected), total, reasons)
    return selected


def _is_too_long(rollout: Rollout, config: RLConfig) -> bool:
    return is_overlong(rollout.turns, config.max_seq_len)


def _remedy(reason: str, rollouts: Sequence[Rollout], config: RLConfig) -> str:
    """What keeps rollouts that are left out for ``reason``, with the figure that would."""
    if reason == FAILED:
        return "generate them again, the command that did repeats those that failed"
    if reason == BELOW:
        best = max((r.reward for r in rollouts if not math.isnan(r.reward)), default=None)
        highest = "no reward is known" if best is None else f"the highest reward is {best:.3g}"
        return f"{highest}: set min_reward no higher, or leave it out"
    if reason == WITHOUT_TOKENS:
        return "their completions are empty"
    if reason == TRUNCATED:
        return "set mask_truncated_completions=False to imitate them all the same"
    turns = [rollout.turns for rollout in rollouts if rollout.turns]
    sizes = [max(turn.num_tokens for turn in of_one) for of_one in turns]
    prompts = [of_one[0].num_prompt for of_one in turns]
    lengths = {
        "max_seq_len": sizes,
        "max_completion_len": [a - b for a, b in zip(sizes, prompts, strict=True)],
    }
    (name,) = (name for name in lengths if reason == LONGER.format(name))
    shortest, longest = min(lengths[name]), max(lengths[name])
    return (
        f"{name} is {getattr(config, name)}, and they have {shortest:,} to {longest:,} tokens: set"
        f" {name}={longest} for all of them"
    )


def _why_not(rollout: Rollout, seen: set[bytes], config: RLConfig) -> str | None:
    """Why a rollout is not imitated; None when it is. ``seen`` has the tokens of its siblings so
    far."""
    if rollout.error is not None:
        return FAILED
    if config.min_reward is not None and not rollout.reward >= config.min_reward:
        return BELOW
    if not rollout.num_sampled:
        return WITHOUT_TOKENS
    if is_overlong(rollout.turns, config.max_seq_len, config.max_completion_len):
        return LONGER.format(
            "max_seq_len" if _is_too_long(rollout, config) else "max_completion_len"
        )
    if config.mask_truncated_completions and rollout.is_truncated:
        return TRUNCATED
    tokens = b"".join(
        np.asarray(turn.completion_ids, np.int32).tobytes() + b"|" for turn in rollout.turns
    )
    if config.drop_duplicates and tokens in seen:
        return "duplicates"
    seen.add(tokens)
    return None


def _from_results(
    results: GenerateOutputs, tokenizer: PreTrainedTokenizerBase, config: RLConfig
) -> Iterator[tuple[Any, Rollout]]:
    sampled_at = (results.metadata.get("sampling_args") or {}).get("temperature")
    imitates = config.component == "ce"  # no ratio to the policy that sampled
    if not imitates and sampled_at is not None and sampled_at != config.temperature:
        log.warning(
            "the rollouts were sampled at temperature %g and are trained at %g: set temperature=%g,"
            " or every ratio is wrong",
            sampled_at,
            config.temperature,
            sampled_at,
        )
    if "states" in results:
        states = results["states"]
    else:
        states = [output_to_state(output) for output in results.outputs]
    for state in states:
        record = state.rollout()
        turns = tuple(_of_another_run(turn, imitates) for turn in record.turns)
        if not turns:
            if record.turn_sum and config.credit == "turn" and not imitates:
                raise DatasetError(
                    f"credit='turn' needs the rewards of the turns, which {record.turn_sum!r} added"
                    f" up, and a rollout of example {record.row['example_id']} was saved without its"
                    ' turns: save them with state_columns=["trajectory"] (vf-eval -C trajectory),'
                    " or set credit='rollout'"
                )
            texts = state["prompt"], state["completion"], tokenizer, state["tool_defs"]
            turns = _tokenised(*texts)
        yield state["prompt"], replace(record, transcript=Transcript(turns))


def _from_columns(
    dataset: Any, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Any, Rollout]]:
    columns = {name: list(dataset[name]) for name in COLUMNS if name in _names(dataset)}
    sizes = {name: len(values) for name, values in columns.items()}
    if set(sizes) != set(COLUMNS) or len(set(sizes.values())) > 1:
        counts = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise ConfigError(
            "finished rollouts need prompts, completions and rewards, as many of each; the dataset"
            f" has {counts}"
        )
    for prompt, completion, reward in zip(*columns.values(), strict=True):
        turns = _tokenised(prompt, completion, tokenizer)
        value = math.nan if reward is None else float(reward)
        yield (
            prompt,
            Rollout(Transcript(turns), value, row={"prompt": prompt}, completion=completion),
        )


def _names(dataset: Any) -> Sequence[str]:
    return getattr(dataset, "column_names", None) or list(dataset)


def _of_another_run(turn: Turn, imitates: bool) -> Turn:
    """The turn with ``UNKNOWN_VERSION``; ``NOT_SAMPLED`` when it has no log-probabilities, or none
    is compared with."""
    has_logprobs = bool(np.any(turn.sampler_logprobs)) or not len(turn.completion_ids)
    version = UNKNOWN_VERSION if has_logprobs and not imitates else NOT_SAMPLED
    tokens = turn.prompt_ids, turn.completion_ids, turn.sampler_logprobs
    again = Turn(*tokens, version, turn.is_truncated, turn.role)
    again.env_reward = turn.env_reward
    return again


def _tokenised(
    prompt: Messages,
    completion: Messages | None,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> tuple[Turn, ...]:
    """The turns of a text, without what the template adds after the end token."""
    turns = []
    for turn in text_turns(prompt, completion or "", tools, tokenizer):
        prompt_ids, ids, logprobs = turn.prompt_ids, turn.completion_ids, turn.sampler_logprobs
        ends = np.flatnonzero(ids == tokenizer.eos_token_id)
        size = int(ends[-1]) + 1 if len(ends) else len(ids)
        if size and len(prompt_ids):
            turns.append(Turn(prompt_ids, ids[:size], logprobs[:size], NOT_SAMPLED))
    return tuple(turns)


def _plain(prompt: object) -> Any:
    if isinstance(prompt, str):
        return prompt
    messages: Any = normalize_messages(prompt)
    return [dict(message) for message in messages]


def rows_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The prompts as rows of a dataset."""
    prompts = [group.rollouts[0].row["prompt"] for group in groups]
    rows = [{"question" if isinstance(prompt, str) else "prompt": prompt} for prompt in prompts]
    return [row | {"example_id": group.example_id} for row, group in zip(rows, groups, strict=True)]


def stand_in(rows: Sequence[Mapping[str, object]]) -> SingleTurnEnv:
    """An environment of the prompts without rewards, for a run without an environment."""
    return SingleTurnEnv(dataset=[dict(row) for row in rows], rubric=Rubric())


class OfflineRollouts:
    """The groups as batches of at least ``batch_size`` rollouts, pass after pass; has
    ``PipelineThread``'s methods.

    If fewer than half of the groups have two known rewards, the baseline is the mean of the
    dataset. Raises ``ConfigError`` if the advantage needs siblings then.
    """

    def __init__(self, groups: Sequence[Group], config: RLConfig):
        self.groups, self.state, self.version = list(groups), PipelineState(), 0
        self.config, self._drawn = config.private_copy(), 0
        self.config.derive(rollouts_per_example=max(len(group.rollouts) for group in groups))
        paired = sum(int((~np.isnan(group.rewards)).sum()) >= 2 for group in self.groups)
        if 2 * paired < len(self.groups) and config.advantage not in UNCOMPARED:
            if config.advantage == "best":
                raise ConfigError(
                    f"advantage='best' trains the best of siblings, and {paired} of"
                    f" {len(self.groups)} prompts have two rollouts with known rewards: select"
                    " rollouts by loss='sft' and min_reward"
                )
            mean = float(np.nanmean(np.concatenate([group.rewards for group in self.groups])))
            self.config.derive(advantage=Minus(mean), credit="rollout")
            log.warning(
                "%d of %d prompts have two rollouts with known rewards: the baseline is the mean of"
                " the dataset, %.4g",
                paired,
                len(self.groups),
                mean,
            )
        rewards = np.concatenate([group.rewards for group in self.groups])
        differ = len(np.unique(rewards[~np.isnan(rewards)])) > 1
        keeps = config.zero_variance == "keep"
        live = [group for group in self.groups if keeps or not group.is_dead(self.config)]
        self._live = live if differ or config.component != "rl" else []
        turns = [turn for group in self._live for record in group.rollouts for turn in record.turns]
        tokens = sum(len(turn.completion_ids) for turn in turns)
        count = sum(
            len(turn.completion_ids) for turn in turns if np.max(turn.version) != NOT_SAMPLED
        )
        self._recorded = count / max(1, tokens)
        anchor = (
            "recorded"
            if count == tokens
            else "recomputed"
            if not count
            else "recorded and recomputed"
        )
        if config.component == "rl":
            log.info(
                "offline/anchor = %s: %d of %d tokens have recorded log-probabilities",
                anchor,
                count,
                tokens,
            )

    @property
    def num_batches(self) -> int:
        """Batches of a pass."""
        return len(self._pass(0))

    @functools.cached_property
    def digest(self) -> str:
        """The hash of all tokens and rewards, which must match when a training is resumed."""
        hashed = hashlib.sha256()
        for rollout in (rollout for group in self.groups for rollout in group.rollouts):
            hashed.update(repr(float(rollout.reward)).encode())
            for ids in (
                ids for turn in rollout.turns for ids in (turn.prompt_ids, turn.completion_ids)
            ):
                hashed.update(np.asarray(ids, np.int32).tobytes() + b"|")
        return hashed.hexdigest()[:16]

    def _pass(self, number: int) -> list[list[Group]]:
        order = list(self._live)
        if self.config.shuffle_dataset:
            random.Random(f"{self.config.seed}:{number}").shuffle(order)
        batches: list[list[Group]] = []
        for group in order:
            if (
                not batches
                or sum(len(member.rollouts) for member in batches[-1]) >= self.config.batch_size
            ):
                batches.append([])
            batches[-1].append(group)
        return batches

    # --- methods of PipelineThread ----------------------------------------------------------------

    def start(self, version: int = 0, state: PipelineState | None = None) -> None:
        self.version, self.state = version, state or self.state
        forget_batch(self.state, version, self.config)

    def next_batch(self) -> TrainBatch:
        """The next groups. Raises ``NoLearningSignal`` when no group has two different rewards."""
        for _ in range(max(1, self.num_batches if self._live else 1)):
            if not self._live:
                break
            number, position = divmod(self.state.next_index, self.num_batches)
            groups = self._pass(number)[position]
            self._drawn = self.state.next_index
            self.state.next_index += 1
            batch = build(groups, [], self.config, self.config.world_size)
            if batch.num_tokens:
                self.state.delivered += 1
                return self._numbered(batch, number, position)
        unknown = str(Unscored(self.groups))
        raise NoLearningSignal(
            "no learning signal: no group of the finished rollouts has two different rewards and"
            f" tokens within max_seq_len{unknown and f' ({unknown})'}",
            histogram=reward_histogram(self.groups),
        )

    def _numbered(self, batch: TrainBatch, number: int, position: int) -> TrainBatch:
        """The batch with groups numbered by progress through the data."""
        last_index = (
            number * len(self.groups)
            + math.ceil((position + 1) / self.num_batches * len(self.groups))
            - 1
        )
        groups = tuple(replace(group, index=last_index) for group in batch.groups)
        stats = batch.stats | {"offline/recorded": self._recorded, "batch/short": 0}
        if self.config.component == "ce":
            stats[IMITATES] = 1
        stats |= {"groups/dropped_stale": 0, "staleness/mean": math.nan, "staleness/max": math.nan}
        stats |= {"batch/fill": 1.0, "time/pack": 0.0, "time/wait_generation": 0.0}
        updates = tuple(self._numbered(update, number, position) for update in batch.updates)
        return replace(batch, groups=groups, stats=stats, updates=updates)

    def set_version(self, version: int, served: int | None = None) -> None:
        self.version = version

    def settle(self) -> None:
        """No-op: nothing runs in the background."""

    def snapshot(self) -> PipelineState:
        if not amid_batch(self.state, self.version, self.config):
            return replace(self.state)
        return replace(self.state, next_index=self._drawn, delivered=self.state.delivered - 1)

    last_state = snapshot

    def close(self) -> None:
        """No-op: nothing runs in the background."""
