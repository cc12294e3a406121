"""Modules of older versions: each leads to what has its names now, costs nothing until then, says
what is missing."""

import importlib
import inspect
import logging
import pickle
import re
import subprocess
import sys

import pytest

import verifiers as vf
from verifiers import compat
from verifiers.legacy import modules
from verifiers.runtime.install_lines import install_line

ROWS = {
    "envs": "Environment SingleTurnEnv MultiTurnEnv ToolEnv StatefulToolEnv EnvGroup",
    "envs.environment": "Environment get_results_path",
    "envs.singleturn_env": "SingleTurnEnv",
    "envs.multiturn_env": "MultiTurnEnv MultiTurnMonitorRubric",
    "envs.tool_env": "ToolEnv ToolMonitorRubric",
    "envs.stateful_tool_env": "StatefulToolEnv",
    "envs.sandbox_env": "SandboxEnv SandboxMonitorRubric",
    "envs.python_env": "PythonEnv",
    "envs.env_group": "EnvGroup EnvGroupRubric",
    "envs.experimental.gym_env": "EpisodicSumRubric",
    "parsers": "Parser ThinkParser MaybeThinkParser XMLParser",
    "parsers.parser": "Parser",
    "parsers.xml_parser": "XMLParser",
    "parsers.think_parser": "ThinkParser",
    "parsers.maybe_think_parser": "MaybeThinkParser",
    "rubrics": "Rubric RubricGroup JudgeRubric ToolRubric",
    "environments.base": "Environment EnvironmentOptions DataOptions RowOptions",
    "environments.settings": "Settings EnvironmentOptions DataOptions RowOptions Oracle",
    "environments.multi_turn": "MultiTurnEnv ConversationOptions MultiTurnOptions",
    "rubrics.rubric": "Rubric",
    "rubrics.scoring": "Plan NOT_APPLICABLE RolloutScore RolloutScores scoring_error call each",
    "rubrics.rubric_group": "RubricGroup",
    "rubrics.judge_rubric": "JudgeRubric DEFAULT_JUDGE_PROMPT",
    "rubrics.math_rubric": "MathRubric",
    "rubrics.tool_rubric": "ToolRubric",
    "rubrics.experimental.hybrid_math_rubric": "HybridMathRubric DEFAULT_JUDGE_PROMPT",
    "clients": "Client ClientConfig EndpointConfig resolve_client as_client",
    "clients.client": "Client resolve_client",
    "clients.openai_chat_completions_client": "OpenAIChatCompletionsClient",
    "clients.openai_completions_client": "OpenAICompletionsClient",
    "clients.openai_responses_client": "OpenAIResponsesClient",
    "clients.anthropic_messages_client": "AnthropicMessagesClient",
    "scripts.eval": "main",
    "scripts.init": "main",
    "scripts.install": "main",
    "types": (
        "State RolloutInput RolloutOutput TrajectoryStep TrajectoryStepTokens RolloutScore"
        " RolloutScores GenerateOutputs GenerateMetadata ProcessedOutputs Timing Usage ErrorInfo"
        " SamplingArgs Info RewardFunc DatasetBuilder Message Messages ChatMessage ModelResponse"
        " ClientConfig EndpointConfig RolloutTiming ResponseMessage ResponseTokens ImageUrlSource"
        " InputAudioSource EndpointClientConfig ChatCompletion Completion GenericContentPart"
        " EvalConfig EvalRunConfig CustomBaseModel VersionInfo TimeSpan TimeSpans"
    ),
    "errors": "Error InvalidModelResponseError",
    "utils.config_utils": "ensure_keys MissingKeyError",
    "utils.async_utils": (
        "maybe_await maybe_semaphore NullAsyncContext NullContext with_sem"
        " maybe_call_with_named_args maybe_retry EventLoopLagMonitor EventLoopLagStats"
    ),
    "utils.data_utils": (
        "extract_boxed_answer extract_hash_answer strip_non_numeric load_example_dataset"
        " format_dataset BOXED_SYSTEM_PROMPT THINK_BOXED_SYSTEM_PROMPT"
    ),
    "utils.message_utils": (
        "messages_to_printable message_to_printable concat_messages normalize_messages"
        " sanitize_tool_calls strip_nones_from_content"
    ),
    "utils.tool_utils": (
        "convert_func_to_oai_tool convert_func_to_tool_def is_valid_tool_content_parts"
    ),
    "utils.client_utils": (
        "setup_client setup_openai_client setup_anthropic_client setup_http_client"
        " resolve_client_config resolve_client_configs load_prime_config"
    ),
    "utils.env_utils": "load_environment",
    "utils.install_utils": (
        "parse_env_id normalize_package_name is_hub_env is_installed check_hub_env_installed"
        " install_from_hub install_from_local install_from_repo"
    ),
    "utils.eval_utils": (
        "make_dataset print_results load_endpoints load_toml_config run_evaluation run_evaluations"
        " filter_inputs get_env_outputs get_log_level quiet_datasets to_col_order"
        " resolve_endpoints_file print_rewards print_info print_timing print_usage save_to_disk"
        " sanitize_metadata get_hf_hub_dataset_name save_rollout_results"
    ),
    "utils.save_utils": (
        "GenerateOutputsBuilder state_to_output states_to_outputs load_outputs save_outputs"
        " save_new_outputs save_metadata validate_resume_metadata make_serializable"
        " extract_usage_tokens is_json_serializable serialize_timing sanitize_metadata"
        " get_hf_hub_dataset_name push_results_to_hf_hub"
    ),
    "utils.path_utils": (
        "is_valid_eval_results_path find_latest_incomplete_eval_results_path get_results_path"
        " get_eval_results_path get_eval_runs_dir get_gepa_results_path write_temp_file"
    ),
    "utils.thread_utils": (
        "get_thread_local_storage get_or_create_thread_attr get_or_create_thread_loop"
        " register_executor unregister_executor scale_executors shutdown_executors"
    ),
    "utils.error_utils": "ErrorChain get_vf_error_chain",
    "utils.response_utils": "parse_response_messages parse_response_tokens parse_is_truncated",
    "runtime.calls": "maybe_await is_awaitable",
    "storage.identity": (
        "Free fingerprint rollout_key config_differences resume_differences changed_code CODE PARTS"
    ),
    "utils.logging_utils": (
        "setup_logging print_prompt_completions_sample print_time print_size truncate log_once"
        " warning_once JsonFormatter"
    ),
    "utils.metric_utils": "mean",
    "utils.usage_utils": "extract_usage_tokens",
}
"""What older code imports, module by module."""
EXTRAS = {
    "envs.textarena_env": ("TextArenaEnv", "textarena", "ta"),
    "envs.reasoninggym_env": ("ReasoningGymEnv", "reasoning_gym", "rg"),
    "envs.integrations.textarena_env": ("TextArenaEnv", "textarena", "ta"),
    "envs.integrations.reasoninggym_env": ("ReasoningGymEnv", "reasoning_gym", "rg"),
    "envs.experimental.gym_env": ("GymEnv", "gymnasium", "gym"),
    "envs.experimental.mcp_env": ("MCPEnv", "mcp", "mcp"),
}
"""Module -> (class, library, extra)."""
TRAINERS = (
    "trainers",
    "rl",
    "rl.trainer",
    "rl.trainer.config",
    "rl.trainer.trainer",
    "rl.trainer.orchestrator",
)
"""Their names are only listed here: taking one imports torch."""
NOT_YET = {"envs": "BrowserEnv"}


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("module", "name"), [(m, name) for m, names in ROWS.items() for name in names.split()]
)
def test_a_name_of_an_older_module(module, name):
    scope = {}
    exec(f"from verifiers.{module} import {name}", scope)
    value = scope[name]
    if name in vf.__all__ or name in compat.NAMES:
        assert value is getattr(vf, name)
    assert value is getattr(importlib.import_module(f"verifiers.{module}"), name)


