"""The documentation site builds without a warning, its links lead somewhere, and every name one may use is in it."""

import importlib
import inspect
import os
import pkgutil
import pydoc
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import bespoke

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.xdist_group("site")  # one build for all


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built in a process of its own with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    words = ["--quiet", "--fail-on-warning", "--keep-going", "--nitpicky", "-c", "docs", "-d", str(folder / "trees")]
    env = os.environ | {"PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m", "sphinx", *words, str(ROOT), str(folder / "html")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        self.links += [given[key] for key in ("href", "src") if given.get(key)]


def dead_links(folder):
    """The links to a file or an anchor that is not there, each with its page."""
    pages = {path.resolve(): Page(path) for path in folder.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else None
            if not target.is_file() or (
                parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors
            ):
                dead.append(f"{path.name}: {link}")
    return dead


def test_every_link_leads_somewhere(site):
    assert len(list(site.rglob("*.html"))) > 70
    assert dead_links(site) == []


def test_dead_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<p id="x"></p><a href="b.html#y"><a href="c.html"><a href="#x"><a href="#z">')
    (tmp_path / "b.html").write_text('<h1 id="y"></h1><a href="a.html#n"><img src="no.png"><a href="https://x.y/z">')
    assert sorted(dead_links(tmp_path)) == ["a.html: #z", "a.html: c.html", "b.html: a.html#n", "b.html: no.png"]


@pytest.fixture(scope="module")
def entries(site):
    """The names that the reference explains."""
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    return {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}


def taught(text):
    """The names below `bespoke` that a page or a program uses, other than modules, each with what it leads to.

    They are imported, written in full, or follow the name of an imported module, as in `page.write`.
    """
    names, modules = set(re.findall(r"\bbespoke(?:\.\w+)+", text)), {}
    for module, given in re.findall(r"\bfrom (bespoke[\w.]*) import (\([^)]*\)|[\w, ]+)", text):
        for name, alias in re.findall(r"(\w+)(?: as (\w+))?", given):
            names.add(f"{module}.{name}")
            modules[alias or name] = f"{module}.{name}"
    for short, full in modules.items():
        if inspect.ismodule(pydoc.locate(full)):
            names |= {f"{full}.{name}" for name in re.findall(rf"(?<![\w./]){short}\.(\w+)", text)}
    found = {name: pydoc.locate(name) for name in names}
    return {name: value for name, value in found.items() if value is not None and not inspect.ismodule(value)}


def test_every_public_name_has_an_entry(entries):
    public = {f"bespoke.{name}" for name in bespoke.__all__}
    for found in pkgutil.walk_packages(bespoke.__path__, "bespoke."):
        if found.ispkg and hasattr(module := importlib.import_module(found.name), "__all__"):
            public |= {f"{found.name}.{name}" for name in module.__all__ if name not in bespoke.__all__}
    assert len(public) > 100
    assert public - entries == set()


def test_every_name_that_a_page_or_an_example_uses_has_an_entry(entries):
    """Also by another name that leads to the same: `bespoke.models.ModelSettings` is `bespoke.ModelSettings`."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py")]
    used = {name: value for path in paths for name, value in taught(path.read_text(encoding="utf-8")).items()}
    known = {id(value) for entry in entries if (value := pydoc.locate(entry)) is not None}
    assert len(used) > 80
    assert {name for name, value in used.items() if name not in entries and id(value) not in known} == set()


def test_names_are_found_in_every_form():
    text = (
        "from bespoke.report import page, find_runs as f\nfrom bespoke.report.page import (\n  live,\n)\npage.write(1)"
    )
    text += "\n`live.beside`, `bespoke.tree.map(f, t)`, page/live.py, and bespoke.lock and live.nothing, which are none"
    names = ("report.find_runs", "report.page.write", "report.page.live.beside", "tree.map")
    assert taught(text).keys() == {f"bespoke.{name}" for name in names}


def test_generated_tables_are_fresh():
    pages = runpy.run_path(str(ROOT / "docs" / "generated.py"))["pages"]()
    assert len(pages) == 3
    stale = [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run python docs/generated.py"
