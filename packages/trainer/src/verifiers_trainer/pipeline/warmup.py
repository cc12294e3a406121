"""Supervised warm-up: imitate an environment's reference answers until the model sometimes
succeeds.

Reinforcement learning needs rewards that differ, and a randomly initialised model gets none. The
warm-up is the loss "sft" on the answers as finished rollouts, the data path of ``offline`` with an
optimizer of its own. It stops as soon as the sampled reward reaches a target, so that RL still has
something to improve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState, PartialState

from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers.parsers import XMLParser
from verifiers_trainer.algorithm.losses import LossInput, sft
from verifiers_trainer.algorithm.packing import PackedRow, forward_arguments
from verifiers_trainer.engines.embedded.threads import threads_for
from verifiers_trainer.pipeline.offline import OfflineRollouts, read_groups
from verifiers_trainer.policy.logprobs import install_logprob_forward, uninstall
from verifiers_trainer.settings.config import RLConfig

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

UNBOUNDED = 10**9
"""``max_seq_len``, in tokens: no answer is too long."""


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    env: Environment,
    *,
    reward: Callable[[], float],
    target: float,
    answers: Callable[[Mapping[str, object]], str] | None = None,
    max_steps: int = 120,
    probe_every: int = 10,
    rows_per_step: int = 64,
    learning_rate: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, float, float | None], None] | None = None,
) -> int:
    """Imitate reference answers with ``model`` until ``reward()`` reaches ``target``; returns the
    number of steps.

    ``answers`` maps a row to the assistant's text (``answer_columns``). ``reward`` evaluates the
    current model every ``probe_every`` steps. ``on_step(step, loss, reward or None)`` is called
    after each step. Gradients are cleared at the end. Of several processes each takes all rows, and
    the same steps.

    *Raises* ConfigError without training rows, and without ``answers`` when the parser is not an
    ``XMLParser``.
    """
    columns = answer_columns(env, answers)
    config = _settings(batch_size=rows_per_step, seed=seed)
    batches = OfflineRollouts(read_groups(columns, tokenizer, config), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    install_logprob_forward(model)
    try:
        for step in range(1, max_steps + 1):
            rows = [packed for rows in batches.next_batch().rows_R for packed in rows]
            loss = _supervised_step(model, optimizer, rows)
            latest_reward = reward() if step % probe_every == 0 else None
            if on_step is not None:
                on_step(step, loss, latest_reward)
            if latest_reward is not None and latest_reward >= target:
                return step
    finally:
        uninstall(model)
    return max_steps


def _supervised_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: Sequence[PackedRow]
) -> float:
    """A update on the packed answers; returns the loss. Gradients are cleared."""
    device, total = next(model.parameters()).device, 0.0
    model.train()
    with threads_for(model):  # the engine that sets them starts with the first probe
        for packed in rows:
            row = packed.to_tensors(device)
            tokens = LossInput.of(row, model(**forward_arguments(row)).logprobs)
            loss = (row["weight"] * sft(tokens)).sum()
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return total


def _settings(**values: Any) -> RLConfig:
    """Settings of supervised steps; a trainer that is there remains usable.

    ``TrainingArguments`` resets the state that every ``Accelerator`` of the process shares.
    """
    shared = AcceleratorState._shared_state, PartialState._shared_state
    before = [dict(state) for state in shared]
    config = RLConfig(
        output_dir="unused", loss="sft", micro_batch_size=1, max_seq_len=UNBOUNDED, **values
    )
    for state, saved in zip(shared, before, strict=True):
        if saved:
            state.clear()
            state.update(saved)
    return config


def answer_columns(
    env: Environment, answers: Callable[[dict[str, object]], str] | None = None
) -> dict[str, list[object]]:
    """The reference answers of the training rows as finished rollouts of unknown reward, a
    ``dataset`` of RLTrainer.

    ``answers`` maps a row to the assistant's text; default: ``tagged_answers``. *Raises*
    ConfigError without rows.

        vf.RLTrainer(model, env, vf.RLConfig(loss="sft"), dataset=answer_columns(env)).train()
    """
    rows = [example.row for example in env.train_table or ()]
    if not rows:
        raise ConfigError(
            "the warm-up needs training rows, and the environment has none: pass dataset=…"
        )
    answers = answers or tagged_answers(env)
    return {
        "prompts": [row["prompt"] for row in rows],
        "completions": [[{"role": "assistant", "content": answers(row)}] for row in rows],
        "rewards": [None] * len(rows),
    }


def tagged_answers(env: Environment) -> Callable[[dict[str, object]], str]:
    """A function from a row to its ``answer`` inside the tags that the environment's
    parser reads."""
    parser = env.parser
    if not isinstance(parser, XMLParser):
        raise ConfigError(
            "a warm-up needs an environment whose parser is an XMLParser, not"
            f" {type(parser).__name__}; or pass answers=, a function from a row to the correct"
            " assistant text"
        )
    tag = parser.answer_field
    return lambda row: f"<{tag}>{row['answer']}</{tag}>"
