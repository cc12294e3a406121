"""Inference inside the training process, on the trainer's parameters, behind an HTTP endpoint.

The engine holds a second module over the same parameters (``share_parameters``), a generation loop
in a thread (``padded``) and an OpenAI endpoint in another (``endpoint``). The trainer updates
weights in place inside ``pause``; nothing is copied, requests in flight survive, and every token is
labelled with the policy version that sampled it. Not for sharded training (FSDP, ZeRO), where one
process holds parts of the parameters.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from verifiers.errors import ConfigError, EndpointUnreachable
from verifiers_trainer.engines import protocol, role_adapters
from verifiers_trainer.engines.embedded.padded import PaddedGenerator
from verifiers_trainer.engines.embedded.static import StaticGenerator, cuda_graphs, not_covered
from verifiers_trainer.engines.embedded.threads import default_threads
from verifiers_trainer.engines.http.chat import ChatFormat, shows_tools, template_source
from verifiers_trainer.engines.http.endpoint import Address, Endpoint, Serving
from verifiers_trainer.engines.http.tool_calls import ToolCallParser, resolve_tool_call_parser
from verifiers_trainer.engines.processing import Processing, processing_of
from verifiers_trainer.engines.requests import Generator

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


log = logging.getLogger(__name__)

Mode = Literal["auto", "continuous", "padded", "static", "deterministic"]

_CPU_KV_BYTES = 2 * 2**30
_ACCELERATOR_KV_SHARE = 0.3
_CPU_PREFILL_TOKENS = 1024
_ACCELERATOR_PREFILL_TOKENS = 8192


class _PolicyVersion:
    """The version of new tokens; a separate object: threads hold no reference to the engine."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def __call__(self) -> int:
        return self.value


