"""Every promise, the faults that test it, and the tests that cause them: one row per fault.

Negative controls show the fault, the loss or the hang without the guard. ``python
tests/faults/matrix.py`` writes the page ``docs/reference/promises.md``; ``test_matrix.py`` compares
both with the tests that exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/promises.md"
REQUIRED = tuple(range(1, 52))


@dataclass(frozen=True, slots=True)
class Row:
    """One fault."""

    fault: str
    expected: str
    tests: tuple[str, ...]
    """As ``folder/file.py::test_name`` below ``tests/``."""
    negative_controls: tuple[str, ...]


def _in(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{file}.py::test_{name}" for name in names)


JOURNAL = "faults/test_journal_faults"
RESUME = "faults/test_resume"
INTERRUPTS = "faults/test_interrupts"
RETRY, SERVER = "faults/test_retry_faults", "faults/test_server_faults"
ROLLOUT = "faults/test_rollout_faults"
REWARD = "faults/test_reward_faults"
TOOL = "faults/test_tool_faults"
WEIGHTS = "faults/test_weight_faults"
SCALE = "faults/test_scale"
CONFIGURATION = "faults/test_configuration_faults"
COMMANDS = "faults/test_commands_faults"
CHECKPOINT, TRAINER = "faults/test_checkpoint_faults", "faults/test_trainer_faults"
AGREEMENT, CANARY = "trainer/run/test_agreement", "trainer/run/test_canary"

ROWS: dict[int, Row] = {
    # --- storing and going on
    1: Row(
        "kill -9 at random times, 25 rounds, then the same command again",
        "every acknowledged row is there; the file is the plan, no row twice; only pending rollouts"
        " are generated",
        (
            *_in(RESUME, "killed_at_random_times_25_rounds_a_run_ends_with_the_planned_rows_once"),
            *_in(
                JOURNAL,
                "killed_at_random_times_the_run_resumes_without_loss_or_repetition",
                "killed_at_random_times_many_rounds",
            ),
            *_in(
                "cli/test_vf_eval_interrupted",
                "after_sigkill_the_same_command_finishes_the_plan_and_asks_only_for_what_is_pending",
            ),
        ),
        _in(RESUME, "without_saving_a_killed_run_begins_again_from_nothing"),
    ),
    2: Row(
        "kill -9 before the write, after it, after the fsync, before the acknowledgement, while"
        " resuming, at the end",
        "as above; groups stay whole",
        (
            *_in(
                RESUME,
                "killed_at_each_failpoint_no_row_is_lost_or_done_twice_and_groups_stay_whole",
                "a_large_run_that_is_killed_at_a_failpoint_loses_no_row_and_does_none_twice",
            ),
            *_in(JOURNAL, "killed_at_a_failpoint_the_run_resumes_without_loss_or_repetition"),
        ),
        (
            *_in(RESUME, "rows_of_a_group_written_one_by_one_are_torn_apart_by_a_kill"),
            *_in(JOURNAL, "without_waiting_for_the_disk_a_kill_loses_acknowledged_rows"),
        ),
    ),
    3: Row(
        "the file cut at every byte, as power loss leaves it",
        "the exact prefix is recovered, the tail removed, the next row starts a line",
        (
            *_in(
                JOURNAL,
                "cut_at_every_byte_the_exact_prefix_is_recovered_and_the_next_row_starts_a_line",
            ),
            *_in(RESUME, "power_loss_in_the_middle_of_a_row_costs_that_row_only"),
        ),
        _in(
            JOURNAL,
            "without_cutting_the_next_row_is_lost_with_the_torn_one",
            "rows_appended_one_by_one_are_not_recovered_together",
        ),
    ),
    4: Row(
        "a byte flipped in the middle of the file",
        "JournalError with file and line, the file untouched, exit 3",
        (
            *_in(
                JOURNAL,
                "every_flipped_byte_is_found_with_its_line_and_the_file_is_left_alone",
                "a_row_missing_from_a_write_in_the_middle_is_damage",
            ),
            *_in(
                RESUME,
                "a_flipped_byte_stops_vf_eval_with_3_by_file_and_line_and_the_file_is_untouched",
            ),
        ),
        _in(JOURNAL, "without_the_checksum_a_flipped_digit_is_read_as_another_number"),
    ),
    5: Row(
        "text with U+0085, U+2028, NUL, a lone surrogate, 5 MB; a metric that is NaN",
        "comes back byte for byte; NaN is a ScoringError and null on disk",
        _in(
            JOURNAL,
            "any_text_round_trips_and_splits_at_line_feeds_only",
            "a_model_that_says_such_text_is_saved_and_read_back_word_for_word",
            "a_metric_that_is_no_number_is_a_scoring_error_and_null_on_disk",
        ),
        _in(
            JOURNAL,
            "without_ascii_the_same_text_breaks_readers_or_is_lost",
            "without_the_check_a_metric_that_is_no_number_is_no_json",
        ),
    ),
    6: Row(
        "a full disk, or EIO from fsync, at the n-th write",
        "the run stops with exit 3, acknowledged rows are readable, fsync is not asked again",
        (
            *_in(
                JOURNAL,
                "after_one_failed_write_or_fsync_nothing_more_is_taken_and_the_acknowledged_stay",
                "a_failed_fsync_is_never_asked_again",
                "on_a_full_disk_every_acknowledged_row_is_readable",
            ),
            *_in(
                RESUME,
                "a_failing_disk_stops_the_run_and_keeps_what_was_acknowledged",
                "vf_eval_on_a_failing_disk_ends_with_3",
            ),
        ),
        _in(
            JOURNAL,
            "without_the_fault_the_same_rows_are_taken",
            "a_failed_fsync_is_never_asked_again",
        ),
    ),
    7: Row(
        "a second process on the same run directory",
        "exit 2, naming process and host; the first continues",
        (
            *_in(
                RESUME,
                "a_second_process_on_the_same_directory_is_refused",
                "a_second_vf_eval_on_the_same_directory_is_exit_2_with_pid_and_host_and_the_first_goes_on",
            ),
            *_in(JOURNAL, "a_second_opener_is_refused_and_the_first_goes_on"),
        ),
        _in(JOURNAL, "without_the_lock_two_writers_do_the_same_row_twice"),
    ),
    8: Row(
        "resuming with another model, other arguments, sampling settings or code of the"
        " environment",
        "RunMismatch listing what differs; nothing written",
        (
            *_in(
                "core/runs/test_generate", "another_configuration_is_refused_and_nothing_is_written"
            ),
            *_in(
                "core/runs/test_resume_identity",
                "a_run_resumed_otherwise_is_refused_by_name",
                "an_evaluation_saved_by_0_2_0_loads_and_resumes",
            ),
            *_in(
                "core/storage/test_identity",
                "a_parameter_changes_the_identity_unless_it_is_marked_free",
            ),
            *_in(
                "core/storage/test_source_code",
                "a_changed_file_is_refused_by_name_unless_it_is_accepted",
                "a_command_refuses_the_unfinished_run_of_other_code_and_continues_or_leaves_it",
            ),
            *_in("cli/test_errors_vf_eval", "a_run_of_another_configuration_is_not_touched"),
            *_in(
                "trainer/run/test_checkpoint",
                "edited_source_of_the_environment_is_another_run_unless_accepted_and_then_recorded",
            ),
        ),
        (
            *_in(RESUME, "without_the_fingerprint_rows_of_another_model_would_count_as_done"),
            *_in(
                "core/storage/test_source_code",
                "without_the_hashes_both_versions_would_be_one_mean",
            ),
        ),
    ),
    9: Row(
        "resuming after rows of the dataset were reordered, edited or removed",
        "matched by content; edited rows run anew; removed rows are reported and kept",
        _in("core/runs/test_generate", "edited_rows_run_anew_and_gone_ones_are_reported"),
        _in(RESUME, "matched_by_place_a_reordered_row_would_get_the_result_of_another"),
    ),
    10: Row(
        "Ctrl-C once, Ctrl-C twice, SIGTERM",
        "nothing new is admitted; ended within the grace with 130 or 143; no child left;"
        " acknowledged rows kept",
        (
            *_in(
                INTERRUPTS,
                "an_interrupted_vf_eval_ends_within_the_grace_leaves_no_child_and_keeps_its_rows",
                "after_sigkill_no_child_is_left_either",
                "ctrl_c_cancels_cleans_up_and_keeps_what_was_acknowledged",
                "an_interrupt_inside_a_hook_cleans_up_every_rollout_once",
            ),
            *_in(
                "cli/test_vf_eval_interrupted",
                "a_signal_keeps_what_is_finished_and_prints_the_command_that_goes_on",
                "a_second_ctrl_c_leaves_at_once_even_when_author_code_holds_the_loop",
                "clean_up_that_does_not_end_is_left_after_the_grace",
            ),
        ),
        (
            *_in(
                INTERRUPTS,
                "a_child_that_nobody_ends_outlives_its_killed_parent",
                "negative_control_an_interrupt_that_a_hook_may_swallow_stops_nothing",
            ),
            *_in(
                "cli/test_vf_eval_interrupted",
                "negative_control_a_handler_of_the_event_loop_would_never_have_run",
            ),
        ),
    ),
    # --- the model server
    11: Row(
        "429 with Retry-After of 1 s and of 600 s",
        "never earlier than asked; 600 s fails at once as RateLimited, naming it; at most"
        " max_retries + 1 requests",
        _in(
            RETRY,
            "a_retry_after_of_a_second_is_never_answered_earlier",
            "a_retry_after_of_ten_minutes_fails_at_once_and_names_it",
            "a_retry_after_beyond_the_rollouts_own_bound_is_not_waited_for",
            "a_rollout_sends_at_most_one_request_more_than_its_repeats",
        ),
        _in(RETRY, "a_policy_that_does_not_hear_it_comes_too_early"),
    ),
    12: Row(
        "five seconds of 429 against 64 workers",
        "all succeed; no tenth of a second holds more than a quarter of the repeats; concurrency is"
        " cut and restored",
        _in(
            RETRY,
            "five_seconds_of_429_against_64_workers_are_survived_spread_out_and_with_fewer_in_flight",
            "told_to_wait_a_second_not_everybody_comes_back_after_a_second",
            "the_repeats_of_64_workers_are_spread_out",
        ),
        _in(
            RETRY,
            "without_jitter_the_repeats_come_all_at_once",
            "without_the_cut_as_many_stay_in_flight_as_there_are_workers",
        ),
    ),
    13: Row(
        "500, 502, 503, a reset connection, then success",
        "success; the attempts are on the rollout; exactly one layer repeats",
        (
            *_in(
                RETRY,
                "500_502_503_and_a_reset_are_repeated_by_one_layer_and_their_history_is_on_the_rollout",
            ),
            *_in(SERVER, "a_server_that_fails_often_and_is_silent_sometimes_costs_nothing"),
        ),
        (
            *_in(RETRY, "two_layers_of_repeats_multiply"),
            *_in(SERVER, "without_repeats_the_same_server_costs_rollouts_and_only_those_it_failed"),
        ),
    ),
    14: Row(
        "401 or 403; 404 for the model",
        "the run stops after the first with exit 2, naming the variable or the model; few requests"
        " sent",
        (
            *_in(SERVER, "what_every_rollout_would_meet_stops_the_run_after_the_first"),
            *_in(
                "cli/test_errors_vf_eval",
                "a_refused_key_names_its_variable_and_never_its_value",
                "an_unknown_model_stops_the_run_after_the_first_answer",
            ),
        ),
        _in(SERVER, "a_refusal_that_not_every_rollout_would_meet_stops_nothing"),
    ),
    15: Row(
        "400 for the length of the context, in six wordings",
        "the stop condition prompt_too_long; scored; not repeated",
        (
            *_in(
                SERVER,
                "a_prompt_that_does_not_fit_is_a_stop_condition_is_scored_and_is_not_repeated",
            ),
            *_in("core/clients/test_retry", "every_wording_of_a_full_context_is_recognised"),
        ),
        _in(SERVER, "another_refusal_with_400_is_an_error_and_its_reward_unknown"),
    ),
    16: Row(
        "nothing listens; a wrong URL; a web page",
        "one sentence with the URL and exit 2, before rollouts start",
        (
            *_in(SERVER, "nothing_listening_is_one_sentence_with_the_url_before_rollouts_start"),
            *_in(
                "cli/test_errors_vf_eval",
                "nothing_listens",
                "a_wrong_url_a_web_page_and_a_missing_key",
            ),
            *_in("core/clients/test_http_client", "a_web_page_or_a_redirect_is_no_endpoint"),
        ),
        _in(SERVER, "without_asking_first_every_rollout_finds_out_for_itself"),
    ),
    17: Row(
        "a server that accepts and never answers, or sends a byte per second",
        "the attempt ends and is repeated, the rollout ends, its place is free; all within the"
        " bound and a second",
        _in(
            SERVER,
            "a_server_that_accepts_and_never_answers_costs_one_rollout_and_the_place_goes_to_others",
            "an_attempt_that_does_not_end_is_given_up_and_repeated",
            "partial_turns_are_kept_when_the_server_falls_silent",
        ),
        _in(SERVER, "without_a_bound_on_the_attempt_the_rollout_waits_for_ever"),
    ),
    18: Row(
        "an empty body, choices: null, no logprobs, other lengths, a NaN logprob, cut JSON",
        "MalformedResponse; never a KeyError or TypeError; an evaluation says which turns lack"
        " log-probabilities",
        (
            *_in(
                SERVER,
                "what_is_no_completion_is_a_malformed_response_and_never_a_key_error",
                "whatever_the_server_says_is_one_of_our_errors_on_one_rollout",
                "an_evaluation_that_asks_for_log_probabilities_says_how_many_turns_lack_them",
                "log_probabilities_by_text_are_not_missed_and_are_warned_of_where_the_turns_are_not_saved",
            ),
            *_in("core/clients/test_http_client", "no_lower_error_leaks_whatever_the_server_does"),
        ),
        _in(SERVER, "read_naively_the_same_answers_raise_or_pass_for_tokens"),
    ),
    19: Row(
        "the server dies for two seconds in the middle of a run and returns",
        "the run completes and loses nothing",
        _in(SERVER, "a_server_that_dies_for_two_seconds_and_returns_costs_nothing"),
        _in(SERVER, "without_repeats_the_same_outage_costs_rollouts"),
    ),
    # --- rollouts, environments, rewards
    20: Row(
        "a hook that raises in 1 of 100 rollouts: each hook, also SystemExit, RecursionError,"
        " MemoryError",
        "99 scored, one fault with its traceback; the server sees no request after the return",
        _in(
            ROLLOUT,
            "a_hook_that_raises_in_one_of_a_hundred_costs_one",
            "a_marked_method_that_raises_in_one_of_a_hundred_costs_one",
            "the_server_sees_no_request_after_the_return",
        ),
        _in(ROLLOUT, "gathering_coroutines_that_raise_loses_everything"),
    ),
    21: Row(
        "a reward function that raises in a tenth of the rollouts",
        "their rewards are unknown, the mean is of the others, the summary says how many and why;"
        " exit 0",
        _in(
            REWARD,
            "a_reward_that_raises_on_a_tenth_leaves_these_unknown",
            "vf_eval_of_rewards_that_all_fail_ends_with_their_counts_and_places",
            "the_place_of_a_failure_is_the_line_of_the_authors_function",
            "vf_eval_says_how_many_are_unscored_and_why_and_ends_with_0",
        ),
        _in(REWARD, "counted_as_zero_the_same_failures_lower_the_mean"),
    ),
    22: Row(
        'a reward of NaN, infinity, "1", None, or a list of the wrong length',
        "ScoringError naming the function; booleans and numpy numbers are values",
        (
            *_in(
                REWARD,
                "a_reward_of_the_wrong_kind_is_unknown_and_names_its_function",
                "a_group_reward_of_the_wrong_length_or_kind_is_unknown",
            ),
            *_in(
                "core/rubrics/test_rubric",
                "numbers_of_every_kind_are_values",
                "anything_else_is_an_unknown_reward_that_names_the_function",
            ),
        ),
        _in(REWARD, "averaged_as_it_is_one_such_value_spoils_the_mean_or_the_run"),
    ),
    23: Row(
        "two rewards of one name; weights of another length; an empty list of rewards",
        "ConfigError at construction",
        _in(REWARD, "two_rewards_of_one_name_and_other_weights_are_refused_at_construction"),
        _in(REWARD, "kept_by_name_alone_two_rewards_of_one_name_are_one"),
    ),
    24: Row(
        "40 synchronous rewards of half a second of CPU each",
        "the event loop is less than 100 ms late, 99 times of 100; other rollouts go on",
        _in(REWARD, "a_computing_reward_does_not_hold_the_loop_and_other_rollouts_go_on"),
        _in(REWARD, "the_same_reward_on_the_loop_holds_it"),
    ),
    25: Row(
        "a reward that hangs (a pattern, 9**9**9, algebra), on the main thread or not",
        "killed at its time, its process gone, the next reward unaffected; no alarm signal in the"
        " source",
        (
            *_in(
                REWARD,
                "a_reward_that_hangs_is_killed_at_its_time_its_process_is_gone_and_the_next_is_unaffected",
                "no_source_uses_an_alarm_signal",
            ),
            *_in("core/rubrics/test_rubric_isolation", "children_of_a_killed_process_are_gone_too"),
        ),
        _in(REWARD, "a_thread_that_hangs_cannot_be_ended"),
    ),
    26: Row(
        "an environment that never ends",
        "a default bound of turns and of time; the turns so far are kept with their stop condition",
        (
            *_in(
                ROLLOUT, "an_environment_without_end_is_bounded_by_the_run_and_its_turns_are_kept"
            ),
            *_in(
                "core/rollouts/test_rollout",
                "an_environment_without_end_is_stopped_after_a_thousand_turns",
            ),
        ),
        _in(ROLLOUT, "without_the_bound_it_ends_when_the_caller_does"),
    ),
    27: Row(
        "tool calls: bad JSON, unknown tool, wrong types, 5 MB arguments, 10,000 calls, deep"
        " nesting",
        "a text of bounded size for the model; the rollout continues",
        (
            *_in(
                TOOL,
                "a_bad_call_is_told_to_the_model_in_a_bounded_text_and_the_rollout_goes_on",
                "ten_thousand_calls_in_one_message_are_each_answered_briefly",
            ),
            *_in(
                "core/data/test_tools", "whatever_a_model_writes_is_a_dict_or_a_short_parse_error"
            ),
        ),
        (
            *_in(TOOL, "called_naively_the_same_calls_raise_or_are_without_bound"),
            *_in(
                "core/environments/test_tool_env",
                "without_the_bound_every_call_of_a_message_is_run",
            ),
        ),
    ),
    28: Row(
        "an environment or a reward that changes the example, the messages or shared lists",
        "siblings and later epochs are unaffected",
        (
            *_in(
                ROLLOUT,
                "a_hundred_rollouts_that_change_what_they_are_given_leave_siblings_and_examples_as_they_were",
            ),
            *_in("core/runs/test_runner", "siblings_share_nothing_they_could_change"),
        ),
        _in("core/runs/test_runner", "siblings_over_one_shared_row_are_the_fault_without_copies"),
    ),
    29: Row(
        "every rollout fails with one cause",
        "TooManyFaults, naming it, after a few and not after the whole plan",
        (
            *_in(ROLLOUT, "a_plan_of_failures_ends_after_a_few"),
            *_in(SERVER, "a_server_that_is_down_stops_the_run_with_its_cause"),
        ),
        _in("core/runs/test_runner", "without_the_breaker_the_whole_plan_fails"),
    ),
    30: Row(
        "construction in a thread; evaluation inside a running loop; two environments at once",
        "works; signal handlers unchanged; no thread left",
        (
            *_in(ROLLOUT, "construction_and_evaluation_in_a_thread_inside_a_loop_and_twice"),
            *_in("architecture/test_imports", "importing_and_constructing_have_no_side_effects"),
        ),
        _in(ROLLOUT, "the_naive_ways_fail_in_a_thread_and_inside_a_loop"),
    ),
    # --- scale
    31: Row(
        "20,000 rollouts at a concurrency of 1,024",
        "less than 100 MB more memory, the same for many as for few; under a minute",
        _in(
            SCALE,
            "many_rollouts_at_concurrency_1024_need_no_more_memory_than_few",
            "a_saved_evaluation_keeps_its_rows_and_nothing_of_its_conversations",
        ),
        _in(SCALE, "with_a_task_each_memory_grows_with_the_plan"),
    ),
    32: Row(
        "256 open files and a concurrency of 1,024",
        "clamped with a sentence; the files never run out in the middle of a run",
        _in(
            SCALE,
            "with_256_open_files_a_concurrency_of_1024_is_clamped_with_a_sentence_and_nothing_fails",
        ),
        _in(SCALE, "without_the_clamp_the_files_run_out_in_the_middle"),
    ),
    33: Row(
        "generate is cancelled half way",
        "all workers end within a second; no warning of what was never awaited or destroyed",
        (
            *_in(ROLLOUT, "cancelling_half_way_ends_within_a_second_without_a_warning"),
            *_in(
                "core/runs/test_runner",
                "cancelling_a_run_takes_less_than_a_second_and_leaves_nothing",
            ),
        ),
        _in(ROLLOUT, "coroutines_made_before_their_tasks_begin_are_what_warns"),
    ),
    # --- training
    34: Row(
        "kill -9 at each place of writing a checkpoint, of one process or of either of two",
        "the newest whole one is continued, a torn one skipped with a warning; none is removed"
        " before a newer is whole",
        (
            *_in(
                CHECKPOINT,
                "two_ranks_killed_before_the_rename_resume_to_the_same_weights",
                "two_ranks_killed_at_every_failpoint_resume_to_the_same_weights",
                "a_checkpoint_holds_the_random_generators_of_every_rank",
            ),
            *_in(
                "trainer/run/test_resume",
                "killed_at_a_checkpoint_and_resumed_is_the_same_run",
                "killed_at_every_failpoint_and_resumed_is_the_same_run",
            ),
            *_in(
                "trainer/run/test_checkpoint",
                "a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used",
                "older_checkpoints_go_only_when_a_newer_one_is_whole",
            ),
        ),
        _in(
            CHECKPOINT,
            "written_in_place_a_save_that_is_killed_leaves_a_folder_that_looks_like_the_newest",
        ),
    ),
    35: Row(
        "six steps without a break against a kill in between, synchronous and one step off-policy,"
        " one process and two",
        "the same weights, optimizer, random generators, losses and rollouts, bit for bit",
        (
            *_in(
                "trainer/run/test_resume",
                "two_deterministic_runs_are_one",
                "killed_at_a_checkpoint_and_resumed_is_the_same_run",
            ),
            *_in(
                "trainer/distributed/test_two_rank_script",
                "killed_in_the_middle_the_same_command_ends_with_the_same_weights",
            ),
            *_in(CHECKPOINT, "two_ranks_go_on_where_one_process_was"),
        ),
        (
            *_in(CHECKPOINT, "resumed_with_the_weights_alone_the_run_is_another"),
            *_in("trainer/run/test_resume", "another_seed_is_another_run"),
        ),
    ),
    36: Row(
        "a checkpoint that holds a pickle, a replaced file, a truncated tensor",
        "refused or ignored, and nothing is executed",
        _in(
            "trainer/run/test_checkpoint",
            "a_planted_pickle_is_never_opened",
            "a_pickle_in_the_place_of_the_weights_is_refused",
            "a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used",
        ),
        _in(CHECKPOINT, "read_as_a_pickle_a_planted_file_is_executed"),
    ),
    37: Row(
        "inference restarts with its first weights between two steps",
        "seen in the first completion; the weights are sent again; no token of a wrong version in"
        " any batch",
        _in(
            WEIGHTS,
            "a_server_that_comes_back_with_its_first_weights_gets_the_present_ones_and_none_of_its_tokens_is_trained",
        ),
        _in(
            WEIGHTS,
            "without_looking_whose_weights_answered_tokens_of_the_first_weights_are_trained",
        ),
    ),
    38: Row(
        "inference dies during a push of weights; accepts the push and never answers",
        "WeightSyncError within the bound, naming what was awaited; pushing again works; a push is"
        " repeated whole",
        _in(
            WEIGHTS,
            "a_push_that_is_never_answered_ends_within_its_bound_names_what_was_awaited_and_can_be_made_again",
            "training_ends_with_that_error_and_not_with_silence",
            "a_server_that_dies_during_a_push_and_comes_back_gets_the_whole_of_it_again",
            "a_server_that_dies_during_a_push_and_stays_away_is_an_error_within_the_bound",
        ),
        _in(WEIGHTS, "a_plain_call_to_such_a_server_is_still_waiting"),
    ),
    39: Row(
        "rollouts older than the allowed lag",
        "dropped, counted, never trained",
        (
            *_in(WEIGHTS, "rollouts_older_than_the_lag_are_dropped_counted_and_never_trained"),
            *_in(
                "trainer/pipeline/test_pipeline",
                "no_token_older_than_the_lag_is_trained_and_no_slow_rollout_is_left_behind",
            ),
        ),
        _in(WEIGHTS, "without_the_age_check_they_are_trained"),
    ),
    40: Row(
        "all groups have equal rewards",
        "warnings with a histogram at growing intervals; an end only when there never was a signal,"
        " or the task is solved (exit 0); the last whole step is saved, whatever ends the run",
        (
            *_in(
                TRAINER,
                "equal_rewards_are_a_warning_with_a_histogram_and_then_the_end",
                "prompts_that_do_not_fit_are_named_where_nothing_can_be_learned",
                "a_run_whose_prompts_all_do_not_fit_ends_with_its_first_batch",
                "when_half_of_the_rewards_raise_the_final_error_says_how_many_and_where",
                "when_most_rewards_raise_the_error_counts_them_by_cause",
            ),
            *_in(
                "trainer/pipeline/test_pipeline",
                "rollouts_without_any_signal_since_the_start_end_the_run_with_a_histogram",
                "a_run_that_ever_had_signal_goes_on_and_warns_at_growing_intervals",
            ),
            *_in(
                "trainer/run/test_endings",
                "whatever_ends_a_run_saves_its_last_whole_step",
                "a_solved_task_ends_training_without_an_error_saved_and_stays_so",
            ),
            *_in("trainer/cli/test_cli_train", "a_solved_task_is_exit_0_with_a_checkpoint"),
        ),
        (
            *_in(
                "trainer/pipeline/test_pipeline",
                "with_the_limit_off_a_run_without_signal_goes_on_where_by_default_it_ends",
            ),
            *_in("trainer/run/test_endings", "without_the_saving_they_are_lost"),
        ),
    ),
    41: Row(
        "NaN or infinity in a reward, a log-probability, the loss, the gradient; on one rank of"
        " several",
        "no step is taken, the weights are as they were, the tokens are written down",
        (
            *_in(
                "trainer/run/test_trainer",
                "a_sampled_log_probability_that_is_no_number_stops_the_run",
                "an_infinite_reward_stops_the_run",
                "a_loss_that_is_no_number_stops_the_run",
                "a_gradient_that_is_no_number_stops_the_run",
                "a_policy_whose_log_probability_is_no_number_stops_the_run",
            ),
            *_in("trainer/distributed/test_ranks", "a_failure_of_one_rank_is_the_failure_of_all"),
        ),
        _in(TRAINER, "without_the_check_a_gradient_that_is_no_number_ruins_every_weight"),
    ),
    42: Row(
        "another tokenizer, another temperature, a chat template that rewrites what was said, a gateway"
        " that leaves out the system prompt or earlier turns",
        "refused before the step that would train on it, with the difference of log-probabilities"
        " or of tokens",
        (
            *_in(
                TRAINER,
                "log_probabilities_of_another_distribution_stop_the_run_before_its_first_step",
                "an_environment_that_changes_its_sampling_later_stops_the_run_at_that_step",
            ),
            *_in("trainer/cli/test_preflight", "a_tokenizer_of_another_model_is_found"),
            *_in(
                "trainer/engines/test_sync",
                "a_server_whose_gateway_drops_the_system_prompt_is_refused",
            ),
            *_in(
                "trainer/run/test_proof",
                "a_server_that_leaves_out_messages_is_found",
                "another_adapter_of_several_is_found",
            ),
            *_in(
                "trainer/policy/test_preparation",
                "a_template_that_strips_thinking_is_one_warning_for_several_turns_and_an_error_when_required",
            ),
        ),
        _in(
            TRAINER,
            "without_the_self_test_it_is_trained_and_nothing_is_said",
            "without_the_check_in_every_step_it_is_trained",
        ),
    ),
    43: Row(
        "a batch that processes cannot share evenly; fewer rollouts than processes; a missing"
        " sibling",
        "refused at the start with every number; afterwards no sample is dropped, whatever fails",
        (
            *_in(
                TRAINER,
                "a_batch_that_cannot_be_shared_is_refused_with_its_numbers",
                "a_group_that_lost_a_sibling_is_trained_without_it_and_one_that_lost_half_is_replaced",
            ),
            *_in(
                "trainer/distributed/test_ranks",
                "more_ranks_than_rollouts_is_refused_at_the_start",
                "no_sample_is_dropped_whatever_the_number_of_ranks",
                "unequal_data_gives_the_gradient_of_one_process",
            ),
        ),
        _in(
            TRAINER,
            "cut_to_a_multiple_of_the_processes_samples_are_lost",
            "counted_as_zero_a_lost_sibling_lowers_the_baseline_of_the_others",
        ),
    ),
    44: Row(
        "the generator's task ends; a process of several fails, is killed or hangs",
        "training raises that error at once, on every process; none is waited for longer than"
        " allowed",
        (
            *_in(TRAINER, "the_end_of_the_generator_is_the_end_of_training_within_a_second"),
            *_in(
                "trainer/distributed/test_ranks",
                "a_failure_of_one_rank_is_the_failure_of_all",
                "a_rank_that_is_killed_ends_the_others",
                "a_rank_that_hangs_is_waited_for_no_longer_than_allowed",
                "a_wait_is_bounded_and_says_for_what",
            ),
        ),
        (
            *_in(
                TRAINER,
                "waited_for_through_a_queue_a_dead_generator_is_a_timeout_that_hides_its_cause",
            ),
            *_in(
                "trainer/distributed/test_ranks",
                "outside_of_together_the_others_learn_only_that_it_is_gone",
            ),
        ),
    ),
    45: Row(
        "a tracker raises, hangs, is absent",
        "one warning; training continues and metrics.jsonl is complete",
        _in(
            "trainer/run/test_loggers",
            "a_tracker_that_fails_hangs_or_is_absent_costs_one_warning",
            "a_tracker_that_is_too_slow_is_given_up_and_never_waited_for",
            "a_tracker_that_is_not_installed_is_named_before_the_model_is_loaded",
        ),
        _in(
            "faults/test_tracker_faults",
            "called_from_the_loop_itself_a_tracker_that_raises_ends_the_run",
        ),
    ),
    46: Row(
        "one step cut otherwise: micro-batches, rows, processes, adapters merged or not, lag zero"
        " or synchronous",
        "the same losses and gradients within rounding",
        (
            *_in(TRAINER, "one_row_of_eight_and_eight_rows_of_one_train_the_same"),
            *_in(
                "trainer/run/test_learning", "packing_row_size_and_order_do_not_change_the_gradient"
            ),
            *_in(
                "trainer/distributed/test_ranks",
                "two_ranks_are_as_one_within_rounding_and_two_ranks_twice_are_bit_for_bit",
                "with_one_row_for_each_of_two_ranks_they_are_one_process_bit_for_bit",
            ),
            *_in(
                "trainer/run/test_trainer",
                "merged_and_unmerged_adapters_give_the_same_log_probabilities",
                "sync_and_async_with_lag_zero_are_one",
            ),
        ),
        (
            *_in(
                "trainer/algorithm/test_aggregation",
                "a_denominator_of_each_row_would_depend_on_layout",
            ),
            *_in("trainer/policy/test_logprobs", "without_use_cache_false_samples_see_each_other"),
        ),
    ),
    # --- configuration and commands
    47: Row(
        "misspelt settings in a file, on the command line, in environment arguments, in Python: all"
        " at once",
        "exit 2 before any request: each of them, its place, and the right name",
        (
            *_in(
                CONFIGURATION,
                "misspelt_keywords_in_python_are_named_all_at_once_before_any_request",
            ),
            *_in(
                "cli/test_errors_vf_eval",
                "everything_wrong_on_the_command_line_is_named_at_once",
                "everything_wrong_in_files_and_arguments_is_named_with_its_place",
            ),
        ),
        _in(CONFIGURATION, "taken_as_they_come_misspelt_keywords_change_nothing_and_say_nothing"),
    ),
    48: Row(
        "a wrong type, range or unit; a contradiction; unreadable TOML",
        "exit 2 with the value, the allowed range and the line",
        (
            *_in(
                CONFIGURATION,
                "a_wrong_type_range_unit_or_contradiction_is_refused_with_value_and_range",
                "unreadable_toml_wrong_types_and_contradictions_of_a_file_are_exit_2_by_line",
            ),
            *_in(
                "cli/test_errors_vf_eval",
                "values_out_of_range_and_contradictions",
                "a_file_that_cannot_be_used",
            ),
        ),
        _in(CONFIGURATION, "read_without_a_schema_the_same_files_are_fine"),
    ),
    49: Row(
        "an environment id that is misspelt, a module, a path, a command, a look-alike, 300"
        " characters long",
        "refused by its grammar; the nearest id is named; nothing is imported",
        (
            *_in(CONFIGURATION, "a_hostile_or_misspelt_id_is_refused_and_nothing_is_imported"),
            *_in(
                "core/environments/test_registry",
                "ids_outside_the_grammar_are_refused",
                "a_wrong_id_imports_nothing",
            ),
            *_in("cli/test_errors_vf_eval", "a_wrong_id_imports_nothing"),
        ),
        _in(CONFIGURATION, "imported_by_name_any_module_is_run"),
    ),
    50: Row(
        "an installed environment that is broken: a missing dependency, an exception, no"
        " environment, two of one id",
        "the real error, chained; both distributions named",
        (
            *_in(
                CONFIGURATION,
                "a_broken_environment_shows_the_real_error_and_two_of_one_id_are_both_named",
            ),
            *_in(
                "core/environments/test_registry",
                "a_missing_dependency_inside_an_environment_is_shown",
                "the_loaders_own_failure_is_chained",
                "what_is_no_environment_is_refused",
                "two_distributions_with_one_id_are_named",
            ),
            *_in("cli/test_errors_vf_eval", "a_broken_environment_shows_its_own_error"),
        ),
        _in(
            CONFIGURATION,
            "asked_in_the_naive_way_a_broken_environment_is_not_installed_and_one_of_two_wins",
        ),
    ),
    51: Row(
        "vf-install that fails, leads elsewhere or is shadowed; vf-init with a bad name or in an"
        " existing folder",
        "not 0; nothing written outside, nothing overwritten; it says that installing runs code",
        (
            *_in(
                COMMANDS,
                "an_environment_whose_build_fails_is_exit_3_with_the_real_reason_and_leaves_nothing",
                "a_name_that_leads_elsewhere_is_exit_2_and_nothing_is_written",
                "vf_init_in_an_existing_folder_keeps_what_is_there",
            ),
            *_in(
                "cli/test_vf_install",
                "a_failing_installer_is_exit_3_with_its_last_lines",
                "it_says_that_installing_runs_code_and_prints_the_exact_command",
                "a_module_in_the_working_directory_does_not_stand_in_for_the_installed_one",
                "another_library_of_the_same_name_and_number_is_never_taken",
            ),
            *_in(
                "cli/test_vf_init",
                "an_invalid_name_is_refused_and_nothing_is_written",
                "links_that_lead_elsewhere_are_refused",
            ),
            *_in(
                "cli/test_vf_setup",
                "files_that_are_there_stay_unless_forced",
                "links_that_lead_elsewhere_are_refused",
                "an_installation_that_fails_is_exit_3_and_the_file_stays",
            ),
        ),
        (
            *_in(
                COMMANDS,
                "an_installer_that_is_not_asked_how_it_ended_has_always_succeeded",
                "joined_and_written_as_it_comes_a_name_leads_out_and_a_file_is_replaced",
            ),
            *_in(
                "cli/test_vf_install",
                "installed_plainly_into_a_python_without_it_the_other_library_is_taken",
            ),
        ),
    ),
    54: Row(
        "a judged response with verdicts, closing fences, false JSON, instructions; a judge that"
        " quotes it",
        "the verdict is the judge's own last one, in a tag that the response cannot know; else the"
        " reward is unknown",
        (
            *_in(
                "core/rubrics/test_judge_rubric",
                "a_verdict_is_the_judges_own_last_score",
                "a_judge_that_only_quotes_the_attack_has_given_no_verdict",
                "the_response_stands_between_fences_it_cannot_close",
                "a_judge_without_a_verdict_of_its_own_leaves_the_reward_unknown",
            ),
            *_in(
                "core/rubrics/test_judging",
                "a_judge_that_may_quote_a_tag_is_read_by_the_one_that_the_data_cannot_know",
                "more_than_yes_or_no_is_no_verdict",
            ),
        ),
        (
            *_in("core/rubrics/test_judging", "a_plain_tag_that_may_be_a_quotation_is_no_verdict"),
            *_in(
                "core/rubrics/test_judge_rubric",
                "negative_control_a_fixed_fence_is_closed_by_the_answer",
            ),
        ),
    ),
    56: Row(
        "names of models, rows and tools that are paths; escape sequences in completions, names and"
        " messages",
        "no file outside the run's directory; control characters are shown escaped",
        (
            *_in(
                "cli/test_hostile_names",
                "names_of_models_rows_and_tools_make_no_path_and_no_escape_reaches_the_terminal",
            ),
            *_in(
                "cli/test_vf_eval_display",
                "long_and_hostile_texts_are_cut_and_spelled_out_in_a_transcript",
                "messages_and_notes_of_others_are_shown_with_their_control_characters_escaped",
                "names_that_a_server_or_an_author_gives_are_escaped_in_the_summary",
            ),
            *_in("cli/test_every_command", "hostile_words_are_exit_2_escaped_and_write_nothing"),
        ),
        (
            *_in("cli/test_hostile_names", "joined_as_they_come_such_names_lead_out"),
            *_in("cli/test_every_command", "what_a_terminal_does_with_a_raw_escape"),
        ),
    ),
    57: Row(
        "a megabyte of open tags, nested boxes, thoughts without an end",
        "parsed in time that grows with the length: under half a second",
        _in("faults/test_hostile_text", "parsers_are_linear_in_hostile_text"),
        _in(
            "faults/test_hostile_text",
            "a_pattern_that_tries_again_from_every_tag_takes_the_square_of_the_length",
        ),
    ),
    60: Row(
        "the printed command, for every combination of flags that reaches it; files of a run"
        " changed by hand",
        "it finishes that run; lost rows are told; a changed configuration and a foreign row are"
        " refused, by line",
        (
            *_in(
                "faults/test_resume_commands",
                "the_printed_command_finishes_the_run_that_it_is_printed_for",
                "a_folder_that_does_not_hold_the_named_run_is_refused",
                "a_configuration_changed_by_hand_is_refused_and_nothing_is_written",
                "a_row_of_another_shape_with_a_right_checksum_is_named_by_file_and_line",
            ),
        ),
        _in(
            "faults/test_resume_commands",
            "a_finished_run_that_has_lost_rows_says_so_before_it_generates_them_again",
        ),
    ),
    58: Row(
        "keys in arguments, headers, sampling arguments, variables, the state and error messages of"
        " a run",
        "in no file and on no stream of an evaluation or a training; another key is refused",
        (
            *_in(
                "faults/test_secrets",
                "an_evaluation_that_holds_keys_writes_and_prints_none",
                "the_printed_command_of_an_interrupted_evaluation_holds_no_key_and_names_the_gaps",
                "resuming_with_another_key_is_refused_without_naming_either",
                "a_training_that_holds_keys_writes_and_prints_none_checkpoints_included",
            ),
            *_in("core/runtime/test_redaction", "the_value_of_such_a_name_is_hidden_at_any_depth"),
        ),
        _in("faults/test_secrets", "without_redaction_the_keys_are_in_the_files"),
    ),
    59: Row(
        "a reply that unpacks to a thousand times its size, a reply or a child's output"
        " without end",
        "left at the limit on decoded bytes, its connection closed; it costs its rollout; SIGTERM"
        " ends in time",
        (
            *_in(
                "faults/test_reply_size",
                "a_reply_that_unpacks_beyond_the_limit_costs_its_rollout_and_little_memory",
                "a_reply_without_end_is_left_at_the_limit_and_its_connection_closed",
                "a_reply_within_the_limit_is_read_and_its_connection_used_again",
                "a_judge_that_answers_without_end_leaves_the_reward_unknown",
                "sigterm_ends_an_evaluation_that_reads_replies_without_end",
                "a_limit_that_nothing_fits_is_refused",
            ),
            *_in(
                "core/runtime/test_bounded",
                "a_stream_without_end_is_refused_with_little_memory",
                "a_child_that_prints_without_end_is_killed_and_the_end_of_its_stderr_is_kept",
            ),
            *_in(
                "core/environments/test_mcp_env",
                "a_message_without_end_is_left_at_the_limit_and_ends_its_rollout_alone",
            ),
        ),
        (
            *_in(
                "core/environments/test_mcp_env",
                "a_message_without_end_is_left_at_the_limit_and_ends_its_rollout_alone",
            ),
            *_in("faults/test_reply_size", "with_a_limit_above_the_bomb_it_is_held_whole"),
            *_in("core/runtime/test_bounded", "without_a_limit_the_stream_is_held_whole"),
        ),
    ),
    52: Row(
        "hostile code in a sandbox: network, others' files and processes, memory, forks, output;"
        " sixteen at once",
        "each attempt is stopped, a session beside them is not disturbed; an ordinary user is"
        " protected too",
        (
            *_in(
                "security/test_attacks",
                "it_is_stopped",
                "sixteen_hostile_sandboxes_at_once_are_stopped_and_disturb_no_session_beside_them",
                "one_session_finds_nothing_of_another_of_the_same_zygote",
                "nothing_of_the_session_itself_can_be_loosened",
            ),
            *_in("security/test_ordinary_user", "every_attack_is_stopped_for_an_ordinary_user_too"),
        ),
        (
            *_in("security/test_attacks", "negative_control_without_a_sandbox_it_succeeds"),
            *_in(
                "security/test_ordinary_user",
                "negative_control_without_a_sandbox_the_same_user_reaches_them",
            ),
        ),
    ),
    53: Row(
        "a machine that forbids what a sandbox needs; a home that cannot be written",
        "the next best sandbox or a refusal that names each, never none; an evaluation runs without"
        " a home",
        (
            *_in(
                "security/test_unavailable",
                "without_namespaces_the_next_best_is_taken",
                "without_both_it_refuses_and_names_both",
            ),
            *_in("security/test_ordinary_user", "vf_eval_needs_no_home_that_can_be_written"),
        ),
        _in("security/test_unavailable", "without_landlock_alone_nothing_changes"),
    ),
    75: Row(
        "code that forges its own check, or changes links while its results are collected",
        "a wrong result stays wrong: checked in a fresh sandbox, from declared files, after every"
        " process has ended",
        _in(
            "core/environments/test_fresh_checks",
            "a_wrong_result_stays_wrong_whatever_the_model_leaves_behind",
            "links_that_change_while_artifacts_are_collected_lead_nowhere_outside",
        ),
        _in(
            "core/environments/test_fresh_checks",
            "negative_control_a_check_in_the_models_session_is_forged",
            "negative_control_without_a_sandbox_a_link_is_followed",
        ),
    ),
    76: Row(
        "two trainings that took the same server at the same time",
        "neither takes a token of the other's weights; a fight over them ends within a few repairs,"
        " saying why",
        _in(
            "trainer/engines/test_vllm_engine",
            "two_runs_that_took_one_server_at_the_same_time_never_take_the_others_tokens",
        ),
        _in(
            WEIGHTS,
            "without_looking_whose_weights_answered_tokens_of_the_first_weights_are_trained",
        ),
    ),
    78: Row(
        "a process of a training is stopped or killed while the others are inside the all-reduce of"
        " a backward pass",
        "the others end within rank_timeout and five seconds, naming it; the newest checkpoint"
        " gives the same weights",
        _in(
            "trainer/distributed/test_ranks",
            "a_rank_that_is_stopped_inside_backward_ends_the_others_within_the_bound",
            "a_rank_that_is_killed_ends_the_others",
        ),
        _in(
            "trainer/distributed/test_ranks",
            "without_signs_of_life_a_stopped_rank_is_waited_for_until_it_is_killed",
            "a_rank_that_takes_longer_than_the_bound_and_lives_is_not_lost",
        ),
    ),
    79: Row(
        "links that another process makes and removes where a file of a run is written",
        "no other file is written; a journal or a lock that is a link is refused by name",
        _in(
            "core/storage/test_files",
            "links_that_come_and_go_where_a_file_is_written_lead_nowhere",
            "a_planted_link_and_the_rest_of_a_killed_process_are_replaced",
            "a_journal_or_a_lock_that_is_a_link_is_refused_by_name",
        ),
        _in(
            "core/storage/test_files",
            "opened_by_name_alone_a_planted_link_empties_the_file_it_leads_to",
        ),
    ),
    77: Row(
        "a stranger's package of an index, under a known name, a look-alike, or with files, modules"
        " or ids of others",
        "refused, or asked about where only the name deceives; one sentence names both packages;"
        " nothing is installed",
        _in(
            "cli/test_look_alikes",
            "a_package_that_takes_what_is_anothers_is_refused_before_it_is_installed",
            "a_higher_version_does_not_replace_a_package_that_came_from_a_folder_unasked",
            "a_name_one_letter_from_a_known_one_is_asked_about",
            "a_package_of_another_environment_is_not_installed_for_the_one_that_was_requested",
            "what_a_dependency_takes_is_found_after_the_installation",
            "which_names_are_mistaken_for_which",
        ),
        _in(
            "cli/test_look_alikes",
            "without_looking_the_library_and_the_environment_would_be_the_strangers",
            "an_honest_package_of_an_index_is_installed",
            "a_higher_version_replaces_a_package_of_the_index",
        ),
    ),
    71: Row(
        "random faults of all these kinds against an evaluation and a training at once, for hours",
        "no acknowledged row lost, none twice, none of another run; losses and weights of the"
        " undisturbed training",
        _in("faults/test_soak", "the_soak_itself_ends_with_what_repeats_its_violation"),
        _in(
            "faults/test_soak",
            "rows_lost_doubled_mixed_or_invented_are_reported",
            "a_training_that_is_not_the_undisturbed_one_is_reported",
            "a_command_that_hangs_is_a_violation_though_waiting_for_a_processor_is_not_counted",
            "a_secret_in_a_file_of_a_round_is_reported",
        ),
    ),
    72: Row(
        "the machine's clock goes backwards during a run",
        "the same results, no duration below zero, nothing done twice",
        _in(
            "faults/test_machine_faults",
            "a_clock_that_goes_backwards_changes_no_result_and_no_duration",
        ),
        _in("faults/test_machine_faults", "measured_with_that_clock_a_duration_is_negative"),
    ),
    73: Row(
        "the server changes its model during a run, or between two sessions of it",
        "a warning with the number of rollouts of each; every row names the model that answered",
        _in(
            "faults/test_machine_faults",
            "a_server_that_changes_its_model_is_told_and_every_row_names_its_own",
        ),
        _in("faults/test_machine_faults", "a_server_that_keeps_its_model_is_not_warned_about"),
    ),
    74: Row(
        "a closing tag of thought inside a code block, or several in one reply",
        "all the code of the answer runs, none of the thought",
        _in("core/environments/test_code_blocks", "the_blocks_of_a_reply"),
        _in(
            "core/environments/test_code_blocks",
            "cut_at_the_last_tag_of_all_the_code_before_it_would_be_lost",
        ),
    ),
    70: Row(
        "a stream cut at any byte, silent, with an error inside, with events of another form, or"
        " longer than the limit",
        "asked for again, never a shorter answer; what remains after every repeat costs its rollout"
        " alone",
        _in(
            "faults/test_stream_faults",
            "a_stream_cut_anywhere_is_asked_for_again",
            "a_stream_that_ends_before_the_end_of_its_answer_is_asked_for_again",
            "a_silent_stream_is_left_after_idle_timeout_and_asked_for_again",
            "a_slow_stream_is_not_a_silent_one",
            "an_error_inside_a_stream_is_repeated_as_one_outside",
            "a_prompt_that_does_not_fit_is_a_stop_condition_in_either_place",
            "what_is_no_answer_costs_its_rollout_and_is_named",
            "a_stream_above_the_limit_on_its_length_is_left",
            "a_server_that_fails_in_every_way_costs_nothing",
            "every_dialect_but_chat_is_streamed_by_a_client",
        ),
        _in(
            "faults/test_stream_faults",
            "without_the_last_event_the_cut_answer_reads_like_a_shorter_one",
            "without_an_idle_timeout_a_silent_stream_holds_its_rollout_to_the_end",
            "without_repeats_the_same_server_costs_the_rollouts_it_failed",
        ),
    ),
    80: Row(
        "another program deletes, replaces or cuts the journal while a run writes it",
        "JournalError, never complete; a deleted journal is written again with every acknowledged"
        " row",
        _in(
            JOURNAL,
            "a_journal_that_another_program_takes_away_is_an_error",
            "a_journal_whose_folder_is_gone_is_an_error",
            "a_run_whose_journal_is_deleted_ends_with_an_error_and_continues_with_every_row",
        ),
        _in(JOURNAL, "without_the_fault_the_same_rows_are_taken"),
    ),
    81: Row(
        "a run folder or a settings file names code or an endpoint",
        "opening, comparing and printing run none of it; only an installed environment, or what the"
        " user names, is loaded, and keys go where the user says",
        _in(
            "faults/test_named_code",
            "scoring_again_takes_an_installed_environment_alone_from_the_run",
            "opening_and_comparing_run_nothing",
            "printing_the_settings_of_an_eval_file_runs_nothing",
            "printing_the_settings_of_a_training_file_runs_nothing",
            "a_training_on_a_saved_run_takes_an_installed_environment_alone_from_it",
            "a_saved_run_does_not_choose_where_keys_are_sent",
        ),
        _in(
            "faults/test_named_code",
            "an_installed_environment_is_taken_but_not_what_shadows_it",
        ),
    ),
    82: Row(
        "connections without a request, bytes that are no HTTP, pages of other sites at a server",
        "closed in time, one line of the log, refused; programs and the own pages are answered",
        _in(
            "faults/test_hostile_requests",
            "a_connection_without_a_request_is_closed_and_the_server_answers",
            "what_is_no_http_is_at_most_one_line_of_the_log_for_many",
            "a_page_of_another_site_is_refused",
            "a_body_that_is_not_what_its_encoding_says_is_refused_in_one_sentence",
        ),
        _in(
            "faults/test_hostile_requests",
            "negative_control_programs_and_own_pages_are_answered",
        ),
    ),
    83: Row(
        "rollouts of another policy than the one that is trained: an adapter never delivered, a"
        " failed reload, a stale prefix cache, stale or half-loaded weights, another rope, dtype,"
        " temperature or prompt",
        "the run ends within one step, with the version, the answers and the tokens that are apart;"
        " fifty sound runs raise no alarm",
        (
            *_in(CANARY, "a_published_bug_ends_the_run_within_a_step"),
            *_in(
                AGREEMENT,
                "a_planted_fault_ends_the_run_within_a_step",
                "fifty_sound_runs_raise_no_alarm",
            ),
            *_in(
                "trainer/run/test_proof",
                "every_saved_version_is_verified_and_another_checkpoint_is_found",
                "a_server_that_serves_the_folder_agrees_and_one_that_does_not_is_found",
            ),
        ),
        (
            *_in(
                CANARY,
                "without_the_comparison_it_trains_on_and_nothing_is_said",
                "rollouts_of_new_prompts_do_not_show_old_prefixes",
            ),
            *_in(AGREEMENT, "without_a_fault_the_same_run_agrees"),
        ),
    ),
    # --- work before a limit, values of strangers
    91: Row(
        "a megabyte of the worst text for each pattern, in replies, errors and files; an error that"
        " quotes it",
        "time in proportion to the text; it is cut before it is searched, and no part of a secret"
        " across the cut is shown",
        (
            *_in(
                "architecture/test_patterns", "every_pattern_takes_time_in_proportion_to_its_text"
            ),
            *_in(
                "core/runtime/test_redaction",
                "a_long_text_is_cut_first_and_takes_no_time",
                "no_part_of_a_secret_across_a_cut_is_shown",
            ),
            *_in(
                "core/rollouts/test_error_info",
                "an_error_that_quotes_a_long_reply_is_short_and_takes_no_time",
            ),
        ),
        _in(
            "architecture/test_patterns",
            "patterns_that_take_the_square_of_a_text_are_found",
        ),
    ),
    92: Row(
        "an output schema of a tool server that computes for ever, is none, or does not describe its"
        " result",
        "an error of that call; the loop that all rollouts share never waits",
        _in(
            "core/environments/test_mcp_results",
            "a_schema_that_computes_for_ever_is_ended_beside_the_loop",
            "a_schema_that_is_none_is_an_error_of_the_call_and_nothing_is_fetched",
            "a_result_that_its_schema_does_not_describe_is_the_error_of_its_call",
        ),
        _in(
            "core/environments/test_mcp_results",
            "a_result_that_its_schema_describes_is_an_answer",
        ),
    ),
    93: Row(
        "values that no program of ours writes: pauses in zones that no clock has, metrics and weights"
        " of another program, exceptions without a text",
        "one rollout or one run of a list at most",
        (
            *_in(
                "core/clients/test_retry_after",
                "an_odd_pause_is_no_error",
                "an_odd_pause_costs_its_rollout_at_most",
            ),
            *_in(
                "view/test_damaged",
                "an_odd_run_does_not_take_the_others_from_a_copy",
                "odd_metrics_have_curves_and_an_unknown_proof",
            ),
        ),
        _in(
            "core/rollouts/test_error_info",
            "such_an_exception_costs_its_rollout_wherever_it_is_raised",
        ),
    ),
    94: Row(
        "a request above the whole limit of a run, as the first of it; images under a limit",
        "its rollout fails alone; an image counts at its most until the server has counted it",
        _in(
            "core/clients/test_spending",
            "a_request_above_the_whole_limit_never_ends_the_run",
            "an_image_counts_at_its_most_and_not_by_its_bytes",
        ),
        _in("core/clients/test_spending", "a_request_far_larger_than_the_others_is_refused_alone"),
    ),
    95: Row(
        "tags, boxes and digits of a verdict in letters that look alike",
        "no verdict and no tag; what a judge writes in plain ones may be quoted",
        (
            *_in(
                "core/rubrics/test_judging",
                "a_tag_in_letters_that_look_alike_is_no_verdict_and_may_be_quoted_in_plain_ones",
                "a_box_in_letters_that_look_alike_may_be_quoted",
                "digits_of_another_script_are_numbers_that_may_be_quoted",
            ),
            *_in("core/parsers/test_parsers", "a_tag_in_letters_that_look_alike_is_no_tag"),
        ),
        _in("core/rubrics/test_judging", "letters_that_grow_in_lower_case_move_no_tag"),
    ),
    96: Row(
        "torn metrics, proof and checkpoint of a training; a disk that is full at any of its files, or on"
        " which nothing can be written about its end",
        "resumed to the same weights, bit for bit; the error that ended it keeps its name",
        _in(
            "trainer/run/test_damaged_files",
            "a_run_with_torn_files_is_resumed_to_the_same_weights",
            "an_error_keeps_its_name_when_nothing_can_be_written_about_it",
            "on_a_full_disk_no_file_is_torn_the_error_names_one_and_the_run_is_resumed",
        ),
        _in(
            "trainer/run/test_damaged_files",
            "what_is_no_line_of_a_run_is_left_out_with_its_place",
            "written_in_place_a_full_disk_leaves_half_a_file",
        ),
    ),
    97: Row(
        "a failure of one request, call, process or judge of those that several rollouts share; an"
        " answer without a request; a gateway's request that cannot be read or was refused",
        "it costs the rollout that met it; nothing that was answered is asked again, and no answer is"
        " another's",
        (
            *_in(
                "faults/test_shared_parts",
                "a_request_that_fails_costs_no_other_of_the_pool_of_connections",
                "a_judge_that_fails_once_costs_no_other_verdict",
                "a_process_of_a_pool_that_ends_costs_no_other_reward",
                "a_zygote_that_dies_costs_no_later_session",
            ),
            *_in(
                "core/environments/test_mcp_faults",
                "a_call_without_a_usable_answer_is_made_once_and_costs_one_rollout",
                "a_servers_own_error_is_told_to_the_model_whatever_its_number",
                "a_call_that_is_given_up_closes_its_connection_and_says_so",
                "an_answer_that_a_child_process_botches_costs_one_rollout",
                "a_call_that_ends_its_server_fails_alone",
                "a_result_that_is_none_is_the_servers_fault_and_not_the_models",
                "nothing_is_asked_but_calls_and_nothing_after_the_run",
            ),
            *_in("core/runtime/test_http_clients", "an_answer_that_nobody_asked_for_is_nobodys"),
            *_in(
                "core/clients/test_serving",
                "what_cannot_be_read_is_refused_in_the_form_of_its_path",
            ),
            *_in("agents/test_gateway", "a_refused_request_is_tried_anew_when_it_is_sent_again"),
        ),
        (
            *_in(
                "core/runtime/test_http_clients",
                "negative_control_kept_as_it_is_a_connection_gives_it_to_the_next_request",
            ),
            *_in(
                "core/environments/test_mcp_faults",
                "a_server_that_forgot_its_sessions_is_connected_again_and_the_call_repeated",
            ),
        ),
    ),
    98: Row(
        "secrets of headers, variables, servers, queries and sampling arguments, in every form in which"
        " they are printed; a proxy and a redirect that would get them",
        "hidden in every form; plain headers are shown; loopback is asked for directly",
        (
            *_in(
                "core/runtime/test_redaction",
                "each_way_in_remembers_its_secrets_in_every_form_they_are_printed",
                "headers_and_keys_of_variables_of_any_name_are_remembered",
                "headers_that_may_be_secrets_by_name_or_shape_are_hidden",
            ),
            *_in(
                "core/runtime/test_http_clients",
                "a_proxy_of_the_environment_is_not_asked_for_loopback",
                "a_redirect_is_an_error_and_takes_no_key_along",
                "a_key_of_a_mounted_file_is_sent_without_its_end",
            ),
            *_in(
                "core/environments/test_mcp_http",
                "keys_come_from_variables_and_are_never_stored",
                "a_redirect_takes_no_key_elsewhere",
            ),
        ),
        _in("core/runtime/test_redaction", "headers_that_are_plain_are_shown"),
    ),
    99: Row(
        "many short things that add up: values of an answer, events of a stream, tools and what is said"
        " of them, bodies that do not end, an index that claims a terabyte",
        "each has its limit, also in sum; an agent takes no room of another",
        (
            *_in(
                "core/environments/test_mcp_faults",
                "an_answer_of_too_many_values_is_refused_before_they_are_made",
                "a_stream_of_events_has_the_limits_of_a_message",
                "a_compressed_stream_of_events_is_refused",
                "tools_without_end_end_the_run_before_the_first_call",
                "what_a_server_says_of_its_tools_is_bounded_in_every_row",
            ),
            *_in(
                "core/clients/test_serving",
                "a_body_counts_as_it_comes_so_one_that_does_not_end_takes_no_room",
                "a_body_that_stands_still_is_refused_before_its_time_is_over",
            ),
            *_in(
                "agents/test_gateway",
                "bodies_of_no_announced_length_count_for_their_agent_as_they_come",
            ),
            *_in(
                "core/runs/test_large_store",
                "an_index_of_a_stranger_is_not_read_beyond_its_first_numbers",
                "a_part_that_claims_more_than_its_rows_is_not_read",
            ),
        ),
        (
            *_in(
                "core/runs/test_large_store", "a_fitting_index_is_used_and_what_came_later_is_read"
            ),
            *_in("faults/test_reply_size", "with_a_limit_above_the_bomb_it_is_held_whole"),
        ),
    ),
    100: Row(
        "a worker that is busy in a pattern, stopped or silent when its run is killed",
        "it ends with its run, whatever holds its interpreter; a silent one costs its limit once",
        _in(
            "core/runs/test_workers",
            "workers_end_with_a_caller_that_is_killed",
            "a_halted_worker_ends_with_a_caller_that_is_killed",
            "a_rollout_that_halts_its_workers_fails_alone",
            "a_rollout_that_halts_a_worker_in_which_it_is_alone_costs_that_once",
        ),
        _in(
            "core/runs/test_workers",
            "negative_control_a_rollout_that_blocks_its_loop_for_longer_is_not_lost",
        ),
    ),
    101: Row(
        "a certificate of an unknown authority, an expired one, one of another name, no TLS",
        "each client says what mends it, and none that a server should be started",
        _in(
            "core/runtime/test_tls",
            "every_client_says_what_mends_the_trust",
            "a_certificate_of_a_known_authority_may_be_old_or_of_another",
            "with_the_authority_in_the_variable_the_server_is_trusted",
        ),
        _in("core/runtime/test_tls", "another_fault_of_a_connection_is_none_of_trust"),
    ),
}

PROMISES: dict[str, tuple[int, ...]] = {
    "A rollout acknowledged is on disk: it survives kill -9 and power loss.": (3, 4, 5, 6, 7, 80),
    "Interrupted at any instant, the same command finishes the run and does only what is pending. "
    "No row twice, none missing, none from another configuration.": (1, 2, 8, 9, 10, 60, 71, 73),
    "One rollout's failure is that rollout's failure. It never costs a neighbour, a request, or the run.": (
        *(18, 19, 20, 27, 28, 29, 33, 92, 93, 94, 97),
    ),
    "An unknown reward is unknown. Never 0, never in a mean.": (21, 22, 23),
    "Every wait has a bound and says what it waits for.": (
        16,
        17,
        24,
        25,
        26,
        44,
        45,
        70,
        72,
        78,
        82,
        91,
        100,
        101,
    ),
    "The number of requests is bounded by one retry layer, which obeys the server and spreads out.": (
        *(11, 12, 13, 14, 15),
    ),
    "Memory is bounded by concurrency, not by the number of rollouts.": (31, 32, 59, 99),
    "No gradient from tokens of a policy other than the one recorded, nor older than the lag allows.": (
        *(37, 38, 39, 40, 41, 42, 43, 46, 76, 83),
    ),
    "A checkpoint is whole or absent; a resumed run is the run itself, bit for bit.": (
        34,
        35,
        36,
        96,
    ),
    "Model output is data.": (52, 53, 54, 56, 57, 74, 75, 79, 81, 95),
    "A key that a run holds is in none of its files and on none of its streams.": (58, 98),
    "A misspelt setting stops the run before the first request and names the right one.": (
        47,
        48,
        49,
        50,
        51,
        77,
    ),
    "A constructor has no side effects.": (30,),
}

HEAD = """# Promises and their tests

The promises about failure are few, and each is tested. An entry below is one fault, the expected behaviour, and the
tests that make it happen with real processes, files and servers. The *negative control* of a test
shows the fault without the guard, so that a test that could not fail is noticed.

Names are files below `tests/` and the test functions in them, without `test_`. Tests marked `slow` run with
`python -m pytest -m slow`; all others with every test run. `python tests/faults/matrix.py` writes this page.
"""


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for promise, numbers in PROMISES.items():
        parts.append(f"\n## {promise}\n")
        for number in numbers:
            row = ROWS[number]
            parts.append(
                f"\n**{row.fault[0].upper()}{row.fault[1:]}.**"
                f" {row.expected[0].upper()}{row.expected[1:]}.\n\n"
            )
            parts += _lines("", row.tests)
            parts += _lines("negative control: ", row.negative_controls)
    return "".join(parts)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _lines(kind: str, tests: tuple[str, ...]) -> list[str]:
    by_file: dict[str, list[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        by_file.setdefault(file, []).append(name.removeprefix("test_"))
    return [
        f"- {kind}`{file}`: {', '.join(f'`{name}`' for name in names)}\n"
        for file, names in by_file.items()
    ]


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
