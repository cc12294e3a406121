import os
import shutil
import subprocess
from pathlib import Path

APP = Path("/app")

REPOSITORY = Path("/app/shop/.git")
# In place of the repository's own settings, which can name programs for git to run.
SETTINGS = "[core]\n\trepositoryformatversion = 0\n\tbare = true\n"


def git(*words):
    variables = {"PATH": os.environ["PATH"], "GIT_DIR": "/tmp/checked.git"}
    variables |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
    variables |= {"GIT_NO_REPLACE_OBJECTS": "1", "GIT_GRAFT_FILE": "/dev/null"}
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, env=variables).stdout


assert REPOSITORY.is_dir() and not REPOSITORY.is_symlink()
shutil.copytree(REPOSITORY, "/tmp/checked.git", symlinks=True)
for name in ("hooks", "config", "config.worktree", "commondir"):
    shutil.rmtree(f"/tmp/checked.git/{name}", ignore_errors=True)
    Path(f"/tmp/checked.git/{name}").unlink(missing_ok=True)
Path("/tmp/checked.git/config").write_text(SETTINGS)

assert (REPOSITORY / "HEAD").read_text() == "ref: refs/heads/main\n"
parents = [line.split()[1] for line in git("cat-file", "commit", "refs/heads/main").splitlines() if line[:7] == "parent "]
assert parents == ["a5a1a23e9a3792d0a1e0a5582562c991c988301a", "7c85e1d3732ed862d69988ae7e124c61e5394de3"], parents
assert git("ls-tree", "-r", "--name-only", "refs/heads/main").split() == ["list.txt"]
assert git("cat-file", "blob", "refs/heads/main:list.txt") == "apple 3\nbread 5\ncheese 9\nhoney 7\n"
assert (APP / "shop" / "list.txt").read_text() == "apple 3\nbread 5\ncheese 9\nhoney 7\n"
