"""reverse-text: its texts, its rewards, and whole rollouts against a scripted model."""

import difflib
import json
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verifiers as vf
from verifiers.testing import ScriptedClient
from vf_reverse_text import SYSTEM_PROMPT, load_environment
from vf_reverse_text.scoring import MAX_LENGTH_FACTOR, sequence_ratio
from vf_reverse_text.texts import DEFAULT_LENGTHS, generate_texts, load_words, words_by_length

UNITS = list(DEFAULT_LENGTHS)


def reply(text):
    return f"<reversed_text>\n{text}\n</reversed_text>"


def completion(text):
    return [{"role": "assistant", "content": text}]


def score(env, text, answer):
    rubric = env.rubric
    return rubric.score_rollout_sync(
        prompt=[], completion=completion(text), answer=answer, state={}
    )


# --- texts ----------------------------------------------------------------------------------------


def test_every_word_length_from_2_to_12_has_words():
    assert sorted(words_by_length()) == list(range(2, 13))
    assert all(word.isascii() and word.isalpha() and word.islower() for word in load_words())


def test_words_of_3_to_6_letters_suffice_for_the_quickstart():
    assert sum(3 <= len(word) <= 6 for word in load_words()) >= 2_200


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("seed", [0, 7])
def test_texts_are_different_within_their_bounds_and_the_same_for_the_same_seed(unit, seed):
    low, high = DEFAULT_LENGTHS[unit]
    texts = generate_texts(unit, low, high, 300, seed)
    assert len(set(texts)) == 300
    assert {len(text) for text in texts} <= set(range(low, high + 1))
    assert texts == generate_texts(unit, low, high, 300, seed)
    assert texts != generate_texts(unit, low, high, 300, seed + 1)


@pytest.mark.parametrize("unit", ["sentence", "paragraph"])
@pytest.mark.parametrize("length", [3, 4, 13, 14, 15, 16, 60, 61, 62, 81, 500])
def test_a_generated_text_has_exactly_the_length_asked_for(unit, length):
    (text,) = generate_texts(unit, length, length, 1, seed=1)
    assert len(text) == length
    assert text[0].isupper()
    assert text[-1] == "."
    assert text == text.strip()


def test_texts_do_not_depend_on_the_process():
    program = (
        "from vf_reverse_text.texts import generate_texts; print(generate_texts('sentence', 20, 30,"
        " 3, 5))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == repr(generate_texts("sentence", 20, 30, 3, 5))


@pytest.mark.parametrize("unit", UNITS)
def test_train_and_eval_share_no_text(unit):
    env = load_environment(unit=unit, num_train_examples=200, num_eval_examples=50)
    train, held_out = env.get_dataset()["answer"], env.get_eval_dataset()["answer"]
    assert (len(set(train)), len(set(held_out))) == (200, 50)
    assert not set(train) & set(held_out)


def test_the_eval_set_does_not_depend_on_the_size_of_the_training_set():
    small = load_environment(unit="word", num_train_examples=10, num_eval_examples=20)
    large = load_environment(unit="word", num_train_examples=2000, num_eval_examples=20)
    assert small.get_eval_dataset()["answer"] == large.get_eval_dataset()["answer"]


def test_the_answer_is_the_text_backwards():
    row = load_environment(num_train_examples=1).get_dataset()[0]
    assert row["answer"] == row["prompt"][-1]["content"][::-1]


def test_loading_offline_takes_less_than_a_second():
    started = time.perf_counter()
    load_environment()
    assert time.perf_counter() - started < 1.0


# --- prompts --------------------------------------------------------------------------------------


def test_a_word_prompt_is_the_word_alone():
    row = load_environment(
        unit="word", min_chars=3, max_chars=6, num_train_examples=1
    ).get_dataset()[0]
    (message,) = row["prompt"]
    assert message == {"role": "user", "content": row["answer"][::-1]}
    assert 3 <= len(message["content"]) <= 6


@pytest.mark.parametrize("unit", ["sentence", "paragraph"])
def test_longer_units_come_with_an_instruction(unit):
    prompt = load_environment(unit=unit, num_train_examples=1).get_dataset()[0]["prompt"]
    assert prompt[0] == {"role": "system", "content": SYSTEM_PROMPT}


@pytest.mark.parametrize(
    ("unit", "system_prompt", "roles"),
    [("word", SYSTEM_PROMPT, ["system", "user"]), ("paragraph", "", ["user"])],
)
def test_a_given_system_prompt_wins_over_the_unit(unit, system_prompt, roles):
    prompt = load_environment(
        unit=unit, num_train_examples=1, system_prompt=system_prompt
    ).get_dataset()[0]["prompt"]
    assert [message["role"] for message in prompt] == roles


# --- scoring --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        ("olleh", "olleh"),
        ("hello", "olleh"),
        ("", "olleh"),
        ("ollehh", "olleh"),
        ("xyz", "olleh"),
        ("OLLEH", "olleh"),
    ],
)
def test_the_ratio_is_difflibs(answer, target):
    assert sequence_ratio(answer, target) == difflib.SequenceMatcher(None, answer, target).ratio()


