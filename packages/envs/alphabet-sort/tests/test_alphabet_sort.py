"""alphabet-sort: its games, its rewards, and whole conversations against a scripted model."""

import difflib
import json
import re
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verifiers as vf
from verifiers.testing import ScriptedClient
from vf_alphabet_sort import PRESETS, AlphabetSortEnv, load_environment
from vf_alphabet_sort.games import (
    FIRST_TAG,
    LATER_TAG,
    Settings,
    game_key,
    generate_games,
    load_names,
    make_row,
    sort_key,
)
from vf_alphabet_sort.public import split_name
from vf_alphabet_sort.scoring import (
    MAX_LENGTH_FACTOR,
    conversation_score,
    exact_share,
    find_blocks,
    format_share,
    line_ratio,
    num_matched,
    turn_similarity,
)

TARGET = "AdaLovelace\nAlanTuring\nGraceHopper"


def first(text):
    return f"<{FIRST_TAG}>\n{text}\n</{FIRST_TAG}>"


def later(text):
    return f"<{LATER_TAG}>\n{text}\n</{LATER_TAG}>"


def names_of(env, held_out=False):
    rows = env.get_eval_dataset() if held_out else env.get_dataset()
    return [re.sub(r" // new name!", "", row["answer"]).split("\n") for row in rows]


# --- games ----------------------------------------------------------------------------------------


def test_a_thousand_different_first_and_last_names_are_shipped():
    for file in ("first_names.txt", "last_names.txt"):
        names = load_names(file)
        assert len(set(names)) == 1000
        assert all(re.fullmatch("[A-Z][a-z]{2,}", name) for name in names)


def test_a_row_holds_every_user_message_and_the_right_list_of_every_turn():
    turns = [[("Grace", "Hopper"), ("Ada", "Lovelace")], [("Alan", "Turing")]]
    row = make_row(turns, by_last=False)
    assert row["info"]["targets"] == [
        "AdaLovelace\nGraceHopper",
        "AdaLovelace\nAlanTuring // new name!\nGraceHopper",
    ]
    assert row["answer"] == row["info"]["targets"][-1]
    assert "FIRST name" in row["question"]
    assert "GraceHopper\nAdaLovelace" in row["question"]
    (follow_up,) = row["info"]["follow_ups"]
    assert "AlanTuring" in follow_up
    assert "GraceHopper" not in follow_up
    assert make_row(turns, by_last=True)["info"]["targets"][0] == "GraceHopper\nAdaLovelace"


def test_only_the_names_of_the_last_turn_are_marked_as_new():
    row = make_row([[("Al", "A")], [("Bo", "B")], [("Cy", "C")]], by_last=False)
    assert row["info"]["targets"][2] == "AlA\nBoB\nCyC // new name!"


@pytest.mark.parametrize("by_last", [False, True])
def test_names_sort_by_the_asked_part_without_case_and_ties_by_the_other(by_last):
    names = [("ann", "Zulu"), ("Anna", "Bell"), ("Ann", "Bell")]
    ordered = sorted(names, key=lambda name: sort_key(name, by_last))
    expected = ["AnnBell", "AnnaBell", "annZulu"] if by_last else ["AnnBell", "annZulu", "AnnaBell"]
    assert ["".join(name) for name in ordered] == expected


@pytest.mark.parametrize("difficulty", PRESETS)
def test_games_keep_to_their_settings_and_repeat_no_name_part(difficulty):
    settings, _ = PRESETS[difficulty]
    for row in generate_games(settings, 50, seed=3, held_out=False):
        targets = row["info"]["targets"]
        sizes = [target.count("\n") + 1 for target in targets]
        added = [after - before for before, after in zip([0, *sizes], sizes, strict=False)]
        assert settings.min_turns <= len(targets) <= settings.max_turns
        assert all(settings.min_names_per_turn <= n <= settings.max_names_per_turn for n in added)
        parts = [split_name(line.removesuffix(" // new name!")) for line in targets[-1].split("\n")]
        assert len({p[0] for p in parts}) == len({p[1] for p in parts}) == len(parts)


def test_games_are_different_from_one_another_and_the_same_for_the_same_seed():
    games = generate_games(Settings(), 500, seed=1, held_out=False)
    assert len({game_key(game) for game in games}) == 500
    assert games == generate_games(Settings(), 500, seed=1, held_out=False)
    assert games[:100] == generate_games(Settings(), 100, seed=1, held_out=False)
    assert games != generate_games(Settings(), 500, seed=2, held_out=False)


