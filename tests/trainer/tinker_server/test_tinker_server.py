"""The server, over HTTP, as a client meets it."""

from __future__ import annotations

import json
import shutil
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from support.tinker_client import Refused, TinkerSession, datum, weighted
from verifiers.errors import ConfigError, RunBusy
from verifiers_trainer.engines.http.endpoint import Address
from verifiers_trainer.policy.builtin_models import build_tiny_model
from verifiers_trainer.tinker_server import sampler as sampler_module
from verifiers_trainer.tinker_server import service as service_module
from verifiers_trainer.tinker_server.loading import open_service
from verifiers_trainer.tinker_server.server import TinkerServer

BASE = "builtin:tiny"
TEXTS = [[5, 9, 3, 8, 30, 31], [7, 2, 40, 41, 42]]


@contextmanager
def serving(folder, key="", **options):
    service = open_service(BASE, folder, **options)
    server = TinkerServer(service, Address(api_key=key))
    try:
        service.start()
        server.start()
        yield server
    finally:
        server.stop()
        service.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server") / "run") as server:
        yield server


@pytest.fixture
def session(server):
    return TinkerSession(server.base_url)


def train(session, model, steps=2, seed=0):
    """What each step gave; two passes to a step."""
    results = []
    for step in range(steps):
        text = np.random.default_rng([seed, step]).integers(4, 60, 9).tolist()
        promises = [
            session.train(model, weighted(text)),
            session.train(model, weighted(text[:5])),
            session.step(model),
        ]
        results.append([session.result(promise) for promise in promises])
    return results


def weights_of(server, session, model, name="saved"):
    path = session.result(session.save(model, name))["path"]
    folder = server._service.store.existing(path)
    return load_file(folder / "adapter_model.safetensors") | load_file(
        folder / "optimizer.safetensors"
    )


def are_equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_model_is_trained_and_sampled(server, session):
    model = session.create(BASE, rank=4, seed=2)
    info = session.post("get_info", model_id=model)
    assert (info["is_lora"], info["lora_rank"], info["model_name"]) == (True, 4, BASE)
    first, *_, last = [
        session.result(session.train(model, *map(weighted, TEXTS)))["metrics"]["loss:sum"]
        for _ in range(6)
        if session.result(session.train(model, *map(weighted, TEXTS)))
        and session.result(session.step(model))
    ]
    assert last < first - 1
    trained, base = session.sampler(model), session.sampler(base_model=BASE)
    asked = {"prompt_logprobs": True, "num_samples": 2, "sampling_params": {"stop": []}}
    after = session.result(session.sample(trained, TEXTS[0], **asked))
    before = session.result(session.sample(base, TEXTS[0], **asked))
    assert sum(after["prompt_logprobs"][1:]) > sum(before["prompt_logprobs"][1:]) + 1
    assert [len(each["tokens"]) for each in after["sequences"]] == [4, 4]
    # the trainer says the same of what was sampled as the sampler
    sequence = after["sequences"][0]
    text = TEXTS[0] + sequence["tokens"]
    passed = session.result(session.train(model, weighted(text)))
    logprobs = passed["loss_fn_outputs"][0]["logprobs"]["data"]
    assert sequence["logprobs"] == pytest.approx(logprobs[len(TEXTS[0]) - 1 :], abs=1e-4)


