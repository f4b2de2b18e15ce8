"""Render docs/configuration.md from the knobs: `python -m kvstrata.config_docs > docs/configuration.md`."""

import dataclasses
import json
from typing import Any

from kvstrata.config import (
    AdditionalConfig,
    ConnectorConfig,
    LayerwiseConfig,
    SparseOffloadConfig,
)
from kvstrata.config_kvpp import KvppConfig
from kvstrata.config_store import StoreConfig
from kvstrata.config_transfer import TransferConfig
from kvstrata.config_values import Knobs, knob_path

_HEAD = """\
# Configuration

<!-- Rendered by `python -m kvstrata.config_docs`; change src/kvstrata/config.py instead of this file. -->

All knobs are checked once at start-up. Types are strict: `"false"` is an error, not false, and `1.0` is not
an integer. An error names the knob, its value and what to set. One GB is 2^30 bytes.

## In `--kv-transfer-config`, under `kv_connector_extra_config`

```bash
--kv-transfer-config '{"kv_connector": "KVStrataConnector", "kv_role": "kv_both",
  "kv_connector_extra_config": {"use_layerwise": true, "layerwise_num_shared_buffers": 2}}'
```

Unknown keys are refused, with the closest known one.
"""

_ADDITIONAL = """\
## In `--additional-config`

```bash
--additional-config '{"kvstrata": {"indexer_cache_dtype": "int8"}}'
```

```bash
--additional-config '{"sparse_kv_offload_config": {"enabled": true, "topk_buffer_size": 4096}}'
```

```bash
--additional-config '{"enable_kvpp": true, "kvstrata": {"kvpp_broadcast": "all"}}'
```

A knob written `section.name` stands in an object of its own. Inside these objects unknown keys are refused;
other top-level keys belong to other software and are left alone.
"""


def render() -> str:
    """Return the whole page."""
    connector = (LayerwiseConfig, StoreConfig, TransferConfig)
    parts = [_HEAD, *(_group(group) for group in connector), _group(ConnectorConfig, "General")]
    parts += [
        _ADDITIONAL,
        _group(AdditionalConfig, "General"),
        _group(SparseOffloadConfig),
        _group(KvppConfig),
    ]
    return "\n".join(parts)


def _group(group: type[Knobs], title: str | None = None) -> str:
    heading = title or (group.__doc__ or "").splitlines()[0].rstrip(".")
    rows = ["| knob | set | default | what it does |", "|---|---|---|---|"]
    rows += [_row(item) for item in group.knobs()]
    return "\n".join((f"### {heading}", "", *rows, ""))


def _row(item: dataclasses.Field[Any]) -> str:
    default = json.dumps(item.default)
    return f"| `{knob_path(item)}` | {item.metadata['kind'].text} | `{default}` | {item.metadata['doc']} |"


if __name__ == "__main__":
    print(render(), end="")
