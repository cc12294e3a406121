"""``RewardMonitor``: watches the sampled rollouts of a run for a reward that is paid without
solving the task, and the policy's probability of the cheap replies that are paid.

No model is asked and nothing is scored again: the rollouts are read as they are (``reward_signs``),
and every ``EVERY`` policy versions one forward pass over at most ``MAX_TOKENS`` tokens computes the
log-probability of cheap replies. These are the replies that pay by the environment's certificate
(``vf-audit --certify``), and those that were paid in a sampled rollout of this run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from verifiers.checks.audit.certificate import paid_non_solutions
from verifiers.checks.audit.recognition import Recogniser
from verifiers.data.examples import Example
from verifiers.data.images import image_parts
from verifiers.errors import RewardHacked
from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.algorithm.group import Group
from verifiers_trainer.engines.http.chat import ChatFormat
from verifiers_trainer.policy.preparation import prompt_of
from verifiers_trainer.policy.scoring import reply_logprobs
from verifiers_trainer.run.context import TrainingRun
from verifiers_trainer.run.reward_signs import Signs, numbers_of, signs_of, solution_reward
from verifiers_trainer.run.reward_watch import RewardWatch

log = logging.getLogger(__name__)

EVERY = 4
"""Policy versions from one forward pass over cheap replies to the next."""
NUM_PROMPTS = 8
"""Examples whose cheap replies are scored."""
MAX_TOKENS = 4096
"""Tokens of that pass."""
MAX_CHARS = 200
"""Characters of a cheap reply that is scored."""
MAX_SHARE = 0.01
"""Share of the run's time from which the pass is left out, but for the first ``NUM_ALWAYS``."""
NUM_ALWAYS = 64


