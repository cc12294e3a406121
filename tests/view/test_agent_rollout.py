"""The page of an agent's rollout: its log, files, roles and end."""

from verifiers.results.rows import RolloutOutput
from verifiers.view.rollout import page

ROW = dict.fromkeys(
    "example_id prompt completion answer task info reward advantage error is_truncated stop_condition timing "
    "token_usage tool_defs".split()
) | {"metrics": {}, "prompt": [], "completion": []}
AGENT = {"name": "codex", "version": "1.2", "ended": "agent_ended", "log": "working\n", "roles": ["side", "main"]}


def test_log_files_roles_and_end_are_shown_apart():
    steps = [{"completion": [], "extras": {"role": role}} for role in AGENT["roles"]]
    row = RolloutOutput(ROW | {"agent": AGENT, "files": {"a.txt": "1"}, "trajectory": steps, "mine": 3})
    content = page(row, {})
    assert content["agent"] == AGENT | {"files": {"a.txt": "1"}}
    assert [step["role"] for step in content["steps"]] == ["side", "main"]
    assert content["more"] == {"mine": 3}


def test_columns_of_that_name_in_another_environment_stay_columns():
    content = page(RolloutOutput(ROW | {"agent": "a player", "files": 7}), {})
    assert (content["agent"], content["more"]) == (None, {"agent": "a player", "files": 7})
