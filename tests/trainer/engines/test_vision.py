"""Prompts with images in the embedded engine: expanded once, sampled with the pixels, refused where
tokens and images do not fit."""

from __future__ import annotations

import asyncio
import itertools
import json

import numpy as np
import pytest
import torch

import verifiers as vf
from support.embedded import post, sampled_logprobs
from support.tiny_vision import FAMILIES, KINDS, asked, noise, picture, vision_model
from verifiers.errors import ModelRefused
from verifiers_trainer.algorithm.packing import image_arrays
from verifiers_trainer.algorithm.samples import recorded_images
from verifiers_trainer.engines.embedded.engine import EmbeddedEngine
from verifiers_trainer.engines.exact.client import ExactClient
from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat
from verifiers_trainer.engines.inference import policy_client
from verifiers_trainer.engines.policy_client import PolicyClient
from verifiers_trainer.engines.processing import attach, processing_of
from verifiers_trainer.policy.logprobs import install_logprob_forward, uninstall

EXACT = 1e-5


def seeing(kind: str) -> tuple:
    model, processor = vision_model(kind)
    attach(model, processor)
    return model, processor.tokenizer


def engine_of(model, tokenizer, **options) -> EmbeddedEngine:
    return EmbeddedEngine(model, tokenizer, **{"max_seq_len": 512, "concurrency": 6, **options})


def body(messages, **fields) -> dict:
    wanted = {"logprobs": True, "return_token_ids": True, "return_weight_versions": True}
    return {"messages": messages, "max_tokens": 6, **wanted, **fields}


def of_trainer(model, prompt_ids, completion_ids, images=()) -> torch.Tensor:
    """The trainer's log-probabilities of a completion."""
    install_logprob_forward(model)
    arrays = {name: torch.from_numpy(a) for name, a in image_arrays(images).items()}
    with torch.no_grad():
        out = model(input_ids=torch.tensor([[*prompt_ids, *completion_ids]]), **arrays)
    uninstall(model)
    return out.logprobs[len(prompt_ids) :]


def difference(model, response, messages) -> float:
    ids = response["choices"][0]["token_ids"]
    ours = of_trainer(model, response["prompt_token_ids"], ids, recorded_images(messages))
    return float((ours - sampled_logprobs(response)).abs().max())


