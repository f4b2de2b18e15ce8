"""What kvstrata's CPU platform refuses because vLLM on CPU does not run it."""

from types import SimpleNamespace

import pytest
from vllm.config import CompilationMode

from kvstrata.errors import UnsupportedError
from kvstrata.vllm.platform import refuse_compiled_stages


def launch(stages: int, mode: CompilationMode | None) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        compilation_config=SimpleNamespace(mode=mode),
    )


def test_traced_pipeline_stages_are_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    words = r"pipeline_parallel_size=2 and enforce_eager=False: .*set enforce_eager to true"
    with pytest.raises(UnsupportedError, match=words):
        refuse_compiled_stages(launch(2, CompilationMode.DYNAMO_TRACE_ONCE))


@pytest.mark.parametrize(
    ("stages", "mode", "breakable"),
    [
        (1, CompilationMode.DYNAMO_TRACE_ONCE, "0"),
        (2, CompilationMode.NONE, "0"),
        (2, None, "0"),
        (2, CompilationMode.DYNAMO_TRACE_ONCE, "1"),
    ],
    ids=["one-stage", "eager", "undecided", "breakable-graphs-instead"],
)
def test_what_is_not_traced_in_stages_passes(
    stages: int, mode: CompilationMode | None, breakable: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", breakable)
    refuse_compiled_stages(launch(stages, mode))
