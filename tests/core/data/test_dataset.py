"""Rows of every kind become examples: prompts, ids, hashes, isolation, and an exact way to Arrow
and back."""

import copy
import csv
import functools
import json
import logging
import random
import shutil
import subprocess
import sys
import threading

import datasets
import numpy as np
import pytest

import verifiers as vf
from verifiers.data import example_sets
from verifiers.data.examples import (
    RowFormat,
    Table,
    copy_row,
    examples_from,
    format_row,
    load_example_dataset,
)
from verifiers.errors import ConfigError, DatasetError
from verifiers.types import (
    AssistantMessage,
    ImageUrlContentPart,
    SystemMessage,
    TextContentPart,
    ToolCall,
    UserMessage,
)

ROWS = [
    {"question": f"{i} + {i}?", "answer": str(2 * i), "difficulty": "hard" if i % 2 else "easy"}
    for i in range(6)
]
pair = functools.partial(Table.pair, row_format=RowFormat())


def rows_of(table):
    return [example.row for example in table]


# --- sources --------------------------------------------------------------------------------------


def test_every_accepted_kind_gives_the_same_examples(tmp_path):
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "b.json").write_text(json.dumps(columns))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(ROWS)
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    kinds = [
        tuple(ROWS),
        columns,
        datasets.Dataset.from_list(ROWS),
        datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
        lambda: ROWS,
        tmp_path / "a.jsonl",
        str(tmp_path / "a.json"),
        tmp_path / "b.json",
        tmp_path / "a.csv",
        tmp_path / "a.parquet",
    ]
    expected = rows_of(Table.of(ROWS))
    for kind in kinds:
        table = Table.of(kind)
        assert rows_of(table) == expected
        assert [example.hash for example in table] == [example.hash for example in Table.of(ROWS)]


def test_a_builder_is_called_once_and_only_when_rows_are_needed():
    calls = []
    train, evaluation = pair(lambda: calls.append(1) or ROWS, None)
    assert not calls
    barrier = threading.Barrier(4)
    threads = [
        threading.Thread(target=lambda: (barrier.wait(), train[0], len(evaluation)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]


def test_splits_give_a_training_and_an_evaluation_set():
    def split(name):
        return [{"question": name}]

    train, evaluation = pair(
        {"train": split("a"), "validation": split("b"), "test": split("c")}, None
    )
    assert (train[0].row["question"], evaluation[0].row["question"]) == ("a", "c")
    _, evaluation = pair({"train": split("a"), "validation": split("b")}, None)
    assert evaluation[0].row["question"] == "b"
    _, evaluation = pair({"train": split("a"), "test": split("c")}, split("own"))
    assert evaluation[0].row["question"] == "own"
    _, evaluation = pair(lambda: {"train": split("a"), "test": split("c")}, None)
    assert evaluation[0].row["question"] == "c"
    assert pair({"train": split("a")}, None)[1] is None
    assert pair(split("a"), None)[1] is None
    assert pair(None, split("a"))[0] is None


def test_a_builder_without_an_evaluation_split_falls_back_with_one_warning(caplog):
    _, evaluation = pair(lambda: ROWS, None)
    with caplog.at_level(logging.WARNING, "verifiers"):
        assert len(evaluation) == len(evaluation.take(-1)) == 6
    assert sum("evaluation set" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "streaming"),
        ((row for row in ROWS), "generator"),
        (7, "int"),
        ([{"question": "a"}, "b"], "row 1"),
        ({"question": "a", "answer": "b"}, "single row"),
        ({"question": ["a", "b"], "answer": ["c"]}, "question 2, answer 1"),
        ({"validation": [{"question": "a"}]}, "validation"),
        ("nowhere.jsonl", "no such file"),
        ("some/hub-name", "load_dataset"),
        ([{"q": "a", "answer": "b"}], "q, answer"),
        ([{"questions": "a"}], 'did you mean "questions"'),
        ([{"question": 3}], "must be text"),
        ([{"prompt": [{"content": "x"}]}], "needs a role"),
        ([{"question": "a", "info": "not json"}], "'info'"),
        ([{"question": "a", "info": [1]}], "'info'"),
        ([{"question": "a", "tool": object()}], "'tool'"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(rows, message):
    with pytest.raises(DatasetError) as caught:
        Table.of(rows).take()
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"question": "a"}\n{"question"', ":2"),
        ("a.jsonl", "[1]", ":1"),
        ("a.json", "{", "not JSON"),
        ("a.json", "3", "neither"),
        ("a.csv", "question,answer\na\n", "row 0"),
        ("a.parquet", "no parquet", "Parquet"),
        ("a.jsonl", b"\xff", "a.jsonl"),
    ],
)
def test_broken_files_are_named_with_their_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DatasetError) as caught:
        len(Table.of(path))
    assert message in str(caught.value)
    assert name in str(caught.value)


