"""The rows of the parity table: one small script each, named after what it does.

Every script runs unmodified under the releases that it names and under this one, and returns plain
JSON.
"""

import asyncio
import collections.abc
import inspect
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import datasets

import verifiers as vf

FIRST, SECOND, EARLY_THIRD, THIRD = "0.1.5", "0.1.9", "0.1.12", "0.1.14"
ALL = (FIRST, SECOND, EARLY_THIRD, THIRD)
STATES = (SECOND, EARLY_THIRD, THIRD)
CLIENTS = (EARLY_THIRD, THIRD)


@dataclass(frozen=True)
class Row:
    """A script, the item of the list it belongs to, and the releases that have what it calls."""

    item: str
    releases: tuple
    script: object
    differs: str
    """Why this release gives another value than the published ones; empty when it gives the newest
    one's."""
    value: object


ROWS = {}


def row(item, releases=ALL, differs="", value=None):
    """Register a script. ``differs`` says why this release returns ``value`` where published ones
    return another."""

    def register(script):
        ROWS[script.__name__] = Row(item, releases, script, differs, value)
        return script

    return register


# --- what the scripts share


def run(value):
    """The value of a call that is a coroutine in some releases and a plain call in others."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def data(*questions, **columns):
    rows = [{"question": question, "answer": question} for question in questions or ("q",)]
    for one in rows:
        one.update(columns)
    return datasets.Dataset.from_list(rows)


class Chat:
    """What the first two generations take: ``chat.completions.create``."""

    base_url, api_key = "http://127.0.0.1:1/v1", "none"

    def __init__(self, *replies):
        self.replies, self.asked = list(replies), []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))
        self.completions = SimpleNamespace(create=self.create_text)

    async def create(self, **request):
        from openai.types.chat import ChatCompletion

        reply = self.replies[len(self.asked) % len(self.replies)]
        self.asked.append(request)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, str):
            reply = {"role": "assistant", "content": reply}
        choice = {
            "index": 0,
            "finish_reason": "tool_calls" if "tool_calls" in reply else "stop",
            "message": reply,
        }
        usage = {
            "prompt_tokens": 10 * len(self.asked),
            "completion_tokens": 3,
            "total_tokens": 10 * len(self.asked) + 3,
        }
        return ChatCompletion.model_validate(
            {
                "id": "1",
                "created": 0,
                "model": "m",
                "object": "chat.completion",
                "choices": [choice],
                "usage": usage,
            }
        )

    async def create_text(self, **request):
        from openai.types import Completion

        self.asked.append(request)
        choice = {"index": 0, "finish_reason": "stop", "text": self.replies[0]}
        return Completion.model_validate(
            {
                "id": "1",
                "created": 0,
                "model": "m",
                "object": "text_completion",
                "choices": [choice],
            }
        )


if hasattr(vf, "Client"):
    from verifiers.types import Response, ResponseMessage, ToolCall, Usage

    class Scripted(vf.Client):
        """What the third generation takes: a subclass of ``vf.Client`` with its template of
        methods."""

        def __init__(self, *replies):
            super().__init__(SimpleNamespace())
            self.replies, self.asked = list(replies), []

        def setup_client(self, config):
            return SimpleNamespace()

        async def to_native_tool(self, tool):
            return {"name": tool.name}

        async def to_native_prompt(self, messages):
            return list(messages), {}

        async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            reply = self.replies[len(self.asked) % len(self.replies)]
            self.asked.append(
                {"prompt": prompt, "model": model, "sampling_args": sampling_args, "tools": tools}
            )
            if isinstance(reply, Exception):
                raise reply
            return reply

        async def raise_from_native_response(self, response):
            return None

        async def from_native_response(self, response):
            number = len(self.asked)
            reply = {"content": response} if isinstance(response, str) else dict(response)
            calls = [
                ToolCall(
                    id=c["id"], name=c["function"]["name"], arguments=c["function"]["arguments"]
                )
                for c in reply.get("tool_calls") or []
            ]
            message = ResponseMessage(
                content=reply.get("content"),
                reasoning_content=None,
                thinking_blocks=None,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
                tokens=None,
            )
            usage = Usage(
                prompt_tokens=10 * number,
                reasoning_tokens=0,
                completion_tokens=3,
                total_tokens=10 * number + 3,
            )
            return Response(id=str(number), created=0, model="m", usage=usage, message=message)

        async def close(self):
            return None


def client(*replies):
    """A scripted client of the release's own kind."""
    return (Scripted if hasattr(vf, "Client") else Chat)(*replies)


