"""Where a daemon may not put its socket: one line each, or the next place."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.integration.test_lifecycle import NOBODY, as_nobody, needs_root, run
from trikv import address
from trikv.process.listening import AddressError, bind


def one_line(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert ended.stderr.startswith("trikv-daemon: ")
    for word in words:
        assert word in ended.stderr


def test_a_missing_folder_is_made_and_only_its_owner_may_enter(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "trikv.sock"
    with bind(f"unix:{path}", {}) as (place, sock):
        assert place.path == sock.getsockname() == str(path)
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


@pytest.mark.parametrize("below", ["file/trikv.sock", "file/deeper/trikv.sock"])
def test_a_folder_that_is_none(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    one_line(run("--addr", f"unix:{tmp_path}/{below}", "--pool-size", "8mb"), below)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_where_the_socket_should_be(tmp_path: Path) -> None:
    (tmp_path / "trikv.sock").mkdir()
    one_line(run("--addr", f"unix:{tmp_path}/trikv.sock", "--pool-size", "8mb"), "no socket")
    assert (tmp_path / "trikv.sock").is_dir()


@needs_root
@pytest.mark.parametrize("below", ["trikv.sock", "trikv/trikv.sock"])
def test_a_folder_that_may_not_be_written(tmp_path: Path, below: str) -> None:
    let_others_in(tmp_path)
    os.chmod(tmp_path, 0o555)  # and owned by root
    place = f"unix:{tmp_path}/{below}"
    command = as_nobody("trikv.nursery.serve")
    one_line(run("--addr", place, "--pool-size", "8mb", command=command), below, "Permission")


@needs_root
def test_a_folder_of_which_the_socket_cannot_be_removed(tmp_path: Path) -> None:
    """A stale socket of another user in a folder with the sticky bit, as /tmp is."""
    let_others_in(tmp_path)
    path = tmp_path / "trikv.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    os.chmod(tmp_path, 0o1777)
    command = as_nobody("trikv.nursery.serve")
    ended = run("--addr", f"unix:{path}", "--pool-size", "8mb", command=command)
    one_line(ended, str(path), "not permitted")


def let_others_in(folder: Path) -> None:
    for parent in folder.parents:
        if parent.stat().st_mode & 0o5 != 0o5:
            os.chmod(parent, parent.stat().st_mode | 0o5)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The usual places, below a folder of the test's; the port is any free one."""
    monkeypatch.setattr(address, "SYSTEM_SOCKET", f"{tmp_path}/run/trikv/trikv.sock")
    monkeypatch.setattr(address, "DEFAULT_PORT", 0)
    monkeypatch.setattr(os, "getuid", lambda: 99_999)  # has no folder below /run/user
    return tmp_path


def forbid(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Refuse to make anything below a folder, also to root."""
    make = Path.mkdir

    def mkdir(path: Path, *args: object, **more: object) -> None:
        if str(path).startswith(folder):
            raise PermissionError(13, "Permission denied")
        make(path, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", mkdir)


def test_without_a_system_folder_the_users_is_taken(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, f"{places}/run")
    with bind(None, {"XDG_RUNTIME_DIR": str(places)}) as (place, _):
        assert place.path == f"{places}/trikv/trikv.sock"


@pytest.mark.parametrize("environ", [{}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "/nowhere"}])
def test_without_any_folder_the_port_is_taken(
    places: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    forbid(monkeypatch, f"{places}/run")
    with bind(None, environ) as (place, sock):
        assert place.host == sock.getsockname()[0] == "127.0.0.1"


def test_a_users_folder_that_may_not_be_written_is_passed_over(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, str(places))
    with bind(None, {"XDG_RUNTIME_DIR": str(places)}) as (place, _):
        assert place.host == "127.0.0.1"


def test_no_descriptor_for_a_socket_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("trikv.process.listening.socket.socket", refuse)
    for place in (f"unix:{tmp_path}/s", "127.0.0.1:0"):
        with pytest.raises(AddressError, match="Too many open files"), bind(place, {}):
            pass
    monkeypatch.undo()
    with bind(f"unix:{tmp_path}/s", {}):
        assert os.getuid() != NOBODY