def test_games_do_not_depend_on_the_process():
    program = (
        "from vf_alphabet_sort.games import *; print([r['answer'] for r in"
        " generate_games(Settings(), 3, 5, True)])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == repr(
        [row["answer"] for row in generate_games(Settings(), 3, 5, held_out=True)]
    )


def test_no_name_of_the_eval_set_is_in_the_training_set():
    env = load_environment(num_train_examples=300, num_eval_examples=100)
    train = {name for names in names_of(env) for name in names}
    held_out = {name for names in names_of(env, held_out=True) for name in names}
    assert not train & held_out
    assert not {split_name(n)[1] for n in train} & {split_name(n)[1] for n in held_out}


def test_both_sort_orders_occur():
    rows = generate_games(Settings(), 100, seed=0, held_out=True)
    assert {row["info"]["sort_by"] for row in rows} == {"first", "last"}


def test_loading_offline_takes_less_than_a_second():
    started = time.perf_counter()
    load_environment()
    assert time.perf_counter() - started < 1.0


# --- one turn -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "ratio"),
    [
        (TARGET, 1.0),
        (TARGET.lower(), 1.0),
        ("\n  AdaLovelace  \n\n AlanTuring\r\nGraceHopper\n\n", 1.0),
        ("", 0.0),
        ("\n \n", 0.0),
    ],
)
def test_lines_are_compared_without_case_blank_lines_and_surrounding_space(block, ratio):
    assert line_ratio(block, TARGET) == ratio


@pytest.mark.parametrize(
    "block", ["AlanTuring\nAdaLovelace\nGraceHopper", "AdaLovelace", TARGET + "\nKurtGoedel"]
)
def test_the_ratio_is_difflibs_over_the_joined_lines(block):
    expected = difflib.SequenceMatcher(None, block.lower(), TARGET.lower()).ratio()
    assert 0 < line_ratio(block, TARGET) == expected < 1


def test_a_missing_mark_costs_similarity():
    target = "AdaLovelace\nAlanTuring // new name!"
    assert line_ratio("AdaLovelace\nAlanTuring", target) < 1.0 == line_ratio(target, target)


def test_one_slip_in_a_long_list_costs_little_unless_frequent_characters_are_ignored():
    target = "\n".join(
        f"{a}{b}"
        for a in ("Anna", "Bert", "Carl", "Dora", "Eric")
        for b in ("Hill", "Moss", "Rice", "Wood")
    )
    slip = "#" + target[1:]
    assert line_ratio(slip, target * 2) > 0.6
    assert line_ratio(slip + target, target * 2) > 0.99
    junk = difflib.SequenceMatcher(None, (slip + target).lower(), (target * 2).lower()).ratio()
    assert line_ratio(slip + target, target * 2, autojunk=True) == junk < 0.5


def test_a_turn_without_its_block_scores_nothing():
    assert turn_similarity(TARGET, 0, TARGET) == 0.0
    assert turn_similarity(f"<{FIRST_TAG}>{TARGET}", 0, TARGET) == 0.0
    assert turn_similarity(later(TARGET), 0, TARGET) == 0.0
    assert turn_similarity(first(TARGET), 1, TARGET) == 0.0


def test_text_around_the_block_does_not_matter():
    assert turn_similarity(f"Let me see.\n{first(TARGET)}\nDone.", 0, TARGET) == 1.0
    assert turn_similarity("Sure. " + later(TARGET), 2, TARGET) == 1.0


def test_of_several_blocks_the_last_counts_only_if_each_beats_the_one_before():
    poor, better = first("AdaLovelace"), first("AdaLovelace\nAlanTuring")
    assert turn_similarity(poor + better + first(TARGET), 0, TARGET) == 1.0
    assert turn_similarity(poor + better, 0, TARGET) == line_ratio(
        "AdaLovelace\nAlanTuring", TARGET
    )
    assert turn_similarity(better + poor + first(TARGET), 0, TARGET) == 0.0  # one step down
    assert turn_similarity(first(TARGET) + poor, 0, TARGET) == 0.0
    assert turn_similarity(first(TARGET) + first(TARGET), 0, TARGET) == 0.0  # equal is not better


