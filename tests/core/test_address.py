"""The spelling of addresses, and where clients look."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trikv import address
from trikv.address import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    UNIX_PATH_BYTES_MAX,
    Address,
    explicit,
    parse,
    runtime_socket,
    search,
)

TCP = Address(host=DEFAULT_HOST, port=DEFAULT_PORT)
LONGEST = "/" + "x" * (UNIX_PATH_BYTES_MAX - 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unix:/run/a.sock", Address(path="/run/a.sock")),
        ("/run/a.sock", Address(path="/run/a.sock")),
        ("  /run/a b:1  ", Address(path="/run/a b:1")),
        (LONGEST, Address(path=LONGEST)),
        ("host:1", Address(host="host", port=1)),
        ("tcp:host:65535", Address(host="host", port=65535)),
        ("127.0.0.1:0", Address(host="127.0.0.1", port=0)),
        ("[::1]:80", Address(host="::1", port=80)),
        ("tcp:[fe80::1%eth0]:80", Address(host="fe80::1%eth0", port=80)),
    ],
)
def test_these_are_addresses(text: str, expected: Address) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "unix:", "unix:a.sock", "a.sock", "host", "host:", ":80", "tcp:80", "[]:80"),
        *("host:65536", "host:-1", "host:8x", "host:0x50", "host: 80", "host:²", "[::1]"),
        LONGEST + "x",
        "/" + "é" * (UNIX_PATH_BYTES_MAX // 2) + "x",
    ],
)
def test_these_are_none_and_the_reason_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|path") as caught:
        parse(text)
    assert len(str(caught.value).splitlines()) == 1
    assert repr(text) in str(caught.value)


HOSTS = st.one_of(st.text("az09.-", min_size=1, max_size=9), st.sampled_from(["::1", "fe80::2"]))
PATHS = st.text("aé /:.[]", max_size=20).map(lambda rest: f"/{rest}x")


@given(HOSTS, st.integers(0, 65535))
def test_what_is_shown_can_be_read(host: str, port: int) -> None:
    assert parse(str(Address(host=host, port=port))) == Address(host=host, port=port)


@given(PATHS)
def test_a_shown_path_can_be_read(path: str) -> None:
    assert parse(str(Address(path=path))) == Address(path=path)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except ValueError:
        return
    assert found.is_unix != bool(found.host)
    assert 0 <= found.port <= 65535


def test_families_and_targets() -> None:
    assert parse("/a").family is socket.AF_UNIX
    assert parse("/a").target == "/a"
    assert parse("[::1]:5").family is socket.AF_INET6
    assert parse("h:5").family is socket.AF_INET
    assert parse("h:5").target == ("h", 5)


@pytest.mark.parametrize("text", ["/a", "localhost:1", "127.0.0.1:1", "127.8.9.1:1", "[::1]:1"])
def test_only_this_machine_reaches(text: str) -> None:
    assert parse(text).is_loopback


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "host:1", "128.0.0.1:1"])
def test_other_machines_reach(text: str) -> None:
    assert not parse(text).is_loopback


def test_a_name_that_looks_like_loopback_is_none() -> None:
    assert not parse("127.attacker.example:1").is_loopback


# -- the environment


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"TRIKV_SOCKET": ""}, None),
        ({"TRIKV_SOCKET": "/a"}, Address(path="/a")),
        ({"TRIKV_SOCKET": "unix:/a"}, Address(path="/a")),
        ({"TRIKV_SOCKET": "/a", "TRIKV_HOST": "h", "TRIKV_PORT": "1"}, Address(path="/a")),
        ({"TRIKV_HOST": "h"}, Address(host="h", port=DEFAULT_PORT)),
        ({"TRIKV_PORT": "1"}, Address(host=DEFAULT_HOST, port=1)),
        ({"TRIKV_HOST": "h", "TRIKV_PORT": "1"}, Address(host="h", port=1)),
        ({"TRIKV_HOST": "::1", "TRIKV_PORT": "1"}, Address(host="::1", port=1)),
        ({"TRIKV_HOST": "h", "TRIKV_PORT": ""}, Address(host="h", port=DEFAULT_PORT)),
        ({"HOST": "h", "XDG_RUNTIME_DIR": "/"}, None),
    ],
)
def test_what_the_environment_names(environ: dict[str, str], expected: Address | None) -> None:
    assert explicit(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [{"TRIKV_SOCKET": "a"}, {"TRIKV_SOCKET": "host:80"}, {"TRIKV_PORT": "x"}, {"TRIKV_PORT": "-1"}],
)
def test_a_wrong_value_in_the_environment_is_one_line(environ: dict[str, str]) -> None:
    for look in (explicit, search):
        with pytest.raises(ValueError, match=next(iter(environ.values()))) as caught:
            look(environ)
        assert len(str(caught.value).splitlines()) == 1


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert explicit({"TRIKV_HOST": ""}) is None
    assert explicit({"TRIKV_HOST": "", "TRIKV_PORT": ""}) is None


# -- the search


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's socket, not there yet."""
    path = tmp_path / "system.sock"
    monkeypatch.setattr(address, "SYSTEM_SOCKET", str(path))
    return path


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """The socket in the user's runtime directory, not there yet; its folder is."""
    path = tmp_path / "user" / "trikv" / "trikv.sock"
    path.parent.mkdir(parents=True)
    return path


