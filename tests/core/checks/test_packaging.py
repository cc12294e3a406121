"""A file that an environment opens, and that a wheel of its project would lack, is found."""

import importlib
import json

import pytest

import verifiers as vf


@pytest.mark.parametrize(
    ("opened", "package_data", "expected"),
    [
        ("package/rows/rows.json", '["**/*"]', None),  # what vf-init writes
        ("package/rows/rows.json", '["rows/*.json"]', None),
        ("package/rows/rows.json", '["*.txt"]', '"{name}" = ["rows/*.json"]'),
        ("package/rows/rows.json", "[]", '"{name}" = ["rows/*.json"]'),
        ("rows.json", '["**/*"]', "move it into"),
    ],
)
@pytest.mark.parametrize("when", ["import", "load", "rows"])
def test_a_data_file_that_a_wheel_would_lack_is_found_with_the_line_that_brings_it(
    tmp_path, monkeypatch, opened, package_data, expected, when
):
    name = f"words_{when}_{abs(hash((opened, package_data)))}"
    file = tmp_path / opened.replace("package", name)
    (tmp_path / name).mkdir()
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps([{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(9)]))
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nname = "words"\n[tool.setuptools.package-data]\n{name} = {package_data}\n'
    )
    # a name that is put together is seen when a file of the package is opened, after the import
    is_written = when == "import" or file.parent == tmp_path
    text = f'"{file.name}"' if is_written else '"rows" + ".json"'
    folder = "Path(__file__).parent" + ("" if file.parent == tmp_path / name else ".parent")
    folder = 'Path(__file__).parent / "rows"' if file.parent.name == "rows" else folder
    read = f"json.loads(({folder} / ({text})).read_text())"
    (tmp_path / name / "__init__.py").write_text(
        "import json\nfrom pathlib import Path\n\nimport verifiers as vf\n\n"
        + (f"ROWS = {read}\n" if when == "import" else f"def read():\n    return {read}\n")
        + "def right(completion, answer):\n    return float(completion[-1].content == answer)\n"
        + "def load_environment():\n    return vf.SingleTurnEnv(dataset="
        + {"import": "ROWS", "load": "read()", "rows": "read"}[when]
        + ", rubric=vf.Rubric([right]))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loader = importlib.import_module(name).load_environment
    findings = [
        f for f in vf.check_environment(loader).warnings if f.code == "data-file-not-in-wheel"
    ]
    if expected is None:
        assert findings == []
    else:
        (finding,) = findings
        assert str(file.relative_to(tmp_path)) in finding.message
        assert expected.format(name=name) in finding.fix
