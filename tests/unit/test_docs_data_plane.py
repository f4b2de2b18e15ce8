"""The measured tables of docs/data_plane.md are those of the result files: medians of their runs."""

import json
from pathlib import Path
from statistics import median

import data_plane_tables as tables
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "data_plane.md").read_text()
TRANSPORTS = json.loads(tables.TRANSPORTS.read_text())
STORES = json.loads(tables.STORES.read_text())


def test_the_page_shows_what_was_measured():
    for table, result in (
        (tables.transport_table, TRANSPORTS),
        (tables.store_table, STORES),
        (tables.prefill_table, STORES),
    ):
        assert table(result) in PAGE


def test_a_transports_figure_is_the_median_of_its_runs():
    seconds = TRANSPORTS["runs"]["seconds"]
    names = set(next(iter(seconds.values()))) - {"memcpy"}
    assert {"shm", "tcp"} <= names
    for shape, runs in seconds.items():
        for name in names:
            ratios = [memcpy / run for memcpy, run in zip(runs["memcpy"], runs[name], strict=True)]
            assert len(ratios) >= 5
            assert TRANSPORTS[f"transport.{name}.{shape}"] == pytest.approx(median(ratios))


def test_a_stores_figure_is_the_median_of_its_runs():
    assert "local" in STORES["runs"]
    for name, sizes in STORES["runs"].items():
        for size, runs in sizes.items():
            for kind in tables.KINDS:
                assert len(runs[f"{kind}_s"]) >= 5
                ratio = median(runs["memcpy_s"]) / median(runs[f"{kind}_s"])
                assert STORES[f"store.{name}.{size}.{kind}"] == pytest.approx(ratio)


def test_a_prefills_figure_is_the_median_of_its_runs():
    assert STORES["prefills"].keys() == STORES["runs"].keys()
    for name, runs in STORES["prefills"].items():
        for what in tables.PROMPTS:
            ratios = [ours / plain for ours, plain in zip(runs[f"{what}_s"], runs["plain_s"], strict=True)]
            assert len(ratios) >= 5
            assert STORES[f"prefill.{name}.{what}"] == pytest.approx(median(ratios))
