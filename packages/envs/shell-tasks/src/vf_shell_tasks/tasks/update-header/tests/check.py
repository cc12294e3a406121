from pathlib import Path

APP = Path("/app")

EXPECTED = {
    "README": "# Copyright (c) 2019 Old Name\n",
    "a.py": "# Copyright (c) 2019 New Name\nAUTHOR = 'Old Name'\n",
    "c.py": "print(1)\n# Copyright (c) 2019 Old Name\n",
    "deep/er/b.py": "# Copyright (c) 2024 New Name\n",
    "tool.py": "#!/usr/bin/env python3\n# Copyright (c) 2021 New Name\n# Copyright (c) 2021 Old Name\n",
}

folder = APP / "src"
found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
assert found == EXPECTED, found
