import os
import shutil
import subprocess
from pathlib import Path

APP = Path("/app")

REPOSITORY = Path("/app/notes/.git")
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

ids = git("rev-list", "refs/heads/main").split()
assert len(ids) == 6, "there must be one commit more than before"
assert ids[1] == "10bf25ffc5a0777606fa600741689d81b2dec67a", "the earlier commits were rewritten"
assert (REPOSITORY / "HEAD").read_text() == "ref: refs/heads/main\n"
assert git("cat-file", "commit", "refs/heads/main").split("\n\n", 1)[1].strip() == "Restore recipe"
tree = {line.split("\t")[1] for line in git("ls-tree", "-r", "refs/heads/main").splitlines()}
assert tree == {"diary.txt", "recipe.txt"}, tree
assert git("cat-file", "blob", "refs/heads/main:recipe.txt") == "flour\nwater\na little salt\n"
assert git("cat-file", "blob", "refs/heads/main:diary.txt") == "day one\nday two\n"
assert (APP / "notes" / "recipe.txt").read_text() == "flour\nwater\na little salt\n"