def test_json_lines_end_at_newlines_only(tmp_path):
    text = "a\u2028b\x85c"
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"question": text}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert Table.of(tmp_path / "a.jsonl")[0].row["question"] == text


def test_rows_of_a_large_dataset_are_formatted_only_when_needed():
    rows = [*ROWS, {"question": 7}]
    assert len(Table.of(rows).take(6)) == 6
    with pytest.raises(DatasetError, match="row 6"):
        Table.of(rows).take(7)


# --- prompts --------------------------------------------------------------------------------------


def test_a_prompt_is_built_from_system_few_shot_and_question():
    shots = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    row = Table.of([{"question": "2 + 2?"}], system_prompt="Be brief.", few_shot=shots)[0].row
    assert row["prompt"] == [SystemMessage("Be brief."), *shots, UserMessage("2 + 2?")]
    assert all(hasattr(message, "content") for message in row["prompt"])


def test_a_given_prompt_gets_the_system_prompt_unless_it_has_one(caplog):
    rows = [
        {"prompt": [{"role": "user", "content": "a"}]},
        {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]},
        {"prompt": "c"},
    ]
    with caplog.at_level(logging.WARNING, "verifiers"):
        prompts = [
            r["prompt"]
            for r in rows_of(Table.of(rows, system_prompt="S", few_shot=[UserMessage("shot")]))
        ]
    assert prompts[0] == [SystemMessage("S"), UserMessage("a")]
    assert prompts[1] == [SystemMessage("own"), UserMessage("b")]
    assert prompts[2] == [SystemMessage("S"), UserMessage("c")]
    assert sum("few_shot" in record.message for record in caplog.records) == 1


def test_completion_mode_keeps_text():
    rows = rows_of(Table.of([{"prompt": "Once"}, {"question": "Why"}], message_type="completion"))
    assert [row["prompt"] for row in rows] == ["Once", "Why"]
    with pytest.raises(DatasetError, match="row 0"):
        Table.of([{"prompt": [UserMessage("x")]}], message_type="completion")[0]


def test_columns_are_read_under_other_names():
    row = Table.of(
        [{"problem": "p", "solution": 4, "level": 2}], question_key="problem", answer_key="solution"
    )[0].row
    assert (row["question"], row["answer"], row["level"]) == ("p", 4, 2)
    assert row["prompt"] == [UserMessage("p")]


def test_missing_columns_have_their_defaults():
    row = Table.of([{"question": "q", "answer": None}])[0].row
    assert (row["answer"], row["info"], row["task"], row["example_id"]) == ("", {}, "default", 0)


def test_the_default_task_is_asked_for_when_rows_are_read():
    name = "before"
    table = Table.of(
        [{"question": "q"}, {"question": "q", "task": "own"}], default_task=lambda: name
    )
    name = "after"
    assert [row["task"] for row in rows_of(table)] == ["after", "own"]


def test_info_may_be_json_text():
    assert Table.of([{"question": "q", "info": '{"a": [1]}'}])[0].row["info"] == {"a": [1]}


def test_arrow_null_filling_inside_messages_is_undone():
    prompts = [
        [{"role": "user", "content": "a"}],
        [
            {"role": "assistant", "content": None, "tool_calls": [ToolCall("c", "f", {"x": 1})]},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
        ],
    ]
    hub = datasets.Dataset.from_dict({"prompt": prompts})
    assert "tool_call_id" in hub[0]["prompt"][0]  # Arrow did fill it in
    assert [row["prompt"] for row in rows_of(Table.of(hub))] == prompts


