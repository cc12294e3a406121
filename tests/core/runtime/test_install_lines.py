"""An install line names the place that the installed distribution came from, never a bare name that
is not there."""

import json
import sys

import pytest

from verifiers.runtime.install_lines import install_line, origin_of, repository_url, requirement

GIT = {
    "url": "https://host/o/r.git",
    "vcs_info": {"vcs": "git", "commit_id": "f00"},
    "subdirectory": "packages/core",
}
AT = "git+https://host/o/r.git@f00#subdirectory=packages"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a Python that has no distributions but those installed with this function."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])

    def add(name, origin=None, *lines):
        about = tmp_path / "site" / f"{name.replace('-', '_')}-0.2.0.dist-info"
        about.mkdir(parents=True)
        about.joinpath("METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", f"Name: {name}", *lines, ""])
        )
        if origin is not None:
            about.joinpath("direct_url.json").write_text(
                origin if isinstance(origin, str) else json.dumps(origin)
            )

    return add


@pytest.fixture
def checkout(tmp_path):
    for name in ("core", "trainer", "envs/gsm8k"):
        (tmp_path / "a clone/packages" / name).mkdir(parents=True)
    return tmp_path / "a clone/packages"


def folder(path, **info):
    return {"url": path.as_uri(), "dir_info": info}


def test_of_a_checkout_they_are_its_folders(install, checkout):
    install("verifiers", folder(checkout / "core", editable=True))
    assert install_line("verifiers", "math") == f"uv pip install -e '{checkout}/core[math]'"
    assert requirement("verifiers-trainer") == f"-e '{checkout}/trainer'"
    assert requirement("vf-gsm8k", "offline") == f"-e '{checkout}/envs/gsm8k[offline]'"


def test_of_a_copied_folder_they_copy(install, checkout):
    install("verifiers", folder(checkout / "core"))
    assert requirement("verifiers") == f"'{checkout}/core'"


@pytest.mark.parametrize("url", ["https://host/o/r.git", "https://me:canary@host/o/r.git"])
def test_of_git_they_are_the_commit_without_a_login(install, url):
    install("verifiers", GIT | {"url": url})
    assert requirement("verifiers", "math") == f"'verifiers[math] @ {AT}/core'"
    assert (
        requirement("verifiers-sandboxes", "e2b") == f"'verifiers-sandboxes[e2b] @ {AT}/sandboxes'"
    )
    assert requirement("vf-gsm8k") == f"'vf-gsm8k @ {AT}/envs/gsm8k'"


def test_of_an_archive_it_is_the_archive_while_it_is_there(install, tmp_path):
    wheel = tmp_path / "verifiers-0.2.0-py3-none-any.whl"
    wheel.touch()
    install("verifiers", {"url": wheel.as_uri(), "archive_info": {}})
    assert requirement("verifiers", "tui") == f"'verifiers[tui] @ {wheel.as_uri()}'"
    wheel.unlink()
    assert requirement("verifiers", "tui") == "'verifiers[tui]'"


def test_a_distribution_of_its_own_place_keeps_it(install, checkout):
    install("verifiers", GIT)
    install("verifiers-trainer", folder(checkout / "trainer", editable=True))
    assert requirement("verifiers-trainer", "trl") == f"-e '{checkout}/trainer[trl]'"


@pytest.mark.parametrize("origin", [None, "no JSON", "[]", {"url": "file:///gone", "dir_info": {}}])
def test_a_plain_name_is_printed_for_what_is_installed_only(install, origin):
    install("verifiers", origin)
    assert requirement("verifiers", "math") == "'verifiers[math]'"
    assert (
        requirement("verifiers-trainer")
        == "'verifiers-trainer @ git+REPOSITORY@main#subdirectory=packages/trainer'"
    )


def test_the_metadata_may_name_the_repository(install):
    install("verifiers", None, "Project-URL: Source, https://host/r")
    assert repository_url() == "https://host/r"
    assert (
        requirement("verifiers-trainer")
        == "'verifiers-trainer @ git+https://host/r@main#subdirectory=packages/trainer'"
    )


def test_the_repository_of_a_checkout_is_its_folder(install, checkout):
    install("verifiers", folder(checkout / "core", editable=True))
    assert repository_url() is None
    (checkout.parent / ".git").mkdir()
    assert repository_url() == checkout.parent.as_uri()


def test_the_repository_of_an_installation_from_git_is_that_one(install):
    install("verifiers", GIT)
    assert repository_url() == "https://host/o/r.git"


@pytest.mark.usefixtures("install")
def test_a_source_folder_that_is_not_installed_is_editable():
    origin = origin_of("verifiers")
    assert (origin.folder.name, origin.is_editable) == ("core", True)
    assert origin_of("verifiers-trainer") is None
    assert requirement("verifiers-trainer").endswith("/packages/trainer")
