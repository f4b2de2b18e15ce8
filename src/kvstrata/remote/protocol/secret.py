"""The secret that prefill, decode and proxy share: who does not know it is not listened to."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from kvstrata.errors import ConfigurationError

ENVIRONMENT_VARIABLE = "KVSTRATA_REMOTE_SECRET"
MIN_CHARS = 8
_MAX_CHARS = 1024


def load_secret(
    explicit: str | None, *, host: str, environ: Mapping[str, str] = os.environ, knob: str = "remote_secret"
) -> bytes:
    """Return the secret: `explicit`, else KVSTRATA_REMOTE_SECRET, else for a loopback `host` the user's own.

    The user's own is a file that only they can read, made on first use. Raises ConfigurationError naming
    `knob`, never the secret, if there is none for another host, if it cannot be a secret (too short, or not
    fit for an HTTP header), or if the file could be read by others.
    """
    if explicit is not None:
        return _checked(explicit, knob)
    if ENVIRONMENT_VARIABLE in environ:
        return _checked(environ[ENVIRONMENT_VARIABLE], ENVIRONMENT_VARIABLE)
    if not is_loopback(host):
        raise ConfigurationError(
            f"{knob} is not set and host {host!r} can be reached from other machines: set {knob}, or "
            f"{ENVIRONMENT_VARIABLE}, to the same secret on every machine"
        )
    path = secret_path(environ)
    try:
        return _checked(_read_or_make(path), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise ConfigurationError(
            f"{knob} is not set and {path} cannot keep one ({why}); set {knob} or {ENVIRONMENT_VARIABLE}"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. Names other than `localhost` are not looked up: they count
    as reachable from outside."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def secret_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where a user's own secret lies, whether or not it exists."""
    cache = Path(environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # by the XDG rules such a value is to be ignored
        cache = Path(environ["HOME"] if environ.get("HOME") else os.path.expanduser("~")) / ".cache"
    return cache / "kvstrata" / "remote_secret"


def _read_or_make(path: Path) -> str:
    try:
        return _read(path)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Complete before it has its name, and linked rather than renamed: of two processes that start together,
    # one makes the secret and both read it.
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
    return _read(path)


def _read(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd) as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigurationError(
                f"{path} must be a file that only its owner, the user who runs this, can read "
                f"(mode {stat.filemode(found.st_mode)}, owner {found.st_uid}): remove it, it is made anew"
            )
        return file.read(_MAX_CHARS + 2).strip()


def _checked(secret: str, source: str) -> bytes:
    if not MIN_CHARS <= len(secret) <= _MAX_CHARS or not all("!" <= char <= "~" for char in secret):
        raise ConfigurationError(
            f"{source} holds no secret that can be used: it has {len(secret)} characters; {MIN_CHARS} to "
            f"{_MAX_CHARS} printable ASCII characters without spaces are needed"
        )
    return secret.encode("ascii")
