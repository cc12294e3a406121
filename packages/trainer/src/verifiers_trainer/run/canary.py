"""``Canary``: after every push of weights each server answers two fixed prompts, and the trainer
scores the answers.

The answers are asked for when a push ends, and compared before the next step changes the weights:
the server samples them beside the rollouts, and no step waits. They pass through the client of
rollouts, which repairs a restarted server, with the sampling arguments of rollouts but for those
that reshape the distribution. The prompts are always the same, so that an answer from
the cached prefix of older weights is found too. The first ``ask`` also has servers draw
``sampled_tokens``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import torch

from verifiers.clients.round_robin import RoundRobinClient
from verifiers.errors import VerifiersError
from verifiers.rollouts.turn import Turn
from verifiers.runtime.calls import blocking
from verifiers_trainer.algorithm.diagnostics import RatioMeter
from verifiers_trainer.engines.http.chat import Prompt
from verifiers_trainer.engines.inference import policy_client
from verifiers_trainer.engines.role_adapters import parameters_of
from verifiers_trainer.engines.vllm.engine import VLLMEngine
from verifiers_trainer.policy.scoring import NUM_ANSWER, answers, fixed_prompts, scored
from verifiers_trainer.run.context import TrainingRun
from verifiers_trainer.run.sampled_tokens import SampledTokens
from verifiers_trainer.run.sanity_checks import Agreement, Agreements, mean_noise
from verifiers_trainer.run.sight import check_sight
from verifiers_trainer.settings.sampling import unreshaped

if TYPE_CHECKING:
    from verifiers_trainer.engines.embedded.engine import EmbeddedEngine

log = logging.getLogger(__name__)
NUM_ALWAYS = 8
MAX_SHARE = 0.01
"""After the first ``NUM_ALWAYS`` pushes a canary is left out while the canaries have taken more than
this share of the run's time: an update of a small model takes milliseconds."""


