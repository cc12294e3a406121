"""``vf-install --agent``: real npm, against a registry on loopback, into a folder of its own."""

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import verifiers as vf
from verifiers.cli.install.command import COMMAND
from verifiers.testing import ScriptedClient
from verifiers_agents.agent import Agent, find_agent, find_installed, installed_versions, version_in

PROGRAM = """
const http = require("http")
const body = JSON.stringify({model: "m", messages: [{role: "user", content: process.argv[2]}]})
const url = process.env.OPENAI_BASE_URL + "/chat/completions"
const request = http.request(url, {method: "POST"}, (answer) => {
  let text = ""
  answer.on("data", (piece) => (text += piece))
  answer.on("end", () => console.log(JSON.parse(text).choices[0].message.content))
})
request.end(body)
"""
MODULE = """
from verifiers import Agent
AGENT = Agent("hello", ("node", "{program}", "{prompt}"), registry="npm", package="hello-agent",
              executable="node_modules/hello-agent/cli.js", needs=("node",), min_version="1.5")
"""


def packed(version, own_version):
    """A package as npm sends it: (tarball, its integrity)."""
    buffer = io.BytesIO()
    script = 'require("fs").writeFileSync(process.env.VF_AGENTS + "-script", "")'
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in {
            "package.json": json.dumps(
                {
                    "name": "hello-agent",
                    "version": own_version,
                    "scripts": {"postinstall": "node script.js"},
                }
            ),
            "cli.js": PROGRAM,
            "script.js": script,
        }.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    content = buffer.getvalue()
    return content, "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()


