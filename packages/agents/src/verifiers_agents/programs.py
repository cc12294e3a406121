"""The agents that are known by name, as found by running them; each entry is the fields of an
``Agent``.

Every configuration turns off what an agent in a sandbox without a network cannot do: updates,
telemetry, model lists, retries of its own. It leaves the agent's instructions and tools as they
are.
"""

from __future__ import annotations

import json
from typing import Any

KEY = "unused"
"""The API key: the path of the route is what admits an agent."""

_CODEX = """\
model = "{model}"
model_provider = "local"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.local]
name = "local"
base_url = "{base_url}"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
request_max_retries = 0
stream_max_retries = 0
"""
_OPENCODE = json.dumps(
    {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "local": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "local",
                "options": {"baseURL": "{base_url}", "apiKey": KEY},
                "models": {"{model}": {"name": "{model}"}},
            }
        },
        "model": "local/{model}",
        "small_model": "local/{model}",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"*": "allow"},
    },
    indent=1,
)
_PI = json.dumps(
    {
        "providers": {
            "local": {
                "baseUrl": "{base_url}",
                "apiKey": KEY,
                "api": "openai-completions",
                "models": [{"id": "{model}"}],
            }
        }
    },
    indent=1,
)


def _words(command: str) -> tuple[str, ...]:
    return tuple(command.split())


BUILTIN: dict[str, dict[str, Any]] = {
    "codex": {
        "command": _words(
            "{program} exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
            " {args} {prompt}"
        ),
        "dialect": "responses",
        "environment": {"CODEX_HOME": "{home}/.codex", "OPENAI_API_KEY": KEY},
        "files": {"~/.codex/config.toml": _CODEX},
        "registry": "npm",
        "package": "@openai/codex",
        "executable": "node_modules/@openai/codex-*/vendor/*/bin/codex",
        "tested_version": "0.169.0",
        "note": "Apache-2.0",
    },
    "opencode": {
        "command": _words("{program} run {args} {prompt}"),
        "dialect": "chat",
        "environment": {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        "files": {"~/.config/opencode/opencode.json": _OPENCODE},
        "registry": "npm",
        "package": "opencode-ai",
        "executable": "node_modules/opencode-*[!e]/bin/opencode",
        "tested_version": "1.18",
        "note": "MIT",
    },
    "pi": {
        "command": _words("node {program} --provider local --model {model} {args} -p {prompt}"),
        "dialect": "chat",
        "environment": {"PI_OFFLINE": "1"},
        "files": {"~/.pi/agent/models.json": _PI},
        "registry": "npm",
        "package": "@mariozechner/pi-coding-agent",
        "executable": "node_modules/@mariozechner/pi-coding-agent/dist/cli.js",
        "needs": ("node",),
        "tested_version": "0.73",
        "note": "MIT",
    },
    "claude-code": {
        "command": _words("{program} --bare -p --dangerously-skip-permissions {args} {prompt}"),
        "dialect": "messages",
        "environment": {
            "ANTHROPIC_BASE_URL": "{root_url}",
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_MODEL": "{model}",
            "CLAUDE_CONFIG_DIR": "{home}/.claude",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_RETRIES": "0",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "IS_SANDBOX": "1",
        },
        "registry": "npm",
        "package": "@anthropic-ai/claude-code",
        "executable": "node_modules/@anthropic-ai/claude-code-*/claude",
        "min_version": "2.1.110",
        "tested_version": "2.1.330",
        "note": "proprietary: read its licence before you install it",
    },
    "qwen-code": {
        "command": _words("node {program} --yolo {args} -p {prompt}"),
        "dialect": "chat",
        "environment": {
            "OPENAI_BASE_URL": "{base_url}",
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": "{model}",
        },
        "files": {"~/.qwen/settings.json": '{"privacy": {"usageStatisticsEnabled": false}}'},
        "registry": "npm",
        "package": "@qwen-code/qwen-code",
        "executable": "node_modules/@qwen-code/qwen-code/cli.js",
        "needs": ("node",),
        "tested_version": "0.24.4",
        "note": "Apache-2.0",
    },
    "mini-swe-agent": {
        "command": _words(
            "python3 -m minisweagent.run.mini -y --exit-immediately -m openai/{model} {args}"
            " -t {prompt}"
        ),
        "dialect": "chat",
        "environment": {
            "PYTHONPATH": "{package}",
            "OPENAI_API_BASE": "{base_url}",
            "OPENAI_API_KEY": KEY,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        "registry": "pypi",
        "package": "mini-swe-agent",
        "further_packages": ("mcp",),
        "tested_version": "2.4.6",
        "note": "MIT; half a gigabyte with its dependencies",
    },
}