def test_two_models_trained_in_turns_equal_two_separate_runs(server, session):
    alone = []
    for seed in (1, 2):
        model = session.create(BASE, seed=seed)
        train(session, model, 3, seed)
        alone.append(weights_of(server, session, model))
    models = [session.create(BASE, seed=seed) for seed in (1, 2)]
    other = TinkerSession(server.base_url)
    threads = [
        threading.Thread(target=train, args=(session, models[0], 3, 1)),
        threading.Thread(target=train, args=(session, models[1], 3, 2)),
    ]
    # samples of a third client in between
    busy = other.sampler(base_model=BASE)
    promises = [other.sample(busy, TEXTS[0], 40) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for promise in promises:
        other.result(promise)
    together = [weights_of(server, session, model, "both") for model in models]
    assert are_equal(together[0], alone[0])
    assert are_equal(together[1], alone[1])
    assert not are_equal(together[0], together[1])


def test_with_one_row_samples_do_not_depend_on_other_clients(tmp_path):
    with serving(tmp_path / "run", max_rows=1) as server:
        session = TinkerSession(server.base_url)
        model = session.create(BASE)
        train(session, model, 1)
        mine, base = session.sampler(model), session.sampler(base_model=BASE)
        params = {"sampling_params": {"seed": 5}}
        alone = session.result(session.sample(mine, TEXTS[0], 12, **params))
        promises = [session.sample(base, text, 12) for text in TEXTS for _ in range(3)]
        promises.insert(3, session.sample(mine, TEXTS[0], 12, **params))
        assert session.result(promises[3]) == alone


def test_rows_of_several_models_decode_together(server, session):
    models = [session.create(BASE, seed=seed) for seed in (1, 2)]
    for seed, model in enumerate(models):
        train(session, model, 1, seed)
    samplers = [session.sampler(model) for model in models]
    params = {"sampling_params": {"stop": []}}
    promises = [session.sample(each, TEXTS[0], 60, **params) for each in samplers]
    for promise in promises:
        session.result(promise)
    assert server._service.sampler.most_adapters >= 2


def test_log_probabilities_are_of_the_model_at_any_temperature(session):
    base = session.sampler(base_model=BASE)
    params = {"sampling_params": {"temperature": 0.3, "top_k": 5, "seed": 1}}
    sequence = session.result(session.sample(base, TEXTS[0], 6, **params))["sequences"][0]
    text = TEXTS[0] + sequence["tokens"]
    scored = session.result(session.sample(base, text, 1, prompt_logprobs=True))
    assert sequence["logprobs"] == pytest.approx(
        scored["prompt_logprobs"][len(TEXTS[0]) :], abs=1e-5
    )


def test_stops(session):
    base = session.sampler(base_model=BASE)
    params = {"seed": 3, "stop": []}
    whole = session.result(session.sample(base, TEXTS[0], 12, sampling_params=params))
    tokens = whole["sequences"][0]["tokens"]
    assert (len(tokens), whole["sequences"][0]["stop_reason"]) == (12, "length")
    stopped = session.result(
        session.sample(base, TEXTS[0], 12, sampling_params=params | {"stop": [tokens[4]]})
    )["sequences"][0]
    assert stopped["stop_reason"] == "stop"
    assert stopped["tokens"] == tokens[: tokens.index(tokens[4]) + 1]


def test_a_sampling_client_keeps_its_weights_and_an_inflight_one_does_not(session):
    model = session.create(BASE)
    train(session, model, 1)
    fixed, moving = session.sampler(model), session.sampler(model, kind="inflight")

    def score(sampler):
        promise = session.sample(sampler, TEXTS[0], 1, prompt_logprobs=True)
        return session.result(promise)["prompt_logprobs"][1:]

    before = score(fixed)
    assert score(moving) == pytest.approx(before, abs=1e-5)
    train(session, model, 1, seed=4)
    assert score(moving) == pytest.approx(before, abs=1e-5)
    session.sampler(model, kind="inflight")
    assert score(fixed) == pytest.approx(before, abs=1e-5)
    assert score(moving) != pytest.approx(before, abs=1e-3)


def test_a_checkpoint_continues_with_its_optimizer(server, session):
    model = session.create(BASE)
    train(session, model, 2, 1)
    path = session.result(session.save(model, "half", user_metadata={"a": "b"}))["path"]
    train(session, model, 1, 7)
    whole = weights_of(server, session, model)
    with_optimizer, without = session.restore(path), session.restore(path, optimizer=False)
    for each in (with_optimizer, without):
        train(session, each, 1, 7)
    assert are_equal(weights_of(server, session, with_optimizer), whole)
    assert not are_equal(weights_of(server, session, without), whole)
    listed = session.get(f"training_runs/{model}/checkpoints")["checkpoints"]
    assert [each["checkpoint_id"] for each in listed] == ["weights/half", "weights/saved"]
    assert listed[0]["user_metadata"] == {"a": "b"}
    run = session.get(f"training_runs/{model}")
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/saved"
    described = session.post("weights_info", tinker_path=path)
    assert (described["lora_rank"], described["train_mlp"]) == (4, True)
    session.request("DELETE", f"training_runs/{model}/checkpoints/weights/half")
    with pytest.raises(Refused, match="there are no weights"):
        session.restore(path)


def test_a_name_is_not_written_over(session):
    model = session.create(BASE)
    train(session, model, 1)
    session.result(session.save(model, "a"))
    assert "is there already" in session.result(session.save(model, "a"))["error"]
    assert "error" not in session.result(session.save(model, "a", overwrite=True))


def test_checkpoints_expire(server, session):
    model = session.create(BASE)
    session.result(session.save(model, "a", ttl_seconds=3600))
    path = f"training_runs/{model}/checkpoints"
    (listed,) = session.get(path)["checkpoints"]
    assert listed["expires_at"] > listed["time"]
    session.request("PUT", f"{path}/weights/a/ttl", json.dumps({"ttl_seconds": 1}).encode())
    time.sleep(2.1)
    assert session.get(path)["checkpoints"] == []


def test_an_adapter_is_taken_out_to_peft_and_brought_in_again(server, session, tmp_path):
    model = session.create(BASE)
    train(session, model, 2)
    path = session.result(session.save(model, "out", "_external"))["path"]
    name = path.removeprefix("tinker://").split("/", 1)[1]
    urls = session.get(f"training_runs/{model}/checkpoints/{name}/external_weights_urls")["urls"]
    folder = tmp_path / "adapter"
    folder.mkdir()
    for file, url in urls.items():
        (folder / file).write_bytes(
            TinkerSession(server.base_url).request("GET", url.split("/api/v1/")[1])[0]
        )
    peft = PeftModel.from_pretrained(build_tiny_model(), str(folder)).eval()
    with torch.no_grad():
        logp = peft(torch.tensor([TEXTS[0]])).logits[0, :-1].log_softmax(-1)
    theirs = logp.gather(-1, torch.tensor(TEXTS[0][1:])[:, None])[:, 0].tolist()

    def score(sampler):
        promise = session.sample(sampler, TEXTS[0], 1, prompt_logprobs=True)
        return session.result(promise)["prompt_logprobs"][1:]

    assert score(session.sampler(model)) == pytest.approx(theirs, abs=1e-4)
    # a folder that peft writes, put into the run folder
    brought = server._service.store.folder / "models/mine/weights/theirs"
    peft.peft_config["default"].base_model_name_or_path = "base"
    peft.save_pretrained(str(brought))
    again = session.restore("tinker://mine/weights/theirs")
    assert score(session.sampler(again)) == pytest.approx(theirs, abs=1e-4)
    train(session, again, 1)


def test_the_address_of_a_file_is_its_key(server, session):
    model = session.create(BASE)
    session.result(session.save(model, "out", "_external"))
    path = f"files/{model}/external_weights/out/adapter_config.json"
    for query in ("", "?until=99999999999&token=0", "?until=x&token=0"):
        with pytest.raises(Refused) as refused:
            session.request("GET", path + query)
        assert refused.value.status == 403


def test_a_failed_pass_leaves_no_half_gradient(server, session):
    model = session.create(BASE)
    before = weights_of(server, session, model, "before")
    session.result(session.train(model, weighted(TEXTS[0])))
    wrong = session.result(session.train(model, datum(TEXTS[1], weights=[1.0])))
    assert wrong["category"] == "user"
    assert "one number for each token" in wrong["error"]
    refused = session.result(session.step(model))
    assert "request 3 failed" in refused["error"]
    assert are_equal(weights_of(server, session, model, "after"), before)
    train(session, model, 1)


def test_requests_are_computed_in_their_order_and_once(server, session):
    model = session.create(BASE)
    late = session.send_pass(model, 2, weighted(TEXTS[1]))
    with pytest.raises(Refused) as refused:
        session.post("optim_step", model_id=model, seq_id=3, adam_params={}, momentum=1)
    assert refused.value.status == 400
    first = session.send_pass(model, 1, weighted(TEXTS[0]))
    again = session.send_pass(model, 1, weighted(TEXTS[0]))
    assert again == first
    session._sequences[model] = 2
    step = session.result(session.step(model))
    session.result(late)
    reference = session.create(BASE)
    for text in TEXTS:
        session.result(session.train(reference, weighted(text)))
    expected = session.result(session.step(reference))
    assert step["metrics"]["grad_norm"] == expected["metrics"]["grad_norm"]


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("create_model", {"base_model": "other"}, 404, "this server has builtin:tiny"),
        ("create_model", {"lora_config": None}, 400, "lora_config is missing"),
        ("create_model", {"optimizer_config": {"type": "muon"}}, 400, "use adamw"),
        ("create_model", {"session_id": "s-0"}, 404, "no session"),
        ("optim_step", {"model_id": "x", "adam_params": {}}, 404, "no model 'x'"),
        ("load_weights", {"path": "tinker://../weights/a"}, 400, "is no name"),
        ("load_weights", {"path": "tinker://a/weights/.."}, 400, "is no name"),
        ("load_weights", {"path": "tinker://a/other/b"}, 400, "no path of weights"),
        ("load_weights", {"path": "tinker://a/weights/b"}, 404, "there are no weights"),
        ("retrieve_future", {"request_id": "a:b:1"}, 410, "not known any more"),
        ("nothing", {}, 404, "Not Found"),
        ("healthz", {}, 405, "Method Not Allowed"),
    ],
)
def test_what_cannot_be_served_is_refused(session, path, body, status, sentence):
    if path == "create_model":
        whole = {"session_id": session.session_id, "model_seq_id": 9, "base_model": BASE}
        body = whole | {"lora_config": {"rank": 4}} | body
    with pytest.raises(Refused, match=sentence) as refused:
        session.post(path, **body)
    assert refused.value.status == status


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"num_samples": 0}, "num_samples=0"),
        ({"sampling_params": {"temperature": -1}}, "temperature=-1"),
        ({"sampling_params": {"top_p": 0}}, "top_p=0"),
        ({"sampling_params": {"stop": [""]}}, "empty text"),
        ({"topk_prompt_logprobs": 50}, "topk_prompt_logprobs=50"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not served"),
        ({"ids": []}, "0 tokens"),
        ({"ids": [10**6]}, "token id"),
        ({"ids": [5] * 5000}, "5000 tokens"),
    ],
)
def test_samples_that_cannot_be_drawn_are_refused(session, more, sentence):
    sampler = session.sampler(base_model=BASE)
    with pytest.raises(Refused, match=sentence) as refused:
        session.sample(sampler, more.pop("ids", TEXTS[0]), **more)
    assert refused.value.status == 400


