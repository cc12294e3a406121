"""squares: the pictures, their answers counted again from the pixels, and the reward."""

import pytest

import verifiers as vf
from verifiers.data.images import image_bytes, image_parts
from verifiers.testing import ScriptedClient
from vf_squares import load_environment
from vf_squares.pictures import COLOURS, KINDS, POSITIONS, generate_tasks, picture

EVALUATED = {"num_train_examples": 30, "num_eval_examples": 30}


def seen(image):
    """What a picture shows, from its pixels: (colour, column, row) of each third that has one."""
    names = {colour: name for name, colour in COLOURS.items()}
    size = image.width
    squares = []
    for row in range(3):
        for column in range(3):
            box = [edge * size // 3 for edge in (column, row, column + 1, row + 1)]
            colours = {colour for _, colour in image.crop(box).getcolors(99_999)}
            squares += [(names[colour], column, row) for colour in colours if colour in names]
    return squares


def answer_of(kind, squares):
    if kind == "count":
        return str(len(squares))
    ((colour, column, row),) = squares
    return colour if kind == "colour" else {cell: p for p, cell in POSITIONS.items()}[column, row]


@pytest.mark.parametrize("size", [24, 64, 96, 200])
def test_the_answers_are_in_the_pixels(size):
    for task in generate_tasks(90, KINDS, seed=1):
        info = task["info"]
        squares = seen(picture(info["squares"], info["background"], size))
        assert answer_of(info["kind"], squares) == task["answer"]
        assert task["answer"] in task["question"] or info["kind"] == "count"


def test_rows_are_drawn_by_the_seed_and_differ():
    rows = [load_environment(seed=seed).eval_table for seed in (0, 0, 1)]
    assert list(rows[0].hashes()) == list(rows[1].hashes()) != list(rows[2].hashes())
    env = load_environment()
    assert not {*env.train_table.hashes()} & {*env.eval_table.hashes()}
    more = load_environment(num_train_examples=10)
    assert list(more.eval_table.hashes()) == list(rows[0].hashes())
    kinds = {row.row["info"]["kind"] for row in env.eval_table}
    assert kinds == set(KINDS)


@pytest.mark.parametrize("turns", [1, 2])
def test_a_right_answer_earns_1_and_a_blind_one_about_a_fifth(turns):
    env = load_environment(turns=turns, **EVALUATED)
    look = vf.AssistantMessage("", tool_calls=[vf.ToolCall("c", "look", {})])

    def play(replies):
        script = [reply for text in replies for reply in ([look, text] if turns == 2 else [text])]
        return env.evaluate(ScriptedClient(script), "m", num_examples=-1, max_concurrent=1)

    answers = [example.row["answer"] for example in env.eval_table]
    results = play(answers)
    assert results["reward"] == [1.0] * len(answers)
    for output, example in zip(results.outputs, env.eval_table, strict=True):
        (part,) = image_parts([*output["prompt"], *output["completion"]])
        squares = seen(vf.decode_image(image_bytes(part)))
        assert answer_of(example.row["info"]["kind"], squares) == output["answer"]
        in_tool = any(message["role"] == "tool" for message in output["completion"])
        assert in_tool is (turns == 2)
    # the negative control: the answers to other pictures of the same question
    blind = play([*answers[-len(KINDS) :], *answers[: -len(KINDS)]])
    assert 0 < sum(blind["reward"]) / len(answers) < 0.4


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("red", 1.0), ("Red.", 1.0), ("<think>it is\n</think>\nred", 1.0), ("red or blue", 0.0),
     ("red, green, blue, yellow, black", 0.0), ("", 0.0), ("The square is red", 0.0)],
)  # fmt: skip
def test_the_reply_is_the_answer_and_nothing_else(reply, reward):
    env = load_environment(kinds=["colour"], **EVALUATED)
    number = next(n for n, example in enumerate(env.eval_table) if example.row["answer"] == "red")
    results = env.evaluate(ScriptedClient(reply), "m", num_examples=-1)
    assert results["reward"][number] == reward


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [({"kinds": ["shape"]}, "kinds='shape' is not one of colour, count, position"),
     ({"kinds": []}, "kinds"), ({"turns": 3}, "turns=3"), ({"size": 8}, "size=8 is not 24 to 1024")],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments, sentence):
    with pytest.raises(vf.ConfigError, match=sentence):
        load_environment(**arguments)