def call(name, arguments="{}", call_id="c1"):
    """A reply that calls one tool."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def column(results, name):
    """A column of results, whatever the generation keeps it in."""
    if isinstance(results, dict) and "outputs" in results:
        return [output.get(name) for output in results["outputs"]]
    if isinstance(results, dict):
        return results[name]
    if hasattr(results, "outputs"):
        return [output.get(name) for output in results.outputs]
    return getattr(results, name)


def play(env, *replies, **options):
    """The results of one evaluation."""
    return run(env.evaluate(client(*replies), "m", **options))


def rewards(env, *replies, **options):
    return column(play(env, *replies, **options), "reward")


def single(rubric=None, **parameters):
    return vf.SingleTurnEnv(
        dataset=parameters.pop("dataset", None) or data(), rubric=rubric, **parameters
    )


def text_of(message):
    return message["content"] if isinstance(message, dict) else message.content


def said(text):
    return [{"role": "assistant", "content": text}]


# --- 1.1, 1.2: subclasses of vf.Client


@row("1.1", CLIENTS)
def a_client_with_the_template_of_methods():
    def right(completion):
        return float(text_of(completion[-1]) == "hello")

    return rewards(single(vf.Rubric(funcs=[right])), "hello")


@row(
    "1.1",
    CLIENTS,
    differs="sampling arguments without a value are left out",
    value={
        "prompt": ["user", "q", "user"],
        "sampling": {"temperature": 0.5},
        "extra": 1,
        "model": "m",
    },
)
def what_the_template_is_given():
    seen = {}

    class Seen(Scripted):
        async def to_native_prompt(self, messages):
            first = messages[-1]
            seen["prompt"] = [first.role, first.content, first["role"]]
            return messages, {"extra": 1}

        async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            seen["sampling"] = {
                k: v for k, v in sampling_args.items() if k in ("temperature", "top_p")
            }
            seen["extra"], seen["model"] = kwargs.get("extra"), model
            return await super().get_native_response(prompt, model, sampling_args, tools)

    run(single().evaluate(Seen("hi"), "m", sampling_args={"temperature": 0.5, "top_p": None}))
    return seen


@row("1.1", CLIENTS)
def a_client_that_overrides_get_response_alone():
    class Alone(Scripted):
        async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            return await self.from_native_response("alone")

    results = run(single().evaluate(Alone("x"), "m"))
    return [text_of(completion[-1]) for completion in column(results, "completion")]


@row("1.1", CLIENTS)
def a_client_without_methods_cannot_be_made():
    class Empty(vf.Client):
        pass

    return Empty(SimpleNamespace()) and "made"


@row("1.1", CLIENTS)
def the_parts_of_a_client():
    from verifiers.clients import Client
    from verifiers.clients.client import Client as Other

    kept = SimpleNamespace()

    class Keeping(Scripted):
        def __init__(self):
            super(Scripted, self).__init__(kept)

    made = Keeping()
    return [
        Client is vf.Client,
        Other is Client,
        made.client is kept,
        isinstance(made.logger, logging.Logger),
    ]


@row("1.1", CLIENTS)
def tools_reach_the_template():
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    made = Scripted("done")
    run(vf.ToolEnv(tools=[add], dataset=data()).evaluate(made, "m"))
    return made.asked[0]["tools"]


@row("1.1", CLIENTS)
def a_foreign_failure_of_a_client_is_a_model_error():
    from verifiers.errors import ModelError

    async def ask():
        try:
            await Scripted(RuntimeError("boom")).get_response([vf_message("user", "q")], "m", {})
        except ModelError as error:
            return [type(error).__name__, type(error.__cause__).__name__]

    return run(ask())


@row("1.1", CLIENTS)
def an_error_of_the_tree_passes_through_a_client():
    from verifiers.errors import OverlongPromptError

    made = Scripted(OverlongPromptError("too long"))
    results = run(single().evaluate(made, "m"))
    return [len(made.asked), column(results, "stop_condition"), column(results, "is_truncated")]


def vf_message(role, text):
    from verifiers import types

    return {"user": types.UserMessage, "assistant": types.AssistantMessage}[role](content=text)


@row("1.2", CLIENTS)
def a_response_is_read_and_dumped():
    response = run(Scripted("x").get_response([vf_message("user", "q")], "m", {}))
    message = response.message
    dumped = response.model_dump()
    copy = response.model_copy(update={"id": "other"})
    return [
        [
            message.finish_reason,
            message.is_truncated,
            message.tokens,
            message.content,
            message["content"],
        ],
        [response.id, response.usage.prompt_tokens, response.usage.total_tokens],
        [dumped["id"], dumped["message"]["content"], dumped["usage"]["completion_tokens"]],
        [copy.id, response.id],
        ["content" in message, message.get("nothing", 7)],
    ]


@row("1.2", CLIENTS)
def response_tokens_are_constructed_by_keyword():
    from verifiers.types import ResponseTokens

    tokens = ResponseTokens(
        prompt_ids=[1],
        prompt_mask=[0],
        completion_ids=[2, 3],
        completion_mask=[1, 1],
        completion_logprobs=[-0.1, -0.2],
    )
    return [
        list(tokens.prompt_mask),
        list(tokens.completion_mask),
        [int(i) for i in tokens["prompt_ids"]],
        tokens.routed_experts,
    ]


@row(
    "1.2",
    CLIENTS,
    differs="no answer is an EmptyModelResponseError",
    value=["EmptyModelResponseError", "ModelError"],
)
def a_client_that_returns_nothing():
    class Nothing(Scripted):
        async def from_native_response(self, response):
            return None

    async def ask():
        try:
            return await Nothing("x").get_response([vf_message("user", "q")], "m", {})
        except Exception as error:  # noqa: BLE001 - what a script raises is what it gives
            return [
                c.__name__
                for c in type(error).__mro__
                if c.__name__ in ("EmptyModelResponseError", "ModelError")
            ]

    answer = run(ask())
    return answer


# --- 1.3, 1.4: rubrics


def half(completion):
    return 0.5


def quarter(completion):
    return 0.25


@row("1.3", (FIRST,))
def reward_funcs_assigned_in_a_subclass():
    class Own(vf.Rubric):
        def __init__(self):
            super().__init__()
            self.reward_funcs = [half]
            self.reward_weights = [2.0]

    return rewards(single(Own()), "x")


@row("1.3", STATES)
def funcs_and_weights_assigned():
    rubric = vf.Rubric(funcs=[quarter])
    rubric.funcs = [half, quarter]
    rubric.weights = [1.0, 2.0]
    return rewards(single(rubric), "x")


@row("1.3", STATES)
def funcs_appended_to():
    rubric = vf.Rubric()
    rubric.funcs.append(half)
    rubric.weights.append(3.0)
    return [rewards(single(rubric), "x"), len(rubric.funcs), rubric.weights]


@row("1.3", STATES)
def a_weight_assigned_by_position():
    rubric = vf.Rubric(funcs=[half, quarter])
    rubric.weights[1] = 0.0
    return rewards(single(rubric), "x")


@row("1.3", STATES)
def funcs_cleared():
    rubric = vf.Rubric(funcs=[half])
    rubric.funcs.clear()
    rubric.weights.clear()
    rubric.add_reward_func(quarter)
    return rewards(single(rubric), "x")


@row("1.3", (FIRST,))
def reward_funcs_are_the_list():
    rubric = vf.Rubric(funcs=[half])
    rubric.reward_funcs.append(quarter)
    rubric.reward_weights.append(4.0)
    return [rewards(single(rubric), "x"), rubric.get_reward_weights()]


@row("1.3", (FIRST,))
def get_reward_funcs_overridden():
    class Own(vf.Rubric):
        def get_reward_func_names(self):
            return ["half"]

        def get_reward_funcs(self):
            return [half]

        def get_reward_weights(self):
            return [3.0]

    return rewards(single(Own()), "x")


@row("1.3", STATES, differs="an override decides what is called", value=[1.5])
def private_get_reward_funcs_overridden():
    class Own(vf.Rubric):
        def _get_reward_func_names(self):
            return ["half"]

        def _get_reward_funcs(self):
            return [half]

        def _get_reward_weights(self):
            return [3.0]

    return rewards(single(Own()), "x")


@row("1.3", (FIRST,))
def score_rollouts_overridden():
    from verifiers.types import RolloutScores

    class Own(vf.Rubric):
        async def score_rollouts(
            self, prompts, completions, answers, states, tasks, infos, max_concurrent=-1, **kw
        ):
            values = [float(len(text_of(completion[-1]))) for completion in completions]
            return RolloutScores(reward=values, metrics={"length": values})

    results = play(single(Own(), dataset=data("a", "b")), "xx", "yyy", interleave_scoring=False)
    return [sorted(column(results, "reward")), sorted(results.metrics["length"])]


@row("1.3", (FIRST,))
def score_rollout_overridden_by_fields():
    from verifiers.types import RolloutScore

    class Own(vf.Rubric):
        async def score_rollout(
            self, prompt, completion, answer, state, task="default", info=None, **kw
        ):
            return RolloutScore(reward=0.75, metrics={"seen": 1.0})

    return rewards(single(Own()), "x")


@row("1.3", STATES)
def score_group_set_on_the_instance():
    rubric = vf.Rubric(funcs=[half])

    async def score_group(states, *args, **kwargs):
        for state in states:
            state["reward"], state["metrics"] = 0.9, {"mine": 1.0}

    rubric.score_group = score_group
    return rewards(single(rubric), "x")


@row("1.3", (FIRST,))
def score_rollouts_set_on_the_instance():
    from verifiers.types import RolloutScores

    env = single(vf.Rubric(funcs=[half]))

    async def score_rollouts(prompts, completions, answers, states, tasks, infos, **kw):
        return RolloutScores(reward=[0.9] * len(prompts), metrics={})

    env.rubric.score_rollouts = score_rollouts
    return rewards(env, "x", interleave_scoring=False)


@row("1.3", (FIRST,))
def scores_are_constructed_by_keyword():
    from verifiers.types import RolloutScore, RolloutScores

    one = RolloutScore(reward=1.0)
    many = RolloutScores(reward=[1.0, 0.0], metrics={"m": [0.0, 1.0]})
    return [one.reward, one.metrics, many.reward, many.metrics]


@row("1.4", differs="what nothing measures is unknown, not 0", value=[[None], [None]])
def a_rubric_without_functions():
    values = [
        rewards(single(vf.Rubric(funcs=[])), "x"),
        rewards(single(vf.Rubric(funcs=[], weights=[])), "x"),
    ]
    return [[None if value != value else value for value in value] for value in values]


@row("1.4")
def functions_added_to_an_empty_rubric():
    rubric = vf.Rubric(funcs=[], weights=[])
    rubric.add_reward_func(half, weight=2.0)
    return rewards(single(rubric), "x")


# --- 1.5: parsers


@row(
    "1.5",
    differs="plain text has none of the fields and earns nothing",
    value=[0.6, 0.8, 0.0, 1.0, 0.6, 0.0, 0.0],
)
def xml_format_rewards():
    two = vf.XMLParser(["reasoning", ("code", "answer")]).get_format_reward_func()
    texts = [
        "<answer>\n4\n</answer>",
        "<reasoning>a</reasoning><answer>4",
        "just text",
        "<reasoning>\na\n</reasoning>\n<code>\nb\n</code>",
        "<reasoning>\na\n</reasoning>",
        "",
        "<other>a</other>",
    ]
    return [round(two(said(text)), 6) for text in texts]


@row("1.5")
def xml_format_rewards_of_other_shapes():
    three = vf.XMLParser(["think", "answer"]).get_format_reward_func()
    texts = [
        "hello <answer>4</answer>",
        "<answer>4</answer> bye",
        "<answer>4</answer><think>x</think>",
        "</answer>",
        "<think>",
        "<think>a</think><answer>",
        "<think>a</think></answer>",
        "<think></think><answer></answer>",
        "<answer> 4 </answer>",
        "<answer></answer>",
        "x</think>y",
        "<think>a",
    ]
    values = [round(three(said(text)), 6) for text in texts]
    return [*values, round(three(said("<think>a</think>") + said("<answer>4</answer>")), 6)]


@row("1.5")
def xml_answers():
    parser = vf.XMLParser(["think", "answer"])
    two = "<answer>1</answer><answer>2</answer>"
    return [
        parser.parse_answer(said(two)),
        parser.parse_answer(two),
        parser.parse_answer(said("<answer>0</answer>") + said(two)),
        parser.parse_answer(said("<answer>0</answer>") + said("no")),
        parser.parse_answer(said("nothing")),
        parser.parse("<answer>a<answer>b</answer>", last=True).answer,
        parser.parse("<answer>a</answer> <answer>b</answer>", last=True).answer,
        parser.parse("<answer>a<answer>b</answer>").answer,
    ]


@row("1.5", (SECOND, EARLY_THIRD, THIRD))
def a_parser_that_may_think():
    parser = vf.MaybeThinkParser()
    return [
        parser.parse("  four \n"),
        parser.parse("<think>x</think> four "),
        parser.parse("a</think>b</think> c"),
    ]


@row("1.5")
def answers_in_text():
    boxed, hashed = vf.extract_boxed_answer, vf.extract_hash_answer
    return [
        hashed("42"),
        hashed("a #### 1 #### 2"),
        hashed("x #### 42 "),
        boxed("\\boxed{1} then \\boxed{2}"),
        boxed("none"),
        boxed("\\boxed{a{b}c}"),
    ]


@row("1.5")
def digits_of_a_text():
    from verifiers.utils.data_utils import strip_non_numeric

    return [
        strip_non_numeric(text) for text in ("-5 apples", "$1,234.50", "none", "3. done", "a1b2")
    ]


@row("1.5")
def a_parser_has_a_logger():
    return isinstance(vf.Parser().logger, logging.Logger)


@row("1.5")
def an_xml_parser_without_fields():
    return vf.XMLParser([]).get_fields()


# --- 1.6: example data sets


@row("1.6")
def the_prompts_for_boxes():
    from verifiers.utils.data_utils import BOXED_SYSTEM_PROMPT, THINK_BOXED_SYSTEM_PROMPT

    return [BOXED_SYSTEM_PROMPT, THINK_BOXED_SYSTEM_PROMPT]


PYTHON_TASK = "Solve the following coding problem using the programming language python: p"
SET_ROWS = {
    "aime2024": {"problem": "p", "answer": "033"},
    "aime2025": {"question": "p", "answer": "16^\\circ"},
    "amc2023": {"problem": "p", "question": "p", "answer": 27, "Answer": 28, "Problem": "P"},
    "gsm8k": {"question": "p", "answer": "work\n#### 7"},
    "math": {"problem": "p", "solution": "so \\boxed{x+1}"},
    "math500": {"problem": "p", "answer": "3"},
    "mmlu": {"question": "p", "choices": ["a", "b", "c", "d"], "answer": 2, "subject": "s"},
    "mmlu_pro": {
        "question": "p",
        "options": ["a", "b", "c"],
        "answer": "B",
        "answer_index": 1,
        "category": "s",
    },
    "openbookqa": {
        "question_stem": "p",
        "choices": {"text": ["a", "b"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "openrs": {"problem": "p", "answer": "3", "level": "Easy"},
    "prime_code": {"prompt": PYTHON_TASK, "verification_info": "{}"},
}
GPQA = {"Question": "p", "Correct Answer": "a", "Incorrect Answer 1": "b"}
GPQA |= {"Incorrect Answer 2": "c", "Incorrect Answer 3": "d"}


@row("1.6")
def rows_of_the_example_sets():
    from verifiers.utils.data_utils import get_preprocess_fn

    shown = {}
    for name, one in SET_ROWS.items():
        try:
            made = get_preprocess_fn(name)(dict(one))
            # mmlu is renamed after the call
            answer = made["answer"] if "answer" in made else made["temp_answer"]
            shown[name] = [made["question"], str(answer)]
        except Exception as error:  # noqa: BLE001 - what a script raises is what it gives
            shown[name] = type(error).__name__
    return shown


@row("1.6")
def a_seed_shuffles_as_datasets_does():
    env = single(dataset=data(*map(str, range(20))))
    return [list(env.get_dataset(n=3)["question"]), list(env.get_dataset(n=5, seed=3)["question"])]


@row("1.6")
def the_sources_of_the_example_sets():
    """Every fetch, and the split of the rows that came; a column that is read and not there is one
    of the row."""
    from verifiers.utils import data_utils

    shown = {}
    real = datasets.load_dataset
    names = [*SET_ROWS, "openrs_easy", "openrs_hard", "gpqa_diamond", "gpqa_main"]
    for name in names:
        calls = []
        one = SET_ROWS.get(name.split("_e")[0].split("_h")[0], GPQA)

        def load_dataset(
            repository, config=None, *args, split=None, one=one, calls=calls, **kwargs
        ):
            calls.append([repository, config or kwargs.get("name")])
            text = next(
                key
                for key in ("problem", "question", "question_stem", "prompt", "Question")
                if key in one
            )
            made = {
                part: datasets.Dataset.from_list(
                    [
                        {**one, text: f"{one[text]} {part}"},
                        {**one, text: f"{one[text]} {part}", "level": "Hard"},
                    ]
                )
                for part in ("train", "test", "validation", "dev")
            }
            return made[split] if split else datasets.DatasetDict(made)

        datasets.load_dataset = load_dataset
        if hasattr(data_utils, "load_dataset"):
            data_utils.load_dataset = load_dataset
        try:
            rows = vf.load_example_dataset(name)
            calls += [
                [one["question"], str(one["answer"])] for one in rows if not name.startswith("gpqa")
            ]
        except Exception as error:  # noqa: BLE001 - what a script raises is what it gives
            calls.append([type(error).__name__])
        finally:
            datasets.load_dataset = real
        shown[name] = calls
    return shown


# --- 1.7: classes of messages


@row("1.7", CLIENTS)
def messages_are_of_the_class_of_their_role():
    from verifiers import types

    class Two(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [types.UserMessage(content="again")]

    env = Two(dataset=data(), system_prompt="s", max_turns=2)
    output = play(env, "x", "y", state_columns=["trajectory"])["outputs"][0]
    seen = {}

    def classes(prompt, completion, state):
        step = state["trajectory"][-1]
        seen["prompt"] = [type(message).__name__ for message in prompt]
        seen["completion"] = [type(message).__name__ for message in completion]
        seen["step"] = [
            type(message).__name__ for message in [*step["prompt"], *step["completion"]]
        ]
        seen["isinstance"] = [isinstance(completion[0], types.AssistantMessage)]
        return 1.0

    env.rubric.add_reward_func(classes)
    play(env, "x", "y")
    return [seen, len(output["completion"])]


# --- 1.8: judges


@row("1.8")
def the_prompt_of_a_judge():
    from verifiers.rubrics.judge_rubric import DEFAULT_JUDGE_PROMPT

    return DEFAULT_JUDGE_PROMPT.format(question="Q", answer="A", response="R")


# --- 1.9: token sums


@row("1.9", CLIENTS)
def token_usage_of_turns():
    from verifiers import types

    class Two(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [types.UserMessage(content="again")]

    results = play(Two(dataset=data(), max_turns=3), "x", num_examples=1)
    return [results["outputs"][0]["token_usage"], results["metadata"]["usage"]]


@row("1.9", CLIENTS)
def usage_of_a_run_is_the_mean():
    results = play(single(dataset=data("a", "b")), "x", max_concurrent=1)
    return results["metadata"]["usage"]


@row("1.9", CLIENTS)
def usage_of_extra_calls_counts():
    class Extra(vf.SingleTurnEnv):
        async def setup_state(self, state):
            await self.get_model_response(state, state["prompt"])
            return state

    return play(Extra(dataset=data()), "x")["outputs"][0]["token_usage"]


@row("1.9", CLIENTS)
def tokens_cut_at_the_longest_sequence():
    from verifiers.types import Response, ResponseMessage, ResponseTokens, Usage
    from verifiers.utils.response_utils import parse_response_tokens

    tokens = ResponseTokens(
        prompt_ids=[1, 2, 3],
        prompt_mask=[0, 0, 0],
        completion_ids=[4, 5, 6],
        completion_mask=[1, 1, 1],
        completion_logprobs=[-0.1, -0.2, -0.3],
    )
    message = ResponseMessage(
        content="x",
        reasoning_content=None,
        thinking_blocks=None,
        tool_calls=None,
        finish_reason="stop",
        is_truncated=False,
        tokens=tokens,
    )
    usage = Usage(prompt_tokens=3, reasoning_tokens=0, completion_tokens=3, total_tokens=6)
    response = Response(id="1", created=0, model="m", usage=usage, message=message)
    names = (
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "completion_logprobs",
    )
    names += ("overlong_prompt", "is_truncated")

    def shown(limit):
        parsed = run(parse_response_tokens(response, limit))
        return [parsed[name] for name in names]

    return [shown(None), shown(6), shown(5), shown(3), shown(2)]


# --- 2


@row("2.0")
def a_parameter_of_a_subclass_is_handed_on():
    class Own(vf.SingleTurnEnv):
        def __init__(self, difficulty="easy", **kw):
            super().__init__(difficulty=difficulty, **kw)

    return Own(dataset=data(), difficulty="hard").difficulty


@row("2.1")
def the_forms_of_an_asynchronous_script():
    env = single(vf.Rubric(funcs=[half]))
    values = []
    if not inspect.iscoroutinefunction(env.evaluate) and not hasattr(vf, "blocking_calls"):
        done = env.evaluate(client("x"), "m")
        if not isinstance(done, collections.abc.Coroutine):
            return "blocking"
        values.append(column(asyncio.run(done), "reward"))
    else:
        values.append(column(asyncio.run(env.evaluate(client("x"), "m")), "reward"))
    loop = asyncio.new_event_loop()
    values.append(column(loop.run_until_complete(env.evaluate(client("x"), "m")), "reward"))
    loop.close()
    return values


@row(
    "2.2",
    STATES,
    differs="what nothing measures is unknown, not 0",
    value=[
        [float("nan")],
        [
            "has_error",
            "has_final_env_response",
            "max_turns_reached",
            "no_tools_called",
            "prompt_too_long",
        ],
    ],
)
def base_coroutines_are_awaited():
    seen = []

    class Own(vf.ToolEnv):
        async def setup_state(self, state, **kwargs):
            return await super().setup_state(state, **kwargs)

        async def is_completed(self, state, **kwargs):
            return await super().is_completed(state, **kwargs)

        @vf.stop
        async def a_mine(self, state):
            names = (
                "max_turns_reached",
                "prompt_too_long",
                "has_error",
                "no_tools_called",
                "has_final_env_response",
            )
            for name in names:
                method = getattr(self, name, None)
                if method is not None and state["trajectory"]:
                    seen.append([name, bool(await method(state))])
            return False

        async def render_completion(self, state):
            await super().render_completion(state)

        async def get_prompt_messages(self, state):
            return await super().get_prompt_messages(state)

        async def add_trajectory_step(self, state, step):
            await super().add_trajectory_step(state, step)

    results = play(Own(dataset=data(), tools=[], max_turns=1), "x")
    return [column(results, "reward"), sorted({name for name, _ in seen})]


@row("2.3")
def maybe_await_calls():
    from verifiers.utils.async_utils import maybe_await

    async def later(a, b=1):
        return a + b

    return [
        asyncio.run(maybe_await(later, 1, b=2)),
        asyncio.run(maybe_await(lambda x: x * 2, 4)),
        asyncio.run(maybe_await(dict)),
    ]


@row("2.4")
def loggers_of_rubrics():
    class Own(vf.Rubric):
        pass

    def logged(completion, parser):
        own.logger.info("x")
        return 1.0

    own = Own(funcs=[logged], parser=vf.Parser())
    judge = vf.JudgeRubric(judge_client=Chat("yes"))
    group = vf.RubricGroup(rubrics=[own])
    loggers = [own.logger, judge.logger, group.logger, single().logger]
    return [
        [isinstance(logger, logging.Logger) for logger in loggers],
        own.logger.name.endswith("Own"),
        rewards(single(own), "x"),
    ]


@row("2.5")
def arguments_are_filled_in_before_they_are_checked():
    class Own(vf.StatefulToolEnv):
        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            return {**tool_args, "b": 5}

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    env = Own(dataset=data(), tools=[], max_turns=5)
    env.add_tool(add)
    results = play(env, call("add", '{"a": 2}'), "done")
    return [text_of(message) for message in column(results, "completion")[0]][1:]


@row("2.5", STATES)
def the_names_of_skipped_arguments():
    class Own(vf.StatefulToolEnv):
        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            return {**tool_args, "b": 5}

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    env = Own(dataset=data(), tools=[])
    env.add_tool(add, args_to_skip=["b"])
    return env.skipped_args


@row("2.5", differs="a tool with **kwargs has a schema", value=['{"a": 2, "extra": 1}', "done"])
def a_tool_with_any_keywords():
    def note(**kwargs) -> str:
        """Note."""
        return json.dumps(kwargs, sort_keys=True)

    class Own(vf.StatefulToolEnv):
        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            return {**tool_args, "extra": 1}

    env = Own(dataset=data(), tools=[], max_turns=5)
    try:
        env.add_tool(note)
    except Exception as error:  # noqa: BLE001 - what a script raises is what it gives
        return type(error).__name__
    results = play(env, call("note", '{"a": 2}'), "done")
    return [text_of(message) for message in column(results, "completion")[0]][1:]


TOML = """
[[endpoint]]
endpoint_id = "mini"
model = "gpt-mini"
url = "http://127.0.0.1:1/v1"
key = "KEY_ONE"

