"""wiki-search: the corpus, the tools, the match of answers, and a player that uses the tools."""

import gzip
import importlib.util
import json
import re
from pathlib import Path

import pytest

import verifiers as vf
import vf_wiki_search
from verifiers.runtime.install_lines import install_line
from verifiers.testing import FakeServer, ScriptedClient
from vf_wiki_search.corpus import from_markdown, load_corpus
from vf_wiki_search.matching import matches, normalised
from vf_wiki_search.retrievers import make_retriever, words_of

DATA = Path(vf_wiki_search.__file__).parent


@pytest.fixture(scope="module")
def env():
    return vf.load_environment("wiki-search", num_eval_examples=-1)


def tools(env):
    return {tool.__name__: tool for tool in env.tools}


# --- data -----------------------------------------------------------------------------------------


def test_every_answer_stands_in_its_section():
    corpus = load_corpus("factbook")
    questions = [json.loads(line) for line in (DATA / "questions.jsonl").read_text().splitlines()]
    assert len(questions) > 3000
    assert [q for q in questions if q["answer"] not in corpus.section(q["section_id"])] == []


def test_pages_and_sections_have_one_id_each():
    corpus = load_corpus("factbook")
    sections = [section for page in corpus.pages for section in page.sections]
    assert len(set(sections)) == len(sections)
    assert len({page.title for page in corpus.pages}) == len(corpus.pages) > 240


def test_the_shipped_pages_are_plain_ascii_json_lines():
    for line in (
        gzip.decompress((DATA / "pages.jsonl.gz").read_bytes()).decode("ascii").splitlines()
    ):
        assert json.loads(line).keys() == {"page_id", "title", "sections"}


def test_evaluation_asks_about_other_pages_than_training_whatever_the_seed():
    first, second = (
        vf.load_environment("wiki-search", num_eval_examples=-1, seed=seed) for seed in (0, 1)
    )
    trained = {
        example.row["info"]["page_id"] for env in (first, second) for example in env.train_table
    }
    measured = {
        example.row["info"]["page_id"] for env in (first, second) for example in env.eval_table
    }
    assert len(measured) > 20
    assert not trained & measured


def test_a_question_by_capital_does_not_name_its_country(env):
    corpus = load_corpus("factbook")
    for example in env.eval_table:
        info = example.row["info"]
        if info["kind"].endswith("-by-capital"):
            question = example.row["prompt"][-1]["content"]
            assert corpus.page(info["page_id"]).title not in question


# --- tools ----------------------------------------------------------------------------------------


def test_search_finds_the_page_of_every_held_out_question(env):
    search = tools(env)["search_pages"]
    for example in env.eval_table:
        shown = search(example.row["prompt"][-1]["content"]).splitlines()
        assert len(shown) <= 10
        assert any(line.startswith(f"{example.row['info']['page_id']}: ") for line in shown)


def test_search_by_a_fact_of_the_text(env):
    assert "poland: Poland" in tools(env)["search_pages"]("Warsaw")


@pytest.mark.parametrize("query", ["", "  ,;", "zzzqqqxx"])
def test_a_search_without_result_says_so(env, query):
    assert tools(env)["search_pages"](query) == "no page was found"


def test_sections_are_listed_and_read(env):
    listed = tools(env)["view_sections"]("malta")
    assert "malta:geography: Geography" in listed.splitlines()
    assert "Mediterranean" in tools(env)["read_section"]("malta:geography")


@pytest.mark.parametrize(
    ("tool", "argument", "says"),
    [("view_sections", "atlantis", "search_pages"), ("read_section", "malta:kitchen", "view_sections"),
     ("read_section", "../etc/passwd", "view_sections"), ("view_sections", "x" * 5000, "…")],
)  # fmt: skip
def test_unknown_ids_are_told_to_the_model(env, tool, argument, says):
    with pytest.raises(vf.ToolError, match=says) as caught:
        tools(env)[tool](argument)
    assert len(str(caught.value)) < 300


def test_sections_of_markdown_pages():
    page = from_markdown("9", "Owl", "# Food\nMice.\n## Food\nVoles.\n\n# Empty\n")
    assert list(page.sections.items()) == [
        ("9:food", ("Food", "Mice.")),
        ("9:food-2", ("Food", "Voles.")),
    ]


def test_words_are_those_of_text_and_query_alike():
    assert words_of("Coasts, the COAST!") == ["coast", "the", "coast"]
    assert words_of("glass ß 1,022 km") == ["glass", "ß", "1", "022", "km"]


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer_given", "answer"),
    [("nairobi", "Nairobi"), ("  The Republic of Slovenia. ", "Republic of Slovenia"), ("2994", "2,994"),
     ("2,994 m", "2,994"), ("4853.0 km", "4,853"), ("196.8 km", "196.8"), (".UA", ".ua"), ("ua", ".ua"),
     ("Cote d’Ivoire", "Cote d'Ivoire"), ("São Tomé", "Sao Tome"), ("September 7", "7 September"),
     ("7th of September", "7 September"), ("Ertra Ertra Ertra", "Ertra, Ertra, Ertra")],
)  # fmt: skip
def test_the_same_answer(answer_given, answer):
    assert matches(answer_given, answer)


@pytest.mark.parametrize(
    ("answer_given", "answer"),
    [(None, "UK"), ("", "UK"), ("UK or France", "UK"), ("299", "2,994"), ("2994 5", "2,994"), ("Niger", "Nigeria"),
     ("19.68", "196.8"), ("1968", "196.8"), ("17 September", "7 September"), ("Nairobi " * 100, "Nairobi")],
)  # fmt: skip
def test_another_answer(answer_given, answer):
    assert not matches(answer_given, answer)


