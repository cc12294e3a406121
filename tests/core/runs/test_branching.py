"""Rollouts that share turns: grown as trees, stored once, read whole, resumed as they were."""

from __future__ import annotations

import asyncio
import math
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.errors import ConfigError, JournalError, UsageError
from verifiers.results.atif import read_trajectory, to_trajectory
from verifiers.results.branches import whole_rows
from verifiers.results.index import RowIndex
from verifiers.results.rows import DISK_FIELDS, encoded_output
from verifiers.results.statistics import clustered_stderr, pass_rates
from verifiers.rollouts.branching import entropy
from verifiers.runs.workers.packing import pack_state, unpack_state
from verifiers.runtime.json import decode_row
from verifiers.testing import ScriptedClient


class Talk(vf.MultiTurnEnv):
    """Each turn is noted in the author's state, and answered by its number."""

    ended = None

    def setup_state(self, state):
        state["notes"] = []
        state["same"] = state["notes"]

    def env_response(self, messages, state):
        state["notes"].append(messages[-1].content)
        return f"turn {len(state['same'])}"

    @vf.cleanup
    def note_end(self, state):
        if self.ended is not None:
            self.ended.append(state.record.id)


def length(completion):
    return float(len(completion[-1].content))


def talk(cls=Talk, max_turns=3, funcs=(length,), num_rows=1, **settings):
    rows = [{"question": f"question {n}", "answer": "a"} for n in range(num_rows)]
    return cls(dataset=rows, max_turns=max_turns, rubric=vf.Rubric(funcs=list(funcs)), **settings)


def seeded(request):
    return f"{request.seed}"


def evaluate(env, client=None, rollouts_per_example=4, seed=3, **options):
    client = client or ScriptedClient(seeded, tokens=True)
    return env.evaluate(
        client,
        "m",
        rollouts_per_example=rollouts_per_example,
        seed=seed,
        state_columns=["trajectory", "notes"],
        **options,
    )


def texts(output):
    return [message["content"] for message in output["completion"]]


def comparable(outputs):
    """What two runs of one seed have alike: all but times and random ids."""
    rows = [encoded_output(output) for output in outputs]
    for row in rows:
        for name in ("timing", *DISK_FIELDS):
            row.pop(name, None)
        for step in row.get("trajectory") or ():
            step.pop("timing", None), step.pop("trajectory_id", None)
    return rows


# --- growing ------------------------------------------------------------------------------------


def test_branches_share_the_turns_before_the_fork_and_have_a_state_of_their_own():
    env = talk(branching=vf.Branching(at=1, branches=2), num_rows=2)
    outputs = evaluate(env).outputs
    assert [output["fork"]["parent"] for output in outputs] == [None, 0, None, 2] * 2
    for parent, branch in zip(outputs[::2], outputs[1::2], strict=True):
        assert branch["fork"] == {
            "sibling": parent["fork"]["sibling"] + 1,
            "parent": parent["fork"]["sibling"],
            "turn": 1,
        }
        assert texts(parent)[:2] == texts(branch)[:2]
        assert not set(texts(parent)[2::2]) & set(texts(branch)[2::2])
        # the author's list went on in each by itself, and stayed one list under both its keys
        assert branch["notes"] == texts(branch)[:4:2]
        assert parent["notes"] == texts(parent)[:4:2]
    assert len({texts(output)[0] for output in outputs}) == 4
    assert comparable(outputs) == comparable(evaluate(env).outputs)


def test_without_branching_nothing_of_a_rollout_changes():
    rows = comparable(evaluate(talk()).outputs)
    assert all("fork" not in row for row in rows)
    assert "branching" not in talk().identity()


def test_usage_and_cost_count_what_was_sampled_once():
    env = talk(branching=vf.Branching(at=2, branches=3))
    outputs = evaluate(env, rollouts_per_example=3).outputs
    sampled = [sum(len(t["tokens"]["completion_ids"]) for t in o["trajectory"]) for o in outputs]
    shared = sum(len(t["tokens"]["completion_ids"]) for t in outputs[0]["trajectory"][:2])
    counted = [output["token_usage"]["output_tokens"] for output in outputs]
    assert counted == [sampled[0], sampled[1] - shared, sampled[2] - shared]


