"""``vf-eval ENV --replay RUN:EXAMPLE``: without model and key; 0 where nothing changed, 1 where
something did."""

from pathlib import Path

import pytest

from support.eval_command import TOY, end, odd_only, start
from verifiers.testing import FakeServer


@pytest.fixture
def saved(vf_eval):
    with FakeServer(odd_only, models=["m"]) as server:
        ran = vf_eval("toy", "-b", server.url, *"-n -1 -r 2 -C trajectory --json".split())
    return ran.json["runs"][0]["path"]


def test_unchanged_code_does_the_same(saved, vf_eval, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for reference in (f"{saved}:3", f"{saved}:3:1", f"{saved}/results.jsonl:3"):
        ran = vf_eval("toy", "--replay", reference)
        assert ran.code == 0, ran.err
        assert ran.out == f"{reference}: no difference in 1 turn, its end and its scores\n"
    runs = list(Path(saved).parent.iterdir())
    assert len(runs) == 1  # nothing is saved


def test_changed_code_is_found_out(saved, vf_eval, eval_folder):
    (eval_folder / "other.py").write_text(TOY.replace("== answer", "!= answer"))
    ran = vf_eval("other.py", "--replay", f"{saved}:3")
    assert ran.code == 1
    assert "the first difference is in the metric 'exact'\n  saved  1.0\n  now    0.0" in ran.out
    said = vf_eval("other.py", "--replay", f"{saved}:3", "--json")
    assert (said.code, said.json["exit_code"], said.json["error"]) == (1, 1, None)
    found = said.json["replay"]["difference"]
    assert (found["what"], found["name"], found["saved"], found["now"]) == ("metric", "exact", 1, 0)
    same = vf_eval("toy", "--replay", f"{saved}:3", "--json").json["replay"]
    assert same == {"difference": None, "notes": []}


def test_arguments_are_those_of_the_run_unless_given(vf_eval):
    with FakeServer(odd_only, models=["m"]) as server:
        words = ["-b", server.url, "-a", '{"num_rows": 2}', "-C", "trajectory", "--json"]
        saved = vf_eval("toy", *words).json["runs"][0]["path"]
    assert "note" not in vf_eval("toy", "--replay", f"{saved}:1").out
    given = vf_eval("toy", "--replay", f"{saved}:1", "-a", '{"num_rows": 1}')
    assert "the saved row was run" in given.out


def test_flags_of_a_new_run_are_said_to_have_no_effect(saved, vf_eval):
    ran = vf_eval("toy", "--replay", f"{saved}:3", *"-m other -n 5 -a {}".split())
    assert ran.code == 0
    assert "note: without effect: --model, --num-examples (" in ran.out
    assert "--env-args" not in ran.out


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["toy", "--replay", "{saved}"], "--replay is RUN:EXAMPLE"),
        (["toy", "--replay", "nowhere:1"], "nowhere does not exist"),
        (["toy", "--replay", "{saved}:77"], "has no example 77; it has 0, 1, 2, 3, 4 and 1 more"),
        (["toy", "--replay", "{saved}:1:2"], "sibling is 0 to 1"),
        (["--replay", "{saved}:1"], "name an environment"),
        (["toy,toy", "--replay", "{saved}:1"], "--replay runs one rollout"),
        (["toy", "--replay", "outputs:1"], "holds several runs; name one"),
    ],
)
def test_what_cannot_be_replayed_is_refused(saved, vf_eval, words, because):
    ran = vf_eval(*(word.replace("{saved}", saved) for word in words))
    assert ran.code == 2
    assert because in ran.err


def test_a_run_without_turns_names_the_flag_that_saves_them(vf_eval):
    with FakeServer(odd_only, models=["m"]) as server:
        saved = vf_eval("toy", "-b", server.url, "-n", "1", "--json").json["runs"][0]["path"]
    ran = vf_eval("toy", "--replay", f"{saved}:0")
    assert ran.code == 2
    assert "-C trajectory" in ran.err


def test_a_breakpoint_of_the_environment_is_one_of_the_command(saved, eval_folder):
    source = TOY.replace("return float(", "breakpoint()\n        return float(")
    (eval_folder / "stops.py").write_text(source)
    child = start(eval_folder, "stops.py", "--replay", f"{saved}:3")
    child.stdin = None
    ran = end(child)
    assert "(Pdb)" in ran.out, ran.err
