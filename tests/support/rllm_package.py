"""rLLM's recorded shapes as a package on disk, with a trainer that plays the first batch and says
what it was given.

For the scripts of ``examples/verifiers_env``, which start a process of their own. ``write`` makes
either age of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from support.peer_double import CONTRACTS, contract_of

TRAINERS = {"unified": "unified_trainer", "older": "agent_trainer"}
SHAPES = """
from support.peer_double import shapes_of
globals().update(shapes_of("rllm", __name__))
"""
WORKFLOW = """
class Workflow(Workflow):
    def reset(self, task, uid):
        self.was_reset = uid
"""
DATASET = """
class Dataset(list):
    pass


class DatasetRegistry:
    @staticmethod
    def register_dataset(name, data, split="default"):
        assert all(isinstance(row["info"], str) for row in data), "columns of one type, as a Parquet file wants them"
        made = Dataset(data)
        made.registered = [name, split]
        return made
"""
TRAINER = """
import asyncio
import json

from rllm.engine.rollout.rollout_engine import ModelOutput


class Engine:
    model_name = "policy"

    def __init__(self):
        self.asked = []

    async def get_model_response(self, messages, **given):
        self.asked.append(given)
        return ModelOutput(
            content="no", prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5], finish_reason="stop", weight_version=0
        )


class AgentTrainer:
    def __init__(self, *, config, workflow_class, workflow_args, train_dataset, val_dataset, backend):
        self.given = (config, workflow_class, workflow_args, train_dataset, val_dataset, backend)

    def train(self):
        config, workflow_class, workflow_args, train, held_out, backend = self.given
        engine = Engine()
        tasks = train[: config["data"]["train_batch_size"]]

        async def play():
            made = [workflow_class(rollout_engine=engine, executor=None, **workflow_args) for _ in tasks]
            return await asyncio.gather(*(one.run(task, f"{n}:0") for n, (one, task) in enumerate(zip(made, tasks))))

        episodes = asyncio.run(play())
        try:
            from omegaconf import OmegaConf

            config = OmegaConf.to_container(config)
        except (ImportError, ValueError):
            pass
        told = {
            "backend": backend,
            "config": config,
            "train": len(train),
            "held_out": len(held_out),
            "registered": getattr(train, "registered", None),
            "turns": workflow_args["vf_env"].max_turns,
            "asked": engine.asked[0],
            "reasons": sorted({one.termination_reason.name for one in episodes}),
            "steps": [len(one.trajectories[0].steps) for one in episodes],
            "rewards": [one.trajectories[0].reward for one in episodes],
        }
        print("TRAINED " + json.dumps(told))
"""


def write(folder: Path, age: str) -> Path:
    """The package of an age ("unified" or "older") below ``folder``; what goes on the path."""
    files = {module.replace(".", "/") + ".py": SHAPES for module in contract_of("rllm")["modules"]}
    files["rllm/workflows/workflow.py"] += WORKFLOW
    files |= {"rllm/data/dataset.py": DATASET, f"rllm/trainer/{TRAINERS[age]}.py": TRAINER}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copytree(CONTRACTS / "rllm_configs" / age, folder / "rllm/trainer/config")
    for package in sorted(
        {path.parent for path in (folder / "rllm").rglob("*.py")} | {folder / "rllm"}
    ):
        (package / "__init__.py").touch()
    (folder / "rllm/trainer/config/__init__.py").touch()
    for parent in ("rllm/engine", "rllm/trainer"):
        (folder / parent / "__init__.py").touch()
    return folder
