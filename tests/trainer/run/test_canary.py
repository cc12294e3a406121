"""After every push of weights the servers are asked whether they have them. Three bugs that
projects published in 2026 end the run within a step."""

import copy

import pytest

from support.embedded import small_model
from support.fake_vllm import FakeVLLM
from support.planted import talks
from support.training import metrics_of, run, small_trainer
from verifiers.errors import ConfigError
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.policy.scoring import fixed_prompts
from verifiers_trainer.run.canary import Canary

STEPS = {"max_steps": 3, "zero_variance": "keep", "max_off_policy_steps": 0, "learning_rate": 1e-2}


class NeverDelivered(FakeVLLM):
    """Says that it has loaded the adapter, and answers with the base."""

    async def _v1_load_lora_adapter(self, body, request):
        said = await super()._v1_load_lora_adapter(body, request)
        self.adapters[body["lora_name"]] = self.model
        return said


class FailedReload(FakeVLLM):
    """Says that it has read the files, and keeps the weights it began with."""

    def _load(self, tensors):
        pass


class StalePrefixes(FakeVLLM):
    """A prompt that was answered before is answered from what was computed then."""

    async def _complete(self, prompt, body, request, *counts):
        seen = self.__dict__.setdefault("seen", {})
        model = self.adapters.get(body["model"], self.model)
        key = f"kept-{len(self.answers)}-{id(prompt)}"
        self.adapters[key] = seen.setdefault(tuple(prompt), copy.deepcopy(model))
        try:
            return await super()._complete(prompt, {**body, "model": key}, request, *counts)
        finally:
            del self.adapters[key]


def trainer_of(server, folder, **settings):
    settings = {"inference": server.url, **STEPS, **settings}
    return small_trainer(folder, model=small_model(), **settings)


BUGS = [(NeverDelivered, True), (FailedReload, False), (StalePrefixes, False)]


@pytest.mark.parametrize(("kind", "lora"), BUGS)
def test_a_published_bug_ends_the_run_within_a_step(tmp_path, kind, lora):
    with kind(small_model(), build_tiny_tokenizer()) as server:
        trainer = trainer_of(server, tmp_path, use_lora=lora)
        said = r"canary after a push of weights \(version 1\), sampler and trainer disagree by"
        with pytest.raises(ConfigError, match=said):
            trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(("kind", "lora"), BUGS)
def test_without_the_comparison_it_trains_on_and_nothing_is_said(tmp_path, kind, lora):
    """Negative control."""
    with kind(small_model(), build_tiny_tokenizer()) as server:
        trainer = trainer_of(server, tmp_path, use_lora=lora)
        trainer.checks_sampler = False
        assert len(run(trainer).steps) == 3


def test_rollouts_of_new_prompts_do_not_show_old_prefixes(tmp_path, monkeypatch):
    """Negative control: only prompts that come again do, as the canary's."""
    monkeypatch.setattr(Canary, "ask", lambda *args: None)
    with StalePrefixes(small_model(), build_tiny_tokenizer()) as server:
        assert len(run(trainer_of(server, tmp_path, use_lora=False)).steps) == 3


@pytest.mark.parametrize("server_url", [True, False])
def test_the_canary_of_every_version_agrees_and_tells_the_weights_before_apart(
    tmp_path, server_url
):
    with FakeVLLM(small_model(), build_tiny_tokenizer()) as server:
        inference = server.url if server_url else "embedded"
        trainer = small_trainer(
            tmp_path, talks(), small_model(), inference=inference, max_seq_len=200, **STEPS
        )
        run(trainer)
    rows = [row for row in metrics_of(tmp_path) if "canary/version" in row]
    assert [row["canary/version"] for row in rows] == [0, 1, 2]
    assert all(row["canary/disagreement"] < 1 for row in rows)
    assert all(row["canary/moved"] > 100 * row["canary/noise"] for row in rows)
    assert len({row["canary/checksum"] for row in rows}) == 3


def test_a_server_that_restarts_after_a_push_is_repaired_and_asked_again(tmp_path, caplog):
    class Restarts(Canary):
        def ask(self, engine, version):
            if version == 1:
                server.restart()
            super().ask(engine, version)

    with FakeVLLM(small_model(), build_tiny_tokenizer()) as server:
        trainer = trainer_of(server, tmp_path, use_lora=True)
        trainer.canary = Restarts(trainer.training_run)
        assert len(run(trainer).steps) == 3
    assert "had lost the weights of this run" in caplog.text
    rows = [row for row in metrics_of(tmp_path) if "canary/version" in row]
    assert [row["canary/version"] for row in rows] == [0, 1, 2]


def test_the_prompts_have_common_and_rare_tokens_and_no_special_ones():
    tokenizer = build_tiny_tokenizer()
    common, rare = fixed_prompts(tokenizer, 48)
    assert len(common) == len(rare) == 40
    assert tokenizer.decode(common).startswith("In every step the server")
    assert len(set(rare)) > 30
    assert not set(rare) & set(tokenizer.all_special_ids)