def test_blocks_of_a_megabyte_of_opening_tags_are_found_in_linear_time():
    started = time.perf_counter()
    assert list(find_blocks(f"<{FIRST_TAG}>" * 50_000, 0)) == []
    assert list(find_blocks(first("A") * 20_000, 0)) == ["\nA\n"] * 20_000
    assert turn_similarity(first("z\n" * 200_000), 0, TARGET) < 0.01
    assert time.perf_counter() - started < 1.0
    assert MAX_LENGTH_FACTOR >= 1


# --- a conversation -------------------------------------------------------------------------------


def test_the_power_applies_to_each_turn_or_to_their_mean():
    replies, targets = [first("abcd"), later("abxx")], ["abcd", "abcd"]
    assert conversation_score(replies, targets, 1, True) == pytest.approx(0.75)
    assert conversation_score(replies, targets, 4, True) == pytest.approx((1 + 0.5**4) / 2)
    assert conversation_score(replies, targets, 4, False) == pytest.approx(0.75**4)


@pytest.mark.parametrize("per_turn", [True, False])
def test_a_turn_that_was_never_answered_counts_as_zero(per_turn):
    assert conversation_score([first("a")], ["a", "b"], 1, per_turn) == 0.5
    assert conversation_score([], ["a", "b"], 4, per_turn) == 0.0


def test_metrics_count_exact_turns_and_turns_with_one_block():
    targets = ["a", "a\nb // new name!", "a"]
    replies = [first("a"), later("A\nB // NEW NAME!"), later("a") + later("a")]
    assert exact_share(replies, targets) == pytest.approx(2 / 3)
    assert format_share(replies, targets) == pytest.approx(2 / 3)
    assert (
        exact_share(replies[:1], targets)
        == format_share(replies[:1], targets)
        == pytest.approx(1 / 3)
    )
    assert exact_share(["a"] * 3, targets) == format_share(["a"] * 3, targets) == 0.0


@pytest.mark.parametrize(
    ("reply", "similarity", "exact"),
    [
        ("<think>First {draft}, no: {right}</think>\n{right}", 1.0, 1.0),
        ("First {right}</think>\n{right}", 1.0, 1.0),  # the template opened the reasoning
        ("<think>It is {right}</think>\n{draft}", 0.0, 0.0),
        ("<think>It is {right}", 0.0, 0.0),
        ("{right} {right}", 0.0, 0.0),  # negative control: beside an answer it is a guess
    ],
)
def test_lists_in_the_reasoning_are_drafts(reply, similarity, exact):
    env = load_environment(min_turns=1, max_turns=1)
    target = env.eval_table[0].row["info"]["targets"][0]
    text = reply.format(right=first(target), draft=first(""))
    results = env.evaluate(ScriptedClient(text), "m", num_examples=1)
    assert (results["reward"], results["all_exact"]) == ([similarity], [exact])


# --- whole rollouts -------------------------------------------------------------------------------


def perfect_answers(env):
    """Plays every game of the eval set perfectly: a function from a model request to the right
    reply."""
    answers = {}
    for row in env.get_eval_dataset():
        messages = [row["prompt"][-1]["content"], *row["info"]["follow_ups"]]
        for turn, (message, target) in enumerate(
            zip(messages, row["info"]["targets"], strict=True)
        ):
            answers[message, turn] = later(target) if turn else first(target)

    def answer(request):
        users = [message["content"] for message in request.prompt if message["role"] == "user"]
        return answers[users[-1], len(users) - 1]

    return answer


@pytest.mark.parametrize("difficulty", PRESETS)
def test_an_oracle_earns_one(difficulty):
    env = load_environment(difficulty=difficulty, num_train_examples=1, num_eval_examples=15)
    results = env.evaluate(ScriptedClient(perfect_answers(env)), "scripted", rollouts_per_example=2)
    assert list(results["reward"]) == [1.0] * 30
    assert list(results["metrics"]["exact_turns"]) == [1.0] * 30
    assert list(results["metrics"]["format_reward"]) == [1.0] * 30


def test_a_game_asks_exactly_its_turns_and_shows_the_new_names_each_time():
    env = load_environment(min_turns=3, max_turns=3, num_train_examples=1, num_eval_examples=1)
    client = ScriptedClient(perfect_answers(env))
    results = env.evaluate(client, "scripted")
    info = env.get_eval_dataset()[0]["info"]
    assert len(client.requests) == 3
    assert client.requests[1].prompt[-1]["content"] == info["follow_ups"][0]
    assert client.requests[2].prompt[-1]["content"] == info["follow_ups"][1]
    assert results["states"][0]["stop_condition"] == "all_turns_answered"
    assert not results["states"][0]["is_truncated"]


