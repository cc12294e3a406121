"""An MCP server on stdio written by hand, which starts in a few milliseconds: for tests of servers'
lives.

``python plain_mcp_server.py [--starts FILE] [--also TOOL] [--mute] [--threads]``: notes every start
in FILE, offers one more tool of the name TOOL, never answers, or answers calls side by side. It
imports no library of the protocol, so it also tests that another author's server is understood.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


WRITING = threading.Lock()


def add(a, b):
    return str(a + b)


def process_id():
    return str(os.getpid())


def environment():
    return json.dumps(dict(os.environ))


def crash():
    print("the reactor is leaking", file=sys.stderr, flush=True)
    os._exit(3)


def slow(seconds):
    time.sleep(seconds)
    return "at last"


def daemon():
    """Start a process that is in no session of this one, and whose parent has ended."""
    script = "import os, time; os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(600)"
    started = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    return started.stdout.readline().decode().strip()


def deaf():
    """Hear neither SIGTERM nor the end of stdin."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=time.sleep, args=(600,)).start()
    return str(os.getpid())


def flood():
    while True:
        sys.stdout.write("x" * 2**20)


def long(size, id_last=False):
    return "x" * size


def hang():
    while True:
        time.sleep(60)


def half():
    """Not an answer: the first half of one."""


TOOLS = {
    function.__name__: function
    for function in (
        add,
        process_id,
        environment,
        crash,
        slow,
        flood,
        daemon,
        deaf,
        long,
        hang,
        half,
    )
}


def result_of(method, params):
    if method == "initialize":
        about = {"name": "plain", "version": "1"}
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": about,
        }
    if method == "tools/list":
        return {
            "tools": [
                {"name": n, "inputSchema": NUMBERS if n == "add" else {"type": "object"}}
                for n in TOOLS
            ]
        }
    if method == "tools/call":
        text = TOOLS[params["name"]](**(params.get("arguments") or {}))
        return {"content": [{"type": "text", "text": text}]}
    return {}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--starts", type=Path)
    arguments.add_argument("--also")
    arguments.add_argument("--mute", action="store_true")
    arguments.add_argument("--threads", action="store_true")
    options = arguments.parse_args()
    if options.starts is not None:
        with options.starts.open("a") as file:
            file.write(f"{os.getpid()}\n")
    if options.also is not None:
        TOOLS[options.also] = process_id
    if options.mute:
        print("I say nothing", file=sys.stderr, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request and not options.mute:
            if options.threads:
                threading.Thread(target=answer, args=(request,), daemon=True).start()
            else:
                answer(request)


def answer(request):
    params = request.get("params") or {}
    result = result_of(request["method"], params)
    head = {"jsonrpc": "2.0", "id": request["id"]}
    if params.get("arguments", {}).get("id_last"):  # members of an object have no order
        text = json.dumps({"result": result, **head})
    else:
        text = json.dumps({**head, "result": result})
    if params.get("name") == "half":
        text = text[: len(text) // 2]
    with WRITING:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
