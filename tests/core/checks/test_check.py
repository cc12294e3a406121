"""``check_environment``: every code is triggered by a fault and absent without it; good
environments are clean."""

import asyncio
import random
import signal
import socket
import threading
import time

import pytest

import verifiers as vf
from verifiers.checks import CheckReport, Finding, a_check_environment, check_environment
from verifiers.environments.group import EnvGroup
from verifiers.errors import AuthenticationFailed, ConfigError, MissingKeyError, UnknownEnvironment
from verifiers.rubrics import Rubric
from verifiers.testing import ScriptedClient

ROWS = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(4)]
EVAL_ROWS = [{"question": f"{n} + 2", "answer": str(n + 2)} for n in range(4)]


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


GOOD = {"dataset": ROWS, "eval_dataset": EVAL_ROWS, "rubric": Rubric(funcs=[exact])}


def single_turn(**parameters):
    return vf.SingleTurnEnv(**(GOOD | parameters))


class Talk(vf.MultiTurnEnv):
    """Three turns; a good environment to bend."""

    def __init__(self, **parameters):
        super().__init__(**(GOOD | {"max_turns": 3} | parameters))

    def env_response(self, messages, state):
        return "more"


def check(env_or_id, **options):
    return check_environment(env_or_id, **({"n": 2, "timeout_s": 5.0} | options))


def errors_of(report):
    return {finding.code for finding in report.errors}


def warnings_of(report):
    return {finding.code for finding in report.warnings}


def finding(report, code):
    findings = [entry for entry in (*report.errors, *report.warnings) if entry.code == code]
    assert findings, f"no {code} in:\n{report}"
    assert all(entry.message and entry.place and entry.fix for entry in findings)
    return findings[0]


def reported(code, make=single_turn, **parameters):
    """What a check says under ``code`` of an environment with these parameters."""
    return finding(check(lambda: make(**parameters)), code)


# --- good environments ----------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["reverse-text", "alphabet-sort"])
def test_the_shipped_environments_are_clean(env_id):
    report = check(env_id)

    assert report.ok
    assert report.errors == report.warnings == ()


@pytest.mark.parametrize("make", [single_turn, Talk])
def test_a_good_environment_is_clean_and_every_example_is_run_with_every_policy(make):
    report = check(make)

    assert (report.errors, report.warnings, report.notes) == ((), (), ())
    assert report.num_rollouts == 2 * 4 + 2  # and the last policy once more


def test_a_good_tool_environment_is_clean_and_its_tools_are_called():
    calls = []

    def square(n: int) -> int:
        """Square a number."""
        calls.append(n)
        return n * n

    report = check(lambda: vf.ToolEnv(tools=[square], **GOOD))

    assert (report.errors, report.warnings) == ((), ())
    assert calls == [1] * 4


def test_completion_mode_is_clean():
    def exact_text(completion, answer):
        return float(completion == answer)

    report = check(
        lambda: single_turn(message_type="completion", rubric=Rubric(funcs=[exact_text]))
    )

    assert (report.errors, report.warnings) == ((), ())


# --- the report -----------------------------------------------------------------------------------


def test_everything_is_reported_at_once_with_place_and_fix():
    class Broken(Talk):
        def env_response(self, messages, state):
            return 1 / 0

    report = check(
        lambda: Broken(eval_dataset=None, rubric=Rubric(funcs=[lambda nothing_supplies_this: 1.0]))
    )

    assert not report.ok
    assert errors_of(report) == {
        "hook-raises-or-returns-a-wrong-type",
        "reward-parameter-that-cannot-be-injected",
    }
    assert "eval-set-missing" in warnings_of(report)
    text = str(report)
    for entry in (*report.errors, *report.warnings):
        assert all(part in text for part in (entry.code, entry.message, entry.place, entry.fix))


def test_findings_are_values():
    report = CheckReport("x", (Finding("a-code", "it is wrong", "here", "mend it"),))

    assert not report.ok
    assert (
        str(report)
        == "x: 1 error, no warnings (0 rollouts run)\n  error a-code: it is wrong\n    at:  here\n "
        "   fix: mend it"
    )
    with pytest.raises(AttributeError):
        report.errors = ()