def test_formatting_twice_changes_nothing():
    row_format = RowFormat(system_prompt="S", few_shot=[UserMessage("x")], answer_key="solution")
    once = format_row(
        {"question": "q", "solution": "s", "info": '{"a": 1}', "example_id": 3}, row_format
    )
    assert format_row(once, row_format) == once


# --- ids and hashes -------------------------------------------------------------------------------


def test_unique_integer_ids_are_kept():
    assert [
        e.example_id
        for e in Table.of([{"question": "a", "example_id": 7}, {"question": "b", "example_id": 0}])
    ] == [7, 0]


@pytest.mark.parametrize("ids", [[1, 1], ["a", "b"], [True, False], [1, None], [1.0, 2.0]])
def test_other_ids_move_to_src_id_and_rows_are_numbered(ids):
    table = Table.of([{"question": "q", "example_id": i} for i in ids])
    assert [e.example_id for e in table] == [0, 1]
    assert [e.row.get("src_id") for e in table] == ids


def test_numpy_columns_become_plain_values():
    table = Table.of(
        {"question": ["a", "b"], "example_id": np.array([4, 5]), "score": np.array([0.5, 1.5])}
    )
    assert [e.example_id for e in table] == [4, 5]
    assert type(table[0].row["score"]) is float


def test_the_hash_is_of_the_content_alone():
    first, second = Table.of(
        [{"question": "a", "answer": "1"}, {"answer": "1", "question": "a", "extra": None}]
    )
    assert first.hash == second.hash
    assert len(first.hash) == 64
    changed = [{"question": "a", "answer": "2"}, {"question": "a", "answer": "1", "x": 1}]
    assert len({first.hash, *(e.hash for e in Table.of(changed))}) == 3
    assert Table.of([{"question": "a", "answer": "1"}], system_prompt="S")[0].hash != first.hash


def test_the_hash_is_stable_across_versions():
    row = {"question": "2 + 2?", "answer": "4", "info": {"b": [1, 2.5], "a": "é\u2028"}}
    assert (
        Table.of([row])[0].hash
        == "51d65f21bc831056647c764d6830367ae062f63acffd5394d49ce7a7a82bc764"
    )


def test_hashes_stand_for_rows_when_rows_move():
    shuffled = random.Random(0).sample(ROWS, len(ROWS))
    assert {e.hash: e.row["question"] for e in Table.of(ROWS)} == {
        e.hash: e.row["question"] for e in Table.of(shuffled)
    }


# --- taking, sampling, isolation ------------------------------------------------------------------


# fault 11: get_dataset(seed=) shuffled the environment itself
def test_taking_is_pure_and_capped():
    table = Table.of(ROWS)
    before = rows_of(table)
    assert rows_of(table.take(3)) == before[:3]
    assert rows_of(table.take(100)) == rows_of(table.take()) == before
    assert rows_of(table.take(0)) == []
    shuffled = rows_of(table.take(6, seed=1))
    assert shuffled == rows_of(table.take(6, seed=1)) != before
    assert shuffled[:2] == rows_of(table.take(2, seed=1))
    assert sorted(r["example_id"] for r in shuffled) == list(range(6))
    assert rows_of(table) == before


def test_tables_slice_and_index():
    table = Table.of(ROWS)
    assert table[-1].example_id == 5
    assert [e.example_id for e in table[1:3]] == [1, 2]
    assert [e.example_id for e in table.take(-1, seed=3)[:2]] == [
        e.example_id for e in table.take(2, seed=3)
    ]
    assert copy.deepcopy(table) is table
    with pytest.raises(IndexError):
        table[6]


def test_prompts_are_sampled_without_replacement_and_reshuffled_when_exhausted():
    random.seed(0)
    state = random.getstate()
    table = Table.of(ROWS)
    drawn = [row["example_id"] for _ in range(4) for row in table.sample(3)]
    assert sorted(drawn[:6]) == sorted(drawn[6:]) == list(range(6))
    assert drawn[:6] != drawn[6:]
    assert drawn == [row["example_id"] for row in Table.of(ROWS).sample(12)]
    assert random.getstate() == state  # the global generator was never used


def test_a_seeded_sample_repeats_and_leaves_the_stream_alone():
    table, same_table = Table.of(ROWS), Table.of(ROWS)
    first = table.sample(2)
    assert table.sample(4, seed=5) == table.sample(4, seed=5)
    assert [first, table.sample(2)] == [same_table.sample(2), same_table.sample(2)]


