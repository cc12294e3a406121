"""Faults of older versions that must not come back, and rules where versions disagree: each has a
test.

``FAULTS`` and ``RULES`` name the test of each; the ones below are those that stand nowhere else.
"""

import ast
import io
import math
from pathlib import Path

import pytest

import verifiers as vf
from support.small_envs import Talk, add_one, exact, single_turn, sums
from verifiers.testing import ScriptedClient

TESTS = Path(__file__).parents[2]

FAULTS = {
    1: "core/rubrics/test_judge_rubric.py::test_every_form_of_a_prompt_gives_its_question",
    2: "core/rubrics/test_rubric_group.py::test_advantages_are_computed_once_from_the_final_reward",
    3: "core/rubrics/test_rubric.py::test_a_rollout_that_failed_is_unknown_and_no_function_sees_it",
    4: "core/legacy/test_historical_faults.py::test_a_repeat_plays_that_rollout_and_no_sibling",
    5: "faults/test_rollout_faults.py::test_the_server_sees_no_request_after_the_return",
    6: "core/rollouts/test_rollout.py::test_an_authors_own_time_out_is_not_a_time_limit",
    7: "core/rubrics/test_rubric.py::test_whatever_a_function_raises_stays_on_its_rollout",
    8: "core/parsers/test_parsers.py::test_xml_format",
    9: "core/legacy/test_historical_faults.py::test_the_default_rubric_scores_independently",
    10: "architecture/test_imports.py::test_importing_and_constructing_have_no_side_effects",
    11: "core/environments/test_environments.py::test_get_dataset_is_pure",
    12: (
        "core/environments/test_environments.py::test_misspelt_turns_are_refused_and_right_ones_kept"
    ),
    13: "core/legacy/test_historical_faults.py::test_the_first_example_has_its_number",
    14: "core/runs/test_generate.py::test_another_configuration_is_refused_and_nothing_is_written",
    15: (
        "core/rubrics/test_rubric_arguments.py::test_singular_and_plural_names_together_are_refused"
    ),
    16: "core/data/test_messages.py::test_a_key_that_is_absent_is_not_in_the_message",
    17: "core/results/test_results_processing.py::test_turns_that_continue_each_other_are_one_row",
    18: "core/legacy/test_historical_faults.py::test_an_answer_outside_a_box_is_no_answer",
    19: (
        "core/rubrics/test_rubric.py::test_anything_else_is_an_unknown_reward_that_names_the_function"
    ),
    20: "core/rubrics/test_rubric.py::test_a_rubric_that_cannot_be_meant_is_refused",
    21: "core/rubrics/test_judge_rubric.py::test_an_outage_does_not_lower_the_mean",
    22: (
        "faults/test_resume.py::test_killed_at_random_times_25_rounds_a_run_ends_with_the_planned_rows_once"
    ),
    23: "core/environments/test_registry.py::test_a_wrong_id_imports_nothing",
    24: (
        "core/environments/test_registry.py::test_a_missing_dependency_inside_an_environment_is_shown"
    ),
    25: "core/rollouts/test_state.py::test_storage_is_linear_in_turns",
    26: (
        "faults/test_reward_faults.py::test_a_computing_reward_does_not_hold_the_loop_and_other_rollouts_go_on"
    ),
    27: (
        "core/rubrics/test_math_rubric.py::test_it_works_off_the_main_thread_where_the_engines_own_time_out_does_not"
    ),
    28: "core/rubrics/test_judge_rubric.py::test_constructing_needs_no_key_and_makes_no_client",
}
"""By their number in the list of faults."""

