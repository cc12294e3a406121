"""A pipeline without an engine: a client whose answers, delays and policy version a
test decides."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import verifiers as vf
from verifiers.runs.rollout import RunContext
from verifiers.testing import ScriptedClient
from verifiers.testing.replies import response_of
from verifiers.types import ModelRequest, Response
from verifiers_trainer.pipeline.pipeline import Pipeline
from verifiers_trainer.pipeline.schedule import PipelineState
from verifiers_trainer.pipeline.thread import PipelineThread
from verifiers_trainer.settings.config import RLConfig

GROUP = 4


def question(request: ModelRequest) -> str:
    return request.prompt[-1]["content"]


class Policy(ScriptedClient):
    """Answers 0, 1, 0, 1, ... to each question (so that every group has a signal), or what
    ``answer`` says.

    ``delay(request)`` gives seconds; ``held`` keeps every answer back while it is set. What is
    answered, and the ``version`` of its tokens, is decided when a request arrives, in whatever
    order the answers leave.
    """

    def __init__(
        self,
        answer: Any = None,
        delay: Callable[[ModelRequest], float] | None = None,
        errors: Any = None,
    ):
        turns: dict[str, Iterator[str]] = defaultdict(lambda: itertools.cycle("01"))
        super().__init__(answer or (lambda request: next(turns[question(request)])), tokens=True)
        self.version = 0
        self.delay = delay
        self.held = False
        self.errors = errors or {}

    async def complete(self, request: ModelRequest) -> Response:
        version, number = self.version, len(self.requests)
        self.requests.append(request)
        reply = await self._replies.next(request)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            while self.held:  # noqa: ASYNC110 - a test sets it from another thread
                await asyncio.sleep(0.002)
            if self.delay is not None:
                await asyncio.sleep(self.delay(request))
        finally:
            self.in_flight -= 1
        if number in self.errors:
            raise self.errors[number]
        response = self.finish(response_of(reply, request, number), request)
        assert response.tokens is not None
        return replace(response, version=version, tokens=replace(response.tokens, version=version))


def turn_of_each(answers: Callable[[str, int], str]) -> Callable[[ModelRequest], str]:
    """An answer from a question and how often it was asked before: ``answers("q7", 2)`` for its
    third sibling."""
    asked: dict[str, int] = defaultdict(int)

    def answer(request: ModelRequest) -> str:
        name = question(request)
        asked[name] += 1
        return answers(name, asked[name] - 1)

    return answer


def dead_if(condition: Callable[[int], bool]) -> Callable[[ModelRequest], str]:
    """Answers 1 to every sibling of the questions for whose number ``condition`` holds, 0 and 1 in
    turn to others."""
    return turn_of_each(lambda name, turn: "1" if condition(int(name[1:])) else str(turn % 2))


def number(completion: Any, **_: Any) -> float:
    """The reward is the number that was answered."""
    return float(completion[-1]["content"])


def counting_env(
    count: int = 60, reward: Any = number, cls: type = vf.SingleTurnEnv, **options: Any
) -> Any:
    """Questions q0, q1, ...; the answer is the reward."""
    return cls(
        dataset=[{"question": f"q{i}"} for i in range(count)],
        rubric=vf.Rubric(funcs=[reward]),
        **options,
    )


def pipeline_config(**settings: Any) -> RLConfig:
    """Two groups of four per batch, in the order of the dataset."""
    small = {
        "output_dir": str(Path("unused")),
        "batch_size": 2 * GROUP,
        "rollouts_per_example": GROUP,
        "micro_batch_size": 1,
        "max_seq_len": 512,
        "shuffle_dataset": False,
        "generation_timeout": 20.0,
        "use_lora": False,
    }
    return RLConfig(**{**small, **settings})


@contextmanager
def pipeline(
    policy: Policy,
    env: Any = None,
    version: int = 0,
    state: PipelineState | None = None,
    **settings: Any,
) -> Iterator[PipelineThread]:
    """A started pipeline, closed at the end of the block."""
    env = env if env is not None else counting_env()
    config = pipeline_config(**settings)
    context = RunContext(
        client=policy, model="policy", require_tokens=True, seed=config.seed, rollout_timeout_s=30.0
    )
    batches = PipelineThread(Pipeline(env, list(env.train_table), context, config))
    policy.version = version
    batches.start(version, state)
    try:
        yield batches
    finally:
        policy.held = False
        batches.close()


def advance(batches: PipelineThread, policy: Policy) -> None:
    """What the trainer does after an optimizer step."""
    policy.version += 1
    batches.set_version(policy.version)


def steps(batches: PipelineThread, policy: Policy, count: int) -> list[Any]:
    """``count`` batches with a "step" after each."""
    batches_made = []
    for _ in range(count):
        batches_made.append(batches.next_batch())
        if batches.pipeline.config.deterministic:
            batches.settle()
        advance(batches, policy)
    return batches_made


def indices(batch: Any) -> list[int]:
    return [group.index for group in batch.groups]
