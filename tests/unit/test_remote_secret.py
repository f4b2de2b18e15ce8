"""Where the shared secret comes from, and which are refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.errors import ConfigurationError
from kvstrata.remote.protocol.secret import MIN_CHARS, is_loopback, load_secret, secret_path

LOOPBACK, OUTSIDE = "127.0.0.1", "10.0.0.5"


def environ(cache: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(cache), "HOME": str(cache / "home")}


@pytest.mark.parametrize("host", [LOOPBACK, OUTSIDE])
def test_an_explicit_secret_comes_before_the_environment(host: str, tmp_path: Path) -> None:
    env = environ(tmp_path) | {"KVSTRATA_REMOTE_SECRET": "from-the-environment"}
    assert load_secret("an-explicit-one", host=host, environ=env) == b"an-explicit-one"
    assert load_secret(None, host=host, environ=env) == b"from-the-environment"
    assert list(tmp_path.iterdir()) == [], "no file is made that nobody needs"


def test_the_real_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_REMOTE_SECRET", "from-the-environment")
    assert load_secret(None, host=OUTSIDE) == b"from-the-environment"


def test_a_host_that_others_reach_needs_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"remote_secret is not set and host '10\.0\.0\.5'"):
        load_secret(None, host=OUTSIDE, environ=environ(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("*", False),
        ("10.0.0.5", False),
        ("128.0.0.1", False),
        ("127.0.0.1.example.org", False),
        ("localhost.example.org", False),
        ("node7", False),
    ],
)
def test_which_hosts_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_on_loopback_the_user_has_a_secret_of_their_own(tmp_path: Path) -> None:
    first = load_secret(None, host=LOOPBACK, environ=environ(tmp_path))
    path = tmp_path / "kvstrata" / "remote_secret"
    assert path == secret_path(environ(tmp_path))
    assert len(first) == 64
    assert path.read_bytes() == first + b"\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["remote_secret"]
    assert load_secret(None, host="localhost", environ=environ(tmp_path)) == first


def test_the_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        load_secret(None, host=LOOPBACK, environ=environ(tmp_path))
    finally:
        os.umask(before)
    path = secret_path(environ(tmp_path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_two_users_have_two_secrets(tmp_path: Path) -> None:
    one = load_secret(None, host=LOOPBACK, environ=environ(tmp_path / "one"))
    assert one != load_secret(None, host=LOOPBACK, environ=environ(tmp_path / "two"))


@pytest.mark.parametrize("cache", [None, "", "relative/cache"])
def test_without_a_cache_directory_it_lies_in_the_home(cache: str | None) -> None:
    env = {"HOME": "/home/x"} | ({} if cache is None else {"XDG_CACHE_HOME": cache})
    assert secret_path(env) == Path("/home/x/.cache/kvstrata/remote_secret")


def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    code = (
        "import sys; sys.stdin.read()\n"
        "from kvstrata.remote.protocol.secret import load_secret\n"
        "print(load_secret(None, host='localhost').decode())"
    )
    env = os.environ | environ(tmp_path)
    env.pop("KVSTRATA_REMOTE_SECRET", None)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )
        for _ in range(4)
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    said = {process.communicate(timeout=60)[0] for process in started}
    assert [process.returncode for process in started] == [0] * 4
    assert said == {secret_path(environ(tmp_path)).read_text()}


def test_the_maker_that_comes_second_takes_the_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = secret_path(environ(tmp_path))
    link = os.link

    def late(draft: str, target: Path) -> None:
        path.write_text("the-first-ones-secret\n")
        path.chmod(0o600)
        link(draft, target)

    monkeypatch.setattr(os, "link", late)
    assert load_secret(None, host=LOOPBACK, environ=environ(tmp_path)) == b"the-first-ones-secret"
    assert [entry.name for entry in path.parent.iterdir()] == ["remote_secret"]


def made(tmp_path: Path, text: str = "a-secret-in-a-file\n", mode: int = 0o600) -> Path:
    path = secret_path(environ(tmp_path))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606, 0o620, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = made(tmp_path, mode=mode)
    with pytest.raises(ConfigurationError, match="only its owner") as refused:
        load_secret(None, host=LOOPBACK, environ=environ(tmp_path))
    assert str(path) in str(refused.value)
    assert "a-secret-in-a-file" not in str(refused.value)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigurationError, match="only its owner"):
        load_secret(None, host=LOOPBACK, environ=environ(tmp_path))


def test_a_link_a_directory_or_a_pipe_is_no_secret(tmp_path: Path) -> None:
    path = made(tmp_path)
    target = path.rename(path.with_name("elsewhere"))
    path.symlink_to(target)
    with pytest.raises(ConfigurationError, match=r"remote_secret is not set and .* cannot keep one"):
        load_secret(None, host=LOOPBACK, environ=environ(tmp_path))
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigurationError, match="remote_secret"):
        load_secret(None, host=LOOPBACK, environ=environ(tmp_path))
    path.rmdir()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigurationError, match="only its owner"):
        load_secret(None, host=LOOPBACK, environ=environ(tmp_path))


@pytest.mark.parametrize("text", ["", "\n", "short\n", "two words here\n", "x" * 5000])
def test_a_file_without_a_usable_secret_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = made(tmp_path, text)
    with pytest.raises(ConfigurationError, match=f"{path} holds no secret"):
        load_secret(None, host=LOOPBACK, environ=environ(tmp_path))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path)
    path.write_bytes(b"\xff\xfe" * 20)
    with pytest.raises(ConfigurationError, match="cannot keep one"):
        load_secret(None, host=LOOPBACK, environ=environ(tmp_path))


def test_a_place_that_cannot_be_written_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "kvstrata").write_text("a file where the directory should be")
    with pytest.raises(ConfigurationError, match="set remote_secret or KVSTRATA_REMOTE_SECRET"):
        load_secret(None, host=LOOPBACK, environ=environ(tmp_path))


@pytest.mark.parametrize(
    "secret",
    ["", "x" * (MIN_CHARS - 1), "with a space", "tab\tinside", "line\nbreak", "schlüssel", "x" * 1025],
)
def test_a_secret_that_is_short_or_no_header_value_is_refused_without_showing_it(secret: str) -> None:
    with pytest.raises(ConfigurationError, match="remote_secret holds no secret") as refused:
        load_secret(secret, host=LOOPBACK)
    assert not secret or secret not in str(refused.value)
    with pytest.raises(ConfigurationError, match="KVSTRATA_REMOTE_SECRET holds no secret"):
        load_secret(None, host=LOOPBACK, environ={"KVSTRATA_REMOTE_SECRET": secret})


def test_the_shortest_secret_is_taken() -> None:
    assert load_secret("x" * MIN_CHARS, host=LOOPBACK) == b"x" * MIN_CHARS


def test_the_error_names_the_option_that_was_used() -> None:
    with pytest.raises(ConfigurationError, match="--secret is not set"):
        load_secret(None, host=OUTSIDE, environ={}, knob="--secret")
