"""Export the page of ``vf-view`` as static files, for a static server or to open from the disk.

A ``file://`` page can neither fetch files nor load modules, but it can load scripts. So each
response is written as a script that passes its JSON to the page, and the page's modules are joined
into one script. The folder appears atomically; an existing folder is replaced only when it is an
earlier copy.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from verifiers.errors import ConfigError, JournalError
from verifiers.runtime.bounded import TooLong, read_file
from verifiers.runtime.json import encode_row
from verifiers.storage.files import replacing
from verifiers.storage.images import IMAGES_NAME, stored_name, write_images
from verifiers.view.app import VENDOR, static_files
from verifiers.view.catalog import TRAINING
from verifiers.view.describe import DAMAGE, RunEntry
from verifiers.view.guard import POLICY
from verifiers.view.library import Library
from verifiers.view.rollout import stored_images

log = logging.getLogger(__name__)
ROWS_PER_FILE = 20
"""Complete rollouts in one file."""
PREVIEWS_PER_FILE = 200
MAX_COMPARED = 12
"""Evaluations of an environment whose pairs are compared in a copy."""
REPORT_EVERY_S = 2.0
MARKER = "vf-view-copy"
"""Marks the page of a copy, to distinguish it from other folders."""
_IMPORT = re.compile(r"^import\s*\{[^{}]*\}\s*from\s*\"\./([\w.-]+)\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|const|let|class)", re.MULTILINE)
_ENTRY = "app.js"


def export(
    library: Library, out: str | Path, tell: Callable[[str], None] = lambda text: None
) -> Path:
    """Write the copy; returns its ``index.html``. Raises: ``ConfigError`` for a folder with other
    files.

    ``tell`` receives the progress as text, every ``REPORT_EVERY_S`` seconds.
    """
    out = Path(out)
    _refuse_other(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as new:
            (new / "data").mkdir(parents=True)
            files = static_files()
            (new / "style.css").write_bytes(files["style.css"])
            (new / "page.js").write_text(joined(modules(files)))
            for name in filter(lambda name: name.startswith(VENDOR), files):
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(files[name])
            (new / "index.html").write_text(_page(files["index.html"].decode()))
            last_report = time.monotonic()
            for name, answer in _answers(library, new / IMAGES_NAME):
                _write(new / "data", name, answer)
                if time.monotonic() - last_report >= REPORT_EVERY_S:
                    last_report = time.monotonic()
                    tell(_progress(library, name))
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror or error}", path=str(out)
        ) from error
    return out / "index.html"


def modules(files: Mapping[str, bytes]) -> dict[str, str]:
    """The page's own modules, by name, without those of libraries."""
    names = (name for name in files if name.endswith(".js") and not name.startswith(VENDOR))
    return {name: files[name].decode() for name in names}


def joined(modules: Mapping[str, str]) -> str:
    """Join modules into one script, each after its imports, in one scope.

    Requires imports by name without renaming, and distinct top-level names.
    """
    placed: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in placed:
            placed[name] = ""
            for needed in _IMPORT.findall(modules[name]):
                add(needed)
            del placed[name]
            placed[name] = _EXPORT.sub("", _IMPORT.sub("", modules[name]))

    add(_ENTRY)
    return '"use strict";\n(() => {\n' + "\n".join(placed.values()) + "\n})();\n"


def _page(page: str) -> str:
    policy = POLICY.replace("connect-src 'self'", "connect-src 'none'")
    policy = policy.replace("; frame-ancestors 'none'", "")
    charset, script = '<meta charset="utf-8">', '<script type="module" src="static/app.js">'
    marker = f'<meta name="generator" content="{MARKER}">'
    rules = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace(charset, f"{charset}\n{marker}\n{rules}")
    page = page.replace(script, '<script defer src="page.js">')
    return page.replace("static/", "")


