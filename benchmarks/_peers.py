"""Other evaluation frameworks, each in a separate virtual environment, measured through their
public API.

This file is run by the peer's interpreter (``python _peers.py NAME URL NUM_ROLLOUTS IN_FLIGHT``)
and prints CPU and wall seconds; it imports nothing of this project but ``_measure``. Each peer runs
the same single-turn rollouts as ``_contenders``: the same prompt, sampling and kind of reward
function, saving only what it always saves.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from _measure import Cost, Stopwatch, new_event_loop

QUESTION = "What is six times seven? " * 10
SYSTEM = "Answer in one sentence."
SAMPLING = {"temperature": 0.7, "max_tokens": 256}
PACKAGES = {
    "verifiers 0.1.14": ["verifiers==0.1.14", "openai==3.51.0", "uvloop==0.23.0"],
    "inspect-ai 0.3.285": ["inspect-ai==0.3.285", "openai==3.51.0", "uvloop==0.23.0"],
}
"""Packages to install for each peer."""
REPOSITORY = Path(__file__).resolve().parents[1]
OURS = ("core", "trainer", "envs/reverse-text", "envs/alphabet-sort", "envs/curriculum-sums")
TRL = "trl 1.16.0"
TRAINERS = {
    TRL: [
        *(
            "trl==1.16.0",
            "transformers==5.23.0",
            "torch==2.13.0",
            "datasets==5.2.0",
            "accelerate==1.15.0",
        ),
        *(word for name in OURS for word in ("-e", str(REPOSITORY / "packages" / name))),
    ]
}
"""Trainers and our packages, whose environments generate the rollouts."""


# --- run by our interpreter -----------------------------------------------------------------------


def home_of(peer: str, folder: Path) -> Path:
    """The peer's virtual environment in ``folder``."""
    return folder / peer.replace(" ", "-")


def packages_of(peer: str) -> list[str]:
    return (PACKAGES | TRAINERS)[peer]


def is_installed(peer: str, folder: Path) -> bool:
    """Whether the peer's virtual environment has the packages that are listed now."""
    installed = home_of(peer, folder) / "installed"
    return installed.exists() and installed.read_text().split("\n") == packages_of(peer)


def interpreter(peer: str, folder: Path) -> Path:
    """The peer's interpreter in ``folder``, installed on first use. *Raises* CalledProcessError.

    PIP_FIND_LINKS may name the location of a CPU build of torch.
    """
    home = home_of(peer, folder)
    python = home / "bin" / "python"
    if not is_installed(peer, folder):
        links = (
            {"UV_FIND_LINKS": links_path}
            if (links_path := os.environ.get("PIP_FIND_LINKS"))
            else {}
        )
        subprocess.run(
            ["uv", "venv", "--quiet", "--clear", "--python", "3.11", str(home)], check=True
        )
        install = ["uv", "pip", "install", "--quiet", "--python", str(python), *packages_of(peer)]
        subprocess.run(install, check=True, env=os.environ | links)
        (home / "installed").write_text("\n".join(packages_of(peer)))
    return python


def child_environment() -> dict[str, str]:
    """This process's environment variables, without those that point another interpreter to our
    packages."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }


def peer_cost(python: Path, peer: str, url: str, num_rollouts: int, in_flight: int) -> Cost:
    """The cost of the rollouts for the peer in a separate process, without its start
    and a warm-up."""
    process = subprocess.run(
        [str(python), __file__, peer, url, str(num_rollouts), str(in_flight)],
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise RuntimeError(f"{peer} failed:\n{process.stderr[-3000:]}")
    cpu_s, wall_s = process.stdout.split()[-2:]
    return Cost(float(cpu_s), float(wall_s))


# --- run by the peer's interpreter ----------------------------------------------------------------


async def verifiers_0114(url: str, num_rollouts: int, in_flight: int) -> Cost:
    """``SingleTurnEnv.evaluate``; this version takes a ``ClientConfig`` as its client."""
    from datasets import Dataset

    import verifiers as vf

    os.environ["BENCHMARK_KEY"] = "k"
    client = vf.ClientConfig(api_key_var="BENCHMARK_KEY", api_base_url=url)

    def correct(completion: Any, answer: str, **_: Any) -> float:
        return float(answer in completion[-1]["content"])

    rows = [
        {"question": QUESTION, "answer": "42", "info": {"number": i}} for i in range(num_rollouts)
    ]
    env = vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), system_prompt=SYSTEM, rubric=vf.Rubric(funcs=[correct])
    )

    async def run(num_examples: int) -> None:
        results = await env.evaluate(
            client,
            "m",
            SAMPLING,
            num_examples=num_examples,
            rollouts_per_example=1,
            max_concurrent=in_flight,
        )
        assert [output["reward"] for output in results["outputs"]] == [1.0] * num_examples

    return await _timed(run, num_rollouts, in_flight)


async def inspect_0285(url: str, num_rollouts: int, in_flight: int) -> Cost:
    """``eval_async`` of a task with ``generate()`` and ``includes()``; its log is
    always written."""
    from inspect_ai import Task, eval_async
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, system_message

    config = GenerateConfig(temperature=0.7, max_tokens=256, max_connections=in_flight)
    model = get_model("openai-api/benchmark/m", base_url=url, api_key="k", config=config)

    async def run(num_examples: int) -> None:
        samples = [Sample(input=QUESTION, target="42", id=i) for i in range(num_examples)]
        task = Task(
            dataset=MemoryDataset(samples),
            solver=[system_message(SYSTEM), generate()],
            scorer=includes(),
        )
        with tempfile.TemporaryDirectory() as folder:
            (log,) = await eval_async(
                task, model=model, log_dir=folder, max_samples=in_flight, log_level="error"
            )
        assert log.status == "success", log.error

    return await _timed(run, num_rollouts, in_flight)


async def _timed(run: Callable[[int], Awaitable[None]], num_rollouts: int, in_flight: int) -> Cost:
    await run(min(num_rollouts, 2 * in_flight))
    with Stopwatch() as watch:
        await run(num_rollouts)
    return watch.cost


PEERS = {"verifiers 0.1.14": verifiers_0114, "inspect-ai 0.3.285": inspect_0285}


def main() -> None:
    os.environ |= {"INSPECT_DISPLAY": "none", "TQDM_DISABLE": "1"}  # displays cost time
    peer, url, num_rollouts, in_flight = sys.argv[1:]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        cost = runner.run(PEERS[peer](url, int(num_rollouts), int(in_flight)))
    print(cost.cpu_s, cost.wall_s)


if __name__ == "__main__":
    main()
