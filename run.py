#!/usr/bin/env python3
"""The commands of the README, on a machine that has only Python 3.11+ and pip.

    python3 run.py quickstart     a whole RL run on this machine's CPU, in minutes
    python3 run.py test           the tests
    python3 run.py test --changed     the tests that what you changed touches (--changed COMMIT: since then)
    python3 run.py test --promises    the promises about failure, each with the tests that prove it (--fast)
    python3 run.py profile FOLDER     what each test costs in CPU seconds (--report FOLDER prints it)
    python3 run.py mutate 20          whether the tests notice faults put into the kernel, one by one
    python3 run.py soak           random faults against an evaluation and a training, for an hour (--minutes)

Both set up what they need: a virtual environment in ``.venv``, the versions of ``uv.lock``, the
workspace's packages editable. ``python3 run.py setup`` does only that, and names the programs of
the system that are missing; ``setup --system`` installs those too (as root, with apt-get), and
nothing else is installed outside this folder. ``python3 run.py check`` runs linters, types and
layers, and prints the statements per layer beside the last release. Further arguments go to the
command (``vf-train quickstart``, ``pytest``).

torch is the one package that is not taken from the lock as it stands: its default wheels for Linux
carry 3 GB of CUDA libraries. A machine with an NVIDIA driver gets those; any other gets the CPU
build where one can be had.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / ".verifiers-setup"
ENVIRONMENTS = sorted(
    str(path.parent.relative_to(ROOT)) for path in ROOT.glob("packages/envs/*/pyproject.toml")
)
MEMBERS = [
    *(f"packages/{name}" for name in ("core", "agents", "integrations", "sandboxes", "trainer")),
    *ENVIRONMENTS,
]

HANGS_END = ["-o", "faulthandler_timeout=300", "-o", "faulthandler_exit_on_timeout=true"]
"""A test that hangs shows where, and fails; another process takes up the rest."""
PROGRAMS = {
    "bwrap": (
        "bubblewrap",
        "code of a model, agent programs and Harbor's tasks run in its sandbox",
    ),
    "chromium": ("chromium", "the tests of vf-view open its page in it"),
    "chromedriver": ("chromium-driver", "the tests of vf-view drive Chromium by it"),
}
"""Program of the system -> its Debian package, and what needs it. All are optional: what needs one
says so, and its tests skip."""
CHECKS = ("ruff check .", "ruff format --check .", "mypy", "lint-imports --no-logo")


def main() -> int:
    """Set up, then run the command that was asked for."""
    if sys.version_info < (3, 11):
        return fail(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}")
    command, arguments = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    commands = {
        "setup": [],
        "check": [*(check.split() for check in CHECKS), ["python", "tests/statements.py"]],
        "quickstart": [["vf-train", "quickstart", *arguments]],
        "soak": [["python", "tests/soak.py", *arguments]],
        "profile": [["python", "tests/profile_suite.py", *arguments]],
        "mutate": [["python", "tests/mutation.py", *arguments]],
        "test": [
            [
                "python",
                "-m",
                "pytest",
                "-q",
                "-n",
                "auto",
                "-m",
                "not slow and not gpu",
                *HANGS_END,
                *arguments,
            ]
        ],
    }
    for option, script in {
        "--promises": "tests/certificate.py",
        "--changed": "tests/changed.py",
    }.items():
        if command == "test" and option in arguments:
            commands["test"] = [
                ["python", script, *(argument for argument in arguments if argument != option)]
            ]
    if command not in commands:
        print(__doc__)
        return 0 if command in ("-h", "--help", "help") else fail(f"unknown command {command!r}")
    try:
        if "--system" in arguments and command == "setup":
            install_programs()
        is_new = set_up()
    except subprocess.CalledProcessError as error:
        return fail(
            f"setting up failed: {' '.join(map(str, error.cmd))} ended with exit code"
            f" {error.returncode}"
        )
    if is_new or command == "setup":
        for sentence in missing_programs():
            print(f"run.py: {sentence}", file=sys.stderr)
        print("run.py: set up; next: source .venv/bin/activate", file=sys.stderr, flush=True)
    for program, *words in commands[command]:
        if code := subprocess.call([str(BIN / program), *words], cwd=ROOT, env=environment()):
            return code
    return 0


def environment() -> dict[str, str]:
    """Environment variables of commands: those of ``.venv``; compiled modules are kept.

    uv compiles nothing, and containers often set PYTHONDONTWRITEBYTECODE: every command would
    compile all that it imports anew, which is more than half of the time that the trainer takes to
    import.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # "auto" is one process per core, and cores then idle: tests also wait, for servers, time limits
    # and disks
    kept.setdefault("PYTEST_XDIST_AUTO_NUM_WORKERS", str((os.cpu_count() or 1) + 2))
    return {**kept, "PATH": f"{BIN}{os.pathsep}{kept.get('PATH', '')}", "VIRTUAL_ENV": str(VENV)}


