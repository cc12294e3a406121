"""How the page draws what was written: Markdown, formulas, grids, turns, links, and what a copy of
it holds."""

from __future__ import annotations

import json
import random

import pytest

from support import view_runs

RUN = "#/run/evals%2Fareas--writer%2F11bb22cc"


@pytest.fixture(scope="module")
def areas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("areas")
    view_runs.prose_run(folder)
    return folder


def test_markdown_formulas_and_grids_are_drawn(page, serve, areas):
    page.open(serve(areas).url + RUN + "/0")
    page.wait_text("rollout begins")
    page.picture("drawn")
    assert page.texts(".drawn [role=heading]") == ["Plan"]
    assert page.texts(".drawn strong") == ["area", "point"]
    assert page.texts(".drawn td") == ["a", "1.5"]
    assert page.texts(".drawn pre")[0].startswith("def area(a, h):\n    return")
    assert page.texts(".drawn .grid-text") == ["# . #\n. O .\n# . #"]
    assert "it costs $5 and $10." in page.texts(".drawn")[1]
    assert page.count(".drawn math mfrac") == 2
    assert page.count(".drawn math[display=block]") == 1
    assert "\\unknowncommand" in page.texts(".drawn code.formula")[0]


def test_what_is_copied_and_searched_is_what_was_written(page, serve, areas):
    page.open(serve(areas).url + RUN + "/0")
    page.wait_text("rollout begins")
    copied = """
        const box = document.querySelectorAll('.prose')[1], range = document.createRange();
        const event = new ClipboardEvent('copy', {clipboardData: new DataTransfer(), bubbles: true, cancelable: true});
        range.setStart(box.querySelector('strong').firstChild, 1);
        const end = box.querySelector('code').firstChild;
        range.setEnd(end, 3);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        box.dispatchEvent(event);
        return event.clipboardData.getData('text/plain');"""
    assert page.js(copied) == r"rea** is $\frac{1}{2} a h$, so *both* `sid"
    page.press("v")  # as written
    assert page.texts(".prose")[1].startswith("# Plan\n\nThe **area** is $\\frac{1}{2} a h$")
    assert page.count(".prose strong, .prose math") == 0
    page.press("v")
    assert page.count(".prose strong") == 2
    # drawn, the searched text would be hidden
    page.open(serve(areas).url + RUN + "/0?q=area**%20is")
    page.wait(lambda: page.texts(".prose mark") == ["area** is"])


def test_turns_are_outlined_with_their_rewards_and_a_link_opens_a_sibling(page, serve, areas):
    server = serve(areas)
    page.open(server.url + RUN + "/example/0/1")
    page.wait_text("2 of 2")
    rows = server.ask("columns?run=evals%2Fareas--writer%2F11bb22cc")["columns"]
    assert "example 0.1" in page.text(".pager")
    assert rows["sibling"][1] == 1
    assert [line.split("\n")[-1] for line in page.texts(".outline button")] == ["0.250", "1"]
    page.find(".outline li:nth-child(2) button").click()
    assert page.js("return document.activeElement.dataset.turn") == "2"
    page.js(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async (text) =>"
        " (window.kept = text)}})"
    )
    page.find(".pager .quiet").click()
    assert page.js("return window.kept") == server.url + RUN.replace("%2F", "%2F") + "/example/0/1"
    page.driver.get("about:blank")
    page.driver.get(server.url + RUN + "/example/0/7")
    page.wait_text("no rollout 7 of example 0 is saved here")


DRAW = """
    const [texts, done] = arguments;
    import('/static/markdown.js').then(async ({ markdown, selected }) => {
      const tags = new Set(), wrong = [], names = new Set();
      for (const text of texts) {
        await new Promise((next) => setTimeout(next)); // so many formulas are drawn at once, no more
        const box = document.createElement('div');
        box.append(...markdown(text));
        document.body.append(box);
        for (const element of box.querySelectorAll('*')) {
          tags.add(element.localName);
          for (const { name } of element.attributes) names.add(name);
        }
        const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
        for (let node = walker.nextNode(); node; node = walker.nextNode()) {
          const range = document.createRange();
          range.selectNodeContents(node);
          const source = selected(box, range, text)?.replaceAll('\\r', ' ') ?? null; // ends a line
          const isDrawn = node.parentElement.closest('span.formula, .control');
          if (source === null || isDrawn || source === node.data) continue;
          wrong.push(JSON.stringify([text, node.data, source]));
        }
        box.remove();
      }
      done({ tags: [...tags], names: [...names], wrong });
    }).catch((error) => done({ error: String(error.stack) }));"""
