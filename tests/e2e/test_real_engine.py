"""A real vLLM engine on the CPU: the demo, the negative control, a daemon that dies under it."""

import asyncio
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_model import Model, write_model
from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import RunningDaemon, connected, start_daemon, status
from tests.integration.hosts import cluster, joined, nothing_left

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
ENGINE_S = 600
QUICK_START = re.search(r"--kv-transfer-config '(\{.*\})'", (ROOT / "README.md").read_text())
assert QUICK_START is not None, "README lost its quick start"
CONNECTOR = QUICK_START[1]  # copied literally, as a newcomer would
PATIENT = json.dumps(
    json.loads(CONNECTOR) | {"kv_connector_extra_config": {"trikv.query_timeout_ms": 30_000}}
)
"""Two ranks spin while they wait for each other: on two cores the thread that hears may be late."""
TEXTS = {
    "one": "A lease is a promise that blocks found by a query stay where they are for a while. ",
    "two": "What has begun to copy is stopped at its next step and waited for, never abandoned. ",
    "three": "The pool is cut into slabs, and a slab belongs to the model that cut it last. ",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, Model())
    return folder


class Engine:
    """`examples/run_engine.py` in a process of its own."""

    def __init__(
        self,
        start: Start,
        folder: Path,
        name: str,
        model: Path,
        *more: str,
        socket: Path | None,
        within: tuple[str, ...] = (),
        connector: str = CONNECTOR,
    ) -> None:
        prompts = [{"name": key, "text": 4 * text} for key, text in TEXTS.items()]
        (folder / "prompts.json").write_text(json.dumps(prompts))
        self.out, self.log = folder / f"{name}.json", folder / f"{name}.log"
        command = [*within, sys.executable, str(ROOT / "examples" / "run_engine.py"), str(model)]
        command += ["--prompts", str(folder / "prompts.json"), "--out", str(self.out), *more]
        environ = os.environ | {"VLLM_HOST_IP": "127.0.0.1"}
        if socket is not None:
            command += ["--kv-transfer-config", connector]
            environ["TRIKV_SOCKET"] = str(socket)
        with self.log.open("w") as log:
            self.process = start(command, stdout=log, stderr=subprocess.STDOUT, env=environ)

    def finish(self) -> list[dict[str, Any]]:
        code = self.process.wait(ENGINE_S)
        assert code == 0, self.log.read_text()[-4000:]
        requests: list[dict[str, Any]] = json.loads(self.out.read_text())["requests"]
        return requests


def pool_memory(daemon: RunningDaemon) -> mmap.mmap:
    """The daemon's pool, mapped into this process through the kernel's list of its files."""
    for link in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        if "trikv-pool" in os.readlink(link):
            with link.open("r+b") as file:
                return mmap.mmap(file.fileno(), 0)
    raise AssertionError("the daemon has no pool")


def test_with_the_stored_bytes_negated_the_outputs_differ(
    start: Start, tmp_path: Path, model: Path
) -> None:
    """Otherwise equal outputs would prove nothing: does the engine use what it loads at all?"""
    daemon = start_daemon(start, tmp_path)
    cold = Engine(start, tmp_path, "cold", model, socket=daemon.path).finish()
    assert [request["external_tokens"] for request in cold] == [0, 0, 0]
    pool = pool_memory(daemon)
    values = np.frombuffer(pool, np.uint32)
    values ^= np.uint32(1 << 31)  # the sign of every float32
    negated = Engine(start, tmp_path, "negated", model, socket=daemon.path).finish()
    assert all(request["external_tokens"] > 0 for request in negated)
    assert all(a["output"] != b["output"] for a, b in zip(cold, negated, strict=True))


