"""The launch itself: start, watch, show, end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

from kvstrata.serve_pd.children import ChildProcess, health, is_up, last_lines
from kvstrata.serve_pd.plan import Launch
from kvstrata.serve_pd.signals import stop_on_signals
from kvstrata.serve_pd.status import shown
from kvstrata.serve_pd.supervisor import ChildStatistics, Supervisor

LOOK_S = 0.25
END_DEADLINE_S = 30.0


def run(launches: Sequence[Launch], *, console: Console, start_deadline_s: float, restarts: int) -> int:
    """Run until SIGINT, SIGTERM or SIGHUP (return 0), or until a process cannot be kept (return 1).

    Call it from the main thread. Every process has ended when it returns or raises. Logs are written anew.
    """
    for launch in launches:
        launch.log.unlink(missing_ok=True)
    (proxy,) = (launch for launch in launches if launch.role == "proxy")
    supervisor = Supervisor(
        launches,
        start=ChildProcess,
        is_up=is_up,
        clock=time.monotonic,
        start_deadline_s=start_deadline_s,
        restarts=restarts,
    )

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return not stop.is_set()

    with stop_on_signals() as stop:
        try:
            failed = _watch(supervisor, proxy, stop, console)
        finally:
            stop.clear()  # a second signal hurries the end
            with suppress(OSError):  # the terminal may be what has gone
                console.print("ending every process", highlight=False)
            in_time = supervisor.stop(deadline_s=END_DEADLINE_S, wait=wait)
    if not in_time:
        why = "before the second signal" if stop.is_set() else f"within {END_DEADLINE_S:g} s"
        console.print(f"not all processes ended {why}; those were killed", highlight=False)
    if failed is None:
        return 0
    _explain(failed, console)
    return 1


def _watch(
    supervisor: Supervisor, proxy: Launch, stop: threading.Event, console: Console
) -> ChildStatistics | None:
    is_announced = False
    with shown(console) as show:
        supervisor.start()
        while not stop.is_set():
            supervisor.step()
            show(supervisor.statistics())
            if supervisor.failed is not None:
                return supervisor.failed
            if not is_announced and supervisor.is_ready and health(proxy.url) == 200:
                is_announced = True
                text = f"ready: OpenAI's API at {proxy.url}/v1, /health, /metrics; Ctrl-C ends everything"
                console.print(text, soft_wrap=True, markup=False, highlight=False)
            stop.wait(LOOK_S)
    return None


def _explain(failed: ChildStatistics, console: Console) -> None:
    launch = failed.launch
    restarts = f" after {failed.restarts} restarts" if failed.restarts else ""
    console.print(
        f"kvstrata: {launch.name} {failed.why}{restarts}.", markup=False, highlight=False, soft_wrap=True
    )
    lines = last_lines(launch)
    heading = f"The last lines of {launch.log}:" if lines else f"{launch.log} is empty."
    for line in (heading, *lines):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
