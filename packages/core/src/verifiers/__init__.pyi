"""The public names for type checkers and editors. At run time ``__init__.py`` imports each on first use."""

from verifiers import clients as clients
from verifiers import environments as environments
from verifiers import errors as errors
from verifiers import parsers as parsers
from verifiers import results as results
from verifiers import rubrics as rubrics
from verifiers import testing as testing
from verifiers import types as types
from verifiers.checks import audit_environment, check_environment
from verifiers.checks.chat_template import check_increasing_context
from verifiers.clients import (
    AnthropicMessagesClient,
    Client,
    ClientConfig,
    EndpointConfig,
    OpenAIChatCompletionsClient,
    OpenAICompletionsClient,
    OpenAIResponsesClient,
    as_client,
    load_endpoints,
    use_client,
)
from verifiers.data.example_sets import load_example_dataset
from verifiers.data.images import decode_image, image_part
from verifiers.data.text import (
    BOXED_SYSTEM_PROMPT,
    THINK_BOXED_SYSTEM_PROMPT,
    ensure_keys,
    extract_boxed_answer,
    extract_hash_answer,
    strip_non_numeric,
)
from verifiers.environments import (
    EnvGroup,
    Environment,
    MultiTurnEnv,
    PythonEnv,
    SandboxEnv,
    SingleTurnEnv,
    StatefulToolEnv,
    ToolEnv,
)
from verifiers.environments.integrations import GymEnv as GymEnv
from verifiers.environments.integrations import MCPEnv as MCPEnv
from verifiers.environments.integrations import OpenEnvEnv as OpenEnvEnv
from verifiers.environments.integrations import ReasoningGymEnv as ReasoningGymEnv
from verifiers.environments.integrations import TextArenaEnv as TextArenaEnv
from verifiers.environments.multi_agent import (
    MultiAgentEnv,
    ProposerSolverEnv,
    Role,
    SimulatedUserEnv,
    TwoPlayerEnv,
)
from verifiers.environments.registry import list_environments, load_environment
from verifiers.errors import (
    AgentError,
    AgentFailure,
    AuthenticationFailed,
    BudgetExhausted,
    CheckpointError,
    ConfigError,
    DatasetError,
    EmptyModelResponseError,
    EndpointUnreachable,
    EnvironmentFault,
    EnvironmentLoadError,
    GenerationStalled,
    InfraError,
    JournalError,
    MalformedResponse,
    MissingKeyError,
    ModelError,
    ModelNotFound,
    ModelRefused,
    ModelUnavailable,
    NoLearningSignal,
    NonFiniteLoss,
    OverlongPromptError,
    RateLimited,
    RewardHacked,
    RolloutError,
    RolloutTimeout,
    RunBusy,
    RunError,
    RunMismatch,
    SandboxError,
    SandboxLimit,
    SandboxUnavailable,
    ScoringError,
    ToolCallError,
    ToolError,
    ToolParseError,
    TooManyFaults,
    TunnelError,
    UnknownEnvironment,
    UsageError,
    VerifiersError,
    WeightSyncError,
    WorkerLost,
)
from verifiers.parsers import MaybeThinkParser, Parser, ThinkParser, XMLParser
from verifiers.results import (
    GenerateMetadata,
    GenerateOutputs,
    ProcessedOutputs,
    export_trajectories,
    load_results,
    make_dataset,
    print_prompt_completions_sample,
)
from verifiers.results.rows import RolloutOutput
from verifiers.rollouts.author_code import (
    advantage,
    cleanup,
    fork,
    metric,
    reward,
    setup,
    stop,
    teardown,
)
from verifiers.rollouts.branching import Branching
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.rollout import RolloutInput
from verifiers.rollouts.state import State
from verifiers.rollouts.steps import TrajectoryStep, TrajectoryStepTokens
from verifiers.rollouts.values import Timing
from verifiers.rubrics import JudgeRubric, MathRubric, Rubric, RubricGroup, ToolRubric
from verifiers.rubrics.outcomes import RolloutScore, RolloutScores
from verifiers.rubrics.values import NOT_APPLICABLE
from verifiers.runtime.logs import log_level, quiet_verifiers, setup_logging
from verifiers.types import (
    AssistantMessage,
    DatasetBuilder,
    ImageUrlContentPart,
    Info,
    InputAudioContentPart,
    Message,
    Messages,
    ModelRequest,
    Response,
    ResponseTokens,
    RewardFunc,
    SamplingArgs,
    SystemMessage,
    TextContentPart,
    TextMessage,
    Tool,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
)
from verifiers.view.opening import open_view
from verifiers_agents import Agent, AgentEnv, model_gateway
from verifiers_agents.harbor.env import HarborEnv
from verifiers_agents.tasksets.env import TasksetEnv
from verifiers_trainer import GRPOConfig as GRPOConfig
from verifiers_trainer import GRPOTrainer as GRPOTrainer
from verifiers_trainer import RLConfig as RLConfig
from verifiers_trainer import RLTrainer as RLTrainer
from verifiers_trainer import get_model as get_model
from verifiers_trainer import get_model_and_tokenizer as get_model_and_tokenizer
from verifiers_trainer import get_tokenizer as get_tokenizer
from verifiers_trainer import grpo_defaults as grpo_defaults
from verifiers_trainer import lora_defaults as lora_defaults