[[endpoint]]
endpoint_id = "opus"
model = "claude"
url = "http://127.0.0.1:2"
key = "KEY_TWO"
api_client_type = "anthropic_messages"
headers = { A = "b" }
"""


@row("2.6", CLIENTS)
def a_registry_with_another_kind_of_client():
    from verifiers.utils.eval_utils import load_endpoints

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "endpoints.toml")
        file.write_text(TOML)
        loaded = load_endpoints(str(file))
    return [
        sorted(loaded),
        loaded["opus"][0]["model"],
        loaded["opus"][0]["url"],
        loaded["mini"][0]["key"],
    ]


@row("2.7", CLIENTS)
def registry_entries_are_mappings():
    from verifiers.utils.eval_utils import load_endpoints

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "endpoints.toml")
        file.write_text(TOML)
        entry = load_endpoints(str(file))["opus"][0]
    return [
        entry["api_client_type"],
        entry.get("nothing"),
        "url" in entry,
        "extra" in entry,
        entry["extra_headers"],
    ]


@row("2.8", (THIRD,))
def client_configs_take_the_published_fields():
    from verifiers.types import ClientConfig

    config = ClientConfig(
        api_base_url="http://127.0.0.1:1/v1",
        max_keepalive_connections=8192,
        renderer="auto",
        tool_parser="t",
        reasoning_parser="r",
        preserve_all_thinking=True,
        preserve_thinking_between_tool_calls=True,
        endpoint_configs=[{"api_base_url": "http://127.0.0.1:2/v1"}],
    )
    config.timeout = 7.0
    copied = config.model_copy(update={"api_key_var": "OTHER"})
    read = ClientConfig.model_validate({"api_base_url": "http://127.0.0.1:3/v1"})
    return [
        config.max_keepalive_connections,
        config.timeout,
        config.endpoint_configs[0].api_base_url,
        [copied.api_key_var, copied.api_base_url],
        read.api_base_url,
        config.model_dump()["api_base_url"],
        "api_base_url" in config.model_dump(exclude_none=True),
    ]


@row("2.8", CLIENTS)
def nested_endpoint_groups_are_refused():
    from verifiers.types import ClientConfig

    inner = ClientConfig(endpoint_configs=[ClientConfig(api_base_url="http://127.0.0.1:2/v1")])
    try:
        return ClientConfig(endpoint_configs=[inner]) and "made"
    except (ValueError, TypeError):
        return "refused"


@row("2.8", CLIENTS)
def an_endpoint_client_config_needs_no_model():
    from verifiers.types import EndpointClientConfig

    config = EndpointClientConfig(api_base_url="http://127.0.0.1:2/v1", api_key_var="K")
    return [config.api_base_url, config.api_key_var]


@row("2.9", STATES)
def the_data_set_that_is_not_there():
    env = vf.SingleTurnEnv(eval_dataset=data(), rubric=vf.Rubric())
    try:
        env.get_dataset()
        got = "got"
    except Exception:  # noqa: BLE001 - what a script raises is what it gives
        got = "raised"
    return [getattr(env, "dataset", None) is None, got]


@row("2.10", STATES)
def prompts_of_the_caller_are_taken_as_they_are():
    env = single(system_prompt="SYSTEM")
    inputs = [
        {"prompt": [{"role": "user", "content": "mine"}], "answer": "", "example_id": 0, "info": {}}
    ]
    results = run(env.generate(inputs, client("x"), "m"))
    return [[text_of(message) for message in prompt] for prompt in column(results, "prompt")]


@row("2.11", CLIENTS)
def run_rollout_with_a_positional_fourth_argument():
    env = single(vf.Rubric(funcs=[half]))
    one = {"prompt": [vf_message("user", "q")], "answer": "", "example_id": 0}
    output = run(
        env.run_rollout(
            one, client("x"), "m", {"temperature": 0.5}, max_retries=1, state_columns=["model"]
        )
    )
    return [output["reward"], output["model"], "trajectory" in output]


@row("2.13", STATES)
def steps_with_a_foreign_response():
    from verifiers.types import TrajectoryStep

    class Own(vf.MultiTurnEnv):
        async def rollout(self, *args, **kwargs):
            state = await self.init_state(*args, **kwargs)
            for response in (None, {"id": "x"}, SimpleNamespace(id="y")):
                step = TrajectoryStep(
                    prompt=state["prompt"],
                    completion=[{"role": "assistant", "content": "z"}],
                    response=response,
                    tokens=None,
                    reward=None,
                    advantage=None,
                    is_truncated=False,
                    trajectory_id=state["trajectory_id"],
                    extras={},
                )
                state["trajectory"].append(step)
            state["completion"] = [{"role": "assistant", "content": "z"}]
            state["is_completed"] = True
            return state

        async def env_response(self, messages, state, **kwargs):
            return []

    env = Own(dataset=data(), rubric=vf.Rubric(funcs=[half]))
    return rewards(env, "x")


@row("2.14", CLIENTS)
def names_of_errors():
    from verifiers.errors import Error, InvalidModelResponseError, ModelError

    return [issubclass(ModelError, Error), issubclass(InvalidModelResponseError, Error)]


@row("2.15", CLIENTS)
def tools_of_a_row():
    from verifiers.types import Tool

    flat = {"name": "mine", "description": "d", "parameters": {"type": "object", "properties": {}}}
    env = single(dataset=data(info={"tool_defs": [flat]}))
    made = Scripted("x")
    seen = {}

    def look(state):
        seen["tools"] = [isinstance(tool, Tool) and tool.name for tool in state["tool_defs"]]
        return 1.0

    env.rubric.add_reward_func(look)
    run(env.evaluate(made, "m"))
    return [made.asked[0]["tools"], seen]


@row("2.15", (FIRST,))
def openai_tools_of_a_row():
    function = {
        "name": "mine",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    }
    info = json.dumps({"oai_tools": [{"type": "function", "function": function}]})
    env = single(dataset=data(info=info))
    made = Chat("x")
    run(env.evaluate(made, "m"))
    return [tool["function"]["name"] for tool in made.asked[0].get("tools") or []]


# --- 1.8, continued: the rules first, then a judge


def hybrid(**parameters):
    from verifiers.rubrics.experimental.hybrid_math_rubric import HybridMathRubric

    return HybridMathRubric(**parameters)


def math_data(answer):
    return datasets.Dataset.from_list([{"question": "2 + 2?", "answer": answer}])


@row("1.8", CLIENTS)
def the_functions_of_a_hybrid_rubric():
    rubric = hybrid()
    cls = type(rubric)
    return [
        [f.__name__ for f in rubric.funcs],
        list(rubric.weights),
        [cls.DEFAULT_JUDGE_PARSER, cls.DEFAULT_JUDGE_MODEL, cls.DEFAULT_JUDGE_CLIENT],
        [cls.DEFAULT_JUDGE_SAMPLING_ARGS, cls.DEFAULT_USE_JUDGE_FALLBACK],
        all(slot in cls.DEFAULT_JUDGE_PROMPT for slot in ("{question}", "{answer}", "{response}")),
    ]


@row("1.8", CLIENTS)
def a_hybrid_rubric_without_fallback_asks_no_judge():
    judge = Chat("\\boxed{A}")
    rubric = hybrid(judge_client=judge)
    values = [
        rewards(single(rubric, dataset=math_data(answer)), reply)
        for reply, answer in (
            ("\\boxed{4}", "4"),
            ("\\boxed{0.5}", "\\frac{1}{2}"),
            ("\\boxed{5}", "4"),
        )
    ]
    return [values, len(judge.asked)]


@row("1.8", CLIENTS)
def a_hybrid_rubric_with_fallback():
    shown = []
    for verdict in ("\\boxed{A} - CORRECT", "\\boxed{B} - INCORRECT", "A", "B", "so \\boxed{C}"):
        judge = Chat(verdict)
        rubric = hybrid(judge_client=judge, use_judge_fallback=True)
        results = play(
            single(rubric, dataset=math_data("4")), "\\boxed{5}", state_columns=["judge_score"]
        )
        names = ("reward", "math_verify_score", "judge_score", "correct_answer")
        shown.append([column(results, name)[0] for name in names] + [len(judge.asked)])
    judge = Chat("\\boxed{B}")
    rubric = hybrid(judge_client=judge, use_judge_fallback=True)
    shown.append([rewards(single(rubric, dataset=math_data("4")), "\\boxed{4}"), len(judge.asked)])
    return shown


# --- 3


@row("3.3", CLIENTS)
def setters_by_the_published_keywords():
    env = single()
    env.set_concurrency(concurrency=3)
    env.set_max_seq_len(max_seq_len=9)
    env.set_score_rollouts(score_rollouts=False)
    env.set_kwargs(mine=1)
    return [env.max_seq_len, env.score_rollouts, env.mine]


@row("3.4", CLIENTS)
def callbacks_of_two_and_three_parameters():
    seen = []

    def on_start(raw, filtered):
        seen.append([len(raw), len(filtered)])

    def on_progress(every, new, metadata):
        seen.append([len(every), len(new)])

    env = single(vf.Rubric(funcs=[half]), dataset=data("a", "b"))
    play(
        env,
        "x",
        rollouts_per_example=1,
        max_concurrent=1,
        on_start=on_start,
        on_progress=on_progress,
    )
    return [seen[0], seen[-1]]


@row("3.4", CLIENTS)
def several_progress_callbacks():
    seen = []

    def first(every, new, metadata):
        seen.append("first")

    def second(every, new, metadata):
        seen.append("second")

    play(single(vf.Rubric(funcs=[half])), "x", on_progress=[first, second])
    return sorted(set(seen))


# --- 4


def numbered(example, reward, **more):
    return {"example_id": example, "reward": reward, **more}


@row("4.1", (THIRD,))
def metrics_of_arriving_rollouts():
    from verifiers.utils import metric_utils

    rates = metric_utils.PassAtKMetric(4)
    rates.add_outputs([numbered(0, reward) for reward in (1.0, 0.0, 0.4, 0.6)] + [numbered(1, 1.0)])
    single_rates = metric_utils.PassAtKMetric(1)
    single_rates.add_output(numbered(0, 1.0))
    reward = metric_utils.RewardMetric()
    empty = reward.compute()
    reward.add_outputs([numbered(0, 1.0), {"example_id": 1}])
    errors = metric_utils.ErrorRateMetric()
    errors.add_outputs([{"error": None}, {"error": {"error": "x"}}, {}])
    tokens = metric_utils.InputTokensMetric()
    tokens.add_outputs([{"token_usage": {"input_tokens": 4}}, {}, {"token_usage": {}}])
    named = metric_utils.EnvMetrics()
    named.add_outputs([{"metrics": {"a": 1, "b": "x"}}, {"metrics": {"a": 0}}, {}])
    return [
        [
            [{k: round(v, 9) for k, v in each.items()} for each in rates.compute()],
            list(single_rates.compute()),
        ],
        [empty, reward.compute(), reward.count, round(errors.compute(), 9)],
        [tokens.compute(), tokens.count, named.compute(), isinstance(reward, metric_utils.Metric)],
    ]


@row("4.2", (THIRD,))
def token_counts_of_responses():
    from verifiers.utils import usage_utils

    def of(**usage):
        return SimpleNamespace(usage=SimpleNamespace(**usage))

    tracker = usage_utils.StateUsageTracker()
    shown = [tracker.snapshot()]
    tracker.increment(0, 0, mark_seen=False)
    shown.append(tracker.snapshot())
    tracker.increment(2, 3)
    tracker.increment_from_response(of(prompt_tokens=1, completion_tokens=1))
    shown += [tracker.snapshot(), dict(tracker.usage)]
    try:
        tracker.increment(-1, 0)
    except ValueError:
        shown.append("refused")
    steps = [
        {"response": of(prompt_tokens=10, completion_tokens=3)},
        {"response": None},
        {"response": of(prompt_tokens=20, completion_tokens=4)},
    ]
    return [
        [list(usage_utils.extract_usage_tokens(of(input_tokens=4, output_tokens=-2)))],
        [list(usage_utils.extract_usage_tokens(SimpleNamespace(usage=None)))],
        [
            list(
                usage_utils.extract_usage_tokens(
                    of(prompt_tokens=0, completion_tokens=1.7, input_tokens=9)
                )
            )
        ],
        shown,
        [
            usage_utils.compute_context_token_metrics([]),
            usage_utils.compute_context_token_metrics(steps),
        ],
    ]


@row("4.6", CLIENTS)
def chains_of_errors():
    from verifiers.errors import ModelError
    from verifiers.utils import error_utils

    error = ModelError("m")
    error.__cause__ = KeyError("k")
    chain = error_utils.ErrorChain(error)
    return [
        [type(link).__name__ for link in error_utils.get_error_chain(error)],
        [type(link).__name__ for link in error_utils.get_vf_error_chain(error)],
        [
            str(chain),
            KeyError in chain,
            ValueError in chain,
            chain == error_utils.ErrorChain(error),
        ],
        hash(chain) == hash(error_utils.ErrorChain(error)),
    ]


# --- 3.1: what trainers read of rows


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


SUM = '{"a": 1, "b": 2}'


def adding(**parameters):
    return vf.ToolEnv(tools=[add], dataset=data(), max_turns=5, **parameters)


@row("3.1", CLIENTS)
def steps_of_a_row_keep_what_the_model_answered():
    shown = []
    for step in column(
        play(adding(), call("add", SUM), "done", state_columns=["trajectory"]), "trajectory"
    )[0]:
        message, usage = step["response"].message, step["response"].usage
        calls = [[tool.name, tool.arguments] for tool in message.tool_calls or []]
        shown.append(
            [
                message.finish_reason,
                message.content,
                calls,
                usage.prompt_tokens,
                usage.completion_tokens,
            ]
        )
    return shown


@row("3.1", STATES)
def the_path_of_a_saved_run_is_a_path():
    with tempfile.TemporaryDirectory() as folder:
        results = play(
            single(vf.Rubric(funcs=[half])),
            "x",
            results_path=Path(folder, "run"),
            save_results=True,
        )
        path = results["metadata"]["path_to_save"]
    return [isinstance(path, Path), path.name]


# --- 3.2: names of utility modules


@row("3.2", (THIRD,))
def rubrics_that_count_tool_calls():
    from verifiers.envs.multiturn_env import MultiTurnMonitorRubric
    from verifiers.envs.tool_env import ToolMonitorRubric

    monitor = ToolMonitorRubric(tool_names=["a"])
    shown = [monitor._get_reward_func_names()]
    monitor.add_tool_metric("b")
    shown.append(monitor._get_reward_func_names())
    monitor.remove_tool_metric("a")
    shown += [monitor._get_reward_func_names(), monitor.tool_names, monitor._get_reward_weights()]
    return [*shown, MultiTurnMonitorRubric()._get_reward_func_names()]


@row("3.2", CLIENTS)
def the_counts_of_an_environment():
    from verifiers.envs.tool_env import ToolMonitorRubric

    env = adding()
    return [
        column(play(env, call("add", SUM), "done"), "metrics"),
        isinstance(env.tool_monitor_rubric, ToolMonitorRubric),
    ]


@row("3.2", (THIRD,))
def a_count_that_is_removed():
    env = adding()
    env.tool_monitor_rubric.remove_tool_metric("add")
    return column(play(env, call("add", SUM), "done"), "metrics")


@row("3.2", CLIENTS)
def clients_of_a_configuration():
    import os

    from verifiers.types import ClientConfig
    from verifiers.utils import client_utils

    os.environ["PARITY_KEY"] = "k"
    url = "http://127.0.0.1:1/v1"
    config = ClientConfig(api_base_url=url, api_key_var="PARITY_KEY", timeout=7.0, max_retries=3)
    other = {"api_base_url": "http://127.0.0.1:2/v1", "api_key_var": "OTHER"}
    both = ClientConfig(
        api_key_var="PARITY_KEY", timeout=9.0, endpoint_configs=[{"api_base_url": url}, other]
    )
    made, http = client_utils.setup_openai_client(config), client_utils.setup_http_client(config)
    return [
        [
            type(made).__name__,
            str(made.base_url),
            made.api_key,
            made.max_retries,
            http.timeout.read,
        ],
        [
            [
                resolve_client_config.api_base_url,
                resolve_client_config.api_key_var,
                resolve_client_config.timeout,
            ]
            for resolve_client_config in client_utils.resolve_client_configs(both)
        ],
        client_utils.resolve_client_config(config).api_base_url,
        client_utils.resolve_client_config(both.model_copy(update={"client_idx": 1})).api_base_url,
        isinstance(client_utils.load_prime_config(), dict),
    ]


@row("3.2", CLIENTS)
def paths_of_results():
    from verifiers.types import ClientConfig, EvalConfig
    from verifiers.utils import path_utils

    fresh, below = (
        path_utils.get_results_path("my-env", "a/b", base) for base in (Path("outputs"), Path("x"))
    )
    written = Path(path_utils.write_temp_file("hi", ".md"))
    text = written.read_text()
    written.unlink()
    config = EvalConfig(
        env_id="my-env",
        env_args={},
        env_dir_path="nowhere",
        model="a/b",
        client_config=ClientConfig(),
        sampling_args={},
        num_examples=1,
        rollouts_per_example=1,
        max_concurrent=1,
    )
    return [
        [str(fresh.parent), len(fresh.name), str(below.parent), text, written.suffix],
        str(path_utils.get_eval_runs_dir("my-env", "a/b", "nowhere")),
        str(path_utils.get_eval_results_path(config).parent),
        [config.verbose, config.save_results],
    ]


@row("3.2", CLIENTS)
def functions_of_evaluations():
    from verifiers.utils import eval_utils

    inputs = [{"example_id": example, "prompt": []} for example in (0, 0, 1, 1)]
    with eval_utils.quiet_datasets():
        left = eval_utils.filter_inputs(inputs, [{"example_id": 0}], 2)
    return [
        [one["example_id"] for one in left],
        [
            filter_input["example_id"]
            for filter_input in eval_utils.filter_inputs(inputs, [{"example_id": 0}] * 2, 2)
        ],
        [eval_utils.get_log_level(True), eval_utils.get_log_level(False)],
        str(eval_utils.resolve_endpoints_file("nowhere.toml")),
        eval_utils.to_col_order([{"a": 1, "b": 2}, {"a": 3, "b": 4}]),
    ]


@row("3.2", (THIRD,))
def rollouts_of_one_environment_of_a_group():
    from verifiers.utils.eval_utils import get_env_outputs

    env = vf.EnvGroup(envs=[single(vf.Rubric(funcs=[half])) for _ in "ab"], env_names=["a", "b"])
    return len(get_env_outputs(play(env, "x"), "a")["outputs"])


@row("3.2", (THIRD,))
def functions_of_logs():
    from verifiers.utils import logging_utils

    record = logging.LogRecord("n", logging.INFO, "p", 1, "m %s", ("x",), None)
    written = json.loads(logging_utils.JsonFormatter().format(record))
    return [
        [logging_utils.print_time(seconds) for seconds in (0.5, 5, 59.94, 65, 3600, 3661, 90000)],
        [logging_utils.print_size(size) for size in (5, 2048, 3.5e6, 2e9, 1e13)],
        [
            len(logging_utils.truncate("a" * 300)),
            logging_utils.truncate("abcdef", 5),
            logging_utils.truncate("abc"),
        ],
        [sorted(written), written["level"], written["message"]],
    ]


@row("3.2", (THIRD,))
def messages_are_logged_once():
    from verifiers.utils.logging_utils import log_once, warning_once

    seen = []

    class Recorder(logging.Logger):
        def log(self, level, msg, *args, **kwargs):
            seen.append(msg)

        def warning(self, msg, *args, **kwargs):
            seen.append(msg)

    recorder = Recorder("parity")
    for _ in range(2):
        log_once(recorder, logging.INFO, "a")
        warning_once(recorder, "b")
    return seen


@row("3.2", CLIENTS)
def objects_of_a_thread():
    from verifiers.utils import thread_utils

    made = []
    values = [
        thread_utils.get_or_create_thread_attr("parity", lambda: made.append(1) or "v")
        for _ in range(2)
    ]
    slept = thread_utils.get_or_create_thread_loop().run_until_complete(asyncio.sleep(0, "slept"))
    return [values, len(made), slept, thread_utils.get_thread_local_storage().parity]


@row("3.2", (THIRD,))
def pools_are_scaled():
    from concurrent.futures import ThreadPoolExecutor

    from verifiers.utils import thread_utils

    plain, doubled = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    thread_utils.register_executor("plain", plain)
    thread_utils.register_executor("doubled", doubled, lambda concurrency: 2 * concurrency)
    thread_utils.scale_executors(5)
    for name in ("plain", "doubled"):
        thread_utils.unregister_executor(name)
    return [plain._max_workers, doubled._max_workers]


@row("3.2", CLIENTS)
def parts_of_content():
    from verifiers import types

    text = types.TextContentPart(text="x")
    image = types.ImageUrlContentPart(image_url=types.ImageUrlSource(url="u"))
    audio = types.InputAudioContentPart(input_audio=types.InputAudioSource(data="d", format="wav"))
    return [
        [
            text.type,
            text.text,
            image.type,
            image.image_url.url,
            audio.type,
            audio.input_audio.format,
        ],
        [text.model_dump(), types.GenericContentPart(type="z").type],
    ]


# --- 3.5: results as columns


def read_column(results, name):
    """A column of results that is one in every generation, also after construction from columns."""
    return results[name] if isinstance(results, dict) else getattr(results, name)


@row("3.5", (FIRST, SECOND))
def results_are_constructed_from_columns():
    from verifiers.types import GenerateOutputs

    columns = {
        "prompt": [said("p")],
        "completion": [said("c")],
        "answer": ["a"],
        "state": [{}],
        "info": [{}],
    }
    results = GenerateOutputs(**columns, task=["t"], reward=[0.5], metrics={"m": [1.0]})
    names = ("reward", "answer", "task", "metrics")
    return [read_column(results, name) for name in names] + [
        text_of(read_column(results, "completion")[0][-1])
    ]


@row("3.5", (FIRST,))
def a_data_set_of_results():
    def tenth(completion):
        return 0.1

    env = single(vf.Rubric(funcs=[half, tenth], weights=[1, 0]))
    made = env.make_dataset(play(env, "x", rollouts_per_example=2), state_columns=["turn"])
    return {
        name: made[name][:]
        for name in ("reward", "average_reward", "half", "tenth", "turn", "answer", "task")
    }


@row("3.5", (SECOND,))
def a_flat_data_set_of_results():
    from verifiers.utils.eval_utils import make_dataset

    made = make_dataset(
        play(single(vf.Rubric(funcs=[half])), "x", rollouts_per_example=2, state_columns=["model"])
    )
    return {
        name: made[name][:]
        for name in ("example_id", "reward", "half", "num_turns", "model", "answer", "task")
    }


# --- 3.6: helpers of the first trainers


class Characters:
    """A tokenizer with one token a character."""

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, **_):
        text = "".join(f"<{message['role']}>{message['content']};" for message in conversation)
        return self.encode(text + "<assistant>" * add_generation_prompt)

    def encode(self, text, **_):
        return [ord(character) for character in text]


def sampled_chat(text, logprobs):
    from openai.types.chat import ChatCompletion

    shared = {"top_logprobs": [], "bytes": None}
    content = [
        {"token": f"token_id:{ord(character)}", "logprob": logprob, **shared}
        for character, logprob in zip(text, logprobs, strict=True)
    ]
    message = {"role": "assistant", "content": text}
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": message,
        "logprobs": {"content": content},
    }
    return ChatCompletion.model_validate(
        {"id": "1", "created": 0, "model": "m", "object": "chat.completion", "choices": [choice]}
    )


def sampled_text(text, logprobs):
    from openai.types import Completion

    tokens = [f"token_id:{ord(character)}" for character in text]
    logprobs = {"tokens": tokens, "token_logprobs": logprobs}
    choice = {"index": 0, "finish_reason": "stop", "text": text, "logprobs": logprobs}
    return Completion.model_validate(
        {"id": "1", "created": 0, "model": "m", "object": "text_completion", "choices": [choice]}
    )


@row("3.6", (FIRST,))
def prompts_are_formatted():
    shots = [{"role": "user", "content": "f"}, {"role": "assistant", "content": "g"}]
    return [single().format_prompt(*words) for words in (("q",), ("q", "s"), ("q", "s", shots))]


@row("3.6", (FIRST,))
def a_data_set_is_formatted():
    made = single().format_dataset(
        datasets.Dataset.from_list([{"x": "q", "y": "a"}]), "s", None, "x", "y"
    )
    return [made["prompt"][:], made["answer"][:]]


@row("3.6", (FIRST,))
def tokens_of_completions():
    env, chat, text = single(), sampled_chat("ab", [-0.5, -0.25]), sampled_text("ab", [-0.5, -0.25])
    return [
        [env.parse_chat_completion_logprobs(chat), env.parse_chat_completion_tokens(chat)],
        [env.parse_completion_logprobs(text), env.parse_completion_tokens(text)],
    ]


@row("3.6", (FIRST,))
def a_conversation_is_tokenised():
    state = {"responses": [sampled_chat("ab", [-0.5, -0.25]), sampled_chat("c", [-1.0])]}
    completion = [*said("ab"), {"role": "user", "content": "u"}, *said("c")]
    prompt = [{"role": "user", "content": "q"}]
    return [
        [
            list(part)
            for part in single().process_chat_format_vllm(
                prompt, completion, state, Characters(), masked
            )
        ]
        for masked in (False, True)
    ]


@row("3.6", (FIRST,))
def a_text_is_tokenised():
    state = {"responses": [sampled_text("ab", [-0.5, -0.25])], "responses_start_idx": [0]}
    return [
        list(part)
        for part in single().process_completion_format_vllm("q", "ab", state, Characters())
    ]


@row("3.6", (FIRST,))
def rollouts_of_columns():
    prompts = [[{"role": "user", "content": "q"}]] * 2
    done = asyncio.run(
        single().run_rollouts(client("x"), "m", prompts, ["a", "b"], ["t", "t"], [{}, {}])
    )
    return [[text_of(completion[-1]), state["answer"]] for completion, state in done]


@row("3.6", (FIRST,))
def rows_are_generated():
    inputs = {"prompt": [[{"role": "user", "content": "q"}]], "answer": ["a"]}
    done = asyncio.run(single(vf.Rubric(funcs=[half])).a_generate(inputs, client("x"), "m"))
    return [
        done.reward,
        [text_of(completion[-1]) for completion in done.completion],
        done.metrics["half"],
    ]


# --- 3.7


@row(
    "3.7",
    (FIRST, SECOND),
    differs="a sampling argument keeps the name that the caller gave it",
    value={"max_tokens": 7},
)
def the_name_of_the_longest_completion():
    made = Chat("x")
    run(single().evaluate(made, "m", sampling_args={"max_tokens": 7, "temperature": None}))
    return {
        name: made.asked[0][name]
        for name in ("max_tokens", "max_completion_tokens")
        if name in made.asked[0]
    }


# --- 4.4: saved rollouts


def builder(**facts):
    from verifiers.utils.save_utils import GenerateOutputsBuilder

    defaults = {
        "env_id": "e",
        "env_args": {"n": 1},
        "model": "m",
        "client": SimpleNamespace(base_url="http://127.0.0.1:1/v1"),
        "num_examples": 2,
        "rollouts_per_example": 2,
        "state_columns": [],
        "sampling_args": {},
        "results_path": Path("out"),
    }
    return GenerateOutputsBuilder(**defaults | facts)


def saved(example, reward, **more):
    finished = {
        "error": None,
        "is_completed": True,
        "is_truncated": False,
        "stop_condition": None,
        "timing": {},
    }
    texts = {"prompt": said("p"), "completion": said("c"), "answer": "", "info": {}, "task": "t"}
    usage = {"token_usage": {"input_tokens": 4, "output_tokens": 2}}
    return {
        "example_id": example,
        "reward": reward,
        "metrics": {"a": reward},
        **texts,
        **finished,
        **usage,
        **more,
    }


def finished_state(**more):
    from verifiers.types import RolloutTiming

    state = vf.State(input={"prompt": said("p"), "example_id": 3, "answer": "a", "task": "t"})
    state.update(
        completion=said("c"), reward=0.5, metrics={"a": 1.0}, error=None, is_completed=True
    )
    state.update(
        is_truncated=False, stop_condition="x", trajectory=[], timing=RolloutTiming(), **more
    )
    return state


@row("4.4", CLIENTS)
def results_are_built():
    made = builder()
    made.add_outputs([saved(1, 1.0), saved(0, 0.0), saved(1, 0.0), saved(0, 1.0)])
    names = (
        "env_id env_args model base_url num_examples rollouts_per_example avg_reward avg_metrics"
        " avg_error pass_at_k pass_all_k pass_threshold usage state_columns tools"
    )
    metadata = made.build_metadata()
    return [
        [output["example_id"] for output in made.build_outputs()],
        [output["example_id"] for output in made.build(sort_by_example_id=True)["outputs"]],
        {name: metadata[name] for name in names.split()},
        [
            str(metadata["path_to_save"]),
            len(made.outputs),
            made.base_url,
            sorted(made.version_info),
        ],
    ]


@row("4.4", CLIENTS)
def the_urls_of_built_results():
    from verifiers.types import ClientConfig

    urls = [{"api_base_url": f"http://127.0.0.1:{port}/v1"} for port in (1, 2)]
    return [
        builder(client=ClientConfig(**fields)).base_url
        for fields in ({"endpoint_configs": urls}, urls[0])
    ]


@row("4.4", CLIENTS)
def the_tools_of_built_results():
    from verifiers.types import Tool

    first, second = (
        Tool(name=name, description="d", parameters={"type": "object"}) for name in "ab"
    )
    shown = []
    for sets in ([[first], [first]], [[first], [second]], [[first], None], [None, None]):
        made = builder()
        made.add_outputs(
            [saved(example, 1.0, tool_defs=tools) for example, tools in enumerate(sets)]
        )
        shown.append([tool.name for tool in made.build_metadata()["tools"] or []])
    return shown


@row("4.4", CLIENTS)
def a_state_becomes_a_row():
    from verifiers.errors import ModelError
    from verifiers.utils.save_utils import state_to_output

    error = ModelError("boom")
    error.__cause__ = KeyError("k")
    output = state_to_output(finished_state(error=error, mine={"b": 1}), ["mine"])
    names = ("reward", "metrics", "a", "mine", "error_chain", "long_error_chain")
    return [output[name] for name in names] + [
        [output["error"][name] for name in ("error", "error_chain_repr", "error_chain_str")]
    ]


@row("4.4", (THIRD,))
def the_usage_of_a_row():
    from verifiers.utils.save_utils import state_to_output

    first = {"input_tokens": 1, "output_tokens": 2}
    second = {"prefill_tokens": 5, "decode_tokens": 6}
    states = [{}, {"token_usage": first}, {"usage": first}, {"usage": second}]
    return [state_to_output(finished_state(**more)).get("token_usage") for more in states]


@row("4.4", CLIENTS)
def a_column_that_is_no_json():
    from verifiers.utils.save_utils import state_to_output

    return state_to_output(finished_state(mine=object()), ["mine"]) and "made"


@row("4.4", CLIENTS)
def torn_lines():
    from verifiers.utils.save_utils import load_outputs, save_new_outputs, save_outputs

    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), Path(name, "results.jsonl")
        save_outputs([saved(0, 1.0), saved(1, 0.0)], folder)
        file.write_text(file.read_text() + '{"example_id": 2, "rew')
        shown = [len(load_outputs(folder))]
        save_new_outputs([saved(3, 0.5)], folder)
        shown.append([output["example_id"] for output in load_outputs(folder)])
        lines = file.read_text().splitlines()
        file.write_text("\n".join([lines[0], '{"torn', lines[1]]) + "\n")
        try:
            shown.append(len(load_outputs(folder)))
        except Exception:  # noqa: BLE001 - of another class in each release
            shown.append("refused")
    return shown


@row("4.4", CLIENTS)
def values_for_json():
    import datetime

    from verifiers.utils.save_utils import is_json_serializable, make_serializable

    values = [
        vf_message("user", "x"),
        datetime.datetime(2026, 1, 2, 3, 4),
        datetime.date(2026, 1, 2),
    ]
    values += [Path("a/b"), ValueError("x"), {1, 2}, complex(1, 2)]
    plain = [{"a": [1]}, object(), {1: 2}, None, "x", (1, 2), {1, 2}]
    return [
        [make_serializable(value) for value in values],
        [is_json_serializable(value) for value in plain],
    ]


@row("4.4", CLIENTS)
def the_metadata_of_a_run_that_goes_on():
    from verifiers.utils.save_utils import save_metadata, validate_resume_metadata

    facts = {"env_id": "e", "model": "m", "num_examples": 2, "rollouts_per_example": 2}
    others = (
        {},
        {"num_examples": 5},
        {"num_examples": 1},
        {"model": "n", "env_id": "f"},
        {"rollouts_per_example": 3},
    )
    shown = []
    with tempfile.TemporaryDirectory() as name:
        save_metadata(builder().build_metadata(), Path(name))
        for other in others:
            try:
                validate_resume_metadata(Path(name), **facts | other)
                shown.append([])
            except ValueError as error:
                shown.append([fact for fact in facts if fact in str(error)])
        for text in ("[]", "{torn"):
            Path(name, "metadata.json").write_text(text)
            try:
                validate_resume_metadata(Path(name), **facts)
                shown.append("fits")
            except ValueError:
                shown.append("refused")
    return shown


@row("4.4", (THIRD,))
def names_of_published_results():
    from verifiers.utils.save_utils import get_hf_hub_dataset_name, sanitize_metadata

    made = builder()
    made.add_outputs([saved(0, 1.0)])
    results = made.build()
    clean = sanitize_metadata(results["metadata"])
    return [get_hf_hub_dataset_name(results), sorted(set(results["metadata"]) - set(clean))]


# --- 4.7: results as text


@row("4.7", (THIRD,))
def results_are_printed():
    import contextlib
    import io

    from verifiers.utils import eval_utils

    made = builder()
    made.add_outputs(
        [saved(0, 1.0), saved(0, 0.0), saved(1, 1.0), saved(1, 1.0, is_truncated=True)]
    )
    results, printed = made.build(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        eval_utils.print_rewards(results)
        eval_utils.print_info(results)
        eval_utils.print_usage(results)
    return printed.getvalue().splitlines()


# --- 4.5: ids and installed packages


@row("4.5", CLIENTS)
def ids_of_environments():
    from verifiers.utils import install_utils

    shown = []
    for text in (
        "owner/name@1.0",
        "owner/name",
        "owner/name@latest",
        "name",
        "a/b/c",
        "",
        "owner/",
        "/name",
    ):
        try:
            shown.append(list(install_utils.parse_env_id(text)))
        except ValueError:
            shown.append("refused")
    return [
        shown,
        [install_utils.normalize_package_name(name) for name in ("My-Env", "my_env")],
        [install_utils.is_hub_env(text) for text in ("o/n", "o/n@1", "n", "./n", "/n")],
        [
            install_utils.check_hub_env_installed(text)
            for text in ("./local", "local", "owner/parity-nowhere")
        ],
    ]


@row("4.5", CLIENTS)
def packages_that_are_installed():
    from importlib.metadata import version

    from verifiers.utils.install_utils import is_installed

    return [
        is_installed("datasets", number)
        for number in (None, "latest", version("datasets"), "0.0.1")
    ] + [is_installed("parity-nowhere")]


# --- 4.8: tools


PARTS = [
    {"type": "text", "text": "see"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
]


@row("4.8", CLIENTS)
def lists_that_are_content():
    from verifiers.utils.tool_utils import is_valid_tool_content_parts

    values = [
        PARTS,
        [],
        "x",
        [{"type": "nothing"}],
        [{"text": "x"}],
        ["x"],
        PARTS[0],
        [{"type": "text"}],
        tuple(PARTS),
    ]
    return [is_valid_tool_content_parts(value) for value in values]


@row("4.8", CLIENTS)
def a_tool_that_returns_parts():
    def look() -> list:
        """Look."""
        return PARTS

    message = column(
        play(vf.ToolEnv(tools=[look], dataset=data(), max_turns=5), call("look"), "done"),
        "completion",
    )
    return [
        part if isinstance(part, dict) else part.model_dump() for part in message[0][1]["content"]
    ]


def forecast(city: str, days: int = 3, unit: str | None = None) -> str:
    """Say the weather.

    Args:
        city: Where.
        days: How many days.
    """
    return city


@row(
    "4.8",
    CLIENTS,
    differs="a parameter with a default is not required, and the schema has no titles",
    value={
        "type": "object",
        "properties": {
            "city": {"description": "Where.", "type": "string"},
            "days": {"default": 3, "description": "How many days.", "type": "integer"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "additionalProperties": False,
        "required": ["city"],
    },
)
def the_schema_of_a_tool():
    from verifiers.utils.tool_utils import convert_func_to_tool_def

    return convert_func_to_tool_def(forecast).model_dump()["parameters"]


# --- 4.9: responses


@row("4.9", CLIENTS)
def the_message_of_a_response():
    from verifiers.utils.response_utils import parse_response_message

    response = run(Scripted(call("add", SUM)).get_response([vf_message("user", "q")], "m", {}))
    (message,) = asyncio.run(parse_response_message(response))
    calls = [[tool.id, tool.name, tool.arguments] for tool in message.tool_calls]
    return [type(message).__name__, message.role, message.content, calls]


@row("4.9", (SECOND,))
def the_messages_of_an_openai_response():
    from verifiers.utils import response_utils

    made = Chat("hi")
    chat = asyncio.run(made.create(messages=[], model="m"))
    text = asyncio.run(made.create_text(prompt="", model="m"))
    (message,) = asyncio.run(response_utils.parse_response_messages(chat, "chat"))
    return [
        [message["role"], message["content"]],
        asyncio.run(response_utils.parse_response_messages(text, "completion")),
        asyncio.run(response_utils.parse_is_truncated(chat, "chat")),
        asyncio.run(response_utils.parse_response_tokens(chat, "chat")),
    ]


# --- 5


def names_of(functions):
    return [function.__name__ for function in functions]


@row("5", (SECOND, EARLY_THIRD))
def handlers_of_an_environment():
    seen = []

    class Own(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return []

        @vf.stop(priority=5)
        async def first_stop(self, state):
            return False

        @vf.stop
        async def another_stop(self, state):
            return False

        @vf.cleanup(priority=2)
        async def second_by_name(self, state):
            seen.append("second_by_name")

        @vf.cleanup
        async def first_by_name(self, state):
            seen.append("first_by_name")

        @vf.teardown
        async def close_all(self):
            seen.append("close_all")

    env = Own(dataset=data())
    asyncio.run(env._cleanup(finished_state()))
    asyncio.run(env._teardown())
    stops = names_of(env._stop_conditions)
    return [
        [stops[0], *(name for name in stops if name.endswith("_stop"))],
        [names_of(env._cleanup_handlers), names_of(env._teardown_handlers)],
        [
            Own.first_stop.stop_priority,
            Own.second_by_name.cleanup_priority,
            Own.close_all.teardown_priority,
        ],
        seen,
    ]


@row(
    "5",
    STATES,
    differs="the count of turns is a metric of the environment, not of the rubric",
    value=[["a", "b"], ["half", "whole"], ["half", "whole"], True],
)
def the_rubric_of_a_group():
    from verifiers.envs.env_group import EnvGroupRubric

    def whole(completion):
        return 1.0

    members = {"a": single(vf.Rubric(funcs=[half])), "b": single(vf.Rubric(funcs=[whole]))}
    env = vf.EnvGroup(envs=list(members.values()), env_names=list(members))
    rubric = EnvGroupRubric(members)
    return [
        sorted(rubric.env_map),
        rubric.all_reward_names,
        env.rubric.all_reward_names,
        env.env_map["a"] is members["a"],
    ]


@row("5", STATES)
def a_single_turn_has_no_response_of_the_environment():
    return asyncio.run(single().env_response([], {})) and "returned"


@row(
    "5",
    differs="a run says that env_response is missing, where a second turn would call it",
    value="made",
)
def an_environment_without_env_response():
    class Own(vf.MultiTurnEnv):
        pass

    return Own(dataset=data()) and "made"


@row(
    "5",
    (FIRST, SECOND),
    differs="no server takes tools with a text",
    value={"raises": "ConfigError"},
)
def tools_in_completion_mode():
    rows = datasets.Dataset.from_list([{"prompt": "q", "answer": "a"}])
    return vf.ToolEnv(tools=[add], dataset=rows, message_type="completion") and "made"


@row("5", (FIRST, SECOND))
def completion_mode_is_text():
    rows = datasets.Dataset.from_list([{"prompt": "q", "answer": "a"}])
    results = play(
        single(vf.Rubric(funcs=[half]), dataset=rows, message_type="completion"), "hello"
    )
    state = read_column(results, "state")[0]
    responses = state.get("responses") or [step["response"] for step in state["trajectory"]]
    return [column(results, "prompt"), column(results, "completion"), responses[0].choices[0].text]


@row("5", CLIENTS)
def modalities_are_kept():
    made = Scripted("x")
    run(single().evaluate(made, "m", sampling_args={"modalities": ["text"]}))
    return made.asked[0]["sampling_args"]["modalities"]


@row("5", CLIENTS)
def models_are_dumped_and_copied():
    from verifiers.types import Tool, ToolCall, UserMessage

    tool = Tool(name="a", description="d", parameters={})
    tool_call = ToolCall(id="1", name="n", arguments="{}")
    message = UserMessage(content="x")
    return [
        [tool.model_dump(exclude_none=True), tool.model_copy(update={"name": "b"}).name],
        [tool_call.model_dump(), tool_call.model_copy(update={"id": "2"}).id],
        [message.model_dump(), message.model_copy(update={"content": "y"}).content],
    ]


@row("5", (THIRD,))
def a_rollout_that_timed_out():
    class Slow(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            await asyncio.sleep(5)
            return []

    results = play(
        Slow(dataset=data(), max_turns=4, timeout_seconds=0.05), "x", state_columns=["timed_out"]
    )
    return [column(results, "stop_condition"), column(results, "timed_out")]


@row("5", (THIRD,))
def the_usage_of_a_state():
    env = single()
    one = {"prompt": said("p"), "example_id": 0, "answer": ""}
    state = asyncio.run(env.init_state(one, client("x"), "m"))
    env.increment_state_usage(state, 3, 4)
    usage = SimpleNamespace(prompt_tokens=1, completion_tokens=2)
    env.increment_state_usage_from_response(state, SimpleNamespace(usage=usage))
    state["usage_tracker"].increment(1, 1)
    return [
        dict(env.get_state_usage(state)),
        dict(state["usage"]),
        type(state["usage_tracker"]).__name__,
    ]


@row("5", (THIRD,))
def handlers_that_a_rubric_is_given():
    seen = []
    rubric = vf.Rubric(funcs=[half])

    async def clean(state):
        seen.append("clean")

    rubric.add_cleanup_handler(clean)
    play(single(rubric), "x")
    return seen


@row("5", (THIRD,))
def a_state_that_is_marked_as_timed_out():
    class Marking(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            self.mark_timed_out(state)
            return said("go on")

    env = Marking(dataset=data(), max_turns=2)
    state = asyncio.run(
        env.init_state({"prompt": said("p"), "example_id": 0, "answer": ""}, client("x"), "m")
    )
    returned = env.mark_timed_out(state)
    results = play(env, "x", state_columns=["timed_out"])
    return [
        [returned, *(state[name] for name in ("timed_out", "stop_condition", "is_completed"))],
        [column(results, "stop_condition"), column(results, "timed_out")],
    ]


@row("5", (THIRD,))
def the_spans_of_a_rollouts_time():
    class Slow(vf.MultiTurnEnv):
        async def setup_state(self, state):
            await asyncio.sleep(0.02)
            return state

        async def env_response(self, messages, state, **kwargs):
            await asyncio.sleep(0.03)
            return said("go on")

    env = Slow(dataset=data(), max_turns=2)
    row = {"prompt": said("p"), "example_id": 0, "answer": ""}
    timing = asyncio.run(env.rollout(row, client("x"), "m"))["timing"]
    saved = column(play(env, "x"), "timing")[0]
    parts = timing.setup.duration + timing.model.duration + timing.env.duration
    return [
        [
            0.01 <= timing.setup.duration < 1,
            0.02 <= timing.env.duration < 1,
            timing.scoring.duration,
        ],
        [parts <= timing.generation.duration < 2],
        [0.01 <= saved["setup"]["duration"] < 1, 0.02 <= saved["env"]["duration"] < 1],
        [0 <= saved[name]["duration"] < 2 for name in ("generation", "scoring", "model")],
        [0.03 <= saved["total"] < 2, 0 <= saved["overhead"] < 1],
    ]


@row("5", CLIENTS)
def an_observation_is_told_by_a_method():
    try:
        from verifiers.envs.experimental.gym_env import GymEnv
    except ImportError:  # the release is installed without Gymnasium
        return "not installed"

    class Counter:
        def __init__(self):
            self.at = 0

        def reset(self, seed=None):
            return 7, {}

        def step(self, action):
            self.at += 1
            return self.at, 0.5, self.at == 2, False, {"at": self.at}

    class Told(GymEnv):
        def obs_to_text(self, obs):
            return f"told {obs}"

    env = Told(env_cls=Counter, action_parser=str, num_train_episodes=1, num_eval_episodes=1)
    results = play(env, "a", "b", state_columns=["trajectory", "gym_done"])
    steps = column(results, "trajectory")[0]
    return [
        [text_of(message) for message in column(results, "prompt")[0]],
        [text_of(message) for message in column(results, "completion")[0][:3]],
        [[step["reward"], step["extras"]["gym_info"]] for step in steps[:2]],
        column(results, "gym_done"),
    ]


@row("5", CLIENTS)
def a_rubric_cleans_up_a_state():
    seen = []

    class Cleaning(vf.Rubric):
        @vf.cleanup
        async def clean(self, state):
            seen.append(state["n"])

    asyncio.run(Cleaning(funcs=[half]).cleanup(finished_state(n=1)))
    return seen


@row("3.2", (FIRST, SECOND))
def the_type_of_an_openai_response():
    from openai.types.chat import ChatCompletion

    return vf.ChatCompletion is ChatCompletion
