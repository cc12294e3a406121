"""Every constructor parameter of every part belongs to its identity, or is marked on its own line
as free.

Complete by construction: a class or a parameter that the tables below do not know fails the test.
"""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

import verifiers as vf
from support.harbor_tasks import IMAGE, write_task
from verifiers import legacy
from verifiers.clients.adapters import GetResponseClient, OpenAILikeClient
from verifiers.clients.local import LocalModel
from verifiers.clients.retry import RetryPolicy
from verifiers.environments.group_rubric import EnvGroupRubric
from verifiers.environments.integrations.gym import EpisodicSumRubric
from verifiers.rubrics.hybrid_math_rubric import HybridMathRubric
from verifiers.storage.configurations import config_differences, resume_differences
from verifiers.storage.described import describe
from verifiers.storage.identity import Identified, constructor_of
from verifiers.testing import ScriptedClient

ROWS = [{"question": "1 + 1", "answer": "2"}]


def first(completion) -> float:
    return 1.0


def second(completion) -> float:
    return 0.0


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract."""
    return a - b


class Chat:
    """A double of an SDK object."""

    class chat:
        class completions:
            @staticmethod
            def create(**_):
                return None


class OtherChat(Chat):
    pass


class Toy:
    """What ``GymEnv`` needs of an environment class."""


def env(*tools):
    return vf.ToolEnv(dataset=ROWS, tools=list(tools))


def weights_file(tmp_path, content):
    file = tmp_path / f"model-{len(content)}.Q4_1.gguf"
    file.write_bytes(content)
    return LocalModel(file)


REQUIRED: dict[str, Callable[..., dict]] = {
    "XMLParser": lambda _: {"fields": ["answer"]},
    "RubricGroup": lambda _: {"rubrics": [vf.Rubric(), vf.Rubric()]},
    "EnvGroup": lambda _: {"envs": [env(add), env(add)]},
    "EnvGroupRubric": lambda _: {"group": vf.EnvGroup([env(add)])},
    "MCPEnv": lambda _: {"mcp_servers": [{"name": "files", "command": "serve"}], "dataset": ROWS},
    "MultiAgentEnv": lambda _: {"dataset": ROWS, "roles": ["asker", "knower"]},
    "GymEnv": lambda _: {"env_cls": Toy},
    "OpenEnvEnv": lambda _: {"url": "http://127.0.0.1:8000"},
    "AgentEnv": lambda _: {"dataset": ROWS, "agent": "codex"},
    "HarborEnv": lambda tmp: {"path": write_task(tmp / "one"), "images": {IMAGE: "host"}},
    "ReasoningGymEnv": lambda _: {"gym": "leg_counting"},
    "TextArenaEnv": lambda _: {},
    "OpenAILikeClient": lambda _: {"called": Chat()},
    "GetResponseClient": lambda _: {"called": Chat()},
    "NeMoRLChatCompletionsClient": lambda _: {"client_or_config": Chat()},
    "LocalClient": lambda tmp: {"local_model": weights_file(tmp, b"one")},
    "RoundRobinClient": lambda _: {"members": [(vf.OpenAIChatCompletionsClient(), "m")]},
}
"""What a class cannot be made without; environments get a dataset."""

OTHER = {
    "agent": "nop",
    "attempts": 3,
    "agent_args": ["--quiet"],
    "url": "http://127.0.0.1:9",
    "reset_args": {"index": 1},
    "agent_files": {"notes.txt": "read this"},
    "artifacts": ["answer.txt"],
    "grading": "shared",
    "images": {IMAGE: "host", "another": "host"},
    "waive": ["environment.gpus"],
    "aggregation": "min",
    "action_parser": int,
    "answer_field": "result",
    "answer_key": "solution",
    "blocks_reminder": "Use Python.",
    "blocks_system_prompt": "Write Python.",
    "called": OtherChat(),
    "client_or_config": OtherChat(),
    "code_from": "blocks",
    "collect": ["answer.txt"],
    "command": ["another"],
    "config": vf.ClientConfig(extra_headers={"X-Variant": "b"}),
    "cpu_cores": 2,
    "dialect": "messages",
    "disk_size_gb": 1,
    "end_mark": "<done>",
    "env_args": {"n": 1},
    "env_cls": first,
    "env_id": "sums",
    "env_kwargs": {"n": 1},
    "env_names": ["a", "b"],
    "environment_vars": {"MODE": "b"},
    "envs": [env(add), env(subtract)],
    "error_formatter": repr,
    "extract_fn": str.strip,
    "last": True,
    "feedback_fn": str.upper,
    "few_shot": [{"role": "user", "content": "0 + 0"}, {"role": "assistant", "content": "0"}],
    "fields": ["think", "answer"],
    "files": {"notes.txt": "read this"},
    "funcs": [second],
    "game": "Hangman-v0",
    "gym": "basic_arithmetic",
    "headers": {"X-Variant": "b"},
    "history": "template",
    "judge_client": {"gpt-4.1-nano": ScriptedClient("yes")},
    "judge_model": "gpt-4.1",
    "judge_models": ["gpt-4.1", "gpt-5"],
    "judge_prompt": "Is {response} right?",
    "judge_sampling_args": {"temperature": 0.5},
    "local_model": lambda tmp: weights_file(tmp, b"another"),
    "max_episode_steps": 3,
    "max_file_mb": 2,
    "max_idle_seconds": 5,
    "max_log_kb": 1,
    "max_output_mb": 1,
    "max_seq_len": 99,
    "max_startup_wait_seconds": 7,
    "max_tool_result_chars": 77,
    "max_total_completion_tokens": 55,
    "max_turns": 3,
    "max_verify_chars": 44,
    "mcp_servers": [{"name": "files", "command": "serve", "args": ["--all"]}],
    "members": [(vf.OpenAIChatCompletionsClient(), "other")],
    "memory_gb": 1,
    "message_type": "completion",
    "names": ["truth", "style"],
    "obs_to_text": repr,
    "packages": ["numpy"],
    "parallel_tool_calls": True,
    "parser": vf.ThinkParser(),
    "pip_install_packages": "numpy",
    "query": {"version": "2"},
    "question_key": "prompt_text",
    "require_all": False,
    "judge_images": True,
    "roles": ["solver", "critic"],
    "rubric": vf.Rubric(funcs=[second]),
    "rubrics": [vf.Rubric(funcs=[first]), vf.Rubric()],
    "sampling_args": {"temperature": 0.5},
    "sandbox": "bubblewrap",
    "score_range": (0.0, 5.0),
    "score_rollouts": False,
    "seed": 3,
    "start_timeout_s": 5.0,
    "stop_errors": [KeyError],
    "strict": False,
    "system_prompt": "Add.",
    "timeout_minutes": 9,
    "timeout_per_command_seconds": 8,
    "timeout_s": 6.0,
    "timeout_seconds": 4.0,
    "tool_defs": [
        {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    ],
    "tool_names": ["search"],
    "tools": [subtract],
    "tools_shown": False,
    "trained_roles": ["main"],
    "use_judge_fallback": True,
    "weights": [0.5],
    "working_dir": "sub",
}
"""Another value of each parameter than its default or ``REQUIRED``'s; a function makes it of a
folder."""

BESIDES = {"weights": {"funcs": [first]}}
"""What must be given with a parameter, in both parts that are compared."""
SPECIAL = {
    ("HarborEnv", "agent_args"): ({"agent": "codex"}, ["--quiet"]),
    ("HarborEnv", "agent_files"): ({"agent": "codex"}, {"notes.txt": "read this"}),
    ("AnthropicMessagesClient", "config"): (
        {},
        vf.ClientConfig(client_type="anthropic_messages", extra_headers={"X-Variant": "b"}),
    ),
    ("RubricGroup", "weights"): ({}, [1.0, 0.5]),
    ("MathRubric", "parser"): ({}, vf.ThinkParser()),
    ("HybridMathRubric", "score_range"): ({}, (0.0, 2.0)),
    ("HybridMathRubric", "judge_client"): ({}, {"gpt-5-nano": ScriptedClient("yes")}),
    ("TextArenaEnv", "strict"): ({}, True),
    ("MultiAgentEnv", "trained_roles"): ({}, ["asker"]),
    ("TwoPlayerEnv", "trained_roles"): ({}, ["first"]),
    ("ProposerSolverEnv", "trained_roles"): ({}, ["proposer"]),
    ("SimulatedUserEnv", "trained_roles"): ({}, ["user"]),
    ("TwoPlayerEnv", "rubric"): ({"roles": ("white", "black")}, vf.Rubric(funcs=[second])),
    ("AgentEnv", "agent"): ({}, "pi"),
    ("AgentEnv", "command"): ({"agent": None, "command": ["one"]}, ["another"]),
    ("AgentEnv", "tools"): ({}, ["shell"]),
}
FREE = {
    "eval_path": lambda tmp: write_task(tmp / "another"),
    "only": ["one"],
    "path": lambda tmp: write_task(tmp / "another"),
    "api_key": "sk-another-key",
    "base_url": "http://127.0.0.1:9/v1",
    "connect_timeout_s": 1.5,
    "step_timeout_s": 1.5,
    "dataset": [{"question": "2 + 2", "answer": "4"}],
    "eval_dataset": [{"question": "3 + 3", "answer": "6"}],
    "group": vf.EnvGroup([env(subtract)]),
    "interleaved_rollouts": True,
    "keep_raw": True,
    "keep_workdirs": "kept",
    "map_kwargs": {"num_proc": 2},
    "max_concurrent": 3,
    "max_workers": 2,
    "num_eval_episodes": 3,
    "oracle": first,
    "num_eval_examples": 3,
    "num_train_episodes": 4,
    "num_train_examples": 4,
    "parallelize_scoring": True,
    "pass_threshold": 0.9,
    "retry": RetryPolicy(max_retries=1),
    "rollouts_per_example": 3,
    "success": "other",
}
CHAT_ALONE = (
    "ToolEnv StatefulToolEnv SandboxEnv PythonEnv MCPEnv TextArenaEnv MultiAgentEnv TwoPlayerEnv"
    " ProposerSolverEnv SimulatedUserEnv"
).split()
REFUSED = dict.fromkeys(CHAT_ALONE, "message_type") | {
    "EnvGroup": "dataset eval_dataset system_prompt few_shot parser rubric message_type tool_defs"
    " sampling_args max_seq_len timeout_seconds oracle",
    "HarborEnv": "dataset eval_dataset artifacts working_dir message_type",
    "ReasoningGymEnv": "dataset eval_dataset message_type",
}
NOT_TAKEN = {(cls, name) for cls, names in REFUSED.items() for name in names.split()}
"""Parameters of a base class that a class refuses, or in a ``RubricGroup`` takes from its first
child."""
EXTRAS = {"MCPEnv": "mcp", "GymEnv": "gymnasium", "ReasoningGymEnv": "reasoning_gym", "TextArenaEnv": "textarena",
          "MathRubric": "math_verify", "HybridMathRubric": "math_verify"}  # fmt: skip
SET_BY_THE_CLASS = {
    ("RubricGroup", "parser"),
    ("SingleTurnEnv", "max_turns"),
    ("ReasoningGymEnv", "max_turns"),
    ("GymEnv", "message_type"),
}
DOUBLES = {"ScriptedClient", "RecordingClient", "ReplayClient"}
"""Clients that stand for whichever model; a run is not compared by them."""


def all_parts():
    EnvGroupRubric, EpisodicSumRubric, HybridMathRubric, OpenAILikeClient, GetResponseClient
    for package in (vf.environments, legacy):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for name in vf.__all__:
        getattr(vf, name, None)
    parts, queue = {}, [Identified]
    while queue:
        cls = queue.pop()
        queue += cls.__subclasses__()
        if (
            cls.__module__.partition(".")[0] == "verifiers"
            and not cls.__name__.startswith("_")
            and cls is not Identified
        ):
            parts[cls.__name__] = cls
    for abstract in (
        "Environment",
        "MultiTurnEnv",
        "HttpClient",
        "StreamedClient",
        "TemplateClient",
    ):  # their parameters are those of every subclass
        parts.pop(abstract)
    return parts


PARTS = all_parts()
CASES = [
    (name, parameter)
    for name, cls in sorted(PARTS.items())
    for parameter in constructor_of(cls).names
    if (name, parameter) not in NOT_TAKEN | SET_BY_THE_CLASS
]


def made(name, tmp_path, **changes):
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    cls = PARTS[name]
    parameters = REQUIRED[name](tmp_path) if name in REQUIRED else {}
    if issubclass(cls, vf.Environment) and name not in REQUIRED:
        parameters["dataset"] = ROWS
    return cls(**(parameters | changes))


def test_every_part_is_there():
    expected = (
        "XMLParser Rubric RubricGroup JudgeRubric MathRubric HybridMathRubric ToolRubric"
        " EnvGroupRubric".split()
    )
    expected += (
        "Parser ThinkParser MaybeThinkParser SingleTurnEnv ToolEnv StatefulToolEnv SandboxEnv"
        " PythonEnv".split()
    )
    expected += "EnvGroup OpenAIChatCompletionsClient OpenAICompletionsClient LocalClient RoundRobinClient".split()
    assert set(expected) <= set(PARTS)
    assert len(CASES) > 200
    for cls in (vf.testing.ScriptedClient, vf.testing.RecordingClient, vf.testing.ReplayClient):
        assert cls.__name__ in DOUBLES
        assert not issubclass(cls, Identified)


@pytest.mark.parametrize(("name", "parameter"), CASES, ids=lambda text: text)
def test_a_parameter_changes_the_identity_unless_it_is_marked_free(name, parameter, tmp_path):
    free = constructor_of(PARTS[name]).free
    assert parameter in OTHER or parameter in FREE, (
        f"{parameter} of {name}: add another value of it to a table"
    )
    assert (parameter in FREE) is (parameter in free)
    table = FREE if parameter in FREE else OTHER
    besides, value = SPECIAL.get((name, parameter), (BESIDES.get(parameter, {}), table[parameter]))
    value = value(tmp_path) if parameter in ("local_model", "path", "eval_path") else value
    before = made(name, tmp_path, **besides).identity()
    assert before == made(name, tmp_path, **besides).identity()
    after = made(name, tmp_path, **(besides | {parameter: value})).identity()
    assert (after == before) is (parameter in free), config_differences(before, after)
    assert " at 0x" not in str(after)


# --- what an author writes ------------------------------------------------------------------------


class Difficult(vf.SingleTurnEnv):
    """Keeps its parameters under other names, or not at all."""

    def __init__(self, difficulty, *words, hint=None, **parameters):
        self._level = difficulty * 2
        super().__init__(dataset=ROWS, **parameters)


def test_the_parameters_of_an_authors_class_count_however_they_are_kept():
    same = Difficult(1, "a", hint="b", system_prompt="c").identity()
    assert Difficult(1, "a", hint="b", system_prompt="c").identity() == same
    different = [
        Difficult(2, "a"),
        Difficult(1, "b"),
        Difficult(1, "a", hint="x"),
        Difficult(1, "a", max_seq_len=3),
    ]
    assert len({str(part.identity()) for part in [Difficult(1, "a"), *different]}) == 5


def test_a_dataset_is_not_kept_alive_by_the_identity():
    assert "dataset" not in vf.SingleTurnEnv(dataset=ROWS)._constructor_arguments


def test_what_cannot_be_described_is_the_name_of_its_type_and_nothing_raises():
    class Hostile:
        def __getattribute__(self, name):
            raise RuntimeError(name)

        def __eq__(self, other):
            raise RuntimeError("eq")

        __hash__ = None

    circle: list = []
    circle.append(circle)
    described = describe(
        [Hostile(), circle, lambda: circle, object(), {1: {3, 1, 2}}, 1e400, range(3), "x" * 20_000]
    )
    assert "Hostile" in str(described[0])
    assert " at 0x" not in str(described)
    assert described[4:7] == [{"1": [1, 2, 3]}, "inf", "range(0, 3)"]
    assert described[7]["length"] == 20_000


def test_an_environment_that_its_rubric_holds_ends():
    class Knowing(vf.Rubric):
        def __init__(self, world=None):
            super().__init__()
            self.world = world

    knowing = Knowing()
    knowing.world = vf.SingleTurnEnv(dataset=ROWS, rubric=knowing)
    assert knowing.world.identity()["rubric"]["world"] == {"class": "verifiers.SingleTurnEnv"}


def test_signatures_are_those_of_the_constructors():
    assert "difficulty" in inspect.signature(Difficult).parameters
    assert list(inspect.signature(vf.XMLParser).parameters) == [
        "fields",
        "answer_field",
        "extract_fn",
        "last",
    ]


def test_code_of_another_python_is_not_compared():
    ours, theirs = describe(first), describe(first)
    theirs["code"] = re.sub(r"\d+\.\d+:", "9.9:", theirs["code"])
    assert resume_differences({"parser": {"f": ours}}, {"parser": {"f": theirs}}) == {}
    edited = ours | {"code": ours["code"][:-1] + ("0" if ours["code"][-1] != "0" else "1")}
    assert list(resume_differences({"parser": {"f": ours}}, {"parser": {"f": edited}})) == [
        "parser.f.code"
    ]


def test_a_run_of_a_class_that_has_moved_since_is_resumed():
    now = {"env_class": f"{vf.MultiTurnEnv.__module__}.{vf.MultiTurnEnv.__qualname__}"}
    before = {"env_class": "verifiers.environments.base.MultiTurnEnv"}
    assert now != before
    assert resume_differences(before, now) == {}
    assert list(resume_differences(before, {"env_class": "mine.MultiTurnEnv"})) == ["env_class"]


PROGRAM = """
import re, verifiers as vf
from verifiers.storage.configurations import fingerprint
def make(limit):
    def reward(completion, kinds=frozenset({"a", "b", "c", "d"})) -> float:
        return float(completion[-1].content in {"x", "y", "z", "w"} and len(kinds) < limit)
    return reward
def tool(a: int, *, words=("p", "q")) -> str:
    "A tool."
    return [w for w in words if re.match("a", w)] or (lambda: a)()
class Named(vf.Rubric):
    def __init__(self, names, **options):
        super().__init__(**options)
env = vf.ToolEnv(dataset=[{"question": "q"}], tools=[tool], rubric=Named({"s", "t", "u"}, funcs=[make(3)]))
print(fingerprint(env.identity()))
"""


def test_an_identity_is_the_same_in_every_process():
    seen = set()
    for seed in ("0", "1", "2"):
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
        ran = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        seen.add(ran.stdout)
    assert len(seen) == 1
