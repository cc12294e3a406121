"""The server's routes: the page's static files by name, and the library's responses as JSON under ``/api/``.

Files are never served by path: requests name a run, which is looked up in the catalog. Handlers run in threads, so
reading a large file does not block other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from verifiers.errors import JournalError
from verifiers.runtime.json import encode_row
from verifiers.view.guard import LOOPBACK, Guard, allowed_hosts, is_loopback
from verifiers.view.library import Library

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}


def make_app(library: Library, host: str = LOOPBACK[1]) -> Starlette:
    """The application for a server bound to ``host``."""
    files = static_files()
    answers = answer_table(library)

    def static(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        if name not in files:
            return PlainTextResponse("no such file\n", 404)
        return Response(files[name], headers={"content-type": TYPES[name[name.rindex(".") :]]})

    def api(request: Request) -> Response:
        answer = answers.get(request.path_params["question"])
        if answer is None:
            return _json({"error": "no such question"}, 404)
        try:
            return _json(answer(request.query_params))
        except (LookupError, FileNotFoundError) as error:
            return _json({"error": str(error.args[0] if error.args else error)}, 404)
        except ValueError as error:
            return _json({"error": f"the request cannot be parsed: {error}"}, 400)
        except (OSError, JournalError) as error:
            return _json({"error": str(error)}, 500)

    return Starlette(
        routes=[Route("/api/{question}", api), Route("/", static), Route("/static/{name}", static)],
        middleware=[Middleware(Guard, hosts=allowed_hosts(host), any_address=not is_loopback(host))],
    )


def static_files() -> dict[str, bytes]:
    """The page's static files, by name."""
    folder = resources.files("verifiers.view") / "static"
    entries = {entry.name: entry for entry in folder.iterdir() if entry.name.endswith(tuple(TYPES))}
    return {name: entries[name].read_bytes() for name in sorted(entries)}


def answer_table(library: Library) -> dict[str, Callable[[Mapping[str, str]], Any]]:
    """Name of a request -> handler, which takes the query parameters."""
    return {
        "compare": lambda q: library.compare([run for run in q.get("runs", "").split("\n") if run]),
        "version": lambda q: library.version(q.get("run")),
        "runs": lambda q: library.runs(),
        "run": lambda q: library.run(_run(q)),
        "columns": lambda q: library.columns(
            _run(q), _step(q), int(q.get("first", "0")), int(q.get("generation", "-1"))
        ),
        "previews": lambda q: library.previews(_run(q), [int(n) for n in q.get("rows", "").split(",") if n], _step(q)),
        "rollout": lambda q: library.rollout(_run(q), int(q.get("row", "0")), _step(q)),
        "search": lambda q: library.search(_run(q), q.get("text", ""), int(q.get("first", "0")), _step(q)),
        "values": lambda q: library.values(_run(q), q.get("name", ""), int(q.get("first", "0")), _step(q)),
        "metrics": lambda q: library.metrics(_run(q), int(q.get("first", "0")), q.get("generation", "")),
    }


def _run(query: Mapping[str, str]) -> str:
    if "run" not in query:
        raise ValueError("the parameter 'run' is missing")
    return query["run"]


def _step(query: Mapping[str, str]) -> int | None:
    return int(query["step"]) if query.get("step") else None


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    """An ASCII JSON response: NaN becomes null, and lone surrogates in model text are preserved."""
    return Response(encode_row(content), status, {"content-type": "application/json"})
