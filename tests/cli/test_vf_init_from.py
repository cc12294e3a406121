"""``vf-init --from``: a table becomes a package that works as it is; what is seen is not asked, what
is left out is counted, and no cell becomes code."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import verifiers as vf
from support.eval_command import files_below, runner_of
from support.fresh_python import make_fresh_python
from verifiers.cli.init import COMMAND
from verifiers.cli.table import decimal_mark_of
from verifiers.testing import FakeServer, ScriptedClient

REPOSITORY = Path(__file__).parents[2]
GERMAN = (
    "id;Frage;Antwort\r\n1;Wie viel ist 1,5 + 2?;3,5\r\n2;Hauptstadt von Frankreich?;Paris\r\n"
    '3;Wie viele Meter hat ein Kilometer?;1.000\r\n4;Farbe des Himmels?;"blau;hellblau"\r\n'
    '5;"Was steht\r\nin ""Anführung""?";Größe\r\n'
)


@pytest.fixture
def vf_init(tmp_path, monkeypatch, capfd):
    """The command, run in this process inside an empty folder."""
    monkeypatch.chdir(tmp_path)
    return runner_of(COMMAND, capfd)


def rows_of(folder: Path) -> dict[str, list[str]]:
    """Question -> right answers in the package that was written below ``folder``."""
    (path,) = folder.glob("environments/*/src/*/rows.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(row["answer"] == row["info"]["answers"][0] for row in rows)
    return {row["question"]: row["info"]["answers"] for row in rows}


def write_csv(path: Path, *answers: str, header: str = "question,answer") -> Path:
    """A table with a question for every answer, which is written as it is."""
    lines = [header, *(f"q{number},{answer}" for number, answer in enumerate(answers))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# --- what is seen ---------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_encoding_delimiter_columns_answers_and_decimal_commas_are_seen(
    vf_init, tmp_path, encoding
):
    (tmp_path / "t.csv").write_bytes(GERMAN.encode(encoding))
    ran = vf_init("quiz", "--from", "t.csv", "--json")
    table = ran.json["table"]
    assert (table["question_column"], table["answer_column"]) == ("Frage", "Antwort")
    assert (table["separator"], table["decimal_mark"]) == (";", ",")
    assert (table["num_read"], table["num_rows"], table["left_out"]) == (5, 5, {})
    assert table["encoding"] == encoding.removesuffix("-sig")
    assert rows_of(tmp_path) == {
        "Wie viel ist 1,5 + 2?": ["3,5"],
        "Hauptstadt von Frankreich?": ["Paris"],
        "Wie viele Meter hat ein Kilometer?": ["1.000"],
        "Farbe des Himmels?": ["blau", "hellblau"],
        'Was steht\r\nin "Anführung"?': ["Größe"],
    }


@pytest.mark.parametrize("kind", ["tsv", "jsonl", "json", "xlsx", "parquet"])
def test_every_kind_of_table_gives_the_same_rows(vf_init, tmp_path, kind):
    rows = [
        {"nr": 1, "Problem": "2 + 2", "Solution": 4},
        {"nr": 2, "Problem": "half", "Solution": 0.5},
        {"nr": 3, "Problem": "none", "Solution": None},
    ]
    path = tmp_path / f"t.{kind}"
    if kind == "tsv":
        cells = [list(rows[0]), *([row[name] or "" for name in row] for row in rows)]
        path.write_text("\n".join("\t".join(map(str, line)) for line in cells))
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "xlsx":
        openpyxl = pytest.importorskip("openpyxl", reason="the extra excel is not installed")
        book = openpyxl.Workbook()
        for line in ([*rows[0]], *([*row.values()] for row in rows)):
            book.active.append(line)
        book.save(path)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    ran = vf_init("quiz", "--from", path.name, "--json")
    assert ran.json["table"]["left_out"] == {"an empty answer": 1}
    kept = {
        question: [float(text) for text in texts] for question, texts in rows_of(tmp_path).items()
    }
    assert kept == {"2 + 2": [4.0], "half": [0.5]}


def test_a_list_in_a_cell_is_several_right_answers(vf_init, tmp_path):
    rows = [{"query": "a", "target": ["x", "y; z"]}, {"query": "b", "target": ["x"]}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert vf_init("quiz", "--from", "t.jsonl", "--answer-separator", "none").code == 0
    assert rows_of(tmp_path) == {"a": ["x", "y; z"], "b": ["x"]}


@pytest.mark.parametrize(
    ("answers", "separator"),
    [
        (["a|b", "c"], "|"),
        (["a; b", "c"], ";"),
        (["(1;2)", "(3;4)"], None),  # a point
        (["|x|", "x"], None),  # a value without its sign
        (["int x; return x;", "c"], None),  # statements end with it
        (["P(A|B)", "a"], None),
        (["w " * 60 + "; b", "c"], None),  # a sentence
    ],
)
def test_a_separator_is_one_wherever_it_occurs(vf_init, tmp_path, answers, separator):
    write_csv(tmp_path / "t.csv", *answers)
    assert vf_init("quiz", "--from", "t.csv", "--json").json["table"]["separator"] == separator


def test_a_separator_can_be_named_and_turned_off(vf_init, tmp_path):
    write_csv(tmp_path / "t.csv", "a / b; c", "d")
    named = vf_init("quiz", "--from", "t.csv", "--answer-separator", "/", "-p", "environments")
    assert named.code == 0
    assert rows_of(tmp_path)["q0"] == ["a", "b; c"]
    unsplit = vf_init("quiz", "--from", "t.csv", "--answer-separator", "none", "-p", "b", "--json")
    assert unsplit.json["table"]["separator"] is None


@pytest.mark.parametrize(
    ("answers", "mark"),
    [
        (["3,5", "12"], ","),
        (["3.5", "12"], "."),
        (["0,125"], ","),
        (["1.234,567"], ","),
        (["1.234.567"], ","),
        (["1,234,567"], "."),
        (["1,234"], "."),
        (["Paris"], ""),
        (["00123", "3,5"], ","),
        (["00123"], ""),
        (["3,5", "3.5"], None),
        (["1.2.3.4"], ""),
    ],
)
def test_the_decimal_mark_is_that_of_the_numbers(answers, mark):
    assert decimal_mark_of(answers) == mark


def test_a_table_of_semicolons_means_a_comma_where_nothing_else_tells():
    assert decimal_mark_of(["1,234"], prefer_comma=True) == ","
    assert decimal_mark_of(["1,234,567"], prefer_comma=True) == "."


# --- what cannot be seen --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "flags", "said"),
    [
        ("a,b", [], "--question-column NAME and --answer-column NAME"),
        ("question,b", [], "choose with --answer-column NAME"),
        ("question,answer", ["--answer-column", "c"], "choose with --answer-column NAME"),
        ("question,question", ["--answer-column", "question"], "a name that is there once"),
        ("question,answer", ["--answer-column", "question"], "are both 'question'"),
    ],
)
def test_columns_that_cannot_be_seen_are_asked_for_in_a_sentence(
    vf_init, tmp_path, header, flags, said
):
    write_csv(tmp_path / "t.csv", "x", "y", header=header)
    ran = vf_init("quiz", "--from", "t.csv", *flags)
    assert ran.code == 2
    assert said in ran.err
    assert "has the columns " + ", ".join(map(repr, header.split(","))) in ran.err
    assert files_below(tmp_path) == ["t.csv"]


def test_named_columns_are_used_in_any_case_and_the_usual_ones_are_named(vf_init, tmp_path):
    (tmp_path / "t.csv").write_text("A,B,answer\nq,x,1\nr,y,2\n")
    ran = vf_init("quiz", "--from", "t.csv", "--question-column", "a", "--answer-column", "B")
    assert rows_of(tmp_path) == {"q": ["x"], "r": ["y"]}
    assert "not used: 'answer'; choose with --question-column" in ran.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--judge"], "--judge needs a table: --from FILE"),
        (["--answer-column", "a"], "--answer-column needs a table: --from FILE"),
        (["--from", "t.csv", "--template", "multi"], "leave out --template and --multi-file"),
        (["--from", "t.csv", "--multi-file"], "leave out --template and --multi-file"),
        (["--from", "none.csv"], "cannot read the table 'none.csv': No such file"),
        (["--from", "t.doc"], "the file type is not one of .csv, .tsv"),
    ],
)
def test_wrong_words_about_a_table_write_nothing(vf_init, tmp_path, words, said):
    write_csv(tmp_path / "t.csv", "x", "y")
    ran = vf_init("quiz", *words)
    assert ran.code == 2
    assert said in " ".join(ran.err.split())
    assert files_below(tmp_path) == ["t.csv"]


def test_a_package_that_exists_is_never_mixed_with_a_table(vf_init, tmp_path):
    write_csv(tmp_path / "t.csv", "x", "y")
    vf_init("quiz")
    before = files_below(tmp_path)
    ran = vf_init("quiz", "--from", "t.csv", "--rewrite-readme")
    assert ran.code == 2
    assert "environments/quiz exists; --from makes a new package" in ran.err
    assert files_below(tmp_path) == before


# --- what is left out -----------------------------------------------------------------------------


def test_rows_that_cannot_be_used_are_counted_with_their_reason(vf_init, tmp_path):
    lines = [
        "question,answer",
        "q1,a",
        "q2,b",
        ",c",  # 3
        "q4,  ",
        "q1,A",  # 5: the same in other letters
        "q6,x",
        " q6 ,y",
        "q8,a,b",  # a comma that nobody quoted
        "q9,</answer>",
        f"q10,{'w' * 100_001}",
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    ran = vf_init("quiz", "--from", "t.csv")
    assert rows_of(tmp_path) == {"q1": ["a"], "q2": ["b"]}
    assert "2 of 10 rows: the question is 'question', the answer 'answer'" in ran.out
    for count, reason, rows in [
        (1, "an empty question", "3"),
        (1, "an empty answer", "4"),
        (1, "a duplicate of another row", "5"),
        (2, "a contradiction: the same question, another answer", "6, 7"),
        (1, "more cells than the header", "8"),
        (1, "an answer that <answer> tags cannot hold", "9"),
        (1, "a cell of more than 100,000 characters", "10"),
    ]:
        assert f"left out: {count} with {reason} (row {rows})" in ran.out


def test_a_cell_that_no_request_can_carry_is_left_out(vf_init, tmp_path):
    lines = [
        {"question": name, "answer": answer}
        for name, answer in [("a", "x"), ("b", "y"), ("\ud800", "z"), ("d", {"e": 1})]
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ran = vf_init("quiz", "--from", "t.jsonl", "--json")
    assert ran.json["table"]["left_out"] == {"a cell that is no text": 2}


def test_a_table_without_two_usable_rows_is_refused_with_the_counts(vf_init, tmp_path):
    write_csv(tmp_path / "t.csv", "x", "")
    ran = vf_init("quiz", "--from", "t.csv")
    assert ran.code == 2
    assert "has 1 usable rows of 2 (1 an empty answer); at least 2 are needed" in ran.err


# --- data stay data -------------------------------------------------------------------------------

HOSTILE = '"""; import os; os.system("touch /tmp/x") #${id}$$ {0} `x` \\N{BELL} </answer'


