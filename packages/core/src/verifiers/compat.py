"""Tables of older names of core; the rest of the code uses canonical names only.

Each table maps an old name to the canonical name. Using an old name logs one debug line per
process; passing both names of an argument is a ``ConfigError``. ``legacy.modules`` makes the
modules of ``MODULES`` importable.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping
from typing import Any

from verifiers.errors import ConfigError

log = logging.getLogger("verifiers.compat")

ENVIRONMENT_PARAMETERS = {"oai_tools": "tool_defs"}

PUBLICATION = {"push_to_hf_hub": "push_to_hub", "hf_hub_dataset_name": "hub_name"}
RUN_OPTIONS = {
    "num_samples": "n_samples",
    "num_generations": "rollouts_per_example",
    "group_size": "rollouts_per_example",
    "max_concurrent_requests": "max_concurrent",
    **PUBLICATION,
}

SAMPLING_ARGS = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}

JUDGE_PARAMETERS = {"client": "judge_client", "template": "judge_prompt"}

TOKENIZER = {"processing_class": "tokenizer"}

METRICS = {"correct_answer_reward_func": "correct_answer"}
"""Metric names of older files, renamed on reading."""

ENVIRONMENT_CLASSES = {
    "verifiers.environments.base.MultiTurnEnv": "verifiers.environments.multi_turn.MultiTurnEnv",
    "verifiers.environments.agents.env.AgentEnv": "verifiers_agents.env.AgentEnv",
    "verifiers.environments.harbor.env.HarborEnv": "verifiers_agents.harbor.env.HarborEnv",
}
"""``env_class`` in the configuration of an older run -> the same class where it is now."""

SAVED_PACKAGES = {
    "verifiers": "verifiers",
    "verifiers_agents": "verifiers",
    "verifiers_trainer": "verifiers_trainer",
}
"""Package -> how saved runs name its classes: with this in place of the module, which may move, as
the agents did. The classes of every other package are saved with their module."""

SANDBOX_HOOKS = {"get_sandbox_request": "get_sandbox_spec"}
"""Hooks of sandbox environments that a subclass may define under an older name."""

REMOTE_SANDBOX = frozenset(
    "docker_image start_command gpu_count gpu_type team_id labels sandbox_name advanced_configs"
    " max_retries base_delay backoff_factor max_backoff_seconds jitter sandbox_client_max_workers"
    " sandbox_client_max_connections sandbox_client_max_keepalive_connections"
    " sandbox_wait_for_creation_max_attempts".split()
)
"""Parameters of sandbox environments that apply only to remote services, not to a local sandbox."""

_SCORING = "verifiers.legacy.scoring"
RUBRIC_METHODS = {
    **{
        f"_{name}": name
        for name in ("get_reward_func_names", "get_reward_funcs", "get_reward_weights")
    },
    **{
        name: f"{_SCORING}:{name}"
        for name in "score_rollouts score_rollouts_sync score_nothing dummy_score_rollout dummy_score_group".split()
    },
    "cleanup": f"{_SCORING}:clean_up",
}
"""Older methods of rubrics; see ``legacy_methods``."""
RUBRIC_PROPERTIES = {"reward_funcs": "funcs", "reward_weights": "weights"}
"""Older names of attributes of rubrics, which may be assigned."""

ENVIRONMENT_METHODS = {
    "_get_eval_inputs": "verifiers.legacy.running:eval_inputs",
    "_prepare_rollout_results": "verifiers.legacy.running:rollout_results",
    "_cleanup": "verifiers.legacy.running:clean_up",
    "_teardown": "aclose",
    "increment_state_usage_from_response": (
        "verifiers.legacy.running:increment_state_usage_from_response"
    ),
    "mark_timed_out": "verifiers.legacy.running:mark_timed_out",
    "process_env_results_vllm": "process_env_results",
    "run_rollouts": "verifiers.legacy.running:run_rollouts",
    **{
        name: f"verifiers.legacy.tokens:{name}"
        for name in (
            "format_prompt format_dataset parse_chat_completion_logprobs"
            " parse_chat_completion_tokens parse_completion_logprobs parse_completion_tokens"
            " process_chat_format_vllm process_completion_format_vllm"
        ).split()
    },
}
"""Methods of environments that older trainers call -> functions that implement them."""
ENVIRONMENT_PROPERTIES = {
    "_stop_conditions": "verifiers.legacy.running:stop_conditions",
    "_cleanup_handlers": "verifiers.legacy.running:cleanup_handlers",
    "_teardown_handlers": "verifiers.legacy.running:teardown_handlers",
}
"""Attributes of environments that older tools read -> functions that compute them."""
TOOL_PROPERTIES = {"tool_monitor_rubric": "verifiers.legacy.monitors:tool_monitor_rubric"}
"""The same of tool environments."""
TIMES = {
    name: f"{name}_ms"
    for name in ("setup", "generation", "scoring", "model", "env", "total", "overhead")
}
"""Names below a rollout's timing whose values were seconds, most of them spans -> the present key,
in milliseconds."""

ENDPOINT_KEYS = {
    "url": "api_base_url",
    "key": "api_key_var",
    "type": "client_type",
    "api_client_type": "client_type",
    "extra_headers": "headers",
}
"""Keys of an endpoint registry, also for ``group[key]``."""

NAMES = {
    "Error": "RolloutError",
    "InvalidModelResponseError": "MalformedResponse",
    "GenerateInputs": "RolloutInput",
    "ModelResponse": "Response",
    "ChatMessage": "Message",
    "ChatCompletion": "openai.types.chat:ChatCompletion",
    "Completion": "openai.types:Completion",
}
"""Old names of ``verifiers`` itself, resolved by its ``__getattr__``."""

_EDITION = "it is not part of this edition"
_SERVING = "environments run in the process of their caller, or behind the command vf-serve-env"
LATER = {
    "BrowserEnv": f"{_EDITION}; write a vf.StatefulToolEnv whose tools drive the browser",
    "CliAgentEnv": f"{_EDITION}; a vf.AgentEnv with a command runs an agent's program in a sandbox",
    "RLMEnv": f"{_EDITION}; write a vf.StatefulToolEnv with a tool that asks the model again",
    "OpenCodeEnv": f"{_EDITION}; vf.AgentEnv with agent='opencode' runs OpenCode in a sandbox",
    "ComposableEnv": f"{_EDITION}; a vf.EnvGroup combines environments",
    "RendererClient": f"{_EDITION}; vf.OpenAIChatCompletionsClient keeps the ids the server saw",
    "NeMoRLChatCompletionsClient": (
        "it is not a name of verifiers itself; import it from verifiers.clients"
    ),
    "OpenAIChatCompletionsTokenClient": (
        "it is not needed: vf.OpenAIChatCompletionsClient keeps the ids the server saw"
    ),
    "start_server": f"{_EDITION}; {_SERVING}",
    "stop_server": f"{_EDITION}; {_SERVING}",
    "serve": f"{_EDITION}; {_SERVING}",
    "update": f"{_EDITION}; change the state in env_response or setup_state",
    "Taskset": f"{_EDITION}; a dataset and a vf.Rubric under a vf.MultiTurnEnv say the same",
    "Harness": (
        f"{_EDITION}; override rollout(self, input, client, model, sampling_args) of an environment"
    ),
}
"""Names of ``verifiers`` that only older versions had, with their replacements."""

LATER_MODULES = {
    "serve": f"{_EDITION}; {_SERVING}",
    "utils.serve_utils": f"{_EDITION}; {_SERVING}",
    "v1": (
        f"{_EDITION}; `vf-serve-env ENV --wire zmq` serves an environment to its client, which"
        " needs its own Python environment"
    ),
}
"""Modules below ``verifiers`` that only older versions had, with their replacements; they raise
ImportError."""

SUBSTITUTES: dict[str, dict[str, str]] = {
    "envs.experimental.gym_env": {"GymMonitorRubric": "vf.GymEnv measures its steps itself"},
    "utils.eval_utils": {
        "run_evaluations_tui": "vf-eval shows a run in the terminal, vf-tui saved ones"
    },
}
"""Module below ``verifiers`` -> its names that this edition does not have, with their
replacements."""

MODULES: dict[str, str] = {
    "envs": "verifiers.environments verifiers.environments.integrations",
    "envs.environment": "verifiers.environments.base",
    "envs.singleturn_env": "verifiers.environments.single_turn",
    "envs.multiturn_env": "verifiers.environments.multi_turn",
    "envs.tool_env": "verifiers.environments.tool",
    "envs.stateful_tool_env": "verifiers.environments.stateful_tool",
    "envs.env_group": "verifiers.environments.group verifiers.environments.group_rubric",
    "envs.sandbox_env": "",
    "envs.python_env": "",
    "envs.textarena_env": "verifiers.environments.integrations",
    "envs.reasoninggym_env": "verifiers.environments.integrations",
    "envs.integrations": "verifiers.environments.integrations",
    "envs.integrations.textarena_env": "verifiers.environments.integrations",
    "envs.integrations.reasoninggym_env": "verifiers.environments.integrations",
    "envs.experimental": "verifiers.environments.integrations",
    "envs.experimental.gym_env": "verifiers.environments.integrations",
    "envs.experimental.mcp_env": "verifiers.environments.integrations",
    "rubrics.experimental": "verifiers.rubrics",
    "rubrics.experimental.hybrid_math_rubric": "verifiers.rubrics.hybrid_math_rubric",
    "clients.client": "verifiers.clients.protocol",
    "clients.openai_chat_completions_client": "verifiers.clients.http",
    "clients.openai_completions_client": "verifiers.clients.http",
    "clients.openai_responses_client": "verifiers.clients.streamed",
    "clients.anthropic_messages_client": "verifiers.clients.streamed",
    "trainers": "verifiers_trainer",
    "rl": "verifiers_trainer",
    "rl.trainer": "verifiers_trainer",
    "rl.trainer.config": "verifiers_trainer",
    "rl.trainer.trainer": "verifiers_trainer",
    "rl.trainer.orchestrator": "verifiers_trainer verifiers_trainer.pipeline.pipeline",
    "scripts": "",
    "scripts.eval": "verifiers.cli.evaluate.command",
    "scripts.init": "verifiers.cli.init",
    "scripts.install": "verifiers.cli.install.command",
    "scripts.setup": "verifiers.cli.install.setup",
    "scripts.tui": "verifiers.cli.tui",
    "utils": "",
    "utils.async_utils": "verifiers.legacy.async_utils",
    "utils.client_utils": "verifiers.legacy.clients",
    "utils.config_utils": "",
    "utils.data_utils": "verifiers.data.text verifiers.data.example_sets",
    "utils.env_utils": "verifiers.environments.registry",
    "utils.error_utils": "",
    "utils.eval_utils": "verifiers.legacy.evaluating verifiers.results",
    "utils.install_utils": "verifiers.legacy.commands verifiers.environments.registry",
    "utils.logging_utils": "verifiers.legacy.logs verifiers.runtime.logs verifiers.results",
    "utils.message_utils": "verifiers.data.messages",
    "utils.metric_utils": "verifiers.legacy.metrics verifiers.results.statistics",
    "utils.path_utils": "verifiers.legacy.paths",
    "utils.response_utils": "",
    "utils.save_utils": (
        "verifiers.legacy.saving verifiers.results.rows verifiers.results.export"
        " verifiers.results.run_metadata"
    ),
    "utils.thread_utils": "verifiers.legacy.threads",
    "utils.tool_utils": "verifiers.data.tool_schema",
    "utils.usage_utils": "verifiers.legacy.usage",
}
"""Module below ``verifiers`` -> the modules that have its names now, searched in this order after
``MODULE_NAMES``."""

_CONVERSATIONS = "verifiers.legacy.conversations"
MODULE_NAMES: dict[str, dict[str, str]] = {
    "rl.trainer.orchestrator": {"Orchestrator": "verifiers_trainer.pipeline.pipeline:Pipeline"},
    "errors": {
        "Error": "verifiers.errors:RolloutError",
        "InvalidModelResponseError": "verifiers.errors:MalformedResponse",
    },
    **{
        module: {name: f"verifiers.environments.keywords:{name}" for name in names.split()}
        for module, names in {
            "environments.base": "DataOptions EnvironmentOptions RowOptions",
            "environments.settings": "DataOptions EnvironmentOptions Oracle RowOptions",
            "environments.multi_turn": "ConversationOptions MultiTurnOptions",
        }.items()
    },
    "rubrics.scoring": {
        **{
            name: f"verifiers.rubrics.values:{name}"
            for name in ("NOT_APPLICABLE NotApplicable Value scoring_error value_or_error".split())
        },
        **{name: f"verifiers.rubrics.running:{name}" for name in ("call", "each")},
        **{
            name: f"verifiers.rubrics.outcomes:{name}" for name in ("RolloutScore", "RolloutScores")
        },
    },
    "runtime.calls": {
        name: f"verifiers.rollouts.author_code:{name}" for name in ("maybe_await", "is_awaitable")
    },
    "storage.identity": {
        **{
            name: f"verifiers.storage.configurations:{name}"
            for name in (
                "NOT_SET PARTS changed_code config_differences fingerprint frozen_config"
                " resume_differences rollout_key uncompared_parts"
            ).split()
        },
        "CODE": "verifiers.storage.described:CODE",
    },
    "types": {
        "Rollout": "verifiers.rollouts.rollout:Rollout",
        "RolloutTiming": "verifiers.rollouts.rollout:Timing",
        "Turn": "verifiers.rollouts.turn:Turn",
        "EndpointClientConfig": "verifiers.clients:ClientConfig",
        "ImageUrlSource": "verifiers.types:AttributeDict",
        "InputAudioSource": "verifiers.types:AttributeDict",
        "ChatCompletion": "openai.types.chat:ChatCompletion",
        "Completion": "openai.types:Completion",
        **{
            name: f"verifiers.legacy.type_names:{name}"
            for name in (
                "MessageType ChatMessages ClientType FinishReason MessageContent ContentPart"
                " GenericContentPart ThinkingBlock JsonPrimitive IndividualRewardFunc"
                " GroupRewardFunc StartCallback ProgressCallback LogCallback TokenUsage Endpoint"
                " Endpoints VersionInfo CustomBaseModel TimeSpan TimeSpans"
            ).split()
        },
        **{name: f"verifiers.legacy.evaluating:{name}" for name in ("EvalConfig", "EvalRunConfig")},
    },
    "clients": {
        "resolve_client": "verifiers.clients:as_client",
        "NeMoRLChatCompletionsClient": "verifiers.legacy.nemo_client:NeMoRLChatCompletionsClient",
    },
    "clients.client": {"resolve_client": "verifiers.clients:as_client"},
    "envs.environment": {"get_results_path": "verifiers.legacy.paths:get_results_path"},
    "envs.multiturn_env": {
        "MultiTurnMonitorRubric": "verifiers.legacy.monitors:MultiTurnMonitorRubric"
    },
    "envs.tool_env": {"ToolMonitorRubric": "verifiers.legacy.monitors:ToolMonitorRubric"},
    "envs.sandbox_env": {
        "SandboxEnv": "verifiers:SandboxEnv",
        "SandboxMonitorRubric": "verifiers.legacy.monitors:SandboxMonitorRubric",
    },
    "envs.python_env": {"PythonEnv": "verifiers:PythonEnv"},
    "utils.data_utils": {"format_dataset": f"{_CONVERSATIONS}:format_dataset"},
    "utils.message_utils": {
        **{
            name: f"{_CONVERSATIONS}:{name}"
            for name in ("sanitize_tool_calls", "strip_nones_from_content")
        },
        **{
            name: f"verifiers.legacy.raw_messages:{name}"
            for name in (
                "from_raw_message from_raw_content_part normalize_messages maybe_normalize_messages"
                " message_to_printable messages_to_printable serialize_message_for_output"
                " serialize_messages_for_output format_messages"
            ).split()
        },
    },
    "utils.config_utils": {
        "ensure_keys": "verifiers.data.text:ensure_keys",
        "MissingKeyError": "verifiers.errors:MissingKeyError",
    },
    "utils.tool_utils": {
        "convert_func_to_oai_tool": "verifiers.data.tool_schema:tool_from_function",
        "convert_func_to_tool_def": "verifiers.data.tool_schema:tool_from_function",
        "is_valid_tool_content_parts": "verifiers.legacy.raw_messages:is_valid_tool_content_parts",
    },
    "rubrics.judge_rubric": {
        "DEFAULT_JUDGE_PROMPT": "verifiers.legacy.prompts:DEFAULT_JUDGE_PROMPT"
    },
    "rubrics.experimental.hybrid_math_rubric": {
        "DEFAULT_JUDGE_PROMPT": "verifiers.rubrics.judging:MATH_VERDICT_PROMPT"
    },
    "utils.response_utils": {
        name: f"{_CONVERSATIONS}:{name}"
        for name in (
            "parse_response_message",
            "parse_response_messages",
            "parse_response_tokens",
            "parse_is_truncated",
        )
    },
    "utils.error_utils": {
        name: f"{_CONVERSATIONS}:{name}"
        for name in (
            "ErrorChain",
            "get_error_chain",
            "get_vf_error_chain",
            "error_info",
            "error_type_name",
        )
    },
    "utils.eval_utils": {
        "load_endpoints": "verifiers.clients:load_endpoints",
        **{
            name: f"verifiers.legacy.saving:{name}"
            for name in "save_to_disk sanitize_metadata get_hf_hub_dataset_name save_rollout_results".split()
        },
    },
    "utils.save_utils": {"extract_usage_tokens": "verifiers.legacy.usage:extract_usage_tokens"},
}
"""Module below ``verifiers`` -> its names that were renamed or moved: ``module:name``."""


UNCHANGED = {
    "Environment(max_workers=8)": (
        "the most threads that run a run's synchronous rewards and tools; 32 when not given"
    ),
    "env.oai_tools": "`env.tool_defs`, the same list",
    'state["oai_tools"]': '`state["tool_defs"]`, the same list',
    'state["id"]': '`state["example_id"]`',
    'state["turn"]': '`len(state["trajectory"])`',
    'state["responses"]': 'the `response` of every step of `state["trajectory"]`',
    'metadata["time_ms"]': '`metadata["time"] * 1000`',
    'load_environment("vf-name")': '`load_environment("name")`',
    'load_environment("owner/name@1.0")': (
        '`load_environment("name")`, refused unless that version is installed'
    ),
    "judge(prompt, completion, answer, state, **slots)": (
        "further keywords fill further `{slot}`s of its prompt"
    ),
    "update_tool_args(tool_args, messages, state)": (
        "`update_tool_args(tool_name, tool_args, messages, state)`"
    ),
    "env_response(…) -> (messages, state)": "`env_response(…) -> messages`",
    "is_completed(messages, state)": "a method marked `@vf.stop`",
    "setup_state(state) -> state": "`setup_state(state)`, which changes it in place",
    "rollout(client, model, prompt=…) -> (completion, state)": (
        "`rollout(input, client, model) -> state`"
    ),
    "score_rollout(prompt, completion, answer, state)": "`score_rollout(state)`",
    "run_group(…, gen_sampling_args=, gen_sem=, score_sem=) -> states": (
        "`run_group(…, sampling_args=) -> rows`"
    ),
}
"""Older forms that still work and are in no other table, with their meaning, in Markdown for the
reference page."""

PAGE: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("Names of `verifiers`", NAMES),
    ("Parameters of environments", ENVIRONMENT_PARAMETERS),
    ("Options of `evaluate` and `generate`", RUN_OPTIONS),
    ("Sampling arguments", SAMPLING_ARGS),
    ("Parameters of `make_dataset`", PUBLICATION),
    ("Parameters of `JudgeRubric`", JUDGE_PARAMETERS),
    ("Hooks of sandbox environments", SANDBOX_HOOKS),
    ("Methods of rubrics", RUBRIC_METHODS),
    ("Attributes of rubrics", RUBRIC_PROPERTIES),
    ("Methods of environments that older trainers call", ENVIRONMENT_METHODS),
    ("Attributes of environments", ENVIRONMENT_PROPERTIES),
    ("Attributes of tool environments", TOOL_PROPERTIES),
    ("Parameters of `process_env_results`", TOKENIZER),
    ("Times of a rollout, in seconds", TIMES),
    ("Metrics of older files", METRICS),
    ("Classes of environments in saved configurations", ENVIRONMENT_CLASSES),
    ("Packages in the names of saved classes", SAVED_PACKAGES),
    ("Keys of an endpoint registry", ENDPOINT_KEYS),
    ("Forms that work as they are", UNCHANGED),
    ("Modules", {f"verifiers.{module}": homes for module, homes in MODULES.items()}),
    (
        "Names of modules",
        {
            f"verifiers.{module}.{name}": home
            for module, names in MODULE_NAMES.items()
            for name, home in names.items()
        },
    ),
    ("Not in this edition", LATER),
    (
        "Modules not in this edition",
        {f"verifiers.{module}": how for module, how in LATER_MODULES.items()},
    ),
    (
        "Names of modules not in this edition",
        {
            f"verifiers.{module}.{name}": how
            for module, names in SUBSTITUTES.items()
            for name, how in names.items()
        },
    ),
)
"""(title, table) in the order of the reference page, ``docs/compat_page.py``; other packages may
define one too."""


def load(target: str) -> Any:
    """The object at ``module:name``. ``legacy`` is the top layer, so lower layers import it by
    name."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def hook(owner: object, name: str, table: Mapping[str, str]) -> Any:
    """The method ``name`` of ``owner``, or the method that its class defines under an older
    name."""
    for old, new in table.items():
        if new == name and callable(getattr(type(owner), old, None)):
            note(old, new)
            return getattr(owner, old)
    return getattr(owner, name)


def rename(
    keywords: Mapping[str, object], table: Mapping[str, str], where: str = "the call"
) -> dict[str, Any]:
    """``keywords`` with canonical names. *Raises* ConfigError when both names of an argument are
    passed."""
    renamed = {name: value for name, value in keywords.items() if name not in table}
    for old in keywords.keys() & table.keys():
        new = table[old]
        if new in renamed:
            raise ConfigError(
                f"{where}: {old!r} is the older name of {new!r}; give one of them", key=old
            )
        note(old, new)
        renamed[new] = keywords[old]
    return renamed


@functools.cache
def note(old: str, new: str) -> None:
    """Log once per process that an older name was used."""
    log.debug("%s is the older spelling of %s", old, new)


@functools.cache
def parameters_of(cls: type) -> tuple[str, ...]:
    """The constructor parameters of ``cls`` and of its bases, by name."""
    import inspect

    names: dict[str, None] = {}
    for base in cls.__mro__:
        constructor = base.__dict__.get("__init__")
        if inspect.isfunction(constructor):
            for parameter in list(inspect.signature(constructor).parameters.values())[1:]:
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                    names[parameter.name] = None
    return tuple(names)
