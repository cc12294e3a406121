"""``vf-eval --max-cost`` and ``--max-total-tokens``, and the table over several runs."""

import re

import pytest

import verifiers as vf
from support.eval_command import last_word
from verifiers.testing import FakeServer

PRICES = "usd_per_million_input_tokens = 2.0\nusd_per_million_output_tokens = 8\n"
COST = (100 * 2 + 50 * 8) / 1e6


def counted(request):
    return vf.Response(vf.AssistantMessage(last_word(request)), usage=vf.Usage(100, 50))


@pytest.fixture
def server(eval_folder):
    with FakeServer(counted, models=["m"]) as server:
        entry = f'[[endpoint]]\nendpoint_id = "mine"\nmodel = "m"\nurl = "{server.url}"\n{PRICES}'
        (eval_folder / "e.toml").write_text(entry)
        yield server


TOY = ("toy", "-e", "e.toml", "-m", "mine", "-r", "1", "-t", "50", "-A")
MANY = ("-n", "-1", "-a", '{"num_rows": 60}')


def test_the_command_ends_at_the_limit_says_how_to_continue_and_does(vf_eval, server):
    stopped = vf_eval(*TOY, *MANY, "--max-cost", "0.02")
    assert stopped.code == 3
    assert "(max_cost_usd, --max-cost). Finished rollouts are saved: raise the limit" in " ".join(
        stopped.err.split()
    )
    assert "to resume: vf-eval toy" in stopped.err
    assert 0.017 < server.count * COST <= 0.02
    resumed = vf_eval(*TOY, *MANY, "--max-cost", "0.1")
    assert (resumed.code, server.count) == (0, 60)
    assert re.search(
        r"spent +\$0\.0360 and 9,000 tokens of at most \$0\.1, in 60 requests\n", resumed.out
    )


def test_prices_are_given_by_a_flag_or_known_at_the_vendors_own_endpoint(
    vf_eval, server, monkeypatch
):
    words = ("toy", "-m", "m", "-b", server.url, "-n", "2", "-r", "1", "-t", "50", "-A")
    priced = vf_eval(*words, "--price", "2,8", "--max-cost", "1")
    assert priced.code == 0
    assert re.search(r"cost +\$0\.0012", priced.out)
    assert vf_eval(*words, "--max-cost", "1").code == 2  # negative control: no price
    assert "must be two numbers, the prices" in vf_eval(*words, "--price", "2").err
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    listed = vf_eval("toy", "-m", "gpt-4.1-mini", "-t", "50", "--max-cost", "1", "--dry-run")
    assert listed.code == 0
    assert "$0.4 and $1.6 per million tokens" in " ".join(listed.err.split())
    unknown = vf_eval("toy", "-m", "gpt-nope", "-t", "50", "--max-cost", "1", "--dry-run")
    assert "per million" not in unknown.err


def test_a_limit_of_tokens_needs_no_price(vf_eval, server):
    ran = vf_eval(
        "toy",
        "-b",
        server.url,
        "-m",
        "m",
        "-r",
        "1",
        "-t",
        "50",
        *MANY,
        "--max-total-tokens",
        "5000",
    )
    assert ran.code == 3
    assert server.count * 150 <= 5000
    assert "of 5,000 tokens are spent" in " ".join(ran.err.split())


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (("toy", "-e", "e.toml", "-m", "mine", "--max-cost", "1"), "set max_tokens (-t)"),
        ((*TOY, "--max-cost", "0"), "--max-cost must be a number above 0, not 0"),
        ((*TOY, "--max-cost", "1", "-w", "2"), "run with num_workers=0"),
        ((*TOY, "-b", "http://127.0.0.1:1/v1", "--max-cost", "1"), "needs the prices of 'm'"),
    ],
)
def test_limits_that_cannot_hold_are_refused_before_the_first_request(
    vf_eval, server, words, because
):
    ran = vf_eval(*words)
    assert (ran.code, server.count) == (2, 0)
    assert because in ran.paragraph


# --- several runs ---------------------------------------------------------------------------------


def test_several_runs_end_with_a_table_of_what_varied(vf_eval, server, eval_folder):
    (eval_folder / "sweep.toml").write_text(
        'endpoints_path = "e.toml"\nmodel = "mine"\nnum_examples = 4\nrollouts_per_example = 2\n'
        '[[ablation]]\nenv_id = "toy"\n[ablation.sweep]\ntemperature = [0.0, 0.5]\n'
    )
    ran = vf_eval("@", "sweep.toml", "-A")
    heading, *rows, total = ran.out.rstrip().splitlines()[-4:]
    assert (
        heading.split()
        == "temperature state reward ± standard error rollouts errors tokens cost time".split()
    )
    assert [row.split()[:8] for row in rows] == [
        ["0.0", "complete", "1.000", "±", "0.000", "8", "0", "1,200"],
        ["0.5", "complete", "1.000", "±", "0.000", "8", "0", "1,200"],
    ]
    assert [row.split()[8] for row in rows] == ["$0.0048", "$0.0048"]
    assert total.split()[:2] == ["total", "$0.0096"]
    printed = vf_eval("toy", "-e", "e.toml", "-m", "mine", "-A").out
    assert printed.count("standard error") == 2  # of the reward and of the share of solved rollouts
    assert "reward ± standard error" not in printed  # no table


def test_a_cost_that_one_run_lacks_makes_the_total_unknown():
    from verifiers.cli.evaluate.summary import table_rows

    run = {"avg_reward": None, "reward_stderr": None, "num_rollouts": 3, "num_errors": 1,
           "usage": {"input_tokens": 10, "judge_input_tokens": 5, "final_input_tokens": 9}, "cost_usd": 0.5,
           "seconds": 75.0}  # fmt: skip
    labels = [{"env_id": name, "model": "m"} for name in "ab"]
    rows = table_rows([run, {**run, "cost_usd": None, "usage": {}}], labels)
    assert rows == [
        ["env_id", "reward ± standard error", "rollouts", "errors", "tokens", "cost", "time"],
        ["a", "unknown", "3", "1", "15", "$0.50", "1 min 15 s"],
        ["b", "unknown", "3", "1", "not reported", "unknown", "1 min 15 s"],
        ["total", "", "", "", "", "unknown", "2 min 30 s"],
    ]
