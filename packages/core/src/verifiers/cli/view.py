"""``vf-view``: browse runs in the browser, or export the page as files. Reads runs only."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verifiers.cli.common.command import Call, Listening, Port, SmallCommand
from verifiers.errors import ConfigError, UnknownEnvironment
from verifiers.runtime.values import option, with_default

if TYPE_CHECKING:
    from verifiers.view.library import Library

ABOUT = """Browse evaluations and training runs in the browser, finished or running.

PATH is a folder with runs, one run's folder, a file or folder of ATIF trajectories, or an environment, whose
evaluations are shown. Default: ./outputs and
every ./environments/*/outputs. The server answers this machine only.

\b
  vf-view
  vf-view outputs/evals
  vf-view reverse-text
  vf-view export outputs site     a static copy to send or publish
"""


@dataclass(frozen=True)
class ViewSettings(Listening):
    """The flags of ``vf-view``."""

    port: Port = with_default(Listening, "port", 0)
    no_browser: bool = option(False, "Open no browser.", "--no-browser --no-open")
    allow_remote: bool = option(False, "Allow a --host that other machines can reach.")
    tokenizer: str | None = option(
        None,
        "Tokenizer that decodes tokens for log-probabilities: a folder, or a name in the local"
        " cache.",
        metavar="NAME",
    )
    export: str | None = option(None, "Write a copy into this folder, and exit.", metavar="OUT")
    once: bool = option(False, "With --export: exit afterwards, which is the default.")


def run(call: Call, settings: ViewSettings) -> None:
    """Serve or export the runs. *Raises* ``ConfigError``."""
    from verifiers.view.catalog import Catalog, default_folders
    from verifiers.view.library import Library
    from verifiers.view.tokens import pieces_of

    words, out = _folders(call, settings)
    folders = [folder for word in words for folder in _folders_of(word)]
    pieces = None if settings.tokenizer is None else pieces_of(settings.tokenizer)
    library = Library(Catalog(folders or default_folders()), pieces)
    if out is not None:
        _export(call, library, out)
    else:
        _serve(call, settings, library)


def _folders(call: Call, settings: ViewSettings) -> tuple[list[str], str | None]:
    """(folders with runs or environments, folder of the copy or None)."""
    words, out = list(call.words), settings.export
    if words[:1] == ["export"]:
        if len(words) < 3 or out is not None:
            raise ConfigError(
                "give the folder with the runs and a folder for the copy: vf-view export DIR OUT"
            )
        return words[1:-1], words[-1]
    if settings.once and out is None:
        raise ConfigError("--once exits after writing a copy; add --export OUT")
    return words, out


def _folders_of(word: str) -> list[Path]:
    """The folder itself, or a folder with a run of its ATIF trajectories if it is of them alone,
    which lasts as long as this process; of an environment its evaluations. *Raises*
    ``ConfigError`` for a file of something else."""
    from verifiers.results import load_results
    from verifiers.results.atif import load_trajectories
    from verifiers.view.catalog import runs_below

    path = Path(word)
    if not path.is_dir() and not word.endswith(".json"):
        return _evaluations_of(word)
    if path.is_dir() and (any(runs_below([word])) or not load_trajectories(path)):
        return [path]
    folder = Path(tempfile.mkdtemp(prefix="verifiers-view-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    load_results(word).save(folder / path.resolve().stem)
    return [folder]


def _evaluations_of(word: str) -> list[Path]:
    """The folders with evaluations of an environment, named by id or path. *Raises* ``ConfigError``
    without an id or path."""
    from verifiers.environments.local_sources import normalize_name
    from verifiers.environments.registry import id_of
    from verifiers.view.catalog import default_folders

    not_a_folder = (
        f"{word} is not a folder; name a folder with runs, one run's folder, or an environment with"
        " runs"
    )
    try:
        env_id, roots = id_of(word), default_folders()
    except (UnknownEnvironment, ConfigError) as error:
        raise ConfigError(not_a_folder) from error
    name = normalize_name(env_id.rpartition("/")[2]).removeprefix("vf-")

    def is_its(folder: Path) -> bool:  # ENV--MODEL or OWNER--ENV--MODEL
        names = folder.name.split("--")[:2]
        return name in (normalize_name(part).removeprefix("vf-") for part in names)

    of_runs = [folder for root in roots for folder in sorted(root.glob("evals/*--*"))]
    folders = list(filter(is_its, of_runs))
    if not folders:
        raise ConfigError(f"{not_a_folder}: vf-eval {word} makes one")
    return folders


def _export(call: Call, library: Library, out: str) -> None:
    from verifiers.view.export import export

    page = export(library, out, lambda text: call.note(f"vf-view: copying, {text}"))
    call.facts["url"] = page.resolve().as_uri()
    call.say(f"{len(library.runs()['runs'])} runs in {Path(out)}: open {page}")


def _serve(call: Call, settings: ViewSettings, library: Library) -> None:
    from verifiers.view.server import Server, open_browser

    server = Server(library, settings.host, settings.port, settings.allow_remote)
    folders = ", ".join(map(str, library.catalog.folders))
    call.answer_now(f"the runs in {folders} are at {server.url}", url=server.url)
    if not settings.no_browser and not open_browser(server.url):
        how = "open the address, through a tunnel if this machine is remote"
        call.note(f"vf-view: no browser here; {how}:")
        call.note(f"  ssh -L {server.port}:127.0.0.1:{server.port} {{this machine}}")
    call.note("vf-view: Ctrl-C ends it")
    server.run()


COMMAND = SmallCommand(
    name="vf-view",
    about=ABOUT,
    metavar="[PATH ...]",
    options=ViewSettings,
    keys=("url",),
    action=run,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
