"""The one place where messages with images become token ids and the inputs of a model that sees.

Placeholders are expanded once, by the model's own processor, when a prompt is made; the expanded
ids are the prompt's tokens, and nothing is decoded and encoded again. An image stays the file that
the record has: pixels are computed from it where they are needed, so that a journal, a resumed run
and another process have the same. How many placeholders an image takes is counted where ids and
images meet, and both counts are in the error if they differ.

Engine and trainer both call ``Processing.arguments``; a model of text has no ``Processing``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.data.chat_template import rendered
from verifiers.data.images import decode_image, image_hash, image_url
from verifiers.errors import ConfigError
from verifiers_trainer.engines.requests import BadRequest

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Attributes of configurations: the ids in whose place a model puts features."""
NEVER = -1e9
"""The logit of a placeholder, which no policy may sample; finite, for 0 · -inf is no number."""
CACHED_BYTES = 256 * 2**20
"""Most bytes of pixels that are kept; those of the images used last."""
_ATTRIBUTE = "_image_processing"
_NOT_OF_THE_MODEL = frozenset(("input_ids", "attention_mask", "token_type_ids"))
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which classes take 1 for the tokens of images and 0 for those of text."""
_MARK = "\u2402vf-text\u2403"

Images = tuple[bytes, ...]
"""The files of a prompt's images, in their order."""


def placeholder_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """The token ids that stand for images and videos; none for a model of text."""
    if getattr(config, "vision_config", None) is None:
        return ()
    ids = {getattr(config, name, None) for name in PLACEHOLDERS}
    return tuple(sorted(i for i in ids if isinstance(i, int)))


def attach(model: nn.Module, processor: Any) -> None:
    """Give ``model`` its ``processor``, which copies of the model take along."""
    base: Any = _base(model)
    if template := getattr(processor, "chat_template", None):
        processor.tokenizer.chat_template = template
    vars(base)[_ATTRIBUTE] = Processing(processor, base.config)


def processing_of(model: nn.Module) -> Processing | None:
    """What makes the inputs of ``model``; None for a model of text.

    *Raises* ConfigError when the model takes images and no processor is known.
    """
    base: Any = _base(model)
    if (attached := vars(base).get(_ATTRIBUTE)) is not None or not placeholder_ids(base.config):
        return attached
    from verifiers_trainer.engines.processors import load_processor

    name = str(getattr(base, "name_or_path", "") or "")
    if not name:
        raise ConfigError(
            f"{type(base).__name__} takes images, and its processor is not known: pass"
            " processing_class=AutoProcessor.from_pretrained(…)"
        )
    attach(base, load_processor(name, base.config))
    return vars(base)[_ATTRIBUTE]


