"""self-judge: questions graded by a panel of judges; by default the judges are the evaluated model
itself.

The public interface is ``load_environment``; the README describes rewards and metrics.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, Any, Literal

import verifiers as vf
from verifiers.runtime.values import Count, Range, check_arguments
from vf_self_judge.panel import ROLES, PanelRubric, RoleClient

__all__ = ["ROLES", "SYSTEM_PROMPT", "PanelRubric", "RoleClient", "load_environment"]

Aggregation = Literal["mean", "median", "min", "max"]

SYSTEM_PROMPT = "Answer the question in at most three sentences."

HELD_OUT_EVERY = 5
"""Every fifth question is held out, for every seed."""

JUDGE_SAMPLING = {"temperature": 0.0, "max_tokens": 512}

JudgeModels = Annotated[
    Sequence[str], Range(min_length=1, noun="a list of names, such as ['gpt-4.1-nano']")
]


@check_arguments
def load_environment(
    judge_models: JudgeModels | None = None,
    judge_base_url: str | None = None,
    judge_api_key_var: str = "OPENAI_API_KEY",
    aggregation: Aggregation = "mean",
    require_all: bool = True,
    num_train_examples: Count | None = None,
    num_eval_examples: Count | None = None,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.Environment:
    """The self-judge environment.

    Args:
        judge_models: Model names of the judges. Default: the evaluated model, for accuracy,
            completeness, clarity.
        judge_base_url: Endpoint of the named judges. Default: OPENAI_BASE_URL, else OpenAI's.
        judge_api_key_var: Environment variable with the API key of that endpoint.
        aggregation: How the judges' scores are combined: "mean", "median", "min" or "max".
        require_all: A judge without a parseable score makes the reward unknown; false uses the
            other scores.
        num_train_examples: Training questions. Default: all, 48.
        num_eval_examples: Held-out questions, disjoint from the training questions for every seed.
            Default: all, 12.
        seed: Determines the order of the questions.
        system_prompt: Default: an instruction to answer briefly. "" sends none.

    Raises:
        ConfigError: An invalid argument, by name.
    """
    parser = vf.MaybeThinkParser()
    return vf.SingleTurnEnv(
        dataset=_draw("num_train_examples", num_train_examples, seed, held_out=False),
        eval_dataset=_draw("num_eval_examples", num_eval_examples, seed, held_out=True),
        system_prompt=(SYSTEM_PROMPT if system_prompt is None else system_prompt) or None,
        parser=parser,
        rubric=_make_rubric(
            judge_models,
            _judge_client(judge_models, judge_base_url, judge_api_key_var),
            parser=parser,
            aggregation=aggregation,
            require_all=require_all,
            judge_sampling_args=JUDGE_SAMPLING,
        ),
    )


def load_questions() -> list[dict[str, str]]:
    """The shipped questions (see DATA.md): rows of ``question`` and ``answer``."""
    lines = (
        (resources.files(__package__) / "questions.jsonl").read_text(encoding="utf-8").split("\n")
    )
    return [json.loads(line) for line in lines if line]


def _draw(name: str, count: int | None, seed: int, held_out: bool) -> list[dict[str, str]]:
    questions = [
        row for i, row in enumerate(load_questions()) if (i % HELD_OUT_EVERY == 0) == held_out
    ]
    random.Random(f"self-judge/{held_out}/{seed}").shuffle(questions)
    if count is None:
        return questions
    if count > len(questions):
        raise vf.ConfigError(
            f"{name}={count} is more than the {len(questions)} questions there are"
        )
    return questions[:count]


def _make_rubric(
    judge_models: Sequence[str] | None, client: Any, **parameters: Any
) -> vf.JudgeRubric:
    if judge_models is None:
        return PanelRubric(**parameters)
    return vf.JudgeRubric(judge_client=client, judge_models=list(judge_models), **parameters)


def _judge_client(
    judge_models: object, base_url: str | None, key_var: str
) -> vf.ClientConfig | None:
    """The endpoint of named judges; None when the evaluated model is the judge."""
    if judge_models is None:
        if base_url is not None:
            raise vf.ConfigError(
                "judge_base_url is the endpoint of judge_models; name them, or leave it out"
            )
        return None
    url = base_url or os.environ.get("OPENAI_BASE_URL")
    return vf.ClientConfig(api_key_var=key_var, **({"api_base_url": url} if url else {}))
