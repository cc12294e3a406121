"""The page of a rollout that shares turns with its siblings draws their tree."""

from __future__ import annotations

from urllib.parse import quote

import verifiers as vf
from support.browser import too_wide
from verifiers.testing import ScriptedClient


class Talk(vf.MultiTurnEnv):
    def env_response(self, messages, state):
        return "and"


def recorded(folder, **settings):
    env = Talk(
        dataset=[{"question": "Go.", "answer": ""}],
        max_turns=3,
        rubric=vf.Rubric(funcs=[lambda completion: float(completion[-1].content)]),
        **settings,
    )
    replies = iter("0000110")
    env.evaluate_sync(
        ScriptedClient(lambda request: next(replies)),
        "m",
        results_path=folder / "evals/talk--m/1",
        rollouts_per_example=3 if settings else 1,
        max_concurrent=1,
        state_columns=["trajectory"],
    )


def test_a_line_for_each_branch_with_its_turn_and_reward(tmp_path, page, serve):
    recorded(tmp_path, branching=vf.Branching(at=1, branches=3))
    served = serve(tmp_path / "evals")
    (run,) = [run["id"] for run in served.ask("runs")["runs"]]
    page.open(f"{served.url}#/run/{quote(run, safe='')}/1")
    page.wait(lambda: page.js("return document.querySelectorAll('.tree li').length") == 3)
    lines = page.js(
        "return [...document.querySelectorAll('.tree li code')].map((e) => e.innerText)"
    )
    assert [" ".join(line.split()) for line in lines] == [
        "0 ── from the prompt",
        "1 └─ from turn 1",
        "2 └─ from turn 1",
    ]
    assert too_wide(page) == []


def test_a_rollout_without_branches_has_no_tree(tmp_path, page, serve):
    recorded(tmp_path)
    served = serve(tmp_path / "evals")
    (run,) = [run["id"] for run in served.ask("runs")["runs"]]
    page.open(f"{served.url}#/run/{quote(run, safe='')}/0")
    assert page.js("return document.querySelectorAll('.tree').length") == 0