def test_every_answer_matches_itself_and_no_empty_one():
    answers = {
        json.loads(line)["answer"] for line in (DATA / "questions.jsonl").read_text().splitlines()
    }
    assert all(normalised(answer) and matches(answer, answer) for answer in answers)


# --- playing --------------------------------------------------------------------------------------


def player(request):
    """Search, list, read, and answer with what ``answer`` of the row says: every tool as a model
    would use it."""
    info, answer = SECTION[request.prompt[-1 - 2 * _calls(request)]["content"]]
    step = _calls(request)
    calls = [("search_pages", {"query": answer}), ("view_sections", {"page_id": info["page_id"]}),
             ("read_section", {"section_id": info["section_id"]})]  # fmt: skip
    if step < len(calls):
        return [vf.ToolCall(f"c{step}", *calls[step])]
    assert answer in request.prompt[-1]["content"], "the tool showed the evidence"
    return f"I read it there. <answer>{answer}</answer>"


def _calls(request):
    return sum(message["role"] == "tool" for message in request.prompt)


SECTION = {}


def test_a_player_that_uses_the_tools_gets_everything(env):
    SECTION.update(
        {e.row["prompt"][-1]["content"]: (e.row["info"], e.row["answer"]) for e in env.eval_table}
    )
    results = env.evaluate(ScriptedClient(player), "m", num_examples=60)
    assert [row["reward"] for row in results["outputs"]] == [1.0] * 60
    assert {row["metrics"]["evidence_read"] for row in results["outputs"]} == {1.0}
    assert {row["metrics"]["total_tool_calls"] for row in results["outputs"]} == {3.0}


def test_a_guess_without_reading_is_right_or_wrong_but_has_no_evidence(env):
    right = env.eval_table[0].row["answer"]
    outputs = env.evaluate(ScriptedClient(f"<answer>{right}</answer>"), "m", num_examples=2)[
        "outputs"
    ]
    assert [row["reward"] for row in outputs] == [1.0, 0.0]
    assert [row["metrics"]["evidence_read"] for row in outputs] == [0.0, 0.0]


def test_turns_are_bounded():
    env = vf.load_environment("wiki-search", max_turns=3)
    call = [vf.ToolCall("c", "search_pages", {"query": "sea"})]
    (row,) = env.evaluate(ScriptedClient(lambda request: call), "m", num_examples=1)["outputs"]
    assert row["stop_condition"] == "max_turns_reached"
    assert row["reward"] == 0.0


# --- the judge ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "reward"), [("Yes.", 1.0), ("no", 0.0)])
def test_a_judge_decides_where_one_is_named(verdict, reward):
    with FakeServer(verdict) as judge:
        env = vf.load_environment("wiki-search", judge_model="judge", judge_base_url=judge.url)
        (row,) = env.evaluate(ScriptedClient("<answer>Atlantis</answer>"), "m", num_examples=1)[
            "outputs"
        ]
        assert "Atlantis" in json.dumps(judge.requests[-1])
    assert row["reward"] == reward
    assert row["metrics"]["exact_match"] == 0.0


def test_a_judge_without_verdict_leaves_the_reward_unknown():
    with FakeServer("It depends.") as judge:
        env = vf.load_environment("wiki-search", judge_model="judge", judge_base_url=judge.url)
        (row,) = env.evaluate(ScriptedClient("<answer>Atlantis</answer>"), "m", num_examples=1)[
            "outputs"
        ]
    assert row["reward"] is None or row["reward"] != row["reward"]
    assert row["error"]["error"] == "ScoringError"


def test_no_answer_needs_no_judge():
    env = vf.load_environment(
        "wiki-search", judge_model="judge", judge_base_url="http://127.0.0.1:9/v1"
    )
    (row,) = env.evaluate(ScriptedClient("I do not know."), "m", num_examples=1)["outputs"]
    assert row["reward"] == 0.0


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"num_train_examples": 0}, "num_train_examples"), ({"num_eval_examples": 10_000}, "there are 429"),
     ({"max_turns": "3"}, "max_turns"), ({"corpus": "wikipedia"}, "'factbook', 'rare-wiki'"),
     ({"retriever": "bing"}, "'bm25', 'dense', 'chroma'"), ({"seed": 1.5}, "seed")],
)  # fmt: skip
def test_bad_arguments_are_named(arguments, says):
    with pytest.raises(vf.ConfigError, match=re.escape(says)):
        vf.load_environment("wiki-search", **arguments)


def test_the_hub_without_network_names_the_choice_that_needs_none(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(vf.DatasetError, match='corpus="factbook"'):
        vf.load_environment("wiki-search", corpus="rare-wiki")


@pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime") is not None, reason="the extra dense is installed"
)
def test_a_missing_extra_is_named_before_the_first_request():
    with pytest.raises(vf.ConfigError, match=re.escape(install_line("vf-wiki-search", "dense"))):
        vf.load_environment("wiki-search", retriever="dense")


@pytest.mark.real
@pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime") is None,
    reason="the extra dense is not installed: python3 tests/real/peers.py dense",
)
def test_dense_retrieval_finds_by_meaning(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from vf_wiki_search.corpus import Corpus

    pages = [load_corpus("factbook").page(name) for name in ("malta", "mongolia", "brazil")]
    retriever = make_retriever("dense", Corpus(pages))
    assert retriever.search("a small island south of Sicily", 1)[0].page_id == "malta"
    assert list(tmp_path.rglob("*.npy")), "the vectors were kept"
    assert (
        make_retriever("dense", Corpus(pages)).search("landlocked steppe in Asia", 1)[0].page_id
        == "mongolia"
    )