def test_an_object_is_checked_without_its_constructor_and_is_not_closed():
    class Closing(Talk):
        closed = 0

        @vf.teardown
        def end(self):
            Closing.closed += 1

    env = Closing()
    report = check(env)

    assert report.ok
    assert Closing.closed == 0
    assert "constructor" in report.notes[0]
    assert check(Closing).ok
    # what the check has built, it closes: the environment and the one to compare
    assert Closing.closed == 2


async def test_both_forms_work_under_a_running_loop():
    assert check(single_turn).ok
    assert (await a_check_environment(single_turn, n=1)).ok


def test_a_given_client_plays_each_example_once():
    client = ScriptedClient(lambda request: str(int(request.prompt[-1].content.split()[0]) + 1))

    report = check(single_turn, client=client, n=3)

    assert report.ok
    assert report.num_rollouts == len(client.requests) == 3


def test_wrong_arguments_and_unknown_ids_are_the_callers_mistakes():
    with pytest.raises(UnknownEnvironment):
        check("no-such-environment-anywhere")
    with pytest.raises(ConfigError, match="n is 0"):
        check(single_turn, n=0)
    with pytest.raises(ConfigError, match="timeout_s"):
        check(single_turn, timeout_s=0)
    with pytest.raises(ConfigError, match="int"):
        check(3)
    with pytest.raises(ConfigError, match="client"):
        check(single_turn, client=3)


def test_members_of_a_group_are_checked_one_by_one():
    report = check(
        lambda: EnvGroup([Talk(), single_turn(eval_dataset=None)], env_names=["talk", "one"])
    )

    assert report.ok
    assert finding(report, "eval-set-missing").place.startswith("member 'one': ")
    assert len(report.warnings) == 1
    assert report.num_rollouts == 2 * 10


# --- loading --------------------------------------------------------------------------------------


def test_a_loader_that_raises_is_reported_with_its_line():
    def load():
        raise KeyError("settings")

    first = finding(check(load), "not-loadable")

    assert "KeyError: 'settings'" in first.message
    assert "test_check.py" in first.place


def test_a_loader_that_returns_something_else_is_reported():
    assert "int" in finding(check(lambda: 3), "not-loadable").message


def test_two_functions_or_two_tools_of_one_name_are_reported():
    def look() -> str:
        """Look."""
        return ""

    twice = lambda: single_turn(rubric=Rubric(funcs=[exact, exact]))  # noqa: E731
    assert reported("duplicate-function-name", twice)
    assert reported("duplicate-function-name", vf.ToolEnv, tools=[look, look], dataset=ROWS)


def test_a_tool_without_a_schema_is_reported():
    def look(where: socket.socket) -> str:
        """Look."""
        return ""

    def look_all(*where: str) -> str:
        """Look."""
        return ""

    for tool in (look, look_all):
        assert finding(
            check(lambda tool=tool: vf.ToolEnv(tools=[tool], dataset=ROWS)),
            "tool-schema-not-derivable",
        )


def test_a_reward_function_with_star_arguments_is_reported():
    report = check(lambda: single_turn(rubric=Rubric(funcs=[lambda *all_of_it: 1.0])))

    assert errors_of(report) == {"reward-parameter-that-cannot-be-injected"}


def test_a_thread_a_signal_handler_and_network_use_of_the_constructor_are_reported():
    release = threading.Event()
    before = signal.getsignal(signal.SIGUSR1)

    def load():
        threading.Thread(target=release.wait, name="poller", daemon=True).start()
        signal.signal(signal.SIGUSR1, lambda *_: None)
        with socket.socket() as connection:
            connection.connect_ex(("127.0.0.1", 9))
        return single_turn()

    try:
        report = check(load)
    finally:
        release.set()
        signal.signal(signal.SIGUSR1, before)

    said = " ".join(error.message for error in report.errors)
    assert errors_of(report) == {"constructor-side-effect"}
    assert "thread 'poller'" in said
    assert "SIGUSR1" in said
    assert "connect 127.0.0.1" in said


def test_what_other_threads_do_meanwhile_is_not_the_constructors():
    begin, done = threading.Event(), threading.Event()

    def elsewhere():
        begin.wait(5)
        with socket.socket() as connection:
            connection.connect_ex(("127.0.0.1", 9))
        done.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()

    def load():
        begin.set()
        done.wait(5)
        return single_turn()

    assert check(load).ok
    thread.join()


