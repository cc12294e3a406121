"""``-m FOLDER`` and ``-m builtin:NAME``: a saved model answers as the model that was saved, with and
without an adapter, and a builtin one as the model that a training begins with."""

import json
from pathlib import Path

import pytest

import verifiers as vf
from support.partial_install import without
from verifiers.cli.evaluate.command import run_command
from verifiers.cli.evaluate.models import choose
from verifiers.cli.evaluate.options import EvalSettings
from verifiers.errors import ConfigError
from verifiers.runtime.install_lines import install_line
from verifiers.testing import ScriptedClient
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer
from verifiers_trainer.policy.folder_client import FolderClient, folder_client, load_folder

ENVIRONMENT = """
import verifiers as vf

def load_environment():
    rows = [{"question": f"say {n}", "answer": str(n)} for n in range(3)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([lambda completion: len(completion[-1].content) / 100]))
"""


@pytest.fixture
def full_model(tmp_path):
    """A folder with a whole model."""
    build_tiny_model(seed=3).save_pretrained(tmp_path / "whole")
    build_tiny_tokenizer().save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.fixture
def adapted(full_model, tmp_path):
    """(folder of an adapter over ``full_model``, the adapted model)."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        load_folder(full_model)[0], LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.peft_config["default"].base_model_name_or_path = str(full_model)
    model.save_pretrained(tmp_path / "adapted")
    return tmp_path / "adapted", model


def test_an_adapter_is_merged_into_its_base(full_model, adapted):
    import torch

    folder, model = adapted
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        expected, loaded, base = (
            m(ids).logits
            for m in (model.eval(), load_folder(folder)[0], load_folder(full_model)[0])
        )
    assert torch.allclose(expected, loaded, atol=1e-4)
    # negative control: the adapter changes the model
    assert not torch.allclose(base, loaded, atol=1e-1)


def test_python_evaluates_the_path_of_a_folder(full_model):
    env = vf.SingleTurnEnv(dataset=[{"question": "Q"}], rubric=vf.Rubric([lambda completion: 1.0]))
    results = env.evaluate(model=full_model, max_tokens=4)
    assert (results.metadata.model, results.metadata.avg_reward) == (str(full_model), 1.0)
    with pytest.raises(ConfigError, match="holds no model"):
        env.evaluate(model=full_model / "nowhere")


def test_a_run_folder_means_its_newest_checkpoint_and_an_empty_one_is_refused(full_model, tmp_path):
    for step in (2, 10):
        (tmp_path / f"run/checkpoint-{step}").mkdir(parents=True)
        (tmp_path / f"run/checkpoint-{step}/config.json").write_text("{}")
    assert folder_client(str(tmp_path / "run")).folder.name == "checkpoint-10"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no model"):
        folder_client(str(tmp_path / "empty"))


def test_the_identity_is_that_of_the_weights(full_model, tmp_path):
    before = FolderClient(full_model).identity()
    (full_model / "trainer_state.json").write_text("{}")
    assert FolderClient(full_model).identity() == before
    build_tiny_model(seed=4).save_pretrained(full_model)
    assert FolderClient(full_model).identity() != before


def test_the_command_evaluates_a_folder(full_model, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    Path("said.py").write_text(ENVIRONMENT)
    assert run_command(["said.py", "-m", "whole", "-t", "8", "-r", "2", "--json"]) == 0
    run = json.loads(capfd.readouterr().out)["runs"][0]
    assert not run["base_url"]
    # the model is the run's
    assert run_command(["said.py", "--resume", run["path"], "-t", "8", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["runs"][0]["resumed"] == 6
    assert (run["model"], run["num_rollouts"], run["num_errors"]) == ("whole", 6, 0)
    assert run["avg_reward"] > 0
    assert run["local_model"]["sampling"] == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    assert run_command(["said.py", "--resume", run["path"], "-t", "8"]) == 0
    summary = capfd.readouterr().out
    assert "temperature 1.0, top_k 0, top_p 1.0, min_p 0.0, max_tokens 8" in summary
    assert "small local model" not in summary
    assert run_command(["said.py", "-m", "./nowhere", "--json"]) == 2
    assert "there is no folder" in capfd.readouterr().err


def test_the_command_and_python_evaluate_a_builtin_model(tmp_path, monkeypatch, capfd):
    """The model that a training of this name begins with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    Path("said.py").write_text(ENVIRONMENT)
    words = ["said.py", "-m", "builtin:tiny", "-t", "8", "-r", "2", "-T", "0", "--json"]
    assert run_command(words) == 0
    printed = capfd.readouterr()
    run = json.loads(printed.out)["runs"][0]
    assert (run["model"], run["num_rollouts"], run["num_errors"]) == ("builtin:tiny", 6, 0)
    assert "Loading weights" not in printed.err
    again = ["said.py", "--resume", run["path"], "-t", "8", "-T", "0", "--json"]
    assert run_command(again) == 0
    assert json.loads(capfd.readouterr().out)["runs"][0]["resumed"] == 6
    env = vf.load_environment("said.py")
    results = env.evaluate(model="builtin:tiny", rollouts_per_example=2, max_tokens=8)
    assert (results.metadata.model, results.errors) == ("builtin:tiny", [None] * 6)
    # with -b it is the name of a model of the server
    choice = choose(EvalSettings(model="builtin:tiny", api_base_url="http://127.0.0.1:1/v1"))
    assert choice.client.base_url == "http://127.0.0.1:1/v1"
    assert run_command(["said.py", "-m", "builtin:tyny"]) == 2
    assert "did you mean 'builtin:tiny'?" in capfd.readouterr().err


def test_a_judge_and_a_role_name_a_builtin_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")  # where nothing answers

    async def judged(judge, prompt, completion, answer, state) -> float:
        return float(await judge(prompt, completion, answer, state) == "yes")

    rubric = vf.JudgeRubric(
        funcs=[judged], judge_model="builtin:tiny", judge_sampling_args={"max_tokens": 4}
    )
    roles = [vf.Role("judged"), vf.Role("other", client="builtin:tiny")]
    env = vf.MultiAgentEnv(roles, dataset=[{"question": "Q"}], rubric=rubric, max_turns=2)
    (output,) = env.evaluate(ScriptedClient("A"), "m", max_tokens=4).outputs
    # it has answered: four tokens at random
    assert "judge 'builtin:tiny' was truncated before its verdict" in output.error.message
    assert [message.name for message in output.completion] == ["judged", "other"]
    misspelt = vf.JudgeRubric(funcs=[judged], judge_model="builtin:tyny")
    env = vf.SingleTurnEnv(dataset=[{"question": "Q"}], rubric=misspelt)
    with pytest.raises(ConfigError, match="the judge 'builtin:tyny': no builtin model"):
        env.evaluate(ScriptedClient("A"), "m")


@pytest.mark.parametrize("model", ["whole", "builtin:tiny"])
def test_without_the_trainer_the_command_says_what_is_missing(tmp_path, model):
    (tmp_path / "said.py").write_text(ENVIRONMENT)
    (tmp_path / "whole").mkdir()
    code = (
        "import contextlib, os, sys; from verifiers.cli.evaluate.command import run_command;"
        " os.chdir(sys.argv[1])\n"
        "with contextlib.redirect_stderr(sys.stdout): code = run_command(['said.py', '-m', sys.argv[2]])\n"
        "print(code)"
    )
    printed = without(tmp_path, "verifiers_trainer")(code, str(tmp_path), model)
    assert f"trainer, which is not installed: {install_line('verifiers-trainer')}" in printed
    assert printed.splitlines()[-1] == "2"
