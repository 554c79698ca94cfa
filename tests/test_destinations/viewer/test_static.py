"""The page's modules as text: no HTML from strings, one module that fetches, and valid imports."""

import re
import tomllib
from pathlib import Path

import pytest

import destinations.viewer

STATIC = Path(destinations.viewer.__file__).parent / "static"
MODULES = {path.name: path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("*.js"))}
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";$', re.MULTILINE)
TESTED = re.compile(
    r'const \{([^}]*)\} = await import\(\s*"[./]*destinations/viewer/static/([\w-]+\.js)"\s*\)'
)
PAGE_TESTS = Path(__file__).parents[2] / "page"
COMMENT = re.compile(r"/\*.*?\*/|^\s*//.*$", re.DOTALL | re.MULTILINE)
MARKUP = r"innerHTML|outerHTML\s*=|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc|\beval\(|new Function"


def exports(source):
    """The names that a module exports."""
    return set(re.findall(r"^export (?:async )?(?:function|const|class) (\w+)", source, re.MULTILINE))


@pytest.mark.parametrize("name", MODULES)
def test_no_text_becomes_markup_or_code(name):
    """Nothing parses a string as HTML or as a script."""
    assert re.findall(MARKUP, COMMENT.sub("", MODULES[name])) == []


@pytest.mark.parametrize("name", MODULES)
def test_only_data_fetches(name):
    """Only `data.js` sends requests; in an exported site it loads scripts instead."""
    found = re.findall(r"\bfetch\(|XMLHttpRequest|WebSocket|EventSource|\bimport\(", MODULES[name])
    assert bool(found) == (name == "data.js")


def test_every_export_is_used_elsewhere():
    """No module exports a name that only it uses."""
    imported = {
        (module, one.strip())
        for source in MODULES.values()
        for names, module in IMPORT.findall(source)
        for one in names.split(",")
    }
    imported |= {
        (module, one.strip())
        for path in PAGE_TESTS.glob("*.test.js")
        for names, module in TESTED.findall(path.read_text(encoding="utf-8"))
        for one in names.split(",")
    }
    spare = {(name, one) for name, source in MODULES.items() for one in exports(source)} - imported
    assert spare == set()


def test_the_page_names_only_existing_files():
    """Each file that index.html loads is beside it."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    for name in re.findall(r'(?:src|href)="static/([^"]+)"', page):
        assert (STATIC / name).is_file(), name
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\son\w+=|https?://", page)


def test_the_files_are_in_the_package():
    """The wheel has what the server serves."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "viewer/static/*" in project["tool"]["setuptools"]["package-data"]["destinations"]
