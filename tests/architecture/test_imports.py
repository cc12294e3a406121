"""``import verifiers`` is quick and light; constructing anything starts nothing; modules stay
small."""

import json
import statistics
import subprocess
import sys
import warnings

import pytest

from support.import_graph import AGENTS, CORE, INTEGRATIONS, SANDBOXES, TRAINER, modules

HEAVY = (
    "torch transformers openai datasets numpy aiohttp starlette uvicorn pydantic rich pandas"
    " pyarrow".split()
)
MAX_IMPORT_S = 0.3
"""CPU seconds: what else the machine does takes none of them."""
MAX_LINES = 400

MEASURE = """
import json, sys, time
before = set(sys.modules)
started = time.process_time()
import verifiers
spent = time.process_time() - started
print(json.dumps([spent, sorted({name.split(".")[0] for name in set(sys.modules) - before})]))
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_is_quick_and_loads_nothing_heavy():
    measured = [run(MEASURE) for _ in range(3)]
    assert min(spent for spent, _ in measured) < MAX_IMPORT_S
    assert not set(measured[0][1]) & set(HEAVY)


def test_a_heavy_import_would_be_seen():
    """Negative control."""
    assert (
        "numpy"
        in run(MEASURE.replace("import verifiers\n", "import verifiers; verifiers.State\n"))[1]
    )


SIDE_EFFECTS = """
import json, logging, random, signal, socket, sys, threading
opened = []
sys.addaudithook(lambda event, args: opened.append(event) if event in ("socket.connect", "socket.bind") else None)
state = random.getstate()
handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
root = list(logging.getLogger().handlers)
import verifiers as vf
for name in vf.__all__:
    getattr(vf, name)
class Game(vf.MultiTurnEnv):
    def env_response(self, messages, state):
        return "x"
def reward(completion):
    return 1.0
rows = [{"question": "q"}]
made = [
    Game(dataset=rows), vf.SingleTurnEnv(dataset=rows), vf.Rubric(funcs=[reward]),
    vf.RubricGroup([vf.Rubric(funcs=[reward])]), vf.Parser(), vf.ThinkParser(), vf.XMLParser(["a"]), vf.ClientConfig(),
    vf.OpenAIChatCompletionsClient(), vf.OpenAICompletionsClient(), vf.State(), vf.Timing(),
]
print(json.dumps({
    "threads": threading.active_count(), "opened": opened, "random": random.getstate() == state,
    "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers,
    "logging": logging.getLogger().handlers == root and type(logging.getLogger("verifiers").handlers[0]).__name__,
}))
"""


def test_importing_and_constructing_have_no_side_effects():
    assert run(SIDE_EFFECTS) == {
        "threads": 1,
        "opened": [],
        "random": True,
        "signals": True,
        "logging": "NullHandler",
    }


@pytest.mark.parametrize(
    "package", [CORE, AGENTS, INTEGRATIONS, SANDBOXES, TRAINER], ids=lambda path: path.name
)
def test_modules_that_have_grown_are_reported(package):
    """A report and no failure: split a module when it holds two ideas, not when it has a line too
    many."""
    lines = {
        name: len(path.read_text(encoding="utf-8").split("\n"))
        for name, path in modules(package).items()
    }
    for name, count in sorted(lines.items()):
        if count > MAX_LINES:
            warnings.warn(f"{name} has {count} lines (the aim is under {MAX_LINES})", stacklevel=1)
    assert statistics.median(lines.values()) < 230