def test_sampling_from_nothing_is_an_error():
    with pytest.raises(DatasetError, match="empty"):
        Table.of([]).sample(1)


def test_what_a_caller_changes_shows_nowhere():
    rows = [{"question": "q", "info": {"list": [1]}, "prompt": [{"role": "user", "content": "q"}]}]
    table = Table.of(rows)
    row = table.sample(1)[0]
    row["info"]["list"].append(2)
    row["prompt"][0]["content"] = "changed"
    table[0]
    rows[0]["info"]["list"].append(3)
    assert table[0].row["info"] == {"list": [1]}
    assert table[0].row["prompt"][0].content == "q"


def test_copies_are_deep_for_what_can_change():
    original = {
        "prompt": [
            UserMessage([TextContentPart("a")]),
            AssistantMessage(None, [ToolCall("c", "f", {"x": 1})]),
        ],
        "info": {"a": [{"b": 1}], "set": {1, 2}},
    }
    copied = copy_row(original)
    assert copied == original
    assert type(copied["prompt"][0]) is UserMessage
    copied["prompt"][1]["tool_calls"][0]["function"]["name"] = "g"
    copied["prompt"][0]["content"][0]["text"] = "b"
    copied["info"]["a"][0]["b"] = 2
    copied["info"]["set"].add(3)
    assert original["prompt"][1].tool_calls[0].name == "f"
    assert original["prompt"][0]["content"][0]["text"] == "a"
    assert original["info"] == {"a": [{"b": 1}], "set": {1, 2}}


# --- rows that a caller hands in ------------------------------------------------------------------


def test_inputs_of_equal_id_stay_siblings_and_the_others_get_their_own():
    ids_given = [1, None, 1, None, "x", "x"]
    inputs = [
        {"question": "q"} if i is None else {"question": "q", "example_id": i} for i in ids_given
    ]
    examples = examples_from(inputs, RowFormat())
    ids = [e.example_id for e in examples]
    assert ids[0] == ids[2] == 1
    assert ids[4] == ids[5]
    assert len(set(ids)) == 4
    assert examples[4].row["src_id"] == "x"


def test_inputs_may_use_canonical_names_and_are_formatted():
    row_format = RowFormat(system_prompt="S", question_key="problem", answer_key="solution")
    (example,) = examples_from([{"question": "q", "answer": "a"}], row_format)
    assert example.row["prompt"] == [SystemMessage("S"), UserMessage("q")]
    assert example.row["answer"] == "a"


def test_rows_of_a_table_handed_back_are_the_same_examples():
    table = Table.of(ROWS, system_prompt="S")
    back = examples_from(table.to_hf(), table.row_format)
    assert [(e.example_id, e.hash, e.row) for e in back] == [
        (e.example_id, e.hash, e.row) for e in table
    ]


# --- Arrow ----------------------------------------------------------------------------------------


def two(name, first, second):
    """Two rows whose values of a column differ."""
    return [{"question": "a", name: first}, {"question": "b", name: second}]


AWKWARD = {
    "plain": two("answer", "1", "2"),
    "info of different keys": two("info", {"x": 1}, {"y": [1, "z", None]}),
    "info of mixed types": two("info", {"x": 1}, {"x": "1"}),
    "info with exact floats": two("info", {"x": 0.12345678901234567}, {}),
    "info with long integers": two("info", {"x": 2**80}, {}),
    "info with nulls": two("info", {"x": None}, {}),
    "answers of mixed types": two("answer", 4, "4"),
    "int beside float": two("answer", 4, 4.5),
    "list answers": two("answer", ["x"], {"k": 1}),
    "JSON text answers": two("answer", '{"a": 1}', "null"),
    "mixed answers that look like JSON": two("answer", '{"a": 1}', 1),
    "ragged columns": [{"question": "a", "x": 1}, {"question": "b", "y": "2"}],
    "separators and NUL": [{"question": "a\u2028\x85\x00é"}, {"question": "b"}],
    "multimodal prompts": [
        {"prompt": [UserMessage([TextContentPart("a"), ImageUrlContentPart("u")])]},
        {"prompt": [UserMessage("plain")]},
    ],
    "tool prompts": [
        {"prompt": [UserMessage("a"), AssistantMessage(None, [ToolCall("c", "f", '{"x": 1}')])]},
        {"prompt": [UserMessage("plain")]},
    ],
}


