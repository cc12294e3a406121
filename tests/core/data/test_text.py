r"""Answers out of text: ``\boxed{…}``, ``####``, digits; and the check for keys."""

import time

import pytest

import verifiers as vf
from verifiers.data.text import (
    BOXED_SYSTEM_PROMPT,
    THINK_BOXED_SYSTEM_PROMPT,
    ensure_keys,
    extract_boxed_answer,
    extract_hash_answer,
    split_reasoning,
    strip_non_numeric,
)
from verifiers.errors import MissingKeyError


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{4}", "4"),
        (r"\boxed {4}", "4"),
        ("\\boxed\n{4}", "4"),
        ("\\boxed \t {\\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox {4}", "4"),
        (r"\boxed { 4 } and {5}", " 4 "),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{4} and an unfinished \boxed{5", "4"),
        (r"double escaped \\boxed{6}", "6"),
        (r"} stray \boxed{8} }", "8"),
        (r"\boxed{a \\} b", r"a \\"),
        (r"\boxed{}", ""),
        (r"\fbox{4}", "4"),
        (r"\fbox{\boxed{4}}", "4"),
        (r"it is $\boxed 4$.", "4"),
        (r"\boxed42, so", "42"),
        (r"\boxed -1,234.5", "-1,234.5"),
        (r"\boxed x", "x"),
        (r"\boxed\frac12", r"\frac12"),
        (r"\boxed\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed\pi", r"\pi"),
        (r"\boxed{3}, no: \boxed 4", "4"),
    ],
)
def test_the_last_balanced_box_is_the_answer(text, answer):
    assert extract_boxed_answer(text) == answer
    assert extract_boxed_answer(text, strict=True) == answer


@pytest.mark.parametrize(
    "text",
    [
        "4",
        r"\boxed{4",
        r"\boxed is",
        r"\boxed a number",
        r"\boxed",
        r"\boxed(4)",
        "boxed{4}",
        r"\fboxed{4}",
    ],
)
def test_text_without_a_box_is_itself_or_nothing_when_strict(text):
    assert extract_boxed_answer(text) == text
    assert extract_boxed_answer(text, strict=True) == ""


@pytest.mark.parametrize(
    "unit", [r"\boxed{", "{", "}", r"\boxed{1}", r"\boxed ", r"\boxed 4", r"\boxed\a{", "\\"]
)
def test_a_megabyte_of_boxes_is_read_in_linear_time(unit):
    bomb = unit * (1_000_000 // len(unit))
    started = time.thread_time()
    extract_boxed_answer(bomb)
    assert time.thread_time() - started < 2.0


def test_hash_answers():
    assert extract_hash_answer("thus\n#### 42\n") == "42"
    assert extract_hash_answer("#### Step 1\n#### 4") == "Step 1"
    assert extract_hash_answer("42") == "42"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("$1,234.50", "1234.50"),
        ("-5", "5"),
        ("x = -5.", "5."),
        ("F-16", "16"),
        ("−3", "3"),
        ("-$2", "2"),
        ("no", ""),
    ],
)
def test_numbers_are_digits_and_points(text, number):
    assert strip_non_numeric(text) == number


def test_the_prompts_ask_for_what_the_extractor_reads():
    assert "\\boxed{}" in BOXED_SYSTEM_PROMPT
    assert "\\boxed{}" in THINK_BOXED_SYSTEM_PROMPT
    assert "<think>" in THINK_BOXED_SYSTEM_PROMPT


def test_missing_keys_are_named_together(monkeypatch):
    monkeypatch.setenv("VF_TEST_SET", "x")
    monkeypatch.setenv("VF_TEST_EMPTY", "")
    monkeypatch.delenv("VF_TEST_ABSENT", raising=False)
    ensure_keys(["VF_TEST_SET"])
    with pytest.raises(MissingKeyError) as caught:
        ensure_keys(["VF_TEST_SET", "VF_TEST_ABSENT", "VF_TEST_EMPTY"])
    assert caught.value.names == ["VF_TEST_ABSENT", "VF_TEST_EMPTY"]
    assert "VF_TEST_ABSENT, VF_TEST_EMPTY" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("<think>a</think>b", ("a", "b")),
        ("a</think>\n\nb", ("a", "b")),
        ("<think>a</think>\n<think>b</think>c", ("a\nb", "c")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
        ("<think>a</think>\n<think>b", ("a\nb", "")),
        ("I <think> so", ("", "I <think> so")),
        ("```python\nprint('</think>')\n```", ("", "```python\nprint('</think>')\n```")),
        ("<think>\n```\nx = '</think>'\n```\n</think>b", ("```\nx = '</think>'\n```", "b")),
        ("```python\nx\n</think>\nb", ("```python\nx", "b")),
    ],
)
def test_reasoning_and_the_rest(text, split):
    assert split_reasoning(text) == split


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"), ("<seed:think>", "</seed:think>")],
)
def test_reasoning_in_the_tags_of_further_models(opening, closing):
    draft = "<answer>3</answer>"
    assert split_reasoning(f"{opening}{draft}{closing}4") == (draft, "4")
    assert split_reasoning(f"{draft}{closing}4") == (draft, "4")  # opened by the template
    assert split_reasoning(f"{opening}{draft}") == (draft, "")
    reply = [{"role": "assistant", "content": f"{opening}{draft}{closing}<answer>4</answer>"}]
    assert vf.XMLParser(["answer"]).parse_answer(reply) == "4"


@pytest.mark.parametrize(
    "unit", ["<think></think>", "</think>", "<think>", "```\n</think>x", " \n"]
)
def test_the_split_takes_time_linear_in_the_text(unit):
    begun = time.thread_time()
    split_reasoning(unit * 100_000)
    split_reasoning("```\n" + unit * 100_000)
    assert time.thread_time() - begun < 2.0
