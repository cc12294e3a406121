"""The server's routes: the page's static files by name, and the library's responses as JSON under
``/api/``.

One request writes: a person's label of a rollout.

Files are never served by path: requests name a run, which is looked up in the catalog. Answers are
made in threads, so reading a large file does not block other requests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from verifiers.data.media import type_of_content
from verifiers.errors import ConfigError, JournalError
from verifiers.runtime.decoding import decode_message
from verifiers.runtime.json import encode_row
from verifiers.runtime.origins import LOOPBACK, allowed_hosts, is_loopback
from verifiers.view.guard import WRITES, Guard
from verifiers.view.library import LIST_S, Library

MAX_BODY = 4096
"""Bytes of a request that labels."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
VENDOR = "vendor/"
"""Begins the names of the libraries' files: Markdown, formulas and their licences."""


def make_app(library: Library, host: str = LOOPBACK[1]) -> Starlette:
    """The application for a server bound to ``host``."""
    files = static_files()
    token = secrets.token_urlsafe() if is_loopback(host) else None
    answers = answer_table(library) | {
        "labels": lambda q: library.labels(_run(q)) | {"token": token}
    }

    async def static(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        if name not in files:
            return PlainTextResponse("no such file\n", 404)
        return Response(files[name], headers={"content-type": TYPES[name[name.rindex(".") :]]})

    async def api(request: Request) -> Response:
        answer = answers.get(request.path_params["question"])
        if answer is None:
            return _json({"error": "no such question"}, 404)
        return await asyncio.to_thread(answered, lambda: answer(request.query_params))

    async def image(request: Request) -> Response:
        query = request.query_params
        return await asyncio.to_thread(
            answered, lambda: library.image(_run(query), query.get("name", ""), _step(query))
        )

    def answered(answer: Callable[[], Mapping[str, object] | bytes]) -> Response:
        try:
            content = answer()
            if isinstance(content, bytes):
                return Response(content, headers={"content-type": type_of_content(content)})
            return _json(content)
        except (LookupError, FileNotFoundError) as error:
            return _json({"error": str(error.args[0] if error.args else error)}, 404)
        except ValueError as error:
            return _json({"error": f"the request cannot be parsed: {error}"}, 400)
        except ConfigError as error:
            return _json({"error": str(error)}, 400)
        except (OSError, JournalError) as error:
            return _json({"error": str(error)}, 500)

    async def label(request: Request) -> Response:
        length = request.headers.get("content-length", "")
        if not length.isdigit() or int(length) > MAX_BODY:
            return _json({"error": "a label is a short JSON object"}, 413)
        body = await request.body()
        return await asyncio.to_thread(answered, lambda: library.label(*_label(body)))

    routes = [
        Route(WRITES, label, methods=["POST"]),
        Route("/api/image", image),
        Route("/api/{question}", api),
        Route("/", static),
        Route("/static/{name:path}", static),
    ]
    rules: dict[str, Any] = {
        "hosts": allowed_hosts(host),
        "any_address": not is_loopback(host),
        "token": token,
    }
    return Starlette(routes=routes, middleware=[Middleware(Guard, **rules)])


def static_files() -> dict[str, bytes]:
    """The page's static files, by name; those of libraries are ``vendor/NAME``."""
    return dict(sorted(_files(resources.files("verifiers.view") / "static", "")))


def _files(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(tuple(TYPES)):
            yield f"{path}{entry.name}", entry.read_bytes()


def answer_table(library: Library) -> dict[str, Callable[[Mapping[str, str]], object]]:
    """Name of a request -> handler, which takes the query parameters."""
    return {
        "compare": lambda q: library.compare([run for run in q.get("runs", "").split("\n") if run]),
        "sets": lambda q: library.sets(),
        "set": lambda q: library.set(q.get("set", "")),
        "version": lambda q: library.version(q.get("run")),
        "runs": lambda q: library.runs(
            first := int(q.get("first", "0")), LIST_S if first else 0.0, q.get("generation", "")
        ),
        "run": lambda q: library.run(_run(q)),
        "columns": lambda q: library.columns(
            _run(q), _step(q), int(q.get("first", "0")), int(q.get("generation", "-1"))
        ),
        "previews": lambda q: library.previews(
            _run(q), [int(n) for n in q.get("rows", "").split(",") if n], _step(q)
        ),
        "rollout": lambda q: library.rollout(_run(q), int(q.get("row", "0")), _step(q)),
        "search": lambda q: library.search(
            _run(q), q.get("text", ""), int(q.get("first", "0")), _step(q)
        ),
        "values": lambda q: library.values(
            _run(q), q.get("name", ""), int(q.get("first", "0")), _step(q)
        ),
        "metrics": lambda q: library.metrics(
            _run(q), int(q.get("first", "0")), q.get("generation", "")
        ),
    }


def _label(body: bytes) -> tuple[str, int, bool | None]:
    """(run, row, label) of a request that labels. Raises ``ValueError``."""
    content = decode_message(body)
    if not isinstance(content, dict) or content.keys() != {"run", "row", "label"}:
        raise ValueError("give run, row and label")
    run, row, label = content["run"], content["row"], content["label"]
    if not isinstance(run, str) or type(row) is not int or not isinstance(label, bool | None):
        raise ValueError("run is a text, row a number, and label true, false or null")
    return run, row, label


def _run(query: Mapping[str, str]) -> str:
    if "run" not in query:
        raise ValueError("the parameter 'run' is missing")
    return query["run"]


def _step(query: Mapping[str, str]) -> int | None:
    return int(query["step"]) if query.get("step") else None


def _json(content: Mapping[str, object], status: int = 200) -> Response:
    """An ASCII JSON response: NaN becomes null, and lone surrogates in model text are preserved."""
    return Response(encode_row(content), status, {"content-type": "application/json"})