def test_building_twice_in_one_process_must_work():
    built = []

    def load():
        if built:
            raise RuntimeError("the registry has it already")
        built.append(1)
        return single_turn()

    assert "second time" in reported("constructor-side-effect", load).message


def test_rows_drawn_without_a_seed_are_reported_and_seeded_ones_are_not():
    def drawn(generator):
        return single_turn(
            dataset=[{"question": str(generator.random()), "answer": "1"} for _ in range(3)]
        )

    assert (
        "training rows"
        in finding(check(lambda: drawn(random.Random())), "unseeded-randomness").message
    )
    assert check(lambda: drawn(random.Random(0))).warnings == ()


def test_use_of_the_global_generator_is_reported():
    def load():
        random.seed(0)
        return single_turn()

    assert warnings_of(check(load)) == {"global-random-state"}


def test_loader_arguments_without_a_type_are_reported():
    def load(num_rows: int = 3, difficulty="easy", **more):
        return single_turn()

    first = finding(check(load), "argument-without-type")

    assert "difficulty" in first.message
    assert "num_rows" not in first.message


# --- the dataset ----------------------------------------------------------------------------------


def test_a_dataset_that_cannot_be_read_is_reported():
    def fail():
        raise OSError("the disk is gone")

    assert "the disk is gone" in reported("dataset-unreadable", dataset=fail).message
    assert "empty" in reported("dataset-unreadable", dataset=lambda: []).message


def test_rows_without_prompt_and_question_are_reported_with_their_number():
    assert reported("no-prompt-question", dataset=[{"text": "a"}])

    some = [*ROWS, {"question": None}, {"question": None}]
    assert "2 rows" in reported("no-prompt-question", dataset=some).message


def test_rows_that_json_cannot_hold_are_reported():
    rows = [{"question": "a", "answer": "b", "info": {"key": object()}}]

    assert reported("row-not-serialisable", dataset=rows)


def test_a_get_dataset_that_changes_itself_is_reported():
    class Shuffling(vf.SingleTurnEnv):
        def get_dataset(self, n=-1, seed=None):
            self.offset = getattr(self, "offset", -1) + 1
            return super().get_dataset(n, seed=self.offset)

    first = reported("get-dataset-not-repeatable", Shuffling, **GOOD)
    assert "get_dataset" in first.place


def test_a_missing_evaluation_set_is_reported_also_when_a_function_returns_the_rows():
    assert warnings_of(check(lambda: single_turn(eval_dataset=None))) == {"eval-set-missing"}
    assert warnings_of(check(lambda: single_turn(eval_dataset=None, dataset=lambda: ROWS))) == {
        "eval-set-missing"
    }


def test_evaluation_rows_that_are_trained_on_are_reported():
    first = reported("train-and-eval-overlap", eval_dataset=EVAL_ROWS + ROWS[:1])

    assert "1 of 5" in first.message


def test_missing_answers_are_reported_only_where_a_function_wants_them():
    rows = [{"question": "say something"}, {"question": "say more"}]

    def length(completion):
        return min(1.0, len(completion[-1]["content"]) / 100)

    assert reported("no-answer-although-a-function-wants-it", dataset=rows)
    assert check(lambda: single_turn(dataset=rows, rubric=Rubric(funcs=[length]))).warnings == ()


def test_two_system_prompts_are_reported():
    prompt = [vf.SystemMessage("Be long."), vf.UserMessage("1 + 1")]
    rows = [{"prompt": prompt, "answer": "2"}]

    def load(rows):
        return lambda: single_turn(dataset=rows, system_prompt="Be brief.")

    assert warnings_of(check(load(rows), n=1)) == {"system-prompt-given-twice"}
    assert check(load(ROWS)).warnings == ()


def test_prompts_over_the_token_bound_are_reported():
    def load(bound):
        return lambda: single_turn(
            dataset=[{"question": "word " * 400, "answer": "1"}], max_seq_len=bound
        )

    assert "about 500" in finding(check(load(100)), "prompts-over-max-seq-len").message
    assert check(load(1000)).warnings == ()


# --- rewards --------------------------------------------------------------------------------------


