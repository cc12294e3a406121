"""A vLLM server that a test scripts: a real HTTP server on loopback that samples with a real, tiny
model.

It has the routes of a given vLLM version and no others; it loads adapters by name, reloads files,
takes weights from a collective or from shared memory, pauses, and starts again with the weights it
had at first. ``hang`` and ``fail`` make routes misbehave. As a program, ``fake_vllm.py serve MODEL
--port N`` stands in for the ``vllm`` executable.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
import pickle
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from verifiers_trainer.engines.http.chat import ChatFormat
from verifiers_trainer.engines.processing import processing_of
from verifiers_trainer.engines.vllm.features import (
    FIRST,
    NCCL_ID,
    PAUSE,
    UPDATE_BRACKETS,
    WEIGHT_LABEL,
    WEIGHT_SPANS,
    WEIGHT_TRANSFER,
    features_of,
    parse_version,
)

NO_LABEL = "default"
ROUTES = {  # path -> feature that has it; None: every version
    "/pause": PAUSE,
    "/resume": PAUSE,
    "/is_paused": PAUSE,
    "/init_weight_transfer_engine": WEIGHT_TRANSFER,
    "/update_weights": WEIGHT_TRANSFER,
    "/get_world_size": WEIGHT_TRANSFER,
    "/start_weight_update": UPDATE_BRACKETS,
    "/finish_weight_update": UPDATE_BRACKETS,
    "/update_weight_version": WEIGHT_LABEL,
    "/weight_info": WEIGHT_LABEL,
    "/collective_rpc": None,
    "/reset_prefix_cache": None,
}


class FakeVLLM:
    """``with FakeVLLM(model, tokenizer) as server``; ``calls`` has (path, body) of every control
    call."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        version: str = "0.33.0",
        name: str = "base-model",
        lora: bool = True,
        dev_mode: bool = True,
        raw_logprobs: bool = False,
        token_ids: bool = True,
        max_lora_rank: int = 16,
        workers: Workers | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
    ):
        self.first_weights = model
        self.tokenizer = tokenizer
        self.version = version
        self.name = name
        self.features = features_of(parse_version(version))
        self.lora = lora
        self.dev_mode = dev_mode
        self.raw_logprobs = raw_logprobs
        self.token_ids = token_ids
        self.max_lora_rank, self.workers, self.host, self.port = max_lora_rank, workers, host, port
        self.calls: list[tuple[str, Any]] = []
        self.hang: set[str] = set()
        """Paths that accept and never answer."""
        self.fail: dict[str, deque[int]] = {}
        """Path -> statuses of its next answers."""
        self.on_call: Any = None
        """Called with (path, body) of every control call before it is answered."""
        self.answers: list[dict[str, Any]] = []
        """(model asked for, whose weights) of every completion."""
        self.sessions: list[str] = []
        self.token_delay_s = 0.0
        self.defaults: dict[str, Any] = {}
        """Sampling arguments of the model's generation_config.json, for what a request leaves out."""
        self.forced: dict[str, Any] = {}
        """Sampling arguments that a sampler of its own uses, whatever is asked for and shown."""
        self.bodies: list[dict[str, Any]] = []
        """Every completion that was asked for."""
        self.logit_step = 0.0
        """Logits are rounded to multiples of it, up or down by chance, as half precision does."""
        self.shown_prompt: Any = list
        """Prompt ids -> those that an answer shows."""
        self.starts = 0
        self._rounding = torch.Generator().manual_seed(0)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    # --- a server's life --------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> FakeVLLM:
        """Serve with the first weights, on the port of before if there was one."""
        self.model = copy.deepcopy(self.first_weights).eval()
        self.adapters: dict[str, Any] = {}
        self.label, self.updating, self.group = NO_LABEL, False, None
        self.unloaded: list[str] = []
        self.starts += 1
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def kill(self) -> None:
        """Gone at once: requests in flight get a reset connection."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(20)

    def restart(self) -> None:
        """As a process that died and was started again: what was loaded since the first start is
        lost."""
        self.kill()
        self.start()

    def __enter__(self) -> FakeVLLM:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run(ready))
        self._loop.close()

    async def _run(self, ready: threading.Event) -> None:
        self._stopped, self._going = asyncio.Event(), asyncio.Event()
        self._going.set()
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        for attempt in range(50):
            site = web.TCPSite(runner, self.host, self.port, reuse_address=True)
            try:
                await site.start()
                break
            except OSError:  # the connections of the server before are still being closed
                assert attempt < 49
                await asyncio.sleep(0.1)
        self.port = runner.addresses[0][1]
        ready.set()
        await self._stopped.wait()
        for server in list(runner.server.connections):
            if server.transport is not None:
                server.transport.abort()
        await runner.cleanup()

    # --- routes -----------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        body = await request.json() if request.can_read_body else None
        if request.method == "GET" and path.endswith("_lora_adapter"):
            return web.json_response({"detail": "no GET"}, status=405 if self.lora else 404)
        is_control = path not in (
            "/health",
            "/version",
            "/v1/models",
            "/v1/chat/completions",
            "/v1/completions",
        )
        if is_control:
            self.calls.append((path, body if body is not None else dict(request.query)))
            if self.on_call is not None:
                await asyncio.to_thread(self.on_call, path, body)
        if path in self.hang:
            await asyncio.Event().wait()
        if self.fail.get(path):
            return web.json_response({"error": "scripted"}, status=self.fail[path].popleft())
        if path in ROUTES and (
            not self.dev_mode or (ROUTES[path] and ROUTES[path] not in self.features)
        ):
            return web.json_response({"detail": "Not Found"}, status=404)
        handler = getattr(self, "_" + path.strip("/").replace("/", "_"), None)
        if handler is None or (path.endswith("_lora_adapter") and not self.lora):
            return web.json_response({"detail": "Not Found"}, status=404)
        try:
            return web.json_response(await handler(body, request))
        except Refused as error:
            return web.json_response(
                {"error": {"message": str(error), "code": error.status}}, status=error.status
            )

    async def _health(self, body: Any, request: web.Request) -> Any:
        return {}

    async def _version(self, body: Any, request: web.Request) -> Any:
        return {"version": self.version}

    async def _v1_models(self, body: Any, request: web.Request) -> Any:
        base = [{"id": self.name, "object": "model", "parent": None}]
        return {
            "data": (
                base
                + [{"id": name, "object": "model", "parent": self.name} for name in self.adapters]
            )
        }

    async def _v1_load_lora_adapter(self, body: Any, request: web.Request) -> Any:
        from peft import PeftModel

        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if rank > self.max_lora_rank:
            raise Refused(
                400, f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}."
            )
        adapted = PeftModel.from_pretrained(copy.deepcopy(self.model), path)
        if not getattr(self.model, "is_loaded_in_4bit", False):
            adapted = adapted.merge_and_unload()
        self.adapters[name] = adapted.eval()
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _v1_unload_lora_adapter(self, body: Any, request: web.Request) -> Any:
        if self.adapters.pop(body["lora_name"], None) is None:
            raise Refused(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        self.unloaded.append(body["lora_name"])
        return "Success"

    async def _pause(self, body: Any, request: web.Request) -> Any:
        assert request.query["mode"] == "keep"
        self._going.clear()
        return {"status": "paused"}

    async def _resume(self, body: Any, request: web.Request) -> Any:
        self._going.set()
        return {"status": "resumed"}

    async def _is_paused(self, body: Any, request: web.Request) -> Any:
        return {"is_paused": not self._going.is_set()}

    async def _reset_prefix_cache(self, body: Any, request: web.Request) -> Any:
        return {"success": request.query.get("reset_running_requests") == "true"}

    async def _collective_rpc(self, body: Any, request: web.Request) -> Any:
        assert body["method"] == "reload_weights"
        for file in sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors")):
            self._load(load_file(file))
        return {"results": [None]}

    async def _update_weight_version(self, body: Any, request: web.Request) -> Any:
        self.label = body["new_version"]
        return {"success": True}

    async def _weight_info(self, body: Any, request: web.Request) -> Any:
        return {"weight_version": self.label}

    async def _get_world_size(self, body: Any, request: web.Request) -> Any:
        return {"world_size": 1}

    async def _init_weight_transfer_engine(self, body: Any, request: web.Request) -> Any:
        info = body["init_info"]
        if "nccl_unique_id_b64" in info:
            if NCCL_ID not in self.features:
                raise Refused(500, f"nccl_unique_id_b64 came with {FIRST[NCCL_ID]}")
            assert self.workers is not None
            unique_id = base64.b64decode(info["nccl_unique_id_b64"])
            self.group = await asyncio.to_thread(self.workers.enter, unique_id, info)
        else:
            self.group = "ipc"
        return {"message": "Weight transfer initialized"}

    async def _start_weight_update(self, body: Any, request: web.Request) -> Any:
        if self.group is None:
            raise Refused(500, "the weight transfer engine is not initialized")
        self.updating = True
        return {"message": "Weight update started"}

    async def _update_weights(self, body: Any, request: web.Request) -> Any:
        info = body["update_info"]
        if not self.updating:
            raise Refused(500, "no weight update was started")
        shapes = [torch.Size(shape) for shape in info["shapes"]]
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        if "ipc_handles_pickled" in info:
            parts = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        else:
            assert isinstance(self.group, WorkerGroup)
            parts = await asyncio.to_thread(self.group.receive, shapes, dtypes)
        tensors = {
            name: torch.frombuffer(bytearray(part), dtype=dtype).view(shape)
            for name, part, dtype, shape in zip(info["names"], parts, dtypes, shapes, strict=True)
        }
        self._load(tensors)
        return {"message": "Weights updated"}

    async def _finish_weight_update(self, body: Any, request: web.Request) -> Any:
        self.updating, self.label = False, body["weight_version"]
        return {"message": "Weight update finished"}

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        """As the real one: a head that is not named keeps what it had, also when it is tied to the
        embeddings."""
        head = self.model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        _, unexpected = self.model.load_state_dict(tensors, strict=False)
        assert not unexpected, unexpected

    # --- completions ------------------------------------------------------------------------------

    async def _v1_chat_completions(self, body: Any, request: web.Request) -> Any:
        chat = ChatFormat(self.tokenizer, None, processing_of(self.model))
        ids, images = chat.prompt(json.dumps(body["messages"]).encode(), None)
        prompt, limit = ids.tolist(), body.get("top_logprobs") or 0
        made = await self._complete(prompt, body, request, limit, images)
        content = [
            {
                "token": "",
                "logprob": p,
                "top_logprobs": [{"token": "", "logprob": q} for q in likely],
            }
            for p, likely in zip(made["logprobs"], made["likely"], strict=True)
        ]
        said = {
            "role": "assistant",
            "content": self.tokenizer.decode(made["ids"], skip_special_tokens=True),
        }
        choice = {
            "index": 0,
            "message": said,
            "logprobs": {"content": content},
            "finish_reason": made["finish"],
        }
        return self._reply(prompt, made, choice, body)

    async def _v1_completions(self, body: Any, request: web.Request) -> Any:
        prompt = body["prompt"]
        prompt = list(prompt) if isinstance(prompt, list) else self.tokenizer(prompt)["input_ids"]
        if (count := body.get("n") or 1) > 1:
            return await self._draws(prompt, body, count)
        made = await self._complete(prompt, body, request, int(body.get("logprobs") or 0))
        logprobs = {
            "tokens": [""] * len(made["ids"]),
            "token_logprobs": made["logprobs"],
            "top_logprobs": [
                {str(n): q for n, q in enumerate(likely)} for likely in made["likely"]
            ],
        }
        text = self.tokenizer.decode(made["ids"], skip_special_tokens=True)
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": made["finish"]}
        return self._reply(prompt, made, choice, body)

    def _reply(
        self, prompt: list[int], made: dict[str, Any], choice: dict[str, Any], body: Any
    ) -> Any:
        if self.token_ids and body.get("return_token_ids"):
            choice["token_ids"] = made["ids"]
        if WEIGHT_SPANS in self.features and body.get("return_weight_versions"):
            choice["weight_versions"] = _spans(made["labels"])
        reply = {
            "id": "cmpl",
            "object": "completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
        }
        reply["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(made["ids"])}
        if self.token_ids and body.get("return_token_ids"):
            reply["prompt_token_ids"] = self.shown_prompt(prompt)
        return reply

    async def _draws(self, prompt: list[int], body: Any, count: int) -> Any:
        """``count`` choices of one token each, by one forward pass."""
        self.bodies.append(body)
        model = self.adapters.get(body["model"], self.model)
        with torch.no_grad():
            logits = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].float()
        probabilities, _ = self._distributions(logits, {**self.defaults, **body})
        seeded = torch.Generator().manual_seed(body.get("seed") or 0)
        drawn = torch.multinomial(probabilities, count, replacement=True, generator=seeded)
        choices = [{"index": n, "token_ids": [token]} for n, token in enumerate(drawn.tolist())]
        return {"object": "completion", "model": body["model"], "choices": choices}

    def _distributions(
        self, logits: torch.Tensor, sampling: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(probabilities [V] that are drawn from, log-probabilities [V] that are shown)."""
        shown = _filtered(logits, sampling)
        drawn = _filtered(logits, {**sampling, **self.forced}) if self.forced else shown
        return drawn.exp(), torch.log_softmax(logits, -1) if self.raw_logprobs else shown

    async def _complete(
        self,
        prompt: list[int],
        body: Any,
        request: web.Request,
        num_likely: int,
        images: tuple[bytes, ...] = (),
    ) -> dict[str, Any]:
        asked = body["model"]
        if asked != self.name and asked not in self.adapters:
            raise Refused(404, f"The model `{asked}` does not exist.")
        self.sessions.append(request.headers.get("X-Session-ID", ""))
        self.bodies.append(body)
        draws = torch.Generator().manual_seed(body.get("seed") or 0)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 8
        ids, logprobs, likely, labels = list(prompt), [], [], []
        while len(ids) - len(prompt) < limit:
            await self._going.wait()
            if self.token_delay_s:
                await asyncio.sleep(self.token_delay_s)
                await self._going.wait()
            model = self.adapters.get(asked, self.model)
            with torch.no_grad():
                inputs = torch.tensor([ids], device=model.device)
                seen = processing_of(model).arguments(model, inputs, images) if images else {}
                logits = model(inputs, use_cache=False, **seen).logits[0, -1].float().cpu()
            if self.logit_step:
                chances = torch.rand(logits.shape, generator=self._rounding)
                logits = (logits / self.logit_step + chances).floor() * self.logit_step
            probabilities, shown = self._distributions(logits, {**self.defaults, **body})
            token = int(torch.multinomial(probabilities, 1, generator=draws))
            ids.append(token)
            logprobs.append(float(shown[token]))
            unsampled = shown.index_fill(0, torch.tensor(token), -torch.inf)
            # the sampled one counts as one of them
            less_likely = unsampled.topk(max(0, num_likely - 1)).values.tolist()
            likely.append([float(shown[token]), *less_likely])
            labels.append(self.label)
            if token == self.tokenizer.eos_token_id:
                break
            await asyncio.sleep(0)
        self.answers.append({"model": asked, "labels": labels})
        finish = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return {
            "ids": ids[len(prompt) :],
            "logprobs": logprobs,
            "likely": likely,
            "labels": labels,
            "finish": finish,
        }


