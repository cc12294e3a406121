"""Whether the policy sees: a prompt is scored with its images and with others, and the
log-probabilities of what follows must differ by more than rounding.

Sampler and trainer that both lose the pixels agree with each other, and the loss falls all the
same; nothing else in a run would say it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch

from verifiers.data.examples import Example
from verifiers.data.images import decode_image, image_parts
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.packing import PackedRow, image_arrays, image_files
from verifiers_trainer.engines.http.chat import ChatFormat, Prompt
from verifiers_trainer.engines.processing import Images, placeholder_ids, processing_of
from verifiers_trainer.policy.forward_checks import quiet, rounding_noise
from verifiers_trainer.policy.logprobs import find_causal_lm
from verifiers_trainer.policy.preparation import prompt_of

LEAST = 2.0
"""Multiple of the rounding noise by which other images must move the log-probabilities."""


def first_prompt(
    model: torch.nn.Module, examples: Sequence[Example], env: Environment
) -> Prompt | None:
    """The first prompt with an image; None without any."""
    processing = processing_of(model)
    if processing is None:
        return None
    chat = ChatFormat(processing.tokenizer, None, processing)
    for example in examples:
        if next(image_parts(example.row["prompt"]), None) is not None:
            return prompt_of(example.row, chat, env.for_row(example.row))
    return None


def prompt_of_rows(rows: Sequence[PackedRow]) -> Prompt | None:
    """The tokens and images of the first row that has images; None without any."""
    row = next((row for row in rows if row.images is not None), None)
    return None if row is None else Prompt(row.token_ids, image_files(row.images, row.image_ends))


def check_sight(model: torch.nn.Module, prompt: Prompt) -> dict[str, float]:
    """The metric: mean nats by which other images move the log-probabilities of the tokens that
    follow the first image. ``model`` has the log-probability forward installed.

    Raises ``ConfigError`` for a policy that does not see.
    """
    never = placeholder_ids(find_causal_lm(model).config)
    is_placeholder = np.isin(prompt.ids, never)
    follows = ~is_placeholder & (np.cumsum(is_placeholder) > 0)
    device = next(model.parameters()).device

    def arguments(images: Images) -> dict[str, torch.Tensor]:
        arrays = image_arrays(images)
        return {
            "input_ids": torch.from_numpy(prompt.ids.astype(np.int64))[None].to(device),
            "loss_mask": torch.from_numpy(follows),
            **{name: torch.from_numpy(array) for name, array in arrays.items()},
        }

    with quiet(model):
        seen, changed = (
            model(**arguments(images)).logprobs
            for images in (prompt.images, tuple(map(another, prompt.images)))
        )
    difference = float((seen - changed).abs()[follows].mean())
    noise = float(rounding_noise(model, arguments(prompt.images))[follows].mean())
    if not difference > LEAST * noise:
        raise ConfigError(
            f"the policy does not see its images: other images move the log-probabilities of what"
            f" follows them by {difference:.2g} nats per token, and rounding alone by {noise:.2g};"
            " check that the processor is the model's own, and that its weights were loaded"
        )
    return {"canary/sight": difference}


def another(content: bytes) -> bytes:
    """An image of the same size that differs in every pixel."""
    from PIL import Image

    pixels = np.asarray(decode_image(content))
    file = io.BytesIO()
    Image.fromarray(pixels + np.uint8(128)).save(file, "PNG")
    return file.getvalue()