class Canary:
    """The canary of a run."""

    def __init__(self, run: TrainingRun):
        self._run = run
        self._temperature = run.settings.temperature
        self._roles = run.settings.adapter_roles
        new = partial(Agreement, None, run.tokenizer, self._temperature)
        self._agreements = Agreements(new, self._roles)
        self._drawn = SampledTokens(run)
        self._pending: tuple[int, Future[list[Turn]]] | None = None
        self._before: tuple[list[Turn], int, RatioMeter] | None = None
        """The last answers, their version, and how far apart they were then."""
        self._num_asked, self._num_looked = 0, 0
        self._spent_s, self._began = 0.0, time.monotonic()

    def ask(self, engine: EmbeddedEngine | VLLMEngine | None, version: int) -> None:
        """Ask every server, without waiting; a no-op while they have older weights on purpose
        (``sync_every``). Rank 0 alone."""
        if engine is None or engine.version != version:
            return
        if self._is_too_much(self._num_asked):
            return
        if not self._num_asked and isinstance(engine, VLLMEngine):
            self._drawn.ask(engine)
        self._num_asked += 1
        settings = self._run.settings
        # both together at most 1 % of what a step may sample
        limit = max(2 * NUM_ANSWER, settings.batch_size * settings.max_seq_len // 200)
        longest = settings.max_seq_len
        if settings.max_prompt_len is not None:
            longest = min(longest, settings.max_prompt_len + NUM_ANSWER)
        prompts = fixed_prompts(self._run.tokenizer, min(limit, longest))
        sampling = unreshaped(settings.sampling())
        client, name = policy_client(engine), engine.served_model
        members = [client]
        if isinstance(client, RoundRobinClient):
            members = [member for member, _ in client.members]

        async def work() -> list[Turn]:
            try:
                return [
                    turn
                    for member in members
                    for role in self._roles or ("",)
                    for turn in await answers(
                        member, name, prompts, sampling_args=sampling, role=role
                    )
                ]
            finally:
                await client.aclose()  # type: ignore[attr-defined]

        future: Future[list[Turn]] = Future()

        def run() -> None:
            try:
                future.set_result(blocking(work))
            except BaseException as error:  # noqa: BLE001 - raised again where the answers are read
                future.set_exception(error)

        threading.Thread(target=run, name="verifiers-canary", daemon=True).start()
        self._pending = version, future

    def check(self) -> dict[str, float]:
        """The metrics of the answers to the last ``ask``; waits for them. A collective.

        Raises ``ConfigError`` when the server has other weights, with what is known.
        """
        return self._on_rank_0(self._check)

    def look(self, prompt: Prompt | None) -> dict[str, float]:
        """The metric of ``sight`` of a prompt of rank 0, if it has one; nothing while the canaries
        take too much of the run's time. A collective.

        Raises ``ConfigError`` for a policy that does not see its images.
        """

        def measure(model: torch.nn.Module) -> dict[str, float]:
            if prompt is None or self._is_too_much(self._num_looked):
                return {}
            self._num_looked, began = self._num_looked + 1, time.monotonic()
            numbers = check_sight(model, prompt)
            self._spent_s += time.monotonic() - began
            return numbers

        return self._on_rank_0(measure)

    def _is_too_much(self, num_before: int) -> bool:
        elapsed_s = time.monotonic() - self._began
        return num_before >= NUM_ALWAYS and self._spent_s > MAX_SHARE * elapsed_s

    def moved(self) -> dict[str, float]:
        """The metric of an update: how far it moved the log-probabilities of the last answers. A
        collective."""
        return self._on_rank_0(self._moved)

    def _on_rank_0(
        self, measure: Callable[[torch.nn.Module], dict[str, float]]
    ) -> dict[str, float]:
        def work() -> dict[str, float]:
            with self._run.policy_of_rank_0() as model:
                return measure(model)

        return self._run.ranks.share(work, "the canary")

    def _check(self, model: torch.nn.Module) -> dict[str, float]:
        self._before, began = None, time.monotonic()
        drawn = self._drawn.check()
        version, turns = self._answers()
        meter = self._scored(model, turns, version)
        if not meter.num_current:
            return drawn
        self._before = turns, version, meter
        numbers = self._agreements.check(
            meter,
            partial(mean_noise, model),
            f"asked by the canary after a push of weights (version {version})",
        )
        numbers = {name.replace("sampler/", "canary/"): value for name, value in numbers.items()}
        numbers |= {"canary/version": version, "canary/log_ratio_abs": meter.mean_abs}
        numbers["canary/checksum"] = checksum(list(model.parameters()))
        for role, weights in parameters_of(model).items():
            numbers[f"canary/checksum/{role}"] = checksum(weights)
        self._spent_s += time.monotonic() - began
        return drawn | numbers

    def _moved(self, model: torch.nn.Module) -> dict[str, float]:
        if self._before is None:
            return {}
        began, (turns, version, before) = time.monotonic(), self._before
        again = self._scored(model, turns, version)
        self._spent_s += time.monotonic() - began
        if not self._roles:
            return {"canary/moved": _distance(before, again)}
        moved = {
            f"canary/moved/{role}": _distance(before.of_adapter(number), again.of_adapter(number))
            for number, role in enumerate(self._roles)
        }
        # an adapter that stays is told apart by nothing, so the least of them counts
        return moved | {"canary/moved": min(moved.values())}

    def _scored(self, model: torch.nn.Module, turns: Sequence[Turn], version: int) -> RatioMeter:
        device = next(model.parameters()).device
        return scored(model, [[turn] for turn in turns], version, device, self._temperature)

    def _answers(self) -> tuple[int, list[Turn]]:
        """(version, answers); no answers without a question, or with a warning."""
        if self._pending is None:
            return 0, []
        (version, future), self._pending = self._pending, None
        try:
            return version, future.result()
        except (VerifiersError, OSError) as error:
            log.warning("the canary of version %d was not answered: %s", version, error)
            return version, []


def checksum(weights: Sequence[torch.nn.Parameter]) -> int:
    """The sum of the bits of those weights that are trained, or of all of a copy: equal for equal
    weights."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    trained = [weight for weight in weights if weight.requires_grad] or weights
    return sum(int(w.detach().view(kinds[w.element_size()]).sum()) for w in trained) % 2**48


def _distance(before: RatioMeter, again: RatioMeter) -> float:
    """Mean distance of the log-probabilities of the same tokens, in nats; 0 without any."""
    pairs = zip(before.rows, again.rows, strict=True)
    moved = [(d - d_before)[current] for (_, d_before, _), (_, d, current) in pairs]
    return float(torch.cat(moved).abs().mean()) if moved else 0.0
