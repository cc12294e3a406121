"""What every sandbox backend promises: state, files, time-outs, bounds, and that
nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

import verifiers as vf
from support.isolated import in_sandbox, isolating, needs_sandbox
from support.machine import Here
from verifiers.sandbox import (
    ExecResult,
    Sandbox,
    SandboxBackend,
    SandboxSpec,
    backend_for,
    choice,
    register,
)
from verifiers.sandbox.backends.unsafe_subprocess import UnsafeSubprocess
from verifiers.sandbox.probe import naps
from verifiers_sandboxes.remote import RemoteBackend

ISOLATING = isolating()
ALL = [*ISOLATING, pytest.param("loopback", marks=pytest.mark.slow), "unsafe_subprocess"]
# the host does not see its processes as such; tests/sandboxes/test_containers.py looks for the rest
OWN_KERNEL = ["gvisor"]


class Loopback(RemoteBackend):
    """The whole mechanism of the remote backends, but for the service."""

    name = distribution = "loopback"
    package = "sys"

    async def create(self, spec):
        return Here()


@pytest.fixture(autouse=True, scope="module")
def _loopback():
    register("loopback", Loopback)
    yield
    del choice.BACKENDS["loopback"]


def values(name, *cells, spec=None, timeout_s=20.0):
    async def use(sandbox):
        return [await sandbox.exec(cell, timeout_s=timeout_s) for cell in cells]

    return in_sandbox(use, name=name, spec=spec)


async def started(marker, count):
    """The processes, as soon as there are so many."""
    for _ in range(200):
        if len(naps(marker)) == count:
            break
        await asyncio.sleep(0.02)
    return naps(marker)


@pytest.mark.parametrize("name", ALL)
def test_state_is_kept_and_a_trailing_expression_is_the_value(name):
    first, second, third, nothing = values(
        name, "x = 6 * 7\nx", "def f(y):\n    return x + y\nf(1)", "_ + 1", "None"
    )
    assert first == ExecResult(value="42")
    assert (second.value, third.value, nothing.value) == ("43", "44", None)


@pytest.mark.parametrize("name", ALL)
def test_streams_are_apart_and_in_order_with_those_of_child_processes(name):
    code = (
        "import os, sys\nprint(1)\nos.system('echo two')\nprint(3)\nprint('bad', file=sys.stderr)"
    )
    (result,) = values(name, code)
    assert (result.stdout, result.stderr, result.error) == ("1\ntwo\n3\n", "bad\n", None)


@pytest.mark.parametrize("name", ALL)
def test_an_error_shows_the_lines_of_the_code_and_no_path_of_the_host(name):
    failed, syntax, exited, after = values(
        name, "def f():\n    return 1 / 0\nf()", "x = (", "import sys\nsys.exit(3)", "'still here'"
    )
    assert failed.error.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<cell 1>", line 3, in <module>',
        "    f()",
        '  File "<cell 1>", line 2, in f',
        "    return 1 / 0",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]
    assert syntax.error.endswith("SyntaxError: '(' was never closed")
    assert "<cell 2>" in syntax.error
    assert "verifiers" not in syntax.error
    assert exited.error.endswith("SystemExit: 3")
    assert after.value == "'still here'"


@pytest.mark.parametrize("name", ALL)
def test_a_command_has_its_exit_code(name):
    done, missing, signalled = values(
        name,
        ["bash", "-c", "echo out; echo err >&2; exit 4"],
        ["no-such-program"],
        ["bash", "-c", "kill -9 $$"],
    )
    assert (done.stdout, done.stderr, done.exit_code, done.error) == ("out\n", "err\n", 4, None)
    assert missing.exit_code == 127
    assert "no-such-program" in missing.error
    assert signalled.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("name", ALL)
def test_code_and_commands_share_files_and_the_working_folder(name):
    async def use(sandbox):
        await sandbox.write_file("notes/a.txt", "from outside")
        read = await sandbox.exec("open('notes/a.txt').read()", timeout_s=20)
        await sandbox.exec(["bash", "-c", "printf '\\0\\377' > b.bin"], timeout_s=20)
        return read.value, await sandbox.read_file("b.bin")

    assert in_sandbox(use, name=name) == ("'from outside'", b"\0\xff")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("absent", FileNotFoundError),
        ("folder", IsADirectoryError),
        ("pipe", OSError),
        ("a\0b", OSError),
    ],
)
def test_a_file_that_cannot_be_read(name, path, error):
    async def use(sandbox):
        await sandbox.exec("import os\nos.mkdir('folder')\nos.mkfifo('pipe')", timeout_s=20)
        with pytest.raises(error):
            await asyncio.wait_for(sandbox.read_file(path), 10)

    in_sandbox(use, name=name)


@pytest.mark.parametrize("name", ALL)
def test_a_time_out_ends_every_process_and_keeps_what_was_printed(name):
    async def use(sandbox):
        await sandbox.exec("x = 1", timeout_s=20)
        began = time.monotonic()
        code = "import subprocess\nprint('begun')\nsubprocess.run(['sleep', '31415'])"
        result = await sandbox.exec(code, timeout_s=1)
        children = naps("31415")
        return result, time.monotonic() - began, children, await sandbox.exec("x", timeout_s=20)

    result, took_s, children, after = in_sandbox(use, name=name)
    assert result == ExecResult("begun\n", timed_out=True, limit="wall")
    assert took_s < 10
    assert children == []
    assert "NameError" in after.error


@pytest.mark.parametrize("name", ALL)
def test_code_that_holds_the_interpreter_is_ended_too(name):
    held, after = values(name, "9 ** 9 ** 9", "1 + 1", timeout_s=2)
    assert held.timed_out
    assert after.value == "2"


@pytest.mark.parametrize("name", ALL)
def test_output_is_bounded_and_marked(name):
    spec = SandboxSpec(max_output_bytes=1000)
    printed, by_a_command = values(
        name, "print('é' * 5000)", ["bash", "-c", "yes | head -c 100000"], spec=spec
    )
    assert printed.stdout == "é" * 500 + "\n[output cut: 9001 bytes more]"
    assert by_a_command.stdout.endswith("\n[output cut: 99000 bytes more]")
    assert printed.truncated
    assert printed.limit == "output"


@pytest.mark.parametrize("name", ALL)
def test_a_sudden_end_is_said_and_the_interpreter_replaced(name):
    died, after = values(
        name, "import os, time\nprint('words')\ntime.sleep(0.5)\nos._exit(3)", "1 + 1"
    )
    assert (died.limit, died.value) == ("killed", None)
    assert "ended" in died.error
    assert died.stdout == "words\n"
    assert after.value == "2"


@pytest.mark.parametrize("name", ALL)
def test_a_child_that_the_code_forks_does_not_answer_for_it(name):
    forked, after = values(
        name, "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nx = 5\nx", "x + 1"
    )
    assert (forked.value, after.value) == ("5", "6")


FORGERIES = {
    "garbage": "b'\\xff' * 4096",
    "an endless length": "b'\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff'",
    "another shape": "b'\\0\\0\\0\\x0d\\0\\0\\0\\0{\"stdout\": 5}'",
    "an answer too many": "b'\\0\\0\\0\\x02\\0\\0\\0\\0{}' * 2",
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_code_that_writes_to_the_connection_only_ends_its_own_worker(name, forgery):
    code = (
        "import os, socket, stat\nfor fd in range(3, 1024):\n    try:\n"
        "        if stat.S_ISSOCK(os.fstat(fd).st_mode):\n"
        f"            os.write(fd, {FORGERIES[forgery]})\n    except OSError: pass\n"
        "import time\ntime.sleep(3)"
    )
    forged, after = values(name, code, "1 + 1", timeout_s=10)
    assert (forged.limit, forged.value) == ("killed", None)
    assert after.value == "2"


@pytest.mark.parametrize("name", ISOLATING)
def test_only_the_variables_asked_for_are_there(name, monkeypatch):
    monkeypatch.setenv("A_SECRET_OF_THE_RUN", "x")
    spec = SandboxSpec(env={"GREETING": "hello"})
    inside, in_a_command = values(
        name,
        "import os\n'A_SECRET_OF_THE_RUN' in os.environ, os.environ['GREETING']",
        ["env"],
        spec=spec,
    )
    assert inside.value == "(False, 'hello')"
    assert "GREETING=hello" in in_a_command.stdout
    assert "SECRET" not in in_a_command.stdout
    (unsafe,) = values("unsafe_subprocess", "import os\nos.environ['A_SECRET_OF_THE_RUN']")
    assert unsafe.value == "'x'"


@pytest.mark.parametrize("name", ISOLATING)
def test_packages_asked_for_and_what_they_need_are_there_and_no_other(name):
    spec = SandboxSpec(packages=("markdown-it-py",))
    needed, unneeded, by_a_command = values(
        name,
        "import markdown_it, mdurl\nmarkdown_it.__name__",
        "import importlib.util\n[n for n in ('pytest', 'verifiers', 'numpy') if"
        " importlib.util.find_spec(n)]",
        ["python3", "-c", "import markdown_it; print(5)"],
        spec=spec,
        timeout_s=60,
    )
    assert needed.value == "'markdown_it'"
    assert unneeded.value == "[]"
    assert (by_a_command.stdout, by_a_command.exit_code) == ("5\n", 0)
    (unsafe,) = values("unsafe_subprocess", "import pytest\n1")
    assert unsafe.value == "1"


@pytest.mark.parametrize("name", [*ISOLATING, "unsafe_subprocess"])
def test_a_package_that_is_not_installed_is_refused_with_the_command(name):
    needs_sandbox(name)
    with pytest.raises(vf.ConfigError, match="pip install no-such-package"):
        values(name, "1", spec=SandboxSpec(packages=("sympy", "no-such-package")))


@pytest.mark.parametrize("name", ALL)
def test_reset_leaves_no_state_file_or_process(name):
    async def use(sandbox):
        nap = "31416"
        await sandbox.exec(
            f"x = 1\nopen('a', 'w').close()\nimport os\nos.system('sleep {nap} &')", timeout_s=20
        )
        await sandbox.reset()
        after = await sandbox.exec("import os\n'x' in globals(), os.path.exists('a')", timeout_s=20)
        return after.value, naps(nap)

    assert in_sandbox(use, name=name) == ("(False, False)", [])


@pytest.mark.parametrize("name", ALL)
def test_close_leaves_no_process_and_is_final(name):
    if name in OWN_KERNEL:
        pytest.skip("its processes are not processes of the host")

    async def use(sandbox):
        await sandbox.exec(["bash", "-c", "sleep 31417 & sleep 31417 & true"], timeout_s=20)
        assert len(await started("31417", 2)) == 2
        await sandbox.close()
        await sandbox.close()
        for _ in range(100):
            if not naps("31417"):
                break
            await asyncio.sleep(0.05)
        with pytest.raises(vf.SandboxError, match="closed"):
            await sandbox.exec("1", timeout_s=1)
        return naps("31417")

    assert in_sandbox(use, name=name) == []


@pytest.mark.parametrize("name", ALL)
def test_a_call_given_up_half_way_does_not_disturb_the_next(name):
    async def use(sandbox):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(
                sandbox.exec("import time\ntime.sleep(60)\n'late'", timeout_s=60), 0.5
            )
        return await sandbox.exec("'next'", timeout_s=20)

    assert in_sandbox(use, name=name).value == "'next'"


@pytest.mark.parametrize("name", ALL)
def test_a_sandbox_ends_after_its_wall_s(name):
    async def use(sandbox):
        running = await sandbox.exec("import time\ntime.sleep(60)", timeout_s=60)
        with pytest.raises(vf.SandboxLimit, match=r"2 s \(wall_s\)") as raised:
            await sandbox.exec("1", timeout_s=1)
        return running.limit, raised.value.limit

    assert in_sandbox(use, name=name, spec=SandboxSpec(wall_s=2))[1] == "wall"


@pytest.mark.parametrize("name", ALL)
def test_many_at_once_are_apart(name):
    needs_sandbox(name)

    async def run_session(backend, number):
        sandbox = await backend.open(SandboxSpec())
        try:
            await sandbox.exec(f"x = {number}\nopen('mine', 'w').write('{number}')", timeout_s=60)
            return (await sandbox.exec("x, open('mine').read()", timeout_s=60)).value
        finally:
            await sandbox.close()

    async def all_of_them():
        backend = await backend_for(name)
        return await asyncio.gather(*(run_session(backend, number) for number in range(12)))

    assert asyncio.run(all_of_them()) == [f"({number}, '{number}')" for number in range(12)]


def test_the_remote_mechanism_keeps_state_and_files_over_one_command_each():
    """Its other tests are slow: each request to the guest init is a process."""

    async def use(sandbox):
        # neither fits into a command nor into what it prints
        await sandbox.write_file("big", b"x" * 300_000)
        first = await sandbox.exec("x = len(open('big').read())\nprint('out')", timeout_s=60)
        return (
            first.stdout,
            (await sandbox.exec("x", timeout_s=60)).value,
            len(await sandbox.read_file("big")),
        )

    assert in_sandbox(use, name="loopback") == ("out\n", "300000", 300_000)


def test_sessions_of_one_zygote_do_not_draw_the_same_numbers():
    spec = SandboxSpec(packages=("numpy",))
    code = "import random, numpy.random\nrandom.random(), numpy.random.random()"
    drawn = {values("bubblewrap", code, spec=spec)[0].value for _ in range(3)}
    assert len(drawn) == 3


@pytest.mark.parametrize("name", ISOLATING)
def test_there_is_no_network_to_ask_for(name):
    needs_sandbox(name)
    if "network" in asyncio.run(backend_for(name)).capabilities:
        pytest.skip(f"{name} has a network for who asks")
    with pytest.raises(vf.ConfigError, match="network=False"):
        values(name, "1", spec=SandboxSpec(network=True))


def test_a_memory_limit_is_an_error_that_the_session_survives():
    code = "x = 1\ntry:\n    y = b'x' * (300 * 2**20)\nexcept MemoryError:\n    z = 2\nz"
    full, after = values("bubblewrap", code, "x + z", spec=SandboxSpec(memory_mb=200))
    assert (full.value, after.value) == ("2", "3")


@pytest.mark.parametrize("name", ISOLATING)
def test_a_result_says_that_memory_was_the_limit(name):
    full, after = values(name, "y = b'x' * (300 * 2**20)", "1 + 1", spec=SandboxSpec(memory_mb=200))
    assert full.limit == "memory"
    assert after.value == "2"


OWNER = """
import asyncio, sys
from verifiers.sandbox import SandboxSpec, backend_for
async def main():
    sandbox = await (await backend_for(sys.argv[1])).open(SandboxSpec())
    await sandbox.exec(["bash", "-c", "setsid sleep 31418 & sleep 31418 & true"], timeout_s=20)
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("name", ISOLATING)
def test_when_the_owner_is_killed_nothing_is_left(name):
    if name in OWN_KERNEL:
        pytest.skip("its processes are not processes of the host")
    needs_sandbox(name)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, name], stdout=subprocess.PIPE)
    assert owner.stdout.readline() == b"ready\n"
    assert len(asyncio.run(started("31418", 2))) == 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    ended = time.monotonic() + 10
    while naps("31418") and time.monotonic() < ended:
        time.sleep(0.05)
    assert naps("31418") == []


