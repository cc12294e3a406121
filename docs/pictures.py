"""Write the pictures of the README and the guide from real runs.

    python docs/pictures.py curve outputs/quickstart     the learning curve of a finished `vf-train quickstart`
    python docs/pictures.py view                         the page of an evaluation with the local model, in Chromium
    python docs/pictures.py guide FOLDER                 the page of the training of the guide in that folder, too
    python docs/pictures.py tokens outputs/quickstart    a trained rollout of a finished `vf-train quickstart`, as above

``view``, ``guide`` and ``tokens`` need chromium and chromedriver on the path, and selenium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import verifiers as vf

FOLDER = Path(__file__).parent / "pictures"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --window-size=1200,760".split()
)


def copy_curve(run: Path) -> Path:
    """Copy the plot that the quickstart drew."""
    plot = run / "learning_curve.png"
    return Path(shutil.copy(plot, FOLDER / "quickstart.png"))


def photograph_view() -> Path:
    """Evaluate `small-tasks`, and save what a browser shows of the run."""
    with tempfile.TemporaryDirectory() as folder:
        env = vf.load_environment("small-tasks")
        path = f"{folder}/small-tasks"
        env.evaluate(
            "local",
            num_examples=8,
            rollouts_per_example=4,
            max_tokens=32,
            seed=0,
            results_path=path,
        )
        return _photograph(folder, "run/small-tasks", "view.png")


def photograph_tokens(run: Path) -> Path:
    """Save the page of the first rollout of a training's last step, its tokens coloured by their
    ratio."""
    step = max(
        int(file.stem.removeprefix("step-")) for file in (run / "completions").glob("step-*.jsonl")
    )
    return _photograph(str(run), f"training/{run.name}/{step}/0", "view-tokens.png", colour="ratio")


def _photograph(folder: str, address: str, name: str, colour: str | None = None) -> Path:
    """Open the viewer over a folder, go to an address, choose a colour of tokens, and save what a
    browser shows."""
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select, WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in FLAGS:
        options.add_argument(flag)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    picture = FOLDER / name
    driver = webdriver.Chrome(options=options, service=service)
    try:
        with vf.open_view(folder, browser=False) as view:
            driver.get(view.url)
            ready = "return Boolean(document.getElementById('main')?.dataset.ready)"
            WebDriverWait(driver, 30).until(lambda browser: browser.execute_script(ready))
            driver.get(f"{view.url}#/{address}")
            shown = f"return document.getElementById('main')?.dataset.ready == '#/{address}'"
            WebDriverWait(driver, 30).until(lambda browser: browser.execute_script(shown))
            assert "problem" not in driver.title, driver.title
            if colour is not None:
                Select(driver.find_element(By.CSS_SELECTOR, ".colours select")).select_by_value(
                    colour
                )
            driver.save_screenshot(str(picture))
    finally:
        driver.quit()
    return picture


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["curve", run]:
            copy_curve(Path(run))
        case ["view"]:
            photograph_view()
        case ["guide", folder]:
            _photograph(folder, "training/outputs%2Fletters", "guide.png")
        case ["tokens", run]:
            photograph_tokens(Path(run))
        case _:
            raise SystemExit(__doc__)