def test_every_module_of_the_table_is_tried_or_only_holds_others():
    holders = {"envs.integrations", "envs.experimental", "rubrics.experimental", "scripts", "utils"}
    commands = {"scripts.setup", "scripts.tui"}
    assert (
        set(compat.MODULES) - set(ROWS) - set(EXTRAS) - set(NOT_YET) - set(TRAINERS)
        == holders | commands
    )
    assert set(compat.MODULE_NAMES) <= set(ROWS) | set(NOT_YET) | set(TRAINERS)


@pytest.mark.parametrize("module", EXTRAS)
def test_a_class_that_needs_a_library_is_there_or_says_what_to_install(module):
    name, library, extra = EXTRAS[module]
    module_found = importlib.import_module(f"verifiers.{module}")
    if importlib.util.find_spec(library) is not None:
        assert getattr(module_found, name) is getattr(vf, name)
        return
    with pytest.raises(ImportError, match=re.escape(install_line("verifiers", extra))):
        exec(f"from verifiers.{module} import {name}")
    with pytest.raises(AttributeError, match=re.escape(install_line("verifiers", extra))):
        getattr(vf, name)


@pytest.mark.parametrize("module", compat.SUBSTITUTES)
def test_a_name_that_is_gone_names_its_substitute(module):
    for name, substitute in compat.SUBSTITUTES[module].items():
        with pytest.raises(
            ImportError, match=re.escape(f"{name} is not in this version; instead: {substitute}")
        ):
            exec(f"from verifiers.{module} import {name}")
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec(f"from verifiers.{module} import no_such_name")


