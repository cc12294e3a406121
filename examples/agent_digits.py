"""Train a model through an agent program: the answer that the agent leaves in a file is to consist
of digits.

    vf-install --agent codex
    vf-eval examples/agent_digits.py -m local -n 2 -r 1
    vf-train @ configs/vf-train/codex-cpu.toml

What you learn: how an agent program becomes an environment, and how a model is trained through it.
Costs a second for the evaluation of the script, ten minutes for the training through Codex on two
cores.

The task is small so that half a million random parameters can express it. What is real is the way
there: each rollout starts the agent in a sandbox without a network, the agent asks the model in its
own dialect, and the reward is read from the file that the agent wrote. ``agent="script"`` runs the
program below instead of Codex, which needs no installation.
"""

import verifiers as vf

CODEX = """\
model = "{model}"
model_provider = "local"
model_instructions_file = "{home}/.codex/instructions.md"
include_permissions_instructions = false
include_apps_instructions = false
include_environment_context = false
include_collaboration_mode_instructions = false
project_doc_max_bytes = 0
web_search = "disabled"
check_for_update_on_startup = false
[analytics]
enabled = false
[agents]
enabled = false
[skills]
include_instructions = false
[skills.bundled]
enabled = false
[features]
goals = false
shell_tool = false
unified_exec = false
view_image = false
plugins = false
apps = false
image_generation = false
[model_providers.local]
name = "local"
base_url = "{base_url}"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
request_max_retries = 0
stream_max_retries = 0
"""
"""Codex without its instructions and tools: 13,000 tokens of them would not fit into the tiny
model."""

SCRIPT = """\
import json, os, sys, urllib.request
body = {"model": "policy", "instructions": "Write.", "input": sys.argv[1]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/responses", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
output = json.load(urllib.request.urlopen(request))["output"]
with open("answer.txt", "w") as file:
    file.write("".join(part["text"] for item in output for part in item.get("content", [])))
"""


def share_of_digits(state) -> float:
    """Digits in the agent's file, as a share of its characters; 0 without one, as when a limit cut
    the answer."""
    answer = state["files"].get("answer.txt", "").strip()
    return (
        sum(map(str.isdigit, answer)) / len(answer) if answer and not state["is_truncated"] else 0.0
    )


def load_environment(
    agent: str = "codex", num_train_examples: int = 64, sandbox: str = "auto"
) -> vf.Environment:
    rows = [
        {"question": "digits", "info": {"number": number}} for number in range(num_train_examples)
    ]
    program = {
        "codex": {
            "agent": "codex",
            "agent_args": ["--output-last-message", "answer.txt"],
            "files": {"~/.codex/config.toml": CODEX, "~/.codex/instructions.md": "Write."},
            "tools": [],
        },
        "script": {"command": ["python3", "agent.py", "{prompt}"], "files": {"agent.py": SCRIPT}},
    }
    return vf.AgentEnv(
        **program[agent],
        dataset=rows,
        eval_dataset=rows[:8],
        collect=["answer.txt"],
        rubric=vf.Rubric(funcs=[share_of_digits]),
        max_turns=1,
        memory_gb=1,
        sandbox=sandbox,
    )
