"""Task folders in Harbor's format, written for a test."""

from pathlib import Path

IMAGE = "debian:bookworm"
TEST = """#!/bin/bash
if [ "$(cat /app/out.txt 2>/dev/null)" = right ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(folder: Path, toml: str = "", **files: str) -> Path:
    """A task that wants the text "right" in ``/app/out.txt``; ``files`` (``a__b`` for ``a/b``)
    replace its files."""
    content = {
        "task.toml": toml,
        "instruction.md": "Write right to /app/out.txt.\n",
        "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nCOPY start.txt /app/\n",
        "environment/start.txt": "start\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": "#!/bin/bash\necho right > /app/out.txt\n",
    }
    contents = {
        "test": "tests/test.sh",
        "solution": "solution/solve.sh",
        "dockerfile": "environment/Dockerfile",
    }
    content |= {
        contents.get(name, name.replace("__", "/").replace("_txt", ".txt")): text
        for name, text in files.items()
    }
    for name, text in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
