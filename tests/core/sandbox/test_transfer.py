"""A sandbox of a branch: the files of its parent's, and nothing that they share."""

import asyncio

import pytest

import verifiers as vf
from support.isolated import needs_sandbox
from verifiers.sandbox import SandboxSpec, backend_for
from verifiers.sandbox.transfer import copy_files
from verifiers.testing import ScriptedClient

CODE_S = 30.0
MAKE = r"""
umask 022
mkdir -p deep/er empty && echo text > deep/er/file && : > deep/none
printf '\000\377\n' > 'a name
with a line' && echo hidden > .hidden
chmod 700 deep && chmod 4711 deep/none && chmod 444 deep/er/file && chmod 1777 empty
ln -s er/file deep/link && ln -s /nowhere dangling && ln -s ../deep empty/folder
ln deep/er/file hard
mkdir /tmp/mine && echo temporary > /tmp/mine/file && chmod 640 /tmp/mine/file
ln -s "$PWD/deep" /tmp/out
touch -d '2001-02-03 04:05:06' deep/er/file /tmp/mine
"""
LIST = r"""
import os, stat, hashlib
for top in (os.getcwd(), "/tmp"):
    for folder, folders, files in os.walk(top):
        for name in sorted(folders + files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            content = (
                os.readlink(path) if kind == stat.S_IFLNK
                else "" if kind == stat.S_IFDIR
                else hashlib.sha256(open(path, "rb").read()).hexdigest()
            )
            links = status.st_nlink if kind == stat.S_IFREG else 0
            when = int(status.st_mtime) if kind != stat.S_IFLNK else 0
            print(repr((path, oct(status.st_mode), links, when, content)))
"""


def in_two(use):
    """What ``use`` returns of two sandboxes that were opened alike."""
    needs_sandbox()

    async def run():
        backend = await backend_for("bubblewrap")
        source = await backend.open(SandboxSpec())
        try:
            target = await backend.open(SandboxSpec())
            try:
                return await use(source, target)
            finally:
                await target.close()
        finally:
            await source.close()

    return asyncio.run(run())


async def output(sandbox, *command):
    result = await sandbox.exec(list(command), timeout_s=CODE_S)
    assert result.exit_code == 0, result
    return result.stdout


async def files(sandbox):
    return sorted((await output(sandbox, "python3", "-c", LIST)).splitlines())


def test_a_copy_has_the_same_files_modes_and_links_and_shares_none():
    async def use(source, target):
        assert await files(source) == await files(target)
        await output(source, "sh", "-ec", MAKE)
        made = await files(source)
        assert len(made) >= 14
        assert made != await files(target)
        await copy_files(source, target)
        assert await files(target) == made
        assert await files(source) == made  # and nothing of the copying stays in either
        await output(target, "sh", "-ec", "echo more >> deep/er/../none; rm -r /tmp/mine .hidden")
        await output(target, "sh", "-ec", "chmod 777 hard; echo new > new")
        assert await files(source) == made
        changed = await files(target)
        await output(source, "sh", "-ec", "rm -r deep hard; echo other > /tmp/other")
        assert await files(target) == changed

    in_two(use)


def test_a_process_in_the_background_and_variables_refuse_the_copy_by_their_names():
    async def use(source, target):
        await output(source, "sh", "-c", "echo a > file; sleep 60 >/dev/null 2>&1 &")
        before = await files(target)
        with pytest.raises(vf.SandboxError, match=r"the process 'sleep' runs in the background"):
            await copy_files(source, target)
        assert await files(target) == before
        await output(source, "sh", "-c", "kill $(cat /proc/[0-9]*/stat | awk '/sleep/ {print $1}')")
        await copy_files(source, target)  # the control
        await source.exec("board = [1]", timeout_s=CODE_S)
        with pytest.raises(vf.SandboxError, match=r"holds the variables \['board'\]"):
            await copy_files(source, target)

    in_two(use)


def branched(*commands):
    """The rollouts of one tree that forks at its second turn; each runs a command a turn."""

    def reply(request):
        turn = sum(message["role"] == "assistant" for message in request.prompt)
        command = commands[turn].replace("SEED", str(request.seed))
        return {"tool_calls": [{"name": "bash", "arguments": {"command": command}}]}

    env = vf.SandboxEnv(
        dataset=[{"question": "q"}],
        rubric=vf.Rubric(funcs=[lambda completion: 1.0]),
        max_turns=len(commands),
        sandbox=needs_sandbox(),
        branching=vf.Branching(at=1, branches=2),
    )
    outputs = env.evaluate(ScriptedClient(reply), "m", rollouts_per_example=2, seed=3).outputs
    results = [
        [
            message["content"].strip()
            for message in output["completion"]
            if message["role"] == "tool"
        ]
        for output in outputs
    ]
    return outputs, results


def test_branches_of_a_rollout_go_on_in_sandboxes_of_their_own():
    outputs, results = branched("echo 0 > log", "echo SEED >> log", "cat log", "true")
    assert [output["fork"]["parent"] for output in outputs] == [None, 0]
    assert [output["error"] for output in outputs] == [None, None]
    logs = [texts[2].split() for texts in results]
    assert [len(log) for log in logs] == [2, 2], logs
    assert logs[0][0] == logs[1][0] == "0"
    assert logs[0][1] != logs[1][1]


def test_a_process_in_the_background_fails_the_branch_and_its_parent_continues():
    outputs, results = branched("sleep 60 >/dev/null 2>&1 & echo begun", "echo here", "true")
    assert outputs[0]["error"] is None
    assert results[0][:2] == ["begun", "here"]
    assert "the process 'sleep' runs in the background" in outputs[1]["error"]["message"]