def test_one_slip_in_a_long_text_costs_little_unless_frequent_characters_are_ignored():
    target = "the rain in spain stays mainly in the plain and " * 6
    slip = "#" + target[1:]
    assert sequence_ratio(slip, target) > 0.99
    assert (
        sequence_ratio(slip, target, autojunk=True)
        == difflib.SequenceMatcher(None, slip, target).ratio()
        < 0.1
    )


def test_an_endless_answer_is_scored_in_bounded_time_and_poorly():
    target = "abcdefghij" * 15
    started = time.perf_counter()
    ratio = sequence_ratio(target * 2_000, target)
    assert time.perf_counter() - started < 1.0
    assert ratio < 0.01
    assert MAX_LENGTH_FACTOR >= 1


@pytest.mark.parametrize(
    ("text", "reward", "exact", "well_formed"),
    [
        ("<reversed_text>olleh</reversed_text>", 1.0, 1.0, 1.0),
        ("<reversed_text>\n olleh \n</reversed_text>", 1.0, 1.0, None),
        ("<reversed_text>hello</reversed_text>", 0.4, 0.0, 1.0),
        ("olleh", 0.0, 0.0, 0.0),
        ("<reversed_text>olleh", 0.0, 0.0, None),
        ("<reversed_text></reversed_text>", 0.0, 0.0, None),
        (
            "<reversed_text>hello</reversed_text> no: <reversed_text>olleh</reversed_text>",
            1.0,
            1.0,
            None,
        ),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_rewards_of_an_answer(text, reward, exact, well_formed):
    result = score(load_environment(unit="word", num_train_examples=1), text, "olleh")
    assert result["reward"] == pytest.approx(reward)
    assert result["metrics"]["similarity"] == pytest.approx(reward)
    assert result["metrics"]["exact_match"] == exact
    if well_formed is not None:
        assert result["metrics"]["format_reward"] == pytest.approx(well_formed)


# --- whole rollouts -------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS)
def test_an_oracle_earns_one(unit):
    env = load_environment(unit=unit, num_train_examples=5, num_eval_examples=8)
    oracle = ScriptedClient(lambda request: reply(request.prompt[-1]["content"][::-1]))
    results = env.evaluate(oracle, "scripted", rollouts_per_example=2)
    assert list(results["reward"]) == [1.0] * 16
    assert list(results["metrics"]["exact_match"]) == [1.0] * 16


def test_an_echo_earns_less_than_an_oracle():
    env = load_environment(unit="word", num_train_examples=5, num_eval_examples=20)
    echo = ScriptedClient(lambda request: reply(request.prompt[-1]["content"]))
    rewards = list(env.evaluate(echo, "scripted")["reward"])
    assert 0.0 < sum(rewards) / len(rewards) < 0.8


def test_it_loads_by_its_id():
    env = vf.load_environment(
        "reverse-text", unit="word", num_train_examples=3, num_eval_examples=2
    )
    assert isinstance(env, vf.SingleTurnEnv)
    assert env.env_id == "reverse-text"


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unit": "letter"}, "unit"),
        ({"min_chars": 0}, "min_chars"),
        ({"max_chars": 2}, "max_chars"),
        ({"min_chars": 50, "max_chars": 40}, "min_chars=50 is above max_chars=40"),
        ({"num_train_examples": 0}, "num_train_examples"),
        ({"num_eval_examples": -1}, "num_eval_examples"),
        ({"num_eval_examples": "5"}, "num_eval_examples"),
        ({"seed": 0.5}, "seed"),
        ({"unit": "word", "num_train_examples": 50_000}, "num_train_examples"),
        ({"unit": "word", "min_chars": 13}, "min_chars"),
        ({"unit": "sentence", "min_chars": 3, "max_chars": 3}, "max_chars"),
        ({"unit": "word", "dataset_name": "some/dataset"}, "unit"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(vf.ConfigError, match=message):
        load_environment(**arguments)


@pytest.mark.parametrize(
    ("bounds", "lengths"),
    [({"min_chars": 300}, {300}), ({"max_chars": 40}, {40}), ({"min_chars": 150}, None)],
)
def test_one_bound_moves_the_others_default_out_of_its_way(bounds, lengths):
    texts = load_environment(num_train_examples=5, num_eval_examples=5, **bounds).get_dataset()[
        "answer"
    ]
    lengths_seen = {len(text) for text in texts}
    assert lengths_seen == lengths if lengths else lengths_seen <= set(range(150, 181))


# --- public datasets ------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_dataset(folder, rows):
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.usefixtures("no_network")
def test_a_dataset_of_texts_is_split_without_overlap(tmp_path):
    name = write_dataset(
        tmp_path / "texts", [{"prompt": f" Text number {i % 30}. "} for i in range(60)]
    )
    env = load_environment(dataset_name=name, num_eval_examples=10, num_train_examples=1000)
    train, held_out = set(env.get_dataset()["answer"]), set(env.get_eval_dataset()["answer"])
    assert (len(train), len(held_out), train & held_out) == (20, 10, set())
    assert ".0 rebmun txeT" in train | held_out


@pytest.mark.usefixtures("no_network")
def test_a_dataset_of_conversations_gives_its_last_user_message(tmp_path):
    chats = [
        [{"role": "system", "content": "x"}, {"role": "user", "content": f"ab{i}"}]
        for i in range(3)
    ]
    name = write_dataset(tmp_path / "chats", [{"prompt": chat} for chat in chats])
    env = load_environment(dataset_name=name, num_eval_examples=1, num_train_examples=5)
    assert {row["answer"] for row in env.get_dataset()} < {"0ba", "1ba", "2ba"}


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"body": "x"}], "columns body"),
        ([{"text": "x"}, {"text": "x"}], "1 different texts"),
        (None, "cannot load"),
    ],
)
def test_a_dataset_that_cannot_be_used_says_why_and_what_works_offline(tmp_path, rows, message):
    name = str(tmp_path / "absent") if rows is None else write_dataset(tmp_path / "rows", rows)
    env = load_environment(dataset_name=name, num_eval_examples=1)  # nothing is read yet
    with pytest.raises(vf.DatasetError, match=message) as raised:
        env.get_dataset()
    if rows is None:
        assert "leave dataset_name out" in str(raised.value)


