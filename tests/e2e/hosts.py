"""Hosts on a network of their own: network namespaces at the ports of a bridge, whose links can be cut.

The bridge lies in a namespace too: addresses, ports and firewall of the machine are not touched, and no two
networks meet. Takes root, iproute2 and util-linux.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

COMMAND_DEADLINE_S = 10
END_DEADLINE_S = 15
DEVICE = "eth0"
_BRIDGE = "br0"
_CLONE_NEWNET = 0x40000000
_LISTENS = "0A"  # a socket's state in /proc/net/tcp
_OF_THIS_THREAD = Path("/proc/thread-self")
_OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_END_WITH_US = ("setpriv", "--pdeathsig", "KILL")


def why_no_hosts() -> str | None:
    """None if this process may make hosts, else why not."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    missing = [tool for tool in ("ip", "unshare", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces take {', '.join(missing)}, which this machine lacks"
    return _why_refused()


@functools.cache
def _why_refused() -> str | None:
    try:
        with Network("one", "other") as network:
            _run("ip", "netns", "exec", network["one"].namespace, *_END_WITH_US, *_OWN_PROCESSES, "true")
            with network["other"].entered():
                return None
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"this machine makes no network namespaces: {error}"


class Host:
    """One namespace, with loopback and one link, whose other end is a port of the bridge."""

    def __init__(self, address: str, *, namespace: str, switch: str, port: str) -> None:
        self.address, self.namespace, self.port = address, namespace, port
        self._switch = switch

    @contextmanager
    def serving(
        self, command: Sequence[str], log: Path, *, cwd: Path, environment: Mapping[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a server until the block ends; all that it has started is then gone.

        It is the first process of a namespace of processes: hosts do not see each other's, as on machines.
        """
        enter = (*_END_WITH_US, "ip", "netns", "exec", self.namespace, *_OWN_PROCESSES)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*enter, *command],
                cwd=cwd,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with suppress(psutil.Error):
                for server in psutil.Process(process.pid).children():
                    server.send_signal(signal.SIGTERM)
            try:
                process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # and with it, by --kill-child, everybody of the namespace
                process.wait(END_DEADLINE_S)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """In the block, sockets, threads and processes that this thread makes are the host's."""
        with (_OF_THIS_THREAD / "ns/net").open("rb") as before:
            with Path(f"/var/run/netns/{self.namespace}").open("rb") as network:
                _set_network(network.fileno())
            try:
                yield
            finally:
                _set_network(before.fileno())

    def cut(self) -> None:
        """Nothing passes the link any more; nobody is told, and both ends look as before."""
        _run("ip", "-n", self._switch, "link", "set", self.port, "nomaster")

    def mend(self) -> None:
        """The link is as it was."""
        _run("ip", "-n", self._switch, "link", "set", self.port, "master", _BRIDGE)

    def received_bytes(self) -> int:
        """What has come over the link so far, headers included."""
        return self._link_count(0)

    def sent_bytes(self) -> int:
        """What has gone over the link, or into the cut one, so far, headers included."""
        return self._link_count(8)

    def listening(self) -> set[tuple[str, int]]:
        """Addresses and ports that somebody in the host listens on; IPv4's are in its own notation."""
        found = set()
        for table in ("tcp", "tcp6"):
            for line in self._read(f"net/{table}").splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == _LISTENS:
                    address, _, port = local.partition(":")
                    found.add((_shown(address), int(port, 16)))
        return found

    def _link_count(self, column: int) -> int:
        lines = self._read("net/dev").splitlines()
        (counts,) = (line.partition(":")[2] for line in lines if line.strip().startswith(f"{DEVICE}:"))
        return int(counts.split()[column])

    def _read(self, name: str) -> str:
        with self.entered():
            return (_OF_THIS_THREAD / name).read_text()


class Network:
    """Hosts with the addresses 10.0.0.1, 10.0.0.2, ... in the order of their names; all go with the block."""

    def __init__(self, *names: str) -> None:
        prefix = f"kvstrata-{os.getpid()}-{secrets.token_hex(4)}"
        self._switch = f"{prefix}-switch"
        self._hosts = {
            name: Host(f"10.0.0.{n}", namespace=f"{prefix}-{name}", switch=self._switch, port=f"port{n}")
            for n, name in enumerate(names, 1)
        }
        self._stack = ExitStack()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            self._add(stack, self._switch)
            _run("ip", "-n", self._switch, "link", "add", "name", _BRIDGE, "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", _BRIDGE, "up")
            for host in self._hosts.values():
                self._add(stack, host.namespace)
                ends = ("name", host.port, "type", "veth", "peer", "name", DEVICE, "netns", host.namespace)
                _run("ip", "-n", self._switch, "link", "add", *ends)
                _run("ip", "-n", self._switch, "link", "set", host.port, "master", _BRIDGE, "up")
                _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", DEVICE)
                for device in ("lo", DEVICE):
                    _run("ip", "-n", host.namespace, "link", "set", device, "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _add(self, stack: ExitStack, namespace: str) -> None:
        _run("ip", "netns", "add", namespace)
        stack.callback(_run, "ip", "netns", "delete", namespace)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _shown(address: str) -> str:
    """An address of /proc/net/tcp or tcp6: hexadecimal words, of the machine's byte order, as text."""
    words = [bytes.fromhex(address[at : at + 8]) for at in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(w if sys.byteorder == "big" else w[::-1] for w in words))
    return str(getattr(found, "ipv4_mapped", None) or found)


def _set_network(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a network namespace could not be entered")