@pytest.mark.parametrize("module", compat.LATER_MODULES)
def test_a_module_that_is_gone_says_so_when_it_is_imported(module):
    with pytest.raises(ImportError, match=re.escape(compat.LATER_MODULES[module])):
        importlib.import_module(f"verifiers.{module}")


@pytest.mark.parametrize(("module", "name"), NOT_YET.items())
def test_what_this_edition_has_not_is_an_import_error_that_names_a_substitute(module, name):
    with pytest.raises(ImportError, match=r"not part of this edition; write a vf\.StatefulToolEnv"):
        exec(f"from verifiers.{module} import {name}")


def test_the_client_of_the_newest_release_is_named_with_the_server_for_it():
    with pytest.raises(ImportError, match=r"vf-serve-env ENV --wire zmq"):
        exec("from verifiers.v1.serve import EnvClient")


def test_the_folder_of_an_optimizer_is_beside_those_of_evaluations(tmp_path):
    from verifiers.utils.path_utils import get_eval_runs_dir, get_gepa_results_path

    folder = get_gepa_results_path("my-env", "a/b", tmp_path)
    assert (str(folder.parent), len(folder.name)) == ("outputs/gepa/my-env--a--b", 8)
    assert (
        str(get_gepa_results_path("my-env", "m", tmp_path, "runs").parent) == "runs/gepa/my-env--m"
    )
    (tmp_path / "my_env").mkdir()
    assert (
        get_gepa_results_path("my-env", "m", tmp_path).parent
        == tmp_path / "my_env/outputs/gepa/my-env--m"
    )
    assert get_eval_runs_dir("my-env", "m", tmp_path) == tmp_path / "my_env/outputs/evals/my-env--m"


def test_the_rubric_of_a_sandbox_measures_the_mean_of_its_commands():
    from verifiers.environments.sandbox import SandboxUse
    from verifiers.envs.sandbox_env import SandboxMonitorRubric
    from verifiers.sandbox.protocol import SandboxSpec

    monitor = SandboxMonitorRubric()
    assert monitor.get_reward_func_names() == [
        "sandbox_ready_wait_time",
        "sandbox_command_execution_time",
    ]
    assert monitor.get_reward_weights() == [0.0, 0.0]
    used = vf.State(sandbox=SandboxUse(SandboxSpec(), num_calls=2, ready_wait_s=2.0, command_s=4.0))
    monitor.score_rollout_sync(used)
    assert used["metrics"] == {
        "sandbox_ready_wait_time": 2.0,
        "sandbox_command_execution_time": 2.0,
    }
    monitor.score_rollout_sync(unused := vf.State(sandbox=SandboxUse(SandboxSpec())))
    assert set(unused["metrics"].values()) == {0.0}


@pytest.mark.parametrize("name", ["setup", "tui"])
def test_every_command_is_found_as_a_script(name):
    scope = {}
    exec(f"from verifiers.scripts.{name} import main", scope)
    assert scope["main"] is importlib.import_module(f"verifiers.cli.{name}").main


def test_a_client_is_resolved_by_its_older_name():
    from verifiers.clients import resolve_client

    assert resolve_client is vf.as_client
    assert not hasattr(vf.clients, "resolve_clients")


