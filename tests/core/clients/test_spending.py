"""Budgets: what is reserved, paid, lost and refused, against a loopback server that
keeps the bill."""

import asyncio
import json
import re

import pytest

import verifiers as vf
from verifiers.clients import RetryPolicy
from verifiers.clients.spending import IMAGE_TOKENS, TEMPLATE_TOKENS, Amount, Budget
from verifiers.storage.journal import Journal, read_journal
from verifiers.testing import Behaviour, FakeServer, ScriptedClient

READ, SAMPLED = 40, 20
PRICES = {"usd_per_million_input_tokens": 10.0, "usd_per_million_output_tokens": 50.0}
COST = (READ * 10.0 + SAMPLED * 50.0) / 1e6
REQUEST = vf.ModelRequest([vf.UserMessage("hello")], "m", sampling_args={"max_tokens": 20})


def counted(request):
    return vf.Response(vf.AssistantMessage("ok"), usage=vf.Usage(READ, SAMPLED))


def client_of(server, **more):
    return vf.as_client(vf.ClientConfig(api_base_url=server.url, **PRICES, **more))


def run(budget, client, count, request=REQUEST):
    """The outcomes of ``count`` concurrent requests within the budget."""

    async def all_of_them():
        with budget.current():
            return await asyncio.gather(
                *(client.complete(request) for _ in range(count)), return_exceptions=True
            )

    return asyncio.run(all_of_them())


def test_a_request_is_reserved_at_its_most_and_paid_at_its_cost():
    with FakeServer(counted) as server:
        budget, client = Budget(max_cost_usd=1.0), client_of(server)
        run(budget, client, 3)
        assert budget.spent == Amount(3 * (READ + SAMPLED), pytest.approx(3 * COST))
        assert (budget.reserved.tokens, budget.num_requests, budget.num_lost) == (0, 3, 0)
        bound = budget.bound(client, REQUEST)
        assert TEMPLATE_TOKENS + 20 < bound.tokens < TEMPLATE_TOKENS + 20 + 200
        assert bound.usd == pytest.approx(((bound.tokens - 20) * 10 + 20 * 50) / 1e6)


def test_the_limit_is_never_exceeded_by_one_request_with_a_thousand_in_flight():
    """As many as fit are sent, and no more; the rest waits until nothing in flight
    can make room."""
    with FakeServer(counted, record=False, delay_s=0.01) as server:
        client = client_of(server)
        limit = 100.5 * (READ + SAMPLED) + TEMPLATE_TOKENS
        budget = Budget(max_total_tokens=int(limit))
        outcomes = run(budget, client, 1000)
        billed = server.count * (READ + SAMPLED)
    refused = [outcome for outcome in outcomes if isinstance(outcome, vf.BudgetExhausted)]
    assert len(refused) + server.count == 1000
    assert budget.spent.tokens == billed <= limit
    assert 90 <= server.count <= 101
    assert "tokens are spent, and the next request may take" in str(refused[0])


def test_without_a_budget_all_thousand_are_sent():
    """Negative control."""
    with FakeServer(counted, record=False) as server:
        client = client_of(server)

        async def all_of_them():
            await asyncio.gather(*(client.complete(REQUEST) for _ in range(1000)))

        asyncio.run(all_of_them())
        assert (
            server.count * (READ + SAMPLED) > 9 * (100.5 * (READ + SAMPLED) + TEMPLATE_TOKENS) / 2
        )


