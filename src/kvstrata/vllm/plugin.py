"""Entry points that vLLM loads: the CPU platform and the process-wide registrations."""


def platform() -> str | None:
    """Return the platform class to use, or None to leave vLLM's own choice alone."""
    return None


def register() -> None:
    """Register kvstrata's layers and connectors; called once in every vLLM process, idempotent."""
