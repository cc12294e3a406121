"""math-python: its rows, its reward, its tool, its sources, and whole rollouts against a scripted
model."""

import json
import re
import shutil

import pytest

import verifiers as vf
from verifiers.clients.local import is_installed
from verifiers.sandbox.backends.unsafe_subprocess import UnsafeSubprocess
from verifiers.testing import ScriptedClient, make_state
from vf_math_python import BLOCKS_SYSTEM_PROMPT, SYSTEM_PROMPT, load_environment
from vf_math_python.generator import generate_rows, is_held_out
from vf_math_python.written import TOPICS, problems, written_rows

SANDBOXES = [
    "unsafe_subprocess",
    pytest.param(
        "bubblewrap",
        marks=pytest.mark.skipif(
            shutil.which("bwrap") is None, reason="bubblewrap is not installed"
        ),
    ),
]


def python(code):
    return vf.ToolCall("c1", "python", {"code": code})


def block(code):
    return f"Let me compute.\n```python\n{code}\n```"


class NotShownTools(ScriptedClient):
    """A client that knows that its model's chat template shows no tools, as the
    embedded one does."""

    async def shows_tools(self):
        return False


def load(**arguments):
    return load_environment(**{"sandbox": "unsafe_subprocess"} | arguments)


def answers(*tables):
    """Question -> answer."""
    return {row["prompt"][-1]["content"]: row["answer"] for table in tables for row in table}


def told(results, rollout=0):
    return [m["content"] for m in results["completion"][rollout] if m["role"] == "tool"]


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_the_checker_finds_nothing_wrong(sandbox):
    report = vf.check_environment(lambda: load(sandbox=sandbox))
    assert report.ok, str(report)
    blocks = vf.check_environment(lambda: load(sandbox=sandbox, code_from="blocks"))
    assert blocks.ok, str(blocks)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_checker_finds_nothing_wrong_by_its_id():
    report = vf.check_environment("math-python")
    assert report.ok, str(report)


def test_at_least_150_problems_are_written_and_all_are_different():
    questions = [problem["question"] for topic in TOPICS for problem in problems(topic).values()]
    assert len(questions) == len(set(questions)) >= 150
    names = [name for topic in TOPICS for name in problems(topic)]
    assert len(names) == len(set(names))
    for topic in TOPICS:
        for problem in problems(topic).values():
            assert problem.keys() == {"question", "answer"}
            assert problem["question"].count("$") % 2 == 0
            assert re.search(r"[?.]$", problem["question"])


def test_every_written_problem_is_for_training_or_held_out_and_the_topics_are_even():
    train, held_out = written_rows(False), written_rows(True)
    assert len(train) + len(held_out) == sum(len(problems(topic)) for topic in TOPICS)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    for topic in TOPICS:
        assert sum(row["info"]["topic"] == topic for row in held_out) >= 12


def test_defaults_are_a_thousand_and_a_hundred_different_problems():
    env = load()
    train, held_out = env.get_dataset(), env.get_eval_dataset()
    assert (len(set(train["question"])), len(set(held_out["question"]))) == (1000, 100)
    assert not set(train["question"]) & set(held_out["question"])
    assert sum(info["written"] for info in held_out["info"]) == 91


def test_no_seed_trains_on_a_held_out_problem():
    train = [row for seed in range(3) for row in generate_rows(1500, seed, False)]
    held_out = [row for seed in range(3) for row in generate_rows(400, seed, True)]
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert not any(is_held_out(row["info"]["name"], row["info"]["numbers"]) for row in train)
    # the twin: two training sets do share problems, so the numbers alone would not keep sets apart
    assert {row["question"] for row in train[:1500]} & {row["question"] for row in train[1500:]}


def test_the_eval_set_does_not_depend_on_the_size_of_the_training_set():
    small, large = load(num_train_examples=10, num_eval_examples=20), load(num_train_examples=500)
    assert small.get_eval_dataset()["question"] == large.get_eval_dataset()["question"][:20]
    reseeded = load(num_eval_examples=20, seed=1).get_eval_dataset()["question"]
    assert reseeded != small.get_eval_dataset()["question"]


def test_the_prompt_names_the_tool_and_the_box():
    prompt = load(num_train_examples=1).get_dataset()[0]["prompt"]
    assert prompt[0] == {"role": "system", "content": SYSTEM_PROMPT}
    assert "python" in SYSTEM_PROMPT
    assert "\\boxed{}" in SYSTEM_PROMPT


# --- reward ---------------------------------------------------------------------------------------


