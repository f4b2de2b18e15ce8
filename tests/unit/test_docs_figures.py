"""The README's figures are those of the result file that it names, and each is the median of its raw runs."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

from kvstrata.bench.kvpp import ratios_of

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "bench/results/layerwise-2core-cpu.json").read_text())
ROWS = {
    "prefill time, prefix loaded layer by layer": "prefill_time_ratio",
    "load of a layer through the host pool": "load_over_memcpy",
    "save of a layer through the host pool": "save_over_memcpy",
    "tokens that fit the same device memory": "capacity_ratio",
}

DECODE = json.loads((ROOT / "bench/results/decode-2core-cpu.json").read_text())
RESIDENCY = json.loads((ROOT / "bench/results/residency-2core-cpu.json").read_text())
SPARSE_ROWS = {
    "decode time per token, batch 1": DECODE["tpot_ratio.1"],
    "decode time per token, batch 4": DECODE["tpot_ratio.4"],
    "decode time per token, batch 8": DECODE["tpot_ratio.8"],
    "tokens/s where plain vLLM must queue": DECODE["throughput_ratio_constrained"],
    "the same, plain vLLM with memory for all requests": DECODE["throughput_ceiling_constrained"],
    "row gather on misses, bytes/s": RESIDENCY["gather_over_memcpy"],
    "row gather on misses, bytes/s of it": RESIDENCY["gather_over_index_select"],
}


# Rows of the README's table, once they were measured: the table and the file come together.
PD_FILE = ROOT / "bench/results/pd-2core-cpu.json"
PD_ROWS = {
    "read over shm, bytes/s": "shm_over_memcpy",
    "read over tcp, bytes/s": "tcp_over_memcpy",
    "eight readers at once, bytes/s of all": "eight_peers_over_one",
    "time to first token, prefill and decode": "ttft_ratio",
}


def test_the_figures_of_prefill_and_decode_in_the_readme_are_those_measured():
    readme = (ROOT / "README.md").read_text()
    shown = {row: re.findall(rf"^\| {row} \| [^|]+ \| ([\d.]+) \|$", readme, re.MULTILINE) for row in PD_ROWS}
    if PD_FILE.is_file():
        result = json.loads(PD_FILE.read_text())
        assert shown == {row: [f"{result[key]:.2f}"] for row, key in PD_ROWS.items()}
        runs = {**result["runs"]["reads"], **result["runs"]["first_tokens"]}
        for key in PD_ROWS.values():
            assert len(runs[key]) >= 5
            assert result[key] == pytest.approx(median(runs[key]))
    else:
        assert shown == {row: [] for row in PD_ROWS}


# The same for KVPP.
KVPP_FILE = ROOT / "bench/results/kvpp-2core-cpu.json"
KVPP_ROWS = {
    "prefill time, referenced blocks travel": "prefill_ratio.referenced",
    "prefill time, all blocks travel": "prefill_ratio.all",
    "decode time per token, referenced blocks travel": "decode_ratio.referenced",
    "layers between two processes by shared memory, bytes/s": "shm_over_collective",
    "decode time per token, four times the blocks, referenced": "growth_with_allocated_blocks",
    "decode time per token, four times the blocks, all": "growth_with_allocated_blocks.all",
}


def test_the_figures_of_kvpp_in_the_readme_are_those_measured():
    readme = (ROOT / "README.md").read_text()
    shown = {
        row: re.findall(rf"^\| {row} \| [^|]+ \| ([\d.]+) \|$", readme, re.MULTILINE) for row in KVPP_ROWS
    }
    if KVPP_FILE.is_file():
        result = json.loads(KVPP_FILE.read_text())
        assert shown == {row: [f"{result[key]:.2f}"] for row, key in KVPP_ROWS.items()}
        for key in KVPP_ROWS.values():
            assert len(ratios_of(result, key)) >= 5
            assert result[key] == pytest.approx(median(ratios_of(result, key)))
    else:
        assert shown == {row: [] for row in KVPP_ROWS}


@pytest.mark.parametrize(("row", "figure"), SPARSE_ROWS.items())
def test_a_figure_of_sparse_offload_in_the_readme_is_the_one_measured(row: str, figure: float):
    (shown,) = re.findall(
        rf"^\| {row} \| [^|]+ \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert shown == f"{figure:.2f}"


def test_the_time_of_a_lookup_in_the_readme_is_the_one_measured():
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"took {RESIDENCY['us_per_row_layer']:.2f} microseconds a layer" in text


@pytest.mark.parametrize("batch", ["1", "4", "8"])
def test_a_decode_ratio_is_the_median_of_its_runs(batch: str):
    runs = DECODE["runs"][f"batch.{batch}"]
    sides = zip(runs["kvstrata_s_per_token"], runs["plain_s_per_token"], strict=True)
    ratios = [ours / plain for ours, plain in sides]
    assert len(ratios) >= 5
    assert DECODE[f"tpot_ratio.{batch}"] == pytest.approx(median(ratios))


@pytest.mark.parametrize(("row", "key"), ROWS.items())
def test_a_figure_in_the_readme_is_the_one_measured(row: str, key: str):
    (shown,) = re.findall(
        rf"^\| {row} \| [^|]+ \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert shown == f"{RESULT[key]:.2f}"


@pytest.mark.parametrize("key", ["prefill_time_ratio", "load_over_memcpy", "save_over_memcpy"])
def test_a_figure_is_the_median_of_its_runs(key: str):
    assert len(RESULT["runs"][key]) >= 5
    assert RESULT[key] == pytest.approx(median(RESULT["runs"][key]))
