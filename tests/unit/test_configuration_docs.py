"""docs/configuration.md says what the code does."""

from pathlib import Path

import pytest

from kvstrata.config import (
    AdditionalConfig,
    ConnectorConfig,
    LayerwiseConfig,
    SparseOffloadConfig,
    StoreConfig,
)
from kvstrata.config_docs import render
from kvstrata.config_transfer import TransferConfig
from kvstrata.config_values import knob_path

GROUPS = (
    LayerwiseConfig,
    StoreConfig,
    TransferConfig,
    ConnectorConfig,
    AdditionalConfig,
    SparseOffloadConfig,
)
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_fresh():
    assert PAGE.read_text() == render(), "run: python -m kvstrata.config_docs > docs/configuration.md"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_knob_has_a_row_with_its_default_and_a_sentence(group):
    rows = [line.split(" | ") for line in render().splitlines() if line.startswith("| `")]
    row_of = {row[0].removeprefix("| "): row for row in rows}
    for item in group.knobs():
        row = row_of[f"`{knob_path(item)}`"]
        assert len(row) == 4, "a cell must not hold a bar"
        assert item.metadata["kind"].text in row[1]
        assert item.metadata["doc"].endswith(".")
