"""Attacks of hostile code. Each is Python code that runs in a sandbox; its value shows what it
obtained.

``BAIT`` holds the addresses of the targets on the host. An attack in ``READING`` succeeds when its
value contains the secret; an attack in ``DOING`` when its value is ``'reached'``. Negative control:
in a plain child process (``unsafe_subprocess``) that runs as root they succeed.
"""

from __future__ import annotations

from dataclasses import dataclass

from verifiers.sandbox.protocol import SandboxSpec

LIMITS = SandboxSpec(memory_mb=256, file_mb=32, num_processes=16, cpu_s=1, max_output_bytes=65536)
"""Limits of the sandboxes that the attacks run in."""
SYSTEM = "import ctypes, os, sys; libc = ctypes.CDLL(None, use_errno=True)\n"


@dataclass(frozen=True, slots=True)
class Attack:
    """Example: ``Attack("environment", "import os; repr(os.environ)", "a secret of the run")``"""

    name: str
    code: str
    aim: str
    timeout_s: float = 15.0


READING = (
    Attack("environment", "import os; repr(dict(os.environ))", "secrets in the run's environment"),
    Attack(
        "proc environ",
        "import glob\nfound = b''\nfor path in glob.glob('/proc/[0-9]*/environ'):\n"
        "    try: found += open(path, 'rb').read()\n    except OSError: pass\n"
        "[part for part in found.split(b'\\0') if b'secret-' in part]",
        "secrets in the environment of other processes",
    ),
    Attack("private file", "open(BAIT['private']).read()", "a file that only the caller may read"),
    Attack(
        "proc root",
        "import os; open(f\"/proc/{BAIT['pid']}/root{BAIT['private']}\").read()",
        "files through /proc",
    ),
    Attack(
        "climbing out",
        "import os\nos.chdir('/')\nopen('../' * 40 + BAIT['private'].lstrip('/')).read()",
        "a file above the root",
    ),
    Attack(
        "loopback",
        "import socket\nwith socket.create_connection(('127.0.0.1', BAIT['port']), 2) as s: got ="
        " s.recv(99)\ngot",
        "a server on the host's loopback",
    ),
    Attack(
        "unix socket",
        "import socket\ns = socket.socket(socket.AF_UNIX); s.connect(BAIT['socket']); s.recv(99)",
        "a socket like that of a container daemon",
    ),
    Attack(
        "abstract socket",
        "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('\\0' + BAIT['abstract']);"
        " s.recv(99)",
        "a socket without a file",
    ),
    Attack(
        "open files",
        # Only regular files: reading would consume data from the pipes of the run's event loops.
        "import glob, os\nfound = b''\nfor path in filter(os.path.isfile,"
        " glob.glob(f\"/proc/{BAIT['run']}/fd/*\")):\n    try:\n        with open(path, 'rb') as"
        " file:\n            found += file.read(999)\n    except OSError:"
        " pass\nfound.decode('utf-8', 'replace')",
        "a file the run has open",
    ),
)
DOING = (
    Attack(
        "network",
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
        " s.connect(('192.0.2.1', 9)); 'reached'",
        "a route to the outside",
    ),
    Attack(
        "write outside", "open(BAIT['writable'], 'w').write('x'); 'reached'", "a file of the host"
    ),
    Attack(
        "write the system",
        "import os, sys\nfor folder in ('/usr/bin', '/etc', '/opt', '/'):\n    try:\n"
        "        path = os.path.join(folder, BAIT['name']); open(path, 'w').close()\n"
        "        os.remove(path); got = 'reached'; break\n"
        "    except OSError as error: got = repr(error)\ngot",
        "programs and settings",
    ),
    Attack(
        "change a file",
        "import os\nos.chmod(BAIT['private'], 0o640)\n"
        "'reached' if os.stat(BAIT['private']).st_mode & 0o777 == 0o640 else 'unchanged'",
        "who may read a file of the host",
    ),
    Attack("kill", "import os; os.kill(BAIT['pid'], 0); 'reached'", "signals to the run"),
    Attack(
        "ptrace",
        SYSTEM
        + "for pid in (BAIT['pid'], os.getppid()):\n    got = 'reached' if libc.ptrace(0x4206, pid,"
        " None, None) == 0 else os.strerror(ctypes.get_errno())\n    if got == 'reached':"
        " libc.ptrace(17, pid, None, None); break\ngot",
        "the memory of another process",
    ),
    Attack(
        "namespaces",
        SYSTEM + "child = os.fork()\nif child == 0: os._exit(libc.unshare(0x10000000) != 0)\n"
        "'reached' if os.waitpid(child, 0)[1] == 0 else 'refused'",
        "namespaces of its own, with all privileges in them",
    ),
    Attack(
        "mount",
        SYSTEM + "child = os.fork()\nif child == 0:\n"
        "    libc.unshare(0x10020000) or libc.unshare(0x20000)\n"
        "    libc.mount(b'none', b'/', None, 0x44000, None)\n"
        "    os._exit(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) != 0)\n"
        "'reached' if os.waitpid(child, 0)[1] == 0 else 'refused'",
        "mounts",
    ),
    Attack(
        "fork bomb",
        "import os, signal, time\npids = []\ntry:\n    for _ in range(64):\n        pid ="
        " os.fork()\n        if pid == 0: time.sleep(30); os._exit(0)\n        pids.append(pid)\n  "
        "  got = 'reached'\nexcept OSError as error: got = repr(error)\nfor pid in pids:"
        " os.kill(pid, signal.SIGKILL)\ngot",
        "64 processes where 16 are allowed",
    ),
    Attack("memory", "data = bytearray(400 * 2**20); 'reached'", "400 MB where 256 are allowed"),
    Attack(
        "memory together",
        "import os, time\npids = []\nfor _ in range(8):\n    pid = os.fork()\n    if pid == 0:\n"
        "        data = b'x' * (100 * 2**20); time.sleep(2.5); os._exit(0)\n    pids.append(pid)\n"
        "'reached' if sum(os.waitpid(pid, 0)[1] for pid in pids) == 0 else 'a child was ended'",
        "eight processes of 100 MB each",
    ),
    Attack(
        "disk",
        "for number in range(6):\n"
        "    with open(f'fill{number}', 'wb') as file: file.write(b'x' * (16 * 2**20))\n"
        "'reached'",
        "96 MB of files where 32 are allowed",
    ),
    Attack(
        "hidden memory",
        "import os\nfd = os.memfd_create('x')\nfor _ in range(20): os.write(fd, b'x' * (20 *"
        " 2**20))\n'reached'",
        "memory that belongs to no process",
    ),
    Attack(
        "output flood",
        "import sys\nfor _ in range(200): sys.stdout.write('x' * 2**20)\n'reached'",
        "200 MB of output: too much for the run to hold",
    ),
    Attack(
        "cpu",
        "import time\nwhile time.process_time() < 3: pass\n'reached'",
        "three seconds of CPU where one is allowed",
        timeout_s=60.0,  # a busy machine takes long to give three seconds
    ),
    Attack(
        "deaf to signals",
        "import signal, time\nfor number in range(1, 65):\n    try: signal.signal(number,"
        " signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True:\n    try:"
        " time.sleep(60)\n    except BaseException: pass",
        "staying after the time-out",
        timeout_s=2.0,
    ),
    Attack(
        "survivor",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.execv('/bin/sleep', ['sleep', BAIT['nap']])\n    os._exit(0)\n"
        "os.wait(); time.sleep(0.2); 'started'",
        "a process that outlives the sandbox",
    ),
    Attack(
        "link out",
        "import os; os.symlink(BAIT['private'], 'link'); 'made'",
        "the host following a link of it",
    ),
)
ATTACKS = (*READING, *DOING)
