"""What the connector must do with the real daemon: restarts, other versions, aborts, freezes."""

import gc
import logging
import os
import subprocess
import threading
import time
from typing import Any

from tests.connector.daemons import PATIENCE_S
from tests.connector.flows import abort_at_random
from tests.connector.forked import ForkedDaemon
from tests.connector.rig import Rig
from tests.connector.world import PROMPT, World, scenario
from trikv.connector import client
from trikv.wire import PROTOCOL

RESTARTS = 100
RSS_BYTES_MAX = 16 << 20
"""What the engine's process may grow by in 90 restarts; a megabyte was seen."""
UNTIMED = ["--lease-seconds", "600", "--fill-seconds", "600"]
"""What is given back is given back by somebody, not because its time is over."""


def forked(world: World, **knobs: Any) -> ForkedDaemon:
    """Put a forked daemon in the place of the world's own."""
    world.daemon.kill()
    daemon = ForkedDaemon(world.folder, **knobs)
    world.daemon = daemon
    return daemon


def cold_and_warm(rig: Rig, name: str, free: int) -> list[int]:
    """A prompt is computed and saved, then found; returns its output."""
    for turn in ("cold", "warm"):
        rig.scheduler.reset_prefix_cache()
        rig.add(f"{name} {turn}", PROMPT, 2)
        rig.run()
        rig.settle(free)
    assert rig.admitted[f"{name} cold"] == 0
    assert rig.admitted[f"{name} warm"] == 96, "no hit"
    assert rig.outputs[f"{name} warm"] == rig.outputs[f"{name} cold"]
    assert not rig.wrong, rig.wrong[:3]
    return rig.outputs[f"{name} warm"]


def held() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


@scenario
def a_hundred_restarts(world: World) -> dict[str, Any]:
    """Hits after each, and nothing of a dead daemon stays in the engine's process."""
    client.BACKOFF_S_MIN, usual_s = 0.02, client.BACKOFF_S_MIN
    daemon = forked(world)
    rig = world.rig()
    free = rig.free
    expected = cold_and_warm(rig, "first", free)
    before = {"descriptors": 0, "threads": 0, "bytes": 0}
    for number in range(RESTARTS):
        if number == RESTARTS // 10:
            before = held()
        daemon.kill()
        rig.add(f"without {number}", PROMPT, 2)
        rig.run()
        assert rig.outputs[f"without {number}"] == expected
        daemon.start()
        rig.wait_attached()
        assert cold_and_warm(rig, f"r{number}", free) == expected
    client.BACKOFF_S_MIN = usual_s
    after = held()
    assert after["descriptors"] <= before["descriptors"]
    assert after["threads"] <= before["threads"]
    assert after["bytes"] - before["bytes"] < RSS_BYTES_MAX, (before, after)
    return {"grown_kib": (after["bytes"] - before["bytes"]) >> 10}


@scenario
def another_version_in_its_place(world: World) -> dict[str, Any]:
    """The next protocol is served, the one after it refused with a line that names both."""
    daemon = forked(world)
    rig = world.rig()
    free = rig.free
    expected = cold_and_warm(rig, "same", free)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log, disabled = logging.getLogger("vllm.trikv"), logging.root.manager.disable
    logging.disable(logging.NOTSET)
    log.addHandler(handler)
    for step in (1, 2, 0, -1, -2, 0):
        if PROTOCOL + step < 0:
            continue
        daemon.kill()
        lines.clear()
        daemon.start(protocol=PROTOCOL + step)
        if abs(step) <= 1:
            rig.wait_attached()
            assert cold_and_warm(rig, f"step {step} {len(rig.outputs)}", free) == expected
            continue
        until = time.monotonic() + PATIENCE_S
        while not any("unsupported-version" in line for line in lines):
            assert time.monotonic() < until, lines
            time.sleep(0.02)
        (refusal,) = {line for line in lines if "unsupported-version" in line}
        assert f"protocol {PROTOCOL + step}" in refusal
        assert f"{PROTOCOL}: upgrade" in refusal
        name = f"alone {step}"
        rig.scheduler.reset_prefix_cache()
        rig.add(name, PROMPT, 2)
        rig.run()
        rig.settle(free)
        assert rig.outputs[name] == expected
        assert rig.admitted[name] == 0
    log.removeHandler(handler)
    logging.disable(disabled)
    return {"said": refusal}


@scenario
def aborts_of_slow_loads(world: World) -> dict[str, Any]:
    """500 requests aborted at random: engine and daemon have as much free as before."""
    daemon = forked(world, copy_s=0.03, arguments=UNTIMED)
    rig = world.rig(blocks=48)
    facts = abort_at_random(world, rig)
    check_daemon_is_empty(rig, daemon)
    return facts


@scenario
def aborts_of_slow_loads_and_deaths(world: World) -> dict[str, Any]:
    """The same, and the daemon dies and comes back meanwhile."""
    daemon = forked(world, copy_s=0.03, arguments=UNTIMED)
    rig = world.rig(blocks=48, extra={"trikv.query_timeout_ms": 200})

    def now_and_then(number: int) -> None:
        if number % 60 == 30:
            daemon.kill()
        if number % 60 == 40:
            daemon.start()
            rig.wait_attached()

    facts = abort_at_random(world, rig, now_and_then)
    rig.wait_attached()
    check_daemon_is_empty(rig, daemon)
    return facts


def check_daemon_is_empty(rig: Rig, daemon: ForkedDaemon) -> None:
    """Nothing is pinned or half there; once the blocks are forgotten, every page is free."""
    until = time.monotonic() + PATIENCE_S
    while True:
        pool = daemon.status()["pool"]
        if not (pool["leaseCount"] or pool["pinnedBytes"] or pool["fillingCount"]):
            break
        assert time.monotonic() < until, pool
        rig.step()
        time.sleep(0.01)
    assert pool["blockCount"] > 0, "nothing was saved: nothing was shown"
    assert rig.connector.reset_cache() is True
    until = time.monotonic() + PATIENCE_S
    while (pool := daemon.status()["pool"])["usedBytes"] or pool["blockCount"]:
        assert time.monotonic() < until, pool  # out of reach at once, and dropped bit by bit
        time.sleep(0.05)


@scenario
def a_frozen_engine_thaws(world: World) -> dict[str, Any]:
    """Stopped in the midst of loads for longer than silence is allowed; its session is lost."""
    daemon = forked(world, copy_s=0.2, arguments=["--heartbeat-seconds", "1.5"])
    rig = world.rig()
    free = rig.free
    expected = cold_and_warm(rig, "before", free)
    rig.scheduler.reset_prefix_cache()
    rig.add("frozen", PROMPT, 2)
    rig.run(until=lambda: rig.free < free)
    rig.step()
    assert rig.worker._worker.loads_in_flight == 1
    me = os.getpid()
    lost = daemon.status()["counters"]["trikv_session_lost_total"]
    with subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep 4; kill -CONT {me}"]):
        time.sleep(0.5)
    rig.run()
    rig.settle(free)
    assert rig.outputs["frozen"] == expected
    assert not rig.wrong
    rig.wait_attached()
    assert daemon.status()["counters"]["trikv_session_lost_total"] > lost, "it was not frozen"
    rig.scheduler.reset_prefix_cache()
    rig.add("thawed", PROMPT, 2)
    rig.run()
    assert rig.admitted["thawed"] == 96
    assert not rig.wrong
    rig.settle(free)
    return {}
