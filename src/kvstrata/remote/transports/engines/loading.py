"""In words, why a library cannot be imported: it is not there, or what is there does not load."""

from __future__ import annotations

from kvstrata.errors import ConfigurationError


def cannot_load(error: Exception, *, library: str, package: str, fix: str) -> ConfigurationError:
    """The error to raise when importing from `package` raised `error`; one line, ending in "Fix: ...".

    A package that is there and lacks a part of itself, or of what it needs, is not "not installed".
    """
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return ConfigurationError(f"{library} is not installed. Fix: {fix}")
    said = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, ImportError | OSError):
        said = f"{type(error).__name__}: {said}"
    if isinstance(error, ModuleNotFoundError):
        fix = f"reinstall: {fix}"
    return ConfigurationError(f"{library} does not load here: {said}. Fix: {fix}")
