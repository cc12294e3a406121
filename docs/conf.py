"""The documentation as a site: ``sphinx-build -b html docs docs/_site``. Needs the group ``docs``
and no network.

The pages are the Markdown files of this folder, the navigation is read from the tables of the index
pages. The build generates ``reference/api`` from the docstrings of every module; it is not under
version control.
"""

import re
from importlib import metadata
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "packages/core/src/verifiers",
    "packages/agents/src/verifiers_agents",
    "packages/integrations/src/verifiers_integrations",
    "packages/trainer/src/verifiers_trainer",
    "packages/sandboxes/src/verifiers_sandboxes",
)

project = "verifiers"
copyright = "the verifiers authors"
release = metadata.version("verifiers")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.apidoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"verifiers {release}"
exclude_patterns = ["_site", "*.py"]

myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing", "autodoc", "ref.python", "docutils"]

apidoc_modules = [
    {
        "path": ROOT / source,
        "destination": f"reference/api/{Path(source).name}",
        "exclude_patterns": ["**/templates/**", "**/guest/**"],
        "automodule_options": {"members", "show-inheritance"},
    }
    for source in PACKAGES
]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = [
    "deepspeed",
    "liger_kernel",
    "ray",
    "textual",
    "sandlock",
    "gymnasium",
    "textarena",
    "mcp",
]


def _navigation(_app, page, source):
    """Build the site's navigation from the pages that an index links to, grouped by
    its headings."""
    if page not in ("index", "reference/index", "integrations/index"):
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE):
        heading, links = (
            section.split("\n", 1)[0].lstrip("# "),
            re.findall(r"\]\(([\w/.-]+)\.md\)", section),
        )
        if links:
            source[0] += (
                "\n```{toctree}\n:hidden:\n:caption: "
                + "\n".join([heading, "", *links])
                + "\n```\n"
            )
    # links, not navigation: a tree of every module would be built for every page
    if page == "reference/index":
        source[0] += "\n## Docstrings\n\n"
        source[0] += "".join(
            f"* {{doc}}`{Path(name).name} <api/{Path(name).name}/modules>`\n" for name in PACKAGES
        )


def _hidden_comments(_app, doctree):
    """Remove HTML comments, which are directives for the tests of the pages."""
    for comment in [*doctree.findall(nodes.comment), *doctree.findall(nodes.raw)]:
        if comment.astext().lstrip().startswith("<!--") or isinstance(comment, nodes.comment):
            comment.parent.remove(comment)


def setup(app):
    app.connect("source-read", _navigation)
    app.connect("doctree-read", _hidden_comments)
