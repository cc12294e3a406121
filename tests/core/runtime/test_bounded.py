"""Readers with a limit: what fits is read exactly, what is longer is an error and never held."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from verifiers.runtime import bounded
from verifiers.runtime.bounded import (
    TooLong,
    lines_of,
    open_file,
    read_chunks,
    read_file,
    read_lines,
    read_stream,
    read_text,
    run_captured,
)


@pytest.mark.parametrize("num_bytes", [0, 1, 2**16, 2**16 + 1, 200_000])
def test_what_fits_is_read_exactly_and_one_byte_more_is_an_error(tmp_path, num_bytes):
    content = bytes(range(256)) * (num_bytes // 256 + 1)
    path = tmp_path / "file"
    path.write_bytes(content[:num_bytes])
    assert read_file(path, num_bytes) == path.read_bytes() == content[:num_bytes]
    path.write_bytes(content[: num_bytes + 1])
    with pytest.raises(TooLong, match=f"{path} is longer than {num_bytes} bytes"):
        read_file(path, num_bytes)


def test_a_stream_without_end_is_refused_with_little_memory():
    tracemalloc.start()
    try:
        with (
            open("/dev/zero", "rb") as endless,
            pytest.raises(TooLong, match="/dev/zero is longer than 2 MiB"),
        ):
            read_stream(endless, 2 * 2**20, "/dev/zero")
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["fifo", "device", "link to a device", "socket", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "file"
    with contextlib.ExitStack() as stack:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path = Path("/dev/zero")
        elif kind == "link to a device":
            path.symlink_to("/dev/zero")
        elif kind == "socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        else:
            path.mkdir()
        num_open = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        with pytest.raises(OSError, match=str(path)):
            read_file(path)
        assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == num_open


def test_a_plain_open_would_wait_for_a_pipe(tmp_path):
    """Negative control."""
    os.mkfifo(tmp_path / "file")
    reader = threading.Thread(target=lambda: open(tmp_path / "file", "rb").close())
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    with open(tmp_path / "file", "wb"):
        reader.join()


def test_a_link_to_a_file_is_read_and_lines_are_limited(tmp_path):
    (tmp_path / "file").write_bytes(b"a\nbcd\ne")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link") == b"a\nbcd\ne"
    with open_file(tmp_path / "link") as file:
        assert list(lines_of(file, 4)) == [b"a\n", b"bcd\n", b"e"]
    with (
        open_file(tmp_path / "file") as file,
        pytest.raises(TooLong, match=f"a line of {tmp_path / 'file'} is longer than 3 bytes"),
    ):
        list(lines_of(file, 3))


def test_text_has_the_line_ends_of_read_text(tmp_path):
    path = tmp_path / "file"
    path.write_bytes("ä\r\nb\rc\n".encode())
    assert read_text(path) == path.read_text(encoding="utf-8") == "ä\nb\nc\n"


async def test_chunks_are_joined_up_to_the_limit():
    async def chunks(*pieces):
        for chunk in pieces:
            yield chunk

    assert await read_chunks(chunks(), 4, "it") == b""
    assert await read_chunks(chunks(b"ab", b"cd"), 4, "it") == b"abcd"
    with pytest.raises(TooLong, match="it is longer than 4 bytes"):
        await read_chunks(chunks(b"ab", b"cd", b"e"), 4, "it")


def test_a_long_line_comes_in_parts():
    stream = io.BytesIO(b"a\n" + b"x" * (bounded.MAX_LINE_BYTES + 5) + b"\nb")
    assert [len(line) for line in read_lines(stream)] == [2, bounded.MAX_LINE_BYTES, 6, 1]


def test_a_child_process_is_captured_like_subprocess_run():
    command = [
        sys.executable,
        "-c",
        "import sys; print('out ä'); print('err', file=sys.stderr); sys.exit(3)",
    ]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = run_captured(command)
    assert (ours.returncode, ours.stdout, ours.stderr) == (
        child.returncode,
        child.stdout,
        child.stderr,
    )


def test_a_child_that_prints_without_end_is_killed_and_the_end_of_its_stderr_is_kept(monkeypatch):
    monkeypatch.setattr(bounded, "MAX_OUTPUT_BYTES", 2**20)
    with pytest.raises(TooLong, match=r"the output of .*python.* is longer than 1 MiB"):
        run_captured([sys.executable, "-c", "while True: print('x' * 1000)"])
    loud = "import sys\nfor n in range(100_000): print(n, file=sys.stderr)"
    errors = run_captured([sys.executable, "-c", loud]).stderr
    assert len(errors) == bounded.MAX_LINE_BYTES
    assert errors.endswith("99999\n")


def test_a_command_that_outlives_its_limit_is_killed_with_its_children():
    began = time.monotonic()
    ended = run_captured(["sh", "-c", "sleep 60 & echo begun; sleep 60"], limit_s=0.5)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "begun\n")
    assert time.monotonic() - began < 30


def test_without_a_limit_the_stream_is_held_whole():
    """Negative control."""
    tracemalloc.start()
    try:
        assert len(read_stream(io.BytesIO(bytes(8 * 2**20)), 2**40, "it")) == 8 * 2**20
        assert tracemalloc.get_traced_memory()[1] > 8 * 2**20
    finally:
        tracemalloc.stop()
