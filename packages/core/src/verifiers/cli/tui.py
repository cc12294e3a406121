"""``vf-tui``: browse runs in the terminal, read-only."""

from __future__ import annotations

from verifiers.cli.common.command import Call, NoSettings, SmallCommand
from verifiers.errors import ConfigError

ABOUT = """Browse evaluations and training runs in the terminal.

PATH is a folder with runs, or one run's folder. Default: ./outputs and every ./environments/*/outputs.

\b
  vf-tui
  vf-tui outputs/evals

Above the rollouts of a run stand its numbers, as vf-eval prints them.

Keys: Enter opens, b goes back, s searches, o sorts by the next column, r reverses the order, e lists errors only,
arrows or h and l show the previous and next rollout, c copies, q quits.
"""


def run(call: Call, _: NoSettings) -> None:
    """Show the runs until q is pressed. *Raises* ``ConfigError``."""
    from verifiers.view.catalog import Catalog, default_folders
    from verifiers.view.library import Library

    try:
        import textual  # noqa: F401 - check that it is installed
    except ModuleNotFoundError as error:
        from verifiers.runtime.install_lines import install_line

        raise ConfigError(
            f"vf-tui needs an extra that is not installed: {install_line('verifiers', 'tui')}"
        ) from error
    if call.json:
        raise ConfigError("vf-tui has no JSON output; vf-eval --json prints the numbers of a run")
    library = Library(Catalog(call.words or default_folders()))

    from verifiers.tui.app import RunsApp

    RunsApp(library).run()


COMMAND = SmallCommand(
    name="vf-tui", about=ABOUT, metavar="[PATH ...]", options=NoSettings, keys=(), action=run
)
main = COMMAND.main

if __name__ == "__main__":
    main()