def test_the_key_is_asked_for(tmp_path):
    with serving(tmp_path / "run", key="tml-a") as server:
        for key in ("", "tml-b"):
            with pytest.raises(Refused) as refused:
                TinkerSession(server.base_url, key)
            assert refused.value.status == 401
        session = TinkerSession(server.base_url, "tml-a")
        session.create(BASE)
        session.key = ""
        assert session.get("healthz") == {"status": "ok"}


def test_long_bodies_and_long_queues_are_refused(tmp_path, monkeypatch):
    with serving(tmp_path / "run") as server:
        refuses_long_bodies_and_queues(server, TinkerSession(server.base_url), monkeypatch)


def refuses_long_bodies_and_queues(server, session, monkeypatch):
    monkeypatch.setattr(server, "max_body_bytes", 10_000)
    model = session.create(BASE)
    with pytest.raises(Refused, match="longer than") as refused:
        session.train(model, *[weighted([5] * 400)] * 8)
    assert refused.value.status == 413
    monkeypatch.setattr(service_module, "MAX_REQUESTS", 3)
    session._sequences[model] = 10
    early = [session.train(model, weighted(TEXTS[0])) for _ in range(3)]
    with pytest.raises(Refused, match=r"request 1 of .* is missing") as refused:
        session.train(model, weighted(TEXTS[0]))
    assert refused.value.status == 429
    assert len(early) == 3
    sampler = session.sampler(base_model=BASE)
    for _ in range(4):
        session.sample(sampler, TEXTS[0], 500, num_samples=1000)
    with pytest.raises(Refused, match="requests of this client wait") as refused:
        session.sample(sampler, TEXTS[0], 4, num_samples=1000)
    assert refused.value.status == 429