def test_where_a_rollout_ends_before_the_fork_the_others_begin_at_the_prompt():
    env = talk(max_turns=2, branching=vf.Branching(at=2, branches=2))
    outputs = evaluate(env).outputs
    assert [output["fork"]["parent"] for output in outputs] == [None] * 4
    assert len({texts(output)[0] for output in outputs}) == 4


def test_a_branch_goes_on_although_its_environment_meanwhile_said_stop():
    class Stops(Talk):
        @vf.stop
        def is_over(self, state):
            return len(state["notes"]) >= 2

    outputs = evaluate(talk(Stops, -1, branching=vf.Branching(at=2, branches=2)), None, 2).outputs
    assert [len(output["trajectory"]) for output in outputs] == [3, 3]


def test_entropy_and_an_authors_function_choose_the_turn():
    # scripted log-probabilities: "a" is 97 % 7 + 1 = 7 eighths, "b" is 1 eighth
    replies = ScriptedClient(
        lambda request: ["b", "a", "b", "b"][len(request.prompt) // 2], tokens=True
    )
    env = talk(max_turns=4, branching={"at": "entropy", "branches": 2})
    assert evaluate(env, replies, 2).outputs[1]["fork"]["turn"] == 1
    env.set_branching(vf.Branching(at=lambda turn: len(turn.prompt), branches=2))
    assert evaluate(env, replies, 2).outputs[1]["fork"]["turn"] == 3
    no_tokens = ScriptedClient(seeded)
    env = talk(branching=vf.Branching(at="entropy", branches=2))
    assert evaluate(env, no_tokens, 2).outputs[1]["fork"]["parent"] is None


def test_entropy_is_the_mean_negative_logprob_and_unknown_without_tokens():
    (output,) = evaluate(talk(max_turns=1), ScriptedClient("b", tokens=True), 1).outputs
    ids = [98, *output["trajectory"][0]["tokens"]["completion_ids"][1:]]
    assert entropy(output["trajectory"][0]) == sum(n % 7 + 1 for n in ids) / 8 / len(ids)
    (output,) = evaluate(talk(max_turns=1), ScriptedClient("b"), 1).outputs
    assert math.isnan(entropy(output["trajectory"][0]))


@pytest.mark.parametrize(("tokens", "num_branches"), [(30, 3), (100, 1), (1000, 0)])
def test_a_budget_of_tokens_pays_for_rollouts_of_their_own_as_far_as_it_goes(tokens, num_branches):
    # each turn costs 9 tokens with its end; a branch at turn 2 costs 9, a rollout 27
    replies = ScriptedClient("12345678", tokens=True)
    env = talk(branching=vf.Branching(at=2, branches=4, tokens=tokens))
    outputs = evaluate(env, replies).outputs
    assert sum(output["fork"]["parent"] is not None for output in outputs) == num_branches
    spent = sum(output["token_usage"]["output_tokens"] for output in outputs)
    assert spent <= max(tokens, 27 + 3 * 9)


@pytest.mark.parametrize("tokens", [30, 100, 200])
def test_the_budget_of_a_group_is_shared_by_its_trees_however_it_is_scored(tokens):
    replies = ScriptedClient("12345678", tokens=True)
    env = talk(branching=vf.Branching(at=2, branches=2, tokens=tokens))
    outputs = evaluate(env, replies).outputs
    assert comparable(evaluate(env, replies, interleave_scoring=False).outputs) == comparable(
        outputs
    )
    # two trees of 9 * 4 tokens; a rollout of its own costs 18 more, which half of 100 does not pay
    expected = {30: 2, 100: 2, 200: 0}[tokens]
    assert sum(output["fork"]["parent"] is not None for output in outputs) == expected


# --- failures -------------------------------------------------------------------------------------


def test_a_branch_that_fails_costs_itself_alone():
    class Fails(Talk):
        def env_response(self, messages, state):
            if len(state["notes"]) == 1 and state.is_branch:
                raise KeyError("board")
            return super().env_response(messages, state)

    env = talk(Fails, branching=vf.Branching(at=1, branches=2))
    results = evaluate(env, None, 2)
    kept, failed = results.outputs
    assert kept["error"] is None
    assert kept["reward"] > 0
    assert failed["error"]["error"] == "EnvironmentFault"
    assert math.isnan(failed["reward"])
    assert len(failed["trajectory"]) == 2  # its turns are kept
    assert results.metadata.num_errors == 1


def test_what_cannot_be_copied_names_itself_and_a_fork_method_sets_it():
    class Locks(Talk):
        def setup_state(self, state):
            super().setup_state(state)
            state["lock"] = threading.Lock()

    class Forks(Locks):
        @vf.fork
        async def new_lock(self, state, branch):
            branch["lock"] = threading.Lock()

    branching = vf.Branching(at=1, branches=2)
    with pytest.raises(
        UsageError, match=r"state\['lock'\] \(a lock\) cannot be copied.*Locks a me"
    ):
        evaluate(talk(Locks, branching=branching), None, 2)
    assert evaluate(talk(Forks, branching=branching), None, 2).outputs[1]["error"] is None


def test_a_fork_method_that_fails_fails_the_branches_and_not_their_parent():
    class Fails(Talk):
        @vf.fork
        def copy_board(self, state, branch):
            raise KeyError("board")

    kept, failed = evaluate(talk(Fails, branching=vf.Branching(at=1, branches=2)), None, 2).outputs
    assert kept["error"] is None
    assert len(kept["trajectory"]) == 3
    assert "KeyError: 'board'" in failed["error"]["message"]


@pytest.mark.parametrize("at", [1, "entropy"])
def test_each_state_is_cleaned_up_once(at):
    env = talk(max_turns=4, branching=vf.Branching(at=at, branches=3))
    env.ended = []
    outputs = evaluate(env, None, 3).outputs
    assert len(env.ended) == len(set(env.ended)) >= len(outputs)


@pytest.mark.parametrize(
    "value", [{"at": 0, "branches": 2}, {"at": 1}, {"at": 1, "branches": 1}, "entropy",
              {"at": "no_such:function", "branches": 2}, {"at": 1, "branches": 2, "tokens": 0}]
)  # fmt: skip
def test_what_is_no_branching_is_refused(value):
    with pytest.raises(ConfigError, match="branching"):
        talk(branching=value)


def test_a_loop_of_ones_own_cannot_be_entered():
    class Own(Talk):
        async def rollout(self, *args, **keywords): ...

    with pytest.raises(ConfigError, match="loop of its own"):
        evaluate(talk(Own, branching=vf.Branching(at=1, branches=2)))


# --- state.fork by an author ----------------------------------------------------------------------


def test_an_author_forks_in_a_loop_of_ones_own():
    class Looks(Talk):
        """Takes a turn three times, and goes on with the longest."""

        async def rollout(self, row, client, model, sampling_args=None):
            state = await self.init_state(row, client, model, sampling_args)
            self.setup_state(state)
            branches = await state.fork(3)
            for branch in branches:
                prompt = await self.get_prompt_messages(branch)
                response = await self.get_model_response(branch, prompt)
                await self.add_model_response(branch, prompt, response)
            seeds = {branch.record.transcript[0].completion[0].content for branch in branches}
            assert len(seeds) == 3
            best = max(
                branches, key=lambda branch: branch["trajectory"][0]["completion"][0].content
            )
            self.render_completion(best)
            return best

    (output,) = evaluate(talk(Looks), None, 1).outputs
    assert output["error"] is None
    assert len(output["trajectory"]) == 1
    assert "fork" not in output


def test_a_state_without_a_run_says_so():
    with pytest.raises(UsageError, match="state that a run made"):
        asyncio.run(vf.State(prompt=[]).fork(2))


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    env = talk(branching=vf.Branching(at=2, branches=2))
    return env, evaluate(env, results_path=tmp_path), tmp_path / "results.jsonl"


def test_a_row_of_a_branch_has_no_copies_and_is_read_whole(saved):
    _, results, file = saved
    stored = list(map(decode_row, file.read_bytes().splitlines()))
    assert [len(row["trajectory"]) for row in stored] == [3, 1, 3, 1]
    assert [len(row["completion"]) for row in stored] == [5, 1, 5, 1]
    assert [row["shared"]["rows_back"] for row in stored[1::2]] == [1, 1]
    read = vf.load_results(file.parent)
    assert comparable(read.outputs) == comparable(results.outputs)
    index = RowIndex(file)
    index.read()
    assert comparable(index.rows(range(4))) == comparable(results.outputs)
    completions = [[message["content"] for message in text[1]] for text in index.texts(range(4))]
    assert completions == [texts(output) for output in results.outputs]
    assert list(index.columns["turns"]) == [3, 3, 3, 3]
    assert list(index.columns["tree"]) == [0, 0, 2, 2]


def test_an_export_has_whole_rows(saved, tmp_path):
    _, results, _ = saved
    results.save(tmp_path / "export.jsonl")
    stored = [decode_row(line) for line in (tmp_path / "export.jsonl").read_bytes().splitlines()]
    assert [len(row["trajectory"]) for row in stored] == [3] * 4
    assert all("shared" not in row for row in stored)
    read = vf.load_results(tmp_path / "export.jsonl")
    assert [output["fork"] for output in read.outputs] == [o["fork"] for o in results.outputs]


def test_a_row_whose_parent_is_gone_names_its_line(saved):
    _, _, file = saved
    stored = [decode_row(line) for line in file.read_bytes().splitlines()]
    with pytest.raises(
        JournalError, match=r"results.jsonl:1: the row shares the turns of the row 1"
    ):
        list(whole_rows(stored[1:], str(file)))
    assert len(list(whole_rows(stored, str(file)))) == 4  # the control


def test_a_finished_tree_is_not_generated_again(saved):
    env, results, file = saved
    forbidden = ScriptedClient("never", errors=lambda request: AssertionError("asked again"))
    again = evaluate(env, forbidden, results_path=file.parent)
    assert comparable(again.outputs) == comparable(results.outputs)


KILLED = textwrap.dedent("""
    import os, signal, sys
    sys.path[:0] = {paths!r}
    from tests.core.runs.test_branching import Talk, evaluate, seeded, talk
    import verifiers as vf
    from verifiers.testing import ScriptedClient
    calls = []
    def reply(request):
        calls.append(request)
        if len(calls) == {last}:
            os.kill(os.getpid(), signal.SIGKILL)
        return seeded(request)
    evaluate(talk(branching=vf.Branching(at=1, branches=2), num_rows=2),
             ScriptedClient(reply, tokens=True), results_path={folder!r}, max_concurrent=1)
""")


@pytest.mark.parametrize("last", [5, 14])
def test_a_run_killed_inside_a_fork_resumes_equal_with_its_tree(tmp_path, last):
    root = Path(__file__).parents[3]
    script = KILLED.format(
        paths=[str(root), str(root / "tests")], last=last, folder=str(tmp_path / "killed")
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    env = talk(branching=vf.Branching(at=1, branches=2), num_rows=2)
    resumed = evaluate(env, results_path=tmp_path / "killed", max_concurrent=1)
    assert comparable(resumed.outputs) == comparable(evaluate(env, max_concurrent=1).outputs)
    read = vf.load_results(tmp_path / "killed")
    assert [output["fork"]["parent"] for output in read.outputs] == [None, 0, None, 2] * 2


# --- other ways of running ------------------------------------------------------------------------


def test_scoring_afterwards_group_functions_and_workers_see_trees():
    env = talk(branching=vf.Branching(at=1, branches=2))
    plain = comparable(evaluate(env).outputs)
    assert comparable(evaluate(env, interleave_scoring=False).outputs) == plain
    independent = evaluate(env, independent_scoring=True).outputs
    assert [output["fork"] for output in independent] == [row["fork"] for row in plain]

    def longest(completions):
        return [float(len(completion)) for completion in completions]

    grouped = evaluate(talk(funcs=(longest,), branching=vf.Branching(at=1, branches=2))).outputs
    assert [output["reward"] for output in grouped] == [5.0] * 4


WORKED = """
import verifiers as vf

class Talk(vf.MultiTurnEnv):
    def setup_state(self, state):
        state["notes"] = []

    def env_response(self, messages, state):
        state["notes"].append(messages[-1].content)
        return f"turn {len(state['notes'])}"

def length(completion):
    return float(len(completion[-1].content))

def load_environment():
    rows = [{"question": f"question {n}", "answer": "a"} for n in range(3)]
    return Talk(dataset=rows, max_turns=3, rubric=vf.Rubric(funcs=[length]))
"""


@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_two_workers_grow_the_trees_that_one_process_grows(
    tmp_path, monkeypatch, interleave_scoring
):
    (tmp_path / "branching_talk.py").write_text(WORKED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "branching_talk", raising=False)
    runs = []
    for options in ({}, {"num_workers": 2, "worker_backend": "process"}):
        env = vf.load_environment("branching_talk")
        env.set_kwargs(branching=vf.Branching(at=1, branches=2, tokens=100))
        runs.append(evaluate(env, interleave_scoring=interleave_scoring, **options).outputs)
    alone, worked = runs
    assert any(output["fork"]["parent"] is not None for output in alone)
    assert comparable(worked) == comparable(alone)


def test_a_group_of_environments_branches_as_its_members_do():
    members = [talk(branching=vf.Branching(at=1, branches=2)), talk()]
    outputs = evaluate(vf.EnvGroup(members, env_names=["a", "b"])).outputs
    assert [bool(output.get("fork")) for output in outputs] == [True] * 4 + [False] * 4


def test_a_tree_travels_from_a_worker():
    env = talk(branching=vf.Branching(at=1, branches=2))
    states = evaluate(env, keep_states=True).states
    states[0].branches = (states[1],)
    read = unpack_state(pack_state(states[0]))
    assert [leaf.record.fork for leaf in read.leaves] == [s.record.fork for s in states[:2]]
    assert pickle.dumps(read.record.transcript)


# --- statistics -----------------------------------------------------------------------------------


def test_pass_at_k_draws_different_trees():
    # one example, trees {1, 0}, {0, 0}, {1}: any of two different trees is right with 1 - the mean
    # over the three pairs of (1 - p)(1 - q) = 1 - (.5 · 1 + .5 · 0 + 1 · 0) / 3
    rates = pass_rates([1, 0, 0, 0, 1], ["a"] * 5, 5, [0, 0, 2, 2, 4])
    assert rates.any_of == pytest.approx({"1": 0.5, "2": 1 - 0.5 / 3, "3": 1.0})
    assert rates.all_of == pytest.approx({"1": 0.5, "2": 0.5 / 3, "3": 0.0})
    assert rates.num_examples == {"1": 1, "2": 1, "3": 1}


def test_pass_at_k_of_trees_of_one_is_that_of_rollouts():
    successes, examples = [1, 0, math.nan, 0, 0, 0, 1, 1], ["a"] * 3 + ["b"] * 3 + ["c"] * 2
    flat = pass_rates(successes, examples, 3)
    trees = pass_rates(successes, examples, 3, [0, 1, 2, 0, math.nan, 2, 0, 1])
    assert trees.any_of == pytest.approx(flat.any_of)
    assert trees.all_of == pytest.approx(flat.all_of)
    assert trees.num_unknown == flat.num_unknown
    for k, bounds in flat.any_of_bounds.items():
        assert trees.any_of_bounds[k] == pytest.approx(bounds)


def test_standard_errors_and_pass_at_k_do_not_count_branches_as_samples():
    def solved(completion):
        return float(len(completion[0].content) % 2)

    env = talk(funcs=(solved,), branching=vf.Branching(at=1, branches=2), num_rows=3)
    metadata = evaluate(env).metadata
    assert list(metadata.pass_at_k) == ["1", "2"]  # two trees, four rollouts
    assert metadata.num_rollouts == 12
    # the same rollouts without their forks would be four samples
    outputs = evaluate(env).outputs
    for output in outputs:
        del output["fork"]
    assert list(vf.GenerateMetadata.of(outputs).pass_at_k) == ["1", "2", "4"]
    # equal leaves of a tree tell no more of the mean than one of them: the error is that of trees
    doubled = clustered_stderr([1, 1, 0, 0, 1, 1], ["a", "a", "b", "b", "c", "c"])
    assert doubled == pytest.approx(clustered_stderr([1, 0, 1], ["a", "b", "c"]))


def test_an_atif_trajectory_is_whole_and_says_where_it_left(saved):
    _, results, _ = saved
    documents = [to_trajectory(output) for output in results.outputs]
    rows = [read_trajectory(document) for document in documents]
    assert [row["fork"] for row in rows] == [output["fork"] for output in results.outputs]
    assert [len(row["trajectory"]) for row in rows] == [3] * 4