def test_a_daemon_killed_in_the_middle_of_loads_costs_no_token_and_comes_back(
    start: Start, tmp_path: Path, model: Path
) -> None:
    """One engine, its own cache off, the same prompts again and again; four daemons die."""
    daemon = start_daemon(start, tmp_path)
    enough = tmp_path / "enough"
    more = ("--no-prefix-caching", "--until", str(enough), "--max-tokens", "8")
    engine = Engine(start, tmp_path, "repeated", model, *more, socket=daemon.path)
    for _ in range(4):
        asyncio.run(loading(daemon, engine))
        daemon.process.wait(PATIENCE_S)
        daemon = start_daemon(start, tmp_path)
    asyncio.run(loading(daemon, engine, dies=False))  # hits come back
    enough.touch()
    requests = engine.finish()
    first = {request["name"]: request["output"] for request in requests[: len(TEXTS)]}
    assert all(request["output"] == first[request["name"]] for request in requests)
    assert all(request["finish_reason"] == "length" for request in requests)
    facts = asyncio.run(status(daemon.address))
    assert facts["pool"]["leaseCount"] == 0


async def loading(daemon: RunningDaemon, engine: Engine, *, dies: bool = True) -> None:
    """Wait for loads and a lease: SIGKILL falls between a promise and the blocks' arrival."""
    deadline_s = time.monotonic() + ENGINE_S
    async with connected(daemon.address) as kv:
        while time.monotonic() < deadline_s:
            assert engine.process.poll() is None, engine.log.read_text()[-4000:]
            facts = (await kv.status()).status
            loaded = {row.name: row.value for row in facts.counters}["trikv_load_blocks_total"]
            if facts.pool.leaseCount and loaded:
                if dies:
                    os.kill(daemon.process.pid, signal.SIGKILL)
                return
    message = f"nothing was promised and loaded within {ENGINE_S} s"
    raise TimeoutError(message)


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 4,
    reason="two ranks spin while they wait for each other: four cores",
)
def test_two_ranks_find_what_two_ranks_computed(start: Start, tmp_path: Path, model: Path) -> None:
    """Each has one of the two heads; with the other's bytes the tokens would be others."""
    daemon = start_daemon(start, tmp_path)
    two = ("--tensor-parallel-size", "2", "--max-tokens", "8")
    patient = partial(Engine, start, tmp_path, socket=daemon.path, connector=PATIENT)
    cold = patient("cold", model, *two).finish()
    assert [request["external_tokens"] for request in cold] == [0, 0, 0]
    (namespace,) = asyncio.run(status(daemon.address))["namespaces"]
    warm = patient("warm", model, *two).finish()
    print([(request["external_tokens"], request["prompt_tokens"]) for request in warm])  # noqa: T201
    assert any(request["external_tokens"] > 0 for request in warm)  # later than 2 s is a miss
    assert [one["output"] for one in warm] == [one["output"] for one in cold]
    facts = asyncio.run(status(daemon.address))
    assert [one["fingerprint"] for one in facts["namespaces"]] == [namespace["fingerprint"]]
    assert facts["counters"]["trikv_load_failed_blocks_total"] == 0


def test_an_engine_hits_what_one_of_another_host_computed(
    start: Start, tmp_path: Path, model: Path
) -> None:
    """Two hosts with a daemon each and a metaserver; the blocks come over TCP."""
    with cluster(start, tmp_path) as hosts:
        hosts.meta()
        daemons = [hosts.daemon() for _ in range(2)]
        one, two = daemons
        cold = Engine(
            start, tmp_path, "cold", model, socket=one.path, within=hosts.host_of(one).within
        ).finish()
        assert [request["external_tokens"] for request in cold] == [0, 0, 0]
        asyncio.run(joined(*daemons))
        warm = Engine(
            start, tmp_path, "warm", model, socket=two.path, within=hosts.host_of(two).within
        ).finish()
        print([(request["external_tokens"], request["prompt_tokens"]) for request in warm])  # noqa: T201
        assert all(request["external_tokens"] > 0 for request in warm)
        assert [one["output"] for one in warm] == [one["output"] for one in cold]
        (peer,) = asyncio.run(status(two.address))["cluster"]["peers"]
        assert peer["fetchedBlocks"] > 0
        asyncio.run(nothing_left(*daemons))


def test_the_demo_ends_well(start: Start) -> None:
    demo = start(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = demo.communicate(timeout=1400)
    assert demo.returncode == 0, output
    assert max(map(len, output.splitlines())) <= 80
    found = re.search(r"Second engine: (\d+) of (\d+) prompt tokens came from TriKV", output)
    assert found is not None
    assert int(found[1]) > 0
