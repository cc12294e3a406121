"""A run can be shown to be sound afterwards: its page of proof, its rollouts scored again with its
checkpoints, and a server scored with a folder."""

import json
import math
import shutil

import pytest
from aiohttp import web

from support.embedded import serving, small_model
from support.fake_vllm import FakeVLLM
from support.planted import plant_replica, talks
from support.training import run, small_trainer
from verifiers.errors import ConfigError
from verifiers.storage.proof import proof_of
from verifiers_trainer.cli.train import train_command
from verifiers_trainer.cli.verify import COMMAND
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.run.proof import rows_of, verify

SETTINGS = {"max_seq_len": 200, "max_steps": 3, "log_completions": True, "learning_rate": 1e-2}
SETTINGS |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 9}
SETTINGS |= {"max_off_policy_steps": 0, "zero_variance": "keep"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proof") / "run"
    run(small_trainer(folder, talks(), small_model(), **SETTINGS))
    return folder


def proof_in(folder):
    return json.loads((folder / "proof.json").read_text())


def test_the_page_says_what_every_version_answered_and_what_became_of_every_token(trained):
    proof = proof_in(trained)
    assert (proof["verdict"], proof["steps"], proof["restarts"]) == ("agree", 3, 0)
    assert [entry["version"] for entry in proof["versions"]] == [0, 1, 2, 3]
    assert all("canary" in entry for entry in proof["versions"])
    by_lag = [entry.get("trained_by_lag", {}) for entry in proof["versions"]]
    assert sum(by_lag[0].values()) > 0
    tokens = proof["tokens"]
    assert sum(sum(lags.values()) for lags in by_lag) == tokens["trained"]
    assert tokens["trained"] + sum(tokens["untrained"].values()) == tokens["sampled"]
    said = dict(rows_of(proof))
    assert said["proof"].startswith("the policy that sampled is the policy that was trained: ")
    assert said["canaries"].startswith("4 versions answered; 3 of 3 pushes moved the answers")


def test_tokens_without_a_signal_are_counted_with_the_reason():
    lines = [
        {"step": 1, "policy_version": 1, "tokens/trained": 3, "tokens/completion": 9}
        | {"tokens/lag/0": 2, "tokens/lag/1": 1, "tokens/untrained/no_signal": 6}
    ]
    proof = proof_of(lines)
    assert proof["verdict"] == "unknown"
    assert proof["tokens"]["untrained"] == {"no_signal": 6}
    assert [entry["version"] for entry in proof["versions"]] == [-1, 0]
    assert rows_of(proof) == [("proof", "sampler and trainer were not compared")]


def canary(version, disagreement, noise=1e-5, **more):
    return {
        "canary/version": version, "canary/noise": noise, "canary/disagreement": disagreement,
        "canary/compared": 16, "step": version, "policy_version": version, "tokens/trained": 4, **more,
    }  # fmt: skip


def compared(step, disagreement):
    return {"step": step, "policy_version": step, "tokens/trained": 5} | {
        "sampler/disagreement": disagreement,
        "sampler/compared": 5,
    }


@pytest.mark.parametrize("missing", [None, math.nan])
def test_what_is_unknown_agrees_with_nothing_and_hides_nothing(missing):
    proof = proof_of([canary(1, missing)])
    assert (proof["verdict"], proof["compared"], proof["unknown"]) == ("unknown", 0, 1)
    assert "not compared, 1 more of too few tokens" in dict(rows_of(proof))["proof"]
    for steps in ([missing, 50.0], [50.0, missing], [50.0]):
        proof = proof_of([compared(n, value) for n, value in enumerate(steps, 1)])
        assert (proof["verdict"], proof["largest"]["disagreement"]) == ("alarm", 50.0)
        assert proof["unknown"] == len(steps) - 1


@pytest.mark.parametrize(
    ("moved", "verdict"),
    [([1e-6, 1e-6], "inconclusive"), ([1e-6, 1e-3], "agree"), ([math.nan, 1e-6], "inconclusive")],
)
def test_pushes_that_the_noise_hides_prove_nothing(moved, verdict):
    proof = proof_of([canary(n, 0.5, **{"canary/moved": m}) for n, m in enumerate(moved, 1)])
    assert (proof["verdict"], proof["compared_tokens"]) == (verdict, 32)
    told = {"told": int(verdict == "agree"), "of": sum(m == m for m in moved)}
    assert proof["told_apart"] == told
    said = dict(rows_of(proof))["proof"]
    assert said.startswith("inconclusive: no push") == (verdict == "inconclusive")
    assert "2 comparisons of 32 tokens, at most 0.5 times the noise" in said


def test_a_run_whose_steps_are_too_small_to_be_told_says_so(tmp_path):
    run(small_trainer(tmp_path, talks(), small_model(), **{**SETTINGS, "learning_rate": 1e-9}))
    assert proof_in(tmp_path)["verdict"] == "inconclusive"


def test_a_server_whose_answers_end_at_once_is_asked_until_there_is_enough_to_compare(
    trained, capfd
):
    from verifiers_trainer.policy.folder_client import load_folder

    class EndsAtOnce(FakeVLLM):
        async def _v1_completions(self, body, request):
            return await super()._v1_completions({**body, "max_tokens": 1}, request)

    for checkpoint, code in (("checkpoint-3", 0), ("checkpoint-1", 3)):
        model, _ = load_folder(trained / "checkpoint-3")
        with EndsAtOnce(model, build_tiny_tokenizer()) as server:
            ended, said = checked(capfd, trained / checkpoint, f"{server.url}/v1")
            assert ended == code, said
            assert len(server.answers) >= 8
    assert "disagree by" in said["error"]["message"]


def test_a_run_that_a_disagreement_ended_says_so(tmp_path, monkeypatch):
    plant_replica(monkeypatch, "stale weights")
    trainer = small_trainer(tmp_path, talks(), small_model(), **SETTINGS)
    with pytest.raises(ConfigError, match="disagree by"):
        trainer.train()
    proof = proof_in(tmp_path)
    assert proof["verdict"] == "ended"
    assert "(version 1), sampler and trainer disagree by" in proof["reason"]
    assert "(version 1)" in dict(rows_of(proof))["proof"]


def test_every_saved_version_is_verified_and_another_checkpoint_is_found(trained, tmp_path):
    rows = verify(trained)
    assert [name for name, _ in rows] == ["checkpoint-1", "checkpoint-2"]
    changed = tmp_path / "run"
    shutil.copytree(trained, changed)
    for path in (changed / "checkpoint-2").iterdir():
        shutil.copy(path, changed / "checkpoint-1" / path.name)
    with pytest.raises(ConfigError, match="a rollout of step 2 and checkpoint-1"):
        verify(changed)
    with pytest.raises(ConfigError, match="is no training run"):
        verify(tmp_path)
    shutil.rmtree(changed / "completions")
    with pytest.raises(ConfigError, match=r"nothing to verify; .*save_steps below"):
        verify(changed)


def test_the_command_verifies(trained, capfd):
    with pytest.raises(SystemExit) as ended:
        train_command.main(["--verify", str(trained)], prog_name="vf-train")
    assert ended.value.code == 0
    assert "checkpoint-1: " in capfd.readouterr().out


# --- a server and a folder ------------------------------------------------------------------------


def checked(capfd, folder, url, *more):
    code = COMMAND.run(["--policy", str(folder), "--endpoint", url, *more, "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_a_server_that_serves_the_folder_agrees_and_one_that_does_not_is_found(
    trained, tmp_path, monkeypatch, capfd
):
    from verifiers_trainer.policy.folder_client import load_folder

    model, _ = load_folder(trained / "checkpoint-3")
    with serving(model) as engine:
        monkeypatch.setenv("KEY", engine.api_key)
        code, said = checked(capfd, trained, engine.base_url, "--api-key-var", "KEY")
        assert code == 0
        assert said["policy"] == str(trained / "checkpoint-3")
        assert list(said["agreement"]) == ["temperature 1", "temperature 0.7"]
        before = trained / "checkpoint-2"
        code, said = checked(capfd, before, engine.base_url, "--api-key-var", "KEY")
        assert code == 3
        assert "does not answer as" in said["error"]["message"]
        assert "disagree by" in said["error"]["message"]


class LeavesOut(FakeVLLM):
    """A server behind a gateway that drops messages of a role, or earlier turns."""

    drops = staticmethod(lambda messages: [m for m in messages if m["role"] != "system"])

    async def _v1_chat_completions(self, body, request):
        body = {**body, "messages": self.drops(body["messages"])}
        return await super()._v1_chat_completions(body, request)


@pytest.mark.parametrize(
    ("drops", "said"),
    [
        (lambda messages: [m for m in messages if m["role"] != "system"], "(system, user)"),
        (lambda messages: messages[-1:], "(system, user)"),
        (
            lambda messages: [m for m in messages if m["role"] != "assistant"],
            "(user, assistant, user)",
        ),
        (lambda messages: messages, None),
    ],
    ids=["system prompts", "all but the last", "answers", "nothing"],
)
def test_a_server_that_leaves_out_messages_is_found(trained, capfd, monkeypatch, drops, said):
    from verifiers_trainer.policy.folder_client import load_folder

    monkeypatch.setattr(LeavesOut, "drops", staticmethod(drops))
    model, _ = load_folder(trained / "checkpoint-3")
    with LeavesOut(model, build_tiny_tokenizer()) as server:
        code, found = checked(capfd, trained, f"{server.url}/v1")
    assert code == (0 if said is None else 3)
    if said is None:
        assert found["chat"] == "4 conversations are the same tokens"
    else:
        assert f"renders the same messages {said} as other tokens" in found["error"]["message"]


def test_a_server_without_conversations_is_compared_without_them(trained, capfd):
    from verifiers_trainer.policy.folder_client import load_folder

    class Plain(FakeVLLM):
        async def _v1_chat_completions(self, body, request):
            raise web.HTTPNotFound

    model, _ = load_folder(trained / "checkpoint-3")
    with Plain(model, build_tiny_tokenizer()) as server:
        code, found = checked(capfd, trained, f"{server.url}/v1")
    assert (code, found["chat"].startswith("not compared: ")) == (0, True)


@pytest.mark.parametrize("swaps", [False, True])
def test_another_adapter_of_several_is_found(trained, capfd, swaps):
    """The server has three, and answers for one of them with another."""
    from verifiers_trainer.policy.folder_client import load_folder

    models = [load_folder(trained / f"checkpoint-{step}")[0] for step in (1, 2, 3)]
    with FakeVLLM(small_model(), build_tiny_tokenizer()) as server:
        server.adapters = dict(zip(("first", "second", "third"), models, strict=True))
        if swaps:
            server.adapters["second"] = models[2]
        words = (trained / "checkpoint-2", f"{server.url}/v1", "--model", "second")
        code, found = checked(capfd, *words)
        assert code == (3 if swaps else 0)
        assert not swaps or "second at" in found["error"]["message"]


def test_raw_log_probabilities_are_found_at_the_other_temperature(trained, capfd):
    from verifiers_trainer.policy.folder_client import load_folder

    model, _ = load_folder(trained / "checkpoint-3")
    with FakeVLLM(model, build_tiny_tokenizer(), raw_logprobs=True) as server:
        code, said = checked(capfd, trained, f"{server.url}/v1")
    assert code == 3
    assert "look sampled at temperature 1." in said["error"]["message"]


def test_what_is_missing_is_named(capfd, trained):
    assert COMMAND.run(["--policy", str(trained)]) == 2
    assert "vf-verify --policy FOLDER --endpoint URL" in capfd.readouterr().err
    code = COMMAND.run(["--policy", str(trained), "--endpoint", "http://127.0.0.1:9/v1"])
    assert code == 2
    assert "start the server or correct the base URL" in capfd.readouterr().err
