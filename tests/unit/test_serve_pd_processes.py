"""How the launcher keeps and ends real processes; on fake ones: test_serve_pd_supervisor."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import proxy_fakes
import psutil
import pytest
from proxy_fakes import DEADLINE_S, until

from kvstrata.serve_pd.children import ChildProcess, last_lines
from kvstrata.serve_pd.machine import find_ports
from kvstrata.serve_pd.options import ServeOptions
from kvstrata.serve_pd.plan import Launch


def launch(name: str, *argv: str, log: Path) -> Launch:
    role = name.partition("-")[0]
    return Launch(name=name, role=role, url="http://127.0.0.1:1", argv=argv, environment={}, log=log)


def test_a_child_writes_its_log_and_is_ended_with_its_children(tmp_path: Path):
    code = "import subprocess, sys; print('hello', flush=True); subprocess.run(['sleep', '1000'])"
    child_launch = launch("decode-0", sys.executable, "-c", code, log=tmp_path / "logs" / "a.log")
    child = ChildProcess(child_launch)
    until(lambda: last_lines(child_launch) == ["hello"], "output")
    family = psutil.Process(child._process.pid).children(recursive=True)
    child.end(signal.SIGTERM)
    until(lambda: child.status() is not None, "the end")
    assert child.status() == -signal.SIGTERM
    until(lambda: not any(process.is_running() for process in family), "the end of its child")
    child.end(signal.SIGKILL)  # nobody is there any more


def test_a_killed_childs_shared_memory_is_unlinked(tmp_path: Path):
    code = """
import time
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=64).name, flush=True)
time.sleep(1000)
"""
    child_launch = launch("decode-0", sys.executable, "-c", code, log=tmp_path / "a.log")
    child = ChildProcess(child_launch)
    until(lambda: last_lines(child_launch), "output")
    memory = Path("/dev/shm") / last_lines(child_launch)[0]
    assert memory.exists()
    child.end(signal.SIGKILL)
    until(child.is_gone, "the end of the child and its resource tracker")
    assert child.status() == -signal.SIGKILL
    assert not memory.exists()


def test_the_end_of_a_log_is_read_and_a_missing_one_is_empty(tmp_path: Path):
    log = tmp_path / "a.log"
    log.write_text("\n".join(f"line {n}" for n in range(100_000)))
    assert last_lines(launch("proxy", log=log), 2) == ["line 99998", "line 99999"]
    assert last_lines(launch("proxy", log=tmp_path / "none")) == []


LAUNCHER = """
import sys
from pathlib import Path
from rich.console import Console
from kvstrata.serve_pd import run
from kvstrata.serve_pd.plan import Launch
run.END_DEADLINE_S = 600  # for what does not end, a second signal alone must do
directory, *commands = sys.argv[1:]
launches = []
for text in commands:
    name, url, *argv = text.split(";")
    role = name.partition("-")[0]
    log = Path(directory) / f"{name}.log"
    launches.append(Launch(name=name, role=role, url=url, argv=tuple(argv), environment={}, log=log))
