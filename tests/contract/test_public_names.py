"""Exported names are documented names: the site is built strict, and its inventory and pages are read back."""

import ast
import html.parser
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import zlib

import pytest

import headrace

yaml = pytest.importorskip("yaml", reason="comes with mkdocs")
ROOM_NAMES = sorted(info.name for info in pkgutil.iter_modules(headrace.__path__) if info.ispkg)


@pytest.fixture(scope="module")
def site(tmp_path_factory, pytestconfig):
    """The documentation site, built strict into a folder of this run."""
    out = tmp_path_factory.mktemp("site")
    # Never with --quiet: it hides the warnings from the counter that --strict asks.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=pytestconfig.rootpath, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert "Documentation built" in done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def documented(site):
    """Names in the inventory, with the page that documents each."""
    data = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    rows = [line.split() for line in zlib.decompress(data).decode().splitlines()]
    return {row[0]: row[3] for row in rows}


def nav_pages(node):
    for item in node:
        value = next(iter(item.values())) if isinstance(item, dict) else item
        if isinstance(value, list):
            yield from nav_pages(value)
        else:
            yield value


class Article(html.parser.HTMLParser):
    """Collects the words of the <article> element and whether it holds a documented object."""

    def __init__(self):
        super().__init__()
        self.inside, self.words, self.objects = False, 0, 0

    def handle_starttag(self, tag, attrs):
        self.inside = self.inside or tag == "article"
        self.objects += "doc-object" in (dict(attrs).get("class") or "")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "article"

    def handle_data(self, data):
        self.words += len(data.split()) if self.inside else 0


def test_every_public_name_is_in_the_built_site_and_no_other(documented):
    top_level = {name.removeprefix("headrace.") for name in documented if name.count(".") == 1}
    rooms = {name for name in top_level if name in ROOM_NAMES}
    assert top_level - rooms == set(headrace.__all__)


@pytest.mark.parametrize("name", headrace.__all__)
def test_every_public_name_resolves(name):
    assert getattr(headrace, name) is not None
    assert name in dir(headrace)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = headrace.LMM


@pytest.mark.parametrize("room", ROOM_NAMES)
def test_what_a_room_exports_is_documented(room, documented):
    module = importlib.import_module(f"headrace.{room}")
    missing = [name for name in getattr(module, "__all__", []) if f"headrace.{room}.{name}" not in documented]
    assert missing == []


def test_no_page_of_the_navigation_is_empty(site, pytestconfig):
    config = yaml.safe_load((pytestconfig.rootpath / "mkdocs.yml").read_text())
    pages = list(nav_pages(config["nav"]))
    assert len(pages) > 15
    for page in pages:
        folder = "" if page == "index.md" else page.removesuffix(".md") + "/"
        article = Article()
        article.feed((site / folder / "index.html").read_text())
        assert article.words >= 40, f"{page} has {article.words} words"
        assert article.objects or not page.startswith("reference/"), f"{page} documents nothing"


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def pages_with_code(root):
    return [
        root / "README.md",
        root / "README.zh-CN.md",
        root / "CONTRIBUTING.md",
        *sorted((root / "docs").rglob("*.md")),
    ]


def test_python_in_the_documentation_compiles_and_imports_names_that_exist(pytestconfig):
    seen = 0
    for page in pages_with_code(pytestconfig.rootpath):
        for block in blocks(page.read_text(), "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace"):
                    module = importlib.import_module(node.module)
                    for alias in node.names:
                        assert hasattr(module, alias.name), f"{page.name}: {node.module}.{alias.name}"
                        seen += 1
    assert seen >= 4


def test_readme_names_exist(pytestconfig):
    root = pytestconfig.rootpath
    for name in ("README.md", "README.zh-CN.md"):
        text = (root / name).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (root / target).exists(), f"{name} links to {target}"
        for script in re.findall(r"\b(scripts/\w+)", text):
            assert os.access(root / script, os.X_OK), f"{name} names {script}"
        for command in re.findall(r"^headrace (\w+)", text, re.MULTILINE):
            assert importlib.util.find_spec(f"headrace.cli.{command}"), f"{name}: headrace {command}"


def test_both_readmes_tell_the_same(pytestconfig):
    english, chinese = ((pytestconfig.rootpath / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    assert blocks(english, "bash") == blocks(chinese, "bash")
    assert blocks(english, "python") == blocks(chinese, "python")
    assert english.count("\n## ") == chinese.count("\n## ")
    assert english.count("\n| ") == chinese.count("\n| ")


def test_flags_in_prose_exist(pytestconfig):
    from headrace.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServerConfig
    from headrace.config.flags import flag_name, options_of

    sections = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, ServerConfig)
    known = {flag_name(field) for section in sections for field in options_of(section)}
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    for name in ("README.md", "README.zh-CN.md", "docs/models.md", "docs/quickstart.md", "docs/architecture.md"):
        text = (pytestconfig.rootpath / name).read_text()
        assert set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", text)) <= known, name
