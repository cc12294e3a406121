"""The files for clusters have the form that their programs read, and name options that exist. They
are not run."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which accelerate brings")
accelerate_launch = pytest.importorskip("accelerate.commands.launch", reason="needs the trainer")

from accelerate.commands.config.config_args import load_config_from_file  # noqa: E402

from verifiers_trainer.cli.train import train_command  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "configs"
SLURM, KUBERNETES = CONFIGS / "slurm/train.sbatch", CONFIGS / "kubernetes/train.yaml"
TRAINS = re.compile(r"accelerate launch (.*?)-m verifiers_trainer\.cli\.train (.*)", re.S)


def documents() -> dict[tuple[str, str], dict]:
    return {
        (document["kind"], document["metadata"]["name"]): document
        for document in yaml.safe_load_all(KUBERNETES.read_text())
    }


def launches() -> list[str]:
    job = documents()["Job", "vf-trainer"]
    script = re.search(r"bash -c '(.*?)'", SLURM.read_text(), re.S)[1].replace("\\\n", " ")
    return [script, *job["spec"]["template"]["spec"]["containers"][0]["args"]]


def test_bash_reads_the_slurm_script():
    assert subprocess.run(["bash", "-n", str(SLURM)], check=False).returncode == 0
    head = SLURM.read_text().partition("set -euo")[0]
    options = re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", head, re.M)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "time"} <= dict(options).keys()
    assert head.count("#SBATCH") == len(options), (
        "every directive is --name or --name=value, before the first command"
    )


def test_a_scheduler_sends_sigterm_to_the_trainer_and_leaves_it_time_to_save():
    assert re.search(r"^#SBATCH --signal=TERM@(\d+)$", SLURM.read_text(), re.M)[1] >= "120"
    pod = documents()["Job", "vf-trainer"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 120
    # a shell as the first process of a container passes no signal on
    assert pod["containers"][0]["args"][0].startswith("exec ")


@pytest.mark.parametrize("number", [0, 1])
def test_the_options_of_accelerate_and_of_vf_train_exist(number):
    launcher, training = TRAINS.search(launches()[number]).groups()
    options_defined = {
        option
        for action in accelerate_launch.launch_command_parser()._actions
        for option in action.option_strings
    }
    flags = {word for word in shlex.split(launcher) if word.startswith("--")}
    assert flags <= options_defined
    assert {"--machine_rank", "--main_process_ip", "--num_machines", "--num_processes"} <= flags
    own_options = {option for parameter in train_command.params for option in parameter.opts}
    words = [word for word in shlex.split(training) if word.startswith("--")]
    assert {word for word in words if not word.startswith(("--trainer.", "--model"))} <= own_options


@pytest.mark.parametrize(
    "file", sorted((CONFIGS / "accelerate").glob("*.yaml")), ids=lambda path: path.name
)
def test_accelerate_reads_its_files(file):
    config = load_config_from_file(str(file))
    assert config.num_processes >= config.num_machines >= 1


def test_the_kubernetes_objects_fit_each_other():
    objects = documents()
    assert {kind for kind, _ in objects} == {
        "PersistentVolumeClaim",
        "Service",
        "Deployment",
        "Job",
    }
    assert all(document["apiVersion"] for document in objects.values())
    for name, kind in (("vf-inference", "Deployment"), ("vf-trainer", "Job")):
        pod = objects[kind, name]["spec"]["template"]
        service = objects["Service", name]["spec"]
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        (container,) = pod["spec"]["containers"]
        assert [port["containerPort"] for port in container["ports"]] == [
            port["port"] for port in service["ports"]
        ]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        assert (
            "PersistentVolumeClaim",
            volumes["run"]["persistentVolumeClaim"]["claimName"],
        ) in objects
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    job = objects["Job", "vf-trainer"]["spec"]
    assert job["completionMode"] == "Indexed", "machine ranks are the indices of its pods"
    assert job["completions"] == job["parallelism"] == 2
    assert job["template"]["spec"]["subdomain"] == "vf-trainer"
    assert "--num_machines 2 --num_processes 16" in launches()[1]
    assert "vf-trainer-0.vf-trainer" in launches()[1]
