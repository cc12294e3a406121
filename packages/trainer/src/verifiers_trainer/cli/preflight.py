"""Preflight checks: run every part of a training once, on the real model, before the training
starts.

One optimizer step is taken on a few rollouts, in a temporary folder and with artificial rewards
that differ, so that the gradient is never zero. The step changes the weights of the model: reload
it afterwards.

The first failed check ends the list, since later checks would fail for the same reason.
Accelerators, servers and processes that this process does not use are not checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verifiers.errors import ConfigError, VerifiersError
from verifiers_trainer.algorithm.packing import PackedRow, forward_arguments
from verifiers_trainer.policy import checkpoint_files, preparation
from verifiers_trainer.policy.forward_checks import check_head, check_packing, layer_dtype
from verifiers_trainer.policy.logprobs import install_logprob_forward, uninstall
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.cross_field_rules import trackers
from verifiers_trainer.trainer import RLTrainer

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from verifiers.environments.base import Environment

SIBLINGS = 4
"""Rollouts per example; there are two examples."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check: ``Finding("packing", True, "difference 2e-06")``."""

    name: str
    ok: bool | None
    """None: a note that does not stop training."""
    message: str


def preflight(
    model: PreTrainedModel | PeftModel | str,
    env: Environment | str,
    config: RLConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Iterator[Finding]:
    """Run the checks in the order in which a run needs the parts; stop at the first failure."""
    settings = config.private_copy()
    settings.problems(settings.world_size)
    trainer = _Probe(model, env, _small(settings, folder), tokenizer)
    trainer.recorder.warns = False  # the numbers of so few rollouts are always out of order
    with trainer:
        for name, check in CHECKS:
            try:
                outcome = check(trainer)
            except (VerifiersError, ValueError, RuntimeError) as error:
                outcome = False, f"{type(error).__name__}: {error}"
            ok, message = outcome if isinstance(outcome, tuple) else (True, outcome)
            yield Finding(name, ok, message)
            if ok is False:
                return
    for tracker in trackers(config.report_to):
        is_installed = find_spec(tracker) is not None
        yield Finding(
            f"tracker {tracker}",
            is_installed or None,
            "installed" if is_installed else "not installed: metrics are not logged",
        )


def _small(settings: RLConfig, folder: Path) -> RLConfig:
    siblings = min(SIBLINGS, max(2, settings.rollouts_per_example))
    small = {
        "output_dir": str(folder),
        "rollouts_per_example": siblings,
        "batch_size": 2 * siblings,
        "micro_batch_size": siblings,
        "max_concurrent": max(siblings, settings.max_concurrent),
        "updates_per_batch": 1,
        "num_iterations": 1,
        "max_steps": 1,
        "max_off_policy_steps": 0,
        "warmup_steps": 0,
        "zero_variance": "keep",
        "mask_truncated_completions": False,
        "min_group_fraction": 1 / siblings,
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": "none",
        "log_completions": False,
    }
    for name, value in small.items():
        setattr(settings, name, value)
    return settings


class _Probe(RLTrainer):
    """Trains one step and records its rewards and packed rows."""

    rubric_rewards: list[float]
    rollout_s: float
    rows: Sequence[PackedRow]

    def compute_rewards(
        self, completions: Sequence[object], prompts: Sequence[object], **kwargs: object
    ) -> list[float]:
        self.rubric_rewards = [
            *getattr(self, "rubric_rewards", []),
            *super().compute_rewards(completions, prompts),
        ]
        return [float(index % 2) for index in range(len(completions))]

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: Any,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        self.rows = inputs.rows_R[0]
        self.rollout_s = inputs.stats["time/wait_generation"]
        return super().training_step(model, inputs, num_items_in_batch)

    def logprobs(self) -> torch.Tensor:
        """Log-probabilities of the sampled tokens of the first packed row, by the
        current weights."""
        self.model.eval()
        row = self.rows[0].to_tensors(self.args.device)
        with torch.no_grad():
            out = self.model(**forward_arguments(row))
        return out.logprobs[row["loss_mask"]].float().cpu()


# --- checks: each returns a message, or (ok, message) ---------------------------------------------


def _environment(trainer: _Probe) -> str:
    names = ", ".join(getattr(f, "__name__", str(f)) for f in trainer.env.get_reward_funcs())
    return f"{len(trainer.examples)} examples, rewards {names}"


def _example(trainer: _Probe) -> object:
    row = trainer.examples[0].row
    count = preparation.num_prompt_tokens(row, trainer.tokenizer, trainer.env.for_row(row))
    length = trainer.args.max_seq_len
    advice = "" if count < length else f": raise max_seq_len above {count}, or shorten the prompt"
    return count < length, f"the first prompt has {count} of {length} tokens (max_seq_len){advice}"


def _tokenizer(trainer: _Probe) -> Any:
    tokens, rows = len(trainer.tokenizer), trainer.model.get_input_embeddings().weight.shape[0]
    return tokens <= rows, f"{tokens:,} tokens, {min(tokens, rows):,} of them with an embedding"


def _template(trainer: _Probe) -> object:
    if trainer.env.max_turns == 1 or trainer.env.message_type != "chat":
        return "single turn: no earlier turns to render"
    history = trainer.args.history
    problem = preparation.template_problem(trainer.tokenizer, trainer.env, history)
    if problem is None:
        return (
            "only appends" if history == "template" else "earlier turns keep their sampled tokens"
        )
    return False if trainer.args.require_increasing_context else None, problem


def _memory(trainer: _Probe) -> str:
    parameters = list(trainer.model.parameters())
    weights = sum(p.numel() * p.element_size() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return f"weights {_size(weights)}, gradients and optimizer state about {_size(12 * trained)}"


def _forward(trainer: _Probe) -> object:
    """Check the forward pass of the model as training prepared it: in autocast, for example."""
    is_half = bool(trainer.args.bf16 or trainer.args.fp16)
    head, packed = check_head(trainer.model), check_packing(trainer.model, is_half=is_half)
    numbers = (
        f"the layers compute in {str(layer_dtype(trainer.model)).removeprefix('torch.')};"
        f" log-probabilities differ by {head.difference:.1e} from the stock head,"
        f" {packed.difference:.1e} when packed"
    )
    if head.ok and packed.ok:
        return numbers
    return None, f"{numbers}: {'samples are not packed' if head.ok else 'the full head is used'}"


def _step(trainer: _Probe) -> object:
    trainer.train()
    norm = trainer.last_step["grad_norm"]
    return norm > 0, f"gradient norm {norm:.3g} in {trainer.last_step['time/train']:.1f} s"


def _rollouts(trainer: _Probe) -> str:
    numbers = trainer.last_step
    rewards = [reward for reward in trainer.rubric_rewards if reward == reward]
    mean = (
        f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "every reward is unknown"
    )
    truncated = (
        f", {numbers['rollouts/truncated']} truncated" if numbers["rollouts/truncated"] else ""
    )
    return f"{numbers['rollouts/generated']} in {trainer.rollout_s:.1f} s, {mean}{truncated}"


def _tokens(trainer: _Probe) -> object:
    count = trainer.last_step["tokens/completion"]
    return count > 0, f"{count} sampled, each with id and log-probability"


def _ratio(trainer: _Probe) -> object:
    mean = trainer.last_step["sampler/log_ratio_abs"]
    return (
        mean == mean,
        f"sampler and trainer differ by {mean:.1e} nats per token with equal weights",
    )


def _push(trainer: _Probe) -> object:
    """Check that the step changed the weights and that the engine serves the new version."""
    prompt = [message for message in trainer.examples[0].row["prompt"]]
    install_logprob_forward(trainer.model)
    try:
        row, logprobs = trainer.rows[0], trainer.logprobs()
        change = float(
            (logprobs - torch.from_numpy(row.sampler_logprobs[row.loss_mask])).abs().max()
        )
    finally:
        uninstall(trainer.model)
    trainer.generate([prompt])
    version = trainer.engine.version
    ok = change > 0 and version == trainer.policy_version
    return (
        ok,
        (
            f"the engine serves version {version}; log-probabilities changed by up to {change:.1e}"
            " nats"
        ),
    )


def _checkpoint(trainer: _Probe) -> str:
    started = time.perf_counter()
    folder = trainer.args.folder / f"{checkpoint_files.PREFIX}1"
    checkpoint_files.verify(folder)
    before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    preparation.load_weights(trainer.model, folder)
    after = [p for p in trainer.model.parameters() if p.requires_grad]
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise ConfigError("the weights loaded from the checkpoint differ from those saved")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{_size(size)}, reloaded with equal weights in {time.perf_counter() - started:.1f} s"


CHECKS: tuple[tuple[str, Callable[[_Probe], Any]], ...] = (
    ("environment", _environment),
    ("example", _example),
    ("tokenizer", _tokenizer),
    ("chat template", _template),
    ("memory", _memory),
    ("optimizer step", _step),
    ("forward", _forward),
    ("rollouts", _rollouts),
    ("tokens", _tokens),
    ("ratio", _ratio),
    ("weight push", _push),
    ("checkpoint", _checkpoint),
)


def _size(num_bytes: float) -> str:
    """
    >>> _size(2_030_000), _size(512)
    ('2.03 MB', '512 B')
    """
    units = ["B", "KB", "MB", "GB", "TB"]
    while num_bytes >= 1000 and len(units) > 1:
        num_bytes /= 1000
        units.pop(0)
    return f"{num_bytes:.3g} {units[0]}"