sys.exit(run.run(launches, console=Console(width=200), start_deadline_s=120, restarts=1))
"""


class RealLaunch:
    """The launcher as a process, with fake engines and the real proxy as its children."""

    def __init__(self, directory: Path, *, engine: str | None = None) -> None:
        ports = find_ports(ServeOptions(model="m", port=0))
        self.url = f"http://127.0.0.1:{ports.proxy}"
        self.engine_urls = [f"http://127.0.0.1:{port}" for port in (*ports.prefill, *ports.decode)]
        proxy_code = (
            "import typer; from kvstrata.proxy.command import proxy_command; "
            "app = typer.Typer(); app.command()(proxy_command); app()"
        ).replace("; ", "\n")
        fake = [
            f"{sys.executable};{proxy_fakes.__file__};{url.rpartition(':')[2]};3;0"
            for url in self.engine_urls
        ]
        if engine is not None:
            fake[1] = engine
        proxy = [
            sys.executable,
            "-c",
            proxy_code,
            "--prefill",
            self.engine_urls[0],
            "--decode",
            self.engine_urls[1],
        ]
        proxy += ["--port", str(ports.proxy), "--health-interval", "0.2"]
        self.output = directory / "launcher.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", LAUNCHER, str(directory)),
                    f"prefill-0;{self.engine_urls[0]};{fake[0]}",
                    f"decode-0;{self.engine_urls[1]};{fake[1]}",
                    f"proxy;{self.url};" + ";".join(proxy),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KVSTRATA_REMOTE_SECRET": "a-secret-of-the-tests"},
            )

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return "ready: OpenAI's API" in self.output.read_text()

        until(is_ready, "readiness", 120)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def __enter__(self) -> "RealLaunch":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for process in [*self.family(), psutil.Process(self.process.pid)]:
                process.kill()
            self.process.wait(DEADLINE_S)


def gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_launch_serves_until_it_is_told_to_end(tmp_path: Path, how: signal.Signals):
    with RealLaunch(tmp_path) as real:
        real.wait_ready()
        answer = httpx.post(
            real.url + "/v1/completions", json={"prompt": "x"}, timeout=DEADLINE_S, trust_env=False
        )
        assert "wordwordword" in answer.text
        family = real.family()
        assert len(family) >= 3
        real.process.send_signal(how)
        assert real.process.wait(60) == 0, real.output.read_text()
        assert gone(family)
        assert "Traceback" not in real.output.read_text()


def test_a_second_signal_does_not_wait_for_an_engine_that_does_not_end(tmp_path: Path):
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)"
    with RealLaunch(tmp_path, engine=f"{sys.executable};-c;{code}") as real:
        until(lambda: "decode-0: starting" in real.output.read_text(), "the start", 60)
        until(lambda: len(real.family()) >= 3, "processes", 60)
        family = real.family()
        until(lambda: any("SIG_IGN" in " ".join(p.cmdline()[1:3]) for p in family), "the engine", 60)
        real.process.send_signal(signal.SIGINT)
        until(lambda: "ending every process" in real.output.read_text(), "the first signal", 60)
        real.process.send_signal(signal.SIGINT)
        assert real.process.wait(60) == 0, real.output.read_text()
        assert gone(family)


def test_an_engine_that_dies_is_started_again_then_the_launch_fails_with_its_log(tmp_path: Path):
    with RealLaunch(tmp_path) as real:
        real.wait_ready()
        family = real.family()

        def kill_decode() -> psutil.Process:
            (decode,) = (
                p for p in real.family() if real.engine_urls[1].rpartition(":")[2] in p.cmdline()[2:3]
            )
            decode.kill()
            return decode

        first = kill_decode()
        until(lambda: gone([first]), "the death")
        until(lambda: real.output.read_text().count("decode-0: ready") == 2, "the restart", 60)
        kill_decode()
        assert real.process.wait(60) == 1
        text = real.output.read_text()
        assert "decode-0 was ended by SIGKILL after 1 restarts." in text
        assert gone(family)


def test_an_engine_that_cannot_start_ends_the_launch_with_its_last_words(tmp_path: Path):
    engine = f"{sys.executable};-c;raise SystemExit('no such model')"
    with RealLaunch(tmp_path, engine=engine) as real:
        assert real.process.wait(60) == 1
        text = real.output.read_text()
        assert "kvstrata: decode-0 ended with status 1." in text
        assert f"The last lines of {tmp_path / 'decode-0.log'}:" in text
        assert "no such model" in text


def test_a_launcher_that_is_killed_takes_its_processes_along(tmp_path: Path):
    with RealLaunch(tmp_path) as real:
        real.wait_ready()
        family = real.family()
        real.process.kill()
        real.process.wait(DEADLINE_S)
        until(lambda: gone(family), "the end of the engines", 60)
