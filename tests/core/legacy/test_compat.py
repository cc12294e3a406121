"""Every row of the tables of older spellings leads to the canonical one."""

import json
import logging
import threading
import time

import pytest

import verifiers as vf
from support.small_envs import Talk, exact, row, single_turn
from verifiers import compat
from verifiers.runs.options import COUNTS, SAMPLING_NAMES, RunOptions
from verifiers.testing import ByteTokenizer, ScriptedClient


@pytest.mark.parametrize(("old", "new"), compat.NAMES.items())
def test_older_names_of_the_package(old, new):
    present = compat.load(new) if ":" in new else getattr(vf, new)
    assert getattr(vf, old) is present
    assert old not in vf.__all__


@pytest.mark.parametrize(("old", "new"), compat.RUN_OPTIONS.items())
def test_older_options(old, new):
    assert new in COUNTS or hasattr(RunOptions(), new)
    assert compat.rename({old: 3}, compat.RUN_OPTIONS) == {new: 3}


@pytest.mark.parametrize(("old", "new"), compat.SAMPLING_ARGS.items())
def test_older_sampling_arguments(old, new):
    assert {old, new} <= SAMPLING_NAMES
    assert compat.rename({old: 3}, compat.SAMPLING_ARGS) == {new: 3}


def test_tools_by_their_older_name():
    tool = vf.Tool("add")
    env = single_turn(oai_tools=[tool])
    assert env.oai_tools is env.tool_defs
    env.oai_tools = [tool, tool]
    assert len(env.tool_defs) == 2
    assert vf.State(row(), oai_tools=[tool])["tool_defs"] == [tool]


@pytest.mark.parametrize(
    ("keywords", "table"),
    [
        ({"max_tokens": 1, "max_new_tokens": 1}, compat.SAMPLING_ARGS),
        ({"group_size": 1, "num_generations": 1}, compat.RUN_OPTIONS),
    ],
)
def test_both_spellings_of_one_thing_are_refused(keywords, table):
    with pytest.raises(vf.ConfigError, match="older name"):
        compat.rename(keywords, table, "here")


def test_an_older_spelling_is_noted_once_per_process(caplog):
    compat.note.cache_clear()
    with caplog.at_level(logging.DEBUG, "verifiers.compat"):
        for _ in range(3):
            compat.rename({"group_size": 1}, compat.RUN_OPTIONS)
    assert [r.getMessage() for r in caplog.records] == [
        "group_size is the older spelling of rollouts_per_example"
    ]


def test_constructor_parameters_of_a_class_and_its_bases():
    class Mine(vf.MultiTurnEnv):
        def __init__(self, board_size=3, **kwargs):
            super().__init__(**kwargs)

    names = compat.parameters_of(Mine)
    assert {"board_size", "max_turns", "dataset", "rubric"} <= set(names)
    assert "kwargs" not in names


@pytest.mark.parametrize(("old", "new"), compat.JUDGE_PARAMETERS.items())
def test_older_parameters_of_a_judge(old, new):
    value = ScriptedClient("x") if old == "client" else "{response}"
    arguments = {"template": "{response}", old: value}
    assert getattr(vf.JudgeRubric(**arguments), new) is value
    with pytest.raises(vf.ConfigError, match="older name"):
        vf.JudgeRubric(**{old: value, new: value})


def test_older_names_of_a_rubrics_methods():
    rubric = vf.Rubric(funcs=[exact], weights=[0.5])
    assert rubric._get_reward_func_names() == ["exact"]
    assert rubric._get_reward_funcs() == [exact]
    assert rubric._get_reward_weights() == [0.5]
    assert all(hasattr(vf.RubricGroup([rubric]), old) for old in compat.RUBRIC_METHODS)


def test_an_older_name_of_a_method_calls_what_a_subclass_made_of_it():
    class Doubled(vf.Rubric):
        def get_reward_weights(self):
            return [2 * weight for weight in super().get_reward_weights()]

    assert Doubled(funcs=[exact], weights=[0.5])._get_reward_weights() == [1.0]


class Crowd:
    """A synchronous reward function that notes how many of its calls run at one time."""

    def __init__(self):
        self.lock, self.inside, self.most = threading.Lock(), 0, 0

    def __call__(self, completion):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.1)
        with self.lock:
            self.inside -= 1
        return 1.0


@pytest.mark.parametrize(("max_workers", "expected"), [(1, 1), (None, None)])
def test_the_size_of_the_thread_pool(max_workers, expected):
    crowd = Crowd()
    env = single_turn(12, rubric=vf.Rubric(funcs=[crowd]), max_workers=max_workers)
    assert env.max_workers == max_workers
    assert env.evaluate(ScriptedClient("1"), "m")["rewards"] == [1.0] * 12
    assert crowd.most == expected if expected else crowd.most > 1


@pytest.mark.parametrize("size", [0, -1, "4", 2.5])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(vf.ConfigError, match="max_workers is"):
        single_turn(max_workers=size)


