"""``open_view``: show results or a run in the browser from Python, for scripts and notebooks."""

from __future__ import annotations

import atexit
import tempfile
import threading
from html import escape
from pathlib import Path
from typing import Self

from verifiers.results import GenerateOutputs
from verifiers.view.catalog import Catalog
from verifiers.view.library import Library
from verifiers.view.server import Server, open_browser


def open_view(runs: GenerateOutputs | str | Path, browser: bool = True) -> OpenView:
    """Serve ``runs`` (results, a run directory, or a folder of runs) as the page of ``vf-view``.

    Args:
        runs: Results, a run directory, or a folder of runs. Results that were not saved are written
            to a temporary folder.
        browser: Open a browser if there is any.

    The server runs on a thread of this process, on a free port of 127.0.0.1, until ``close`` or the
    end of the process. A notebook shows the returned object as a link.

    *Raises* ConfigError for a folder that does not exist.

    >>> from verifiers.testing import ScriptedClient
    >>> results = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}]).evaluate(ScriptedClient("2"), "m")
    >>> with vf.open_view(results, browser=False) as view:
    ...     view.url.startswith("http://127.0.0.1:")
    True
    """
    temporary = None
    if isinstance(runs, GenerateOutputs):
        folder = runs.metadata.path_to_save
        if folder is None or not folder.is_dir():
            temporary = tempfile.TemporaryDirectory(prefix="vf-view-")
            folder = Path(temporary.name) / "results"
            runs.save(folder)
    else:
        folder = Path(runs)
    view = OpenView(Server(Library(Catalog([folder]))), temporary)
    if browser:
        open_browser(view.url)
    return view


class OpenView:
    """A page of runs that this process serves; ``url`` is its address. A context manager that
    closes it."""

    def __init__(self, server: Server, temporary: tempfile.TemporaryDirectory[str] | None = None):
        self.url = server.url
        self._server, self._temporary = server, temporary
        self._thread = threading.Thread(target=server.run, name="vf-view", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Stop the server and remove temporary files; a second call does nothing."""
        self._server.stop()
        self._thread.join(timeout=5)
        if self._temporary is not None:
            self._temporary.cleanup()
        atexit.unregister(self.close)

    def __repr__(self) -> str:
        return f"OpenView({self.url!r})"

    def _repr_html_(self) -> str:
        return f"<a href='{escape(self.url)}' target='_blank'>{escape(self.url)}</a>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
