"""What hostile code tries is stopped, and each try is a real one: without a sandbox it succeeds.

What a model writes as *text* (to a judge, a parser, a template, a terminal, a file name) is tested
where that text is read: ``core/rubrics/test_judging.py``, ``core/rubrics/test_judge_rubric.py``,
``core/parsers``, ``core/storage/test_run_directory.py``, ``view``.
"""

import asyncio
import os
import subprocess
import sys
import time

import pytest

from support.isolated import isolating, needs_sandbox
from verifiers.sandbox import SandboxSpec, backend_for
from verifiers.sandbox.probe import attempt, bait
from verifiers.sandbox.probe.attacks import ATTACKS, LIMITS

ISOLATING = isolating()
LONG = {"memory together", "cpu", "deaf to signals", "output flood"}
SELDOM = [
    pytest.param(attack, id=attack.name, marks=[pytest.mark.slow] if attack.name in LONG else [])
    for attack in ATTACKS
]
HELD_WITHOUT = {"output flood", "deaf to signals"}
"""Time-outs and output bounds hold for ``unsafe_subprocess`` too: they have negative controls of
their own below."""
NEEDS_ROOT = {"write the system"}


def tried(name, attack):
    needs_sandbox(name)

    async def use():
        with bait() as baits:
            return await attempt(await backend_for(name), attack, baits)

    return asyncio.run(use())


@pytest.mark.parametrize("attack", SELDOM)
@pytest.mark.parametrize("name", ISOLATING)
def test_it_is_stopped(name, attack):
    outcome = tried(name, attack)
    assert not outcome.reached, outcome


@pytest.mark.parametrize("attack", [param for param in SELDOM if param.id not in HELD_WITHOUT])
def test_negative_control_without_a_sandbox_it_succeeds(attack):
    if attack.name in NEEDS_ROOT and os.getuid() != 0:
        pytest.skip("only root may do this without a sandbox")
    outcome = tried("unsafe_subprocess", attack)
    if attack.name == "network" and "unreachable" in outcome.by:
        pytest.skip("this machine has no route to the outside")
    if attack.name == "ptrace" and "not permitted" in outcome.by:
        pytest.skip("this kernel lets nobody trace a process that is not its child")
    if attack.name in ("namespaces", "mount") and outcome.by == "'refused'":
        pytest.skip("this kernel gives an ordinary user no namespaces")
    assert outcome.reached, outcome


CROWD = 16


async def crowd(name):
    """(outcomes of so many attacks at once, answers of a session beside them meanwhile)."""
    backend, answers = await backend_for(name), []
    chosen = [attack for attack in ATTACKS if attack.name not in LONG][-CROWD:]
    with bait() as baits:
        bystander = await backend.open(SandboxSpec())
        try:
            attacks = asyncio.gather(*(attempt(backend, attack, baits) for attack in chosen))
            while not attacks.done() or not answers:
                answers.append((await bystander.exec("6 * 7", timeout_s=20)).value)
                await asyncio.sleep(0.05)
            return await attacks, answers
        finally:
            await bystander.close()


def test_sixteen_hostile_sandboxes_at_once_are_stopped_and_disturb_no_session_beside_them():
    needs_sandbox("bubblewrap")
    outcomes, answers = asyncio.run(crowd("bubblewrap"))
    assert len(outcomes) == CROWD
    assert [outcome for outcome in outcomes if outcome.reached] == []
    assert set(answers) == {"42"}


def test_an_attack_that_succeeds_leaves_what_waits_in_pipes():
    """A byte in a pipe may be the lock of an event loop: once it is read elsewhere, the next
    process start hangs."""
    reading, writing = os.pipe()
    try:
        os.write(writing, b"1")
        assert tried(
            "unsafe_subprocess", next(attack for attack in ATTACKS if attack.name == "open files")
        ).reached
        os.set_blocking(reading, False)
        assert os.read(reading, 9) == b"1"
    finally:
        os.close(reading)
        os.close(writing)


def test_negative_control_without_a_bound_all_the_output_arrives():
    code = "import sys\nfor _ in range(20): sys.stdout.write('x' * 2**20)"
    assert (
        len(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout) == 20 * 2**20
    )


def test_negative_control_a_polite_signal_does_not_end_it():
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM,"
        " signal.SIG_IGN)\nprint(flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as deaf:
        deaf.stdout.readline()
        deaf.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            deaf.wait(0.5)
        deaf.kill()


# --- sessions among themselves

