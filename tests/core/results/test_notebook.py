"""Results in a notebook and in tables: what is shown is escaped, and filters and tables keep what
the results hold."""

import math
import sys
from html.parser import HTMLParser

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.testing import ScriptedClient

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    """The tags and attribute names of an HTML text; fails where a tag is not closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = set(), set(), []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def play(replies, reward=None):
    def right(completion, answer):
        return float(completion[-1].content == answer)

    rows = [{"question": f"{HOSTILE} {n} + 1", "answer": str(n + 1)} for n in range(2)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([reward or right]), env_id="sums")
    return env.evaluate(ScriptedClient(replies), HOSTILE, num_examples=2, rollouts_per_example=2)


@pytest.fixture
def results():
    return play(["1", "2", HOSTILE, "2"])


def test_the_html_shows_the_numbers_and_no_markup_of_a_model(results):
    text = results._repr_html_()
    page = Tags(text)
    assert page.tags == {
        "div", "table", "tr", "th", "td", "figure", "svg", "rect", "title", "figcaption", "details", "summary", "pre"
    }  # fmt: skip
    assert not {
        name for name in page.attributes if name.startswith("on") or name in ("src", "href")
    }
    # negative control: unescaped, it would be found
    assert Tags(HOSTILE + "</img>").tags == {"script", "img"}
    assert f"<td style='text-align:left'>{results.metadata.avg_reward:.3g}" in text
    assert "Worst rollout" in text
    assert "Best rollout" in text


def test_the_html_of_unknown_rewards_and_of_no_rollouts(results):
    def fails(completion):
        raise ValueError("no reward")

    unknown = play("1", fails)
    text = unknown._repr_html_()
    Tags(text)
    assert "4 × ValueError" in text
    assert "Worst rollout" not in text
    Tags(results.filter(lambda rollout: False)._repr_html_())


def test_filter_keeps_the_rollouts_and_computes_anew(results):
    right = results.filter(lambda rollout: rollout["reward"] == 1)
    assert right.rewards == [1.0] * len(right)
    assert 0 < len(right) < len(results)
    assert right.metadata.avg_reward == 1
    assert right.metadata.model == results.metadata.model
    assert math.isnan(results.filter(lambda rollout: False).metadata.avg_reward)
    assert len(results) == 4


def test_one_rollout_is_found_by_example_and_sibling(results):
    for example in (0, 1):
        siblings = [results.rollout(example, sibling) for sibling in (0, 1)]
        assert [each.example_id for each in siblings] == [example] * 2
        assert siblings[0] is not siblings[1]
    with pytest.raises(KeyError, match="no example 7"):
        results.rollout(7)
    with pytest.raises(IndexError, match="sibling is 0 to 1"):
        results.rollout(0, 2)


def test_tables_hold_one_row_per_rollout(results):
    frame, table = results.to_pandas(), results.to_arrow()
    assert list(frame["reward"]) == results.rewards == table.column("reward").to_pylist()
    assert list(frame["example_id"]) == results.example_ids
    polars = results.to_polars()
    assert polars["reward"].to_list() == results.rewards
    assert polars.shape[0] == 4


def test_a_table_without_its_library_names_it(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigError, match="pip install polars"):
        results.to_polars()


def test_environments_and_rubrics_say_what_they_are():
    def exact(completion):
        return 1.0

    rubric = vf.Rubric([exact])
    group = vf.RubricGroup(
        [rubric, vf.Rubric([lambda completion: 0.0], weights=[0.2])], weights=[1, 0.5]
    )
    assert repr(rubric) == "Rubric(exact)"
    assert repr(group) == "RubricGroup([Rubric(exact), 0.5 * Rubric(0.2 * <lambda>)])"
    env = vf.SingleTurnEnv(dataset=[{"question": "hi"}], rubric=rubric, env_id="greet")
    assert repr(env) == "SingleTurnEnv('greet', Rubric(exact), max_turns=1)"
