"""In a real notebook kernel an evaluation shows a progress bar that ends full, and its results show
themselves."""

import nbformat
from nbclient import NotebookClient

from verifiers.runs.notebook import in_notebook, with_notebook_progress
from verifiers.runs.options import RunOptions

CELL = """
import verifiers as vf
from verifiers.testing import ScriptedClient

def right(completion, answer):
    return float(completion[-1].content == answer)

rows = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(4)]
env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([right]))
results = await env.evaluate(ScriptedClient("2"), "m", rollouts_per_example=2%s)
results
"""


def html_of(cell):
    return [
        output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})
    ]


def test_a_cell_shows_the_bar_and_the_results():
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell(CELL % ""),
        nbformat.v4.new_code_cell(CELL % ", on_progress=lambda outputs, metadata: None"),
    ]
    NotebookClient(notebook, timeout=120).execute()
    bar, table = html_of(notebook.cells[0])
    assert bar.startswith("<progress value='8' max='8'></progress> 8 of 8 rollouts, reward 0.25")
    assert "<th style='text-align:left'>reward</th>" in table
    (only,) = html_of(notebook.cells[1])  # a caller with a display of its own gets no second one
    assert only == table


def test_outside_a_notebook_nothing_changes():
    options = RunOptions()
    assert not in_notebook()
    assert with_notebook_progress(options) is options