@pytest.mark.parametrize(
    ("behaviour", "lost"),
    [
        (Behaviour(400, body=b'{"error": {"message": "no"}}'), 0),
        (Behaviour(503), 0),
        (Behaviour(429), 0),
        (Behaviour(reset=True), 1),
        (Behaviour(body=b'{"choices": []}'), 1),
        (Behaviour(never=True), 1),
    ],
)
def test_a_refused_attempt_is_free_and_a_lost_one_counts_in_full(behaviour, lost):
    with FakeServer(counted, script=[behaviour]) as server:
        budget = Budget(max_cost_usd=1.0)
        client = vf.OpenAIChatCompletionsClient(
            vf.ClientConfig(api_base_url=server.url, timeout=0.2, **PRICES),
            retry=RetryPolicy(max_retries=0),
        )
        (outcome,) = run(budget, client, 1)
        assert isinstance(outcome, vf.ModelError)
        full = budget.bound(client, REQUEST)
    assert (budget.num_lost, budget.spent) == (lost, full if lost else Amount(0, 0.0))
    assert budget.reserved == Amount(0, pytest.approx(0.0))


def test_every_attempt_of_a_repeated_request_is_reserved_anew():
    with FakeServer(counted, script=[Behaviour(reset=True), Behaviour(503)]) as server:
        budget = Budget(max_cost_usd=1.0)
        client = vf.OpenAIChatCompletionsClient(
            vf.ClientConfig(api_base_url=server.url, **PRICES),
            retry=RetryPolicy(max_retries=3, base_s=0.001),
        )
        run(budget, client, 1)
        assert (budget.num_requests, budget.num_lost) == (3, 1)
        assert budget.spent == budget.bound(client, REQUEST) + Amount(READ + SAMPLED, COST)


def test_a_response_without_counts_counts_in_full():
    with FakeServer("ok") as server:
        budget, client = Budget(max_total_tokens=5000), client_of(server)
        run(budget, client, 1)
        assert (budget.spent.tokens, budget.num_lost) == (budget.bound(client, REQUEST).tokens, 1)


def test_a_cancelled_wait_gives_its_place_back():
    async def scenario():
        budget = Budget(max_total_tokens=100)
        first = await budget.reserve(Amount(80))
        waiting = [asyncio.ensure_future(budget.reserve(Amount(60))) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        await budget.settle(first, Amount(10))
        second = await waiting[1]
        await budget.settle(second, Amount(60))
        assert (budget.spent.tokens, budget.reserved.tokens) == (70, 0)
        with pytest.raises(vf.BudgetExhausted):
            await budget.reserve(Amount(31))

    asyncio.run(scenario())


def request_with(content="hi", **sampling_args):
    return vf.ModelRequest([{"role": "user", "content": content}], "m", sampling_args=sampling_args)


IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200_000}}
NO_IMAGE = {"type": "image_url", "image_url": {"url": "data:video/mp4;base64,AA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}


@pytest.mark.parametrize(
    ("request_", "kind", "because"),
    [
        (request_with(), vf.RunError, "has no max_tokens"),
        (request_with(max_tokens=0), vf.RunError, "has no max_tokens"),
        (request_with([{"type": "video"}], max_tokens=5), vf.ModelRefused, "has audio, or another"),
        (request_with([AUDIO], max_tokens=5), vf.ModelRefused, "has audio, or another"),
        (request_with([NO_IMAGE], max_tokens=5), vf.ModelRefused, "has audio, or another"),
        (request_with(max_tokens=-90_000_000), vf.ModelRefused, "has max_tokens=-90000000"),
        (request_with(max_tokens=5.5), vf.ModelRefused, "has max_tokens=5.5"),
        (
            request_with(max_tokens=5, extra_body={"max_completion_tokens": -1}),
            vf.ModelRefused,
            "has max_completion_tokens=-1",
        ),
        (
            request_with(max_tokens=5, extra_body={"extra_body": {"max_tokens": 10**9}}),
            vf.ModelRefused,
            "has an extra_body within its extra_body",
        ),
        (request_with(max_tokens=5, extra_body={"n": 50}), vf.ConfigError, "n'.=50 is not supp"),
    ],
)
def test_a_request_without_a_bound_is_refused_before_it_is_sent(request_, kind, because):
    """What it holds is its own fault; a limit that is not set is the run's."""
    budget = Budget(max_total_tokens=10**6)
    with FakeServer(counted) as server:
        (outcome,) = run(budget, client_of(server), 1, request_)
        assert server.count == 0
    assert (type(outcome), budget.reserved.tokens) == (kind, 0)
    assert re.search(because, str(outcome))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "best_of"])