@pytest.mark.parametrize("kind", AWKWARD)
def test_the_way_to_arrow_and_back_is_exact(kind, tmp_path):
    table = Table.of(AWKWARD[kind])
    hub = table.to_hf()
    back = Table.of(hub)
    assert [(e.example_id, e.hash) for e in back] == [(e.example_id, e.hash) for e in table]
    assert set(hub.column_names) >= {"prompt", "answer", "info", "task", "example_id"}
    hub.to_parquet(tmp_path / "rows.parquet")
    assert [e.hash for e in Table.of(tmp_path / "rows.parquet")] == [e.hash for e in table]


def test_consumers_read_hub_rows_as_plain_rows():
    hub = Table.of(AWKWARD["info of different keys"]).to_hf()
    assert hub[1]["info"] == {"y": [1, "z", None]}
    assert hub[0]["prompt"] == [{"role": "user", "content": "a"}]
    assert [row.get("difficulty", "easy") for row in Table.of(ROWS).to_hf()][:2] == ["easy", "hard"]
    assert len(hub.select([1])) == 1


@pytest.mark.parametrize("awkward", ["a\ud800", 2**80, [1, "x", 0.12345678901234567]])
def test_what_arrow_cannot_hold_exactly_still_gives_a_dataset(awkward):
    rows = [{"question": "q", "answer": awkward}, {"question": "q", "answer": "b"}]
    assert len(Table.of(rows).to_hf()[:]["answer"]) == 2


def test_an_empty_table_has_its_columns():
    assert set(Table.of([]).to_hf().column_names) == {
        "prompt",
        "answer",
        "info",
        "task",
        "example_id",
    }


def test_formats_set_on_one_hub_view_do_not_leak():
    table = Table.of(ROWS)
    table.to_hf().set_format("numpy")
    assert table.to_hf().format["type"] is None


def test_plain_arrow_would_have_changed_these_rows():  # negative control of the exactness test
    infos = [{"x": 1}, {"y": 2}]
    assert datasets.Dataset.from_dict({"info": infos})[0]["info"] == {"x": 1, "y": None}
    assert Table.of([{"question": "q", "info": info} for info in infos]).to_hf()[0]["info"] == {
        "x": 1
    }


