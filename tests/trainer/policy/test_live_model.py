"""A model object samples for ``env.rollout`` and ``env.evaluate`` through the embedded engine,
without a trainer."""

import copy
import gc
import threading
import weakref

import pytest
import torch

import verifiers as vf
from support.training import digits, small_policy
from verifiers.errors import ConfigError
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.policy.live_model import HELD

LIKELIEST = {"temperature": 0.0, "max_tokens": 4}
"""A sampled token may be a tag, which earns a part of the format's reward."""


def env():
    parser = vf.XMLParser(["answer"])
    rubric = vf.Rubric(funcs=[digits, parser.get_format_reward_func()], parser=parser)
    return vf.SingleTurnEnv(dataset=[{"question": "a"}, {"question": "b"}], rubric=rubric)


def test_the_documented_evaluation_of_a_model_object(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "not used")
    model, task = small_policy(), env()
    for row in task.get_dataset():
        completion, state = task.rollout(
            model=model, prompt=row["prompt"], answer=row["answer"], sampling_args=LIKELIEST
        )
        assert completion[0]["role"] == "assistant"
        assert state["error"] is None
        scores = task.rubric.score_rollout_sync(
            prompt=row["prompt"], completion=completion, answer=row["answer"], state={}
        )
        assert scores.get("format", 7) == scores["format_reward_func"] == 0.0
        assert scores.get("digits") == scores["digits"]
        assert scores.get("length", 7) == 7


def test_evaluate_samples_the_present_weights_of_the_model_itself():
    model, tokenizer = small_policy(), build_tiny_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    said = []
    for seed in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(seed))
        results = env().evaluate(
            model=model, num_examples=1, sampling_args={"temperature": 0.0, "max_tokens": 3}
        )
        said.append(results["completions"][0][0]["content"])
        wanted = model.generate(ids, do_sample=False, max_new_tokens=3)[0, ids.shape[1] :]
        assert said[-1] == tokenizer.decode(wanted, skip_special_tokens=True)
    assert len(set(said)) > 1


def test_the_engine_ends_with_the_model_and_a_copy_starts_without():
    gc.collect()
    before = set(threading.enumerate())
    model = small_policy()
    env().rollout(model=model, prompt=[{"role": "user", "content": "a"}], max_tokens=1)
    started = set(threading.enumerate()) - before
    assert started
    assert copy.deepcopy(model).__dict__[HELD].engine is None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    for thread in started:
        thread.join(10)
    assert [thread.name for thread in started if thread.is_alive()] == []


def test_a_model_without_a_name_is_one_sentence():
    model = small_policy()
    model.config.name_or_path = model.name_or_path = ""
    with pytest.raises(ConfigError, match="name_or_path"):
        env().rollout(model=model, prompt=[{"role": "user", "content": "a"}])