def test_what_extra_body_sends_is_bounded(name):
    budget = Budget(max_total_tokens=10**9)
    with FakeServer(counted) as server:
        bound = budget.bound(
            client_of(server), request_with(max_tokens=1000, extra_body={name: 5000})
        )
    sampled = 1000 * 5000 if name == "best_of" else 5000
    assert sampled < bound.tokens < sampled + 2 * TEMPLATE_TOKENS


def test_a_request_far_larger_than_the_others_is_refused_alone():
    """Without others before it, too. And the control: if none fits, the limit is too small, and the
    run ends."""
    huge = request_with("x" * 100_000, max_tokens=20)
    with FakeServer(counted) as server:
        client, budget = client_of(server), Budget(max_total_tokens=50_000)
        run(budget, client, 5)
        (outcome,) = run(budget, client, 1, huge)
        assert type(outcome) is vf.ModelRefused
        assert re.search("may take 100,[0-9]+ tokens, more than is left", str(outcome))
        (outcome,) = run(budget, client, 1)
        assert outcome.text == "ok"
        (alone,) = run(Budget(max_total_tokens=50_000), client, 1, huge)
        assert type(alone) is vf.ModelRefused
        assert re.search("may take 100,[0-9]+ tokens, more than is left", str(alone))
        (alone,) = run(Budget(max_total_tokens=500), client, 1, huge)
        assert type(alone) is vf.BudgetExhausted


@pytest.mark.parametrize("max_tokens", [20, 8192])
@pytest.mark.parametrize("num_before", [0, 1])
def test_a_request_above_the_whole_limit_never_ends_the_run(max_tokens, num_before):
    with FakeServer(counted) as server:
        client, budget = client_of(server), Budget(max_total_tokens=100_000)
        run(budget, client, num_before, request_with(max_tokens=max_tokens))
        (outcome,) = run(budget, client, 1, request_with("x" * 200_000, max_tokens=max_tokens))
        assert type(outcome) is vf.ModelRefused
        (outcome,) = run(budget, client, 1, request_with(max_tokens=max_tokens))
        assert outcome.text == "ok"


def test_an_image_counts_at_its_most_and_not_by_its_bytes():
    with FakeServer(counted) as server:
        client, budget = client_of(server), Budget(max_total_tokens=200_000)
        text = budget.bound(client, request_with("look", max_tokens=20)).tokens
        for parts in ([IMAGE], [PICTURE], [PICTURE, IMAGE]):
            content = [{"type": "text", "text": "look"}, *parts]
            bound = budget.bound(client, request_with(content, max_tokens=20)).tokens
            assert 0 < bound - text - len(parts) * IMAGE_TOKENS < 300
        (outcome,) = run(budget, client, 1, request_with(content, max_tokens=20))
        assert outcome.text == "ok"
        assert budget.spent.tokens == READ + SAMPLED


def test_a_model_without_a_price_is_refused_unless_the_list_has_it():
    with FakeServer(counted) as server:
        unpriced = vf.as_client(vf.ClientConfig(api_base_url=server.url))
        (outcome,) = run(Budget(max_cost_usd=1.0), unpriced, 1)
        assert "'m' at 'http://127.0.0.1" in str(outcome)
        assert "has no price" in str(outcome)
        listed = Budget(max_cost_usd=1.0, prices={"m": (10.0, 50.0)})
        run(listed, unpriced, 1)
        assert listed.spent.usd == pytest.approx(COST)
        tokens_only = Budget(max_total_tokens=10_000)
        run(tokens_only, unpriced, 1)
        assert tokens_only.spent == Amount(READ + SAMPLED, 0.0)


