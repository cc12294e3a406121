"""``process_env_results``: finished rollouts as token rows with masks, for trainers without an
adapter.

Ids come from the recorded turns; where a rollout has none, its text is tokenised again
(``source="retokenised"``), and the ids may differ from the sampled ids. Only ``tensors`` pads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers import compat
from verifiers.data.images import image_parts, image_url
from verifiers.errors import ConfigError, ScoringError
from verifiers.results.outputs import GenerateOutputs
from verifiers.results.rows import RolloutOutput
from verifiers.rollouts.transcript import Transcript, branches
from verifiers.rollouts.turn import Turn
from verifiers.runtime.json import encode_row
from verifiers.runtime.suggest import check_keywords
from verifiers.storage.files import atomic_write
from verifiers.types import AttributeDict

if TYPE_CHECKING:
    import numpy.typing as npt

LISTS = (
    "prompt_ids prompt_mask completion_ids completion_mask completion_logprobs rewards is_truncated"
    " source rollout_index"
).split()


class ProcessedOutputs(AttributeDict):
    """Lists with one item per token row, by key and attribute; iterating gives one dict per row.

    ``prompt_mask`` is all 0 and ``completion_mask`` 1 on the tokens to learn from;
    ``completion_logprobs`` is None for retokenised rows; ``rollout_index`` is the index of the
    row's rollout.

    >>> from verifiers.testing import ScriptedClient
    >>> env = vf.SingleTurnEnv(dataset=[{"question": "hi"}])
    >>> results = env.evaluate(ScriptedClient("yes", tokens=True), "m")
    >>> rows = env.process_env_results(
    ...     results.prompt, results.completion, results.state, results.reward, tokenizer=None
    ... )
    >>> rows.source, len(rows.completion_ids[0]) == len(rows["completion_logprobs"][0])
    (['sampled'], True)
    """

    def __init__(self, **lists: Sequence[object]):
        super().__init__({name: lists.get(name, []) for name in LISTS})

    def __iter__(self) -> Iterator[dict[str, object]]:  # type: ignore[override]  # rows, not the names of the columns
        return (
            dict(zip(LISTS, values, strict=True)) for values in zip(*self.values(), strict=True)
        )

    def __len__(self) -> int:
        return len(self["rewards"])

    def __bool__(self) -> bool:
        return bool(self["rewards"])

    def tensors(self, pad_token_id: int) -> dict[str, object]:
        """Padded torch tensors: prompts on the left, completions on the right.

        ``prompt_ids``, ``prompt_attention_mask`` [N, P]; ``completion_ids``,
        ``completion_attention_mask``, ``completion_mask`` [N, C] int64; ``completion_logprobs`` [N,
        C] float32, NaN if there are none; ``rewards`` [N] float32.
        """
        import torch

        prompts, completions = self["prompt_ids"], self["completion_ids"]
        logprobs = [
            [math.nan] * len(ids) if values is None else values
            for values, ids in zip(self["completion_logprobs"], completions, strict=True)
        ]
        prompt_ones = [[1] * len(ids) for ids in prompts]
        completion_ones = [[1] * len(ids) for ids in completions]
        arrays = {
            "prompt_ids": _padded(prompts, pad_token_id, np.int64, at_left=True),
            "prompt_attention_mask": _padded(prompt_ones, 0, np.int64, at_left=True),
            "completion_ids": _padded(completions, pad_token_id, np.int64),
            "completion_attention_mask": _padded(completion_ones, 0, np.int64),
            "completion_mask": _padded(self["completion_mask"], 0, np.int64),
            "completion_logprobs": _padded(logprobs, math.nan, np.float32),
            "rewards": np.asarray(self["rewards"], np.float32),
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def process_env_results(
    prompts: Sequence[object],
    completions: Sequence[object],
    states: Sequence[Mapping[str, object]],
    rewards: Sequence[float],
    tokenizer: object = None,
    max_seq_len: int = -1,
    mask_env_responses: bool = True,
    mask_truncated_completions: bool = False,
    zero_truncated_completions: bool = False,
    unknown_reward: str = "nan",
    allow_forks: bool = False,
    **older: object,
) -> ProcessedOutputs:
    """Convert columns of rollouts to token rows.

    A rollout whose turns do not continue each other forks; returns its last branch, or all with
    ``allow_forks``. ``max_seq_len`` > 0 cuts the tail of completions, never a prompt. Truncated
    rows can be masked out or given reward
    0. A row of unknown reward has an all-zero mask ("nan"), is left out ("drop"), or is an error
      ("raise").

    *Raises* ConfigError for columns of unequal length, an unknown option, or text without a
    tokenizer; ScoringError with "raise".
    """
    options = compat.rename(older, compat.TOKENIZER, "process_env_results")
    check_keywords(options, ("tokenizer",), "process_env_results")
    tokenizer = options.get("tokenizer", tokenizer)
    if unknown_reward not in ("nan", "drop", "raise"):
        raise ConfigError(
            f'unknown_reward is {unknown_reward!r}; it must be "nan", "drop" or "raise"'
        )
    if len({len(prompts), len(completions), len(states), len(rewards)}) != 1:
        raise ConfigError(
            "process_env_results needs as many prompts as completions, states and rewards"
        )
    outputs = ProcessedOutputs(**{name: [] for name in LISTS})
    for index, (prompt, completion, state, reward) in enumerate(
        zip(prompts, completions, states, rewards, strict=True)
    ):
        unknown = reward is None or math.isnan(reward)
        if unknown and unknown_reward == "raise":
            raise ScoringError(
                f"rollout {index} has an unknown reward", example_id=state.get("example_id")
            )
        if unknown and unknown_reward == "drop":
            continue
        turns = _recorded_turns(state)
        source = "sampled" if turns else "retokenised"
        turns = turns or _turns_of_text(prompt, completion or [], state, tokenizer, index)
        merged = branches(turns)
        ends_last = [branch for branch in merged if branch.turns[-1][0] == len(turns) - 1]
        for branch in merged if allow_forks else ends_last:
            start, size = branch.num_prompt, len(branch.token_ids)
            end = max(start, min(size, max_seq_len)) if max_seq_len > 0 else size
            truncated = end < size or bool(state.get("is_truncated"))
            mask = branch.sampled[start:end] if mask_env_responses else np.ones(end - start, bool)
            if unknown or (truncated and mask_truncated_completions):
                mask = np.zeros_like(mask)
            value = math.nan if unknown else float(reward)
            if truncated and zero_truncated_completions and not unknown:
                value = 0.0
            logprobs = branch.sampler_logprobs
            values = (
                branch.token_ids[:start].tolist(),
                [0] * start,
                branch.token_ids[start:end].tolist(),
                mask.astype(int).tolist(),
                None if logprobs is None or source != "sampled" else logprobs[start:end].tolist(),
                value,
                truncated,
                source,
                index,
            )
            for name, column_value in zip(LISTS, values, strict=True):
                outputs[name].append(column_value)
    return outputs


process_env_results_vllm = process_env_results


def export_trajectories(results: GenerateOutputs, path: str | Path) -> int:
    """Write one JSON line per token row, for trainers without an adapter; return their number.

    Args:
        results: Results with recorded token ids; also those of ``completions/step-N.jsonl`` of a
            training.
        path: The file to write.

    Keys: ``prompt_ids completion_ids completion_mask logprobs versions reward advantage example_id
    rollout``, and if there are any ``images``, the data URLs of those that the ids have
    placeholders of, and ``fork``, as the rollout has it; unknown numbers are null, and the rows of
    one rollout share ``rollout``. A rollout without a turn has no row.
    ``integrations.trajectories`` reads the file. *Raises* ConfigError when a rollout has no
    recorded token ids.

    >>> from verifiers.testing import ScriptedClient
    >>> import json, tempfile
    >>> results = vf.SingleTurnEnv(dataset=[{"question": "hi"}]).evaluate(ScriptedClient("yes", tokens=True), "m")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = vf.export_trajectories(results, f"{folder}/rows.jsonl")
    ...     row = json.loads(open(f"{folder}/rows.jsonl").readline())
    >>> len(row), row["completion_mask"] == [1] * len(row["completion_ids"]), row["rollout"]
    (9, True, 0)
    """
    lines = []
    for index, output, turns in _with_recorded_turns(results):
        for branch in branches(turns):
            start, logprobs = branch.num_prompt, branch.sampler_logprobs
            fields = {
                "prompt_ids": branch.token_ids[:start],
                "completion_ids": branch.token_ids[start:],
                "completion_mask": branch.sampled[start:].astype(int),
                "logprobs": None if logprobs is None else logprobs[start:],
                "versions": np.where(branch.sampled, branch.versions, -1)[start:],
                "reward": output["reward"],
                "advantage": output["advantage"],
                "example_id": output["example_id"],
                "rollout": index,
            }
            if images := _stored_images(output, turns, branch.turns[-1][0]):
                fields["images"] = images
            if output.get("fork"):
                fields["fork"] = dict(output["fork"])
            lines.append(encode_row(fields) + b"\n")
    atomic_write(Path(path), b"".join(lines))
    return len(lines)


def _with_recorded_turns(
    results: GenerateOutputs,
) -> Iterator[tuple[int, RolloutOutput, Sequence[Turn]]]:
    """(index, rollout, its turns) of each that has a turn. *Raises* ConfigError for one without token
    ids."""
    if any("trained" in output for output in results.outputs):
        for index, output in enumerate(results.outputs):
            if output.get("turn_tokens"):
                yield index, output, _turns_of_training(output["turn_tokens"], index)
            elif output.get("completion_tokens") != 0:
                raise ConfigError(
                    f"rollout {index} of this step of a training has no token ids, which a step keeps"
                    " of log_tokens sampled tokens and of what it trained: raise log_tokens, or"
                    " leave the others out: results.filter(lambda rollout:"
                    ' rollout.get("turn_tokens"))'
                )
        return
    for index, (output, state) in enumerate(zip(results.outputs, results["states"], strict=True)):
        if not state["trajectory"]:  # it failed before the first completion
            continue
        turns = _recorded_turns(state)
        if not turns:
            raise ConfigError(
                f"rollout {index} of the results has no token ids; sample from a server that"
                " returns them"
            )
        yield index, output, turns


def _turns_of_training(records: Sequence[Mapping[str, Any]], index: int) -> list[Turn]:
    """The turns of ``turn_tokens``, whose prompts lack the tokens of the turn before."""
    turns: list[Turn] = []
    try:
        for record in records:
            new, before = record["prompt_ids"], turns[-1].full_ids() if turns else ()
            is_whole = record["prompt_tokens"] == len(new)
            turns.append(
                Turn(
                    new if is_whole else [*before, *new],
                    record["completion_ids"],
                    record["completion_logprobs"],
                    record["version"],
                    previous=turns[-1] if turns else None,
                )
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"turn_tokens of rollout {index} are damaged: {error!r}") from error
    return turns


def _stored_images(output: RolloutOutput, turns: Sequence[Turn], number: int) -> list[str]:
    """The data URLs of the images that a turn was shown; the images at addresses may be others by
    now. *Raises* ConfigError where a training's file does not say it."""
    seen = turns[number].prompt
    conversation = [] if isinstance(output["completion"], str) else [*(output["completion"] or ())]
    conversation = (
        conversation
        if isinstance(output["prompt"], str)
        else [*(output["prompt"] or ()), *conversation]
    )
    if (
        not seen and next(image_parts(conversation), None) is not None
    ):  # a training keeps tokens alone
        num_before = len(output["prompt"] or ())
        answers = [n for n, message in enumerate(conversation) if message.role == "assistant"]
        answers = [n for n in answers if n >= num_before]
        if len(answers) != len(turns):
            raise ConfigError(
                "a rollout of this step of a training has images, and turns that are no messages of"
                " its conversation, so that nothing says which images these were shown"
            )
        seen = conversation[: answers[number]]
    urls = map(image_url, image_parts(seen))
    return [url for url in urls if url is not None and url.startswith("data:")]


def _recorded_turns(state: Mapping[str, Any]) -> Sequence[Turn]:
    """The turns of a rollout; none unless every turn has tokens."""
    turns = Transcript(state.get("trajectory") or ()).turns
    return turns if all(turn.num_prompt for turn in turns) else ()


def _turns_of_text(
    prompt: Any, completion: Any, state: Mapping[str, Any], tokenizer: object, index: int
) -> Sequence[Turn]:
    if tokenizer is None:
        raise ConfigError(
            f"rollout {index} has no recorded token ids; pass tokenizer= to tokenise its text"
        )
    from verifiers.results.retokenise import text_turns

    return text_turns(prompt, completion, state.get("tool_defs"), tokenizer)


def _padded(
    rows: Sequence[Sequence[object]], pad: float, dtype: npt.DTypeLike, at_left: bool = False
) -> np.ndarray:
    width = max((len(row) for row in rows), default=0)
    padded = np.full((len(rows), width), pad, dtype)
    for line, row in zip(padded, rows, strict=True):
        line[slice(width - len(row), None) if at_left else slice(len(row))] = row
    return padded