def test_two_clients_are_sampled_for_fairly(server):
    greedy, modest = (TinkerSession(server.base_url) for _ in range(2))
    samplers = [each.sampler(base_model=BASE) for each in (greedy, modest)]
    params = {"sampling_params": {"stop": []}}
    many = [greedy.sample(samplers[0], TEXTS[0], 50, num_samples=50, **params) for _ in range(8)]
    few = modest.sample(samplers[1], TEXTS[1], 20, num_samples=4, **params)
    modest.result(few)
    done = [server._service.result(str(each["request_id"])).done() for each in many]
    assert sum(done) <= 4  # of eight that came before
    for promise in many:
        greedy.post("cancel_future", request_id=promise["request_id"])
    assert "sequences" in modest.result(modest.sample(samplers[1], TEXTS[1]))


def test_two_clients_are_trained_fairly(server):
    greedy, modest = (TinkerSession(server.base_url) for _ in range(2))
    models = [greedy.create(BASE), modest.create(BASE)]
    many = [greedy.train(models[0], *[weighted(TEXTS[0])] * 20) for _ in range(30)]
    modest.result(modest.train(models[1], weighted(TEXTS[1])))
    done = [server._service.result(str(each["request_id"])).done() for each in many]
    assert not all(done)
    # the control: each of many is done before a later one
    greedy.result(many[-1])
    assert all(server._service._results[str(each["request_id"])].done() for each in many)


