"""The structure of the project: floors, what each kind of process loads, import time, and documents that stay true."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "headrace"
DATA_PLANE = {"worker", "models", "layers", "weights", "attention", "ops", "transfer", "parallel", "platforms"}
TORCH_FREE = ("base", "config", "types", "kv", "sched", "text", "observe", "engine", "sim", "serve", "cli")


def run_python(code):
    """Run code in a fresh interpreter; return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tool(name):
    """Load a file of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def contracts():
    """The import contracts of pyproject.toml, by id."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {contract["id"]: contract for contract in config["tool"]["importlinter"]["contracts"]}


def test_import_contracts_hold():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_has_its_place_in_the_contracts():
    layers = contracts()["floors"]["layers"]
    built = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert built <= {layer for layer in layers if not layer.startswith("(")}, "a room that is built loses its brackets"
    assert built & DATA_PLANE <= {
        name.split(".")[1] for name in contracts()["data-plane-control-plane"]["source_modules"]
    }
    pure = {name.split(".")[1] for name in contracts()["pure-control-plane"]["source_modules"]}
    assert built & {"sched", "kv", "tiers", "types"} <= pure


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_module_says_what_it_is_for():
    import ast

    silent = [path for path in PACKAGE.rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_import_headrace_is_quick_and_loads_no_torch():
    code = (
        "import sys, time; start = time.perf_counter(); import headrace; seconds = time.perf_counter() - start;"
        "import json; print(json.dumps([seconds, sorted(sys.modules)]))"
    )
    results = [json.loads(run_python(code)) for _ in range(3)]
    assert min(seconds for seconds, _ in results) < 0.5
    loaded = {name.split(".")[0] for name in results[0][1]}
    assert loaded.isdisjoint({"torch", "numpy", "transformers", "msgspec", "zmq", "fastapi"})


@pytest.mark.parametrize("room", TORCH_FREE)
def test_no_module_of_a_torch_free_room_loads_torch(room):
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module("headrace.{room}")
names = [info.name for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
    heavy = {{"torch", "transformers"}} & set(sys.modules)
    if heavy:
        sys.exit(f"{{name}} loads {{sorted(heavy)}}")
print(len(names))
"""
    assert int(run_python(code)) > 0


@pytest.mark.parametrize("room", ["sched", "kv", "types", "config", "base"])
def test_the_control_plane_loads_nothing_heavy(room):
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module("headrace.{room}")
for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(info.name)
heavy = {{"torch", "numpy", "zmq", "asyncio", "jinja2", "psutil"}}
print(sorted({{name.split(".")[0] for name in sys.modules}} & heavy))
"""
    assert run_python(code).strip() == "[]"


def test_the_offline_class_loads_torch_only_when_an_engine_is_made():
    assert (
        run_python("import sys; from headrace import LLM, SamplingParams; print('torch' in sys.modules)").strip()
        == "False"
    )


def trace_names():
    text = (ROOT / "docs" / "trace.md").read_text()
    return re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)*):([A-Za-z_][\w.]*)`", text)


def test_the_trace_names_enough():
    assert len(trace_names()) >= 25
    assert {module.split(".")[0] for module, _ in trace_names()} >= {
        "serve",
        "engine",
        "sched",
        "kv",
        "worker",
        "models",
    }


@pytest.mark.parametrize(("module", "name"), sorted(set(trace_names())))
def test_names_in_the_trace_resolve(module, name):
    item = importlib.import_module(f"headrace.{module}")
    for part in name.split("."):
        fields = getattr(item, "__annotations__", {})
        item = fields[part] if part in fields and not hasattr(item, part) else getattr(item, part)


def test_generated_documentation_is_fresh():
    done = subprocess.run(
        [sys.executable, "tools/generate_docs.py", "--check"], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_table_and_an_unknown_one_are_noticed():
    generate_docs = tool("generate_docs")
    page = "a\n<!-- generated: {} -->\nstale line\n<!-- end generated -->\nb\n"
    used = set()
    fresh = generate_docs.regenerate(page.format("errors"), used)
    assert used == {"errors"}
    assert "stale line" not in fresh
    assert fresh.startswith("a\n")
    assert fresh.endswith("\nb\n")
    assert generate_docs.regenerate(fresh, used) == fresh
    with pytest.raises(SystemExit, match="no table is called 'nothing'"):
        generate_docs.regenerate(page.format("nothing"), used)


def test_the_vocabulary_checks_test_themselves():
    assert tool("check_words").self_test() == []


def test_words_names_ports_and_paths():
    done = subprocess.run(
        [sys.executable, "tools/check_words.py"], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", ["good", "bad"])
def test_a_broken_check_fails_its_self_test(fault):
    check_words = tool("check_words")
    check = check_words.CHECKS[0]
    broken = (lambda path, text: iter(())) if fault == "bad" else (lambda path, text: iter([(1, "always")]))
    check_words.CHECKS = (check_words.Check(check.name, check.why, broken, check.good, check.bad),)
    assert check_words.self_test() != []


def test_the_licence_is_the_full_text():
    text = (ROOT / "LICENSE").read_text()
    assert text.strip().startswith("Apache License")
    assert len(text.splitlines()) == 202
    assert "END OF TERMS AND CONDITIONS" in text
