"""Who may import what: imports point down, `core` is pure, and only kvstrata.vllm knows vLLM."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvstrata

ROOT = Path(kvstrata.__file__).parent
# Lowest first; a module may import its own tier and those below. Anything not listed stands at the top.
TIERS = {
    "": 0,  # the package itself: the version
    "errors": 1,
    "core": 2,
    "config": 3,
    "config_kvpp": 3,
    "config_store": 3,
    "config_transfer": 3,
    "config_values": 3,
    "kernels": 4,
    "memory": 4,
    "move": 4,
    "store": 4,
    "trace": 4,
    "remote": 4,
    "vllm": 5,
}
TOP = 6
NOT_IN_CORE = {
    "torch",
    "vllm",
    "numpy",
    "threading",
    "asyncio",
    "concurrent",
    "queue",
    "multiprocessing",
    "time",
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(("kvstrata", *(p for p in parts if p != "__init__")))] = path
    return found


def imported(source: str, module: str, *, is_package: bool) -> set[str]:
    """Return the absolute names a module imports anywhere in it, functions included."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            # `from kvstrata import vllm` imports a module too.
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def tier_name(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def violations(module: str, names: set[str]) -> list[str]:
    found = []
    here = tier_name(module)
    for name in sorted(names):
        package = name.split(".")[0]
        if package == "vllm" and here != "vllm":
            found.append(f"{module} imports {name}: only kvstrata.vllm imports vllm")
        if package in NOT_IN_CORE and here == "core":
            found.append(f"{module} imports {name}: core is pure")
        if package == "kvstrata":
            there = tier_name(name)
            if there.startswith("__"):  # a name of the package itself, as __version__
                there = ""
            if TIERS.get(there, TOP) > TIERS.get(here, TOP):
                found.append(f"{module} imports {name}: imports point down")
    return found


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module):
    path = modules()[module]
    names = imported(path.read_text(), module, is_package=path.name == "__init__.py")
    assert violations(module, names) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvstrata.core.x", "import torch"),
        ("kvstrata.core.x", "from time import monotonic"),
        ("kvstrata.core.x", "def f():\n    import vllm.config"),
        ("kvstrata.core.x", "from kvstrata.config import GB"),
        ("kvstrata.core.x", "from ..move import engine"),
        ("kvstrata.errors", "from kvstrata.core import gate"),
        ("kvstrata.config", "from kvstrata import store"),
        ("kvstrata.store.x", "from vllm import LLM"),
        ("kvstrata.move.x", "from kvstrata.vllm import plugin"),
        ("kvstrata.demo.x", "import vllm"),
        ("kvstrata.vllm.x", "from kvstrata import cli"),
        ("kvstrata.vllm.x", "from kvstrata.demo import prompt"),
        ("kvstrata", "from .config import GB"),
    ],
)
def test_the_rule_sees_a_violation(module, source):
    assert violations(module, imported(source, module, is_package=module == "kvstrata"))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvstrata.core.x", "import dataclasses, hashlib\nfrom kvstrata.errors import LayoutError"),
        ("kvstrata.core.x", "from .buffers import SlotId"),
        ("kvstrata.config", "from kvstrata.core.buffers import default_prefetch_layers"),
        ("kvstrata.move.x", "import torch\nfrom kvstrata.memory import pages"),
        ("kvstrata.vllm.x", "import vllm\nfrom kvstrata.store import base"),
        ("kvstrata.cli", "from kvstrata.vllm import plugin\nfrom kvstrata import __version__, demo"),
        ("kvstrata.core.x", "import timeit_like"),
    ],
)
def test_the_rule_lets_through_what_is_allowed(module, source):
    assert violations(module, imported(source, module, is_package=False)) == []


def test_core_and_config_load_neither_torch_nor_vllm():
    lower = [name for name in modules() if tier_name(name) in ("core", "config", "config_values", "errors")]
    assert "kvstrata.core.gate" in lower
    code = f"import sys, {', '.join(lower)}; print(sorted({{'torch', 'vllm', 'numpy'}} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
