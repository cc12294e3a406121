"""On a phone no page is wider than the screen; what is wide by nature scrolls within itself."""

from __future__ import annotations

from urllib.parse import quote

from support.browser import PHONE_WIDTH, too_wide


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
        assert phone.js("return innerWidth") == PHONE_WIDTH, name
        if elements := too_wide(phone):
            wide[name] = elements[:5]
    assert wide == {}


def test_a_wide_element_would_be_found(phone, served):
    """Negative control."""
    phone.open(served.url)
    phone.js("document.getElementById('main').append(document.createElement('hr'))")
    phone.js("document.querySelector('hr').style.width = '500px'")
    assert [name.split(" ")[0] for name in too_wide(phone)] == ["HR.null"]
