"""The routes of the protocol: HTTP in a thread of its own, a `Service` behind it.

Every route is below ``/api/v1``. A request that takes long is answered with its id at once; its
result is fetched from ``retrieve_future``, which waits for it. The key is in the header
``X-API-Key``; the SDK takes only one that begins with ``tml-``.

Not served: images and sound, losses that are uploaded or that a `DATUM_LOSSES` has not, optimizers
but AdamW, publishing, projects, billing, traces.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from aiohttp import web

from verifiers.clients.serving import START_S, Answer, ModelServer
from verifiers.errors import EndpointUnreachable, ModelRefused
from verifiers_trainer.engines.http.endpoint import Address
from verifiers_trainer.tinker_server.messages import (
    ConfigBody,
    CreateModel,
    CreateSampler,
    ExpiryBody,
    LoadWeights,
    OfModel,
    OfPath,
    OfSampler,
    OfSession,
    OptimStep,
    Result,
    RetrieveFuture,
    Sample,
    SaveWeights,
    SessionBody,
    read_json,
    read_pass,
    read_pass_json,
)
from verifiers_trainer.tinker_server.service import Model, Service
from verifiers_trainer.tinker_server.store import (
    KINDS,
    SCHEME,
    About,
    SessionRecord,
    expiry,
    modified,
    now,
)

ROOT = "/api/v1"
PROTOBUF = "application/x-protobuf"
POLL_S = 20.0
"""How long a fetch waits for its result; the SDK asks again."""
URL_S = 3600
"""How long the address of a file can be used."""
_Returned = TypeVar("_Returned")
_Listed = TypeVar("_Listed")
Handler = Callable[[web.BaseRequest, Mapping[str, str]], Awaitable[Answer]]


class TinkerServer(ModelServer):
    """The server; ``base_url`` and ``api_key`` are known after ``start``."""

    thread_name = "vf-tinker"

    def __init__(self, service: Service, address: Address | None = None):
        super().__init__()
        self._service = service
        self._address = address or Address()
        self.api_key, self.host = self._address.api_key, self._address.host
        self.base_url = ""
        # one thread: what the service does for one request, it does before the next
        self._thread_of_service = ThreadPoolExecutor(1, "vf-tinker-service")
        self._secret = secrets.token_bytes(32)
        self._routes: list[tuple[str, list[str], Handler]] = [
            (method, (ROOT + pattern).split("/"), handler)
            for method, pattern, handler in (
                ("GET", "/healthz", self._health),
                ("GET", "/get_server_capabilities", self._capabilities),
                ("POST", "/client/config", self._client_config),
                ("POST", "/client/dynamic_config", self._dynamic_config),
                ("POST", "/telemetry", self._telemetry),
                ("POST", "/create_session", self._create_session),
                ("POST", "/session_heartbeat", self._heartbeat),
                ("POST", "/sessions/{session}/finish", self._finish),
                ("GET", "/sessions/{session}", self._get_session),
                ("GET", "/sessions", self._list_sessions),
                ("POST", "/create_model", self._create_model),
                ("POST", "/unload_model", self._unload),
                ("POST", "/get_info", self._get_info),
                ("POST", "/forward_backward", self._pass),
                ("POST", "/forward", self._pass),
                ("POST", "/optim_step", self._optim_step),
                ("POST", "/save_weights", partial(self._save, "save")),
                ("POST", "/save_weights_for_sampler", partial(self._save, "save-sampler")),
                ("POST", "/save_weights_external", partial(self._save, "save-external")),
                ("POST", "/load_weights", self._load),
                ("POST", "/create_sampling_session", self._create_sampler),
                ("POST", "/join_sampling_session", self._join_sampler),
                ("GET", "/samplers/{sampler}", self._get_sampler),
                ("POST", "/asample", self._sample),
                ("POST", "/retrieve_future", self._retrieve),
                ("POST", "/cancel_future", self._cancel),
                ("POST", "/weights_info", self._weights_info),
                ("GET", "/checkpoints", self._all_checkpoints),
                ("GET", "/training_runs", self._training_runs),
                ("GET", "/training_runs/{model}", self._training_run),
                ("GET", "/training_runs/{model}/checkpoints", self._checkpoints),
                (
                    "DELETE",
                    "/training_runs/{model}/checkpoints/{kind}/{name}",
                    self._delete,
                ),
                (
                    "PUT",
                    "/training_runs/{model}/checkpoints/{kind}/{name}/ttl",
                    self._set_ttl,
                ),
                (
                    "GET",
                    "/training_runs/{model}/checkpoints/{kind}/{name}/external_weights_urls",
                    self._urls,
                ),
                ("GET", "/files/{model}/{kind}/{name}/{file}", self._file),
            )
        ]

    def start(self, deadline_s: float = START_S) -> None:
        """Listen at the address. *Raises* EndpointUnreachable."""
        try:
            super().start(deadline_s)
        except OSError as error:
            raise EndpointUnreachable(
                f"the server did not start within {deadline_s:g} s: {error}"
            ) from error

    def stop(self) -> None:
        super().stop()
        self._thread_of_service.shutdown()

    async def listen(self, runner: web.ServerRunner) -> None:
        host = self._address.host
        await web.TCPSite(runner, host, self._address.port, backlog=1024).start()
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"

    async def respond(self, request: web.BaseRequest) -> Answer:
        path, has_path = unquote(request.path), False
        for method, pattern, handler in self._routes:
            if (parts := _parts(pattern, path.split("/"))) is None:
                continue
            has_path = True
            if method == request.method:
                if handler not in (self._health, self._file):
                    self._check_key(request)
                return await handler(request, parts)
        if has_path:
            raise ModelRefused("Method Not Allowed", status=405)
        raise ModelRefused(f"Not Found: this server has no {path[:200]}", status=404)

    def _check_key(self, request: web.BaseRequest) -> None:
        sent = request.headers.get("X-API-Key") or request.headers.get(
            "Authorization", ""
        ).removeprefix("Bearer ")
        if self.api_key and not hmac.compare_digest(
            sent.encode("utf-8", "replace"), self.api_key.encode()
        ):
            raise ModelRefused("missing or wrong API key", status=401, code="invalid_api_key")

    async def _call(self, function: Callable[..., _Returned], *arguments: object) -> _Returned:
        """What a function of the service returns; it may wait for the disk."""
        return await self._loop.run_in_executor(self._thread_of_service, function, *arguments)

    # --- the client -------------------------------------------------------------------------------

    async def _health(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        if not self._service.is_alive:
            raise ModelRefused("the server has stopped", status=503)
        return {"status": "ok"}

    async def _capabilities(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        model = {
            "model_name": self._service.model_name,
            "max_context_length": self._service.max_seq_len,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    async def _client_config(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        read_json(await self.body(request), ConfigBody)
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": False,
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False,
            "sample_join_sampling_session": True,
        }

    async def _dynamic_config(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        read_json(await self.body(request), ConfigBody)
        return {"sample_cancel_enabled": True}

    async def _telemetry(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        await self.body(request)  # of which nothing is kept
        return {"status": "accepted"}

    async def _create_session(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        body = read_json(await self.body(request), SessionBody)
        record = SessionRecord(
            session_id=f"s-{secrets.token_hex(6)}",
            created=now(),
            sdk_version=body.sdk_version,
            display_name=body.display_name,
            user_metadata=body.user_metadata,
        )
        await self._call(self._service.create_session, record)
        return {"type": "create_session", "session_id": record.session_id}

    async def _heartbeat(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        self._service.session(read_json(await self.body(request), OfSession).session_id)
        return {"type": "session_heartbeat"}

    async def _finish(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        await self.body(request)
        await self._call(self._service.finish_session, parts["session"])
        return {}

    async def _get_session(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        record = self._service.session(parts["session"])
        owned = record.session_id
        samplers = self._service.samplers.values()
        return {
            "training_run_ids": [
                model_id
                for model_id, model in self._service.models.items()
                if model.record.session_id == owned
            ],
            "sampler_ids": [each.sampler_id for each in samplers if each.session_id == owned],
            "user_metadata": record.user_metadata,
            "display_name": record.display_name,
        }

    async def _list_sessions(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        ids = sorted(self._service.sessions)
        return {"sessions": _page(request, ids)[0]}

    # --- models -----------------------------------------------------------------------------------

    async def _create_model(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        body = read_json(await self.body(request), CreateModel)
        return _promise(await self._call(self._service.create_model, body))

    async def _unload(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        model_id = read_json(await self.body(request), OfModel).model_id
        await self._call(self._service.unload, self._service.model(model_id))
        return {"type": "unload_model", "model_id": model_id}

    async def _get_info(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        model_id = read_json(await self.body(request), OfModel).model_id
        record, service = self._service.model(model_id).record, self._service
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": record.base_model,
            "is_lora": True,
            "lora_rank": record.rank,
            "model_data": {
                "arch": service.architecture,
                "model_name": record.base_model,
                "tokenizer_id": service.base_name,
            },
        }

    async def _pass(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        body = await self.body(request)
        is_protobuf = request.content_type == PROTOBUF
        read = (read_pass if is_protobuf else read_pass_json)(body)
        kind = "pass" if is_protobuf else "pass-json"
        return _promise(
            await self._call(self._service.submit, read.model_id, read.seq_id, kind, body)
        )

    async def _optim_step(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        body = await self.body(request)
        read = read_json(body, OptimStep)
        return _promise(
            await self._call(self._service.submit, read.model_id, read.seq_id, "step", body)
        )

    async def _save(self, kind: str, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        body = await self.body(request)
        read = read_json(body, SaveWeights)
        expiry(read.ttl_seconds)
        return _promise(
            await self._call(self._service.submit, read.model_id, read.seq_id, kind, body)
        )

    async def _load(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        body = await self.body(request)
        read = read_json(body, LoadWeights)
        return _promise(await self._call(self._service.load_weights, read, body))

    # --- sampling ---------------------------------------------------------------------------------

    async def _create_sampler(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        body = read_json(await self.body(request), CreateSampler)
        sampler_id = await self._call(self._service.create_sampler, body)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def _join_sampler(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        sampler_id = read_json(await self.body(request), OfSampler).sampling_session_id
        number = await self._call(self._service.join_sampler, sampler_id)
        return {"type": "join_sampling_session", "client_counter": number}

    async def _get_sampler(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        record = self._service.sampler_record(parts["sampler"])
        return {
            "sampler_id": record.sampler_id,
            "base_model": self._service.model_name,
            "model_path": record.model_path,
        }

    async def _sample(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        body = read_json(await self.body(request), Sample)
        request_id = await self._call(self._service.sample, body)
        ids = [f"{request_id}:{index}" for index in range(body.num_samples)]
        return {**_promise(request_id), "sample_sequence_ids": ids}

    # --- results ----------------------------------------------------------------------------------

    async def _retrieve(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        request_id = read_json(await self.body(request), RetrieveFuture).request_id
        future = self._service.result(request_id)
        try:
            result = await asyncio.wait_for(asyncio.shield(_on_loop(future)), POLL_S)
        except TimeoutError:
            waits = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(waits, status=408)
        self._service.fetched(request_id)
        message = result.protobuf() if PROTOBUF in request.headers.get("Accept", "") else None
        if message is not None:
            return web.Response(body=message, content_type=PROTOBUF)
        return result.json()

    async def _cancel(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        request_id = read_json(await self.body(request), RetrieveFuture).request_id
        await self._call(self._service.cancel, request_id)
        return {}

    # --- checkpoints ------------------------------------------------------------------------------

    async def _weights_info(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        path = read_json(await self.body(request), OfPath).tinker_path
        return await self._call(self._described_weights, path)

    def _described_weights(self, path: str) -> Mapping[str, object]:
        folder = self._service.store.existing(path)
        return {
            "base_model": self._service.model_name,
            "is_lora": True,
            **self._service.described_adapter(folder),
        }

    async def _training_runs(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        models = sorted(self._service.models.values(), key=lambda each: each.record.created)
        page, cursor = _page(request, models[::-1])
        runs = await self._call(lambda: [self._run(model) for model in page])
        return {"training_runs": runs, "cursor": cursor}

    async def _training_run(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        return await self._call(self._run, self._service.model(parts["model"]))

    def _run(self, model: Model) -> Mapping[str, object]:
        record = model.record
        checkpoints = [self._checkpoint(*each) for each in self._listed(record.model_id)]
        newest = {str(each["checkpoint_type"]): each for each in checkpoints}
        return {
            "training_run_id": record.model_id,
            "base_model": record.base_model,
            "model_owner": record.session_id,
            "is_lora": True,
            "lora_rank": record.rank,
            "corrupted": model.corrupted is not None,
            "last_request_time": datetime.fromtimestamp(model.last_request)
            .astimezone()
            .isoformat(),
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": _texts(record.user_metadata),
        }

    def _listed(self, model_id: str) -> list[tuple[str, About, int]]:
        store = self._service.store
        return [
            (
                store.path_of(folder),
                about if about.created else About(created=modified(folder)),
                sum(file.stat().st_size for file in folder.iterdir()),
            )
            for folder, about in store.checkpoints(model_id)
        ]

    def _checkpoint(self, path: str, about: About, num_bytes: int) -> dict[str, object]:
        _, kind, name = path.removeprefix(SCHEME).split("/")
        return {
            "checkpoint_id": f"{kind}/{name}",
            "checkpoint_type": KINDS[kind],
            "time": about.created and about.created.isoformat(),
            "tinker_path": path,
            "size_bytes": num_bytes,
            "public": False,
            "user_metadata": about.user_metadata,
            "expires_at": about.expires_at and about.expires_at.isoformat(),
        }

    async def _checkpoints(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        model_id = self._service.model(parts["model"]).record.model_id
        listed = await self._call(self._listed, model_id)
        return {"checkpoints": [self._checkpoint(*each) for each in listed]}

    async def _all_checkpoints(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        def listed() -> list[dict[str, object]]:
            return [
                self._checkpoint(*each)
                for model_id in self._service.models
                for each in self._listed(model_id)
            ]

        page, cursor = _page(request, await self._call(listed))
        return {"checkpoints": page, "cursor": cursor}

    async def _delete(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        await self._call(self._service.delete, _path(parts))
        return {}

    async def _set_ttl(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        body = read_json(await self.body(request), ExpiryBody)
        await self._call(self._service.set_expiry, _path(parts), expiry(body.ttl_seconds))
        return {}

    async def _urls(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        path = _path(parts)
        folder = await self._call(self._service.store.existing, path, ("external_weights",))
        until = int((now() + timedelta(seconds=URL_S)).timestamp())
        urls = {}
        for file in sorted(folder.iterdir()):
            name = f"{path.removeprefix(SCHEME)}/{file.name}"
            token = self._token(name, until)
            urls[file.name] = f"{self.base_url}{ROOT}/files/{name}?until={until}&token={token}"
        return {"urls": urls, "expires": datetime.fromtimestamp(until).astimezone().isoformat()}

    def _token(self, name: str, until: int) -> str:
        return hmac.new(self._secret, f"{until} {name}".encode(), hashlib.sha256).hexdigest()

    async def _file(self, request: web.BaseRequest, parts: Mapping[str, str]) -> Answer:
        """A file of external weights, whose address is its key."""
        query = parse_qs(urlsplit(request.path_qs).query)
        until, token = query.get("until", ["0"])[0], query.get("token", [""])[0]
        name = f"{_path(parts).removeprefix(SCHEME)}/{parts['file']}"
        is_valid = until.isdigit() and int(until) > now().timestamp()
        if not is_valid or not hmac.compare_digest(
            token.encode(), self._token(name, int(until)).encode()
        ):
            raise ModelRefused("the address of the file has expired: ask for it again", status=403)
        path = self._service.store.existing(_path(parts)) / parts["file"]
        if not path.is_file():
            raise ModelRefused("there is no such file", status=404)
        return web.FileResponse(path)


def _promise(request_id: str) -> dict[str, object]:
    return {"request_id": request_id}


def _on_loop(future: Future[Result]) -> asyncio.Future[Result]:
    return asyncio.wrap_future(future)


def _page(
    request: web.BaseRequest, listed: Sequence[_Listed]
) -> tuple[Sequence[_Listed], dict[str, int]]:
    """(the part of a list that a request asks for, its place). *Raises* ModelRefused."""
    query = parse_qs(urlsplit(request.path_qs).query)
    values = {name: query.get(name, [text])[0] for name, text in (("limit", "20"), ("offset", "0"))}
    for name, value in values.items():
        if not value.isdigit() or len(value) > 9:
            raise ModelRefused(f"{name}={value[:40]!r} is no number", status=400, field=name)
    limit, offset = int(values["limit"]), int(values["offset"])
    cursor = {"offset": offset, "limit": limit, "total_count": len(listed)}
    return listed[offset : offset + limit], cursor


def _texts(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    return None if metadata is None else {name: str(value) for name, value in metadata.items()}


def _parts(pattern: list[str], path: list[str]) -> dict[str, str] | None:
    """The parts of a path by their names in ``pattern``, such as ``{model}``; None for another
    path."""
    if len(pattern) != len(path):
        return None
    parts = {}
    for expected, part in zip(pattern, path, strict=True):
        if expected.startswith("{") and part:
            parts[expected.strip("{}")] = part
        elif expected != part:
            return None
    return parts


def _path(parts: Mapping[str, str]) -> str:
    return f"{SCHEME}{parts['model']}/{parts['kind']}/{parts['name']}"