RULES = {
    "generate blocks or is awaited": (
        "core/runs/test_generate.py::test_inside_a_loop_the_call_returns_an_awaitable"
    ),
    "shape of results": "core/runs/test_generate.py::test_results_answer_in_every_documented_way",
    "order of repeated examples": (
        "core/runs/test_generate.py::test_evaluation_runs_every_example_so_many_times_in_order"
    ),
    "env_response returns a tuple": (
        "core/rollouts/test_rollout.py::test_env_response_in_every_form"
    ),
    "is_completed": (
        "core/rollouts/test_rollout.py::test_is_completed_in_the_older_form_is_one_more_stop_condition"
    ),
    "setup_state returns or not": "core/rollouts/test_rollout.py::test_setup_state_in_every_form",
    "two forms of rollout": (
        "core/environments/test_single.py::test_by_prompt_completion_and_state_come_back"
    ),
    "two forms of run_group": (
        "core/environments/test_single.py::test_a_group_in_either_shape_with_advantages"
    ),
    "two forms of score_rollout": (
        "core/rubrics/test_rubric.py::test_the_old_positional_form_and_further_columns"
    ),
    "messages are dicts": (
        "core/test_types.py::test_known_fields_read_as_attributes_and_absent_ones_as_none"
    ),
    "tool calls nested or flat": "core/test_types.py::test_a_tool_call_is_nested_and_answers_flat",
    "oai_tools or tool_defs": (
        "core/rollouts/test_state.py::test_both_names_of_the_tools_are_one_list"
    ),
    "routing in a group": (
        "core/legacy/test_historical_faults.py::test_a_row_of_a_group_is_routed_by_info_and_then_by_task"
    ),
    "absent metrics": (
        "core/results/test_results.py::test_metrics_a_rollout_does_not_have_are_unknown"
    ),
    "metrics of one name": (
        "core/rubrics/test_rubric_group.py::test_metrics_of_one_name_are_kept_apart"
    ),
    "monitor rubrics": (
        "core/environments/test_environments.py::test_the_rubric_is_exactly_the_object_given_and_lends_its_parser"
    ),
    "scoring off": (
        "core/rubrics/test_rubric.py::test_scoring_off_leaves_reward_unknown_and_metrics_empty"
    ),
    "what concurrency counts": (
        "core/runs/test_runner.py::test_at_most_so_many_rollouts_are_in_flight"
    ),
    "parallelize_scoring": (
        "core/rubrics/test_rubric.py::test_a_function_reads_what_an_earlier_one_stored"
    ),
    "parse_answer on lists": (
        "core/parsers/test_parsers.py::test_the_answer_is_in_the_last_assistant_message_whatever_follows"
    ),
    "name of the math metric": (
        "core/legacy/test_compat.py::test_a_metric_of_older_files_has_its_present_name"
    ),
    "system prompt": (
        "core/data/test_dataset.py::test_a_given_prompt_gets_the_system_prompt_unless_it_has_one"
    ),
    "timing": "core/rollouts/test_state.py::test_timing_is_always_whole",
    "default of max_turns": (
        "core/legacy/test_historical_faults.py::test_turns_have_no_bound_of_their_own"
    ),
    "default key": (
        "core/legacy/test_historical_faults.py::test_the_key_is_that_of_openai_unless_another_variable_is_named"
    ),
    "max_seq_len": (
        "core/results/test_results_processing.py::test_a_long_row_loses_its_tail_and_never_its_prompt"
    ),
    "mask_env_responses": (
        "core/results/test_results_processing.py::test_environment_tokens_can_be_learned_from"
    ),
}
"""By what versions disagree about."""


@pytest.mark.parametrize("test", [*FAULTS.values(), *RULES.values()])
def test_each_has_a_test(test):
    file, _, name = test.partition("::")
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, functions)}, (
        f"{file} has no {name} any more"
    )


def test_no_fault_is_left_out():
    assert list(FAULTS) == list(range(1, 29))


def test_a_repeat_plays_that_rollout_and_no_sibling():
    played = []

    class Flaky(Talk):
        def setup_state(self, state):
            played.append(state["trajectory_id"])
            if len(played) == 1:
                raise vf.InfraError("a tunnel broke")

    env = Flaky(1, max_turns=1, rubric=vf.Rubric(funcs=[exact]))
    results = env.evaluate(
        ScriptedClient("1"), "m", rollouts_per_example=4, max_retries=1, max_concurrent=1
    )
    assert results["rewards"] == [1.0] * 4
    assert len(played) == 5


def test_the_default_rubric_scores_independently():
    results = vf.SingleTurnEnv(dataset=sums(2)).evaluate(
        ScriptedClient("x"), "m", independent_scoring=True
    )
    assert results["errors"] == [None, None]
    assert all(math.isnan(reward) for reward in results["rewards"])


def test_the_first_example_has_its_number():
    from verifiers.cli.evaluate.summary import print_summary, run_facts

    results = single_turn(1).evaluate(ScriptedClient("no"), "m")
    shown = io.StringIO()
    print_summary(results, run_facts(results), samples=True, notes=(), stream=shown)
    assert results["example_ids"] == [0]
    assert "example 0" in shown.getvalue()
    assert "unknown" not in shown.getvalue()


def test_an_answer_outside_a_box_is_no_answer():
    rubric = vf.MathRubric()
    said = [[{"role": "assistant", "content": text}] for text in ("4", r"\boxed{4}")]
    scores = rubric.score_rollouts(
        prompts=["2+2"] * 2, completions=said, answers=["4", "4"], states=[{}, {}]
    )
    assert scores["reward"] == [0.0, 1.0]


