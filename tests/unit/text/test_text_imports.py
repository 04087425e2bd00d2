from __future__ import annotations

import pkgutil
import subprocess
import sys

import headrace.text

MODULES = [f"headrace.text.{module.name}" for module in pkgutil.iter_modules(headrace.text.__path__)]
SHOW = "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_no_module_of_the_room_imports_torch_or_transformers() -> None:
    assert printed(f"import sys\nfor name in {MODULES}: __import__(name)\n{SHOW}") == "[]"


def test_loading_the_tokenizer_imports_neither() -> None:
    code = (
        "import sys\nfrom headrace.config import ModelConfig\nfrom headrace.weights.source import resolve_model\n"
        "from headrace.text.tokenizer import load_tokenizer\n"
        "load_tokenizer(resolve_model(ModelConfig(model='default')))\n"
    )
    assert printed(code + SHOW) == "[]"