def save_texts(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write the tokenizer of ``model`` to a folder, and the rest of its processor if it sees."""
    if (processing := processing_of(model)) is not None:
        processing.processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def language_part(model: nn.Module) -> nn.Module:
    """The module of a model that sees which computes text: all others see."""
    base: Any = _base(model)
    part: nn.Module | None = base.get_decoder()
    if part is None or part is base or part is getattr(base, "model", None):
        raise ConfigError(f"{type(base).__name__} does not say which part of it is its decoder")
    return part


def _with_positions(base: Any) -> Any:
    """The part of a model that computes positions of its own (M-RoPE); None without."""
    return next((p for p in (base, base.base_model) if hasattr(p, "get_rope_index")), None)


def _base(model: Any) -> nn.Module:
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif (inner := getattr(model, "_orig_mod", None)) is not None:
            model = inner
        elif not hasattr(model, "config"):
            model = model.module  # what distributes it
        else:
            return model


class Processing:
    """A model's processor; of ``config`` it takes which ids are placeholders.

    Threads may call it at the same time.
    """

    def __init__(self, processor: Any, config: PreTrainedConfig):
        self.processor = processor
        self.never = placeholder_ids(config)
        """Ids of placeholders: no policy samples them."""
        self._config = config
        self._lock = threading.Lock()
        self._pixels: OrderedDict[tuple[str, ...], tuple[int, dict[str, Tensor]]] = OrderedDict()

    def __deepcopy__(self, memo: object) -> Processing:
        # its tokenizer cannot be used by two threads that pad and encode
        return Processing(copy.deepcopy(self.processor), self._config)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.processor.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.processor.tokenizer = tokenizer

    @property
    def placeholder(self) -> str:
        """What a chat template writes for an image."""
        return str(self.processor.image_token)

    # --- what a check of chat templates needs of a tokenizer

    def apply_chat_template(self, conversation: list[Any], **options: Any) -> Any:
        """As the tokenizer's, of contents as the template reads them."""
        readable = [
            {**message, "content": self.content(message.get("content") or "")}
            for message in conversation
        ]
        return self.tokenizer.apply_chat_template(readable, **options)

    def __call__(self, text: str, **options: Any) -> Any:
        return self.tokenizer(text, **options)

    def decode(self, token_ids: Any) -> str:
        return self.tokenizer.decode(token_ids)  # type: ignore[return-value]

    # --- messages to ids

    @functools.cached_property
    def _takes_text(self) -> bool:
        """Whether the chat template shows content that is a text, and not only parts."""
        try:
            talk = [{"role": "user", "content": _MARK}]
            return _MARK in rendered(self.tokenizer, talk, tokenize=False)
        except Exception:  # noqa: BLE001  a template is a program and may raise anything
            return False

    def content(self, content: object) -> Any:
        """The content of a message as the chat template reads it: a text, or parts of which an
        image has its place alone. *Raises* BadRequest for a part that is neither."""
        if isinstance(content, str):
            return content if self._takes_text else [{"type": "text", "text": content}]
        parts: list[dict[str, str]] = []
        for part in content if isinstance(content, list) else [content]:
            if image_url(part) is not None:
                parts.append({"type": "image"})
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            else:
                raise BadRequest(
                    "messages hold content that is neither text nor an image", "messages"
                )
        if not any(part["type"] == "image" for part in parts):
            return self.content("\n".join(part["text"] for part in parts))
        return parts

    def ids(self, text: str, images: Images) -> np.ndarray:
        """The token ids, int32 [P], of a rendered text with the placeholders of ``images`` expanded.

        *Raises* BadRequest when the text has places for more or fewer images, and for an image
        that cannot be decoded.
        """
        if (num_places := text.count(self.placeholder)) != len(images):
            raise BadRequest(
                f"the prompt has {len(images)} images and {num_places} places for them"
                f" ({self.placeholder}): its text may not have the placeholder, and some chat"
                " templates leave out the images of a tool's or an assistant's message",
                "messages",
            )
        if not images:
            encoded = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            encoded = self._processed(text, images)["input_ids"][0]
        ids = np.asarray(encoded, np.int32)
        self.check(ids, images)
        return ids

    def check(self, ids: np.ndarray, images: Images) -> None:
        """*Raises* BadRequest unless ``ids`` have as many placeholders as ``images`` take."""
        counted = int(np.isin(ids, self.never).sum())
        if counted != (needed := self._encoded(images)[0]):
            raise BadRequest(
                f"the tokens have {counted} placeholders, and the processor makes {needed} of their"
                f" {len(images)} images: the prompt was cut, or another processor expanded it",
                "messages",
            )

    # --- ids and images to the model's inputs

    def arguments(
        self, model: nn.Module, ids_1T: Tensor, images: Images, *, is_trained: bool = False
    ) -> dict[str, Tensor]:
        """What the forward pass of ``model`` takes beside one row of ids, int64 [1, T]: pixels,
        which tokens are an image's, and where the class has positions of its own, those. Without
        images of ids [B, L].

        *Raises* BadRequest as `check`.
        """
        import torch

        self.check(ids_1T.reshape(-1).cpu().numpy(), images)
        base: Any = _base(model)
        kind: Any = type(base)
        device, takes = ids_1T.device, _parameters(kind)
        types_1T = torch.isin(ids_1T, torch.tensor(self.never, device=device)).long()
        arguments: dict[str, Tensor] = {}
        if images or is_trained:
            arguments |= {name: types_1T for name in _TYPES if name in takes}
        if not images:
            return arguments
        pixels = {name: value.to(device) for name, value in self._encoded(images)[1].items()}
        arguments |= {name: value for name, value in pixels.items() if name in takes}
        if (owner := _with_positions(base)) is not None:
            inputs = {**arguments, "input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}
            kind = type(owner)
            names = _parameters(kind, "get_rope_index")
            positions, _ = owner.get_rope_index(
                **{name: value for name, value in inputs.items() if name in names}
            )
            arguments["position_ids"] = positions
        return arguments

    def packs_text(self, model: nn.Module) -> bool:
        """Whether samples without images may share a row: a class with positions of its own would
        take theirs for those of one sample."""
        return _with_positions(_base(model)) is None

    def _processed(self, text: str, images: Images) -> Mapping[str, Any]:
        try:
            decoded = [decode_image(content) for content in images]
            with self._lock:
                return self.processor(
                    text=[text], images=decoded, return_tensors="pt", add_special_tokens=False
                )
        except ConfigError as error:
            raise BadRequest(str(error), "messages") from error
        except (ValueError, TypeError, RuntimeError) as error:
            raise BadRequest(
                f"the processor refuses the images of the prompt: {error}", "messages"
            ) from error

    def _encoded(self, images: Images) -> tuple[int, dict[str, Tensor]]:
        """(placeholders, pixels and what describes them) of ``images`` together; cached."""
        if not images:
            return 0, {}
        from torch import Tensor

        key = tuple(map(image_hash, images))
        with self._lock:
            if (cached := self._pixels.get(key)) is not None:
                self._pixels.move_to_end(key)
                return cached
        encoded = self._processed(self.placeholder * len(images), images)
        count = int(np.isin(encoded["input_ids"].numpy(), self.never).sum())
        pixels = {
            name: value
            for name, value in encoded.items()
            if isinstance(value, Tensor) and name not in _NOT_OF_THE_MODEL and name not in _TYPES
        }
        with self._lock:
            self._pixels[key] = count, pixels
            while len(self._pixels) > 1 and self._cached_bytes() > CACHED_BYTES:
                self._pixels.popitem(last=False)
        return count, pixels

    def _cached_bytes(self) -> int:
        return sum(v.nbytes for _, pixels in self._pixels.values() for v in pixels.values())


@functools.cache
def _parameters(kind: object, method: str = "forward") -> frozenset[str]:
    """The names that a class's method takes."""
    return frozenset(inspect.signature(getattr(kind, method)).parameters)
