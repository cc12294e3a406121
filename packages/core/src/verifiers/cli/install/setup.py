"""``vf-setup``: configuration files to begin with, and the parts that are too large to come along.

Promise: the files are shipped inside the package, so writing them needs no network; a file that is there stays unless
``--force`` is given; files are written before anything is installed, and stay when that fails. What is installed, and
how, is in ``setup_installs``.
"""

from __future__ import annotations

import importlib.resources
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from verifiers.cli.common.command import Call, SmallCommand
from verifiers.cli.common.writing import write_files
from verifiers.errors import ConfigError

FOLDER = "configs"
ENVIRONMENTS = ("alphabet-sort", "gsm8k", "math-python", "reverse-text", "wiki-search", "wordle")
ENDPOINTS = ("endpoints.py", "endpoints.toml")
LAB = tuple(f"lab/{name}.toml" for name in ENVIRONMENTS)
VF_RL = tuple(f"vf-rl/{name}.toml" for name in ENVIRONMENTS)
PRIME_RL = ("prime-rl/wiki-search.toml",)
ACCELERATE = ("zero3.yaml", "fsdp2.yaml")

ABOUT = """Write configuration files into ./configs, to change into your own.

\b
  vf-setup                  endpoints, training runs (configs/lab), accelerate
  vf-setup --vf-rl          endpoints, and training runs in the format of vf-rl
  vf-setup --prime-rl       a run for prime-rl, and prime-rl itself beside it
  vf-setup --local-model    the small model for `vf-eval ENV -m local`
"""


def run(call: Call) -> None:
    """Write and install what the command line asks for.

    Raises: ``ConfigError``, with nothing written; ``RunError`` when something could not be installed, with the files
    written.
    """
    from verifiers.cli.install import setup_installs

    if call.words:
        raise ConfigError(f"vf-setup takes options alone, not {' '.join(call.words)}; a folder is given with --path")
    options = call.options
    if options["skip_install"] and not options["prime_rl"]:
        raise ConfigError("--skip-install leaves out the installation of --prime-rl; give both, or neither")
    base = Path(options["path"]).expanduser()
    files = shipped(wanted(options))
    done = write_files(base, base / FOLDER, files, list(files) if options["force"] else []) if files else {}
    call.facts["files"] = {f"{FOLDER}/{name}": what for name, what in done.items()}
    _tell(call, base, done)
    if options["prime_rl"] and not options["skip_install"]:
        setup_installs.install_prime_rl(call, base)
    if options["local_model"]:
        setup_installs.install_local_model(call)
    _next_steps(call, base, done)


def wanted(options: Mapping[str, bool]) -> list[str]:
    """The files of a call, below ``configs``."""
    if not (options["vf_rl"] or options["prime_rl"] or options["local_model"]):
        return [*ENDPOINTS, *LAB, *ACCELERATE]
    return [*(ENDPOINTS + VF_RL if options["vf_rl"] else ()), *(PRIME_RL if options["prime_rl"] else ())]


def shipped(names: Sequence[str]) -> dict[str, str]:
    """The shipped files by name."""
    root = importlib.resources.files("verifiers") / "templates" / FOLDER
    return {name: (root / name).read_text(encoding="utf-8") for name in names}


def _tell(call: Call, base: Path, done: Mapping[str, str]) -> None:
    for name, what in done.items():
        call.say(f"  {what:<9} {(base / FOLDER / name).as_posix()}")
    if kept := sum(what == "kept" for what in done.values()):
        were = (
            "1 file was there already and is as it was" if kept == 1 else f"{kept} files were there and are unchanged"
        )
        call.note(f"vf-setup: {were}; --force replaces")


def _next_steps(call: Call, base: Path, done: Mapping[str, str]) -> None:
    steps = []
    if ENDPOINTS[1] in done:
        steps.append("vf-eval gsm8k -m gpt-4.1-mini -n 20      # the name is one of configs/endpoints.toml")
    for folder, files in (("lab", LAB), ("vf-rl", VF_RL), ("prime-rl", PRIME_RL)):
        if files[-1] in done:
            steps.append(f"vf-train @ {shlex.quote((base / FOLDER / folder / 'wiki-search.toml').as_posix())}")
    if call.options["prime_rl"]:
        checkout = shlex.quote((base / "prime-rl").as_posix())
        steps.append(f"cd {checkout} && uv run rl @ ../{FOLDER}/{PRIME_RL[0]}")
    if call.options["local_model"]:
        steps.append("vf-eval reverse-text -m local -n 2 -r 1")
    call.say("\n".join(["Next:", *(f"  {step}" for step in steps)]))


COMMAND = SmallCommand(
    name="vf-setup",
    about=ABOUT,
    metavar="",
    options=[
        click.Option(["--vf-rl"], is_flag=True, help="Files for vf-rl, which is vf-train."),
        click.Option(["--prime-rl"], is_flag=True, help="A file for prime-rl, and prime-rl (needs git, uv, network)."),
        click.Option(["--local-model"], is_flag=True, help="Install what `-m local` needs, about 100 MB."),
        click.Option(
            ["--path"], default=".", metavar="DIR", type=click.Path(file_okay=False), help="Where configs goes [.]."
        ),
        click.Option(["--skip-install"], is_flag=True, help="With --prime-rl: its file alone."),
        click.Option(["--force"], is_flag=True, help="Replace files that are there."),
    ],
    keys=("files",),
    action=run,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