REPLIES = [
    ("\\boxed{\\frac{161}{36}}", "\\frac{161}{36}", 1.0),
    ("\\boxed{161/36}", "\\frac{161}{36}", 1.0),
    ("\\boxed{\\dfrac{\\sqrt{3} \\cdot 48}{2}}", "24\\sqrt{3}", 1.0),
    ("\\boxed{2^{101}-1}", "2^{101} - 1", 1.0),
    ("\\boxed{2535301200456458802993406410751}", "2^{101} - 1", 1.0),
    ("\\boxed{161/35}", "\\frac{161}{36}", 0.0),
    ("161/36", "\\frac{161}{36}", 0.0),
    ("\\boxed{}", "4", 0.0),
]
"""Reply, right answer, reward."""


async def test_rewards_of_replies():
    env = load(num_train_examples=1, num_eval_examples=1)
    for reply, answer, reward in REPLIES:
        completion = [{"role": "assistant", "content": reply}]
        result = await env.rubric.score_rollout(make_state([], completion, answer))
        assert (result["reward"], result["metrics"]["correct_answer"]) == (reward, reward), reply
        has_box = "\\boxed" in reply and "\\boxed{}" not in reply
        assert result["metrics"]["format_reward"] == float(has_box), reply


def test_a_box_that_only_the_tool_printed_is_no_answer():
    env = load(num_train_examples=1, num_eval_examples=1)
    (right,) = answers(env.eval_dataset).values()
    box = "\\boxed{" + right + "}"
    client = ScriptedClient([python(f"print({box!r})"), "I am done."])
    results = env.evaluate(client, "scripted")
    assert "\\boxed{" in told(results)[0]
    assert list(results["reward"]) == [0.0]


def test_an_oracle_earns_one_on_every_written_and_on_generated_problems():
    env = load(num_train_examples=140, num_eval_examples=140)
    right = answers(env.dataset, env.eval_dataset)
    oracle = ScriptedClient(
        lambda request: f"The answer is \\boxed{{{right[request.prompt[-1]['content']]}}}."
    )
    results = env.evaluate(oracle, "scripted")
    assert list(results["reward"]) == [1.0] * 140
    assert list(env.generate(list(env.dataset), oracle, "scripted")["reward"]) == [1.0] * 140
    wrong = ScriptedClient("The answer is \\boxed{-987654321}.")
    assert list(env.evaluate(wrong, "scripted", num_examples=10)["reward"]) == [0.0] * 10


# --- the tool -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_model_that_computes_with_the_tool_is_right(sandbox):
    env = load(sandbox=sandbox, num_train_examples=1, num_eval_examples=1)
    (right,) = answers(env.eval_dataset).values()
    client = ScriptedClient(
        [
            python("from sympy import *\nx = symbols('x')\ns = solve(x**2 - 7*x + 3)"),
            python("sum(r**3 for r in s).expand()"),
            python("1 / 0"),
            f"\\boxed{{{right}}}",
        ]
    )
    results = env.evaluate(client, "scripted")
    assert told(results)[:2] == ["(no output)", "Out[2]: 280"]
    assert "ZeroDivisionError" in told(results)[2]
    assert list(results["reward"]) == [1.0]
    metrics = {name: values[0] for name, values in results["metrics"].items()}
    assert (metrics["num_turns"], metrics["total_tool_calls"], metrics["tool_errors"]) == (4, 3, 1)
    assert metrics["sandbox_command_execution_time"] > 0
    assert results["states"][0]["sandbox"].sandbox is None


