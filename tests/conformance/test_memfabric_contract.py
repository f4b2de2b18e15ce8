"""The fake of MemFabric that the transport is tested with has the signatures of the real wheel.

No NPU is needed: the wheel's bindings say what they take. They are read in a process of their own, since the
fake has the same name.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from transport_cases import MEMFABRIC_CONTRACT

VERSION = "1.3.0"
CALLED = (
    "initialize",
    "get_rpc_port",
    "register_memory",
    "unregister_memory",
    "batch_transfer_sync_read",
    "destroy",
)
_READ = f"""
import importlib.metadata, json, memfabric_hybrid as found
said = {{name: getattr(found.TransferEngine, name).__doc__ for name in {CALLED!r}}}
kinds = {{name: int(kind.value) for name, kind in found.TransDataOpType.__members__.items()}}
version = importlib.metadata.version("memfabric_hybrid")
print(json.dumps({{"version": version, "said": said, "kinds": kinds}}))
"""


@pytest.fixture(scope="module")
def wheel() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", _READ], capture_output=True, text=True, timeout=120.0)
    if done.returncode != 0:
        pytest.skip(f"memfabric_hybrid does not import here: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def fake() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(MEMFABRIC_CONTRACT))
        patch.delitem(sys.modules, "memfabric_hybrid", raising=False)
        import memfabric_hybrid

        assert str(MEMFABRIC_CONTRACT) in str(memfabric_hybrid.__file__)
        yield memfabric_hybrid
        sys.modules.pop("memfabric_hybrid", None)


@pytest.mark.parametrize("name", CALLED)
def test_the_fake_takes_what_the_wheel_takes(wheel: dict[str, Any], fake: Any, name: str) -> None:
    assert wheel["version"] == VERSION
    signature = inspect.signature(getattr(fake.TransferEngine, name))
    ours = [
        (parameter.name, _shown(parameter.default))
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    assert ours == _parameters(name, wheel["said"][name])


def test_the_kinds_of_transfer_are_the_wheels(wheel: dict[str, Any], fake: Any) -> None:
    assert {kind.name for kind in fake.TransDataOpType} == wheel["kinds"].keys()
    assert fake.TransDataOpType.SDMA.value == wheel["kinds"]["SDMA"]


def test_a_changed_signature_would_be_noticed() -> None:
    said = "destroy(self: _pymf_transfer.TransferEngine, force: bool = False) -> None\n"
    assert _parameters("destroy", said) == [("force", "False")]


def _parameters(name: str, said: str) -> list[tuple[str, str]]:
    """Names and defaults out of what the binding says of itself."""
    inside = re.match(rf"{name}\((.*)\) -> ", said)
    assert inside is not None, said
    # Only commas between parameters are followed by a name and a colon.
    parts = re.split(r", (?=\w+: )", inside[1])
    found = []
    for part in parts[1:]:
        parameter, _, kind = part.partition(": ")
        _, _, default = kind.partition(" = ")
        found.append((parameter, re.sub(r"<\w+\.(\w+): .*>", r"\1", default)))
    return found


def _shown(default: object) -> str:
    if default is inspect.Parameter.empty:
        return ""
    return default.name if isinstance(default, enum.Enum) else repr(default)