PIECES = [
    *(
        "# ",
        "> ",
        "- ",
        "1. ",
        "  ",
        "    ",
        "\n",
        "\n\n",
        "*",
        "**",
        "***",
        "_",
        "`",
        "```",
        "~~",
        "$",
        "$$",
        "a",
        " ",
    ),
    *(
        "\\(",
        "\\)",
        "\\[",
        "\\]",
        "|",
        "---",
        "|---|",
        "[x](https://evil.example)",
        "![y](https://evil.example/z)",
        "&",
    ),
    *(
        "\\frac{a}{b}",
        "x^2",
        "{",
        "}",
        "word",
        "<b onclick=x>",
        "<script>window.owned=6</script>",
        "\x1b",
        "\u202e",
    ),
    *(
        "\U0001f600",
        "\\begin{cases}",
        "\\end{cases}",
        "\\text{<img src=x onerror=window.owned=7>}",
        "\\left(",
        "\\\\",
    ),
    *(
        "\r\n",
        "\t",
        "\\|",
        "\\*",
        "\na|b\n-|-\n",
        "`` ` ``",
        "&lt;",
        "<https://evil.example/a>",
        "\n[x]: https://evil.example\n",
        "$\\href{https://evil.example}{x}$",
        "$\\includegraphics{https://evil.example/y.png}$",
        "$\\htmlClass{owned}{x}$",
        "$\\htmlStyle{position:fixed}{x}$",
        "$\\vec v \\pmb{x} \\fcolorbox{red}{blue}{y}$",
        "$\\boxed{\\rule{900em}{900em}\\kern-900em}$",
        "$\\def\\a{\\a\\a}\\a$",
    ),
]
DRAWN_TAGS = set(
    "p ul ol li blockquote hr pre code figure figcaption span small button table thead tbody tr th"
    " td div em strong del".split()
)
KATEX_TAGS = set(
    "math semantics annotation mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder"
    " mover munderover mtable mtr mtd mstyle mpadded mphantom menclose svg path line".split()
)
DRAWN_ATTRIBUTES = set("class title role type start aria-level".split())
KATEX_ATTRIBUTES = set(
    "style aria-hidden encoding xmlns d display displaystyle scriptlevel stretchy fence accent"
    " accentunder separator lspace rspace voffset width height minsize maxsize movablelimits"
    " linethickness mathvariant mathsize mathcolor mathbackground notation columnalign"
    " columnspacing rowspacing columnlines rowlines viewBox preserveAspectRatio x1 x2 y1 y2"
    " stroke-width linebreak".split()
)


def test_no_text_makes_an_element_that_acts_and_each_node_knows_its_source(page, serve, areas):
    page.open(serve(areas).url)
    chance = random.Random(0)
    texts = ["".join(chance.choices(PIECES, k=chance.randint(1, 40))) for _ in range(600)] + [
        view_runs.PROSE
    ]
    drawn = page.driver.execute_async_script(DRAW, texts)
    assert "error" not in drawn, drawn
    assert drawn["wrong"] == []
    # negative control
    assert {"math", "mfrac", "blockquote", "ol", "table", "strong", "code"} <= set(drawn["tags"])
    assert set(drawn["tags"]) - DRAWN_TAGS <= KATEX_TAGS
    assert set(drawn["names"]) - DRAWN_ATTRIBUTES <= KATEX_ATTRIBUTES
    assert page.count(".owned") == 0
    assert page.js("return window.owned") is None
    asked = page.js("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert not [name for name in asked if "evil.example" in name]


TIME = """
    const [texts, done] = arguments;
    import('/static/markdown.js').then(({ markdown }) => done(texts.map((text) => {
      const started = performance.now();
      markdown(text);
      return performance.now() - started;
    }))).catch((error) => done(String(error.stack)));"""


def test_text_that_was_written_to_stop_the_page_is_drawn(page, serve, areas):
    """Each text costs the square of its length in a careless parser: minutes instead of
    milliseconds."""
    page.open(serve(areas).url)
    size = 100_000
    units = [
        "*a ",
        "`",
        "[",
        "$x",
        "$$\n",
        "> ",
        "- ",
        "#" * 7,
        "\\left(",
        "_a",
        "|-",
        "[a](https://",
    ]
    texts = [unit * (size // len(unit)) for unit in units]
    shown_at_once = 20_000
    more_units = [
        "![",
        "~~a ",
        "- a\n  ",
        "a|b\n-|-\n",
        "**a *b ",
        "x\n---\n",
        "\\[\n",
        "$\\vec{" + "\\frac{a}{" * 80 + "b}$ ",
        "$" + "\\sqrt{" * 200 + "}" * 200 + "$ ",
        "$\\begin{matrix}" + "&" * 190 + "\\end{matrix}$ ",
        "$\\def\\a{\\b\\b}\\def\\b{\\c\\c}\\def\\c{\\a\\a}\\a$ ",
    ]
    texts += [unit * (shown_at_once // len(unit)) for unit in more_units]
    texts += [
        "# " + "#" * size + "x",
        "```" + "a" * size + "`",
        " " * size + "x-|\n" + "-" + " " * size + "x",
    ]
    page.driver.set_script_timeout(60)
    drawn = page.driver.execute_async_script(TIME, texts)
    assert not isinstance(drawn, str), drawn
    print(json.dumps([round(ms) for ms in drawn]))
    assert max(drawn) < 10_000