def test_unknown_names_and_modules_are_the_usual_errors():
    import verifiers.envs
    import verifiers.utils

    assert not hasattr(verifiers.envs, "NothingEnv")
    assert not hasattr(verifiers.types, "Nothing")
    with pytest.raises(ImportError, match="cannot import name 'NothingEnv'"):
        from verifiers.envs import NothingEnv  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'verifiers\.utils\.nothing'"):
        import verifiers.utils.nothing


def test_modules_behave_as_modules():
    import verifiers.utils.data_utils as data_utils

    assert vf.utils.data_utils is data_utils is sys.modules["verifiers.utils.data_utils"]
    assert "format_dataset" in dir(data_utils)
    assert (
        importlib.util.find_spec("verifiers.utils.data_utils").name == "verifiers.utils.data_utils"
    )
    assert not hasattr(data_utils, "__file__")
    assert inspect.ismodule(data_utils)
    scope = {}
    exec("from verifiers.envs import *", scope)
    assert scope["SingleTurnEnv"] is vf.SingleTurnEnv


def test_what_comes_from_an_older_module_pickles_under_its_present_name():
    from verifiers.envs import SingleTurnEnv
    from verifiers.types import RolloutTiming

    assert pickle.loads(pickle.dumps(RolloutTiming())) == vf.Timing()
    assert b"verifiers.environments" in pickle.dumps(SingleTurnEnv)


def test_registering_imports_nothing_and_keeps_a_module_that_is_there():
    code = (
        "import sys, verifiers\nours = {n: type(m).__name__ for n, m in sys.modules.items() if"
        " n.startswith('verifiers.')}\nprint(sorted(n for n, kind in ours.items() if kind =="
        " 'module'))\nprint(list(ours.values()).count('OlderModule'))\n"
    )
    loaded, count = run(code).splitlines()
    names = ["compat", "errors", "legacy", "legacy.modules", "legacy.moved"]
    assert loaded == str([f"verifiers.{name}" for name in names])
    assert int(count) == len(compat.MODULES)
    before = sys.modules["verifiers.utils"]
    modules.register()
    assert sys.modules["verifiers.utils"] is before


def test_a_use_is_noted_once_per_process(caplog):
    compat.note.cache_clear()
    with caplog.at_level(logging.DEBUG, "verifiers.compat"):
        for _ in range(2):
            modules.resolve("verifiers.utils.async_utils", "maybe_semaphore")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("module", TRAINERS)
def test_the_trainers_modules_have_its_names(module):
    names = {"RLTrainer", "RLConfig", "get_model", "get_tokenizer", "get_model_and_tokenizer"}
    assert names <= set(dir(importlib.import_module(f"verifiers.{module}")))


WITHOUT_TRAINER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "verifiers_trainer":
            raise ModuleNotFoundError(f"No module named {name!r}", name="verifiers_trainer")
sys.meta_path.insert(0, Absent())
for statement in (
    "from verifiers.trainers import GRPOTrainer, GRPOConfig", "from verifiers.rl.trainer import RLTrainer",
    "import verifiers.rl; verifiers.rl.RLConfig",
):
    try:
        exec(statement)
    except ImportError as error:
        print(error)
"""


def test_the_trainers_modules_say_what_to_install():
    lines = run(WITHOUT_TRAINER).splitlines()
    assert len(lines) == 3
    for module, line in zip(("trainers", "rl.trainer", "rl"), lines, strict=True):
        command = install_line("verifiers-trainer")
        assert (
            line
            == f"verifiers.{module}: it is in verifiers-trainer, which is not installed: {command}"
        )


# --- names of other versions


@pytest.mark.parametrize("name", compat.LATER)
def test_a_name_of_another_edition_is_explained(name):
    with pytest.raises(AttributeError) as caught:
        getattr(vf, name)
    assert str(caught.value).startswith(f"vf.{name}: it is not ")
    assert not hasattr(vf, name)
    assert name not in dir(vf)


def test_substitutes_exist():
    words = {
        word.strip(",;.:")
        for text in compat.LATER.values()
        for word in text.split()
        if word.startswith("vf.")
    }
    assert words
    for word in words:
        assert word.removeprefix("vf.") in dir(vf), word