def test_nothing_of_a_table_gets_into_code_settings_or_instructions(vf_init, tmp_path):
    """The package of a hostile table and that of a tame one differ in their rows alone."""
    for folder, text in (("tame", "canary"), ("hostile", f"canary {HOSTILE}")):
        rows = [{f"answer {text}": f"{text} {n}", text: f"{text} {n}?"} for n in range(6)]
        (tmp_path / f"{text[:6]}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        columns = ["--question-column", text, "--answer-column", f"answer {text}"]
        ran = vf_init(
            "quiz", "-p", folder, "--from", "canary.jsonl", "--answer-separator", "none", *columns
        )
        assert ran.code == 0, ran.err
    tame, hostile = (
        {
            path.relative_to(tmp_path / folder).as_posix(): path.read_text().replace(folder, "")
            for path in (tmp_path / folder).rglob("*")
            if path.is_file()
        }
        for folder in ("tame", "hostile")
    )
    rows = "quiz/src/vf_quiz/rows.jsonl"
    assert "canary" in tame.pop(rows)
    assert "canary" in hostile.pop(rows)
    assert tame == hostile
    assert not any("canary" in text for text in hostile.values())
    for name, text in hostile.items():
        if name.endswith(".py"):
            ast.parse(text)


def test_control_characters_of_a_name_do_not_reach_the_terminal(vf_init, tmp_path):
    (tmp_path / "t.csv").write_text("a\x1b[2J,b\nq,x\n")
    ran = vf_init("quiz", "--from", "t.csv")
    assert ran.code == 2
    assert "\x1b" not in ran.err + ran.out


# --- the package ----------------------------------------------------------------------------------


def rewards(environment: vf.Environment, answers: dict[str, str]) -> dict[str, float]:
    """Question -> reward of a model that gives these answers, on all rows."""
    rows = [*environment.get_dataset(), *environment.get_eval_dataset()]
    environment = vf.SingleTurnEnv(
        dataset=rows, rubric=environment.rubric, parser=environment.parser
    )
    model = ScriptedClient(
        lambda request: f"<answer>{answers[request.prompt[-1].content]}</answer>"
    )
    results = environment.evaluate(model, model="m", num_examples=-1, rollouts_per_example=1)
    questions = [prompt[-1]["content"] for prompt in results["prompt"]]
    return dict(zip(questions, results["rewards"], strict=True))


def test_numbers_are_equal_by_value_and_texts_in_any_case(vf_init, tmp_path):
    gold = ['"3,5"', "1.000", "Paris|Lutetia", '"-2,0"', "Rom"]
    write_csv(tmp_path / "t.csv", *gold)
    assert vf_init("by-value", "--from", "t.csv").code == 0
    environment = vf.load_environment("by-value")
    right = {"q0": "3.50", "q1": "1 000,0", "q2": "LUTETIA", "q3": "\u22122", "q4": " rom "}
    assert rewards(environment, right) == dict.fromkeys(right, 1.0)
    wrong = {"q0": "35", "q1": "1,000", "q2": "Paris|Lutetia", "q3": "2", "q4": "Rome"}
    assert rewards(environment, wrong) == dict.fromkeys(wrong, 0.0)


def test_codes_with_leading_zeros_are_no_numbers(vf_init, tmp_path):
    write_csv(tmp_path / "t.csv", "007", '"12,5"')
    assert vf_init("codes", "--from", "t.csv").code == 0
    environment = vf.load_environment("codes")
    assert rewards(environment, {"q0": "7", "q1": "12,50"}) == {"q0": 0.0, "q1": 1.0}
    assert rewards(environment, {"q0": "007", "q1": "125"}) == {"q0": 1.0, "q1": 0.0}


def test_numbers_with_both_decimal_marks_are_compared_as_text_which_is_said(vf_init, tmp_path):
    write_csv(tmp_path / "t.csv", '"3,5"', "2.75")
    assert "DECIMAL_MARK in rewards.py" in vf_init("mixed", "--from", "t.csv").out
    environment = vf.load_environment("mixed")
    assert rewards(environment, {"q0": "3,50", "q1": "2.75"}) == {"q0": 0.0, "q1": 1.0}
    write_csv(tmp_path / "t.csv", '"3,5"', '"2,75"')
    assert "DECIMAL_MARK" not in vf_init("agreed", "--from", "t.csv").out


def test_every_row_can_be_evaluated_and_no_more(vf_init, tmp_path):
    write_csv(tmp_path / "t.csv", *"abcde")
    assert vf_init("quiz", "--from", "t.csv").code == 0
    environment = vf.load_environment("quiz", num_eval_examples=5)
    assert sorted(environment.get_eval_dataset()["answer"]) == list("abcde")
    with pytest.raises(vf.ConfigError, match="from 1 to 5, not 6"):
        vf.load_environment("quiz", num_eval_examples=6)


def test_a_judge_is_asked_only_about_answers_that_are_not_exactly_right(vf_init, tmp_path):
    write_csv(tmp_path / "t.csv", "Paris", "Rom")
    assert vf_init("judged", "--judge", "--from", "t.csv").code == 0
    judge = ScriptedClient("yes")
    environment = vf.load_environment("judged", judge_client=judge)
    assert rewards(environment, {"q0": "paris", "q1": "Roma"}) == {"q0": 1.0, "q1": 1.0}
    assert len(judge.requests) == 1
    strict = vf.load_environment("judged", judge_client=ScriptedClient("no"))
    assert rewards(strict, {"q0": "paris", "q1": "Roma"}) == {"q0": 1.0, "q1": 0.0}


@pytest.mark.parametrize("judge", [[], ["--judge"]], ids=["exact", "judge"])
def test_what_is_generated_is_formatted_and_passes_the_linter(vf_init, tmp_path, judge):
    write_csv(tmp_path / "t.csv", *(str(number) for number in range(3000)))
    assert vf_init("word-game", "--from", "t.csv", *judge).code == 0
    config = ["--no-cache", "--config", str(REPOSITORY / "pyproject.toml"), "environments"]
    for check in (["check"], ["format", "--check"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *check, *config],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout


def test_the_order_of_the_table_does_not_choose_what_is_held_out(vf_init, tmp_path):
    texts = []
    for folder, numbers in (("a", range(50)), ("b", reversed(range(50)))):
        lines = "".join(f"q{number},{number}\n" for number in numbers)
        (tmp_path / "t.csv").write_text(f"question,answer\n{lines}")
        assert vf_init("quiz", "--from", "t.csv", "-p", folder).code == 0
        texts.append((tmp_path / folder / "quiz/src/vf_quiz/rows.jsonl").read_text())
    assert texts[0] == texts[1]
    first = [json.loads(line)["question"] for line in texts[0].splitlines()[:10]]
    assert first not in ([f"q{n}" for n in range(10)], [f"q{49 - n}" for n in range(10)])


@pytest.mark.parametrize("judge", [[], pytest.param(["--judge"], marks=pytest.mark.slow)])
def test_the_package_of_a_table_installs_evaluates_and_passes_its_test_and_the_audit(
    tmp_path, judge
):
    python = make_fresh_python(tmp_path)
    (python.folder / "t.csv").write_bytes(GERMAN.encode("cp1252"))
    assert python.command("init", "quiz", "--from", "t.csv", *judge).code == 0
    answers = rows_of(python.folder)
    installed = python.command("install", "quiz", "--no-editable", "--json")
    assert installed.code == 0, installed.err
    (python.folder / "environments").rename(python.folder / "sources")  # the installed copy counts
    with FakeServer(
        lambda request: f"<answer>{answers[request.prompt[-1].content][-1]}</answer>", models=["m"]
    ) as server:
        words = ["-m", "m", "-b", server.url, "-a", '{"num_eval_examples": 4, "judge_model": null}']
        ran = python.command("eval", "quiz", *words, "--json")
    assert ran.code == 0, ran.err
    (run,) = ran.json["runs"]
    assert (run["num_rollouts"], run["avg_reward"]) == (12, 1.0)
    tested = python.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "sources/quiz")
    assert tested.code == 0, tested.out
    audited = python.command("audit", "quiz")
    assert audited.code == 0, audited.out
