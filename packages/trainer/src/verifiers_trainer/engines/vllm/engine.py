"""``VLLMEngine``: vLLM servers that follow the policy in training. Implements
``engines.protocol.Engine``.

    start        connect to the servers, select the weight transfer, and check their completions
    set_version  push the trainer's present weights to every server
    repair       push the weights again to a restarted server; completions since the restart are discarded
    open_client  completions with the policy version that sampled them

One lock guards the weights: the trainer holds it while it changes them, pushes and repairs while
they read them. Every wait is bounded, and its error names the call. ``weights`` implements the
transfer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.clients.http import OpenAIChatCompletionsClient
from verifiers.clients.reply import token_fault
from verifiers.clients.round_robin import RoundRobinClient
from verifiers.errors import (
    ConfigError,
    EndpointUnreachable,
    MalformedResponse,
    ModelNotFound,
    ModelRefused,
    ModelUnavailable,
    WeightSyncError,
)
from verifiers.runtime.http_clients import tls_fault
from verifiers.types import ModelRequest, Response
from verifiers_trainer.engines import protocol
from verifiers_trainer.engines.loop_thread import LoopThread
from verifiers_trainer.engines.processing import Processing, placeholder_ids, processing_of
from verifiers_trainer.engines.vllm.control import Server, Serving, server_urls
from verifiers_trainer.engines.vllm.features import (
    OLDEST,
    PAUSE_KEEP,
    WEIGHT_SPANS,
    features_of,
    parse_version,
)
from verifiers_trainer.engines.vllm.labels import LabelReader
from verifiers_trainer.engines.vllm.probe import check_server, draw
from verifiers_trainer.engines.vllm.weights.protocol import (
    Deadline,
    WeightSync,
    version_in_label,
)

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

API_KEY_VAR = "VLLM_API_KEY"
LABEL_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 10.0
MAX_REPAIRS = 3
"""Maximum number of repairs for a request."""
MAX_RETRIES = 3

LEAST_BIAS = -100.0
"""The least that vLLM adds to a logit."""
OpenSync = Callable[[Sequence[Server], int, frozenset[str], str], WeightSync]
"""(servers, run number, common features, oldest version) -> the weight transfer."""


class VLLMEngine:
    """``urls`` are one or several servers; ``open_sync`` selects the weight transfer at ``start``.

    in_chat: whether the environment uses chat messages.
    sampling: the sampling arguments of rollouts, without those that reshape the distribution, which
        the first completions and ``draw`` are asked with.
    sync_timeout_s: bound on one push or repair in seconds, its retry included.
    sync_every: policy versions per push.
    """

    shares_weights = False
    processing: Processing | None = None
    """None: its text route takes no images, and its chat route prepares them itself."""

    def __init__(
        self,
        urls: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        open_sync: OpenSync,
        *,
        in_chat: bool = True,
        sampling: Mapping[str, object] = MappingProxyType({}),
        sync_timeout_s: float = 300.0,
        sync_every: int = 1,
        api_key: str | None = None,
    ):
        self.model = model
        # a model that takes images has contents as parts in some chat templates
        self._tokenizer: Any = processing_of(model) or tokenizer
        self._open_sync = open_sync
        self._in_chat, self._sampling = in_chat, sampling
        self.vocabulary: int = model.config.get_text_config().vocab_size
        """Number of token ids of the trained model."""
        self._never = placeholder_ids(model.config)
        self._timeout_s, self._every = sync_timeout_s, sync_every
        self._urls = server_urls(urls)
        self._api_key = api_key or os.environ.get(API_KEY_VAR) or "EMPTY"
        self.run = secrets.randbits(40)
        """Random number that distinguishes this run's weights from another run's."""
        self.servers: list[Server] = []
        """Connected servers; empty before ``start``."""
        self._thread = LoopThread("verifiers-vllm")
        self._lock = threading.RLock()
        self._sync: WeightSync | None = None
        self._features: frozenset[str] = frozenset()
        self.server_version: str | None = None
        """The oldest vLLM of the servers; None before ``start``."""
        self._pushed: tuple[int, object] | None = None
        """(version, stamp of the weights) of the last push."""
        self._live = -1
        self._repairs: dict[str, Future[None]] = {}
        self._repairs_lock = threading.Lock()
        self._labels: dict[str, LabelReader] = {}

    # --- properties -------------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        return self._running_servers()[0].base_url

    @property
    def api_key(self) -> str:
        return self._api_key

    @property
    def served_model(self) -> str:
        return self._running_servers()[0].serving.model

    @property
    def version(self) -> int:
        return self._pushed[0] if self._pushed else -1

    @property
    def num_restarts(self) -> int:
        return sum(server.serving.repairs for server in self.servers)

    @property
    def capabilities(self) -> frozenset[str]:
        keeps = PAUSE_KEEP in self._features
        return protocol.TRAINABLE | {protocol.PAUSE_KEEP} if keeps else protocol.TRAINABLE

    def health(self) -> bool:
        return bool(self.servers) and all(server.is_healthy() for server in self.servers)

    def check_shared(self) -> None:
        """No-op: servers do not share the trainer's parameters."""

    def _running_servers(self) -> list[Server]:
        if not self.servers:
            raise EndpointUnreachable("the inference servers are not connected; call start() first")
        return self.servers

    # --- start and stop ---------------------------------------------------------------------------

    def start(self, deadline_s: float = 300.0) -> None:
        """Connect to the servers and check their features; a no-op when started.

        Raises ``EndpointUnreachable`` for a server that does not respond in time, ``ConfigError``
        for a server whose tokens cannot be trained on or that cannot take new weights.
        """
        if self.servers:
            return
        deadline = Deadline.after(deadline_s)
        self._thread.start()
        servers: list[Server] = []
        try:
            servers = [Server(url, self._api_key, self._thread) for url in self._urls]
            versions = [self._meet(server, deadline) for server in servers]
            oldest = min(
                versions, key=lambda text: (parse_version(text) is None, parse_version(text) or 0)
            )
            self._features = features_of(parse_version(oldest))
            self.server_version = oldest
            self._sync = self._open_sync(servers, self.run, self._features, oldest)
            for server in servers:
                model, sampling = server.serving.model, self.understood(self._sampling)
                if note := check_server(server, model, self._tokenizer, self._in_chat, sampling):
                    log.warning("%s", note)
                self._labels[server.url] = LabelReader(self._reader(server))
        except BaseException:  # an interrupt too: connections and thread are closed; raised again
            for server in servers:
                server.close()
            self._thread.stop()
            raise
        self.servers = servers

    def _meet(self, server: Server, deadline: Deadline) -> str:
        """Wait for a server, and return its version."""
        try:
            server.wait_healthy(deadline.left_s)
            stage = "asking for the version"
            reply = server.call("GET", "/version", stage=stage, timeout_s=ASK_TIMEOUT_S)
            stage = "asking for the models"
            listed = server.call("GET", "/v1/models", stage=stage, timeout_s=ASK_TIMEOUT_S)
        except WeightSyncError as error:
            advice = f"start one (vf-vllm --model …), or correct the URL ({error})"
            raise EndpointUnreachable(
                f"no inference server answers at {server.url}: {tls_fault(error) or advice}",
                url=server.url,
                elapsed_s=error.elapsed_s,
            ) from error
        version = str(reply.get("version", "")) if isinstance(reply, dict) else ""
        if (number := parse_version(version)) is not None and number < parse_version(f"{OLDEST}.0"):  # type: ignore[operator]
            raise ConfigError(
                f"{server.url} is vLLM {version}, which returns no token ids; use {OLDEST} or newer"
            )
        base = [entry["id"] for entry in listed["data"] if not entry.get("parent")]
        server.serving = Serving(-1, base[0])
        return version

    def stop(self) -> None:
        """Unload adapters and close the connections; the servers keep running. Idempotent; may be
        restarted."""
        servers, self.servers = self.servers, []
        if not servers:
            return
        with self._lock:
            if self._sync is not None:
                self._sync.close(servers)
            self._sync, self._pushed = None, None
            for server in servers:
                server.close()
            self._thread.stop()

    def open_client(self) -> VersionedClient | RoundRobinClient:
        """A core ``Client``: with several servers, a rollout stays with one of them."""
        clients = [VersionedClient(self, server) for server in self._running_servers()]
        if len(clients) == 1:
            return clients[0]
        return RoundRobinClient([(client, None) for client in clients])

    def draw(self, prompt: Sequence[int], count: int) -> dict[str, np.ndarray]:
        """By the URL of each server ``count`` tokens [count] that it samples after ``prompt``, with
        the arguments of rollouts. Raises ``WeightSyncError``."""
        sampling = self.understood(self._sampling)
        servers = self._running_servers()
        return {server.url: draw(server, prompt, count, sampling) for server in servers}

    # --- weights ----------------------------------------------------------------------------------

    def pause(self) -> AbstractContextManager[None]:
        """Context in which the weights may change: no push reads them. The servers go on."""
        return self._locked("waiting for a push of weights to end")

    def set_version(self, version: int) -> None:
        """Push the trainer's present weights to every server, as policy ``version``.

        A no-op when the servers have them, or when ``sync_every`` skips this version.
        Raises ``WeightSyncError`` when it fails twice, or takes longer than ``sync_timeout_s``.
        """
        with self._lock:
            self._live, stamp = version, self._stamp()
            if self._pushed == (version, stamp):
                return
            if self._pushed is not None and version > self._pushed[0] and version % self._every:
                return
            assert self._sync is not None
            deadline = Deadline.after(self._timeout_s)
            self._sync.prepare(version)
            for server in self._running_servers():
                self._bring(server, version, deadline)
            self._pushed = (version, stamp)
            self._sync.retire(self.servers, version)

    def _bring(self, server: Server, version: int, deadline: Deadline) -> None:
        """Push once, and retry the whole update once when it fails.

        Completions since a restart of the server must be discarded, also when this push is the
        first to detect the restart; the number of repairs marks them.
        """
        assert self._sync is not None
        lost = self._pushed is not None and self._has_lost(server, deadline)
        try:
            model = self._sync.push(server, version, deadline)
        except WeightSyncError as error:
            if deadline.is_over:
                raise
            log.warning("%s; retrying the whole update once", error)
            server.wait_healthy(
                deadline.left_s, f"waiting for the server to come back after: {error.stage}"
            )
            model, lost = self._sync.push(server, version, deadline), True
        server.serving = Serving(version, model, server.serving.repairs + lost)

    def _has_lost(self, server: Server, deadline: Deadline) -> bool:
        """Whether ``server`` has no weights of this run; unknown counts as lost."""
        assert self._sync is not None
        if self._sync.names_weights:
            return False
        try:
            return not self._sync.holds(server, deadline)
        except WeightSyncError:
            return True

    def _stamp(self) -> object:
        """A value that changes with every in-place change of a weight."""
        return tuple((id(p), p._version) for p in self.model.parameters() if p.requires_grad)

    @contextmanager
    def _locked(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        if not self._lock.acquire(timeout=self._timeout_s + ASK_TIMEOUT_S):
            message = f"{stage}: not within {self._timeout_s:g} s"
            raise WeightSyncError(message, stage=stage, elapsed_s=time.monotonic() - started)
        try:
            yield
        finally:
            self._lock.release()

    # --- the policy version of a completion -------------------------------------------------------

    def understood(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Sampling arguments in the servers' format; the ids that stand for images are never
        sampled."""
        return understood(arguments, WEIGHT_SPANS in self._features, self._never)

    async def sampled_by(
        self, server: Server, serving: Serving, response: Response
    ) -> int | np.ndarray | str:
        """The policy version of a response to a request sent under ``serving``, or why it is
        unknown.

        For a completion during a weight update one version per token, from a server that reports
        them; from others the version at its beginning.
        """
        assert self._sync is not None
        if self._sync.names_weights:
            if response.model == serving.model:
                return serving.version
            return f"it answered as {response.model!r}, not as {serving.model!r}"
        if WEIGHT_SPANS in self._features:
            labels = response.version if response.tokens is None else response.tokens.version
            versions = [
                version_in_label(str(label), self.run) for label in np.atleast_1d(labels).tolist()
            ]
            if None in versions:
                return f"its answer has the weights {response.version}"
            return np.array(versions, np.int32) if np.ndim(labels) else versions[0]  # type: ignore[return-value]
        assert self._thread.loop is not None
        future = asyncio.run_coroutine_threadsafe(
            self._labels[server.url].after_now(), self._thread.loop
        )
        try:
            label = await asyncio.wrap_future(future)
        except WeightSyncError as error:
            return str(error)
        if version_in_label(label, self.run) is None:
            return f"it says that its weights are {label!r}"
        if server.serving.repairs == serving.repairs:
            return serving.version
        return "it was repaired meanwhile"

    def _reader(self, server: Server) -> Callable[[], Any]:
        async def read() -> str:
            stage = "asking whose weights it has"
            reply = server.begin("GET", "/weight_info", stage=stage, timeout_s=LABEL_TIMEOUT_S)
            answer = await asyncio.wrap_future(reply)
            return str((answer or {}).get("weight_version"))

        return read

    def repair(
        self, server: Server, failed_serving: Serving, fault: BaseException | str
    ) -> Future[None] | None:
        """Push the present weights to ``server`` again, once for all callers; None when already
        done."""
        with self._repairs_lock:
            if server.serving.repairs != failed_serving.repairs:
                return None
            running = self._repairs.get(server.url)
            if running is not None and not running.done():
                return running
            future: Future[None] = Future()
            future.set_running_or_notify_cancel()
            self._repairs[server.url] = future
        threading.Thread(
            target=self._repair,
            args=(server, fault, future),
            name="verifiers-vllm-repair",
            daemon=True,
        ).start()
        return future

    def _repair(self, server: Server, fault: BaseException | str, future: Future[None]) -> None:
        started = time.monotonic()
        try:
            deadline = Deadline.after(self._timeout_s)
            server.wait_healthy(deadline.left_s, f"waiting for the server to come back ({fault})")
            with self._locked("waiting for the weights to stand still"):
                self._send_again(server, deadline, fault, started)
            future.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the callers that wait for the repair
            future.set_exception(error)

    def _send_again(
        self, server: Server, deadline: Deadline, fault: BaseException | str, started: float
    ) -> None:
        if self._sync is None or self._pushed is None:
            raise WeightSyncError(
                "the engine was stopped", stage="repairing the server's weights", url=server.url
            )
        if self._sync.holds(server, deadline):
            return  # the weights are intact: the server failed for another reason
        version = self._pushed[0] if self._sync.keeps_files else self._live
        before = server.serving.repairs
        self._bring(server, version, deadline)
        server.serving = replace(server.serving, repairs=before + 1)
        log.warning(
            "%s had lost the weights of this run (%s); pushed version %d again after %.1f s",
            server.url,
            fault,
            version,
            time.monotonic() - started,
        )


class VersionedClient:
    """A core ``Client`` of one of the engine's servers."""

    def __init__(self, engine: VLLMEngine, server: Server):
        self._engine, self._server = engine, server
        self._client = OpenAIChatCompletionsClient(
            base_url=server.base_url, api_key=server.api_key, max_retries=MAX_RETRIES
        )

    @property
    def base_url(self) -> str:
        return self._server.base_url

    @property
    def model(self) -> str:
        """The model name of the present policy on this server."""
        return self._server.serving.model

    async def complete(self, request: ModelRequest) -> Response:
        """A completion by the policy being served; see ``Client.complete`` for what it raises.

        Raises ``WeightSyncError`` too, when a repair fails or takes too long.
        """
        fault: BaseException | str = ""
        for _ in range(MAX_REPAIRS + 1):
            serving = self._server.serving
            try:
                arguments = self._engine.understood(request.sampling_args)
                response = await self._client.complete(
                    replace(request, model=serving.model, sampling_args=arguments)
                )
                origin = await self._engine.sampled_by(self._server, serving, response)
            except (ModelNotFound, ModelRefused, ModelUnavailable) as error:
                if isinstance(error, ModelRefused) and not isinstance(
                    error.__cause__, ModelNotFound
                ):
                    raise
                fault = error  # also of a server that had the model before it was restarted
            else:
                if not isinstance(origin, str):
                    self._check_vocabulary(response)
                    return _with_version(response, origin)
                fault = origin
            if (repair := self._engine.repair(self._server, serving, fault)) is not None:
                await asyncio.shield(asyncio.wrap_future(repair))
        if isinstance(fault, ModelUnavailable):
            raise fault
        raise WeightSyncError(
            f"{self._server.url} has other weights again after {MAX_REPAIRS} repairs ({fault});"
            " where another training uses it too, give each a server of its own (inference)",
            stage="repairing the server's weights",
            url=self._server.url,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    def _check_vocabulary(self, response: Response) -> None:
        """Raises ``MalformedResponse`` for a token id that the trained model has not."""
        if (tokens := response.tokens) is None:
            return
        arrays = tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs
        if fault := token_fault(*arrays, self._engine.vocabulary):
            raise MalformedResponse(
                f"{self.base_url} answered without usable {fault[0]}: {fault[1]}, as the trained"
                " model has them",
                field=fault[0],
            )


def _with_version(response: Response, version: int | np.ndarray) -> Response:
    tokens = None if response.tokens is None else replace(response.tokens, version=version)
    return replace(response, version=int(np.min(version)), tokens=tokens)


def understood(
    arguments: Mapping[str, object], has_spans: bool, never: Sequence[int] = ()
) -> dict[str, object]:
    """Sampling arguments in vLLM's format.

    >>> understood({"temperature": 1.0, "guided_regex": "a+", "return_weight_versions": True}, has_spans=False)
    {'temperature': 1.0, 'structured_outputs': {'regex': 'a+'}}
    """
    spelled = dict(arguments)
    if not has_spans:
        spelled.pop("return_weight_versions", None)
    if (regex := spelled.pop("guided_regex", None)) is not None:
        spelled["structured_outputs"] = {"regex": regex}
    if never:
        excluded = {str(token): LEAST_BIAS for token in never}
        bias: Any = spelled.get("logit_bias") or {}
        spelled["logit_bias"] = {**bias, **excluded}
    return spelled
