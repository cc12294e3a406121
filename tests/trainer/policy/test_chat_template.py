"""The increasing-context check on real transformers tokenizers: the built-in one passes, a
stripping template fails."""

from support.chat_templates import STRIPPING
from verifiers.checks.chat_template import check_increasing_context
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer


def test_the_built_in_template_only_appends():
    report = check_increasing_context(build_tiny_tokenizer())

    assert report.ok
    assert report.checked == ("plain", "think", "tools", "think and tools")


def test_a_template_that_strips_thinking_fails_at_the_think_token():
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = STRIPPING

    report = check_increasing_context(tokenizer)

    first = report.first_difference
    assert first.conversation == "think"
    assert "<think>" in first.before.text
    assert "<think>" not in first.after.text
    assert "<think>" in report.advice
