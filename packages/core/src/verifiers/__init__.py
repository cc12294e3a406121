"""RL environments for language models: evaluate a model, generate data with it, and train it.

    import verifiers as vf
    env = vf.load_environment("reverse-text")
    results = env.evaluate(client, model="…", num_examples=20, rollouts_per_example=4)

Names are imported on first use, so ``import verifiers`` is fast and needs neither torch nor
datasets nor openai. ``__init__.pyi`` lists the same names for type checkers and editors. Names and
modules of older versions (``verifiers.envs``, ``verifiers.utils.data_utils``) resolve to the
current modules; the tables are in ``compat``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging

from verifiers.legacy import modules as legacy_modules
from verifiers.legacy import moved

__version__ = "0.2.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

_MODULES: dict[str, str] = {
    "environments": (
        "Environment SingleTurnEnv MultiTurnEnv ToolEnv StatefulToolEnv SandboxEnv PythonEnv"
        " EnvGroup"
    ),
    "environments.multi_agent": (
        "MultiAgentEnv ProposerSolverEnv Role SimulatedUserEnv TwoPlayerEnv"
    ),
    "rubrics": "Rubric RubricGroup JudgeRubric MathRubric ToolRubric",
    "parsers": "Parser ThinkParser MaybeThinkParser XMLParser",
    "rollouts.author_code": "stop setup fork cleanup teardown reward metric advantage",
    "types": (
        "Message Messages SystemMessage UserMessage AssistantMessage ToolMessage TextMessage"
        " ToolCall Tool TextContentPart ImageUrlContentPart InputAudioContentPart ModelRequest"
        " Response ResponseTokens Usage SamplingArgs Info RewardFunc DatasetBuilder"
    ),
    "rollouts.state": "State",
    "rollouts.steps": "TrajectoryStep TrajectoryStepTokens",
    "rollouts.rollout": "RolloutInput",
    "rollouts.values": "Timing",
    "rollouts.branching": "Branching",
    "rollouts.error_info": "ErrorInfo",
    "results.rows": "RolloutOutput",
    "rubrics.outcomes": "RolloutScore RolloutScores",
    "rubrics.values": "NOT_APPLICABLE",
    "results": (
        "GenerateOutputs GenerateMetadata make_dataset load_results print_prompt_completions_sample"
        " ProcessedOutputs export_trajectories"
    ),
    "clients": (
        "Client ClientConfig EndpointConfig OpenAIChatCompletionsClient OpenAICompletionsClient"
        " OpenAIResponsesClient AnthropicMessagesClient as_client use_client load_endpoints"
    ),
    "environments.registry": "load_environment list_environments",
    "checks": "audit_environment check_environment",
    "view.opening": "open_view",
    "checks.chat_template": "check_increasing_context",
    "data.example_sets": "load_example_dataset",
    "data.images": "image_part decode_image",
    "runtime.logs": "setup_logging log_level quiet_verifiers",
    "data.text": (
        "ensure_keys extract_boxed_answer extract_hash_answer strip_non_numeric BOXED_SYSTEM_PROMPT"
        " THINK_BOXED_SYSTEM_PROMPT"
    ),
    "errors": (
        "VerifiersError UsageError ConfigError MissingKeyError DatasetError UnknownEnvironment"
        " EnvironmentLoadError RunBusy RunMismatch RolloutError ModelError RateLimited"
        " ModelUnavailable ModelRefused MalformedResponse EmptyModelResponseError"
        " OverlongPromptError EnvironmentFault RolloutTimeout ScoringError AgentError AgentFailure ToolError"
        " ToolParseError ToolCallError InfraError TunnelError WorkerLost SandboxError"
        " SandboxUnavailable SandboxLimit RunError JournalError TooManyFaults BudgetExhausted"
        " AuthenticationFailed ModelNotFound EndpointUnreachable WeightSyncError CheckpointError"
        " NonFiniteLoss NoLearningSignal RewardHacked GenerationStalled"
    ),
}
_HOME = {
    name: f"verifiers.{module}" for module, names in _MODULES.items() for name in names.split()
}

_SUBMODULES = frozenset("types errors clients testing parsers rubrics environments results".split())
"""Public submodules: ``vf.types`` works without importing it."""

_INTEGRATIONS = frozenset("TextArenaEnv ReasoningGymEnv GymEnv MCPEnv OpenEnvEnv".split())
"""Names that need an extra; not in ``__all__``, so that ``import *`` always works."""

legacy_modules.register()
moved.register("verifiers", moved.MOVED)


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted({*_HOME, *_names_of_others(only_light=True)})
    if module := _HOME.get(name):
        value = getattr(importlib.import_module(module), name)
    elif name in _INTEGRATIONS:
        value = getattr(importlib.import_module("verifiers.environments.integrations"), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"verifiers.{name}")
    elif not name.startswith("_") and name in _names_of_others():
        from verifiers.runtime.installed import public_name

        value = public_name(name)
    else:
        value = _older(name)
    globals()[name] = value
    return value


def _older(name: str) -> object:
    compat = legacy_modules.compat
    if name in compat.LATER:
        raise AttributeError(f"vf.{name}: {compat.LATER[name]}")
    if name not in compat.NAMES:
        raise AttributeError(f"module 'verifiers' has no attribute {name!r}{_suggestion(name)}")
    compat.note(name, present := compat.NAMES[name])
    return compat.load(present) if ":" in present else __getattr__(present)


def _names_of_others(only_light: bool = False) -> list[str]:
    """The names that other distributions define; ``only_light``: of those that are installed, and
    without those that take long to import."""
    from verifiers.runtime.distributions import HEAVY_NAMES, NAMES, provided

    if not only_light:
        return [*provided(NAMES), *provided(HEAVY_NAMES)]
    return [
        name
        for name, recorded in provided(NAMES).items()
        if importlib.util.find_spec(recorded.package)
    ]


def _suggestion(name: str) -> str:
    # tools ask every object for names of their own: __wrapped__, __file__, __test__
    if name.startswith("_"):
        return ""
    from verifiers.runtime.suggest import SIMILAR, close_match

    near = close_match(name, [*_HOME, *_names_of_others(), *_INTEGRATIONS], SIMILAR)
    return f"; did you mean {near!r}?" if near else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_names_of_others(), *_INTEGRATIONS})