def test_an_sdk_object_is_metered_too():
    import openai

    with FakeServer(counted) as server:
        sdk = openai.OpenAI(base_url=server.url, api_key="k")
        adapted = vf.as_client(
            openai.AsyncOpenAI(base_url=server.url, api_key="k", default_query={"a": "b"})
        )
        for client in (vf.as_client(sdk), adapted):
            budget = Budget(max_total_tokens=10_000)
            run(budget, client, 2)
            assert budget.spent.tokens == 2 * (READ + SAMPLED)


def test_what_other_runs_have_spent_of_a_limit_is_no_fault_of_a_request():
    """And the control: were their remainder the limit, the request would be above all of it."""
    with FakeServer(counted) as server:
        client = client_of(server)
        bound = Budget().bound(client, REQUEST).tokens
        limit, left = 10 * bound, bound - 1
        shared = Budget(max_total_tokens=limit, elsewhere=Amount(limit - left))
        (outcome,) = run(shared, client, 1)
        assert (type(outcome), outcome.limit) == (vf.BudgetExhausted, "max_total_tokens")
        assert f"{limit - left:,} of {limit:,} tokens are spent" in str(outcome)
        (outcome,) = run(Budget(max_total_tokens=left), client, 1)
        assert type(outcome) is vf.ModelRefused
        assert server.count == 0


# --- ledger ---------------------------------------------------------------------------------------


def test_the_ledger_has_the_reservation_before_the_request_and_its_cost_after(tmp_path):
    seen = []

    def reply(request):
        seen.append([row for row in read_journal(tmp_path / "spending.jsonl")])
        return counted(request)

    with FakeServer(reply) as server, Journal.open(tmp_path / "spending.jsonl") as ledger:
        budget, client = Budget(max_cost_usd=1.0), client_of(server)
        budget.record_in(ledger)
        run(budget, client, 1)
        bound = budget.bound(client, REQUEST)
    assert seen == [[{"reserve": 0, "tokens": bound.tokens, "usd": pytest.approx(bound.usd)}]]
    rows = list(read_journal(tmp_path / "spending.jsonl"))
    assert rows[1] == {"settle": 0, "tokens": READ + SAMPLED, "usd": pytest.approx(COST)}
    again = Budget(max_cost_usd=1.0)
    again.read(rows)
    assert again.spent == Amount(READ + SAMPLED, pytest.approx(COST))
    killed = Budget(max_cost_usd=1.0)
    killed.read(rows[:1])
    assert (killed.spent, killed.num_lost) == (bound, 1)


def test_numbers_of_reservations_are_unique_over_sessions(tmp_path):
    async def session():
        budget = Budget(max_total_tokens=1000)
        entries = []
        with Journal.open(tmp_path / "spending.jsonl", entries.append) as ledger:
            budget.record_in(ledger)
            budget.read(entries)
            await budget.settle(await budget.reserve(Amount(10)), Amount(4))
        return budget.spent.tokens

    assert [asyncio.run(session()) for _ in range(3)] == [4, 8, 12]
    numbers = [
        row["reserve"] for row in read_journal(tmp_path / "spending.jsonl") if "reserve" in row
    ]
    assert numbers == [0, 1, 2]


# --- runs -----------------------------------------------------------------------------------------


def environment(num_rows=400, **more):
    rows = [{"question": f"row {n}", "answer": str(n)} for n in range(num_rows)]
    return vf.SingleTurnEnv(
        eval_dataset=rows, rubric=more.pop("rubric", vf.Rubric([lambda completion: 1.0])), **more
    )


def evaluate(client, path, **options):
    defaults = {"num_examples": -1, "results_path": path, "max_tokens": 20, "max_concurrent": 50}
    return environment(**options.pop("env", {})).evaluate(client, "m", **{**defaults, **options})


