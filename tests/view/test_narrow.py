"""On a phone no page is wider than the screen; what is wide by nature scrolls within itself."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest

WIDTH = 390


@pytest.fixture
def phone(page) -> Iterator[object]:
    """The browser with the screen of a phone."""
    screen = {"width": WIDTH, "height": 844, "deviceScaleFactor": 2, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    page.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    yield page
    page.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": False})
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def too_wide(page) -> list[str]:
    """Elements that reach over the edge of the screen and do not lie in one that scrolls."""
    return page.js("""
        const scrolls = (e) => e && (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(e).overflowX)
            || scrolls(e.parentElement));
        return [...document.querySelectorAll("body *")]
            .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement))
            .map((e) => `${e.tagName}.${e.getAttribute("class")} ${Math.round(e.getBoundingClientRect().right)}`);
    """)


def test_no_page_is_wider_than_a_phone(phone, served):
    runs = [run["id"] for run in served.ask("runs")["runs"]]
    evaluations = [run for run in runs if run != "learner"]
    first, second = (quote(run, safe="") for run in evaluations[:2])
    addresses = {
        "runs": "",
        "run": f"#/run/{first}",
        "examples": f"#/run/{first}?view=examples",
        "rollout": f"#/run/{first}/0",
        "compare": f"#/compare/{first}/{second}",
        "pair": f"#/compare/{first}/{second}/0",
        "compared": "#/compared/" + "/".join(quote(run, safe="") for run in evaluations[:3]),
        "training": "#/training/learner",
        "trained": "#/training/learner/4/0",
        "curves": "#/curves/learner",
    }
    wide = {}
    for name, address in addresses.items():
        phone.open(served.url + address)
        phone.picture(f"phone-{name}")
        assert phone.js("return innerWidth") == WIDTH, name
        if found := too_wide(phone):
            wide[name] = found[:5]
    assert wide == {}


def test_a_wide_element_would_be_found(phone, served):
    """Negative control."""
    phone.open(served.url)
    phone.js("document.getElementById('main').append(document.createElement('hr'))")
    phone.js("document.querySelector('hr').style.width = '500px'")
    assert [name.split(" ")[0] for name in too_wide(phone)] == ["HR.null"]
