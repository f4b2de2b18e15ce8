"""What callers may rely on: the built-in base, the message, and the way through a process boundary."""

import inspect
import pickle

import pytest

from kvstrata import errors
from kvstrata.errors import BudgetError, DeadlineExceeded, KVStrataError

BUILT_IN = {
    "ConfigurationError": ValueError,
    "ConfigurationTypeError": TypeError,
    "LayoutError": ValueError,
    "UnsupportedError": NotImplementedError,
    "BudgetError": ValueError,
    "DeadlineExceeded": TimeoutError,
    "GateViolation": AssertionError,
    "TransferFailed": KVStrataError,
    "StoreError": KVStrataError,
    "StoreFormatError": errors.StoreError,
    "StoreUnavailable": errors.StoreError,
}
ALL = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and name != "KVStrataError"
}


def test_every_error_has_its_base():
    assert set(ALL) == set(BUILT_IN)
    for name, error in ALL.items():
        assert issubclass(error, KVStrataError)
        assert issubclass(error, BUILT_IN[name])


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_error_survives_a_process_boundary(name):
    error = ALL[name]("layer 3: what happened")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ALL[name]
    assert str(again) == str(error) == "layer 3: what happened"


def test_deadline_names_the_wait_and_its_seconds():
    error = pickle.loads(pickle.dumps(DeadlineExceeded("save of layer 3", 0.5)))
    assert str(error) == "save of layer 3: not finished within 0.5 s"
    assert (error.wait, error.seconds) == ("save of layer 3", 0.5)


def test_budget_error_carries_both_numbers():
    error = pickle.loads(pickle.dumps(BudgetError("too small", needed=2, available=1)))
    assert (str(error), error.needed, error.available) == ("too small", 2, 1)