def test_negative_control_a_plain_child_outlives_its_owner():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, "unsafe_subprocess"], stdout=subprocess.PIPE
    )
    owner.stdout.readline()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    children = asyncio.run(started("31418", 2))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    assert children


def test_unsafe_warns_once_and_only_by_that_name(caplog):
    async def twice():
        backend = await backend_for("unsafe_subprocess")
        for _ in range(2):
            await (await backend.open(SandboxSpec())).close()

    asyncio.run(twice())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "sandbox='unsafe_subprocess'"
    ]


def test_names():
    with pytest.raises(vf.ConfigError, match='did you mean "bubblewrap"'):
        asyncio.run(backend_for("bubblewarp"))

    class Mine:
        name, capabilities = "mine", frozenset()

    mine = Mine()
    assert asyncio.run(backend_for(mine)) is mine


def test_a_backend_of_ones_own_can_be_registered(monkeypatch):
    with pytest.raises(vf.ConfigError, match="firecracker"):
        asyncio.run(backend_for("firecracker"))

    class Mine(UnsafeSubprocess):
        name = "firecracker"

    monkeypatch.setattr(choice, "BACKENDS", dict(choice.BACKENDS))
    register("firecracker", Mine)
    assert asyncio.run(backend_for("firecracker")).name == "firecracker"
    with pytest.raises(vf.ConfigError, match="already"):
        register("firecracker", Mine)


