"""The process: settings and refusals, its pages, its command, and what a full index does."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import PATIENCE_S, Start
from tests.meta.callers import ONE, SECRET, TWO
from tests.meta.metas import (
    ROOT,
    A,
    B,
    LightNode,
    RunningMeta,
    clean_environment,
    finds,
    in_cluster,
    keys,
    meta_command,
    start_meta,
    until,
)
from trikv.core.owners import capacity_for
from trikv.meta import serve
from trikv.meta.counters import METHODS
from trikv.meta.status import FAMILIES, names
from trikv.options import SettingError

STATUS = (sys.executable, "-m", "trikv.cli.main", "meta", "status")
ANY_PORT = ("--addr", "127.0.0.1:0", "--http-addr", "off")


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        meta_command(*arguments),
        env=clean_environment() | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused(tmp_path: Path) -> list[tuple[tuple[str, ...], str]]:
    short, missing = tmp_path / "short", tmp_path / "missing"
    short.write_text("too short\n")
    where = "--cluster-secret-file"
    return [
        (("--addr", "0.0.0.0:0"), "--addr 0.0.0.0:0: other machines can reach it: give --cluster"),
        (("--addr", "[::]:0"), "--addr [::]:0: other machines can reach it: give --cluster"),
        (("--addr", "unix:/run/x"), "--addr: 'unix:/run/x' is no host:port"),
        (("--addr", "nonsense"), "--addr: 'nonsense' is no address"),
        (("--advertise-addr", "unix:/a"), "--advertise-addr: 'unix:/a' is no host:port"),
        (("--memory", "1mb"), "--memory: '1mb': must be at least"),
        (("--memory", "much"), "--memory: 'much': expected a size"),
        (("--max-nodes", "0"), "--max-nodes: '0': expected a number from 1 to 4096"),
        (("--node-seconds", "nan"), "--node-seconds: 'nan': expected a number"),
        ((where, str(short)), f"{where} {short}: the first line must have 16 to 4096 bytes"),
        ((where, str(missing)), f"{where} {missing}: No such file"),
        ((where, str(tmp_path)), f"{where} {tmp_path}: Is a directory"),
        (("--insecure", "perhaps"), "--insecure: 'perhaps': expected true or false"),
        (("--unknown", "1"), "unrecognized arguments: --unknown 1"),
    ]


@pytest.mark.parametrize("which", range(14))
def test_a_wrong_setting_is_one_line_that_names_it_and_exit_2(tmp_path: Path, which: int) -> None:
    arguments, line = refused(tmp_path)[which]
    if which not in (0, 5, 9, 13):  # real processes for some, the rest in this one: the same code
        check_in_process(arguments, line)
        return
    ended = run(*arguments, *(() if "--addr" in arguments else ANY_PORT))
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"trikv-meta: {line}")
    assert ended.stderr.count("\n") == 1
    assert "too short" not in ended.stderr


def check_in_process(arguments: tuple[str, ...], line: str) -> None:
    with pytest.raises(SettingError) as caught:
        _ = serve.build(serve.load(arguments, {})).advertised
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_taken_port_is_one_line_and_exit_1(start: Start, tmp_path: Path) -> None:
    meta = start_meta(start, tmp_path)
    ended = run("--addr", meta.address, "--http-addr", "off")
    assert ended.returncode == 1
    assert ended.stderr == f"trikv-meta: --addr {meta.address}: Address already in use\n"


@pytest.mark.parametrize("how", ["insecure", "secret"])
def test_others_may_reach_it_with_a_secret_or_when_told_so(
    start: Start, tmp_path: Path, how: str
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    arguments = {
        "insecure": ("--insecure",),
        "secret": ("--cluster-secret-file", str(tmp_path / "secret")),
    }
    meta = start_meta(start, tmp_path, "--addr", "0.0.0.0:0", *arguments[how])
    assert meta.events("meta.ready")[0]["secure"] is (how == "secret")
    assert meta.end() == 0


def test_settings_come_from_environment_and_file_too(tmp_path: Path) -> None:
    file = tmp_path / "meta.toml"
    file.write_text('memory = "32mb"\nnode-seconds = 9\nmax-nodes = 7\n')
    environ = {"TRIKV_META_MAX_NODES": "8", "TRIKV_META_CONFIG": str(file)}
    settings = serve.load(["--node-seconds", "3"], environ)
    assert (settings.memory, settings.max_nodes, settings.node_seconds) == (32 << 20, 8, 3.0)
    assert settings.addr == "127.0.0.1:50056"


# -- pages and command


@pytest.fixture(scope="module")
def shown(start_here: Start, tmp_path_factory: pytest.TempPathFactory) -> RunningMeta:
    """A metaserver that has seen two nodes, one of which is still there."""
    return start_meta(start_here, tmp_path_factory.mktemp("shown"), "--http-addr", "127.0.0.1:0")


def get(meta: RunningMeta, path: str) -> str:
    with urllib.request.urlopen(meta.http + path, timeout=PATIENCE_S) as reply:
        return str(reply.read().decode())


def command(meta: RunningMeta, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STATUS, "--addr", meta.address, *arguments],
        env=clean_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@in_cluster
async def test_status_and_metrics_say_the_same(shown: RunningMeta) -> None:
    one, two = (LightNode(address, [shown.address]) for address in (ONE, TWO))
    one.held[A], one.lent = [keys(1, 1_000)], 12
    async with trio.open_nursery() as nursery:
        for node in (one, two):
            await nursery.start(node.run)
        await finds(two, A, keys(1, 1_000), [ONE] * 1_000)
        two.scope.cancel()
        await until(lambda: shown.events("node.left"))
        page = await trio.to_thread.run_sync(get, shown, "/metrics")
        table = await trio.to_thread.run_sync(command, shown)
        as_json = await trio.to_thread.run_sync(lambda: command(shown, "--json"))
        ready = await trio.to_thread.run_sync(get, shown, "/ready")
        nursery.cancel_scope.cancel()
    facts = json.loads(as_json.stdout)
    (node,) = facts["nodes"]
    assert (node["address"], node["heldCount"], node["lentBlocks"]) == (ONE, 1_000, 12)
    assert node["isComplete"] is True
    assert node["epoch"] == one.epoch
    assert facts["entryCount"] == 1_000
    assert facts["capacity"] == capacity_for(8 << 20)
    assert facts["counters"]["trikv_meta_locate_found_blocks_total"] >= 1_000
    assert table.returncode == 0
    assert all(len(line) <= 80 for line in table.stdout.splitlines())
    assert f"{ONE:<38}{1_000:>12}{12:>8}{0:>11}  complete" in table.stdout.splitlines()
    assert ready == "serving\n"
    check_page(page, facts)


def check_page(page: str, facts: dict[str, Any]) -> None:
    families = list(text_string_to_metric_families(page))
    told = [f"{one.name}_total" if one.type == "counter" else one.name for one in families]
    assert told == names()
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert values["trikv_meta_entries",] == facts["entryCount"]
    assert values["trikv_meta_nodes", "complete"] == 1
    assert values["trikv_meta_nodes", "announcing"] == 0
    assert values["trikv_meta_state", "serving"] == 1
    assert values["trikv_meta_index_bytes",] == facts["memoryBytes"]
    assert values["trikv_meta_node_joined_total",] == 2
    for family in families:
        labels = FAMILIES[family.name].labels if family.name in FAMILIES else None
        for sample in family.samples:
            wanted = labels if labels is not None else FAMILIES.get(sample.name, ((), ()))[1]
            assert sample.labels.keys() == set(wanted)
    methods = {key[1] for key in values if key[0] == "trikv_meta_rpc_total"}
    assert methods == set(METHODS)


def test_the_command_says_in_one_line_why_there_is_no_answer(
    guarded: RunningMeta, tmp_path: Path
) -> None:
    ended = command(guarded)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        f"trikv: no metaserver: {guarded.address}: "
        "it asks for the secret: give --cluster-secret-file\n"
    )
    (tmp_path / "secret").write_bytes(SECRET)
    assert command(guarded, "--cluster-secret-file", str(tmp_path / "secret")).returncode == 0
    ended = command(guarded, "--cluster-secret-file", str(tmp_path / "none"))
    assert ended.returncode == 2
    nowhere = RunningMeta(guarded.process, guarded.log, "127.0.0.1:1", "")
    ended = command(nowhere)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith("trikv: no metaserver: 127.0.0.1:1: ")


# -- a full index


def test_what_a_full_index_declines_is_announced_once_there_is_room(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trikv.meta.client.REPAIR_S_MIN", 0.3)
    meta = start_meta(start, tmp_path, "--memory", "2mb", "--node-seconds", "3")
    capacity = capacity_for(2 << 20)

    @in_cluster
    async def test() -> None:
        one, two, three = (LightNode(at, [meta.address]) for at in (ONE, TWO, "10.0.0.3:1"))
        one.held[A] = [keys(1, capacity - 10)]
        async with trio.open_nursery() as nursery:
            for node in (one, three):
                await nursery.start(node.run)
            await finds(three, A, keys(1, capacity - 10)[-5:], [ONE] * 5)
            two.held[B] = [keys(2, 100)]
            await nursery.start(two.run)
            await finds(three, B, keys(2, 100), [TWO] * 10)
            await until(lambda: two.is_announced)
            assert len(meta.events("node.announced")[-1:]) == 1
            declined = [event["block_count_declined"] for event in meta.events("node.announced")]
            assert 90 in declined
            one.evict(A, keys(1, capacity - 10)[:500])
            await finds(three, B, keys(2, 100), [TWO] * 100)
            nursery.cancel_scope.cancel()

    test()
    assert meta.end() == 0