class RewardMonitor:
    """What is known of how the reward of a run is earned; on every rank, and rank 0 alone reads
    rollouts."""

    def __init__(self, run: TrainingRun):
        self._run = run
        self._watch = RewardWatch()
        self._recognisers: dict[int, Recogniser] = {}
        self._examples: dict[Any, Example] = {}
        self._paid: set[str] | None = None
        """Names of the cheap replies that are paid; None before the certificate was read."""
        self._replies: list[tuple[np.ndarray, np.ndarray]] = []
        """(prompt, reply) that are scored: first the right reply of each prompt."""
        self._prompt_R: list[int] = []
        """Which prompt each of them answers."""
        self._num_right = 0
        self._scored_names: frozenset[str] | None = None
        self._num_scored, self._spent_s, self._began = 0, 0.0, time.monotonic()
        self._hacked = ""

    @property
    def is_on(self) -> bool:
        """Whether the run is watched: its rewards are the policy's own, and the setting asks for
        it."""
        settings = self._run.settings
        is_own = self._run.offline is None and settings.component == "rl"
        return settings.on_reward_hacking != "ignore" and is_own

    def require_sound(self) -> None:
        """Raise ``RewardHacked`` if a behaviour was shown and ``on_reward_hacking`` is "stop"."""
        if self._hacked and self._run.settings.on_reward_hacking == "stop":
            raise RewardHacked(
                f"{self._hacked}. Training stops (on_reward_hacking='stop'); correct the reward and"
                " begin a new run, or resume with on_reward_hacking='warn'",
                behaviour=self._hacked.partition(":")[0],
            )

    def resume(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Go on from the metrics of the steps so far."""
        self._watch = RewardWatch()
        for line in lines:
            if "hacking/right" in line or "reward/success" in line:
                self._watch.add(line)

    # --- the sampled rollouts ---------------------------------------------------------------------

    def measure(
        self, batch: TrainBatch
    ) -> tuple[dict[str, float], dict[tuple[int, int], list[str]]]:
        """The metrics ``hacking/*`` of all rollouts of a whole batch, and (index of the group,
        sibling) -> those of the behaviours that a rollout shows."""
        groups = [*batch.groups, *batch.discarded]
        signs = signs_of(groups, self._recogniser_of, self._example_of)
        rewards = signs.reward_N[~np.isnan(signs.reward_N)]
        solution = solution_reward(groups, max([self._watch.best, *rewards.tolist()]))
        masks = signs.masks(solution)
        self._note_paid(signs, masks["hacking/cheap_replies"])
        behaviours: dict[tuple[int, int], list[str]] = {}
        siblings = [(g.index, sibling) for g in groups for sibling in range(len(g.rollouts))]
        for name, mask_N in masks.items():
            for number in np.flatnonzero(mask_N):
                behaviours.setdefault(siblings[number], []).append(name)
        return numbers_of(signs, solution), behaviours

    def look(self, numbers: Mapping[str, Any]) -> dict[str, str]:
        """Add the metrics of a step; the behaviours that the run shows, each with its sentence."""
        active = self._watch.add(numbers)
        for name, sentence in active.items():
            self._hacked = self._hacked or f"{name}: {sentence}"
        return active

    def _note_paid(self, signs: Signs, is_paid_N: np.ndarray) -> None:
        if self._paid is not None:
            self._paid |= set(signs.cheap_N[is_paid_N].tolist())

    def _recogniser_of(self, row: Mapping[str, object]) -> Recogniser:
        env = self._run.env.for_row(row)
        if id(env) not in self._recognisers:
            examples = [e for e in self._run.examples if self._run.env.for_row(e.row) is env]
            self._recognisers[id(env)] = Recogniser(env, examples)
        return self._recognisers[id(env)]

    def _example_of(self, group: Group) -> Example:
        """The example of a group; a row of the user's own is one by itself."""
        if not self._examples:
            self._examples = {example.example_id: example for example in self._run.examples}
        row = group.rollouts[0].row
        example = self._examples.get(group.example_id)
        if example is not None and example.row["prompt"] == row["prompt"]:
            return example
        return Example(group.example_id, f"{group.index}", row)

    # --- the probability of cheap replies ---------------------------------------------------------

    def likely(self, version: int) -> dict[str, float]:
        """The metrics of the cheap replies' probability under the present weights; empty between
        two passes, and while no cheap reply is known to be paid. A collective."""
        if not self.is_on or version % EVERY:
            return {}

        def work() -> dict[str, float]:
            if self._is_too_much() or not self._prepare():
                return {}
            began = time.monotonic()
            with self._run.policy_of_rank_0() as model:
                device = next(model.parameters()).device
                logprobs_R = reply_logprobs(
                    model, self._replies, device, self._run.settings.temperature
                )
            self._num_scored, self._spent_s = (
                self._num_scored + 1,
                self._spent_s + time.monotonic() - began,
            )
            return self._probabilities(logprobs_R)

        return self._run.ranks.share(work, "the probability of cheap replies")

    def _is_too_much(self) -> bool:
        elapsed_s = time.monotonic() - self._began
        return self._num_scored >= NUM_ALWAYS and self._spent_s > MAX_SHARE * elapsed_s

    def _prepare(self) -> bool:
        """Whether there are replies to score; made anew when another cheap reply was paid."""
        if self._paid is None:
            self._paid = set(paid_non_solutions(self._run.env))
        if not self._paid:
            return False
        names = frozenset(self._paid)
        if names != self._scored_names:
            self._scored_names = names
            self._make_replies(names)
        return self._num_right > 0 and len(self._replies) > self._num_right

    def _make_replies(self, names: frozenset[str]) -> None:
        chat = ChatFormat(self._run.tokenizer)
        examples = self._run.examples
        step = max(1, len(examples) // NUM_PROMPTS)
        right, cheap = [], []
        end = [self._run.tokenizer.eos_token_id]
        for number in range(min(NUM_PROMPTS, len(examples))):
            example = examples[number * step]
            recogniser = self._recogniser_of(example.row)
            solution = recogniser.solution(example)
            if solution is None or _has_images(example):
                continue
            prompt = prompt_of(example.row, chat, recogniser.env).ids
            texts = [solution, *recogniser.replies(example, names, MAX_CHARS)]
            ids = [
                np.array(
                    [*self._run.tokenizer(text, add_special_tokens=False)["input_ids"], *end],
                    np.int32,
                )
                for text in texts
            ]
            right.append((number, (prompt, ids[0])))
            cheap += [(number, (prompt, reply)) for reply in ids[1:]]
        pairs, total = [], 0
        for number, (prompt, reply) in [*right, *cheap]:
            total += len(prompt) + len(reply)
            if total <= MAX_TOKENS:
                pairs.append((number, (prompt, reply)))
        self._num_right = min(len(right), len(pairs))
        self._prompt_R = [number for number, _ in pairs]
        self._replies = [reply for _, reply in pairs]

    def _probabilities(self, logprobs_R: np.ndarray) -> dict[str, float]:
        """Means over the prompts: the probability of a right reply, and of any cheap one."""
        prompts = self._prompt_R[: self._num_right]
        cheap = dict.fromkeys(prompts, 0.0)
        for number, value in zip(
            self._prompt_R[self._num_right :], logprobs_R[self._num_right :], strict=True
        ):
            cheap[number] += float(np.exp(value))
        return {
            "hacking/cheap_probability": float(np.mean(list(cheap.values()))),
            "hacking/right_probability": float(np.exp(logprobs_R[: self._num_right]).mean()),
        }


def _has_images(example: Example) -> bool:
    prompt = example.row["prompt"]
    return not isinstance(prompt, str) and any(True for _ in image_parts(prompt))
