"""The README's figures are those of the result file that it names, and each is the median of its raw runs."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "bench/results/layerwise-2core-cpu.json").read_text())
ROWS = {
    "prefill time, prefix loaded layer by layer": "prefill_time_ratio",
    "load of a layer through the host pool": "load_over_memcpy",
    "save of a layer through the host pool": "save_over_memcpy",
    "tokens that fit the same device memory": "capacity_ratio",
}


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
