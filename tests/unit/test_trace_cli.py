"""`kvstrata trace` as a person meets it: results, pictures, and errors that name the option."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstrata.bench.trace_record import RecordOptions, record
from kvstrata.cli import app
from kvstrata.core.eviction import POLICIES
from kvstrata.errors import ConfigurationError, KVStrataError
from kvstrata.trace.plot import draw, read_curves
from kvstrata.trace.recording import TopkTraceWriter

ROOT = Path(__file__).parents[2]
CURVES = {"one": {"lru": [(1.0, 0.5), (2.0, 0.25)], "belady": [(1.0, 0.5), (2.0, 0.125)]}}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    with TopkTraceWriter(tmp_path / "a.trace", topk=2, block_tokens=16, host_rows=9) as writer:
        for rows in ([1, 2], [3, 4], [1, 3]):
            writer.append(layer=0, step=0, rows=np.array([rows], np.int64))
    return writer.path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)], env={"COLUMNS": "200"})
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def test_replay_shows_misses_and_writes_them(trace: Path, tmp_path: Path):
    target = tmp_path / "new" / "misses.json"
    code, shown = run("replay", trace, "--policies", "lru", "--sizes", "2,1", "--json", target)
    assert code == 0, shown
    assert "83.3%" in shown
    assert "66.7%" in shown
    written = json.loads(target.read_text())
    assert written["misses.a-rank0-trace.lru.1x"] == pytest.approx(5 / 6)
    assert written["misses.a-rank0-trace.lru.2x"] == pytest.approx(4 / 6)
    assert written["options"]["policies"] == ["lru"]


def test_replay_takes_all_policies_if_none_is_named(trace: Path, tmp_path: Path):
    target = tmp_path / "misses.json"
    code, shown = run("replay", trace, "--sizes", "1", "--json", target)
    assert code == 0, shown
    policies = {key.split(".")[2] for key in json.loads(target.read_text()) if key.startswith("misses.")}
    assert policies == {*POLICIES, "belady"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--policies", "lru,mru"], ["--policies", "'mru'", "lru"]),
        (["--sizes", "1,two"], ["--sizes", "'1,two'"]),
        (["--sizes", "0.5"], ["--sizes", "at least 1 x top-k"]),
        (["--sizes", "nan"], ["--sizes"]),
    ],
)
def test_replay_names_the_option_that_is_wrong(trace: Path, arguments: list[str], named: list[str]):
    code, shown = run("replay", trace, *arguments)
    assert code == 2
    assert all(word in shown for word in named), shown


def test_replay_of_nothing_says_what_there_is(tmp_path: Path):
    code, shown = run("replay", tmp_path / "none.trace")
    assert code == 1
    assert "calibrated, harder" in shown


def test_replay_refuses_a_warm_up_beyond_the_trace(trace: Path):
    code, shown = run("replay", trace, "--warm-up", "3")
    assert code == 1
    assert "warm_up=3" in shown


def test_plot_draws_what_replay_wrote(trace: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    result, picture = tmp_path / "misses.json", tmp_path / "new" / "misses.svg"
    assert run("replay", trace, "--policies", "lru", "--json", result)[0] == 0
    code, shown = run("plot", result, "--out", picture)
    assert code == 0, shown
    text = picture.read_text()
    assert "<svg" in text
    for label in ("a-rank0-trace", ">lru<", "belady (knows the future)", "multiples of top-k"):
        assert label in text


def test_the_same_curves_give_the_same_picture_and_others_another(tmp_path: Path):
    pytest.importorskip("matplotlib")
    pictures = []
    for number, curves in enumerate((CURVES, CURVES, {"one": {"lru": [(1.0, 0.5), (2.0, 0.3)]}})):
        draw(curves, tmp_path / f"{number}.svg")
        pictures.append((tmp_path / f"{number}.svg").read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


def test_curves_are_read_by_trace_policy_and_size(tmp_path: Path):
    keys = {"misses.one.lru.2x": 0.25, "misses.one.lru.1x": 0.5, "misses.two.lru.2.5x": 0.1, "other": 3}
    (tmp_path / "r.json").write_text(json.dumps(keys))
    assert read_curves(tmp_path / "r.json") == {
        "one": {"lru": [(1.0, 0.5), (2.0, 0.25)]},
        "two": {"lru": [(2.5, 0.1)]},
    }


@pytest.mark.parametrize("content", ["{}", "[1]", "not json"])
def test_plot_of_another_file_says_what_it_wants(tmp_path: Path, content: str):
    (tmp_path / "r.json").write_text(content)
    code, shown = run("plot", tmp_path / "r.json")
    assert code == 1
    assert "r.json: no" in shown


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "r.json").write_text('{"misses.one.lru.1x": 0.5}')
    code, shown = run("plot", tmp_path / "r.json", "--out", tmp_path / "m.svg")
    assert code == 1
    assert "kvstrata[plot]" in shown
    assert len(shown.strip().splitlines()) == 1


class FakeEngine:
    """Writes one selection for every decoded token but the first, as sparse offload would."""

    def __init__(self, options: RecordOptions, *, writes: bool = True) -> None:
        self.options = options
        self.writes = writes

    def decode(self, prompts: list[tuple[int, ...]], *, new_tokens: int) -> None:
        assert [len(prompt) for prompt in prompts] == [self.options.prompt_tokens] * self.options.requests
        if not self.writes:
            return
        with TopkTraceWriter(self.options.out, topk=4, block_tokens=16, host_rows=99) as writer:
            for step in range(new_tokens - 1):
                rows = np.arange(4 * len(prompts), dtype=np.int64).reshape(-1, 4)
                writer.append(layer=0, step=step, rows=rows)


def opened(writes: bool = True):
    @contextmanager
    def open_engine(model: Path, options: RecordOptions) -> Iterator[FakeEngine]:
        assert (model / "config.json").is_file()
        yield FakeEngine(options, writes=writes)

    return open_engine


def test_record_serves_the_requests_and_sums_the_trace_up(tmp_path: Path):
    options = RecordOptions(out=tmp_path / "r.trace", requests=2, prompt_tokens=100, new_tokens=6)
    summary = record(options, log=tmp_path / "log", open_engine=opened())
    assert (summary.selections, summary.steps, summary.max_tokens, summary.selected_rows) == (5, 5, 2, 40)


def test_an_older_trace_does_not_pass_for_a_new_one(tmp_path: Path):
    options = RecordOptions(out=tmp_path / "r.trace", prompt_tokens=100, new_tokens=6)
    record(options, log=tmp_path / "log", open_engine=opened())
    with pytest.raises(KVStrataError, match=r"wrote no .*r\.rank0\.trace"):
        record(options, log=tmp_path / "log", open_engine=opened(writes=False))


def test_a_prompt_longer_than_the_text_names_the_option(tmp_path: Path):
    options = RecordOptions(out=tmp_path / "r.trace", prompt_tokens=10**6)
    with pytest.raises(ConfigurationError, match="--prompt-tokens=1000000"):
        record(options, log=tmp_path / "log", open_engine=opened())


def test_record_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = {}
    monkeypatch.setattr(
        "kvstrata.bench.trace_record.record", lambda options, *, log: seen.update(options=options, log=log)
    )
    arguments = ["--out", "o.trace", "--model", "m", "--prompt-tokens", "70", "--new-tokens", "3"]
    code, shown = run("record", *arguments, "--requests", "2", "--log", "l.log")
    assert code == 0, shown
    assert seen["log"] == Path("l.log")
    assert seen["options"] == RecordOptions(
        out=Path("o.trace"), model=Path("m"), prompt_tokens=70, new_tokens=3, requests=2
    )


def test_record_points_to_the_log_when_the_engine_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr("kvstrata.bench.trace_record.record", fail)
    code, shown = run("record", "--out", tmp_path / "o.trace", "--log", "l.log")
    assert code == 1
    assert "no such operator" in shown
    assert "l.log" in shown


def test_the_picture_in_the_documents_is_that_of_the_result_file(tmp_path: Path):
    version = pytest.importorskip("matplotlib").__version__
    if f"matplotlib=={version}\n" not in (ROOT / "constraints.txt").read_text():
        pytest.skip("another matplotlib places its texts elsewhere")
    draw(read_curves(ROOT / "bench/results/misses-synthetic.json"), tmp_path / "misses.svg")
    assert (tmp_path / "misses.svg").read_bytes() == (ROOT / "docs/img/misses.svg").read_bytes()