__all__ = [
    "BOXED_SYSTEM_PROMPT",
    "NOT_APPLICABLE",
    "THINK_BOXED_SYSTEM_PROMPT",
    "Agent",
    "AgentEnv",
    "AgentError",
    "AgentFailure",
    "AnthropicMessagesClient",
    "AssistantMessage",
    "AuthenticationFailed",
    "Branching",
    "BudgetExhausted",
    "CheckpointError",
    "Client",
    "ClientConfig",
    "ConfigError",
    "DatasetBuilder",
    "DatasetError",
    "EmptyModelResponseError",
    "EndpointConfig",
    "EndpointUnreachable",
    "EnvGroup",
    "Environment",
    "EnvironmentFault",
    "EnvironmentLoadError",
    "ErrorInfo",
    "GenerateMetadata",
    "GenerateOutputs",
    "GenerationStalled",
    "HarborEnv",
    "ImageUrlContentPart",
    "Info",
    "InfraError",
    "InputAudioContentPart",
    "JournalError",
    "JudgeRubric",
    "MalformedResponse",
    "MathRubric",
    "MaybeThinkParser",
    "Message",
    "Messages",
    "MissingKeyError",
    "ModelError",
    "ModelNotFound",
    "ModelRefused",
    "ModelRequest",
    "ModelUnavailable",
    "MultiAgentEnv",
    "MultiTurnEnv",
    "NoLearningSignal",
    "NonFiniteLoss",
    "OpenAIChatCompletionsClient",
    "OpenAICompletionsClient",
    "OpenAIResponsesClient",
    "OverlongPromptError",
    "Parser",
    "ProcessedOutputs",
    "ProposerSolverEnv",
    "PythonEnv",
    "RateLimited",
    "Response",
    "ResponseTokens",
    "RewardFunc",
    "RewardHacked",
    "Role",
    "RolloutError",
    "RolloutInput",
    "RolloutOutput",
    "RolloutScore",
    "RolloutScores",
    "RolloutTimeout",
    "Rubric",
    "RubricGroup",
    "RunBusy",
    "RunError",
    "RunMismatch",
    "SamplingArgs",
    "SandboxEnv",
    "SandboxError",
    "SandboxLimit",
    "SandboxUnavailable",
    "ScoringError",
    "SimulatedUserEnv",
    "SingleTurnEnv",
    "State",
    "StatefulToolEnv",
    "SystemMessage",
    "TasksetEnv",
    "TextContentPart",
    "TextMessage",
    "ThinkParser",
    "Timing",
    "TooManyFaults",
    "Tool",
    "ToolCall",
    "ToolCallError",
    "ToolEnv",
    "ToolError",
    "ToolMessage",
    "ToolParseError",
    "ToolRubric",
    "TrajectoryStep",
    "TrajectoryStepTokens",
    "TunnelError",
    "TwoPlayerEnv",
    "UnknownEnvironment",
    "Usage",
    "UsageError",
    "UserMessage",
    "VerifiersError",
    "WeightSyncError",
    "WorkerLost",
    "XMLParser",
    "advantage",
    "as_client",
    "audit_environment",
    "check_environment",
    "check_increasing_context",
    "cleanup",
    "decode_image",
    "ensure_keys",
    "export_trajectories",
    "extract_boxed_answer",
    "extract_hash_answer",
    "fork",
    "image_part",
    "list_environments",
    "load_endpoints",
    "load_environment",
    "load_example_dataset",
    "load_results",
    "log_level",
    "make_dataset",
    "metric",
    "model_gateway",
    "open_view",
    "print_prompt_completions_sample",
    "quiet_verifiers",
    "reward",
    "setup",
    "setup_logging",
    "stop",
    "strip_non_numeric",
    "teardown",
    "use_client",
]

__version__: str
