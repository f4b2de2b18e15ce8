"""Parts of the sparse data path that are broken on purpose: the state machine must find each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from kvstrata.kernels.residency import ResidencyTable
from kvstrata.move.engine import CopyToken
from kvstrata.move.forward_rows import FreshRows
from kvstrata.move.hot_path import HotPath, Served, _Group
from kvstrata.move.prompt_window import PromptWindow
from kvstrata.move.sparse_testing import Int64Array


class ForgetsNothing(ResidencyTable):
    """Goes on serving rows that were written again."""

    def invalidate(self, rows: Int64Array) -> int:
        return 0


class PlacesNothing(HotPath):
    """Gives new rows their slots and leaves there what was."""

    def _resolve(self, group: _Group, *rest: Any) -> None:
        super()._resolve(group, *rest)
        nothing = group.served[-1].placed_slots[:0]
        group.served[-1] = dataclasses.replace(group.served[-1], placed_tokens=nothing, placed_slots=nothing)


class ForgetsFollowers(HotPath):
    """Copies the missing rows of a group's leader only."""

    def _copy_ahead(self, group: _Group) -> None:
        pass

    def _copy(self, layer: int, served: Served) -> None:
        if layer == self._group_of[layer].layers[0]:
            super()._copy(layer, served)


class OutrunsTheStore(HotPath):
    """Copies ahead what has not arrived yet."""

    def overwrite(self, rows: Int64Array, arrivals: Mapping[int, CopyToken]) -> None:
        super().overwrite(rows, {})


class TrustsABrokenForward(HotPath):
    """Takes rows for resident that only some layers have."""

    def _mend(self, group: _Group) -> None:
        group.missing.clear()
        super()._mend(group)


class ForgetsLateCopies(HotPath):
    """Gives slots away that a copy will still write to."""

    def _mend(self, group: _Group) -> None:
        group.ahead.clear()
        super()._mend(group)


class LoadsTooEarly(PromptWindow):
    """Loads the next piece over the one that is being read."""

    def take(self, layer: int, number: int) -> torch.Tensor:
        taken = super().take(layer, number)
        super().done()
        return taken

    def done(self) -> None:
        pass


class KeepsFresh(FreshRows):
    """Takes rows of the forward before for this one's."""

    def leave(self) -> None:
        self._current = None


def always_the_first(layer: int) -> int:
    """Mistake every layer's prompt pieces for layer 0's."""
    return 0


BROKEN: list[dict[str, Any]] = [
    {"table_class": ForgetsNothing},
    {"hot_class": PlacesNothing},
    {"hot_class": ForgetsFollowers},
    {"hot_class": OutrunsTheStore},
    {"hot_class": TrustsABrokenForward},
    {"hot_class": ForgetsLateCopies},
    {"window_class": LoadsTooEarly},
    {"window_layer": always_the_first},
    {"fresh_class": KeepsFresh},
]