def test_a_list_of_dicts_needs_no_datasets_library():
    script = (
        "import sys; from verifiers.data.examples import Table;"
        "table = Table.of([{'question': 'q'}] * 3, system_prompt='S');"
        "table.take(2, seed=1); table.sample(2); list(table);"
        "assert not {'datasets', 'pyarrow', 'pandas', 'openai'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# --- example datasets -----------------------------------------------------------------------------


def test_arithmetic_is_generated_right_and_without_overlap():
    train, test = load_example_dataset("arithmetic"), load_example_dataset("arithmetic", "test")
    assert (len(train), len(test)) == (2000, 200)
    assert train.column_names == ["question", "answer", "task"]
    assert len({*train["question"], *test["question"]}) == 2200
    for row in test:
        assert int(row["answer"]) == eval(
            row["question"].removeprefix("What is ").removesuffix("?")
        )
    assert Table.of(train)[0].row["task"] == "arithmetic"


def test_n_rows_are_taken_after_a_seeded_shuffle():
    first = load_example_dataset("arithmetic", n=5)
    assert first[:] == load_example_dataset("arithmetic", n=5, seed=0)[:]
    assert first[:] != load_example_dataset("arithmetic", n=5, seed=1)[:]
    assert first[0]["question"] == load_example_dataset("arithmetic", n=9)[0]["question"]


def test_unknown_names_and_splits_are_refused():
    with pytest.raises(ConfigError, match='did you mean "gsm8k"'):
        load_example_dataset("gsm8")
    with pytest.raises(ConfigError, match="validation"):
        load_example_dataset("arithmetic", "validation")


def test_an_unreachable_set_is_an_error_that_names_the_offline_one(tmp_path):
    script = (
        "import verifiers.data.examples as d\n"
        "try: d.load_example_dataset('gsm8k')\n"
        "except d.DatasetError as error: print(error, '|', error.__cause__ is not None)\n"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", script], check=True, env=offline, capture_output=True, text=True
    )
    assert "openai/gsm8k" in run.stdout
    assert "load_example_dataset('arithmetic')" in run.stdout
    assert run.stdout.rstrip().endswith("True")


@pytest.mark.parametrize(
    ("name", "row", "question", "answer"),
    [
        ("gsm8k", {"question": "q", "answer": "because\n#### 1,200"}, "q", "1,200"),
        ("math", {"problem": "q", "solution": r"so \boxed{\frac12}"}, "q", r"\frac12"),
        (
            "mmlu",
            {"question": "q", "choices": ["w", "x"], "answer": 1},
            "Question: q\n\nA: w\nB: x",
            "B",
        ),
        (
            "mmlu_pro",
            {"question": "q", "options": ["w", "x"], "answer": "A"},
            "Question: q\n\nA: w\nB: x",
            "A",
        ),
        (
            "openbookqa",
            {"question_stem": "q", "choices": {"text": ["w"], "label": ["A"]}, "answerKey": "A"},
            "Question: q\n\nChoices:\nA. w",
            "A",
        ),
        ("aime2025", {"question": "q", "answer": "70^\\circ"}, "q", "70"),
    ],
)
def test_published_rows_become_question_and_answer(name, row, question, answer):
    hub = example_sets.HUB_SETS[name]
    assert (hub.question(row), hub.answer(row)) == (question, answer)


def test_the_right_choice_of_gpqa_is_found_wherever_it_is_listed():
    letters = set()
    for i in range(20):
        row = {"Question": f"q{i}", "Correct Answer": "yes"} | {
            f"Incorrect Answer {k}": f"no {k}" for k in (1, 2, 3)
        }
        hub = example_sets.HUB_SETS["gpqa_diamond"]
        assert f"{hub.answer(row)}: yes" in hub.question(row)
        letters.add(hub.answer(row))
    assert len(letters) > 1


# --- more rows than are held ----------------------------------------------------------------------


@pytest.fixture
def large(monkeypatch):
    """Every table holds the hashes of its examples alone."""
    monkeypatch.setattr("verifiers.data.examples.MAX_HELD", 0)


QUESTIONS = [
    {"question": f"{number % 5} + 1", "answer": str(number % 5 + 1)} for number in range(12)
]


def test_a_large_table_has_the_examples_of_one_that_holds_them(monkeypatch):
    held = Table.of(QUESTIONS, system_prompt="Be brief.")
    every = list(held)
    monkeypatch.setattr("verifiers.data.examples.MAX_HELD", 0)
    table = Table.of(QUESTIONS, system_prompt="Be brief.")
    assert list(table) == list(table) == every
    assert (table[3], table.at([5, 1]), list(table[2:4])) == (
        every[3],
        [every[5], every[1]],
        every[2:4],
    )
    assert list(table.take(5, seed=1)) == list(held.take(5, seed=1))
    assert list(table.hashes()) == list(held.hashes()) == [example.hash for example in every]
    assert table.example_ids() == held.example_ids() == list(range(12))
    assert list(table.only({every[2].hash})) == list(held.only({every[2].hash}))
    assert table.sample(4) == held.sample(4)
    assert (table.may_repeat(), table[:5].may_repeat()) == (True, False)
    assert table._store._examples == []


def test_the_hashes_of_a_large_table_format_each_row_once(large):
    formatted = []
    table = Table.of(QUESTIONS, default_task=lambda: formatted.append(1) or "default")
    assert len(list(table.take().hashes())) == len(list(table.hashes())) == len(formatted) == 12


def test_an_invalid_row_of_a_large_table_fails_when_it_is_taken(large):
    with pytest.raises(DatasetError, match="row 1"):
        Table.of([{"question": "a"}, {"question": 5}]).take()


def test_a_row_that_was_edited_meanwhile_is_refused(large):
    rows = [dict(row) for row in QUESTIONS]
    table = Table.of(rows).take()
    rows[4]["answer"] = "6"
    assert table[3].row["answer"] == "4"
    with pytest.raises(DatasetError, match="row 4 of the dataset was changed"):
        table[4]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "human", "content": "x"}, "there is no role 'human' here; it is 'user'"),
        ({"role": "gpt", "content": "x"}, "there is no role 'gpt' here; it is 'assistant'"),
        ({"role": "user", "text": "x"}, "has its text in 'content', not in 'text'"),
    ],
)
def test_messages_of_another_format_are_refused_with_our_name(message, sentence):
    with pytest.raises(DatasetError, match=sentence):
        _ = vf.SingleTurnEnv(dataset=[{"prompt": [message]}]).dataset[0]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_delimiter_of_a_csv_file_is_that_of_its_header(tmp_path, delimiter):
    lines = [["question", "answer"], ["1 and 1?", "2"]]
    file = tmp_path / "rows.csv"
    file.write_text("".join(delimiter.join(line) + "\n" for line in lines))
    row = vf.SingleTurnEnv(dataset=str(file)).dataset[0]
    assert (row["question"], row["answer"]) == ("1 and 1?", "2")