SHARED = SandboxSpec(env={"OWN": "secret-of-one"})
PEEKS = {
    "files": (
        "import glob\n[p for pattern in ('/sandbox/**', '/tmp/**', '/dev/shm/**') "
        "for p in glob.glob(pattern, recursive=True) if 'left-here' in p]"
    ),
    "processes": (
        "import os\n[n for n in os.listdir('/proc') if n.isdigit() and "
        "b'31419' in open(f'/proc/{n}/cmdline', 'rb').read()]"
    ),
    "ports": (
        "import socket\ntry: socket.create_connection(('127.0.0.1', 8099), 1); found = ['port']\n"
        "except OSError: found = []\nfound"
    ),
    "abstract sockets": (
        "import socket\ns = socket.socket(socket.AF_UNIX)\n"
        "try: s.connect('\\0left-here'); found = [1]\n"
        "except OSError: found = []\nfound"
    ),
    "terminals": "import os\n[n for n in os.listdir('/dev/pts') if n.isdigit()]",
}
LEAVE = """
import os, socket, subprocess
for folder in ("/tmp", "/dev/shm", os.getcwd()):
    open(f"{folder}/left-here", "w").close()
process = subprocess.Popen(["sleep", "31419"])
servers = [socket.create_server(("127.0.0.1", 8099)), socket.socket(socket.AF_UNIX)]
servers[1].bind("\\0left-here"); servers[1].listen()
terminal = os.openpty()
"""


@pytest.mark.parametrize("what", PEEKS)
def test_one_session_finds_nothing_of_another_of_the_same_zygote(what):
    needs_sandbox("bubblewrap")

    async def use():
        backend = await backend_for("bubblewrap")
        first, second = await backend.open(SHARED), await backend.open(SandboxSpec())
        try:
            planted = await first.exec(LEAVE, timeout_s=20)
            assert planted.error is None
            inside = await first.exec(PEEKS[what], timeout_s=20)
            foreign = await second.exec(PEEKS[what], timeout_s=20)
            return inside.value, foreign.value
        finally:
            await first.close()
            await second.close()

    inside, foreign = asyncio.run(use())
    assert foreign == "[]"
    assert inside != "[]", "negative control: in its own session the same search finds it"


@pytest.mark.parametrize("name", ["bubblewrap"])
@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.kill(1, 9); os.kill(1, 15); open('/proc/1/mem', 'rb')",
        "import os\nos.readlink('/proc/1/fd/0')",
        "open('/proc/sys/user/max_user_namespaces', 'w').write('9')",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)",
        "import os\nos.setuid(0)",
        "import os\nos.mknod('device', 0o20666, os.makedev(1, 1))",
        "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "import os\nos.remove('/etc/passwd')",
        "import fcntl, os\nmaster, end = os.openpty()\nfcntl.ioctl(end, 0x5412, b'x')",
    ],
)
def test_nothing_of_the_session_itself_can_be_loosened(name, code):
    needs_sandbox(name)

    async def use():
        sandbox = await (await backend_for(name)).open(LIMITS)
        try:
            return await sandbox.exec(code, timeout_s=20), await sandbox.exec(
                "'well'", timeout_s=20
            )
        finally:
            await sandbox.close()

    tried, after = asyncio.run(use())
    assert tried.error is not None, tried
    assert tried.error.splitlines()[-1].startswith(("PermissionError", "OSError", "ValueError"))
    assert after.value == "'well'"


def test_a_worker_that_hides_from_its_owner_is_ended():
    """It closes the connection and keeps running: the session must neither wait for it nor leave it
    alive."""
    needs_sandbox("bubblewrap")

    async def use():
        sandbox = await (await backend_for("bubblewrap")).open(LIMITS)
        try:
            began = time.monotonic()
            code = "import os\nos.closerange(3, 100)\nos.execv('/bin/sleep', ['sleep', '31420'])"
            result = await sandbox.exec(code, timeout_s=60)
            took_s = time.monotonic() - began
            alive = (await sandbox.exec(["pgrep", "-f", "31420"], timeout_s=20)).exit_code == 0
            return result, took_s, alive
        finally:
            await sandbox.close()

    result, took_s, alive = asyncio.run(use())
    assert result.limit == "killed"
    assert took_s < 20
    assert not alive


@pytest.mark.slow
def test_the_probe_command_prints_what_stopped_what():
    ended = subprocess.run(
        [sys.executable, "-m", "verifiers.sandbox.probe"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "No sandbox is available" in ended.stderr:
        pytest.skip(ended.stderr)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("stopped  ") == len(ATTACKS)
    assert f"{len(ATTACKS)} of {len(ATTACKS)} attacks stopped" in ended.stdout