def _answers(library: Library, images: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(file name, response) of every request the page can make. Runs are numbered in the order of
    the list; of a damaged run there is what comes before the damage. The images of rollouts are
    written to the folder ``images``."""
    runs = library.runs()
    runs["runs"].sort(key=lambda run: str(run["id"]))
    public = [_without_path(run) for run in runs["runs"]]
    yield "runs", {**runs, "folders": [], "runs": public, "copy": True}
    yield from _comparisons(library, runs["runs"])
    yield from _sets(library)
    for index, described in enumerate(runs["runs"]):
        try:
            yield from _answers_of(library, described["id"], index, images)
        except (OSError, ConfigError, JournalError, *DAMAGE) as error:
            log.warning("%s is damaged: %s: %s", described["id"], type(error).__name__, error)


def _answers_of(
    library: Library, run_id: str, index: int, images: Path
) -> Iterator[tuple[str, Mapping[str, object]]]:
    run = library.run(run_id)
    yield f"{index}/run", _without_path(run)
    if run["kind"] == TRAINING:
        yield f"{index}/metrics", library.metrics(run_id)
        for step in run["steps"]:
            yield from _rows(library, run_id, step, f"{index}/step-{step}", images)
    else:
        yield f"{index}/labels", library.labels(run_id)
        yield from _rows(library, run_id, None, f"{index}/rows", images)


def _comparisons(
    library: Library, runs: Sequence[RunEntry]
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The comparison of every pair of the first ``MAX_COMPARED`` evaluations of each
    environment."""
    by_env: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        if run["kind"] != TRAINING:
            by_env.setdefault(run["env"], []).append(index)
    for indexes in by_env.values():
        for a, b in itertools.permutations(indexes[:MAX_COMPARED], 2):
            with contextlib.suppress(OSError, ConfigError, JournalError, *DAMAGE):
                yield f"compare-{a}-{b}", library.compare([runs[a]["id"], runs[b]["id"]])


def _sets(library: Library) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The list of the sets of runs, and each of them."""
    listed = library.sets()
    yield "sets", listed
    for index, summary in enumerate(listed["sets"]):
        yield f"set-{index}", library.set(summary["id"])


def _progress(library: Library, name: str) -> str:
    """How far the copy is, from the name of the file just written: ``run 2 of 3,
    40,000 rollouts``; of a training the step."""
    parts = name.split("/")
    if not parts[0].isdigit():
        return "reading the list of runs"
    run = f"run {int(parts[0]) + 1} of {len(library.catalog.sources())}"
    if parts[1].startswith("step-"):
        return f"{run}, {parts[1].replace('-', ' ')}"
    kind, _, number = parts[-1].rpartition("-")
    size = {"rollouts": ROWS_PER_FILE, "previews": PREVIEWS_PER_FILE}.get(kind)
    rows = f", {(int(number) + 1) * size:,} {kind}" if size else ""
    return f"{run}{rows}"


def _rows(
    library: Library, run_id: str, step: int | None, folder: str, images: Path
) -> Iterator[tuple[str, Mapping[str, object]]]:
    columns = library.columns(run_id, step, budget_s=float("inf"))
    yield f"{folder}/columns", {**columns, "complete": True}
    total = columns["total"]
    for first in range(0, total, PREVIEWS_PER_FILE):
        numbers = range(first, min(first + PREVIEWS_PER_FILE, total))
        previews = library.previews(run_id, numbers, step)
        yield f"{folder}/previews-{first // PREVIEWS_PER_FILE}", previews
    for first in range(0, total, ROWS_PER_FILE):
        numbers = range(first, min(first + ROWS_PER_FILE, total))
        answer = library.rollouts(run_id, numbers, step)
        for page in answer["rollouts"].values():
            names = {str(stored_name(part["url"])) for part in stored_images(page)}
            missing = [name for name in names if not (images / name).exists()]
            write_images(images, {name: library.image(run_id, name, step) for name in missing})
        yield f"{folder}/rollouts-{first // ROWS_PER_FILE}", answer


def _without_path(run: Mapping[str, object]) -> dict[str, object]:
    """The run without local paths, because a copy may be published."""
    public = dict(run)
    public.pop("path", None)
    if isinstance(metadata := public.get("metadata"), dict):
        public["metadata"] = {k: value for k, value in metadata.items() if k != "path_to_save"}
    return public


def _write(folder: Path, name: str, answer: Mapping[str, object]) -> None:
    file = folder / f"{name}.js"
    file.parent.mkdir(parents=True, exist_ok=True)
    key = encode_row({"key": name})[7:-1]
    # in a literal it would set the prototype
    content = encode_row(answer).replace(b'"__proto__":', b'["__proto__"]:')
    file.write_bytes(b"vfData(" + key + b"," + content + b");\n")


def _refuse_other(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out} is a file; name a folder for the copy", path=str(out))
    if any(out.iterdir()) and not _is_copy(out / "index.html"):
        raise ConfigError(
            f"{out} holds other files; name a new folder, or one of an earlier copy", path=str(out)
        )


def _is_copy(page: Path) -> bool:
    try:
        return MARKER.encode() in read_file(page)
    except (OSError, TooLong):
        return False