def test_a_model_that_only_answers_the_first_turn_earns_its_share():
    env = load_environment(min_turns=2, max_turns=2, num_train_examples=1, num_eval_examples=5)
    perfect = perfect_answers(env)
    client = ScriptedClient(
        lambda request: perfect(request) if len(request.prompt) == 1 else "I give up."
    )
    assert list(env.evaluate(client, "scripted")["reward"]) == [0.5] * 5


def test_it_loads_by_its_id_and_keeps_the_arguments():
    env = vf.load_environment(
        "alphabet-sort", max_turns=2, num_train_examples=3, num_eval_examples=2
    )
    assert isinstance(env, AlphabetSortEnv)
    assert (env.env_id, env.max_turns) == ("alphabet-sort", 2)


# --- arguments ------------------------------------------------------------------------------------


def test_normal_is_the_default_and_given_numbers_win_over_a_preset():
    assert PRESETS["normal"] == (Settings(1, 3, 1, 5), 4.0)
    normal = load_environment(num_train_examples=5, num_eval_examples=5)
    explicit = load_environment(difficulty="normal", num_train_examples=5, num_eval_examples=5)
    assert normal.get_dataset()["answer"] == explicit.get_dataset()["answer"]
    hard = load_environment(
        difficulty="hard", min_turns=1, max_turns=1, num_train_examples=20, num_eval_examples=5
    )
    assert all(len(row["info"]["targets"]) == 1 for row in hard.get_dataset())
    assert all(4 <= len(names) <= 10 for names in names_of(hard))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"difficulty": "insane"}, "difficulty"),
        ({"min_turns": 0}, "min_turns"),
        ({"max_turns": 2.5}, "max_turns"),
        ({"min_turns": 4}, "min_turns=4 is above max_turns=3"),
        ({"min_names_per_turn": 9}, "min_names_per_turn=9 is above max_names_per_turn=5"),
        ({"max_names_per_turn": True}, "max_names_per_turn"),
        ({"max_turns": 50, "max_names_per_turn": 50}, "max_names_per_turn=50"),
        ({"similarity_power": 0}, "similarity_power"),
        ({"similarity_power": float("inf")}, "similarity_power"),
        ({"num_train_examples": 0}, "num_train_examples"),
        ({"num_eval_examples": "10"}, "num_eval_examples"),
        ({"seed": None}, "seed"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(vf.ConfigError, match=message):
        load_environment(**arguments)


# --- public datasets ------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_dataset(folder, rows):
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("VladimirDrinfeld", ("Vladimir", "Drinfeld")),
        ("RonMcDonald", ("Ron", "McDonald")),
        (" Jean-Paul Sartre ", ("Jean-Paul", "Sartre")),
        ("Ludwig van Beethoven", ("Ludwigvan", "Beethoven")),
        ("Plato", ("", "Plato")),
    ],
)
def test_a_written_name_is_split_into_first_and_last(written, name):
    assert split_name(written) == name


@pytest.mark.usefixtures("no_network")
def test_a_dataset_of_name_lists_becomes_games_without_overlap(tmp_path):
    names = [
        "AdaLovelace",
        "Alan Turing",
        "adaLovelace",
        "GraceHopper",
        "KurtGoedel",
        "EmmyNoether",
    ]
    rows = [{"names": [f"{n}{chr(97 + i)}" for n in names]} for i in range(20)] + [
        {"names": ["AdaLovelace"]}
    ]
    settings = {"min_turns": 2, "max_turns": 2, "min_names_per_turn": 2, "max_names_per_turn": 2}
    env = load_environment(
        dataset_name=write_dataset(tmp_path / "names", rows), num_eval_examples=5, **settings
    )
    train, held_out = names_of(env), names_of(env, held_out=True)
    assert (len(train), len(held_out)) == (15, 5)
    assert not {n for game in train for n in game} & {n for game in held_out for n in game}
    assert all(len({name.lower() for name in game}) == 4 for game in train)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"authors": ["x"]}], "columns authors"),
        ([{"names": ["AdaLovelace"]}], "gives 1 games"),
        (None, "cannot load"),
    ],
)
def test_a_dataset_that_cannot_be_used_says_why_and_what_works_offline(tmp_path, rows, message):
    name = str(tmp_path / "absent") if rows is None else write_dataset(tmp_path / "rows", rows)
    env = load_environment(
        dataset_name=name, num_eval_examples=1, max_turns=1, max_names_per_turn=1
    )
    with pytest.raises(vf.DatasetError, match=message) as raised:
        env.get_dataset()
    if rows is None:
        assert "leave dataset_name out" in str(raised.value)