def test_every_parameter_that_nothing_supplies_is_reported():
    def wants_colour(colour):
        return 1.0

    def wants_sizes(sizes, states):
        return [1.0] * len(states)

    errors = [
        error
        for error in check(
            lambda: single_turn(rubric=Rubric(funcs=[wants_colour, wants_sizes]))
        ).errors
        if error.code == "reward-parameter-that-cannot-be-injected"
    ]

    assert [error.message.split()[2] for error in errors] == ["'wants_colour'", "'wants_sizes'"]
    assert check(lambda: single_turn(dataset=[row | {"colour": "red"} for row in ROWS])).ok


def test_a_reward_function_that_raises_or_returns_no_number_is_reported():
    def first_line(completion, answer):
        return float(completion[-1]["content"].splitlines()[0] == answer)

    def verdict(completion):
        return "good"

    for function in (first_line, verdict):
        first = finding(
            check(lambda f=function: single_turn(rubric=Rubric(funcs=[f]))), "reward-function-fails"
        )
        assert function.__name__ in first.message
        assert "test_check.py" in first.place


def test_a_reward_that_needs_a_key_is_no_fault_of_the_environment():
    def judged(completion):
        raise MissingKeyError("JUDGE_API_KEY is not set", names=["JUDGE_API_KEY"])

    report = check(lambda: single_turn(rubric=Rubric(funcs=[judged, exact])))

    assert report.ok
    assert finding(report, "reward-not-known-here")


def test_a_rubric_without_reward_functions_is_reported():
    rubric = Rubric()
    rubric.add_metric(exact)

    assert warnings_of(check(lambda: single_turn(rubric=rubric))) == {"no-reward-function"}


def test_a_reward_that_is_always_the_same_is_reported():
    assert warnings_of(
        check(lambda: single_turn(rubric=Rubric(funcs=[lambda completion: 0.5])))
    ) == {"constant-reward"}


def test_a_reward_outside_the_usual_range_is_reported():
    report = check(lambda: single_turn(rubric=Rubric(funcs=[exact], weights=[10.0])))

    assert warnings_of(report) == {"reward-outside-range"}
    assert "10" in finding(report, "reward-outside-range").message


def test_plain_text_that_earns_a_format_reward_is_reported():
    class Generous(vf.XMLParser):
        def format_reward(self, completion):
            return 0.2

    def format_ok(completion):
        return 0.2

    of_parser = check(
        lambda: single_turn(parser=Generous(["answer"]), rubric=Rubric(funcs=[exact]))
    )
    of_function = check(lambda: single_turn(rubric=Rubric(funcs=[exact, format_ok])))
    assert finding(of_parser, "plain-text-earns-format-reward")
    assert "format_ok" in finding(of_function, "plain-text-earns-format-reward").message

    strict = vf.XMLParser(["answer"])

    def read(completion, answer, parser):
        return 0.8 * (parser.parse_answer(completion) == answer)

    rubric = Rubric(
        funcs=[read, strict.get_format_reward_func()], weights=[1.0, 0.2], parser=strict
    )
    assert check(lambda: single_turn(parser=strict, rubric=rubric)).warnings == ()


def test_group_functions_get_the_siblings_of_one_example():
    sizes = []

    def best(completions, answers):
        sizes.append(len(completions))
        return [float(c[-1]["content"] == a) for c, a in zip(completions, answers, strict=True)]

    assert check(lambda: single_turn(rubric=Rubric(funcs=[best]))).warnings == ()
    assert 4 in sizes


# --- hooks ----------------------------------------------------------------------------------------


def bent(**methods):
    """``Talk`` with other methods."""
    return type("Bent", (Talk,), methods)


def test_hooks_that_raise_or_return_a_wrong_type_are_reported_with_their_line():
    def raises(self, messages, state):
        raise KeyError("board")

    def number(self, messages, state):
        return 3

    def nothing_said(self, state):
        state["won"] = False

    def text(self, state):
        state["completion"] = 5

    faults = [
        ({"env_response": raises}, "KeyError: 'board'"),
        ({"env_response": number}, "env_response"),
        ({"setup_state": lambda self, state: 3}, "setup_state"),
        ({"won": vf.stop(nothing_said)}, "None"),
        ({"render_completion": text}, "int"),
        ({"get_dataset": lambda self: None}, "get_dataset"),
    ]
    for methods, expected in faults:
        first = finding(
            check(lambda methods=methods: bent(**methods)()), "hook-raises-or-returns-a-wrong-type"
        )
        assert expected in first.message
        assert "test_check.py" in first.place


