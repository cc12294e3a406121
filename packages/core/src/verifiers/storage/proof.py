"""The proof of a training run: what its ``metrics.jsonl`` shows of the policy that sampled and the
policy that was trained. ``proof.json`` beside it holds the same.
"""

from __future__ import annotations

import contextlib
import math
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


def proof_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The proof of these lines of metrics.

    ``verdict``: "alarm" for a disagreement above ``ALARM``; "unknown" without a number to judge by
    (of a few tokens it is NaN, which agrees with nothing and hides nothing); "inconclusive" where
    no push moved the answers by more than the noise, so that a server that kept its weights would
    look the same; else "agree". ``compared``: comparisons with a number, ``compared_tokens`` of
    them, ``unknown``: those without. ``told_apart``: how many pushes moved the answers by more than
    the noise, of those measured.

    ``versions``: for each policy version its canary (nats per token, and how often the noise) and
    the tokens trained of it by lag. ``tokens``: sampled, trained, and not trained by reason.
    """
    versions: dict[int, dict[str, Any]] = {}
    untrained: Counter[str] = Counter()
    apart: list[tuple[float, str]] = []
    num_unknown = num_compared_tokens = 0

    def compare(line: Mapping[str, object], kind: str, where: str) -> None:
        nonlocal num_unknown, num_compared_tokens
        if (multiple := _number(line.get(f"{kind}disagreement"))) is None:
            num_unknown += 1
            return
        apart.append((multiple, where))
        num_compared_tokens += int(_number(line.get(f"{kind}compared")) or 0)

    steps = [line for line in lines if line.get("tokens/trained") is not None]
    for line in lines:
        if (version := line.get("canary/version")) is not None:
            entry = versions.setdefault(int(version), {"version": int(version)})
            entry["canary"] = {
                name.removeprefix(CANARY): value
                for name, value in line.items()
                if name.startswith(CANARY)
                and name != "canary/version"
                and not name.startswith("canary/moved")
            }
            compare(line, CANARY, f"the canary of version {int(version)}")
    for line in steps:
        if (moved := line.get("canary/moved")) is not None:
            number = int(line["policy_version"])
            versions.setdefault(number, {"version": number})["moved"] = moved
        trained_on = int(line["policy_version"]) - 1
        if "sampler/disagreement" in line:
            compare(line, "sampler/", f"step {line['step']}")
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
    moved = [
        (_number(entry["moved"]), _number(entry["canary"].get("noise")))
        for entry in versions.values()
        if "canary" in entry and "moved" in entry
    ]
    are_distinct = [m > ALARM * noise for m, noise in moved if m is not None and noise is not None]
    if worst is None:
        verdict = "unknown"
    elif worst[0] > ALARM:
        verdict = "alarm"
    else:
        verdict = "agree" if any(are_distinct) else "inconclusive"
    return {
        "schema": SCHEMA,
        "verdict": verdict,
        "compared": len(apart),
        "compared_tokens": num_compared_tokens,
        "unknown": num_unknown,
        "told_apart": {"told": sum(are_distinct), "of": len(are_distinct)},
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


def _number(value: Any) -> float | None:
    """A metric as a number; None for one that is missing, null or NaN. Raises ``TypeError`` for
    anything else, which another program wrote."""
    return None if value is None or math.isnan(value) else float(value)


def read_proof(folder: Path, lines: Sequence[Mapping[str, object]]) -> dict[str, object]:
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
