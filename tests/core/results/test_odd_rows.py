"""Rows of other programs, of odd shapes: a small and a large file give the same rollouts, numbers
and errors, because the index takes what it does not know from the one reading function."""

import json

import pytest

from verifiers.errors import JournalError
from verifiers.results import heads, load_results, loading
from verifiers.results.rows import MAX_METRICS, READ_ERRORS
from verifiers.rollouts.values import number
from verifiers.runtime.json import decode_row, encode_row

ROW = {
    "example_id": 0,
    "prompt": [{"role": "user", "content": "q"}],
    "completion": [{"role": "assistant", "content": "a"}],
    "answer": "",
    "task": "t",
    "info": {},
    "reward": 1.0,
    "metrics": {"a": 1.0},
    "error": None,
    "token_usage": {"input_tokens": 5, "output_tokens": 3},
    "timing": {"total_ms": 5.0},
    "rollout_key": "a" * 32,
    "example_hash": "b" * 64,
    "sibling": 0,
    "attempts": 1,
}
ABSENT = "absent"
ODD = {
    "reward": ["1.0", True, None, 3, 1e19, 10**30, [1], ABSENT],
    "metrics": [None, [1], {"a": "1"}, {"a": None}, {"a": {"b": 1}}, {}, {"reward": 5.0}, ABSENT],
    "completion": ["x", None, [], {"a": 1}, [5], [{"role": 5, "content": 5}], ABSENT],
    "prompt": [None, "q", {"a": 1}, ABSENT],
    "error": ["ValueError: x", {"error": "E", "where": "f"}, {"error": 5}, {}, [1], False, True],
    "stop_condition": [5, "x", [1], None],
    "task": [None, ["x"], 5],
    "token_usage": [
        None,
        "x",
        {"prompt_tokens": 7},
        {"input_tokens": "x"},
        {"input_tokens": 2**70},
    ],
    "timing": [None, "x", {"total_ms": "x"}, {"total_ms": 1e30}, {}, [1]],
    "example_id": ["x", None, 1.5, -5, 2**62, 10**30, True, ABSENT],
    "rollout_key": [None, "x", 5, "A" * 32],
    "example_hash": [None, "x", 5, "b" * 64 + ".2"],
    "sibling": ["x", None, 0.5, -3, [1]],
    "advantage": [0.5, "x", None, 10**30],
    "attempts": ["x", None],
    "trained": [True, "x"],
    "served_models": [["a"], "x", [5]],
    "info": ["{}", None, [1]],
    "trajectory": [[], None, "x", {"a": 1}, 5],
    "label": [True],
    "answer": ["\ud800", None, {"x": 1}],
}
CASES = [(name, value) for name, values in ODD.items() for value in values]


def odd_row(name, value):
    row = ROW | {name: value}
    return {key: each for key, each in row.items() if each != ABSENT}


def write(file, *rows):
    file.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))


def seen(file):
    """All that the results of a file say, or which error refuses it."""
    try:
        results = load_results(file)
        summary = results.summary()
        rows = [encode_row(row) for row in results.outputs]
        return rows, results["rewards"], results["advantages"], results["errors"], summary
    except JournalError:
        return "refused"


@pytest.mark.parametrize("name", ODD)
def test_an_odd_value_is_the_same_from_a_small_and_from_a_large_file(name, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    plain = [
        ROW | {"rollout_key": key * 32, "sibling": n, "reward": 0.5} for n, key in enumerate("cd")
    ]
    for value in ODD[name]:
        write(file, odd_row(name, value), *plain)
        monkeypatch.setattr(loading, "LARGE_BYTES", 2**40)
        small = seen(file)
        monkeypatch.setattr(loading, "LARGE_BYTES", 0)
        assert str(seen(file)) == str(small), (name, value)


def as_kept(values):
    """The values of a head as the columns of an index keep them."""
    kept = dict(zip(heads.VALUES, values, strict=True))
    for name in heads.NUMBERS:
        kept[name] = number(kept[name])
    return kept | {"usage": {name: number(value) for name, value in kept["usage"].items()}}


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_the_quick_head_of_a_line_is_that_of_the_rollout_that_is_read(name, value):
    body = json.dumps(odd_row(name, value)).encode()
    try:
        slow = as_kept(heads._values_of(heads._head_of(decode_row(body), ())))
    except READ_ERRORS:
        slow = None
    if slow is not None:
        assert str(as_kept(heads.head_values(body, ()))) == str(slow)
    elif name not in ("trajectory", "prompt"):  # which are refused when they are read
        with pytest.raises(READ_ERRORS):
            heads.head_values(body, ())


@pytest.mark.parametrize("size", [0, 2**40])
def test_more_metrics_than_a_run_may_have_are_refused_with_their_line(size, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    rows = [ROW | {"rollout_key": None, "metrics": {f"m{n}": 0.5}} for n in range(MAX_METRICS + 1)]
    monkeypatch.setattr(loading, "LARGE_BYTES", size)
    write(file, *rows[:-1])
    assert len(load_results(file).metadata.avg_metrics) == MAX_METRICS  # negative control
    write(file, *rows)
    with pytest.raises(JournalError, match=rf"rows\.jsonl:{MAX_METRICS + 1}: .* 1,000 metrics"):
        load_results(file)