def test_a_model_whose_client_has_ended_is_loaded_again(server, session):
    model = session.create(BASE)
    train(session, model, 1)
    session.post(f"sessions/{session.session_id}/finish")
    session.result(session.train(model, weighted(TEXTS[0])))
    session.result(session.step(model))
    reference = session.create(BASE)
    train(session, reference, 1)
    session.result(session.train(reference, weighted(TEXTS[0])))
    session.result(session.step(reference))
    one, two = (weights_of(server, session, each) for each in (model, reference))
    assert are_equal(one, two)
    assert server._service.models[model].adapter is not None
    session.post("unload_model", model_id=model)
    session.result(session.train(reference, weighted(TEXTS[0])))
    assert server._service.models[model].adapter is None


# --- a server that was killed -----------------------------------------------------------------------


def abandoned(server):
    """What a kill leaves: nothing is said to anyone, nothing is written."""
    service = server._service
    service._queue.close()
    service._worker.join()
    server.stop()
    service.sampler.stop()
    service.store.close()


def test_a_server_that_was_killed_goes_on(tmp_path):
    with serving(tmp_path / "whole") as server:
        session = TinkerSession(server.base_url)
        model = session.create(BASE)
        expected = train(session, model, 3)
        whole = weights_of(server, session, model)
    service = open_service(BASE, tmp_path / "run")
    server = TinkerServer(service, Address(api_key=""))
    service.start()
    server.start()
    session = TinkerSession(server.base_url)
    model = session.create(BASE)
    got = train(session, model, 1)
    fixed = session.sampler(model)
    asked = session.sample(fixed, TEXTS[0], 1, prompt_logprobs=True)
    before = session.result(asked)["prompt_logprobs"][1:]
    # the step of the second batch is accepted, and not computed before the kill
    text = np.random.default_rng([0, 1]).integers(4, 60, 9).tolist()
    promises = [session.train(model, weighted(text)), session.train(model, weighted(text[:5]))]
    session.result(promises[0])
    abandoned(server)
    with serving(tmp_path / "run") as again:
        session.url = again.base_url
        promises.append(session.step(model))
        got.append([session.result(promise) for promise in promises])
        asked = session.sample(fixed, TEXTS[0], 1, prompt_logprobs=True)
        after = session.result(asked)["prompt_logprobs"][1:]
        assert after == pytest.approx(before, abs=1e-5)
        text = np.random.default_rng([0, 2]).integers(4, 60, 9).tolist()
        promises = [
            session.train(model, weighted(text)),
            session.train(model, weighted(text[:5])),
            session.step(model),
        ]
        got.append([session.result(promise) for promise in promises])
        assert are_equal(weights_of(again, session, model), whole)
    assert [[each["metrics"] for each in step] for step in got] == [
        [each["metrics"] for each in step] for step in expected
    ]


