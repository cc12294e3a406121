"""Models that see, of some hundred thousand random parameters, with processors made of parts: no
file is downloaded. Pictures of one colour to ask them about."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import verifiers as vf
from verifiers.data.images import image_part
from verifiers_trainer.engines.processors import of_images
from verifiers_trainer.policy.builtin_models import START, build_tiny_tokenizer

COLOURS = {
    "red": (230, 30, 30),
    "green": (30, 200, 40),
    "blue": (40, 60, 230),
    "yellow": (235, 210, 30),
}
"""Each with another first letter."""
SIDE = 32
"""Pixels of a picture's side."""
_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for part in message.content or [] %}
            {{- 'PLACE' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_OF_PARTS_ALONE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- for part in message.content %}
        {%- if part.type == 'image' %}{{- 'PLACE' }}{%- endif %}
        {%- if part.type == 'text' %}{{- part.text }}{%- endif %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As SmolVLM's: a content that is a text is left out without a word."""


def picture(colour: str, seed: int = 0, side: int = SIDE) -> bytes:
    """A PNG of a colour, a little lighter or darker by the seed."""
    shade = random.Random(f"{colour}{seed}").uniform(0.85, 1.05)
    rgb = tuple(min(255, int(value * shade)) for value in COLOURS[colour])
    file = io.BytesIO()
    Image.new("RGB", (side, side), rgb).save(file, "PNG")
    return file.getvalue()


def noise(seed: int = 0, size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """A PNG of random pixels."""
    draws = random.Random(seed)
    file = io.BytesIO()
    Image.frombytes("RGB", size, draws.randbytes(3 * size[0] * size[1])).save(file, "PNG")
    return file.getvalue()


def asked(*contents: str | bytes) -> list[dict[str, Any]]:
    """A user's message of texts and pictures."""
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else image_part(part)
        for part in contents
    ]
    return [{"role": "user", "content": parts}]


# --- models ---------------------------------------------------------------------------------------


def _with_tokens(*tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [START, *tokens]})
    return tokenizer


def _text(tokenizer: PreTrainedTokenizerFast, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **more,
    }


def _qwen2_5_vl() -> tuple[Any, Any, str]:
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = _with_tokens(*names)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(names))
    processor = of_images(transformers.Qwen2_5_VLProcessor)(
        image_processor=_pil("qwen2_vl", "Qwen2VLImageProcessorPil")(
            patch_size=8, merge_size=2, min_pixels=16 * 16, max_pixels=64 * 64
        ),
        tokenizer=tokenizer,
    )
    config = transformers.Qwen2_5_VLConfig(
        text_config=_text(
            tokenizer,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        ),
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "out_hidden_size": 64, "patch_size": 8, "spatial_merge_size": 2, "window_size": 32,
            "fullatt_block_indexes": [1], "temporal_patch_size": 2, "tokens_per_second": 2,
        },
        vision_start_token_id=start, vision_end_token_id=end, image_token_id=image,
        video_token_id=video,
    )  # fmt: skip
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    return config, processor, _TEMPLATE.replace("PLACE", place)


def _idefics3() -> tuple[Any, Any, str]:
    names = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
    tokenizer = _with_tokens(*names)
    edge = {"longest_edge": SIDE}
    processor = of_images(transformers.Idefics3Processor)(
        image_processor=_pil("idefics3", "Idefics3ImageProcessorPil")(
            do_image_splitting=False, size=edge, max_image_size=edge
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
    )
    config = transformers.Idefics3Config(
        text_config={"model_type": "llama", **_text(tokenizer)},
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return config, processor, _OF_PARTS_ALONE.replace("PLACE", "<image>")


def _smolvlm() -> tuple[Any, Any, str]:
    """Skips without the packages that its processor imports for videos."""
    for package in ("num2words", "torchvision"):
        pytest.importorskip(package, reason=f"SmolVLM's processor needs {package}")
    names = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
    tokenizer = _with_tokens(*names)
    named = {"fake_image_token": names[0], "image_token": names[1], "global_image_token": names[2]}
    for name, token in named.items():  # as SmolVLM's tokenizer names them
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    edge = {"longest_edge": SIDE}
    processor = of_images(transformers.SmolVLMProcessor)(
        image_processor=_pil("smolvlm", "SmolVLMImageProcessorPil")(
            do_image_splitting=False, size=edge, max_image_size=edge
        ),
        tokenizer=tokenizer,
        video_processor=transformers.SmolVLMVideoProcessor(),
        image_seq_len=4,
    )
    like, _, template = _idefics3()
    config = transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **_text(tokenizer)},
        vision_config=like.vision_config.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return config, processor, template


def _pil(model: str, name: str) -> Any:
    module = f"transformers.models.{model}.image_processing_pil_{model}"
    return getattr(__import__(module, fromlist=[name]), name)


def _qwen3_vl() -> tuple[Any, Any, str]:
    like, processor, template = _qwen2_5_vl()
    processor = of_images(transformers.Qwen3VLProcessor)(
        image_processor=processor.image_processor, tokenizer=processor.tokenizer
    )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = _text(
        processor.tokenizer, head_dim=16, rope_parameters={**rope, "mrope_interleaved": True}
    )
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "out_hidden_size": 64, "patch_size": 8, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        },
        vision_start_token_id=like.vision_start_token_id, image_token_id=like.image_token_id,
        vision_end_token_id=like.vision_end_token_id, video_token_id=like.video_token_id,
    )  # fmt: skip
    return config, processor, template


