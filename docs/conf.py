"""The documentation site, built by `make docs` from the pages that are also read as plain Markdown.

The source folder is the root of the repository, so that links between pages are the same here and there.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import bespoke

ROOT = Path(__file__).resolve().parents[1]
INDEX = "docs/index"
LISTS = ("docs/methods/README", "docs/results/README")

project = "bespoke"
author = "The bespoke developers"
copyright = author
release = version = bespoke.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = INDEX
include_patterns = ["docs/**", "*.md", "results/*.md", "benchmarks/*.md"]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "runs",
    "data-cache",
    "src",
    "tests",
    "examples",
    "experiments",
    "**/__pycache__",
]

html_theme = "furo"
html_title = f"bespoke {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_front.html"}
templates_path = ["templates"]
html_copy_source = False
smartquotes = False

myst_heading_anchors = 3
myst_url_schemes = ["http", "https"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
toc_object_entries_show_parents = "hide"
nitpicky = True
# Types of other projects, and ours that nobody makes by hand, are shown in signatures and lead nowhere.
INTERNAL = ("core.local.Strategy", "report.units.Unit", "runs.federation.Federation")
INTERNAL += ("report.page.parts.Live", "report.page.parts.Page")
nitpick_ignore = [("py:class", f"bespoke.{name}") for name in INTERNAL]
nitpick_ignore_regex = [(r"py:.*", r"(?!bespoke\.).*")]


def with_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give the lists of pages a table of contents each, for the site's side bar: the index one by section."""
    if docname == INDEX:
        first, *sections = re.split(r"^## ", source[0], flags=re.MULTILINE)
        source[0] = first + "".join(
            f"## {section}\n{_contents(docname, r'^- ', section, ':caption: ' + section.partition(chr(10))[0])}"
            for section in sections
        )
    elif docname in LISTS:
        source[0] += _contents(docname, "", source[0])


def with_titles(app: Sphinx, docname: str, source: list[str]) -> None:
    """Show the title of a page where a link shows the name of its file."""
    source[0] = re.sub(r"\[[\w/]+\.md\]\((?=[^)]+\.md[)#])", "[](", source[0])


def _contents(docname: str, before: str, text: str, caption: str = "") -> str:
    """A hidden table of contents of the pages that a text links to."""
    links = re.findall(before + r"\[([^\]]+)\]\(([^)#]+)(?:#[^)]*)?\)", text, flags=re.MULTILINE)
    folder = (ROOT / docname).parent
    pages = {title: (folder / target).resolve().relative_to(ROOT).with_suffix("") for title, target in links}
    own = [
        f"{title} </{page}>" for title, page in pages.items() if docname == INDEX or page.parent == Path(docname).parent
    ]
    return "\n".join(["\n```{toctree}", ":hidden:", caption, "", *own, "```", "", ""])


def as_rest(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Turn a docstring, which is Markdown, into reStructuredText: its tables, and signs that mean something there."""
    found = []
    for line in lines:
        if not line.startswith("|"):
            found.append(_text(line))
        elif not set(line) <= set("|- "):
            if not (found and found[-1].startswith("     -")):
                found += [".. list-table::", "   :header-rows: 1", ""]
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            marks = ["   * -", *["     -"] * (len(cells) - 1)]
            found += [f"{mark} {_text(cell.strip())}" for mark, cell in zip(marks, cells, strict=True)]
    lines[:] = found


def _text(line: str) -> str:
    """A line of Markdown as reStructuredText: code is code, roles stay, and other signs are themselves."""
    code = re.compile(r"(:\w+:`[^`]+`|`+[^`]+`+)")
    found = []
    for part in code.split(line):
        if not code.fullmatch(part):
            part = re.sub(r"[\\*|]|_(?!\w)", r"\\\g<0>", part)
        elif part.startswith("`"):
            part = f"``{part.strip('`')}``"
        found.append(part)
    return "".join(found)


class FoldersByName(SphinxTransform):
    """Show a link to a folder of the repository, which a site cannot show, as the folder's name."""

    default_priority = 5

    def apply(self) -> None:
        page = Path(self.env.doc2path(self.env.docname)).parent
        for link in list(self.document.findall(nodes.Element)):
            target = link.get("reftarget") or link.get("refuri") or ""
            if link.parent is None or not target or "://" in target:
                continue
            path = (page / target).resolve()
            if path.is_dir() and path.is_relative_to(ROOT):
                name = str(path.relative_to(ROOT))
                shown = [nodes.literal(text=name)]
                if link.astext() != name:
                    shown = [*link.children, nodes.Text(" ("), *shown, nodes.Text(")")]
                link.replace_self(shown)


def setup(app: Sphinx) -> None:
    """Connect the changes that the site makes to pages and docstrings."""
    app.connect("source-read", with_contents)
    app.connect("source-read", with_titles)
    app.connect("autodoc-process-docstring", as_rest)
    app.add_transform(FoldersByName)