class EmbeddedEngine:
    """Serves ``model`` to OpenAI clients from this process. Implements ``protocol.Engine``.

    Constructing it has no side effects; ``start`` makes the sharing copy, so call it after loading
    weights and aligning special tokens. It is a context manager, and stops when garbage-collected.

    mode: ``padded`` (one batch that rows join and leave), ``static`` (slots of fixed addresses, a
        CUDA graph for each step) or ``deterministic`` (one request at a time, bit for bit
        reproducible). ``auto`` is ``static`` on a CUDA device and ``padded`` elsewhere, where it is
        faster; a model that slots do not cover is decoded ``padded``. ``continuous`` is ``padded``.
    max_seq_len: longest sequence in tokens, prompt and completion together.
    concurrency: most requests that decode together; more of them wait.
    max_batch_tokens: most tokens of the prompts of a prefill.
    kv_bytes: bound on the key/value caches in bytes; 2 GiB on a CPU, 30 % of the free memory of an
        accelerator, less the ``reserved_bytes`` that training has yet to take.
    threads: torch's threads for this process, from ``start`` to ``stop``. None: one for a model of
        at most ``threads.SMALL_PARAMETERS`` on a CPU, unless OMP_NUM_THREADS is set; otherwise as
        they are.
    autocast_dtype: precision to compute in when it is lower than the weights' (mixed-precision
    training).
    tool_call_parser: "auto" (what the chat template shows), "hermes", "llama3_json", a function
        from text to (text, calls), or "none" or None: calls stay text.
    address: where the endpoint listens; a free port of 127.0.0.1 with a random key by default.

    Raises ConfigError for values that cannot work; each names the argument.
    """

    shares_weights = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        mode: Mode = "auto",
        max_seq_len: int,
        concurrency: int,
        max_batch_tokens: int | None = None,
        kv_bytes: int | None = None,
        reserved_bytes: int = 0,
        threads: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        served_model: str | None = None,
        tool_call_parser: str | ToolCallParser | None = "auto",
        address: Address | None = None,
    ):
        if mode not in get_args(Mode):
            raise ConfigError(
                f"mode={mode!r} must be one of {', '.join(get_args(Mode))}", field="mode"
            )
        counts = {
            "max_seq_len": max_seq_len,
            "concurrency": concurrency,
            "max_batch_tokens": max_batch_tokens,
        }
        for field, value in counts.items():
            if value is not None and value < 1:
                raise ConfigError(f"{field}={value} must be at least 1", field=field)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and max_seq_len > limit:
            message = f"max_seq_len={max_seq_len} is more than the {limit} positions of the model"
            raise ConfigError(message, field="max_seq_len")
        self._model, self._tokenizer = model, tokenizer
        self._adapters = role_adapters.weights_of(model)
        self._mode, self._reason = _choose(mode, model, has_adapters=bool(self._adapters))
        self._max_seq_len, self._concurrency = max_seq_len, concurrency
        self._kv_bytes, self._reserved_bytes = kv_bytes, reserved_bytes
        self._max_batch_tokens = max_batch_tokens
        self._threads, self._autocast_dtype = threads, autocast_dtype
        self._served_model = served_model or getattr(model, "name_or_path", "") or "policy"
        self._parser = resolve_tool_call_parser(tool_call_parser, template_source(tokenizer))
        self._address = address
        self._version = _PolicyVersion()
        self._replica: Any = None
        self._generator: Generator | None = None
        self._endpoint: Endpoint | None = None
        self._finalizer: weakref.finalize | None = None

    @property
    def base_url(self) -> str:
        return self._running_endpoint().base_url

    @property
    def api_key(self) -> str:
        return self._running_endpoint().api_key

    @property
    def served_model(self) -> str:
        return self._served_model

    @property
    def models(self) -> tuple[str, ...]:
        """What a request may name as its model: the served model, or the roles of adapters."""
        return tuple(self._adapters) or (self._served_model,)

    @property
    def tools_shown(self) -> bool | None:
        """Whether the chat template shows the tools of a request; None if it does not say."""
        return shows_tools(self._tokenizer)

    @property
    def processing(self) -> Processing | None:
        """What makes the inputs of a model that takes images; None for a model of text."""
        return processing_of(self._model)

    @property
    def mode(self) -> Mode:
        """The mode in use: ``padded``, ``static`` or ``deterministic``."""
        return self._mode

    @property
    def capabilities(self) -> frozenset[str]:
        always = protocol.TRAINABLE | {protocol.PAUSE_KEEP, protocol.SHARED_WEIGHTS}
        return always | {protocol.DETERMINISTIC} if self._mode == "deterministic" else always

    @property
    def version(self) -> int:
        return self._version.value

    @property
    def num_restarts(self) -> int:
        return 0

    def set_version(self, version: int) -> None:
        """Label tokens with ``version`` from the next decoding step on.

        Call it inside ``pause``: afterwards, tokens may already be sampled with the old label.
        """
        self._version.value = version

    def start(self, deadline_s: float = 60.0) -> None:
        """Make the sharing copy and serve; a no-op when running.

        Raises ConfigError for a model this mode cannot serve, EndpointUnreachable when a thread
        does not start in time.
        """
        if self._endpoint is not None:
            return
        replica = share_parameters(self._model)
        if self._adapters:
            role_adapters.without_adapters(replica)
        log.info("the embedded engine decodes in mode %s: %s", self._mode, self._reason)
        # its backend cannot be used by two threads that pad and encode
        tokenizer = copy.deepcopy(self._tokenizer)
        if (processing := processing_of(replica)) is not None:
            processing.tokenizer = tokenizer
        chat = ChatFormat(tokenizer, self._max_seq_len, processing)
        generator = self._build_generator(replica, chat)
        serving = Serving(
            generator=generator,
            chat=chat,
            tool_call_parser=self._parser,
            served_model=self._served_model,
            max_seq_len=self._max_seq_len,
            eos_token_ids=eos_token_ids(replica, tokenizer),
            vocabulary=replica.config.get_text_config().vocab_size,
            version=self._version,
            description={
                "version": metadata.version("verifiers-trainer"),
                "engine": "embedded",
                "mode": self._mode,
            },
            adapters=self._adapters,
        )
        endpoint = Endpoint(serving, self._address)
        try:
            endpoint.start(deadline_s)
            generator.start(endpoint.resolve, deadline_s)
        except BaseException:  # an interrupt too: threads and port are released; raised again
            _shut_down(generator, endpoint, torch.get_num_threads())
            raise
        self._replica, self._generator, self._endpoint = replica, generator, endpoint
        self._finalizer = weakref.finalize(
            self, _shut_down, generator, endpoint, torch.get_num_threads()
        )
        torch.set_num_threads(self._threads or default_threads(self._model))

    def stop(self) -> None:
        """Stop both threads; requests in flight receive an error. Idempotent; may be restarted."""
        if self._finalizer is not None:
            self._finalizer()
        self._generator = self._endpoint = self._finalizer = self._replica = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause the loop between two decoding steps; a no-op while the engine is stopped."""
        if self._generator is None:
            yield
            return
        with self._generator.pause():
            yield

    def health(self) -> bool:
        return self._generator is not None and self._generator.alive

    def check_shared(self) -> None:
        """Raise ConfigError if Parameter objects were replaced: it would sample old weights."""
        if self._generator is None:
            return
        adapters = [tensor for each in self._adapters.values() for tensor in each.tensors]
        if not shares_parameters(self._replica, self._model) or not are_parameters_of(
            adapters, self._model
        ):
            raise ConfigError(
                "parameters of the model were replaced after the engine started, so it samples from"
                " old weights; update them in place, or stop and start the engine"
            )

    def __enter__(self) -> EmbeddedEngine:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _running_endpoint(self) -> Endpoint:
        if self._endpoint is None:
            raise EndpointUnreachable("the embedded engine is not running; call start() first")
        return self._endpoint

    def _build_generator(self, replica: PreTrainedModel, chat: ChatFormat) -> Generator:
        is_cuda = replica.device.type == "cuda"
        prefill_tokens = _ACCELERATOR_PREFILL_TOKENS if is_cuda else _CPU_PREFILL_TOKENS
        options: dict[str, Any] = {
            "decode": chat.decode,
            "version": self._version,
            "max_rows": 1 if self._mode == "deterministic" else self._concurrency,
            "kv_bytes": self._kv_bytes or default_kv_bytes(replica.device, self._reserved_bytes),
            "max_batch_tokens": self._max_batch_tokens or prefill_tokens,
            "autocast_dtype": self._autocast_dtype,
        }
        if self._mode != "static":
            return PaddedGenerator(replica, **options)
        replica.set_attn_implementation("sdpa")  # a step has a mask, which flash attention has not
        return StaticGenerator(
            replica,
            max_seq_len=self._max_seq_len,
            capture=cuda_graphs(replica.device) if is_cuda else None,
            is_ahead=is_cuda,
            **options,
        )


def _choose(mode: Mode, model: PreTrainedModel, *, has_adapters: bool) -> tuple[Mode, str]:
    """(mode in use, reason).

    By the kind of device, as ``benchmarks`` measured, and not by a trial at each
    start: its noise would change the mode, and so the last digits, of a run that is resumed.
    """
    if mode in ("padded", "deterministic", "continuous"):
        return ("padded" if mode == "continuous" else mode), "as set"
    if has_adapters:  # a captured step has the adapters of its capture
        return "padded", "rows have adapters of their own"
    if mode == "auto" and model.device.type != "cuda":
        return "padded", "faster than slots without CUDA graphs"
    if (reason := not_covered(model)) is not None:
        return "padded", f"slots do not cover the model, {reason}"
    return "static", "as set" if mode == "static" else "a CUDA graph for each step"


def _shut_down(generator: Generator, endpoint: Endpoint, threads: int) -> None:
    generator.stop()
    endpoint.stop()
    torch.set_num_threads(threads)


def default_kv_bytes(device: torch.device, reserved: int) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    elif device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    else:
        return _CPU_KV_BYTES
    return max(0, int(_ACCELERATOR_KV_SHARE * max(free - reserved, free / 4)))


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """End-of-turn token ids of the model's generation configuration and of the tokenizer."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    return tuple(
        dict.fromkeys(token for token in [*configured, tokenizer.eos_token_id] if token is not None)
    )