def _filtered(logits: torch.Tensor, sampling: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities [V] at the temperature, of the tokens that top_k and top_p leave."""
    for token, bias in (sampling.get("logit_bias") or {}).items():
        logits[int(token)] += bias
    logprobs = torch.log_softmax(logits / sampling.get("temperature", 1.0), -1)
    ranked, order = logprobs.sort(descending=True)
    before = ranked.exp().cumsum(-1) - ranked.exp()
    excluded = (
        before >= sampling.get("top_p", 1.0) if sampling.get("top_p", 1.0) < 1 else before < 0
    )
    if sampling.get("top_k", -1) > 0:
        excluded[sampling["top_k"] :] = True
    if not excluded.any():
        return logprobs
    return torch.log_softmax(logprobs.index_fill(0, order[excluded], -torch.inf), -1)


class Refused(Exception):
    def __init__(self, status: int, said: str):
        super().__init__(said)
        self.status = status


def _spans(labels: list[str]) -> list[dict[str, Any]]:
    spans, position = [], 0
    for label, run in itertools.groupby(labels):
        count = len(list(run))
        spans.append({"version": label, "start": position, "end": position + count})
        position += count
    return spans


# --- a group of ranks in one process, in place of NCCL --------------------------------------------


class Workers:
    """Where the trainer (``Collectives``) and a fake server's worker meet; bytes go through a
    queue."""

    def __init__(self) -> None:
        self.groups: dict[bytes, WorkerGroup] = {}
        self.absent = False
        """Whether the server's workers never come."""
        self._changed = threading.Condition()
        self.counts: Counter[str] = Counter()

    def unique_id(self) -> bytes:
        import os

        return os.urandom(128)

    def join(self, unique_id: bytes, world_size: int) -> WorkerGroup:
        """As rank 0: returns once the worker has entered."""
        assert world_size == 2
        with self._changed:
            while not self._changed.wait_for(
                lambda: unique_id in self.groups and not self.absent, timeout=30
            ):
                pass
        self.counts["joined"] += 1
        return self.groups[unique_id]

    def enter(self, unique_id: bytes, info: dict[str, Any]) -> WorkerGroup:
        """As the server's worker: returns once the first all-reduce is done."""
        assert len(unique_id) == 128
        assert (info["rank_offset"], info["world_size"], info["packed"]) == (1, 2, True)
        group = WorkerGroup(info["packed_buffer_size_bytes"])
        with self._changed:
            self.groups[unique_id] = group
            self._changed.notify_all()
        assert group.reduced.wait(30), "the trainer made no first all-reduce"
        return group


class WorkerGroup:
    """Both ends of a group of two."""

    def __init__(self, buffer_bytes: int):
        self.buffer_bytes = buffer_bytes
        self.reduced = threading.Event()
        self.aborted = False
        self._chunks: deque[bytes] = deque()
        self._sent = threading.Semaphore(0)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float32
        assert tensor.tolist() == [0.0]
        self.reduced.set()

    def broadcast(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.uint8
        self._chunks.append(tensor.cpu().numpy().tobytes())
        self._sent.release()

    def abort(self) -> None:
        self.aborted = True
        self._sent.release()

    def receive(self, shapes: list[Any], dtypes: list[torch.dtype]) -> list[bytes]:
        """The bytes of each tensor: a chunk ends with the tensor that makes it exceed
        the buffer."""
        sizes = [
            shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        parts: list[bytes] = []
        position = 0
        while position < len(sizes):
            end, total = position, 0
            while end < len(sizes) and total <= self.buffer_bytes:
                total += sizes[end]
                end += 1
            assert self._sent.acquire(timeout=30)
            if self.aborted:
                raise Refused(500, "the group was left")
            chunk = self._chunks.popleft()
            assert len(chunk) == total, (len(chunk), total)
            for size in sizes[position:end]:
                parts.append(chunk[:size])
                chunk = chunk[size:]
            position = end
        return parts


# --- as a program ---------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """``serve MODEL --host H --port N …``: every other flag is taken and shown."""
    import argparse
    import os
    import signal
    import sys

    from verifiers_trainer.policy.loading import get_model, get_tokenizer

    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    options, flags = parser.parse_known_args(argv)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    print(f"fake vllm: {options.model} on devices [{devices}] with {' '.join(flags)}", flush=True)
    if os.environ.get("FAKE_VLLM_FAILS"):
        sys.exit("fake vllm: cannot start")
    torch.set_num_threads(1)
    server = FakeVLLM(
        get_model(options.model),
        get_tokenizer(options.model),
        name=options.served_model_name or options.model,
        lora="--enable-lora" in flags and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1",
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        max_lora_rank=options.max_lora_rank,
        host=options.host,
        port=options.port,
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server.start()
    if lives_s := os.environ.get("FAKE_VLLM_DIES_AFTER_S"):
        time.sleep(float(lives_s))
        print("fake vllm: out of memory", flush=True)
        os._exit(7)
    while not ended.wait(0.2):
        pass
    server.kill()
    print("fake vllm: stopped", flush=True)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