def test_the_types_are_what_the_backends_are():
    async def use(sandbox):
        return isinstance(sandbox, Sandbox)

    assert isinstance(asyncio.run(backend_for("unsafe_subprocess")), SandboxBackend)
    assert in_sandbox(use, name="unsafe_subprocess")


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_mb": 0},
        {"wall_s": -1},
        {"packages": "numpy"},
        {"env": {"A=B": "x"}},
        {"env": {"A": "\0"}},
    ],
)
def test_a_spec_that_cannot_be(wrong):
    with pytest.raises(vf.ConfigError, match=f"SandboxSpec.{next(iter(wrong))}"):
        SandboxSpec(**wrong)


@pytest.mark.parametrize("name", ALL)
def test_a_worker_that_ends_beside_a_forked_daemon_is_not_a_time_out(name):
    """The daemon holds what a fork copies, the connection to the host included."""
    daemon = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nos._exit(0)"
    killed, after = values(name, daemon, "6 * 7", timeout_s=15.0)
    assert (killed.timed_out, killed.limit) == (False, "killed")
    assert "The interpreter ended" in killed.error
    assert after.value == "42"


def test_a_daemon_that_keeps_the_connection_on_purpose_is_not_a_time_out():
    """A fork by the C library runs no hook of Python, so the daemon really holds the connection."""
    daemon = (
        "import ctypes, os, time\nif ctypes.CDLL(None).fork() == 0:\n   "
        " time.sleep(60)\nos._exit(0)"
    )
    killed, after = values("bubblewrap", daemon, "6 * 7", timeout_s=15.0)
    assert (killed.timed_out, killed.limit, after.value) == (False, "killed", "42")
