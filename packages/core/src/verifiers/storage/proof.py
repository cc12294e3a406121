"""The proof of a training run: what its ``metrics.jsonl`` shows of the policy that sampled and the
policy that was trained. ``proof.json`` beside it holds the same.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.runtime.decoding import read_json

PROOF = "proof.json"
SCHEMA = 1
ALARM = 2.0
"""Multiple of the noise from which a disagreement is an alarm."""
LAG, UNTRAINED, CANARY = "tokens/lag/", "tokens/untrained/", "canary/"


def proof_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The proof of these lines of metrics; without a compared step or version its ``verdict`` is
    "unknown".

    ``versions``: for each policy version its canary (nats per token, and how often the noise) and
    the tokens trained of it by lag. ``tokens``: sampled, trained, and not trained by reason.
    """
    versions: dict[int, dict[str, Any]] = {}
    untrained: Counter[str] = Counter()
    apart: list[tuple[float, str]] = []
    steps = [line for line in lines if line.get("tokens/trained") is not None]
    for line in lines:
        if (version := line.get("canary/version")) is not None:
            entry = versions.setdefault(int(version), {"version": int(version)})
            entry["canary"] = {
                name.removeprefix(CANARY): value
                for name, value in line.items()
                if name.startswith(CANARY) and name not in ("canary/version", "canary/moved")
            }
            where = f"the canary of version {int(version)}"
            apart.append((line.get("canary/disagreement") or 0.0, where))
    for line in steps:
        if (moved := line.get("canary/moved")) is not None:
            number = int(line["policy_version"])
            versions.setdefault(number, {"version": number})["moved"] = moved
        trained_on = int(line["policy_version"]) - 1
        if (multiple := line.get("sampler/disagreement")) is not None:
            apart.append((multiple, f"step {line['step']}"))
        for name, value in line.items():
            if name.startswith(LAG) and value:
                lag = int(name.removeprefix(LAG))
                version = trained_on - lag
                entry = versions.setdefault(version, {"version": version})
                by_lag = entry.setdefault("trained_by_lag", {})
                by_lag[str(lag)] = by_lag.get(str(lag), 0) + int(value)
            elif name.startswith(UNTRAINED) and value:
                untrained[name.removeprefix(UNTRAINED)] += int(value)
    worst = max(apart, default=None)
    verdict = "unknown" if worst is None else "alarm" if worst[0] > ALARM else "agree"
    return {
        "schema": SCHEMA,
        "verdict": verdict,
        "compared": len(apart),
        "largest": None if worst is None else {"disagreement": worst[0], "where": worst[1]},
        "steps": len(steps),
        "tokens": {
            "sampled": sum(int(line.get("tokens/completion") or 0) for line in steps),
            "trained": sum(int(line["tokens/trained"]) for line in steps),
            "untrained": dict(sorted(untrained.items())),
        },
        "pushes": sum(line.get("time/sync") is not None for line in steps),
        "restarts": max((int(line.get("server/restarts") or 0) for line in steps), default=0),
        "versions": [versions[version] for version in sorted(versions)],
    }


def read_proof(folder: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The proof of a run with these metrics: that of its file when it is of as many steps, since
    it also says what ended the run."""
    proof = proof_of(lines)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        saved = read_json(folder / PROOF)
        if isinstance(saved, dict) and saved.get("steps") == proof["steps"]:
            proof |= {name: str(saved[name]) for name in ("verdict", "reason") if name in saved}
            if all(isinstance(entry.get("version"), int) for entry in saved["versions"]):
                proof["versions"] = saved["versions"]
    return proof
