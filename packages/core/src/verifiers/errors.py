"""The exception hierarchy. The class determines the scope of a failure: the call, one rollout, or
the run.

    VerifiersError
    ├─ UsageError                 invalid use, raised before the first model call; commands exit 2
    │   ├─ ConfigError(ValueError)            ├─ MissingKeyError
    │   ├─ DatasetError(ValueError)           ├─ UnknownEnvironment(ValueError, LookupError)
    │   ├─ EnvironmentLoadError(RuntimeError) ├─ RunBusy        ├─ RunMismatch
    ├─ RolloutError               failure of a rollout: recorded on it, never raised by a run
    │   ├─ ModelError: RateLimited · ModelUnavailable · ModelRefused · MalformedResponse ─ EmptyModelResponseError
    │   ├─ OverlongPromptError    the rollout loop turns it into a stop condition
    │   ├─ EnvironmentFault · RolloutTimeout · ScoringError · AgentError: AgentFailure
    │   ├─ ToolError: ToolParseError · ToolCallError
    │   └─ InfraError: TunnelError · WorkerLost · SandboxError: SandboxUnavailable · SandboxLimit
    └─ RunError                   the run cannot continue; everything acknowledged is on disk; commands exit 3
        ├─ JournalError · TooManyFaults · BudgetExhausted
        ├─ AuthenticationFailed · ModelNotFound · EndpointUnreachable   (exit 2: correctable by the user)
        └─ WeightSyncError · CheckpointError · NonFiniteLoss · NoLearningSignal · GenerationStalled
           · RewardHacked   (training)

Errors are classified where they occur, chained with ``from``, and have facts as attributes:
``RateLimited("…", retry_after_s=4.0).retry_after_s``. ``asyncio.CancelledError`` and
``KeyboardInterrupt`` are never converted to any of these. This module imports no other module of
the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FACTS = frozenset(
    "api_key_var attempts behaviour body cause code count differences disagreement dump elapsed_s env_id "
    "example_id field file function histogram hook host key limit line model names path pid "
    "response retry_after_s row sibling stage status suggestions url waiting_for".split()
)
"""Names of facts that an error may have; a missing fact reads as None."""


class VerifiersError(Exception):
    """Base class. Keyword arguments must be in ``FACTS`` and read as attributes."""

    exit_code = 3
    retryable = False
    scorable = False

    def __init__(self, message: str = "", **facts: object):
        super().__init__(message)
        if unknown := facts.keys() - FACTS:
            raise TypeError(
                f"{type(self).__name__} has no fact {sorted(unknown)}; add it to errors.FACTS"
            )
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        if name in FACTS:
            return self.facts.get(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), self.facts)


def _rebuild(
    cls: type[VerifiersError], message: str, facts: Mapping[str, object]
) -> VerifiersError:
    return cls(message, **facts)


def message_of(error: BaseException) -> str:
    """The text of an exception of any class, whose ``__str__`` may raise too."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - code of an author
        return f"its message cannot be shown: {type(failure).__name__}"


# --- invalid use ----------------------------------------------------------------------------------


class UsageError(VerifiersError):
    """Invalid use of the library or its commands; raised before the first model call."""

    exit_code = 2


class ConfigError(UsageError, ValueError):
    """An invalid parameter, key or flag; the message names it and the valid values."""


class MissingKeyError(UsageError):
    """Required environment variables are not set (``names``)."""


class DatasetError(UsageError, ValueError):
    """A dataset is missing, unreadable, or lacks required columns."""


class UnknownEnvironment(UsageError, ValueError, LookupError):
    """No installed environment has this id (``env_id``, ``suggestions``)."""


class EnvironmentLoadError(UsageError, RuntimeError):
    """Loading an installed environment failed; the cause is chained."""


class RunBusy(UsageError):
    """Another process writes to this run directory (``pid``, ``host``)."""


class RunMismatch(UsageError):
    """A run directory holds another configuration (``differences``: key -> (stored, new))."""


# --- one rollout's failure ------------------------------------------------------------------------


class RolloutError(VerifiersError):
    """Failure of a rollout. ``retryable``: running it again may help; ``scorable``: caused by the
    model's output."""


class ModelError(RolloutError):
    """The model endpoint did not give a usable completion (``url``, ``status``, ``attempts``)."""