def share_parameters(model: torch.nn.Module) -> Any:
    """A copy of ``model`` whose parameters *are* those of ``model``; an in-place update affects
    both.

    Everything else is separate: configuration, mode (evaluation), hooks, buffers, and the class's
    ``forward`` even when the original's instance overrides it. Gradient checkpointing is off. For a
    PEFT model the wrapped transformers model is returned, including its adapter layers.

    Raises ConfigError for prompt-learning adapters, which are not layers.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    replica: Any = copy.deepcopy(
        model, {id(parameter): parameter for parameter in model.parameters()}
    )
    replica.__dict__.pop("forward", None)
    if hasattr(replica, "get_base_model"):
        if getattr(replica.active_peft_config, "is_prompt_learning", False):
            raise ConfigError(
                "the embedded engine cannot serve prompt-learning adapters; use LoRA or a vLLM"
                " server"
            )
        replica = replica.get_base_model()
        replica.__dict__.pop("forward", None)
    if getattr(replica, "is_activation_checkpointing", False):
        replica.activation_checkpointing_disable()
    replica.config.use_cache = True
    return replica.eval()


def shares_parameters(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether every parameter of ``model`` is one of ``other``'s; False once one was replaced."""
    return are_parameters_of(model.parameters(), other)


def are_parameters_of(tensors: Iterable[torch.Tensor], model: torch.nn.Module) -> bool:
    """Whether each of ``tensors`` is a parameter of ``model``; False once one was replaced."""
    parameter_ids = {id(parameter) for parameter in model.parameters()}
    return all(id(tensor) in parameter_ids for tensor in tensors)