def test_a_row_of_a_group_is_routed_by_info_and_then_by_task():
    group = vf.EnvGroup(envs=[single_turn(1), Talk(1, max_turns=2)], env_names=["sums", "talk"])
    row = group.get_dataset().to_list()[1]
    assert (row["task"], row["info"]["env_id"]) == ("talk", "talk")
    assert (
        group.rollout({**row, "task": "sums"}, ScriptedClient("x"), "m")["stop_condition"]
        == "max_turns_reached"
    )
    by_task = group.rollout({**row, "info": {}}, ScriptedClient("x"), "m")
    assert len(by_task["trajectory"]) == 2


def test_turns_have_no_bound_of_their_own():
    assert vf.MultiTurnEnv.max_turns == vf.Environment.max_turns == -1
    assert vf.ToolEnv(dataset=sums(1), tools=[]).max_turns == 10


def test_the_key_is_that_of_openai_unless_another_variable_is_named():
    assert vf.ClientConfig().api_key_var == "OPENAI_API_KEY"
    assert vf.ClientConfig(api_key_var="OTHER_KEY").api_key_var == "OTHER_KEY"


# --- the options that older callers give


@pytest.mark.parametrize("options", [{"use_tqdm": True}, {"save_every": 5}, {"batch_size": 3}])
def test_an_option_that_is_no_longer_needed_changes_nothing(options):
    assert single_turn(3).evaluate(ScriptedClient(add_one), "m", **options)["rewards"] == [1.0] * 3


def test_scoring_may_wait_until_everything_is_played():
    order = []

    class Noting(Talk):
        def env_response(self, messages, state):
            order.append("played")
            return "more"

    async def scored(state):
        order.append("scored")
        return float(state["turn"])

    def siblings(states):
        return [float(len(states))] * len(states)

    env = Noting(3, max_turns=2, rubric=vf.Rubric(funcs=[scored, siblings]))
    results = env.evaluate(
        ScriptedClient("x"), "m", rollouts_per_example=2, interleave_scoring=False, max_concurrent=2
    )
    assert order == ["played"] * 6 + ["scored"] * 6
    assert results["rewards"] == [4.0] * 6
    assert results["advantages"] == [0.0] * 6
    assert [step["reward"] for state in results["states"] for step in state["trajectory"]] == [
        4.0
    ] * 12


def test_without_waiting_scoring_runs_beside_playing():
    """Negative control."""
    order = []

    def scored(state):
        order.append("scored")
        return 1.0

    class Noting(Talk):
        def env_response(self, messages, state):
            order.append("played")
            return "more"

    Noting(3, max_turns=2, rubric=vf.Rubric(funcs=[scored])).evaluate(
        ScriptedClient("x"), "m", max_concurrent=1
    )
    assert order == ["played", "scored"] * 3


def test_what_was_played_before_a_run_stops_itself_is_scored_and_kept(tmp_path):
    class Breaking(Talk):
        def setup_state(self, state):
            if state["example_id"] >= 2:
                raise KeyError("x")

    env = Breaking(6, max_turns=1, rubric=vf.Rubric(funcs=[exact]))
    with pytest.raises(vf.TooManyFaults):
        env.evaluate(
            ScriptedClient(add_one),
            "m",
            interleave_scoring=False,
            abort_after=2,
            max_concurrent=1,
            results_path=tmp_path / "run",
        )
    kept = vf.load_results(tmp_path / "run")
    assert kept["rewards"][:2] == [1.0, 1.0]
    assert kept.metadata.status == "failed"


def test_a_run_says_when_it_starts_and_what_it_finds(tmp_path):
    started, said = [], []
    options = {"results_path": tmp_path / "run", "on_start": started.append, "on_log": said.append}
    single_turn(2).evaluate(ScriptedClient(add_one), "m", **options)

    async def start(num_pending):
        started.append(num_pending)

    single_turn(3).evaluate(ScriptedClient(add_one), "m", **options | {"on_start": start})
    assert started == [2, 1]
    assert "run" in said[0]
    assert "2 of 3 rollouts are done already" in said[1]


def test_a_raising_callback_of_the_start_is_logged_and_stops_nothing(caplog):
    def start(num_pending):
        raise ZeroDivisionError("no display")

    assert single_turn(1).evaluate(ScriptedClient(add_one), "m", on_start=start)["rewards"] == [1.0]
    assert "on_start raised ZeroDivisionError: no display" in caplog.text


def test_further_keys_of_the_state_stand_on_the_rows():
    class Counting(Talk):
        def setup_state(self, state):
            state["seen"] = {"doors": 2}

    results = Counting(1, max_turns=1).evaluate(
        ScriptedClient("x"), "m", state_columns=["seen", "trajectory"]
    )
    assert results.outputs[0]["seen"] == {"doors": 2}
    assert results.outputs[0].trajectory[0]["completion"][0]["content"] == "x"
