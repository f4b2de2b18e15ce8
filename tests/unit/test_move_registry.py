"""Which engine a device type gets, and what a machine without the device answers."""

from __future__ import annotations

import pytest
import torch

from kvstrata.errors import UnsupportedError
from kvstrata.move import engine_for
from kvstrata.move.threads import ThreadEngine


def test_the_cpu_gets_threads_with_its_options() -> None:
    engine = engine_for("cpu", dependency_deadline_s=3.0)
    assert isinstance(engine, ThreadEngine)
    engine.close(1.0)
    with pytest.raises(TypeError):
        engine_for("cpu", no_such_option=1)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("device_type", ["cuda", "npu", "nonsense"])
def test_a_missing_accelerator_is_refused_by_name(device_type: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{device_type}.*none"):
        engine_for(device_type)
