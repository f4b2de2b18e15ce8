"""The servers of one plan: started one after the other, watched, ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from kvstrata.errors import StoreUnavailable
from kvstrata.serve_pd.children import ChildProcess, last_lines
from kvstrata.serve_pd.plan import Launch
from kvstrata.serve_store.plan import READY_LINE, Server, StorePlan, servers
from kvstrata.store.pool.options import is_listening

_LOOK_S = 0.05
_END_S = 10.0


class StoreProcesses:
    """Not thread-safe. Close it: then none of its processes is left."""

    def __init__(self, plan: StorePlan, *, wait: Callable[[float], None] = time.sleep) -> None:
        """Nothing runs yet. `wait(seconds)` lets time pass; it may raise, and `close` follows."""
        self._plan = plan
        self._servers = {server.name: server for server in servers(plan)}
        self._running: dict[str, ChildProcess] = {}
        self._wait = wait

    def start(self, *, deadline_s: float) -> None:
        """Start every server once the one before it serves; raises `StoreUnavailable` with its last lines."""
        for name in self._servers:
            self.start_one(name, deadline_s=deadline_s)

    def start_one(self, name: str, *, deadline_s: float) -> None:
        """Start a server and wait until it serves; raises `StoreUnavailable`."""
        server = self._servers[name]
        if server.port is not None and is_listening(self._plan.host, server.port, timeout_s=1.0):
            raise StoreUnavailable(
                f"port {server.port} of {self._plan.host} is taken, so {self._plan.backend}'s {name} cannot "
                "start; end what holds it, or name another port"
            )
        try:
            server.log.parent.mkdir(parents=True, exist_ok=True)
            server.log.write_bytes(b"")
        except OSError as error:
            raise StoreUnavailable(
                f"{server.log}: no log of {self._plan.backend}'s {name}: {error}"
            ) from error
        process = self._running[name] = ChildProcess(_launch(server))
        ends_s = time.monotonic() + deadline_s
        while not self._serves(server):
            if process.status() is not None or time.monotonic() > ends_s:
                why = "ended" if process.status() is not None else f"does not serve within {deadline_s:g} s"
                raise StoreUnavailable(f"{self._plan.backend}'s {name} {why}: {_tail(server)}")
            self._wait(_LOOK_S)

    def pid(self, name: str) -> int:
        """Process id of a server that was started."""
        return self._running[name].pid

    def kill(self, name: str) -> None:
        """End a server at once, as a crash would, and wait until it is gone."""
        self._running[name].end(signal.SIGKILL)
        self._await_end([self._running[name]])

    def ended(self) -> str | None:
        """A line about a server that ended by itself, with the last lines of its log; None if all run."""
        for name, process in self._running.items():
            if process.status() is not None:
                return f"{self._plan.backend}'s {name} ended: {_tail(self._servers[name])}"
        return None

    def close(self) -> None:
        """End all servers, those started last first; whoever does not in time is killed."""
        for process in reversed(self._running.values()):
            process.end(signal.SIGCONT)
            process.end(signal.SIGTERM)
            if not self._await_end([process]):
                process.end(signal.SIGKILL)
                self._await_end([process])
        self._running.clear()

    def _serves(self, server: Server) -> bool:
        if server.port is not None:
            return is_listening(self._plan.host, server.port, timeout_s=1.0)
        return READY_LINE in server.log.read_text(errors="replace")

    @staticmethod
    def _await_end(processes: list[ChildProcess]) -> bool:
        ends_s = time.monotonic() + _END_S
        while not all(process.is_gone() for process in processes):
            if time.monotonic() > ends_s:
                return False
            time.sleep(_LOOK_S)
        return True


def _launch(server: Server) -> Launch:
    return Launch(
        name=server.name,
        role="store",
        url="",
        argv=server.argv,
        environment=server.environment,
        log=server.log,
    )


def _tail(server: Server) -> str:
    lines = last_lines(_launch(server), 5)
    return "; ".join(lines) if lines else f"nothing in {server.log}"