@pytest.fixture
def registry():
    """The address of a registry with three versions of one package; one calls itself otherwise in
    its files."""
    tarballs = {version: packed(version, version) for version in ("1.4.0", "1.10.0")}
    tarballs["1.9.9"] = packed("1.9.9", "../../precious")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            name = self.path.strip("/")
            if name.endswith(".tgz"):
                body = tarballs[name.removesuffix(".tgz").rpartition("-")[2]][0]
            elif name == "hello-agent":
                versions = {
                    version: {
                        "name": "hello-agent",
                        "version": version,
                        "hasInstallScript": True,
                        "dist": {
                            "tarball": f"{address}/hello-agent-{version}.tgz",
                            "integrity": integrity,
                        },
                    }
                    for version, (_, integrity) in tarballs.items()
                }
                body = json.dumps(
                    {"name": "hello-agent", "dist-tags": {"latest": "1.10.0"}, "versions": versions}
                ).encode()
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield address
    server.shutdown()
    server.server_close()


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """The agent ``hello`` by an entry point of an installed distribution."""
    site = tmp_path / "site"
    (site / "hello-1.0.dist-info").mkdir(parents=True)
    (site / "hello-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n"
    )
    (site / "hello-1.0.dist-info" / "entry_points.txt").write_text(
        "[verifiers.agents]\nhello = hello_agent:AGENT\n"
    )
    (site / "hello_agent.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("VF_AGENTS", str(tmp_path / "agents"))
    yield
    sys.modules.pop("hello_agent", None)


@pytest.fixture
def vf_install(monkeypatch, capsys):
    def run(registry, *words):
        monkeypatch.setenv("npm_config_registry", registry)
        monkeypatch.setenv("npm_config_cache", os.environ["VF_AGENTS"] + "-cache")
        code = COMMAND.run(list(words))
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_an_agent_is_installed_by_name_and_then_used(registered, registry, vf_install):
    code, out, err = vf_install(registry, "--agent", "hello")
    assert code == 0, err
    assert "hello 1.10.0 is installed" in out
    _, out, _ = vf_install("http://127.0.0.1:9", "--agent", "hello")
    assert "is installed already" in out
    code, _, err = vf_install(registry, "--agent", "hello@1.4.0")
    assert code == 2  # an agent says which version it needs
    assert "1.5 or later is needed" in err
    agent = find_agent("hello")
    assert sorted(installed_versions(agent)) == ["1.10.0", "1.4.0"]
    assert find_installed(agent).version == "1.10.0"  # not by the order of letters
    env = vf.AgentEnv(agent="hello", dataset=[{"question": "Well?"}], sandbox="unsafe_subprocess")
    (output,) = env.evaluate(ScriptedClient("Well."), "m", score_rollouts=False).outputs
    assert (output["agent"]["version"], output["agent"]["log"], output.error) == (
        "1.10.0",
        "Well.\n",
        None,
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_a_package_runs_no_code_here_and_names_no_folder_of_its_own(
    registered, registry, vf_install, tmp_path
):
    (tmp_path / "precious").mkdir()
    code, _, err = vf_install(registry, "--agent", "hello@1.9.9")
    assert (code, (tmp_path / "precious").is_dir()) == (2, True)
    assert "has the version '../../precious', which is none" in err
    assert os.listdir(tmp_path / "agents" / "hello") == []
    code, _, err = vf_install(registry, "--agent", "hello")
    assert (code, (tmp_path / "agents-script").exists()) == (0, False), err
    assert "none of its code runs while it is installed" in err
    command = ["npm", "install", "--prefix", str(tmp_path / "plain"), "hello-agent"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "agents-script").exists(), (
        "the control: an ordinary installation runs its script"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": "../../x"}', "which is none"),
        ('{"version": ".."}', "which is none"),
        ('{"version": ""}', "which is none"),
        ('{"version": "1/2"}', "which is none"),
        ('{"version": ["1.0"]}', "which is none"),
        ("[1]", "has no version"),
        ("[" * 100_000, "has no version"),
        ("", "has no version"),
    ],
)
def test_a_version_of_an_installed_package_names_a_folder_or_is_refused(text, message, tmp_path):
    agent = find_agent("qwen-code")
    file = tmp_path / "node_modules" / agent.package / "package.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"version": "1.0.0-beta.1+x"}')
    assert version_in(agent, tmp_path) == "1.0.0-beta.1+x"
    file.write_text(text)
    with pytest.raises(vf.ConfigError, match=message):
        version_in(agent, tmp_path)


@pytest.mark.parametrize("version", ["..", ".", "-x"])
def test_a_version_of_an_installed_python_package_too(version, tmp_path):
    agent = find_agent("mini-swe-agent")
    (tmp_path / f"mini_swe_agent-{version}.dist-info").mkdir()
    with pytest.raises(vf.ConfigError, match="which is none"):
        version_in(agent, tmp_path)
    (tmp_path / f"mini_swe_agent-{version}.dist-info").rename(
        tmp_path / "mini_swe_agent-2.4.6.dist-info"
    )
    assert version_in(agent, tmp_path) == "2.4.6"


def test_python_packages_of_an_agent_are_wheels(registered, vf_install):
    _, out, _ = vf_install("http://127.0.0.1:9", "--agent", "mini-swe-agent", "--dry-run")
    assert "--only-binary :all:" in out


def test_an_agent_that_is_missing_is_named_with_the_command(registered, monkeypatch):
    env = vf.AgentEnv(agent="codex", dataset=[{"question": "?"}])
    with pytest.raises(
        vf.ConfigError,
        match=r"'codex' is not installed; install it with: vf-install --agent codex$",
    ):
        env.evaluate(ScriptedClient("x"), "m")
    assert "agent_version" not in env.identity()


def test_a_version_that_is_not_there_is_named(registered, tmp_path):
    (tmp_path / "agents" / "codex" / "0.1.0").mkdir(parents=True)
    with pytest.raises(
        vf.ConfigError,
        match=r"in version 0\.1\.0, not 9; install it with: vf-install --agent codex@9",
    ):
        find_installed(find_agent("codex"), "9")
    with pytest.raises(vf.ConfigError, match=r"has no node_modules.*install it again with"):
        find_installed(find_agent("codex"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--agent", "codx"], 'did you mean "codex"'),
        (["--agent", "codex", "reverse-text"], "takes one name and no environment"),
    ],
)
def test_what_cannot_be_installed(registered, words, expected, vf_install):
    code, out, err = vf_install("http://127.0.0.1:9", *words)
    assert (code, out) == (2, "")
    assert expected in err


def test_a_dry_run_prints_the_command_alone(registered, tmp_path, vf_install):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    _, out, _ = vf_install("http://127.0.0.1:9", "--agent", "codex", "--dry-run")
    assert out.startswith("npm install --prefix ")
    assert " --ignore-scripts " in out
    assert out.endswith("@openai/codex@latest\n")
    assert not (tmp_path / "agents").exists()


def test_every_known_agent_says_how_it_is_installed_and_called():
    for name in ("codex", "opencode", "pi", "claude-code", "qwen-code", "mini-swe-agent"):
        agent = find_agent(name)
        assert isinstance(agent, Agent)
        assert agent.registry in ("npm", "pypi")
        assert "{prompt}" in agent.command
        assert "{args}" in agent.command
        assert agent.dialect in ("chat", "responses", "messages")
        assert agent.note
