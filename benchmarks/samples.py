"""P14: the cost of turning one finished rollout into training tokens, for 1 to 32 turns.

    python benchmarks/samples.py [--quick] [--pairs 5] [--store]

Ours is the trainer's path: ``State.rollout`` takes the turns from the state, ``rollout_samples``
merges those that share a prefix into samples with loss mask, log-probabilities, versions and
advantages, as arrays. It is compared with

* keeping ids: per turn append the new tokens of the prompt, the completion, a mask and the
  log-probabilities to Python lists, assuming that prompts continue each other. No arrays, checks,
  versions or advantages: the minimum;
* keeping ids, as arrays: the same lists, converted at the end to the arrays that training needs;
* retokenising: one ``apply_chat_template`` of the tokenizer of ``builtin:tiny`` over the whole
  conversation.

A turn is 64 new prompt tokens and 256 sampled ones (retokenising: as many characters). "Linear" is
the cost per token at 32 turns over that at 4.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from _measure import (
    Cost,
    Report,
    Stopwatch,
    interleaved,
    median,
    options,
    parse,
    print_table,
    ratio,
    versions,
)

from verifiers.rollouts.state import State, TrajectoryStep
from verifiers.types import AssistantMessage, ResponseTokens, UserMessage

TURNS = (1, 4, 16, 32)
NEW_PROMPT, SAMPLED = 64, 256
OVER_KEEPING, GROWTH = 2.0, 1.3
OURS, LISTS, ARRAYS, RETOKENISED = "ours", "keeping ids", "keeping ids, as arrays", "retokenising"


@dataclass(frozen=True, slots=True)
class SentTurn:
    """One turn as a server sends it, in plain lists."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]


def conversation(num_turns: int) -> tuple[list[SentTurn], State]:
    """One rollout twice: as the server sent it, and as the finished state."""
    turns: list[SentTurn] = []
    state = State(prompt=[UserMessage("q" * NEW_PROMPT)], answer="")
    ids: list[int] = []
    messages = list(state["prompt"])
    for turn in range(num_turns):
        ids = ids + [(turn * 7 + i) % 97 for i in range(NEW_PROMPT)]
        completion = [(turn * 5 + i) % 89 for i in range(SAMPLED)]
        logprobs = [-0.01 * (i % 50) for i in range(SAMPLED)]
        turns.append(SentTurn(ids, completion, logprobs))
        arrays = (
            np.array(ids, np.int32),
            np.array(completion, np.int32),
            np.array(logprobs, np.float32),
        )
        reply = [AssistantMessage("a" * SAMPLED)]
        previous = state["trajectory"][-1] if turn else None
        state["trajectory"].append(
            TrajectoryStep(messages, reply, tokens=ResponseTokens(*arrays), previous=previous)
        )
        ids = ids + completion
        messages = [*messages, *reply, UserMessage("u" * NEW_PROMPT)]
    state["completion"], state["reward"], state["metrics"] = messages[1:-1], 1.0, {"correct": 1.0}
    return turns, state


def append_ids(turns: list[SentTurn]) -> tuple[list[int], list[int], list[float]]:
    """Ids, loss mask and log-probabilities by appending."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for turn in turns:
        new = turn.prompt_ids[len(ids) :]
        ids += new + turn.completion_ids
        mask += [0] * len(new) + [1] * len(turn.completion_ids)
        logprobs += [0.0] * len(new) + turn.logprobs
    return ids, mask, logprobs


def append_ids_as_arrays(turns: list[SentTurn]) -> tuple[np.ndarray, ...]:
    """``append_ids``, then int32, bool and float32 arrays."""
    ids, mask, logprobs = append_ids(turns)
    return np.array(ids, np.int32), np.array(mask, bool), np.array(logprobs, np.float32)


def sample_builder() -> Callable[[State], Any]:
    """From a finished state to the trainer's samples. Imported on use, since the trainer imports
    torch."""
    from verifiers_trainer.algorithm.samples import rollout_samples

    return lambda state: rollout_samples(state.rollout().turns, 0.5, rollout=3, group=1)


def retokeniser() -> Callable[[Any], Any]:
    """From messages to ids by the tokenizer of ``builtin:tiny``. Importing takes seconds, so
    ``--quick`` skips it."""
    from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer()
    tokenizer.model_max_length = 10**9  # it warns about longer texts
    return tokenizer.apply_chat_template


def repeated(function: Callable[[Any], Any], argument: Any, num_times: int) -> Callable[[], Cost]:
    """Call ``function`` ``num_times`` times."""

    def run() -> Cost:
        with Stopwatch() as watch:
            for _ in range(num_times):
                function(argument)
        return watch.cost

    return run


def check(train_ready: Callable[[State], Any], turns: list[SentTurn], state: State) -> None:
    """Check that both ways give one sample with the same tokens."""
    (sample,) = train_ready(state).samples
    ids, mask, logprobs = append_ids(turns)
    assert sample.token_ids.tolist() == ids
    assert sample.loss_mask.tolist() == mask
    assert np.allclose(sample.sampler_logprobs, logprobs)


def main() -> None:
    args = parse(options(__doc__))
    train_ready = sample_builder()
    retokenise = None if args.quick else retokeniser()
    # torch creates half a million objects, which collections before each run would scan
    gc.freeze()
    report = Report("P14", args)
    print(versions("verifiers-trainer", "numpy", "tokenizers", "transformers"))
    per_token: dict[int, float] = {}
    rows, over = [], {}
    for num_turns in TURNS:
        turns, state = conversation(num_turns)
        check(train_ready, turns, state)
        messages = [*state["prompt"], *state["completion"]]
        num_times = max(3, (200 if args.quick else 4000) // num_turns)
        num_slow = max(1, num_times // 20)
        runs = {
            LISTS: repeated(append_ids, turns, num_times),
            ARRAYS: repeated(append_ids_as_arrays, turns, num_times),
            OURS: repeated(train_ready, state, num_times),
        }
        if retokenise is not None:
            runs[RETOKENISED] = repeated(retokenise, messages, num_slow)
        costs = interleaved(runs, args.pairs)
        counts = {name: num_slow if name == RETOKENISED else num_times for name in runs}
        over[num_turns] = ratio(costs[OURS], costs[LISTS], "cpu_s")
        per_token[num_turns] = (
            median(costs[OURS], "cpu_s") / num_times / (num_turns * (NEW_PROMPT + SAMPLED))
        )
        rows.append(
            [
                str(num_turns),
                *(f"{median(costs[name], 'cpu_s') / counts[name] * 1e3:.3f}" for name in runs),
                f"{over[num_turns]:.2f}",
                f"{ratio(costs[OURS], costs[ARRAYS], 'cpu_s'):.2f}",
            ]
        )
    header = ["turns", *(f"{name} ms" for name in runs), "ours/keeping", "ours/arrays"]
    print_table(f"one rollout into training tokens, CPU, {args.pairs} pairs", header, rows)
    for num_turns in TURNS:
        report.figure(
            f"{num_turns} turns, over keeping ids", over[num_turns], to_reach=OVER_KEEPING
        )
    report.figure(
        "per token at 32 turns over 4 turns", per_token[32] / per_token[4], to_reach=GROWTH
    )
    report.close()


if __name__ == "__main__":
    main()
