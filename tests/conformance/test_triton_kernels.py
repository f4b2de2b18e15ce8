"""The Triton kernels in Triton's interpreter and through its compiler: neither needs, nor replaces, a GPU.

Triton looks at TRITON_INTERPRET when it is loaded, which other tests of this process may have done already.
So the cases run in a child process; this one judges how it ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Every pointer is named by what it points to; the rest are numbers as a launch passes them.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvstrata.kernels.triton_gather import gather_kernel
from kvstrata.kernels.triton_residency_kernels import invalidate_kernel, resolve_kernel

POINTERS = {name: "*i64" for name in (
    "rows", "near_rows", "dst_rows", "src_rows", "row_of_slot", "priority", "totals", "absent", "order",
    "load_rows", "load_slots", "placed_index", "placed_slots", "counts",
)} | {name: "*i32" for name in ("fresh", "slot_of_row", "marks", "out_slots", "wrong")}
NARROW = ("entries", "near_entries", "capacity", "row_bytes", "dst_block_tokens", "src_block_tokens")

def compile_for_gpu(kernel, **constants):
    names = kernel.arg_names
    numbers = {name: "i32" if name in NARROW else "i64" for name in names}
    kinds = numbers | {name: POINTERS[name] for name in names if name in POINTERS}
    kinds |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel, kinds, constexprs={(names.index(name),): value for name, value in constants.items()}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]

for words in (True, False):
    compile_for_gpu(gather_kernel, words=words, lanes=256)
compile_for_gpu(invalidate_kernel, block=256)
for is_lru in (True, False):
    compile_for_gpu(resolve_kernel, is_lru=is_lru, has_fresh=not is_lru, block=256, width=256)
print("compiled")
"""


def run(*command: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, *command], env=inherited | environment, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def cases(*arguments: str) -> str:
    return run("-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_the_cases_of_the_triton_kernels_pass() -> None:
    assert " passed" in cases(str(HERE / "triton_cases.py"))


@pytest.mark.slow
def test_the_triton_table_answers_as_every_residency_table() -> None:
    """Without the largest cases: the interpreter takes a tenth of a second a call."""
    too_long = "not (300 or 64 or long_ago or bytes_of_a_table)"
    told = cases(str(HERE / "test_residency.py"), "-k", too_long)
    assert "interpreted-" in told
    assert "compiled-" not in told


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    assert run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path)).split()[-1] == "compiled"


def test_nothing_loads_triton_that_was_not_asked_for_it() -> None:
    asked_for = ("kernels.base", "kernels.gather", "kernels.residency", "kernels.warmup", "memory.rows")
    imports = ", ".join(f"kvstrata.{name}" for name in asked_for)
    assert run("-c", f"import sys, {imports}; print('triton' in sys.modules)") == "False\n"