# --- speed ----------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab\n é\ud800", max_size=60), st.text("ab\n é", min_size=1, max_size=60), st.booleans()
)
def test_the_fast_matcher_finds_what_difflibs_does(block, target, autojunk):
    cydifflib = pytest.importorskip("cydifflib", reason="the extra 'speed' is not installed")
    fast, slow = (
        module.SequenceMatcher(None, block, target * 5, autojunk).get_matching_blocks()
        for module in (cydifflib, difflib)
    )
    assert list(map(tuple, fast)) == list(map(tuple, slow))


@settings(max_examples=500, deadline=None)
@given(st.text("ab\n é\ud800", max_size=60), st.text("ab\n é", max_size=60), st.integers(0, 60))
def test_the_own_matcher_counts_what_difflib_matches(answer, target, cut):
    for left, right in ((answer, target), (target[cut:] + answer + target[:cut], target)):
        blocks = difflib.SequenceMatcher(None, left, right, False).get_matching_blocks()
        assert num_matched(left, right) == sum(block.size for block in blocks)


@pytest.mark.parametrize("autojunk", [False, True])
def test_a_ratio_is_difflibs_with_and_without_its_heuristic(autojunk):
    names = [f"Name{n * 7919 % 1000}Last{n * 104729 % 1000}" for n in range(30)]
    for count in (3, 12, 30):
        target = "\n".join(names[:count])
        block = "\n".join([names[1], names[0], *names[2:count]])
        expected = difflib.SequenceMatcher(None, block.lower(), target.lower(), autojunk).ratio()
        assert line_ratio(block, target, autojunk) == expected
    # the twin: on a long list the heuristic does change the number
    assert line_ratio(block, target, True) != line_ratio(block, target, False)


def test_without_the_fast_matcher_difflibs_is_used():
    program = (
        "import sys; sys.modules['cydifflib'] = None; import vf_alphabet_sort.scoring as s,"
        " difflib;print(s.SequenceMatcher is difflib.SequenceMatcher, s.line_ratio('AB\\nCD',"
        " 'CD\\nAB'))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.split() == ["True", str(line_ratio("AB\nCD", "CD\nAB"))]


def test_shots_are_games_played_right_and_no_game_that_is_trained_on_or_held_out():
    sizes = {"num_train_examples": 20, "num_eval_examples": 10, "min_turns": 2}
    plain, env = load_environment(**sizes), load_environment(**sizes, num_shots=2)
    assert [row["answer"] for row in env.get_dataset()] == [
        row["answer"] for row in plain.get_dataset()
    ]
    *shots, asked = env.get_dataset()[0]["prompt"]
    assert [message["role"] for message in shots] == ["user", "assistant"] * (len(shots) // 2)
    contents = {message["content"] for row in plain.get_dataset() for message in row["prompt"]}
    firsts = [message["content"] for message in shots if message["content"].startswith("Sort")]
    assert len(firsts) == 2
    assert not contents & set(firsts)
    assert asked["content"] in contents
    for question, answer in zip(shots[::2], shots[1::2], strict=True):
        tag = (
            "alphabetical_sorted"
            if question["content"].startswith("Sort")
            else "combined_alphabetical_sorted"
        )
        lines = answer["content"].splitlines()
        assert (lines[0], lines[-1]) == (f"<{tag}>", f"</{tag}>")
        last = "LAST name" in question["content"]
        names = [line.removesuffix(" // new name!") for line in lines[1:-1]]
        halves = [re.split("(?<=[a-z])(?=[A-Z])", name) for name in names]
        keys = [parts[1 if last else 0].lower() for parts in halves]
        assert keys == sorted(keys)
    with pytest.raises(vf.ConfigError, match="num_shots"):
        load_environment(num_shots=-1)