def environ_of(users: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(users.parent.parent)}


def test_the_search_goes_from_the_system_to_the_user_to_the_port(system: Path, users: Path) -> None:
    environ = environ_of(users)
    assert runtime_socket(environ) == str(users)
    assert search(environ) == [TCP]
    users.touch()
    assert search(environ) == [Address(path=str(users)), TCP]
    system.touch()
    assert search(environ) == [Address(path=str(system)), Address(path=str(users)), TCP]
    users.unlink()
    assert search(environ) == [Address(path=str(system)), TCP]


def test_a_named_address_is_the_only_one(system: Path, users: Path) -> None:
    system.touch()
    users.touch()
    environ = {**environ_of(users), "TRIKV_HOST": "h"}
    assert search(environ) == [Address(host="h", port=DEFAULT_PORT)]
    assert search(environ, "/given") == [Address(path="/given")]
    assert search(environ, "") == search(environ, None) == search(environ)
    with pytest.raises(ValueError, match="no address"):
        search(environ, "nowhere")


def test_without_a_runtime_directory_there_is_no_users_socket(system: Path, tmp_path: Path) -> None:
    system.touch()
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "gone")}
    assert runtime_socket(environ) is None
    assert search(environ) == [Address(path=str(system)), TCP]
    (tmp_path / "gone").touch()  # a file is no directory
    assert runtime_socket(environ) is None


@pytest.fixture
def nobody() -> Iterator[None]:
    """The rights of a user who owns nothing here, where we may become one."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.seteuid(65_534)
    yield
    os.seteuid(0)


@pytest.mark.parametrize("hidden", ["system", "user"])
def test_a_socket_in_a_private_folder_of_another_user_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str, request: pytest.FixtureRequest
) -> None:
    """Root's daemon has its folder closed, and sudo keeps the first user's XDG_RUNTIME_DIR."""
    private = tmp_path / "private" / "trikv"
    private.mkdir(parents=True, mode=0o700)
    private.parent.chmod(0o700)
    socket_path = private / "trikv.sock"
    socket_path.touch()
    monkeypatch.setattr(
        address, "SYSTEM_SOCKET", str(socket_path) if hidden == "system" else "/nowhere"
    )
    runtime = private.parent if hidden == "user" else tmp_path / "gone"
    request.getfixturevalue("nobody")
    assert search({"XDG_RUNTIME_DIR": str(runtime)}) == [TCP]
