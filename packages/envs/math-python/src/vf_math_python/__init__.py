r"""math-python: competition problems, a Python interpreter in a sandbox, and a final answer in
``\boxed{}``.

The public interface is ``load_environment``; the README describes rewards and metrics.
"""

from __future__ import annotations

import random
from typing import Any

import verifiers as vf
from verifiers.runtime.values import Count, CountOrAll, check_arguments
from vf_math_python.generator import generate_rows
from vf_math_python.public import PublishedSet
from vf_math_python.written import written_rows

__all__ = ["BLOCKS_SYSTEM_PROMPT", "SYSTEM_PROMPT", "load_environment"]

SYSTEM_PROMPT = (
    "Solve the problem. Use the python tool for calculations: its variables stay between calls, and"
    " numpy and sympy are installed. When you know the answer, write it inside \\boxed{} without"
    " calling the tool."
)
BLOCKS_SYSTEM_PROMPT = """\
Solve the problem with Python. Write code in a block that begins with a line ```python and ends with a line ```, then \
stop: the next message shows what it printed. Variables stay for your next block, and numpy and sympy are installed. \
When you know the answer, write it inside \\boxed{} without a code block.

Example:
```python
print(sum(n % 6 == 0 for n in range(1, 51)))
```
Output:
8
The answer is \\boxed{8}."""
"""Default prompt when code is taken from code blocks (``code_from``)."""
NUM_TRAIN, NUM_EVAL = 1000, 100
"""Default numbers of problems, hand-written problems first, then generated problems."""
SPLITS = ("train", "test")


@check_arguments
def load_environment(
    dataset_name: str | None = None,
    dataset_split: str | None = None,
    num_train_examples: CountOrAll = -1,
    num_eval_examples: CountOrAll = -1,
    max_turns: Count = 10,
    code_from: str = "auto",
    sandbox: Any = "auto",
    timeout_per_command_seconds: float = 30,
    pip_install_packages: str = "numpy sympy",
    seed: int = 0,
    system_prompt: str | None = SYSTEM_PROMPT,
    split: str | None = None,
    eval_split: str | None = None,
    rollouts_per_example: int | None = None,
    max_concurrent: int | None = None,
    strict: bool = True,
) -> vf.Environment:
    r"""The math-python environment.

    Args:
        dataset_name: A published dataset to use instead of the problems of this package: "math",
            "math500", "aime2024", "aime2025", "amc2023", "gsm8k", "openrs", "arithmetic" or another
            name for ``vf.load_example_dataset``; fetched on first use.
        dataset_split: The split to train on. Default: "train" where it exists, else the only split.
        num_train_examples: Training problems; -1: 1,000 of this package, or all of a dataset.
        num_eval_examples: Held-out problems; -1: 100 of this package, or the test split of a
            dataset (of a dataset with one split all up to 500 problems, else 100).
        max_turns: Model calls, including those with code.
        code_from: Source of the code: "tool" (calls of python), "blocks" (Python blocks in
            replies), or "auto": blocks for a model whose chat template is known to omit tools, else
            the tool.
        sandbox: "auto", a sandbox backend or its name.
        timeout_per_command_seconds: Time limit of an execution.
        pip_install_packages: Packages that code can import, which must be installed.
        seed: Determines the problems; equal arguments give equal problems on every machine.
        system_prompt: System message of every problem; "" or None sends none. The default explains
            how to run code, by ``code_from``; with blocks, an explanation of their format is
            appended to another prompt.
        split: Alias of dataset_split.
        eval_split: The split to evaluate on. Default: "test" if there is any.
        rollouts_per_example: Default of runs of this environment.
        max_concurrent: Default of concurrent rollouts in runs of this environment.
        strict: Refuse lists, sums that are not worked out, false equations, and boxes in thinking
            without an end. False scores as older versions did.

    Raises:
        ConfigError: An invalid argument, by name; at the first rollout, a package that is not
            installed.
        DatasetError: On first use of the rows, when a dataset cannot be fetched.
        SandboxUnavailable: At the first rollout, when no sandbox is available.
    """
    if dataset_split is not None and split is not None:
        raise vf.ConfigError("split is an alias of dataset_split; pass only one of them")
    train, held_out = _sources(
        dataset_name,
        dataset_split or split,
        eval_split,
        seed,
        num_train_examples,
        num_eval_examples,
    )
    runs = {"rollouts_per_example": rollouts_per_example, "max_concurrent": max_concurrent}
    return vf.PythonEnv(
        dataset=train,
        eval_dataset=held_out,
        system_prompt=system_prompt or None,
        blocks_system_prompt={SYSTEM_PROMPT: BLOCKS_SYSTEM_PROMPT}.get(
            system_prompt, None if system_prompt else ""
        ),
        rubric=_make_rubric(strict),
        max_turns=max_turns,
        code_from=code_from,
        sandbox=sandbox,
        timeout_per_command_seconds=timeout_per_command_seconds,
        pip_install_packages=pip_install_packages,
        **{name: value for name, value in runs.items() if value is not None},
    )


def _sources(
    dataset_name: str | None,
    split: str | None,
    eval_split: str | None,
    seed: int,
    num_train: int,
    num_eval: int,
) -> tuple[Any, Any]:
    if dataset_name is not None:
        published = PublishedSet(dataset_name, split, eval_split, seed, num_train, num_eval)
        return published.train, published.held_out
    for name, value in (("dataset_split", split), ("eval_split", eval_split)):
        if value not in (None, *SPLITS):
            raise vf.ConfigError(
                f"{name} must be one of {', '.join(SPLITS)} for this package's problems, not"
                f" {value!r}"
            )
    sizes = (NUM_TRAIN if num_train < 0 else num_train, NUM_EVAL if num_eval < 0 else num_eval)
    return (
        lambda: own_rows(split or "train", sizes[0], seed, "num_train_examples"),
        lambda: own_rows(eval_split or "test", sizes[1], seed, "num_eval_examples"),
    )


def own_rows(split: str, count: int, seed: int, name: str) -> list[dict[str, object]]:
    """``count`` problems of this package: the hand-written ones of the split in seeded order, then
    generated problems.

    *Raises* DatasetError when there are fewer; ``name`` is the name of the argument in the message.
    """
    rows = written_rows(held_out=split == "test")
    random.Random(f"math-python/written/{seed}").shuffle(rows)
    try:
        return rows[:count] + generate_rows(
            max(0, count - len(rows)), seed, held_out=split == "test"
        )
    except ValueError as error:
        raise vf.DatasetError(f"{name}={count} is more than there are: {error}") from error


def _make_rubric(strict: bool) -> vf.Rubric:
    async def format_reward(completion: vf.Messages, parser: vf.Parser) -> float:
        return float(bool(parser.parse_answer(completion)))

    rubric = vf.MathRubric(strict=strict)
    rubric.add_metric(format_reward)
    return rubric