@pytest.mark.parametrize("package", ["pandas", "polars"])
@pytest.mark.parametrize("by_split", [False, True])
def test_a_data_frame_is_a_dataset(package, by_split):
    frames = pytest.importorskip(package)
    columns = {"question": ["a", "b"], "answer": ["1", "2"], "info": [{"n": 1}, {"n": 2}]}
    frame = frames.DataFrame(columns)
    if package == "pandas":
        frame = frame.iloc[::-1].iloc[::-1]  # an index of its own, which is no column
    env = vf.SingleTurnEnv(
        dataset={"train": frame, "test": frame} if by_split else frame,
        rubric=vf.Rubric([lambda completion, answer: 1.0]),
    )
    rows = env.get_dataset()
    assert [row["answer"] for row in rows] == ["1", "2"]
    assert [row["info"] for row in rows] == [{"n": 1}, {"n": 2}]
    assert "__index_level_0__" not in rows.column_names


# --- files of Windows


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_file_is_read_in_the_encoding_that_it_declares(tmp_path, encoding, suffix):
    path = tmp_path / f"rows.{suffix}"
    text = {
        "csv": "question,answer\r\nOù?,là\r\n",
        "jsonl": '{"question": "Où?", "answer": "là"}\r\n',
    }
    path.write_bytes(text[suffix].encode(encoding))
    env = vf.SingleTurnEnv(dataset=str(path))
    assert env.get_dataset()[0]["answer"] == "là"


def test_a_table_in_the_encoding_of_windows_is_refused_with_the_command_that_converts(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes("question,answer\r\nOù?,là\r\n".encode("cp1252"))
    with pytest.raises(
        vf.DatasetError, match=r"0xf9 is not UTF-8.*iconv -f cp1252 -t utf-8"
    ) as refused:
        vf.SingleTurnEnv(dataset=str(path)).get_dataset()
    command = str(refused.value).split(": ")[-1]
    if shutil.which("iconv"):
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
        assert (
            vf.SingleTurnEnv(dataset=str(tmp_path / "utf-8.csv")).get_dataset()[0]["answer"] == "là"
        )


def test_the_first_sheet_of_a_workbook_is_read_as_text(tmp_path):
    openpyxl = pytest.importorskip("openpyxl", reason="the extra excel is not installed")
    book = openpyxl.Workbook()
    for row in (["question", "answer"], ["1 + 1", 2], ["empty", None]):
        book.active.append(row)
    path = tmp_path / "rows.xlsx"
    book.save(path)
    rows = vf.SingleTurnEnv(dataset=str(path)).get_dataset()
    assert [row["answer"] for row in rows] == ["2", ""]


def test_without_the_extra_a_workbook_names_it(tmp_path, monkeypatch):
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(vf.DatasetError, match=r"a workbook of Excel, which is read with .*excel"):
        vf.SingleTurnEnv(dataset=str(tmp_path / "rows.xlsx")).get_dataset()


def test_what_is_no_workbook_is_refused(tmp_path):
    pytest.importorskip("openpyxl", reason="the extra excel is not installed")
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    with pytest.raises(vf.DatasetError, match="is not a readable workbook"):
        vf.SingleTurnEnv(dataset=str(tmp_path / "rows.xlsx")).get_dataset()
