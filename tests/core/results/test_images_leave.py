"""Images in everything that leaves a run: each export stands by itself, or names what it lacks."""

from __future__ import annotations

import json
import shutil

import pytest

import verifiers as vf
from verifiers.data.images import image_parts
from verifiers.legacy import saving
from verifiers.storage.images import IMAGES_NAME
from verifiers.testing import ScriptedClient

CONTENT = b"\x89PNG\r\n\x1a\n of a question"
ANSWER = b"GIF89a of a tool"
PART, ANSWER_PART = vf.image_part(CONTENT), vf.image_part(ANSWER)
CALL = vf.AssistantMessage("", tool_calls=[vf.ToolCall("c1", "look", {})])
NUM_ROWS = 3


def look() -> list[object]:
    """Look again."""
    return [{"type": "text", "text": "here"}, ANSWER_PART]


def evaluated(folder, client=None):
    rows = [
        {"prompt": [vf.UserMessage([{"type": "text", "text": f"{n}?"}, PART])], "info": {"n": n}}
        for n in range(NUM_ROWS)
    ]
    env = vf.ToolEnv(
        dataset=rows, tools=[look], rubric=vf.Rubric([lambda completion: float(len(completion))])
    )
    return env.evaluate(
        client or ScriptedClient([CALL, "red"] * NUM_ROWS),
        "m",
        num_examples=-1,
        results_path=folder,
        state_columns=["trajectory"],
        max_concurrent=1,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "run"
    evaluated(folder)
    return folder


def saved_as(name):
    def way(results, folder):
        results.save(folder / name)
        return vf.load_results(folder / name)

    return way


def trajectories(results, folder):
    results.to_atif(folder / "atif")
    return vf.load_results(folder / "atif")


def trajectories_in_memory(results, folder):
    for number, document in enumerate(results.to_atif()):
        (folder / f"{number}.json").write_text(json.dumps(document))
    return vf.load_results(folder)


def older_lines(results, folder):
    saving.save_outputs(results.outputs, folder)
    return vf.load_results(folder)


def copied(results, folder):
    shutil.copytree(results.metadata.path_to_save, folder / "copy")
    return vf.load_results(folder / "copy")


READ_AGAIN = {
    "lines": saved_as("rows.jsonl"),
    "parquet": saved_as("rows.parquet"),
    "folder": saved_as("folder"),
    "trajectories": trajectories,
    "trajectories in memory": trajectories_in_memory,
    "older lines": older_lines,
    "copy": copied,
}
TABLES = {
    "csv": lambda results, folder: results.save(folder / "a.csv") or (folder / "a.csv").read_text(),
    "dataset": lambda results, folder: json.dumps(results.to_dataset().to_list()),
    "arrow": lambda results, folder: str(results.to_arrow().to_pylist()),
    "pandas": lambda results, folder: results.to_pandas().to_json(),
    "polars": lambda results, folder: str(results.to_polars().to_dicts()),
    "make_dataset": lambda results, folder: json.dumps(vf.make_dataset(results).to_list()),
}


def urls(outputs):
    return [
        [part["image_url"]["url"] for part in image_parts([*row["prompt"], *row["completion"]])]
        for row in outputs
    ]


EXPECTED = [[PART["image_url"]["url"], ANSWER_PART["image_url"]["url"]]] * NUM_ROWS


def test_a_run_stores_each_image_once_and_reads_it_again(run):
    assert len(list((run / IMAGES_NAME).iterdir())) == 2
    assert b"base64" not in (run / "results.jsonl").read_bytes()
    results = vf.load_results(run)
    assert urls(results.outputs) == EXPECTED
    for output, state in zip(results.outputs, results["states"], strict=True):
        assert urls([{"prompt": state["trajectory"][1]["prompt"], "completion": []}]) == urls(
            [output]
        )


@pytest.mark.parametrize("way", READ_AGAIN)
def test_what_is_read_again_has_its_images_without_the_run(run, tmp_path, way):
    shutil.copytree(run, tmp_path / "run")
    results = vf.load_results(tmp_path / "run")
    (tmp_path / "out").mkdir()
    results.metadata["path_to_save"] = tmp_path / "run"
    again = READ_AGAIN[way](results, tmp_path / "out")
    shutil.rmtree(tmp_path / "run")
    assert urls(again.outputs) == EXPECTED
    assert [row["prompt"] for row in again.outputs] == [row["prompt"] for row in results.outputs]
    assert again["reward"] == results["reward"]


@pytest.mark.parametrize("way", TABLES)
def test_a_table_has_the_images(run, tmp_path, way):
    text = TABLES[way](vf.load_results(run), tmp_path)
    assert text.replace("\\/", "/").count(PART["image_url"]["url"]) >= NUM_ROWS
    assert f"{IMAGES_NAME}/" not in text.replace("\\/", "/")


@pytest.mark.parametrize("way", [*READ_AGAIN.keys() - {"copy"}, *TABLES])
def test_no_export_leaves_without_an_image_that_is_lost(run, tmp_path, way):
    shutil.copytree(run, tmp_path / "run")
    (lost,) = (tmp_path / "run" / IMAGES_NAME).glob("*.gif")
    lost.unlink()
    results = vf.load_results(tmp_path / "run")
    assert results["reward"] == vf.load_results(run)["reward"]
    (tmp_path / "out").mkdir()
    with pytest.raises(vf.JournalError, match=f"lacks its image images/{lost.name}"):
        (READ_AGAIN | TABLES)[way](results, tmp_path / "out")


def test_trajectories_in_a_folder_name_the_files_of_their_images(run, tmp_path):
    vf.load_results(run).to_atif(tmp_path / "atif")
    document = json.loads((tmp_path / "atif/000000.json").read_text())
    image = document["steps"][0]["message"][1]
    assert image["source"]["media_type"] == "image/png"
    assert (tmp_path / "atif" / image["source"]["path"]).read_bytes() == CONTENT
    answer = document["steps"][1]["observation"]["results"][0]["content"][1]
    assert (tmp_path / "atif" / answer["source"]["path"]).read_bytes() == ANSWER
    assert b"base64" not in (tmp_path / "atif/000000.json").read_bytes()


def test_a_large_run_reads_its_images_when_they_are_asked_for(run, monkeypatch):
    monkeypatch.setattr("verifiers.results.loading.LARGE_BYTES", 1)
    results = vf.load_results(run)
    assert type(results).__name__ == "StoredOutputs"
    assert urls(results.rollouts()) == EXPECTED
    assert urls([results.at(2)]) == EXPECTED[:1]


def test_a_resumed_run_has_the_images_and_generates_only_what_is_pending(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    lines = (tmp_path / "run/results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run/results.jsonl").write_text("".join(lines[:-1]))
    (tmp_path / "run/metadata.json").unlink()
    client = ScriptedClient([CALL, "red"])
    results = evaluated(tmp_path / "run", client)
    assert results.metadata["resumed"] == NUM_ROWS - 1
    assert urls(results.outputs) == EXPECTED
    assert len(client.requests) == 2