def _llava() -> tuple[Any, Any, str]:
    tokenizer = _with_tokens("<image>")
    processor = of_images(transformers.LlavaProcessor)(
        image_processor=_pil("clip", "CLIPImageProcessorPil")(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=tokenizer, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **_text(tokenizer)},
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8,
            "projection_dim": 32,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), vision_feature_layer=-1,
    )  # fmt: skip
    return config, processor, _TEMPLATE.replace("PLACE", "<image>")


def _gemma3() -> tuple[Any, Any, str]:
    tokens = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokens["image_token"] = "<image_soft_token>"
    tokenizer = _with_tokens(*tokens.values())
    for name, token in tokens.items():  # as Gemma's tokenizer names them
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    processor = of_images(transformers.Gemma3Processor)(
        image_processor=_pil("gemma3", "Gemma3ImageProcessorPil")(
            size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=tokenizer,
        image_seq_length=4,
    )
    config = transformers.Gemma3Config(
        text_config=_text(tokenizer, head_dim=16, sliding_window=64),
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"), mm_tokens_per_image=4,
    )  # fmt: skip
    return config, processor, _TEMPLATE.replace("PLACE", "<start_of_image>")


KINDS = ("qwen2_5_vl", "idefics3")
"""With positions of its own, and a template of parts alone."""
_MAKERS: dict[str, Callable[[], tuple[Any, Any, str]]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "idefics3": _idefics3,
    "qwen3_vl": _qwen3_vl,
    "llava": _llava,
    "gemma3": _gemma3,
    "smolvlm": _smolvlm,
}
FAMILIES = tuple(_MAKERS)


def vision_model(kind: str, seed: int = 0, scale: float = 4.0) -> tuple[PreTrainedModel, Any]:
    """(model, processor); matrices scaled up, so that what is seen changes what is said."""
    config, processor, template = _MAKERS[kind]()
    processor.chat_template = processor.tokenizer.chat_template = template
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                if not parameter.any():  # Gemma's projector, which would be blind
                    parameter.normal_(std=0.05)
                parameter.mul_(scale)
    return model.eval(), processor


def vision_folder(kind: str, folder: Path, seed: int = 0, scale: float = 4.0) -> Path:
    """A saved model with its processor, as one that was downloaded."""
    model, processor = vision_model(kind, seed, scale)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


# --- tasks ----------------------------------------------------------------------------------------


def colour_rows(count: int = 32, seed: int = 0) -> list[dict[str, Any]]:
    order = random.Random(seed)
    names = [order.choice(list(COLOURS)) for _ in range(count)]
    return [
        {"prompt": asked(picture(name, n), "?"), "answer": name} for n, name in enumerate(names)
    ]


def first_letter(completion: Any, answer: str, **_: Any) -> float:
    """Whether the answer begins with the letter of the colour."""
    return float((completion[-1]["content"] or "")[:1] == answer[0])


def colour_env(count: int = 32, reward: Any = first_letter, **options: Any) -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(
        dataset=colour_rows(count),
        eval_dataset=colour_rows(8, seed=1),
        rubric=vf.Rubric(funcs=[reward]),
        **options,
    )


def length(completion: Any, **_: Any) -> float:
    """Of the answer, so that a model that knows nothing has groups with a signal."""
    return float(len(completion[-1]["content"] or "") % 3)


def odd_lengths() -> vf.SingleTurnEnv:
    return colour_env(8, reward=length)
