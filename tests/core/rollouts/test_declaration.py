"""A field of a rollout is declared on one line; everything else follows.

The test adds a line to ``rollouts/rollout.py`` while it is imported, in a process of its own, and
looks for the field wherever a rollout goes.
"""

import json
import subprocess
import sys

from support.import_graph import CORE

NEW_LINE = '''
    confidence: Annotated[
        float | None,
        Saved(when="always", read=number, column="confidences", index="number"),
    ] = None
    """How sure the model says it is."""
'''
AFTER = "    usage: Annotated[\n"
EDITS = {
    "verifiers.rollouts.rollout": (AFTER, NEW_LINE),
    "verifiers.rollouts.turn": (
        "    num_shared: int = 0\n",
        "    fingerprint: Annotated[str, Saved()] = ''\n",
    ),
}
"""Module -> what stands after the new line, and the new line."""
PROGRAM = """
import importlib, importlib.abc, importlib.machinery, json, sys
from pathlib import Path

EDITS, docs = json.loads(sys.argv[2])
AFTER, NEW_LINE = EDITS["verifiers.rollouts.rollout"]


class Rollouts(importlib.machinery.SourceFileLoader):
    def get_data(self, path):
        data = super().get_data(path)
        if path.endswith(".py"):
            after, line = EDITS[self.name]
            source = data.decode()
            assert source.count(after) == 1
            data = source.replace(after, line + "\\n" + after).encode()
        return data

    def path_stats(self, path):
        raise OSError  # no cached bytecode


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in EDITS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Rollouts(name, spec.origin)
        return spec


sys.dont_write_bytecode = True
sys.meta_path.insert(0, Finder())
import verifiers as vf
from verifiers.testing import ScriptedClient


def sure(state):
    state["confidence"] = 0.25
    state["trajectory"][0]["fingerprint"] = "fp"
    return 1.0


def main(folder):
    from verifiers.results.index import RowIndex
    from verifiers.results.rows import RolloutOutput
    from verifiers.rollouts.rollout import Rollout
    from verifiers.rollouts.state import State
    from verifiers.rollouts.typed_fields import SavedFields
    from verifiers.runs.workers.packing import pack_state, unpack_state

    env = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}], rubric=vf.Rubric([sure]))
    results = env.evaluate(
        ScriptedClient("2"), "m", save_results=True, results_path=folder / "run",
        state_columns=["trajectory"],
    )
    seen = {"column": results["confidences"], "row": results.outputs[0].confidence}
    state = State(prompt=[], confidence=0.5)
    seen["state"] = state["confidence"]
    seen["worker"] = unpack_state(pack_state(state))["confidence"]
    seen["checkpoint"] = Rollout.from_json(state.record.to_json()).confidence
    for name in ("x.parquet", "x.jsonl", "x.csv"):
        results.save(folder / name)
    seen["csv"] = (folder / "x.csv").read_text().splitlines()[0].split(",").count("confidence")
    for name in ("run", "x.parquet", "x.jsonl"):
        row = vf.load_results(folder / name).outputs[0]
        seen[name] = row["confidence"], row["trajectory"][0]["fingerprint"]
    results.to_atif(folder / "atif")
    seen["atif"] = vf.load_results(folder / "atif").outputs[0]["confidence"]
    seen["pandas"] = results.to_pandas()["confidence"].tolist()
    seen["arrow"] = results.to_arrow().column("confidence").to_pylist()
    index = RowIndex(folder / "x.jsonl")
    index.read()
    seen["index"] = index.columns["confidence"][:]

    sys.path.insert(0, docs)
    import reference_pages

    # the generator reads the source; it is given the file with the line
    source = Path(sys.modules["verifiers.rollouts.rollout"].__file__).read_text()
    copy = folder / "rollout.py"
    copy.write_text(source.replace(AFTER, NEW_LINE + "\\n" + AFTER))
    sys.modules["verifiers.rollouts.rollout"].__file__ = str(copy)
    seen["page"] = "| `confidence` | `float \\\\| None` | always |" in reference_pages.record()
    seen["types"] = [
        "    confidence: float | None" in reference_pages.typed_fields(),
        "    confidences: list[float | None]" in reference_pages.typed_fields(),
        'Literal["confidence"], /) -> float | None' in reference_pages.typed_fields(),
    ]
    print(json.dumps(seen))


main(Path(sys.argv[1]))
"""


def test_a_new_field_is_in_every_format_by_its_line_alone(tmp_path):
    docs = str(CORE.parents[3] / "docs")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps([EDITS, docs])],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr

    seen = json.loads(ran.stdout.splitlines()[-1])
    assert seen == {
        "column": [0.25],
        "row": 0.25,
        "state": 0.5,
        "worker": 0.5,
        "checkpoint": 0.5,
        "csv": 1,
        "run": [0.25, "fp"],
        "x.parquet": [0.25, "fp"],
        "x.jsonl": [0.25, "fp"],
        "atif": 0.25,
        "pandas": [0.25],
        "arrow": [0.25],
        "index": [0.25],
        "page": True,
        "types": [True, True, True],
    }