@pytest.mark.parametrize("kind", FAMILIES)
async def test_rows_with_and_without_images_decode_together_exactly(kind):
    model, tokenizer = seeing(kind)
    prompts = [asked("a", picture(colour), "which?") for colour in ("red", "blue")] * 3
    prompts += [[{"role": "user", "content": "no picture"}]] * 2
    prompts += [asked(noise(1, (48, 32)), "and", noise(2, (32, 64)), "or")]
    lengths = [3, 9, 6, 12, 5, 7, 11, 4, 8]
    bodies = [
        body(messages, max_tokens=length, seed=seed, ignore_eos=True)
        for seed, (messages, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    with engine_of(model, tokenizer) as engine:
        responses = await post(engine, bodies)
    assert [status for status, _ in responses] == [200] * 9
    for (_, response), messages in zip(responses, prompts, strict=True):
        assert difference(model, response, messages) < EXACT
    # what is seen is said: with the other picture the same tokens have other log-probabilities
    first = responses[0][1]
    assert difference(model, first, prompts[1]) > 100 * EXACT


@pytest.mark.parametrize("kind", KINDS)
async def test_placeholders_are_expanded_by_the_processor_and_never_sampled(kind):
    model, tokenizer = seeing(kind)
    never = processing_of(model).never
    messages = asked(picture("red"), "?")
    with torch.no_grad():  # the head prefers the placeholder to everything else
        model.get_output_embeddings().weight[list(never)] *= 50
    with engine_of(model, tokenizer) as engine:
        ((_, response),) = await post(engine, [body(messages, max_tokens=40, ignore_eos=True)])
    assert np.isin(response["prompt_token_ids"], never).sum() == 4
    assert not np.isin(response["choices"][0]["token_ids"], never).any()
    assert difference(model, response, messages) < EXACT


async def test_siblings_share_the_prefill_of_their_picture():
    model, tokenizer = seeing("qwen2_5_vl")
    seen = []
    with engine_of(model, tokenizer) as engine:
        messages = asked(picture("red"), "?")
        engine._replica.model.visual.register_forward_pre_hook(lambda *_: seen.append(1))
        await post(engine, [body(messages, n=4, seed=1)])
    assert len(seen) == 1


class Looks(vf.MultiTurnEnv):
    """Shows another picture after each answer."""

    async def env_response(self, messages, state, **_):
        number = len(state["trajectory"])
        return asked("next:", picture(["green", "blue"][number - 1], number))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("history", ["template", "exact"])
def test_pictures_that_arrive_in_later_turns_are_exact(kind, history):
    model, tokenizer = seeing(kind)
    env = Looks(
        dataset=[{"prompt": asked("look", picture("red"), "well?"), "answer": ""}],
        max_turns=3,
        rubric=vf.Rubric([lambda **_: 0.0]),
    )
    with engine_of(model, tokenizer) as engine:
        client = policy_client(engine)
        if history == "exact":
            client = ExactClient(client, tokenizer, 512, "none", engine.processing)
        results = env.evaluate_sync(
            PolicyClient(engine, client, {"max_tokens": 5}, 3), "policy", rollouts_per_example=2
        )
    for state in results["state"]:
        assert state["error"] is None
        turns = state["trajectory"]
        assert len(turns) == 3
        for turn in turns:
            tokens = turn["tokens"]
            ids = tokens["prompt_ids"], tokens["completion_ids"]
            ours = of_trainer(model, *ids, recorded_images(turn["prompt"]))
            assert (ours - torch.tensor(tokens["completion_logprobs"])).abs().max() < EXACT
        if history == "exact":
            for earlier, later in itertools.pairwise(turns):
                before = [*earlier["tokens"]["prompt_ids"], *earlier["tokens"]["completion_ids"]]
                assert list(later["tokens"]["prompt_ids"])[: len(before)] == list(before)


# --- what does not fit ----------------------------------------------------------------------------


def chat_of(kind: str = "qwen2_5_vl", template: str | None = None) -> ChatFormat:
    model, tokenizer = seeing(kind)
    if template is not None:
        tokenizer.chat_template = template
    return ChatFormat(tokenizer, 512, processing_of(model))


def test_a_template_that_leaves_an_image_out_is_refused_with_both_counts():
    chat = chat_of(template="{{ messages[0].role }}: look")
    with pytest.raises(BadRequest, match="has 1 images and 0 places for them"):
        chat.prompt(json.dumps(asked(picture("red"), "?")).encode(), None)


def test_a_placeholder_in_a_text_is_refused():
    chat = chat_of("idefics3")
    with pytest.raises(BadRequest, match="has 0 images and 1 places"):
        chat.prompt(json.dumps(asked("an <image> of what?")).encode(), None)


def test_tokens_that_were_cut_are_refused_with_both_counts():
    model, tokenizer = seeing("qwen2_5_vl")
    messages = asked(picture("red"), "?")
    prompt = ChatFormat(tokenizer, 512, processing_of(model)).prompt(
        json.dumps(messages).encode(), None
    )
    place = np.flatnonzero(np.isin(prompt.ids, processing_of(model).never))[0]
    cut = np.delete(prompt.ids, place)
    with pytest.raises(BadRequest, match="have 3 placeholders, and the processor makes 4"):
        of_trainer(model, cut, [5], prompt.images)


def test_a_content_that_a_template_of_parts_would_leave_out_is_shown_to_it_as_a_part():
    chat = chat_of("idefics3")
    ids = chat.prompt_ids(json.dumps([{"role": "user", "content": "hello"}]).encode(), None)
    assert "hello" in chat.decode(ids)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"truncate_prompt_tokens": 5}, "with images cannot be truncated"),
        ({"prompt_logprobs": 1}, "with images are not scored"),
    ],
)
async def test_what_a_prompt_with_images_cannot_have_is_refused(fields, said):
    model, tokenizer = seeing("idefics3")
    with engine_of(model, tokenizer) as engine:
        messages = asked(picture("red"), "?")
        ((status, answer),) = await post(engine, [body(messages, **fields)])
    assert status == 400
    assert said in answer["error"]["message"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9/a.png", "only its address is"),
        ("data:image/svg+xml;base64,PHN2Zz4=", "PNG, JPEG, WEBP, GIF"),
        ("data:image/png;base64,iVBORw0KGgoAAAA=", "cannot be decoded"),
    ],
)
async def test_images_that_are_not_there_or_damaged_cost_their_request_alone(url, said):
    model, tokenizer = seeing("idefics3")
    bad = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with engine_of(model, tokenizer) as engine:
        (status, answer), (other, _) = await post(
            engine, [body(bad), body(asked(picture("red"), "?"))]
        )
    assert (status, other) == (400, 200)
    assert said in answer["error"]["message"]


def test_a_model_of_text_refuses_images():
    from support.embedded import serving

    with serving() as engine:
        ((status, answer),) = asyncio.run(post(engine, [body(asked(picture("red")))]))
    assert status == 400
    assert "only text is taken here" in answer["error"]["message"]
    assert issubclass(BadRequest, ModelRefused)
