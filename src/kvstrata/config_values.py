"""What a knob is and what it may hold: strict checks, and the words for them in errors and documentation.

A check returns the value to keep. It converts nothing that could hide a mistake: a bool is never a number,
`"false"` is never a bool, 2.0 is never an integer.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstrata.errors import ConfigurationError, ConfigurationTypeError

_TINY = 1e-6
"""A smallest value below this is said as "above 0"."""


class ValueKind(Protocol):
    """A set of legal values."""

    @property
    def text(self) -> str:
        """The legal values in words, to follow "must be" and to stand in a table."""
        ...

    def check(self, knob: str, value: object) -> object:
        """Return the value to keep; raise ConfigurationTypeError or ConfigurationError naming `knob`."""
        ...


def wrong_type(knob: str, value: object, kind: ValueKind) -> ConfigurationTypeError:
    """Name knob, value, its type and what to set instead."""
    return ConfigurationTypeError(f"{knob}={value!r} is of type {type(value).__name__}; set {kind.text}")


def wrong_value(knob: str, value: object, kind: ValueKind) -> ConfigurationError:
    """Name knob, value and what to set instead."""
    return ConfigurationError(f"{knob}={value!r} is out of range; set {kind.text}")


@dataclass(frozen=True)
class Flag:
    """true or false."""

    text: str = "true or false, without quotes"

    def check(self, knob: str, value: object) -> bool:
        """See ValueKind."""
        if not isinstance(value, bool):
            raise wrong_type(knob, value, self)
        return value


@dataclass(frozen=True)
class Whole:
    """An integer in a range, both ends included."""

    minimum: int
    maximum: int | None = None

    @property
    def text(self) -> str:
        """See ValueKind."""
        if self.maximum is None:
            return f"an integer of at least {self.minimum}"
        return f"an integer from {self.minimum} to {self.maximum}"

    def check(self, knob: str, value: object) -> int:
        """See ValueKind."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(knob, value, self)
        if value < self.minimum or (self.maximum is not None and value > self.maximum):
            raise wrong_value(knob, value, self)
        return value


@dataclass(frozen=True)
class Positive:
    """A number in a range, both ends included; the range keeps derived bytes and waits representable."""

    minimum: float
    maximum: float

    @property
    def text(self) -> str:
        """See ValueKind."""
        if self.minimum < _TINY:
            return f"a number above 0, at most {self.maximum:.0f}"
        return f"a number from {self.minimum:g} to {self.maximum:.0f}"

    def check(self, knob: str, value: object) -> float:
        """See ValueKind."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(knob, value, self)
        try:
            number = float(value)
        except OverflowError:  # an integer beyond every float
            raise wrong_value(knob, value, self) from None
        if not self.minimum <= number <= self.maximum:  # false for nan too
            raise wrong_value(knob, value, self)
        return number


@dataclass(frozen=True)
class Word:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """See ValueKind."""
        quoted = [f'"{word}"' for word in self.words]
        return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"

    def check(self, knob: str, value: object) -> str:
        """See ValueKind."""
        if not isinstance(value, str):
            raise wrong_type(knob, value, self)
        if value not in self.words:
            raise wrong_value(knob, value, self)
        return value


@dataclass(frozen=True)
class Path:
    """A directory as text."""

    text: str = "the path of a directory"

    def check(self, knob: str, value: object) -> str:
        """See ValueKind."""
        if not isinstance(value, str):
            raise wrong_type(knob, value, self)
        if not value or "\0" in value or not value.isprintable():
            raise wrong_value(knob, value, self)
        return value


@dataclass(frozen=True)
class Line:
    """One line of printable text, of at least `least` characters."""

    text: str
    least: int = 1

    def check(self, knob: str, value: object) -> str:
        """See ValueKind."""
        if not isinstance(value, str):
            raise wrong_type(knob, value, self)
        if len(value) < self.least or not value.isprintable():
            raise wrong_value(knob, value, self)
        return value


@dataclass(frozen=True)
class Positions:
    """A list of integers, kept as a tuple, or "all". Their range is known only to the planner."""

    text: str = 'a list of layer positions such as [0, -1], or "all"'

    def check(self, knob: str, value: object) -> object:
        """See ValueKind."""
        if value == "all":
            return value
        if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
            raise wrong_type(knob, value, self)
        for entry in value:
            if isinstance(entry, bool) or not isinstance(entry, int):
                raise wrong_type(knob, value, self)
        return tuple(value)


@dataclass(frozen=True)
class Optional:
    """The same as `kind`, or null."""

    kind: ValueKind

    @property
    def text(self) -> str:
        """See ValueKind."""
        return f"{self.kind.text}, or null"

    def check(self, knob: str, value: object) -> object:
        """See ValueKind."""
        return None if value is None else self.kind.check(knob, value)


def knob(kind: ValueKind, default: object, doc: str, *, section: str = "") -> Any:
    """Define one knob: what it may hold, its default, its line of documentation, the object it stands in."""
    return field(default=default, metadata={"kind": kind, "doc": doc, "section": section})


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """A group of knobs that checks itself however it is made."""

    def __post_init__(self) -> None:
        for item in self.knobs():
            kept = item.metadata["kind"].check(knob_path(item), getattr(self, item.name))
            object.__setattr__(self, item.name, kept)
        self._check_together()

    def _check_together(self) -> None:
        """Check knobs against each other, each of them being legal by itself."""

    @classmethod
    def knobs(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The group's own knobs in the order of definition, without those of groups inside it."""
        return tuple(item for item in dataclasses.fields(cls) if "kind" in item.metadata)


def knob_path(item: dataclasses.Field[Any]) -> str:
    """Name of a knob as the user writes it, with the object it stands in."""
    section = item.metadata["section"]
    return f"{section}.{item.name}" if section else item.name


GB = 1 << 30
"""Bytes of one GB in every `_GB` knob: 2^30, as in vLLM's own memory settings."""

GIGABYTES = Positive(1e-9, 1 << 20)
SECONDS = Positive(0.1, 86400.0)