def test_a_run_ends_at_its_limit_and_continues_with_a_higher_one(tmp_path):
    with FakeServer(counted, record=False) as server:
        client = client_of(server)
        with pytest.raises(
            vf.BudgetExhausted, match="Finished rollouts are saved: raise the limit"
        ):
            evaluate(client, tmp_path / "run", max_cost_usd=0.2)
        first = server.count
        assert 0.2 - 0.02 < first * COST <= 0.2
        assert len(vf.load_results(tmp_path / "run")) == first
        with pytest.raises(vf.BudgetExhausted):
            evaluate(client, tmp_path / "run", max_cost_usd=0.2)
        assert server.count == first
        results = evaluate(client, tmp_path / "run", max_cost_usd=10.0)
        assert server.count == 400
    assert results.metadata.spent["usd"] == pytest.approx(400 * COST)
    assert results.metadata.cost_usd == pytest.approx(400 * COST)


def test_judges_are_metered_by_their_own_prices(tmp_path):
    with FakeServer(counted, record=False) as server, FakeServer(judged, record=False) as judges:
        judge = vf.JudgeRubric(
            judge_client=vf.ClientConfig(
                api_base_url=judges.url, **{name: 100.0 for name in PRICES}
            ),
            judge_models=["j"],
            judge_sampling_args={"max_tokens": 10},
        )
        results = evaluate(
            client_of(server), None, max_cost_usd=1.0, env={"rubric": judge, "num_rows": 5}
        )
        assert results.metadata.spent["usd"] == pytest.approx(5 * (COST + 60 * 100 / 1e6))
        with pytest.raises(vf.BudgetExhausted, match="Nothing is saved: raise the limit"):
            evaluate(client_of(server), None, max_cost_usd=0.5, env={"rubric": judge})
        assert judges.count * 60 * 100 / 1e6 <= 0.5


def judged(request):
    return vf.Response(vf.AssistantMessage("<score>5</score>"), usage=vf.Usage(50, 10))


def test_a_judge_that_is_not_metered_ends_the_run_instead_of_spending():
    judge = vf.JudgeRubric(judge_client=ScriptedClient("<score>5</score>"), judge_models=["j"])
    with (
        FakeServer(counted) as server,
        pytest.raises(vf.RunError, match="ScriptedClient sends its requests itself"),
    ):
        evaluate(
            client_of(server), None, max_total_tokens=10**6, env={"rubric": judge, "num_rows": 2}
        )


def test_a_run_that_began_without_a_limit_counts_what_it_spent_before(tmp_path):
    with FakeServer(counted, record=False) as server:
        client = client_of(server)
        evaluate(client, tmp_path / "run", num_examples=100)
        results = evaluate(client, tmp_path / "run", num_examples=110, max_cost_usd=1.0)
        assert results.metadata.spent["usd"] == pytest.approx(110 * COST)
        # without a limit it is still recorded
        later = evaluate(client, tmp_path / "run", num_examples=120)
        assert later.metadata.spent["usd"] == pytest.approx(120 * COST)
    assert json.loads((tmp_path / "run/metadata.json").read_text())["spent"]["requests"] == 20


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"max_cost_usd": 0}, "above 0"),
        ({"max_cost_usd": 1.0, "num_workers": 2}, "num_workers=0"),
        ({"max_total_tokens": 10**6, "max_tokens": None}, "each request: set max_tokens"),
    ],
)
def test_limits_that_cannot_hold_are_refused_before_anything_is_written(tmp_path, options, because):
    with FakeServer(counted) as server, pytest.raises(vf.ConfigError, match=because):
        evaluate(client_of(server), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_client_of_its_own_or_without_prices_is_refused(tmp_path):
    with pytest.raises(vf.ConfigError, match="ScriptedClient, which sends its requests itself"):
        evaluate(ScriptedClient("x"), tmp_path / "run", max_total_tokens=10)
    with (
        FakeServer(counted) as server,
        pytest.raises(vf.ConfigError, match="needs the prices of 'm'"),
    ):
        evaluate(vf.ClientConfig(api_base_url=server.url), tmp_path / "run", max_cost_usd=1.0)
    assert not (tmp_path / "run").exists()