def fail(sentence: str) -> int:
    """Say what is wrong; exit code 2."""
    print(f"run.py: {sentence}", file=sys.stderr)
    return 2


def missing_programs() -> list[str]:
    """A sentence for each program of the system that is not on the path, with what brings it."""
    brings = "sudo apt-get install {}" if shutil.which("apt-get") else "install your system's {}"
    return [
        f"{program} is not installed; {needed}: {brings.format(package)}"
        for program, (package, needed) in PROGRAMS.items()
        if shutil.which(program) is None
    ]


def install_programs() -> None:
    """Install the missing programs of the system. *Raises* CalledProcessError when apt-get fails."""
    packages = [package for program, (package, _) in PROGRAMS.items() if not shutil.which(program)]
    if not packages:
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        print("run.py: --system needs apt-get and root; nothing was installed", file=sys.stderr)
        return
    quietly = {"env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    run(["apt-get", "update", "-qq"], **quietly)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages], **quietly)


def set_up() -> bool:
    """Bring ``.venv`` to what the lock file says; False if it was already there."""
    wanted = fingerprint()
    if STAMP.is_file() and STAMP.read_text() == wanted and PYTHON.is_file():
        return False
    print(
        f"setting up {VENV} (once; a few minutes on a slow connection)", file=sys.stderr, flush=True
    )
    uv = find_uv()
    if not PYTHON.is_file():
        # --seed: with pip, so that "pip install" in it does not fall to the system's
        venv = [*uv, "venv", "--quiet", "--seed", "--allow-existing"]
        run([*venv, "--python", sys.executable, VENV])
    install_torch(uv)
    export = [
        *uv,
        "export",
        "--quiet",
        "--frozen",
        "--all-groups",
        "--no-hashes",
        "--no-emit-workspace",
    ]
    export += ["--prune", "torch"]
    requirements = VENV / "requirements.txt"
    run([*export, "--output-file", requirements], stdout=subprocess.DEVNULL)
    run([*pip_install(uv), "--no-deps", "-r", requirements])
    run([*pip_install(uv), "--no-deps", *(word for member in MEMBERS for word in ("-e", member))])
    run(
        [PYTHON, "-c", "import verifiers.cli.evaluate.command, verifiers_trainer.trainer"],
        env=environment(),
    )
    STAMP.write_text(wanted)
    return True


def fingerprint() -> str:
    """Changes when what should be installed changes."""
    files = [
        ROOT / "uv.lock",
        ROOT / "run.py",
        *(ROOT / member / "pyproject.toml" for member in MEMBERS),
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def find_uv() -> list[str | Path]:
    """uv where it is, or installed into ``.venv`` with pip."""
    if program := shutil.which("uv"):
        return [program]
    local_uv = BIN / ("uv.exe" if os.name == "nt" else "uv")
    if not local_uv.is_file():
        if not PYTHON.is_file():
            run([sys.executable, "-m", "venv", VENV])
        run([PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"])
    return [local_uv]


def pip_install(uv: list[str | Path]) -> list[str | Path]:
    """uv's installer, into ``.venv``."""
    return [*uv, "pip", "install", "--quiet", "--python", PYTHON]


def install_torch(uv: list[str | Path]) -> None:
    """torch: a wheel kept on this machine, else the build that fits its hardware, else the index's
    default."""
    locked = re.search(
        r'^name = "torch"\nversion = "([^"]+)"', (ROOT / "uv.lock").read_text(), re.MULTILINE
    )
    version = locked[1] if locked else ""
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    for folder in folders:
        for wheel in Path(folder).glob(
            f"torch-*-cp{sys.version_info.major}{sys.version_info.minor}-*.whl"
        ):
            kept = wheel.name.split("-")[1]
            if subprocess.call([*pip_install(uv), "--find-links", folder, f"torch=={kept}"]) == 0:
                return
    if sys.platform == "linux" and not shutil.which("nvidia-smi"):
        attempt = [*pip_install(uv), "--torch-backend", "cpu", f"torch=={version}"]
        if subprocess.call(attempt, stderr=subprocess.DEVNULL) == 0:
            return
        print(
            "no CPU build of torch could be had: the default one is installed (3 GB)",
            file=sys.stderr,
            flush=True,
        )
    run([*pip_install(uv), f"torch=={version}"])


def run(command: list, **options) -> None:
    """Run a step of the set-up; its failure ends the set-up."""
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True, **options)


if __name__ == "__main__":
    raise SystemExit(main())