SOLUTIONS = {
    "letters-of-banana": (
        """
from fractions import Fraction
from itertools import permutations
words = set(permutations("BANANA"))
print(Fraction(sum("AA" not in "".join(word) for word in words), len(words)))"""
    ),
    "numbers-with-a-seven": "print(sum('7' in str(n) for n in range(1, 1001)))",
    "integral-of-a-rational-function": (
        """
from sympy import *
x = symbols("x")
print(latex(integrate(1 / (1 + x**2), (x, 0, 1))))"""
    ),
    "median": "from sympy import *\nprint(latex(sqrt(Rational(2*13**2 + 2*15**2 - 14**2, 4))))",
    "three-by-three-determinant": (
        "import numpy\nprint(round(numpy.linalg.det([[2, 1, 3], [0, 4, 1], [5, 2, 6]])))"
    ),
    "remainder-of-a-high-power": "print((2**100 - 1) * 3 + 2 - 2**100)",
    "best-of-seven": (
        """
from fractions import Fraction as F
def win(a, b):
    if a == 4 or b == 4:
        return F(a == 4)
    return F(3, 5) * win(a + 1, b) + F(2, 5) * win(a, b + 1)
print(win(0, 0))"""
    ),
    "three-n-plus-one": (
        """
n, steps = 27, 0
while n != 1:
    n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
print(steps)"""
    ),
}


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_player_that_knows_no_answer_and_computes_them_is_right(sandbox):
    """It runs code, reads what the tool printed, and puts that into a box."""
    env = load(sandbox=sandbox, num_train_examples=84, num_eval_examples=91)
    rows = [row for row in [*env.dataset, *env.eval_dataset] if row["info"]["name"] in SOLUTIONS]
    assert len(rows) == len(SOLUTIONS)
    names = {row["prompt"][-1]["content"]: row["info"]["name"] for row in rows}

    def player(request):
        if request.prompt[-1]["role"] == "tool":
            return f"\\boxed{{{request.prompt[-1]['content']}}}"
        return python(SOLUTIONS[names[request.prompt[-1]["content"]]])

    results = env.generate(rows, ScriptedClient(player), "scripted")
    assert list(results["reward"]) == [1.0] * len(rows)
    assert set(results["metrics"]["python_calls"]) == {1.0}
    assert set(results["metrics"]["tool_errors"]) == {0.0}


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_player_that_writes_blocks_is_right_too(sandbox):
    """The same, with its code in its replies."""
    env = load(sandbox=sandbox, code_from="blocks", num_train_examples=84, num_eval_examples=91)
    rows = [row for row in [*env.dataset, *env.eval_dataset] if row["info"]["name"] in SOLUTIONS]
    names = {row["prompt"][-1]["content"]: row["info"]["name"] for row in rows}

    def player(request):
        said = request.prompt[-1]["content"]
        _, is_output, printed = said.partition("Output:\n")
        if is_output:
            return f"\\boxed{{{printed}}}"
        return block(SOLUTIONS[names[said.removesuffix(f"\n\n{env.blocks_reminder}")]])

    client = ScriptedClient(player)
    results = env.generate(rows, client, "scripted")
    assert list(results["reward"]) == [1.0] * len(SOLUTIONS)
    assert set(results["metrics"]["python_calls"]) == {1.0}
    assert set(results["metrics"]["tool_errors"]) == {0.0}
    assert set(results["stop_conditions"]) == {"no_code_block"}
    assert all(request.tools is None for request in client.requests)


def test_a_box_beside_code_is_not_the_answer_yet():
    env = load(code_from="blocks", num_train_examples=1, num_eval_examples=1)
    (right,) = answers(env.eval_dataset).values()
    box = f"\\boxed{{{right}}}"
    results = env.evaluate(ScriptedClient([f"{block('1')}\n{box}", "I am done."]), "scripted")
    assert list(results["reward"]) == [0.0]
    assert list(env.evaluate(ScriptedClient([block("1"), box]), "scripted")["reward"]) == [1.0]


def test_the_example_of_a_block_prints_what_the_prompt_says():
    env = load(code_from="blocks", num_train_examples=1, num_eval_examples=1)
    results = env.evaluate(ScriptedClient([BLOCKS_SYSTEM_PROMPT, "done"]), "scripted")
    output = results["completion"][0][1]["content"]
    assert output == "Output:\n8"
    assert output in BLOCKS_SYSTEM_PROMPT


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_model_that_is_not_shown_tools_is_told_to_write_blocks(num_workers):
    env = vf.load_environment(
        "math-python", sandbox="unsafe_subprocess", num_train_examples=1, num_eval_examples=1
    )
    client = NotShownTools([block("6 * 7"), "done"])
    results = env.evaluate(client, "small", num_workers=num_workers)
    system, user = client.requests[0].prompt
    assert system["content"] == BLOCKS_SYSTEM_PROMPT
    assert user["content"].endswith(env.blocks_reminder)
    assert client.requests[0].tools is None
    assert results["completion"][0][1]["content"] == "Output:\nOut[1]: 42"
    # the twin: a client that does not know leaves the tool
    asked = ScriptedClient("done")
    env.evaluate(asked, "small", num_workers=num_workers)
    assert asked.requests[0].prompt[0]["content"] == SYSTEM_PROMPT
    assert asked.requests[0].tools


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(not is_installed(), reason="the extra verifiers[local] is not installed")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_embedded_model_really_runs_code_in_bubblewrap():
    env = load(sandbox="bubblewrap", max_turns=2, num_train_examples=1, num_eval_examples=3)
    results = env.evaluate(
        "local", sampling_args={"temperature": 0.0, "max_tokens": 250, "stop": ["\n```\n"]}
    )
    assert {state["code_from"] for state in results["states"]} == {"blocks"}
    printed = [
        m["content"]
        for completion in results["completion"]
        for m in completion
        if m["role"] == "user"
    ]
    assert printed
    assert all(text.startswith("Output:\n") for text in printed)
    assert sum(results["metrics"]["sandbox_command_execution_time"]) > 0


