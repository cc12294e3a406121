"""shell-tasks: solutions earn 1, doing nothing and half a solution 0, and what the
folders promise."""

import tomllib

import pytest

import verifiers as vf
from support.isolated import needs_sandbox
from verifiers.testing import ScriptedClient
from vf_shell_tasks import PROGRAMS, TASKS, load_environment

NAMES = sorted(folder.name for folder in TASKS.iterdir())
LAZY = {
    "csv-totals": (
        "echo region,total > totals.csv; sed 1d sales.csv |"
        " awk -F, '{n[$2] += $3} END {for (r in n) print r\",\"n[r]}' >> totals.csv"
    ),
    "date-format": "sort dates.txt > sorted.txt",
    "dead-links": (
        "cd wiki; grep -roP '\\]\\(\\K[^)]*' . | sed 's/^..//; s/:/: /' | sort > ../dead.txt"
    ),
    "delete-copies": (
        "cd pool; for f in $(find . -type f | sort); do s=$(md5sum < $f); case $seen in *$s*) rm"
        ' $f;; esac; seen="$seen $s"; done; touch ../deleted.txt'
    ),
    "env-file": "cat base.env override.env | grep -v '^#' | sort -u > merged.env",
    "find-phones": "grep -oE '\\+[0-9]{2} [0-9]{3} [0-9]{6}' letters.txt | sort -u > phones.txt",
    "fix-backup": 'sed -i \'s/mkdir/mkdir -p/; s/\\$1/"$1"/g; s/\\$2/"$2"/g\' backup.sh',
    "fix-median": "sed -i 's/middle + 1/middle - 1/' stats.py",
    "fix-roman": "sed -i 's/if number >= value/while number >= value/' roman.py",
    "git-merge": "cd shop; git merge -q -X theirs prices -m 'Merge prices'",
    "git-restore": "cd notes; printf 'flour\\nwater\\na little salt\\n' > recipe.txt",
    "json-config": 'sed -i \'s/8080/8443/; s/"export"/"export", "audit"/; /debug/d\' config.json',
    "log-errors": (
        "grep ERROR server-log.txt | awk '{print $3}' | sort | uniq -c | awk '{print $2, $1}' >"
        " errors.txt"
    ),
    "make-archive": "tar -czf docs.tar.gz docs",
    "makefile": (
        "printf 'report.txt:\\n\\tcat title.txt part-*.txt > report.txt\\nclean:\\n\\trm -f"
        " *.txt\\n' > Makefile"
    ),
    "permissions": "chmod -R 755 site; chmod -R go= site/private",
    "rename-photos": 'cd photos; for f in *.JPG; do mv "$f" "${f,,}"; done',
    "top-words": "tr ' ' '\\n' < poem.txt | sort | uniq -c | sort -nr | head -3 > top.txt",
    "unpack-key": "tar -xzf box.bin; cat */key.part* > key.txt",
    "update-header": "grep -rl 'Old Name' src | xargs sed -i 's/Old Name/New Name/'",
}
"""For each task a solution that does a part of it, as a hasty model does."""


def run(env, client):
    results = env.evaluate(client, "m", state_columns=["verdict"], max_concurrent=4)
    assert results["errors"] == [None] * len(NAMES), results["errors"]
    return {output["task"]: output for output in results.outputs}


def scripted(env, commands):
    """Runs the command of each task, then answers."""
    instructions = {row["prompt"][-1]["content"]: row["task"] for row in env.get_eval_dataset()}

    def act(request):
        if request.prompt[-1]["role"] == "tool":
            return "Done."
        command = commands[instructions[request.prompt[-1]["content"]]]
        return [vf.ToolCall("c1", "bash", {"command": command})]

    return ScriptedClient(act)


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_every_solution_earns_one_and_doing_nothing_zero(agent, reward):
    outputs = run(
        load_environment(agent=agent, sandbox=needs_sandbox()), ScriptedClient("never called")
    )
    assert sorted(outputs) == NAMES
    wrong = {
        name: output["verdict"]["output"]
        for name, output in outputs.items()
        if output["reward"] != reward
    }
    assert wrong == {}


def test_half_a_solution_earns_nothing():
    assert sorted(LAZY) == NAMES
    env = load_environment(sandbox=needs_sandbox())
    outputs = run(env, scripted(env, LAZY))
    assert [name for name, output in outputs.items() if output["reward"] != 0.0] == []
    assert all("Error" in output["verdict"]["output"] for output in outputs.values()), (
        "a check said what is wrong"
    )


def test_negative_control_the_solution_as_a_tool_call_earns_one():
    """So the zeros above are those of the commands, not of how they were run."""
    env = load_environment(sandbox=needs_sandbox())
    solutions = {name: (TASKS / name / "solution" / "solve.sh").read_text() for name in NAMES}
    assert {
        name: output["reward"] for name, output in run(env, scripted(env, solutions)).items()
    } == dict.fromkeys(NAMES, 1.0)


def test_twenty_tasks_in_the_same_form():
    assert len(NAMES) == 20
    assert len({(TASKS / name / "tests" / "test.sh").read_text() for name in NAMES}) == 1
    for name in NAMES:
        config = tomllib.loads((TASKS / name / "task.toml").read_text())
        assert (config["verifier"]["environment_mode"], config["artifacts"]) == (
            "separate",
            ["/app"],
        )
        assert "/app" in (TASKS / name / "instruction.md").read_text()


def test_no_check_runs_a_file_of_the_work_folder():
    """A program of the model runs in the model's own sandbox (``[[verifier.collect]]``); the checks
    read data."""
    for name in NAMES:
        check = (TASKS / name / "tests" / "check.py").read_text()
        for word in (
            "import_module",
            "exec(",
            "eval(",
            "os.system",
            "runpy",
            "sys.path",
            "__import__",
        ):
            assert word not in check, (name, word)
        assert ("subprocess" in check) == name.startswith("git-")


def test_it_loads_by_its_id_and_is_clean():
    env = vf.load_environment(
        "shell-tasks", only=["log-errors", "top-words"], sandbox=needs_sandbox()
    )
    assert [row["task"] for row in env.get_eval_dataset()] == ["log-errors", "top-words"]
    report = vf.check_environment(env)
    assert report.ok, report
    assert [warning.code for warning in report.warnings] in ([], ["constant-reward"]), report


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(vf.ConfigError, match="there is no task 'absent'"):
        load_environment(only=["absent"])
    monkeypatch.setitem(PROGRAMS, "no-such-program", ("git-merge", "makefile"))
    with pytest.raises(
        vf.ConfigError, match="git-merge and makefile need the program no-such-program"
    ):
        load_environment()
    assert load_environment(only=["log-errors"]).eval_table is not None