def test_a_setting_that_stops_every_run_is_reported():
    def setup_state(self, state):
        raise ConfigError("the board needs a size")

    assert (
        "needs a size"
        in finding(
            check(bent(setup_state=setup_state)), "hook-raises-or-returns-a-wrong-type"
        ).message
    )


def test_a_teardown_that_raises_is_reported():
    def end(self):
        raise RuntimeError("not open")

    assert (
        "not open"
        in finding(check(bent(end=vf.teardown(end))), "hook-raises-or-returns-a-wrong-type").message
    )


def test_a_conversation_without_an_end_is_reported():
    first = finding(check(lambda: Talk(max_turns=-1), n=1, timeout_s=60), "stop-never-reached")

    assert "1000 turns" in first.message
    assert check(lambda: Talk(max_turns=5)).ok


def test_a_hook_that_waits_for_ever_is_reported():
    async def env_response(self, messages, state):
        await asyncio.sleep(60)

    first = finding(check(bent(env_response=env_response), timeout_s=0.2), "stop-never-reached")

    assert "env_response" in first.message


def test_a_hook_that_never_gives_the_loop_back_is_reported_with_its_line():
    release = threading.Event()

    def env_response(self, messages, state):
        release.wait(30)
        return "more"

    try:
        started = time.monotonic()
        report = check(bent(env_response=env_response), timeout_s=0.3)
        took = time.monotonic() - started
    finally:
        release.set()

    first = finding(report, "stop-never-reached")
    assert took < 10
    assert "test_check.py" in first.place
    assert "env_response" in first.place


def test_a_reward_function_that_takes_too_long_is_reported():
    release = threading.Event()

    def slow(completion):
        release.wait(30)
        return 1.0

    try:
        report = check(lambda: single_turn(rubric=Rubric(funcs=[slow])), timeout_s=0.2)
    finally:
        release.set()

    assert "scoring" in finding(report, "reward-function-fails").message


def test_a_cleanup_that_does_not_run_is_reported():
    class Board(Talk):
        @vf.cleanup
        def put_away(self, state):
            state["board"] = None

    class Forgets(Board):
        def put_away(self, state):  # without the decorator
            state["board"] = None

    class OwnLoop(Board):
        async def rollout(self, input, client, model, sampling_args=None):
            return await self.init_state(input, client, model, sampling_args)

    assert check(Board).ok
    assert "without the decorator" in reported("cleanup-not-run", Forgets).message
    assert "ran 0 times" in reported("cleanup-not-run", OwnLoop).message


def test_a_stop_condition_overridden_without_its_mark_is_reported():
    class Longer(Talk):
        @vf.stop
        def said_enough(self, state):
            return len(state["trajectory"]) >= 4

        def max_turns_reached(self, state):
            return False

    report = check(Longer)

    assert "max_turns_reached" in finding(report, "hook-without-its-mark").message


def test_a_row_changed_by_a_rollout_is_reported_and_a_changed_copy_is_not():
    def shared(self, state):
        self.train_table[0].row["info"]["seen"] = True

    def copies(self, state):
        state["info"]["seen"] = True

    assert finding(check(bent(setup_state=shared)), "row-changed-by-a-rollout")
    assert check(bent(setup_state=copies)).ok


def test_objects_in_columns_of_the_row_are_reported_and_those_under_own_keys_noted():
    def in_info(self, state):
        state["info"]["game"] = object()

    def own_key(self, state):
        state["game"] = object()

    assert "info.game" in finding(check(bent(setup_state=in_info)), "row-not-serialisable").message
    report = check(bent(setup_state=own_key))
    assert report.ok
    assert any("'game'" in note for note in report.notes)


