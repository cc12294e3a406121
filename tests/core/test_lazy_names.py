"""Names of ``verifiers`` that are imported on first use; the logger; what is missing says what to
install."""

import importlib
import logging
import subprocess
import sys

import pytest

import verifiers as vf
from verifiers.runtime.install_lines import install_line


@pytest.mark.parametrize("name", sorted(vf.__all__))
def test_every_name_resolves(name):
    assert getattr(vf, name) is not None


def test_a_name_is_resolved_once():
    first = vf.SingleTurnEnv
    assert "SingleTurnEnv" in vars(vf)
    assert vf.SingleTurnEnv is first


def test_names_can_be_completed():
    assert set(vf.__all__) <= set(dir(vf))
    assert "RLTrainer" in dir(vf)


@pytest.mark.parametrize(
    "package",
    [
        "verifiers.clients",
        "verifiers.environments",
        "verifiers.environments.integrations",
        "verifiers.rubrics",
        "verifiers.testing",
        "verifiers_integrations.tinker",
        "verifiers_trainer",
        "verifiers_trainer.engines",
    ],
)
def test_names_of_packages_can_be_completed(package):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))


def test_names_for_testing_are_those_that_type_checkers_see():
    for name in vf.testing.__all__:
        assert getattr(vf.testing, name).__module__.startswith("verifiers.")
    with pytest.raises(AttributeError, match="no attribute 'ScriptedCleint'"):
        vf.testing.ScriptedCleint


def test_a_misspelt_name_is_an_attribute_error_with_a_suggestion():
    with pytest.raises(AttributeError, match="did you mean 'SingleTurnEnv'"):
        vf.SingelTurnEnv
    with pytest.raises(AttributeError):
        vf.quite_another_thing
    assert not hasattr(vf, "nothing")


def test_from_verifiers_import_star():
    code = "from verifiers import *; print(SingleTurnEnv.__name__, Rubric.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["SingleTurnEnv", "Rubric"], done.stderr


@pytest.mark.parametrize(
    "module", ["types", "errors", "clients", "testing", "parsers", "rubrics", "environments"]
)
def test_submodules_are_there_without_importing_them(module):
    code = f"import verifiers as vf; print(vf.{module}.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"verifiers.{module}", done.stderr


WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "verifiers_trainer":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name={missing!r})
sys.meta_path.insert(0, Absent())
import verifiers as vf
try:
    vf.RLTrainer
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_name_of_the_trainer_says_what_to_install():
    code = WITHOUT.format(missing="verifiers_trainer")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("AttributeError"), done.stderr
    assert install_line("verifiers-trainer") in done.stdout


def test_a_broken_installation_shows_its_own_error():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing="torch")], capture_output=True, text=True
    )
    assert done.stdout.startswith("ModuleNotFoundError"), done.stderr
    assert "verifiers[rl]" not in done.stdout


# --- the logger


@pytest.fixture
def logger():
    logger = logging.getLogger("verifiers")
    before = list(logger.handlers), logger.level, logger.propagate
    yield logger
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_importing_configures_no_logging():
    # in a process of its own: a command that another test has run here has set a level
    code = (
        "import logging, verifiers; logger = logging.getLogger('verifiers');"
        " print(logger.level, *(type(h).__name__ for h in logger.handlers), logging.root.handlers)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "NullHandler", "[]"], done.stderr


def test_logging_is_set_up_on_request_and_only_once(logger, monkeypatch, tmp_path):
    mine = logging.FileHandler(tmp_path / "log")
    logger.addHandler(mine)
    monkeypatch.setenv("VF_LOG_LEVEL", "debug")
    vf.setup_logging()
    vf.setup_logging(log_format="%(message)s")
    assert logger.level == logging.DEBUG
    assert mine in logger.handlers
    assert sum(type(h) is logging.StreamHandler for h in logger.handlers) == 1
    vf.setup_logging("WARNING")
    assert logger.level == logging.WARNING
    with pytest.raises(vf.ConfigError, match="LOUD"):
        vf.setup_logging("loud")
    mine.close()


def test_levels_for_the_length_of_a_block(logger):
    before = logger.level
    with vf.log_level("error"):
        assert logger.level == logging.ERROR
        with vf.quiet_verifiers():
            assert logger.level == logging.WARNING
    assert logger.level == before


def test_names_that_tools_ask_for_are_refused_without_a_search():
    with pytest.raises(AttributeError) as refused:
        vf._SingleTurnEnv
    assert "did you mean" not in str(refused.value)
