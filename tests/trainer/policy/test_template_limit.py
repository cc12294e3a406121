"""A chat template that loops: every place that renders one gives up at a limit."""

import contextlib
import json
import threading
import time

import pytest

from support.training import small_config, small_policy, toy_env
from verifiers.checks.chat_template import check_increasing_context
from verifiers.data import chat_template
from verifiers.data.chat_template import rendered
from verifiers.errors import ConfigError, TooManyFaults
from verifiers.results.retokenise import text_turns
from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat, shows_tools
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.policy.preparation import num_prompt_tokens
from verifiers_trainer.trainer import RLTrainer

LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{{ messages[0]['content'] }}"
)
MESSAGES = [{"role": "user", "content": "hi"}]
SAID = "the chat template did not end within 0.3 s: set tokenizer.chat_template to another"


@pytest.fixture
def looping(monkeypatch):
    """A tokenizer whose template loops for minutes, and a limit of 0.3 s."""
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.3)
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = LOOPS
    return tokenizer


RENDERING = {
    "rendered": lambda t: rendered(t, MESSAGES, tokenize=False),
    "the endpoint": lambda t: ChatFormat(t).prompt_ids(json.dumps(MESSAGES).encode(), None),
    "check_increasing_context": check_increasing_context,
    "text to turns": lambda t: text_turns(
        MESSAGES, [{"role": "assistant", "content": "ho"}], None, t
    ),
    "tokens of a row": lambda t: num_prompt_tokens({"prompt": MESSAGES}, t, toy_env()),
}


@pytest.mark.parametrize("render", RENDERING.values(), ids=RENDERING)
def test_a_template_that_loops_is_given_up(looping, render):
    started = time.monotonic()
    with pytest.raises((ConfigError, BadRequest), match=SAID):
        render(looping)
    assert time.monotonic() - started < 5


def test_it_is_the_limit_that_ends_it(looping, monkeypatch):
    """Negative control: with a longer one it goes on longer."""
    monkeypatch.setattr(chat_template, "LIMIT_S", 1.5)
    started = time.monotonic()
    with pytest.raises(ConfigError):
        rendered(looping, MESSAGES, tokenize=False)
    assert time.monotonic() - started >= 1.5


def test_a_training_with_such_a_template_ends_and_says_why(looping, tmp_path):
    with pytest.raises(TooManyFaults, match=SAID):
        RLTrainer(small_policy(), toy_env(), small_config(tmp_path), looping).train()


def test_whether_such_a_template_shows_tools_is_unknown(looping):
    assert shows_tools(looping) is None


def test_the_limit_touches_nothing_that_ends_in_time(monkeypatch):
    """Also where the limit passes at the very end, nothing is raised later."""
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.01)
    tokenizer = build_tiny_tokenizer()
    before = threading.active_count()
    for _ in range(50):
        with contextlib.suppress(ConfigError):
            assert "hi" in rendered(tokenizer, MESSAGES, tokenize=False)
    time.sleep(0.05)
    assert threading.active_count() <= before + 1
