"""The exceptions a user or an operator can meet.

Each also derives from the built-in exception of its kind, so that a caller who does not know kvstrata still
catches it. The raiser puts into the message whatever lets a reader act: the knob, its value and the fix;
both layers and what differs; both numbers; the name of the wait.
"""


class KVStrataError(Exception):
    """Base of everything kvstrata raises on purpose."""


class ConfigurationError(KVStrataError, ValueError):
    """A knob has a value outside its range, or contradicts another knob."""


class ConfigurationTypeError(KVStrataError, TypeError):
    """A knob has a value of the wrong type; nothing is converted silently."""


class LayoutError(KVStrataError, ValueError):
    """Cache layouts that cannot be planned together; names both layers and what differs."""


class UnsupportedError(KVStrataError, NotImplementedError):
    """A feature, model or combination that this version refuses; names the feature."""


class BudgetError(KVStrataError, ValueError):
    """Memory does not fit, or two accounts of it disagree; the message holds both numbers.

    `needed` and `available` repeat them for programs, in the unit the message states.
    """

    def __init__(self, message: str, *, needed: int | None = None, available: int | None = None) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class DeadlineExceeded(KVStrataError, TimeoutError):  # noqa: N818 - named for what happened
    """A wait did not end in time; `wait` is its name, `seconds` its deadline where the name lacks it."""

    def __init__(self, wait: str, seconds: float | None = None) -> None:
        # The message is built in __str__: args stay the constructor's own, which keeps the error picklable.
        super().__init__(wait, seconds)
        self.wait = wait
        self.seconds = seconds

    def __str__(self) -> str:
        return self.wait if self.seconds is None else f"{self.wait}: not finished within {self.seconds:g} s"


class TransferFailed(KVStrataError):  # noqa: N818 - named for what happened
    """Bytes of a transfer did not arrive; the requests that need them are recomputed or fail."""


class StoreError(KVStrataError):
    """Base of the faults of a KV store; a running request never depends on a store (M5)."""


class StoreFormatError(StoreError):
    """The store on disk or in shared memory is corrupt or was written by another version."""


class StoreUnavailable(StoreError):  # noqa: N818 - named for what happened
    """The store cannot be used here: read-only, device full, or memory that cannot be mapped."""


class GateViolation(KVStrataError, AssertionError):  # noqa: N818 - named for what happened
    """A physical slot was about to be used out of turn; a defect of kvstrata, never of the user."""