def test_a_run_folder_has_one_server_and_one_model(tmp_path):
    with serving(tmp_path / "run"), pytest.raises(RunBusy):
        open_service(BASE, tmp_path / "run")
    record = tmp_path / "run/server.json"
    record.write_text(json.dumps({"model": "another"}))
    with pytest.raises(ConfigError, match="another folder"):
        open_service(BASE, tmp_path / "run")


# --- the canary -------------------------------------------------------------------------------------


def test_a_sampler_with_other_weights_ends_the_model(server, session, monkeypatch):
    one, two = (session.create(BASE, seed=seed) for seed in (1, 2))
    for seed, model in enumerate((one, two)):
        train(session, model, 1, seed)
    swapped = server._service.models[two].adapter.snapshot()
    monkeypatch.setattr(type(server._service.models[one].adapter), "snapshot", lambda _: swapped)
    promise = session.save(one, "a", "_for_sampler")
    assert "the sampler has other weights" in session.result(promise)["error"]
    monkeypatch.undo()
    assert session.get(f"training_runs/{one}")["corrupted"] is True
    with pytest.raises(Refused, match="the sampler has other weights"):
        session.step(one)
    assert session.get(f"training_runs/{two}")["corrupted"] is False
    train(session, two, 1)


def test_weights_that_were_exchanged_on_disk_are_not_sampled(tmp_path):
    with serving(tmp_path / "run") as server:
        session = TinkerSession(server.base_url)
        paths = []
        for seed in (1, 2):
            model = session.create(BASE, seed=seed)
            train(session, model, 1, seed)
            promise = session.save(model, "a", "_for_sampler")
            paths.append(session.result(promise)["path"])
        folders = [server._service.store.existing(path) for path in paths]
    # with the digest of the other, as who exchanges whole folders has
    canary = json.loads((folders[0] / "adapter.json").read_text())["canary"]
    shutil.rmtree(folders[0])
    shutil.copytree(folders[1], folders[0])
    about = json.loads((folders[0] / "adapter.json").read_text())
    (folders[0] / "adapter.json").write_text(json.dumps(about | {"canary": canary}))
    with serving(tmp_path / "run") as server:
        session.url = server.base_url
        sampler = session.sampler(model_path=paths[0])
        with pytest.raises(Refused, match="the sampler has other weights"):
            session.sample(sampler, TEXTS[0])
        session.result(session.sample(session.sampler(model_path=paths[1]), TEXTS[0]))


def test_weights_beyond_the_bound_leave_the_memory(tmp_path):
    loaded = []

    def load(folder):
        loaded.append(folder)
        return sampler_module.LoraWeights({}, 1.0)

    weights = sampler_module.LoadedWeights(load, max_bytes=-1)
    for name in "abab":
        weights.get(tmp_path / name)
    assert len(loaded) == 4
    weights.get(tmp_path / "b")
    assert len(loaded) == 4
