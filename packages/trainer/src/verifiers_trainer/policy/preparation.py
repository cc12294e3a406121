"""Prepare a loaded model for training: adapter, dropout, precision, chat template.

All settings are checked before the model is changed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from verifiers.checks.chat_template import check_increasing_context
from verifiers.data.chat_template import rendered
from verifiers.data.examples import Example
from verifiers.environments.base import Environment
from verifiers.environments.group import EnvGroup
from verifiers.errors import CheckpointError, ConfigError, DatasetError
from verifiers_trainer.distributed import deepspeed, fsdp
from verifiers_trainer.engines import processing
from verifiers_trainer.engines.exact.history import require_exact_history
from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat, Prompt, Tokenizer
from verifiers_trainer.engines.processing import Processing
from verifiers_trainer.engines.role_adapters import roles_of
from verifiers_trainer.engines.role_client import adapter_name
from verifiers_trainer.engines.vllm.weights.export import EMBEDDINGS
from verifiers_trainer.policy import adapter_files, adapters, builtin_models, quantization
from verifiers_trainer.policy.checkpoint_files import reading
from verifiers_trainer.policy.loading import get_model, get_tokenizer
from verifiers_trainer.policy.logprobs import find_causal_lm
from verifiers_trainer.settings.config import RLConfig

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from verifiers.types import Messages

log = logging.getLogger(__name__)

MOST_PROMPTS = 1000
"""Prompts whose tokens are counted to say that none fits; the first that fits is usually the first."""


def load(model: Any, tokenizer: Any, config: RLConfig) -> tuple[Any, Any]:
    """(model, tokenizer), each loaded if it is a name; by default the model's own tokenizer. A
    processor gives its tokenizer, and is attached to the model."""
    processor = tokenizer if hasattr(tokenizer, "image_processor") else None
    if processor is not None:
        tokenizer = processor.tokenizer
    name = model if isinstance(model, str) else getattr(model, "name_or_path", None)
    if tokenizer is None:
        if not name:
            raise ConfigError(
                "the model has no name_or_path to load its tokenizer from: pass processing_class=…"
            )
        has_adapter = adapter_files.adapter_folder(name) or adapter_files.role_folders(name)
        tokenizer = get_tokenizer(
            adapter_files.tokenizer_source(Path(name).expanduser()) if has_adapter else name
        )
    if (folder := adapter_files.adapter_folder(model)) is not None:
        model = adapters.start_from(folder, config)
    elif roles := adapter_files.role_folders(model):
        model = adapters.start_from_roles(roles, config)
    elif isinstance(model, str):
        model = get_model(
            model, config.use_liger, config.model_init_kwargs, quantize=config.quantize
        )
    elif config.quantize is not None and not quantization.is_quantized(model):
        raise ConfigError(
            f"quantize={config.quantize!r} quantises a model while it is loaded, and this"
            f" {type(model).__name__} is: give its name, or load it with quantization_config=…"
        )
    if processor is not None:
        processing.attach(model, processor)
    if (of_images := processing.processing_of(model)) is not None:
        if getattr(tokenizer, "chat_template", None) is None:
            tokenizer.chat_template = of_images.tokenizer.chat_template
        of_images.tokenizer = tokenizer
    return model, tokenizer


PLAIN_TEMPLATE = """\
{%- for message in messages %}
    {{- message.role | capitalize + ':\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}{%- for part in message.content or [] %}{{- part.text or '' }}{%- endfor %}
    {%- endif %}
    {{- (eos_token or '') + '\\n\\n' if message.role == 'assistant' else '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:\\n' }}{%- endif %}
"""
"""The chat template of a base model: each role's name above its text, an end token after each
answer. It only appends, and shows no tools."""


def ensure_chat_template(
    tokenizer: PreTrainedTokenizerBase, env: Environment, config: RLConfig
) -> None:
    """Give a base model's tokenizer ``PLAIN_TEMPLATE``, with a warning, where the environment uses
    chat messages.

    *Raises* ConfigError if a server renders the messages, which would not know that template.
    """
    if env.message_type != "chat" or getattr(tokenizer, "chat_template", None):
        return
    name = getattr(tokenizer, "name_or_path", "")
    missing = f"the tokenizer {name!r} has no chat template, and the environment uses chat messages"
    if config.server_url is not None and config.history != "exact":
        raise ConfigError(
            f"{missing}, which the server renders: set tokenizer.chat_template and start the server"
            " with the same template (--chat-template), use an instruct model, or"
            " message_type='completion'"
        )
    ids = tokenizer("a")["input_ids"]
    begins = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    tokenizer.chat_template = ("{{- bos_token }}" if begins else "") + PLAIN_TEMPLATE
    log.warning(
        "%s: a plain template is used (User:, Assistant:, and %r after each answer). For another,"
        " set tokenizer.chat_template; for prompts of text, message_type='completion'",
        missing,
        tokenizer.eos_token,
    )


def probe_template(
    tokenizer: PreTrainedTokenizerBase,
    env: Environment,
    config: RLConfig,
    of_images: Processing | None = None,
) -> None:
    """Warn when ``env`` has several turns and the chat template rewrites earlier turns, or raise if
    that is required.

    With ``history="exact"`` earlier turns are never rendered again; then the end token of a turn
    must be known. Single-turn and plain-text environments are not checked; of a group, its members
    are. *Raises* ConfigError.
    """
    for member in members(env):
        if member.max_turns == 1 or member.message_type != "chat":
            continue
        try:
            problem = template_problem(tokenizer, member, config.history, of_images)
        except (ConfigError, BadRequest) as error:
            # the template may still render this environment's messages
            if config.require_increasing_context or config.history == "exact":
                raise ConfigError(str(error)) from error
            log.warning("could not check whether the chat template only appends: %s", error)
            return
        if problem is not None:
            if config.require_increasing_context:
                raise ConfigError(
                    f"{problem} To train anyway, set require_increasing_context=False."
                )
            log.warning("%s", problem)
            return


def template_problem(
    tokenizer: PreTrainedTokenizerBase,
    env: Environment,
    history: str,
    of_images: Processing | None = None,
) -> str | None:
    """How the chat template changes earlier turns of ``env``'s conversations; None when it does
    not.

    Raises ``ConfigError`` or ``BadRequest`` when the template cannot render the test conversations.
    """
    tools = env.tool_defs or None
    if history == "exact":
        require_exact_history(tokenizer, tools, of_images)
        return None
    report = check_increasing_context(of_images or tokenizer, tools=tools)
    if report.ok:
        return None
    return (
        f"the chat template does not only append: {report.first_difference}\n{report.advice} Or set"
        " history='exact': the prompt then holds the tokens that the model sampled, earlier"
        " thoughts included."
    )


def within_prompt_limit(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    env: Environment,
    config: RLConfig,
    of_images: Processing | None = None,
) -> list[Example]:
    """The examples to train on under ``max_prompt_len``; logs how many prompts are longer.

    Raises ``DatasetError`` when none is left.
    """
    if config.max_prompt_len is None:
        return list(examples)
    limit, cut = config.max_prompt_len, config.prompt_overflow == "truncate_left"
    if cut and any(member.max_turns != 1 for member in members(env)):
        # of requests: those of later turns hold more than the prompt
        config.prompt_overflow = "skip"
        return _cut_in_text(examples, tokenizer, env, limit, of_images)
    short = [
        e
        for e in examples
        if num_prompt_tokens(e.row, tokenizer, env.for_row(e.row), of_images) <= limit
    ]
    if num_long := len(examples) - len(short):
        log.warning(
            "%d of %d examples have prompts of more than max_prompt_len = %d tokens and %s",
            *(num_long, len(examples), limit),
            "are cut at their beginning" if cut else "are not used",
        )
    if not short and not cut:
        raise DatasetError(f"every prompt is longer than max_prompt_len = {limit} tokens: raise it")
    return list(examples) if cut else short


def _cut_in_text(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    env: Environment,
    limit: int,
    of_images: Processing | None,
) -> list[Example]:
    """The examples with prompts of at most ``limit`` tokens: longer prompts without the beginning
    of their text.

    The text is cut, not the tokens, so that every turn of a conversation begins with the same
    prompt. Prompts that do not fit without any text, or have parts that are no text, are left out.
    Raises ``DatasetError`` when none is left.
    """
    fitting, num_cut = [], 0
    for example in examples:

        def size(num_characters: int, row: Mapping[str, Any] = example.row) -> int:
            shorter = {**row, "prompt": _without_beginning(row["prompt"], num_characters)}
            return num_prompt_tokens(shorter, tokenizer, env.for_row(row), of_images)

        prompt = example.row["prompt"]
        if size(0) <= limit:
            fitting.append(example)
            continue
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        if not all(isinstance(text, str) for text in texts):
            continue
        if size(total := sum(map(len, texts))) > limit:
            continue
        fewest = bisect_left(range(total), -limit, key=lambda count: -size(count))
        while size(fewest) > limit:  # fewer characters may be more tokens, by a few
            fewest += 1
        shorter = {**example.row, "prompt": _without_beginning(prompt, fewest)}
        fitting.append(replace(example, row=shorter))
        num_cut += 1
    if not fitting:
        raise DatasetError(f"every prompt is longer than max_prompt_len = {limit} tokens: raise it")
    num_unused = len(examples) - len(fitting)
    if num_cut or num_unused:
        log.warning(
            "%d of %d examples have prompts of more than max_prompt_len = %d tokens: %d are cut at"
            " their beginning, %d are not used",
            *(num_cut + num_unused, len(examples), limit, num_cut, num_unused),
        )
    return fitting


def _without_beginning(prompt: Messages, num_characters: int) -> Any:
    """A text or messages without their first characters; a message that becomes empty stays."""
    if isinstance(prompt, str):
        return prompt[num_characters:]
    messages = []
    for message in prompt:
        text = message["content"]
        shorter = text[num_characters:] if isinstance(text, str) else text
        messages.append({**message, "content": shorter})
        num_characters = max(0, num_characters - len(text or ""))
    return messages


def why_no_prompt_fits(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    env: Environment,
    max_seq_len: int,
    of_images: Processing | None = None,
) -> str:
    """A sentence if no prompt leaves room for a token of an answer, of at most ``MOST_PROMPTS``
    that are spread over the examples; "" if one does, or cannot be rendered."""
    looked_at = range(0, len(examples), -(-len(examples) // MOST_PROMPTS))
    sizes = []
    for index in looked_at:
        row = examples[index].row
        try:
            size = num_prompt_tokens(row, tokenizer, env.for_row(row), of_images)
        except (ConfigError, BadRequest):  # its rollout fails, with the reason
            return ""
        if size < max_seq_len:
            return ""
        sizes.append(size)
    return (
        f"no prompt fits max_seq_len = {max_seq_len}, so that the model is never asked: the shortest"
        f" of {len(looked_at):,} has {min(sizes):,} tokens with the chat template. Raise max_seq_len"
        " above that, with room for the answer, or shorten the prompts"
    )


def prompt_of(row: Mapping[str, object], chat: ChatFormat, env: Environment) -> Prompt:
    """The prompt of an example's messages."""
    tools = json.dumps(env.tool_defs).encode() if env.tool_defs else None
    return chat.prompt(json.dumps(row["prompt"]).encode(), tools)


def num_prompt_tokens(
    row: Mapping[str, Any],
    tokenizer: Tokenizer,
    env: Environment,
    of_images: Processing | None = None,
) -> int:
    """Number of tokens of an example's rendered prompt; ``of_images``: of a model that sees."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    if of_images is not None:
        return len(prompt_of(row, ChatFormat(tokenizer, None, of_images), env).ids)
    text = rendered(
        tokenizer,
        [dict(message) for message in prompt],
        tools=env.tool_defs or None,
        add_generation_prompt=True,
        tokenize=False,
    )
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def members(env: Environment) -> Iterator[Environment]:
    """The environments of a group, of nested groups too, or ``env`` itself."""
    if isinstance(env, EnvGroup):
        for member in env.envs:
            yield from members(member)
    else:
        yield env


def prepare(model: Any, config: RLConfig, peft_config: PeftConfig | None) -> PreTrainedModel:
    """Apply the settings: wrap the model in an adapter, disable dropout, make trainable weights
    fp32; return it.

    The adapter's first weights depend on ``config.seed`` alone. Raises ``ConfigError`` for two
    adapters.
    """
    deepspeed.require_whole(model)
    if config.train_vision:
        require_vision(model, config.world_size)
    _prepare_four_bits(model)
    is_peft = hasattr(model, "peft_config")
    if is_peft and peft_config is not None:
        raise ConfigError(
            "the model already has an adapter: pass it without peft_config, or pass the plain model"
        )
    if (peft_config is not None or config.use_lora) and not is_peft:
        from peft import get_peft_model

        described = peft_config or config.lora_config or lora_config(config, model)
        quantization.require_adaptable(
            model, set(getattr(described, "modules_to_save", None) or ())
        )
        try:  # a copy: the name of the base is written into it
            if config.adapter_roles:
                roles = config.adapter_roles
                model = adapters.with_role_adapters(model, described, roles, config.seed)
            else:
                torch.manual_seed(config.seed)
                model = get_peft_model(model, copy.copy(described))
        except ValueError as error:
            raise ConfigError(f"peft refuses the adapter: {error}") from error
        adapters.make_base_absolute(model)
        log.info("the adapter covers %s", adapters.covered(model))
    if config.adapter_roles != roles_of(model):
        trained = f"the roles {', '.join(config.adapter_roles)}" if config.adapter_roles else "none"
        raise ConfigError(
            f"lora_per_role trains adapters of {trained}, and the model has"
            f" {', '.join(roles_of(model)) or 'an adapter of no role'}: begin with the model below"
            " its adapters, or with the adapters of these roles"
        )
    quantization.require_adapter(model)
    if processing.processing_of(model) is not None and not config.train_vision:
        freeze_vision(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "no parameter of the model requires a gradient: load the adapter with is_trainable=True"
        )
    if hasattr(model, "peft_config") and config.keeps_base_in_bf16:
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.dtype == torch.float32:
                parameter.data = parameter.data.bfloat16()
    if config.disable_dropout:
        adapter, of_settings = (
            peft_config or config.lora_config,
            config.lora_dropout * config.use_lora,
        )
        if getattr(adapter, "lora_dropout", of_settings):
            log.warning(
                "lora_dropout is switched off: it makes sampler and trainer disagree;"
                " disable_dropout=False keeps it"
            )
        _disable_dropout(model)
    if config.master_weights == "fp32":
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                # half-precision weights lose updates at small learning rates
                parameter.data = parameter.data.float()
    if config.gradient_checkpointing and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    return model


def _prepare_four_bits(model: Any) -> None:
    """Say what a model in four bits takes. *Raises* ``ConfigError`` for a class that multiplies by
    the weight of a layer instead of calling it."""
    quantization.compute_exactly(model)
    layers = quantization.layers_of(model)
    if bypassed := [name for name in layers if adapters.is_bypassed(model, name)]:
        raise ConfigError(
            f"{type(model).__name__} reads the weight of {bypassed[0]} instead of calling it, which"
            " it cannot in four bits: leave quantize out"
        )
    if layers:
        size = model.get_memory_footprint() / 1e9
        log.info("%d layers are in four bits: the model takes %.3g GB", len(layers), size)


def require_vision(model: nn.Module, world: int) -> None:
    """*Raises* ``ConfigError`` where ``train_vision`` has no effect, or ranks would wait for each
    other: of a row without an image what sees has no gradient."""
    if processing.processing_of(model) is None:
        raise ConfigError(
            f"train_vision=True, and {type(model).__name__} takes no images: leave it out"
        )
    if world > 1:
        raise ConfigError(
            f"train_vision=True trains in one process, and there are {world}: leave it out"
        )


def freeze_vision(model: nn.Module) -> None:
    """Train of a model that sees what computes text alone, with its head."""
    of_text = {id(weight) for weight in processing.language_part(model).parameters()}
    if (head := find_causal_lm(model).get_output_embeddings()) is not None:
        of_text |= {id(weight) for weight in head.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in of_text:
            parameter.requires_grad_(False)


def has_packed_kernel(model: PreTrainedModel) -> bool:
    """Whether attention cost is per sample (FlashAttention) and not the square of the row."""
    return "flash" in (getattr(model.config, "_attn_implementation", None) or "")


def lora_config(config: RLConfig, model: nn.Module) -> Any:
    """The LoRA configuration of the ``lora_*`` fields for ``model``."""
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=_targets(config, model),
        modules_to_save=config.lora_modules_to_save,
        use_rslora=config.lora_use_rslora,
        task_type="CAUSAL_LM",
    )


def _targets(config: RLConfig, model: nn.Module) -> str | list[str]:
    """The layers that get an adapter: those of the settings, of a model that sees within what
    computes text."""
    targets = config.lora_target_modules
    if processing.processing_of(model) is None or config.train_vision or isinstance(targets, str):
        return targets or adapters.default_targets(model)
    part = processing.language_part(model)
    name = next(name for name, module in model.named_modules() if module is part)
    ends = targets or adapters.default_targets(part)
    if isinstance(ends, str):  # all linear layers
        linear = (n for n, m in part.named_modules() if isinstance(m, (nn.Linear, Conv1D)))
        ends = sorted({end.rpartition(".")[2] for end in linear})
    return rf"{re.escape(name)}\.(.*\.)?({'|'.join(map(re.escape, ends))})"


_RANDOM = re.compile(r"(^|_)(dropout|drop|pdrop|layerdrop|drop_path)(_|$)")
"""Names of numbers by which modelling code of transformers draws in training mode: those of its
configurations and of its modules' attributes."""
_JITTER = re.compile(r"(^|_)jitter(_|$)")
"""Names of the same kind that a router may read in evaluation mode too, as Phi's does: they stay,
and the router leaves training mode."""
_switched_off: dict[int, tuple[Any, dict[str, float]]] = {}
"""By identity (they have no hash): configurations with their numbers that ``disable_dropout`` set
to 0, and that saved weights keep."""


def _is_random(name: str, value: object, names: re.Pattern[str] = _RANDOM) -> bool:
    return isinstance(value, float) and value > 0 and bool(names.search(name))


def _evaluating(module: nn.Module, mode: bool = True) -> nn.Module:
    """``Module.train`` of what stays in evaluation mode."""
    return type(module).train(module, mode=False)


def _disable_dropout(model: nn.Module) -> None:
    """Set every probability of training mode to 0: of dropout modules, and the numbers in modules
    and configurations that functions read (``attention_dropout``, ``resid_pdrop``, ``layerdrop``,
    …). Routers with a jitter stay in evaluation mode."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if _is_random(name, value):
                setattr(module, name, 0.0)
            if _is_random(name, value, _JITTER):
                vars(module)["train"] = MethodType(_evaluating, module)
                module.eval()
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            configs[id(config)] = config
    for identity, config in configs.items():
        numbers = {name: value for name, value in vars(config).items() if _is_random(name, value)}
        vars(config).update(dict.fromkeys(numbers, 0.0))
        if numbers:
            _switched_off.setdefault(identity, (config, {}))[1].update(numbers)


@contextlib.contextmanager
def config_to_save(model: nn.Module) -> Iterator[None]:
    """Within it the configurations are those that the model came with."""
    identities = {id(getattr(module, "config", None)) for module in model.modules()}
    switched_off = [_switched_off[identity] for identity in identities & _switched_off.keys()]
    for config, numbers in switched_off:
        vars(config).update(numbers)
    try:
        yield
    finally:
        for config, numbers in switched_off:
            vars(config).update(dict.fromkeys(numbers, 0.0))


def save_weights(
    model: PreTrainedModel, folder: Path, state_dict: Mapping[str, object] | None = None
) -> None:
    """Write the model, or its adapter alone, as ``save_pretrained`` does; an adapter's base is not
    looked up."""
    options: dict[str, Any] = {"state_dict": state_dict}
    if hasattr(model, "peft_config"):
        options["save_embedding_layers"] = _adapts_embeddings(model)
    with config_to_save(model):
        model.save_pretrained(folder, **options)
    adapters.record_quantization(model, folder)


def _adapts_embeddings(model: Any) -> bool:
    """Whether the adapter covers embeddings or head, whose full weights are saved with it."""
    return any(EMBEDDINGS & set(peft.target_modules or ()) for peft in model.peft_config.values())


def save_merged(model: Any, folder: Path) -> None:
    """Write the model with its adapter merged into the weights, as an ordinary model; ``model`` is
    not changed.

    A head tied to the embeddings is untied where the adapter covers either of them: both are
    written.
    """
    quantization.require_mergeable(model, "export the adapter alone")
    adapters.require_one_adapter(model, merged=True)
    with config_to_save(model):
        if not hasattr(model, "peft_config"):
            model.save_pretrained(folder)
            return
        copied = copy.deepcopy(model)  # its configurations are those that the model came with
    adapters.merge(copied).save_pretrained(folder)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load a checkpoint's weights, or its adapter, into ``model`` in place, also for modules that
    share the parameters.

    Raises ``CheckpointError`` when they do not fit; nothing but safetensors files is read.
    """
    with reading(folder):
        load = _load_adapter if hasattr(model, "peft_config") else _load_all
        missing, unexpected = load(model, folder)
        fsdp.forget_whole(model)
    if missing or unexpected:
        raise CheckpointError(
            f"the weights in {folder} do not fit this model: missing {missing[:3]}, unexpected"
            f" {unexpected[:3]}",
            path=str(folder),
        )


def _load_adapter(model: Any, folder: Path) -> tuple[list[str], list[str]]:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    is_managed = fsdp.is_managed(model)
    parameters = fsdp.local_parameters(model) if is_managed else None
    of_roles = {name: folder / name for name in map(adapter_name, roles_of(model))}
    missing: list[str] = []
    unexpected: list[str] = []
    for name, source in (of_roles or {"default": folder}).items():
        tensors = load_file(source / "adapter_model.safetensors")
        targets = get_peft_model_state_dict(
            model,
            state_dict=parameters,
            adapter_name=name,
            save_embedding_layers=_adapts_embeddings(model),
        )
        if is_managed:
            plain = {fsdp.plain(name): tensor for name, tensor in targets.items()}
            return fsdp.scatter(tensors, plain)
        outcome: Any = set_peft_model_state_dict(model, tensors, adapter_name=name)
        missing += sorted(targets.keys() - tensors.keys())
        unexpected += outcome.unexpected_keys
    return missing, unexpected


def _load_all(model: nn.Module, folder: Path) -> tuple[list[str], list[str]]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError("no model weights (model*.safetensors)")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if getattr(model, "_weight_conversions", None) and tensors.keys() - model.state_dict().keys():
        # names in memory are not those of a checkpoint: experts are one parameter
        kind: Any = type(model)
        saved = kind.from_pretrained(folder, dtype="auto", **builtin_models.SAFE)
        tensors = saved.state_dict()
    if fsdp.is_managed(model):
        missing, unexpected = fsdp.scatter(tensors, model.state_dict(keep_vars=True))
    else:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return sorted(set(missing) - tied), list(unexpected)