@pytest.mark.parametrize(
    ("system_prompt", "told"), [("Be brief.", "Be brief.\n\nYou can run"), ("", None), (None, None)]
)
def test_a_system_prompt_of_ones_own_in_blocks(system_prompt, told):
    env = load(
        code_from="blocks", system_prompt=system_prompt, num_train_examples=1, num_eval_examples=1
    )
    client = ScriptedClient("done")
    env.evaluate(client, "scripted")
    first = client.requests[0].prompt[0]
    assert first["role"] == ("system" if told else "user")
    assert first["content"].startswith(told or "")


def test_the_turns_are_bounded():
    env = load(max_turns=2, num_train_examples=1, num_eval_examples=1)
    results = env.evaluate(ScriptedClient([python("1")]), "scripted")
    assert results["stop_conditions"] == ["max_turns_reached"]
    assert list(results["reward"]) == [0.0]


# --- arguments and sources ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_train_examples": 0}, "num_train_examples"),
        ({"num_eval_examples": "5"}, "num_eval_examples"),
        ({"max_turns": -1}, "max_turns"),
        ({"seed": 0.5}, "seed"),
        ({"dataset_name": "maths"}, 'did you mean "math"'),
        ({"dataset_split": "validation"}, "dataset_split"),
        ({"eval_split": "dev"}, "eval_split"),
        ({"split": "train", "dataset_split": "train"}, "split is an alias"),
        ({"timeout_per_command_seconds": 0}, "timeout_per_command_seconds"),
        ({"code_from": "fences"}, "code_from"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(vf.ConfigError, match=message):
        load(**arguments)


def test_the_arguments_of_older_guides():
    env = vf.load_environment(
        "vf-math-python", split="train", rollouts_per_example=8, max_concurrent=512
    )
    assert (env.rollouts_per_example, env.max_concurrent) == (8, 512)
    assert isinstance(env, vf.PythonEnv)
    # nothing is fetched yet
    math = vf.load_environment("math-python", dataset_name="math", num_train_examples=1000)
    assert math.max_turns == 10
    tested = load(eval_split="test", num_eval_examples=5)
    assert (
        tested.get_eval_dataset()["question"]
        == load(num_eval_examples=5).get_eval_dataset()["question"]
    )


def test_a_set_with_two_splits_is_read_from_both():
    env = load(dataset_name="arithmetic", num_train_examples=30)
    train, held_out = env.get_dataset(), env.get_eval_dataset()
    assert (len(train), len(held_out)) == (30, 200)
    assert not set(train["question"]) & set(held_out["question"])


def test_one_split_for_both_is_cut_in_two():
    env = load(dataset_name="arithmetic", split="test", eval_split="test", num_eval_examples=50)
    train, held_out = env.get_dataset(), env.get_eval_dataset()
    assert (len(train), len(held_out)) == (150, 50)
    assert not set(train["question"]) & set(held_out["question"])
    large = load(dataset_name="arithmetic", split="train", eval_split="train")
    assert (len(large.get_dataset()), len(large.get_eval_dataset())) == (1900, 100)
    small = load(dataset_name="arithmetic", split="test", eval_split="test")
    assert len(small.get_eval_dataset()) == 200
    with pytest.raises(vf.DatasetError, match="all 200 problems of 'arithmetic' are held out"):
        small.get_dataset()


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["math", "math500", "aime2024", "aime2025"])
def test_without_a_network_a_published_set_names_the_offline_choice(name):
    env = load(dataset_name=name)
    with pytest.raises(
        vf.DatasetError, match="leave dataset_name out: math-python then uses its own problems"
    ):
        env.get_eval_dataset()


@pytest.mark.usefixtures("no_network")
def test_a_published_set_of_one_split_is_held_out_whole(tmp_path):
    """A folder of the dataset's name stands for the hub: the loader reads both alike."""
    folder = tmp_path / "HuggingFaceH4/MATH-500"
    folder.mkdir(parents=True)
    rows = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(20)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = load(dataset_name="math500")
    assert len(env.get_eval_dataset()) == 20
    assert answers(env.eval_dataset)["What is 4 + 1?"] == "5"
    with pytest.raises(vf.DatasetError, match="num_eval_examples"):
        env.get_dataset()


def test_a_sandbox_is_a_backend_or_its_name():
    backend = UnsafeSubprocess()
    env = load(sandbox=backend, num_train_examples=1, num_eval_examples=1)
    assert env.sandbox is backend