@pytest.mark.parametrize(("old", "new"), compat.ENDPOINT_KEYS.items())
def test_older_keys_of_an_endpoint_registry(old, new, tmp_path):
    values = {
        "client_type": ["openai_completions", "openai_chat_completions"],
        "headers": [{"a": "b"}, {"a": "c"}],
    }
    value, new_value = values.get(
        new, ["http://127.0.0.1:9/v1", "http://127.0.0.1:8/v1"] if old == "url" else ["A", "B"]
    )
    file = tmp_path / "endpoints.toml"

    def written(value):
        return f'{{ a = "{value["a"]}" }}' if isinstance(value, dict) else f'"{value}"'

    text = f'[[endpoint]]\nendpoint_id = "small"\nmodel = "m"\n{old} = {written(value)}\n'
    for both in (text, f"{text}{new} = {written(value)}\n"):  # two spellings of one value are one
        file.write_text(both)
        group = vf.load_endpoints(file)["small"]
        assert getattr(group[0], new) == group[old] == group[new] == group[0][old] == value
    file.write_text(f"{text}{new} = {written(new_value)}\n")
    with pytest.raises(vf.ConfigError, match="repeats a setting"):
        vf.load_endpoints(file)


def test_the_tokenizer_by_its_older_name_and_by_both():
    env, client = single_turn(1), ScriptedClient("1")
    results = env.evaluate(client, "m")
    columns = {
        "prompts": results.prompt,
        "completions": results.completion,
        "states": results.state,
    }
    columns["rewards"] = results.reward
    for method in (env.process_env_results, env.process_env_results_vllm):
        processed = method(**columns, processing_class=ByteTokenizer(), max_seq_len=-1)
        assert processed.source == ["retokenised"]


def test_keys_of_the_state_that_are_computed():
    state = single_turn(1).rollout(row(), ScriptedClient("1"), "m")
    assert (state["id"], state["turn"], len(state["responses"])) == (0, 1, 1)


def test_seconds_and_milliseconds_are_both_written():
    metadata = single_turn(1).evaluate(ScriptedClient("1"), "m").metadata
    assert metadata["time_ms"] == metadata["time"] * 1000 > 0


class Awaiting(Talk):
    """As packages of older versions: every hook is a coroutine that awaits the one it overrides."""

    async def setup_state(self, state, **kwargs):
        state = await super().setup_state(state, **kwargs)
        state["seen"] = ["setup_state"]
        return state

    async def add_model_response(self, state, prompt_messages, response):
        await super().add_model_response(state, prompt_messages, response)

    async def add_trajectory_step(self, state, trajectory_step):
        await super().add_trajectory_step(state, trajectory_step)
        state["seen"].append("step")

    async def render_completion(self, state):
        await super().render_completion(state)
        state["seen"].append("completion")


class Plain(Talk):
    """The same without a coroutine."""

    def setup_state(self, state):
        state["seen"] = ["setup_state"]
        return super().setup_state(state)

    def add_trajectory_step(self, state, step):
        super().add_trajectory_step(state, step)
        state["seen"].append("step")

    def render_completion(self, state):
        super().render_completion(state)
        state["seen"].append("completion")


@pytest.mark.parametrize("kind", [Awaiting, Plain])
def test_hooks_of_a_base_class_may_be_awaited_and_need_not_be(kind):
    state = kind(max_turns=2).evaluate(ScriptedClient("1"), "m")["states"][0]
    assert state["error"] is None
    assert state["seen"] == ["setup_state", "step", "step", "completion"]
    assert len(state["completion"]) == 3


def test_a_metric_of_an_older_name_keeps_it_in_a_run_of_today(tmp_path):
    def correct_answer_reward_func(completion):
        return 1.0

    env = single_turn(2, rubric=vf.Rubric(funcs=[correct_answer_reward_func]))
    env.evaluate(ScriptedClient("1"), "m", results_path=tmp_path, num_examples=1)
    resumed = env.evaluate(ScriptedClient("1"), "m", results_path=tmp_path)
    for results in (resumed, vf.load_results(tmp_path)):
        assert results["metrics"] == {
            "correct_answer_reward_func": [1.0, 1.0],
            "num_turns": [1.0, 1.0],
        }


def test_a_metric_of_older_files_has_its_present_name(tmp_path):
    older = {
        "example_id": 0,
        "prompt": [],
        "completion": [],
        "reward": 1.0,
        "correct_answer_reward_func": 1.0,
    }
    (tmp_path / "results.jsonl").write_text(json.dumps(older) + "\n")
    (tmp_path / "metadata.json").write_text(
        json.dumps({"avg_metrics": {"correct_answer_reward_func": 1.0}})
    )
    results = vf.load_results(tmp_path)
    assert results["metrics"] == {"correct_answer": [1.0]}
    assert "correct_answer_reward_func" not in results.outputs[0]


def test_publishing_by_its_older_names(monkeypatch):
    import datasets

    pushed = []
    monkeypatch.setattr(
        datasets.Dataset, "push_to_hub", lambda self, name: pushed.append((name, len(self)))
    )
    results = single_turn(2).evaluate(ScriptedClient("1"), "m")
    vf.make_dataset(results, push_to_hf_hub=True, hf_hub_dataset_name="me/sums")
    single_turn().make_dataset(results, push_to_hub=True, hf_hub_dataset_name="me/two")
    assert pushed == [("me/sums", 2), ("me/two", 2)]
    with pytest.raises(vf.ConfigError, match="older name"):
        vf.make_dataset(results, push_to_hub=True, push_to_hf_hub=True, hub_name="x")
    with pytest.raises(vf.ConfigError, match="push_to_hb"):
        vf.make_dataset(results, push_to_hb=True)
