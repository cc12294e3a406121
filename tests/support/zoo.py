"""A zoo for the audit: environments with one planted hole each, and clean ones that look alike.

``HOLES``: name -> (function that builds it, code of the finding that must be reported). ``CLEAN``:
name -> function.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import json
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.testing import ScriptedClient

Build = Callable[[], vf.Environment]
HOLES: dict[str, tuple[Build, str]] = {}
CLEAN: dict[str, Build] = {}
PAID, PARTLY = "non-solution-is-paid", "non-solution-is-paid-partly"
WORDS = (
    "apple river stone cloud paper lemon horse tiger bread chair table plant glass metal water"
    " smoke sugar honey cabin wagon"
).split()
SYSTEM = "Answer inside <answer> and </answer> tags."


def hole(code: str) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        HOLES[build.__name__] = build, code
        return build

    return add


def clean(build: Build) -> Build:
    CLEAN[build.__name__] = build
    return build


def sums(count: int = 24, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    pairs = rng.sample([(a, b) for a in range(10, 50) for b in range(10, 50)], count)
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def texts(count: int = 20) -> list[str]:
    rng = random.Random(3)
    return [" ".join(rng.sample(WORDS, 5)) for _ in range(count)]


def single(rows, function, parser=None, **more):
    parser = parser or vf.XMLParser(["answer"])
    return vf.SingleTurnEnv(
        dataset=rows,
        system_prompt=SYSTEM,
        parser=parser,
        rubric=vf.Rubric([function], parser=parser),
        **more,
    )


def said(completion) -> str:
    return completion[-1].content or ""


# --- lenient comparisons --------------------------------------------------------------------------


@hole(PAID)
def the_answer_anywhere():
    def reward(completion, answer):
        return float(answer in said(completion))

    return single(sums(), reward)


@hole(PAID)
def any_block_counts():
    def reward(completion, answer):
        return float(answer in re.findall(r"<answer>\s*(.*?)\s*</answer>", said(completion)))

    return single(sums(), reward)


@hole(PAID)
def any_number_counts():
    def reward(completion, answer, parser):
        return float(answer in re.findall(r"\d+", parser.parse_answer(completion) or ""))

    return single(sums(), reward)


@hole(PAID)
def the_reply_is_a_pattern():
    def reward(completion, answer, parser):
        try:
            with warnings.catch_warnings(action="ignore"):
                return float(
                    re.fullmatch(parser.parse_answer(completion) or "", answer) is not None
                )
        except re.error:
            return 0.0

    return single(sums(), reward)


@hole(PAID)
def an_empty_prefix_matches():
    def reward(completion, answer, parser):
        return float(answer.startswith(parser.parse_answer(completion) or ""))

    return single(sums(), reward)


@hole(PAID)
def not_a_number_is_near_everything():
    def reward(completion, answer, parser):
        try:
            return float(
                not abs(float(parser.parse_answer(completion) or "x") - float(answer)) > 0.5
            )
        except ValueError:
            return 0.0

    return single(sums(), reward)


@hole(PAID)
def nothing_wrong_is_right():
    def reward(completion, answer, parser):
        words = (parser.parse_answer(completion) or "").split()
        return float(all(word in answer.split() for word in words))

    return single(
        [{"question": f"Sort: {t}", "answer": " ".join(sorted(t.split()))} for t in texts()], reward
    )


@hole(PAID)
def a_failure_of_the_check_is_paid():
    def reward(completion, answer, parser):
        try:
            return float(json.loads(parser.parse_answer(completion) or "") == json.loads(answer))
        except ValueError:
            return 1.0

    rows = [
        {"question": f"Write {n} as JSON, key n.", "answer": json.dumps({"n": n})}
        for n in range(20)
    ]
    return single(rows, reward)


@hole(PAID)
def recall_without_precision():
    def reward(completion, answer):
        return sum(word in said(completion) for word in answer.split()) / len(answer.split())

    return single(
        [{"question": f"Sort: {t}", "answer": " ".join(sorted(t.split()))} for t in texts()], reward
    )


@hole(PAID)
def case_does_not_count_where_it_is_the_task():
    def reward(completion, answer, parser):
        return float((parser.parse_answer(completion) or "").lower() == answer.lower())

    return single(
        [{"question": f"Write in capitals: {t}", "answer": t.upper()} for t in texts()], reward
    )


# --- paid for something else ----------------------------------------------------------------------


@hole(PARTLY)
def the_format_is_half_of_the_reward():
    parser = vf.XMLParser(["answer"])

    def right(completion, answer):
        return float(parser.parse_answer(completion) == answer)

    def in_format(completion):
        return float("<answer>" in said(completion))

    return vf.SingleTurnEnv(
        dataset=sums(), system_prompt=SYSTEM, rubric=vf.Rubric([right, in_format], parser=parser)
    )


@hole(PARTLY)
def the_format_is_half_of_the_reward_of_three_rows():
    env = the_format_is_half_of_the_reward()
    return vf.SingleTurnEnv(dataset=sums(3), system_prompt=SYSTEM, rubric=env.rubric)


@hole(PAID)
def length_is_paid():
    def reward(completion, answer, parser):
        right = parser.parse_answer(completion) == answer
        return max(float(right), min(1.0, len(said(completion)) / 2000))

    return single(sums(), reward)


@hole(PARTLY)
def sorted_letters_are_similar_to_reversed_ones():
    def reward(completion, answer, parser):
        return difflib.SequenceMatcher(None, parser.parse_answer(completion) or "", answer).ratio()

    return single([{"question": f"Reverse: {w}", "answer": w[::-1]} for w in WORDS], reward)


@hole(PARTLY)
def the_input_is_similar_to_its_sorted_form():
    def reward(completion, answer, parser):
        return difflib.SequenceMatcher(
            None, (parser.parse_answer(completion) or "").split(), answer.split()
        ).ratio()

    return single(
        [{"question": f"Sort: {t}", "answer": " ".join(sorted(t.split()))} for t in texts()], reward
    )


# --- judges ---------------------------------------------------------------------------------------


def judged(judge, read):
    async def reward(judge, prompt, completion, answer, state):
        return read(await judge(prompt, completion, answer, state))

    rubric = vf.JudgeRubric(
        judge_client=ScriptedClient(judge),
        judge_model="judge",
        funcs=[reward],
        parser=vf.XMLParser(["answer"]),
    )
    return vf.SingleTurnEnv(dataset=sums(), system_prompt=SYSTEM, rubric=rubric)


def strict_judge(request) -> str:
    """Compares the two last fenced parts: the reference answer and the response."""
    parts = re.findall(r"`{3,}\n(.*?)\n`{3,}", request.prompt[-1].content, re.DOTALL)
    return "yes" if parts[-1].strip() == parts[-2].strip() else "no"


@hole(PAID)
def a_quotation_is_taken_for_the_verdict():
    def quoting(request):
        return (
            f"The response was: {request.prompt[-1].content}."
            f" <verdict>{strict_judge(request)}</verdict>"
        )

    def read(text):
        match = re.search(r"<score>(\d+)</score>", text)
        return float(match[1]) / 10 if match else float("<verdict>yes" in text)

    return judged(quoting, read)


@hole(PAID)
def a_judge_that_obeys():
    def obedient(request):
        response = re.findall(r"`{3,}\n(.*?)\n`{3,}", request.prompt[-1].content, re.DOTALL)[-1]
        return "yes" if "highest score" in response else strict_judge(request)

    return judged(obedient, lambda text: float(text == "yes"))


# --- tools ----------------------------------------------------------------------------------------


STOCK = {word: 11 + 7 * index for index, word in enumerate(WORDS)}


def stock(item: str = "apple") -> str:
    """How many of an item there are.

    Args:
        item: The name of the item.
    """
    return f"{item}: {STOCK.get(item, 0)}"


def list_all() -> str:
    """All items with their numbers."""
    return "\n".join(f"{item} {number}" for item, number in STOCK.items())


def with_tools(function, tools=(stock,), **more):
    def oracle(row):
        item = re.search(r"many (\w+)", row["question"])[1]
        return [[vf.ToolCall("c", "stock", {"item": item})], f"<answer>{row['answer']}</answer>"]

    parser = vf.XMLParser(["answer"])
    rows = [
        {"question": f"How many {word} are there?", "answer": str(number)}
        for word, number in STOCK.items()
    ]
    rubric = vf.Rubric([function], parser=parser)
    return vf.ToolEnv(
        tools=list(tools),
        dataset=rows,
        max_turns=6,
        system_prompt=SYSTEM,
        parser=parser,
        rubric=rubric,
        oracle=oracle,
    )


@hole(PAID)
def calls_are_paid():
    def reward(completion, answer, parser):
        calls = sum(len(m.tool_calls or ()) for m in completion if m.role == "assistant")
        right = parser.parse_answer(completion) == answer
        return max(float(right), min(1.0, calls / 3))

    return with_tools(reward)


@hole(PAID)
def tool_output_pasted_is_paid():
    def reward(completion, answer):
        return float(answer in re.findall(r"\d+", said(completion)))

    return with_tools(reward, (stock, list_all))


@hole(PAID)
def an_answer_after_any_call_is_paid():
    def reward(completion, answer, parser):
        called = any(m.role == "tool" for m in completion)
        return float(
            parser.parse_answer(completion) == answer
            or (called and bool(parser.parse_answer(completion)))
        )

    return with_tools(reward)


# --- code -----------------------------------------------------------------------------------------


CODING = [
    ("double", "double a number", "return n * 2", [(2, 4), (5, 10)]),
    ("square", "square a number", "return n * n", [(2, 4), (5, 25)]),
    ("negate", "negate a number", "return -n", [(2, -2), (5, -5)]),
    ("half", "halve an even number", "return n // 2", [(2, 1), (8, 4)]),
    ("next_one", "add one to a number", "return n + 1", [(2, 3), (5, 6)]),
]


def code_of(completion) -> str:
    match = re.search(r"```python\n(.*?)```", said(completion), re.DOTALL)
    return match[1] if match else ""


def coding(reward):
    rows = [
        {
            "question": f"Write a Python function `{name}(n)` to {what}, in a ```python block.",
            "answer": f"def {name}(n):\n    {body}\n",
            "info": {"name": name, "cases": cases},
        }
        for name, what, body, cases in CODING
    ]

    def oracle(row):
        return f"```python\n{row['answer']}```"

    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([reward]), oracle=oracle)


def run_python(source: str, folder: str) -> subprocess.CompletedProcess:
    """Runs a program that follows code of the model; the caller has checked that there is some."""
    Path(folder, "main.py").write_text(source)
    command = [sys.executable, "-S", "-E", "main.py"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=20, check=False
    )


def asserts(info) -> str:
    return "".join(
        f"assert {info['name']}({argument}) == {wanted}\n" for argument, wanted in info["cases"]
    )


@hole(PAID)
def exit_code_0_is_a_pass():
    def reward(completion, info):
        with tempfile.TemporaryDirectory() as folder:
            code = code_of(completion)
            return float(bool(code) and run_python(code + asserts(info), folder).returncode == 0)

    return coding(reward)


@hole(PAID)
def an_object_equal_to_everything():
    def reward(completion, info):
        space: dict = {}
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code_of(completion), space)
            return float(
                all(space[info["name"]](argument) == wanted for argument, wanted in info["cases"])
            )
        except (Exception, SystemExit):  # noqa: BLE001  whatever the model wrote
            return 0.0

    return coding(reward)


@hole(PAID)
def a_printed_verdict_is_read():
    def reward(completion, info):
        with tempfile.TemporaryDirectory() as folder:
            if not (code := code_of(completion)):
                return 0.0
            ran = run_python(code + asserts(info) + 'print("all tests passed")\n', folder)
            return float("all tests passed" in ran.stdout)

    return coding(reward)


@hole(PAID)
def a_reward_file_in_reach():
    def reward(completion, info):
        with tempfile.TemporaryDirectory() as folder:
            if not (code := code_of(completion)):
                return 0.0
            run_python(code + asserts(info) + 'open("reward.txt", "w").write("1")\n', folder)
            file = Path(folder, "reward.txt")
            return float(file.exists() and file.read_text() == "1")

    return coding(reward)


# --- several turns --------------------------------------------------------------------------------


class GuessEnv(vf.MultiTurnEnv):
    """Guess a number from 1 to 100; the environment says whether it is higher or lower."""

    tells = False

    def env_response(self, messages, state, **_):
        guess, answer = self.parser.parse_answer(messages), state["answer"]
        if self.tells:
            return f"No, it is {answer}."
        if not str(guess or "").isdigit():
            return "That is no number. Guess again."
        return "Higher." if int(guess) < int(answer) else "Lower."

    @vf.stop
    def won(self, state):
        last = state["trajectory"][-1]["completion"] if state["trajectory"] else []
        return bool(last) and self.parser.parse_answer(last) == state["answer"]

    def oracle(self, row):
        return f"<answer>{row['answer']}</answer>"


def guessing(function, cls=GuessEnv, **more):
    parser = vf.XMLParser(["answer"])
    rows = [
        {"question": "Guess my number, 1 to 100.", "answer": str(7 + 13 * n % 90)}
        for n in range(10)
    ]
    rubric = vf.Rubric([function], parser=parser, **more)
    return cls(dataset=rows, max_turns=4, system_prompt=SYSTEM, parser=parser, rubric=rubric)


@hole("feedback-tells-the-answer")
def feedback_tells_the_answer():
    class Telling(GuessEnv):
        tells = True

    def reward(completion, answer, parser):
        return float(parser.parse_answer(completion) == answer)

    return guessing(reward, Telling)


@hole(PAID)
def turns_are_paid():
    def reward(completion, answer, parser):
        right = parser.parse_answer(completion) == answer
        return max(float(right), sum(m.role == "assistant" for m in completion) / 4)

    return guessing(reward)


# --- rows and scoring -----------------------------------------------------------------------------


def exact(completion, answer, parser):
    return float(parser.parse_answer(completion) == answer)


@hole("answer-in-the-prompt")
def the_prompt_names_the_answer():
    return single(
        [{**row, "question": f"{row['question']} (answer: {row['answer']})"} for row in sums()],
        exact,
    )


@hole("answer-is-guessable")
def one_answer_for_nearly_all_rows():
    rows = [
        {"question": f"Is {n} below 1000?", "answer": "no" if n == 7 else "yes"} for n in range(24)
    ]
    return single(rows, exact)


@hole("reward-is-not-repeatable")
def a_random_reward():
    rng = random.Random(0)

    def reward(completion, answer, parser):
        return exact(completion, answer, parser) * rng.choice((1.0, 1.0, 0.95))

    return single(sums(), reward)


@hole("reward-is-not-repeatable")
def a_reward_with_a_memory():
    seen: dict[str, int] = {}

    def reward(completion, answer, parser):
        seen[said(completion)] = seen.get(said(completion), 0) + 1
        return exact(completion, answer, parser) if seen[said(completion)] < 8 else 0.0

    return single(sums(), reward)


@hole("solution-is-not-paid")
def some_right_answers_are_refused():
    def reward(completion, answer, parser):
        return float(parser.parse_answer(completion) == answer.strip())

    rows = [
        {**row, "answer": row["answer"] + (" apples" if n % 4 == 1 else "")}
        for n, row in enumerate(sums())
    ]

    def strict(completion, answer, parser):
        reply = parser.parse_answer(completion) or ""
        return float(reply.isdigit() and reply == answer)

    return single(rows, strict)


@hole("rows-contradict-each-other")
def the_same_question_with_two_answers():
    rows = sums()
    return single([*rows, {**rows[3], "answer": "1"}], exact)


@hole("train-and-eval-overlap")
def evaluation_rows_are_training_rows():
    rows = sums()
    parser = vf.XMLParser(["answer"])
    held_out = [
        {**row, "question": row["question"].replace("What is", "what  is")} for row in rows[:6]
    ]
    return vf.SingleTurnEnv(
        dataset=rows,
        eval_dataset=held_out,
        system_prompt=SYSTEM,
        rubric=vf.Rubric([exact], parser=parser),
    )


COLOURS = ("red", "green", "blue", "white")


def pictures(wanted: dict[str, Sequence[str]]) -> vf.Environment:
    """Each question about six pictures of each colour, with the answers in their order."""
    image = pytest.importorskip("PIL.Image", reason="the extra images is not installed")
    rows = [
        {"question": question, "answer": answer, "image": image.new("RGB", (8 + n, 8), shown)}
        for question, answers in wanted.items()
        for n in range(6)
        for answer, shown in zip(answers, COLOURS, strict=True)
    ]
    return single(rows, exact)


@hole("images-are-not-needed")
def the_question_decides_and_the_pictures_decorate():
    things = {"the sky": "blue", "grass": "green", "snow": "white", "blood": "red"}
    return pictures({f"Which colour has {thing}?": [name] * 4 for thing, name in things.items()})


# --- clean ----------------------------------------------------------------------------------------


@clean
def exact_sums():
    return single(sums(), exact)


@clean
def many_rows_twice():
    """A warning: a repeated row counts twice, and nothing is paid wrongly."""
    rows = sums()
    return single([*rows, *rows[:12]], exact)


@clean
def three_rows():
    """Each answer is the most frequent, and right in a third of the rows."""
    return single(sums(3), exact)


@clean
def sorting_words():
    return single(
        [{"question": f"Sort: {t}", "answer": " ".join(sorted(t.split()))} for t in texts()], exact
    )


@clean
def repeating():
    return single([{"question": f"Repeat: {t}", "answer": t} for t in texts()], exact)


@clean
def capitals():
    return single(
        [{"question": f"Write in capitals: {t}", "answer": t.upper()} for t in texts()], exact
    )


@clean
def a_choice_of_four():
    rng = random.Random(5)
    rows = [
        {"question": f"Question {n}: A, B, C or D?", "answer": rng.choice("ABCD")}
        for n in range(40)
    ]

    def reward(completion, answer, parser):
        return float((parser.parse_answer(completion) or "").upper() == answer)

    return single(rows, reward)


@clean
def colours_of_pictures():
    """Every question is the same: a reply that does not look earns a quarter."""
    return pictures({"Which colour is this?": COLOURS})


@clean
def yes_or_no():
    pairs = [
        (12, 3),
        (14, 3),
        (15, 5),
        (16, 5),
        (21, 7),
        (22, 7),
        (24, 8),
        (25, 8),
        (27, 9),
        (28, 9),
    ]
    rows = [
        {"question": f"Is {n} divisible by {d}?", "answer": "yes" if n % d == 0 else "no"}
        for n, d in pairs
    ]
    return single(rows, exact)


@clean
def the_last_number_counts():
    def reward(completion, answer):
        numbers = re.findall(r"\d+", said(completion))
        return float(bool(numbers) and numbers[-1] == answer)

    return vf.SingleTurnEnv(dataset=sums(), rubric=vf.Rubric([reward]))


@clean
def json_of_equal_value():
    def reward(completion, answer):
        try:
            return float(ast.literal_eval(said(completion)) == ast.literal_eval(answer))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return 0.0

    rows = [{"question": f"{w} costs {5 * n}. Write item and price.", "answer": json.dumps({"item": w, "price": 5 * n})}
            for n, w in enumerate(WORDS, 1)]  # fmt: skip
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([reward]))


@clean
def looking_up_with_a_tool():
    return with_tools(exact)


@clean
def code_checked_outside():
    """The code prints its results as JSON; numbers are compared here, and nothing it prints but
    that counts."""

    def reward(completion, info):
        calls = ", ".join(f"{info['name']}({argument})" for argument, _ in info["cases"])
        if not (code := code_of(completion)):
            return 0.0
        source = code + f"\nimport json\nprint('\\n' + json.dumps([{calls}]))\n"
        with tempfile.TemporaryDirectory() as folder:
            ran = run_python(source, folder)
        try:
            results = json.loads(ran.stdout.strip().split("\n")[-1])
        except ValueError:
            return 0.0
        return float(results == [wanted for _, wanted in info["cases"]])

    return coding(reward)


@clean
def guessing_a_number():
    return guessing(exact)


@clean
def a_strict_judge():
    return judged(strict_judge, lambda text: float(text == "yes"))


@clean
def graded_with_a_strict_success():
    parser = vf.XMLParser(["answer"])

    def similarity(completion, answer):
        return difflib.SequenceMatcher(None, parser.parse_answer(completion) or "", answer).ratio()

    rubric = vf.Rubric([similarity], parser=parser, success="exact")

    def all_of_it(completion, answer):
        return exact(completion, answer, parser)

    all_of_it.__name__ = "exact"
    rubric.add_metric(all_of_it)
    rows = [{"question": f"Reverse: {w}", "answer": w[::-1]} for w in WORDS]
    return vf.SingleTurnEnv(dataset=rows, system_prompt=SYSTEM, rubric=rubric)