def test_shots_are_solved_examples_that_are_neither_trained_on_nor_held_out():
    plain = load_environment(unit="word", num_train_examples=30, num_eval_examples=10)
    env = load_environment(unit="word", num_train_examples=30, num_eval_examples=10, num_shots=3)
    for part in ("get_dataset", "get_eval_dataset"):
        rows = getattr(env, part)()
        assert [row["answer"] for row in rows] == [row["answer"] for row in getattr(plain, part)()]
        for row in rows:
            *shots, asked = row["prompt"]
            assert len(shots) == 6
            assert asked["content"][::-1] == row["answer"]
            pairs = list(zip(shots[::2], shots[1::2], strict=True))
            assert all(
                said["content"] == f"<reversed_text>{text['content'][::-1]}</reversed_text>"
                for text, said in pairs
            )
            texts = {text["content"] for text, _ in pairs}
            shots_answers = {
                row["answer"][::-1] for row in [*env.get_dataset(), *env.get_eval_dataset()]
            }
            assert len(texts) == 3
            assert not texts & shots_answers
    with pytest.raises(vf.ConfigError, match="num_shots"):
        load_environment(num_shots=-1)


# --- speed ----------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.text("ab é\ud800", max_size=60), st.text("ab é", min_size=1, max_size=60), st.booleans())
def test_the_fast_matcher_finds_what_difflibs_does(answer, target, autojunk):
    cydifflib = pytest.importorskip("cydifflib", reason="the extra 'speed' is not installed")
    fast, slow = (
        module.SequenceMatcher(None, answer, target * 5, autojunk).get_matching_blocks()
        for module in (cydifflib, difflib)
    )
    assert list(map(tuple, fast)) == list(map(tuple, slow))


def test_without_the_fast_matcher_difflibs_is_used():
    program = (
        "import sys; sys.modules['cydifflib'] = None; import vf_reverse_text.scoring as s, difflib;"
        "print(s.SequenceMatcher is difflib.SequenceMatcher, s.sequence_ratio('abcd', 'cdab'))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.split() == ["True", str(sequence_ratio("abcd", "cdab"))]