def test_randomness_between_two_equal_rollouts_is_reported():
    def env_response(self, messages, state):
        return str(random.random())

    def noisy(completion):
        return random.random()

    def seeded(self, messages, state):
        return str(random.Random(f"{state['example_id']}/{state['turn']}").random())

    assert (
        "completion"
        in finding(check(bent(env_response=env_response)), "unseeded-randomness").message
    )
    report = check(lambda: single_turn(rubric=Rubric(funcs=[noisy])))
    assert "reward" in finding(report, "unseeded-randomness").message
    assert check(bent(env_response=seeded)).warnings == ()


def test_a_failure_outside_the_environment_fails_the_rollout_and_the_models_own_doing_does_not():
    class NotScorable(vf.RolloutError):
        """The service is away."""

    def fails(error):
        def env_response(self, messages, state):
            raise error

        return bent(env_response=env_response)

    refused = ScriptedClient([AuthenticationFailed("the key was refused")])
    assert "key was refused" in finding(check(Talk, client=refused), "rollout-fails").message
    assert "NotScorable" in finding(check(fails(NotScorable("away"))), "rollout-fails").message
    assert check(fails(vf.ToolCallError("the model called nonsense"))).ok


# --- the rows of both sets ------------------------------------------------------------------------

FAULTY = [
    *[{"question": "Twice?", "answer": "x"}] * 2,
    {"question": "Both?", "answer": "a"},
    {"question": "Both?", "answer": "b"},
    {"question": "Nothing?", "answer": ""},
    {"question": " ", "answer": "q"},
]
SOUND = [{"question": f"Question {n}?", "answer": f"A{n}"} for n in range(60)]


@pytest.mark.parametrize("which", ["training", "evaluation"])
def test_faults_of_rows_are_found_in_either_set(which):
    def same(completion, answer):
        return float(completion[-1]["content"].strip() == answer)

    sets = {"training": SOUND[:30], "evaluation": SOUND[30:]}
    sets[which] = [*sets[which], *FAULTY]
    env = vf.SingleTurnEnv(
        dataset=sets["training"], eval_dataset=sets["evaluation"], rubric=vf.Rubric([same])
    )
    audit = vf.audit_environment(env, search_steps=0, n=4)
    places = {finding.code: finding.place for finding in (*audit.errors, *audit.warnings)}
    codes = (
        "rows-contradict-each-other",
        "rows-are-repeated",
        "question-is-empty",
        "answer-is-empty",
    )
    assert places == dict.fromkeys(codes, f"the {which} set")
    assert [finding.code for finding in audit.errors] == ["rows-contradict-each-other"]
    check = vf.check_environment(env)
    (missing,) = [f for f in check.warnings if f.code == "no-answer-although-a-function-wants-it"]
    assert missing.place == f"the {which} set"


def test_negative_control_sound_sets_have_no_finding():
    def same(completion, answer):
        return float(completion[-1]["content"].strip() == answer)

    env = vf.SingleTurnEnv(dataset=SOUND[:30], eval_dataset=SOUND[30:], rubric=vf.Rubric([same]))
    audit = vf.audit_environment(env, search_steps=0, n=4)
    assert (audit.errors, audit.warnings) == ((), ())


def test_a_guess_that_is_paid_where_it_is_right_alone_is_no_error():
    """Half of the answers are the same: "always yes" is paid, and never wrongly."""

    def same(completion, answer):
        return 0.9 * float(completion[-1]["content"].strip() == answer)

    rows = [
        {"question": f"Question {n}?", "answer": "yes" if n % 2 else f"A{n}"} for n in range(40)
    ]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([same]))
    audit = vf.audit_environment(env, search_steps=0)
    assert "non-solution-is-paid-partly" not in [f.code for f in (*audit.errors, *audit.warnings)]
    (guess,) = [paid for paid in audit.non_solutions if paid.name == "the most frequent answer"]
    assert guess.reward > 0.2
    assert (guess.share_wrong_paid, guess.unearned) == (0, 0)


def test_negative_control_a_reward_for_every_wrong_reply_is_one():
    def generous(completion, answer):
        return 0.9 if completion[-1]["content"].strip() == answer else 0.4

    rows = [{"question": f"Question {n}?", "answer": f"A{n}"} for n in range(40)]
    audit = vf.audit_environment(
        vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([generous])), search_steps=0, n=4
    )
    assert "non-solution-is-paid-partly" in [finding.code for finding in audit.errors]