class RateLimited(ModelError):
    """HTTP 429 after every retry, or a Retry-After above the limit (``retry_after_s``)."""

    retryable = True


class ModelUnavailable(ModelError):
    """5xx, connection failure or attempt timeout after every retry."""

    retryable = True


class ModelRefused(ModelError):
    """The endpoint refused this request with another 4xx (``status``, ``body``; a server also
    ``field``, ``code``)."""


class MalformedResponse(ModelError):
    """The endpoint returned status 200 without a valid completion (``field``)."""

    retryable = True


class EmptyModelResponseError(MalformedResponse):
    """No content, no tool call and no finish reason."""


class OverlongPromptError(RolloutError):
    """The prompt does not fit the model's context; ends the rollout as ``prompt_too_long``."""

    scorable = True


class EnvironmentFault(RolloutError):
    """A hook of the environment raised (``hook``); the exception is chained."""


class RolloutTimeout(RolloutError):
    """The run's time limit of a rollout expired (``waiting_for``, ``elapsed_s``)."""


class ScoringError(RolloutError):
    """A reward function failed or returned no finite number: the reward is unknown
    (``function``)."""


class ToolError(RolloutError):
    """A failed tool call that stops the rollout; caused by the model's output."""

    scorable = True


class ToolParseError(ToolError):
    """Arguments of a tool call that are not a JSON object."""


class ToolCallError(ToolError):
    """A tool raised."""


class AgentError(RolloutError):
    """An agent program could not be started, failed, or never called the model."""


class AgentFailure(AgentError):
    """An agent program failed after its model had answered it, which the model can cause."""

    scorable = True


class InfraError(RolloutError):
    """The infrastructure of the rollout failed; running it again may help."""

    retryable = True


class WorkerLost(InfraError):
    """An environment worker or its connection was lost. On a rollout: every worker that ran it
    died."""

    retryable = False


class TunnelError(InfraError):
    """A tunnel to a remote service broke."""


class SandboxError(InfraError):
    """A sandbox failed."""

    retryable = False


class SandboxUnavailable(SandboxError):
    """No sandbox could be started."""

    retryable = True


class SandboxLimit(SandboxError):
    """Executed code hit its time, memory or output limit (``limit``); caused by the
    model's output."""

    scorable = True


# --- the run cannot continue ----------------------------------------------------------------------


class RunError(VerifiersError):
    """The run cannot continue; everything acknowledged is on disk."""


class JournalError(RunError):
    """The journal cannot be written or is damaged (``path``, ``line``)."""


class TooManyFaults(RunError):
    """Consecutive rollouts failed with one cause (``cause``, ``count``)."""


class BudgetExhausted(RunError):
    """The next request does not fit into what the run may spend (``limit``: ``max_cost_usd`` or
    ``max_total_tokens``), or the account of the endpoint has no money left (``url``, ``status``;
    ``limit``: "quota")."""

    @property
    def is_of_options(self) -> bool:
        """Whether a limit that was set ended the run, which is no failure."""
        return self.limit in ("max_cost_usd", "max_total_tokens")


class AuthenticationFailed(RunError):
    """The endpoint refused the key (``url``, ``status``, ``api_key_var``)."""

    exit_code = 2


class ModelNotFound(RunError):
    """The endpoint does not serve this model (``url``, ``model``)."""

    exit_code = 2


class EndpointUnreachable(RunError):
    """No successful response of the endpoint since the start of the run (``url``)."""

    exit_code = 2


class WeightSyncError(RunError):
    """New weights did not reach the inference engine (``stage``, ``elapsed_s``, ``response``)."""


class CheckpointError(RunError):
    """A checkpoint is damaged or cannot be written (``path``, ``file``)."""


class NonFiniteLoss(RunError):
    """NaN or infinity in a loss, log-probability, reward or gradient; no step was taken (``key``,
    ``dump``)."""


class NoLearningSignal(RunError):
    """No group of the run, or of ``no_signal_steps`` batches, had two different rewards
    (``histogram``)."""


class RewardHacked(RunError):
    """Rollouts are paid without solving their task, and ``on_reward_hacking`` is "stop"
    (``behaviour``)."""


class GenerationStalled(RunError):
    """No rollout finished for ``generation_timeout`` seconds (``waiting_for``, ``elapsed_s``)."""
