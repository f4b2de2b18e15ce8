from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker


class KVStrataCPUWorker(CPUWorker):
    """CPU worker (layout below)."""
