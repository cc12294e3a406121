"""Small agent programs for tests: real processes that call a model over HTTP, with the standard
library alone."""

CLIENT = r"""
import json, os, sys, time, urllib.error, urllib.request
BASE = os.environ["OPENAI_BASE_URL"]

def call(path, body, **headers):
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{BASE}/{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code}: {json.load(error)['error']['message']}")

def chat(messages, **more):
    return call("chat/completions", {"model": "m", "messages": messages, **more})["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}
"""
WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    },
}
WRITER = (
    CLIENT
    + f"TOOLS = [{WRITE!r}]\n"
    + r"""
messages = [{"role": "system", "content": "You work."}, user(sys.argv[1])]
while True:
    answer = chat(messages, tools=TOOLS)
    calls = answer.get("tool_calls") or []
    for one in calls:  # written again, as agents do
        one["function"]["arguments"] = json.dumps(json.loads(one["function"]["arguments"]), indent=1)
    messages.append(answer)
    if not calls:
        print(answer["content"])
        break
    for one in calls:
        with open("answer.txt", "w") as file:
            file.write(json.loads(one["function"]["arguments"])["text"])
        messages.append({"role": "tool", "tool_call_id": one["id"], "content": "written"})
"""
)
"""Offers the tool ``write``, writes what it is told into answer.txt, and ends with the first answer
without a call."""
CLAUDE = r"""#!/usr/bin/env python3
import json, os, subprocess, sys, urllib.request
assert sys.argv[1:-1] == ["--bare", "-p", "--dangerously-skip-permissions", "--tools", "Bash"], sys.argv
HEADERS = {"Content-Type": "application/json", "X-Api-Key": os.environ["ANTHROPIC_API_KEY"],
           "Anthropic-Version": "2023-06-01", "Anthropic-Beta": "claude-code-20250219"}
MARK = {"cache_control": {"type": "ephemeral"}}
BASH = {"name": "Bash", "description": "Runs a command.",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}

def post(path, body):
    url = os.environ["ANTHROPIC_BASE_URL"] + path
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), HEADERS), timeout=60)

def ask(messages):
    *before, (role, blocks) = messages
    marked = [*before, (role, [*blocks[:-1], {**blocks[-1], **MARK}])]
    body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 32000, "stream": True, "tools": [{**BASH, **MARK}],
            "system": [{"type": "text", "text": "You are an agent.", **MARK}], "metadata": {"user_id": "u"},
            "messages": [{"role": role, "content": blocks} for role, blocks in marked]}
    kinds, blocks, partial, stop_reason = [], [], [], None
    with post("/v1/messages?beta=true", body) as stream:
        for line in stream:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            kinds.append(event["type"])
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"]); partial.append("")
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "text_delta":
                    blocks[-1]["text"] += delta["text"]
                else:
                    partial[-1] += delta["partial_json"]
            elif event["type"] == "message_delta":
                stop_reason = event["delta"]["stop_reason"]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop"), kinds
    for block, text in zip(blocks, partial):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return blocks, stop_reason

messages = [("user", [{"type": "text", "text": sys.argv[-1]}])]
with post("/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": "x"}]}) as counted:
    assert json.load(counted)["input_tokens"] > 0
while True:
    blocks, stop_reason = ask(messages)
    if stop_reason != "tool_use":
        print(stop_reason, "".join(block["text"] for block in blocks))
        break
    results = []
    for block in blocks:
        if block["type"] == "tool_use":
            ran = subprocess.run(["bash", "-c", block["input"]["command"]], capture_output=True, text=True)
            result = {"type": "tool_result", "tool_use_id": block["id"], "content": ran.stdout, "is_error": False}
            results.append(result)
    messages += [("assistant", blocks), ("user", results), ("system", [{"type": "text", "text": "Go on."}])]
"""
"""Speaks as Claude Code 2.1 does: streamed messages, marks for the cache that move, a system
message in the middle."""
