"""What the connector must do with vLLM's real scheduler, one function each.

    python scenarios.py FOLDER [NAME ...]

Prints one JSON line a scenario: {"name", "ok", "facts" or "error"}. Started by
test_scheduler_contract.py, once for each vLLM version.
"""

import inspect
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from daemons import Daemon
from rig import BLOCK, Rig, prefix_values  # noqa: F401

SCENARIOS: list[Callable[["World"], dict[str, Any]]] = []
PROMPT = [10 + (i * 7) % 200 for i in range(100)]


class World:
    """A daemon of one's own, and engines that are closed at the end."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.daemon = Daemon(folder)
        self.rigs: list[Rig] = []

    def rig(self, *, wait: bool = True, **options: Any) -> Rig:
        rig = Rig(self.model, self.daemon.address, **options)
        self.rigs.append(rig)
        if wait:
            rig.wait_attached()
        return rig

    def warmed(self, prompt: list[int], blocks: int) -> list[int]:
        """Let an engine compute and save a prompt; returns its output."""
        rig = self.rig()
        rig.add("cold", prompt)
        rig.run()
        self.daemon.wait("saved", blocks)
        assert not rig.wrong
        output = rig.outputs["cold"]
        rig.close()
        self.rigs.remove(rig)
        return output

    def close(self) -> None:
        for rig in self.rigs:
            rig.close()
        self.daemon.kill()


def scenario(function: Callable[[World], dict[str, Any]]) -> Callable[[World], dict[str, Any]]:
    SCENARIOS.append(function)
    return function


@scenario
def cold_then_warm(world: World) -> dict[str, Any]:
    cold = world.warmed(PROMPT, 6)
    rig = world.rig()
    free = rig.free
    rig.add("warm", PROMPT)
    rig.run()
    rig.settle(free)
    assert rig.admitted["warm"] == 96, rig.admitted
    assert not rig.wrong, rig.wrong
    assert rig.outputs["warm"] == cold
    counts = world.daemon.counts()
    assert counts["loaded"] == 6
    assert counts["leases"] == 0 or world.daemon.wait("released", 2) is None
    return {"steps": rig.steps}


@scenario
def negated_bytes_are_seen(world: World) -> dict[str, Any]:
    """The control: if this rig could not see wrong bytes, the others would prove nothing."""
    cold = world.warmed(PROMPT, 6)
    world.daemon.tell(negate=True)
    rig = world.rig()
    rig.add("warm", PROMPT)
    rig.run()
    assert rig.wrong
    assert rig.outputs["warm"] != cold
    return {}


@scenario
def full_prompt_hit_leaves_a_token(world: World) -> dict[str, Any]:
    prompt = PROMPT[:96]
    cold = world.warmed(prompt, 6)
    rig = world.rig()
    rig.add("warm", prompt)
    rig.run()
    assert rig.admitted["warm"] == 80
    assert rig.outputs["warm"] == cold
    assert not rig.wrong
    return {}


@scenario
def local_hit_then_external(world: World) -> dict[str, Any]:
    """The engine has the first blocks itself, the daemon the rest."""
    cold = world.warmed(PROMPT, 6)
    rig = world.rig()
    free = rig.free
    world.daemon.tell(refuse="overloaded")
    rig.add("short", PROMPT[:40], 1)
    rig.run()
    rig.settle(free)
    world.daemon.tell(refuse=None)
    rig.add("long", PROMPT)
    rig.run()
    assert rig.admitted["long"] == 96
    assert world.daemon.counts()["loaded"] == 4
    assert rig.outputs["long"] == cold
    assert not rig.wrong
    rig.settle(free)
    return {}


@scenario
def abort_during_load(world: World) -> dict[str, Any]:
    world.warmed(PROMPT, 6)
    world.daemon.tell(load_s=0.3)
    rig = world.rig()
    free = rig.free
    rig.add("gone", PROMPT)
    rig.run(until=lambda: rig.free < free)
    rig.step()
    rig.abort("gone")
    assert free - rig.free == 6
    rig.step()
    assert free - rig.free == 6
    rig.settle(free)
    rig.add("next", PROMPT)
    rig.run()
    assert rig.admitted["next"] == 96
    assert not rig.wrong
    rig.settle(free)
    return {}


@scenario
def aborts_at_random_moments(world: World) -> dict[str, Any]:
    chance = random.Random(7)
    prompts = [[chance.randrange(3, 200) for _ in range(chance.randrange(33, 160))] for _ in range(12)]
    for prompt in prompts[:6]:
        world.daemon.tell(query_s=0, load_s=0, save_s=0)
    rig = world.rig(blocks=48)
    free = rig.free
    world.daemon.tell(load_s=0.004, save_s=0.002, query_s=0.001)
    alive: list[str] = []
    for number in range(500):
        name = f"r{number}"
        rig.add(name, chance.choice(prompts), chance.randrange(1, 5))
        alive.append(name)
        for _ in range(chance.randrange(3)):
            rig.step()
            if chance.random() < 0.3:
                time.sleep(0.002)
        if len(alive) > chance.randrange(1, 8):
            rig.abort(alive.pop(chance.randrange(len(alive))))
        if chance.random() < 0.2:
            # forget what the engine itself has, so that the daemon is asked
            rig.scheduler.reset_prefix_cache()
    for name in alive:
        rig.abort(name)
    rig.settle(free, 30)
    assert not rig.wrong, rig.wrong[:3]
    world.daemon.wait("released", 1)
    counts = world.daemon.counts()
    assert counts["loaded"] > 100
    until = time.monotonic() + 10
    while world.daemon.counts()["leases"]:
        assert time.monotonic() < until, world.daemon.counts()
        rig.step()
        time.sleep(0.01)
    return {"loaded_blocks": counts["loaded"], "voided": counts.get("voided", 0), "steps": rig.steps}


@scenario
def preemption_voids_saves(world: World) -> dict[str, Any]:
    """Blocks are preempted and overwritten while the daemon has not read them yet."""
    world.daemon.tell(save_s=0.15)
    rig = world.rig(blocks=22)
    free = rig.free
    prompts = {f"p{i}": [(i * 37 + j * 11) % 199 + 3 for j in range(90)] for i in range(5)}
    for name, prompt in prompts.items():
        rig.add(name, prompt, 40)
    rig.run()
    rig.settle(free)
    assert not rig.wrong, rig.wrong[:3]
    world.daemon.tell(save_s=0)
    time.sleep(0.5)
    counts = world.daemon.counts()
    assert counts["voided"] > 0, counts
    other = world.rig(blocks=64)
    for name, prompt in prompts.items():
        other.add(name, prompt, 40)
    other.run()
    assert not other.wrong, other.wrong[:3]
    assert other.outputs == rig.outputs
    return {"voided": counts["voided"], "saved": counts["saved"], "hits": other.admitted}


@scenario
def unanswered_saves_give_blocks_back(world: World) -> dict[str, Any]:
    world.daemon.tell(save_s=30)
    rig = world.rig(extra={"trikv.save_timeout_ms": 300})
    free = rig.free
    rig.add("slow", PROMPT, 1)
    began = time.monotonic()
    rig.run(until=lambda: "slow" in rig.finish)
    assert rig.free < free
    rig.settle(free)
    took = time.monotonic() - began
    assert took < 5
    return {"seconds": round(took, 2)}


@scenario
def failed_blocks_are_computed(world: World) -> dict[str, Any]:
    cold = world.warmed(PROMPT, 6)
    facts = {}
    for fail_from in (0, 2, 5):
        world.daemon.tell(fail_loads=fail_from)
        rig = world.rig()
        free = rig.free
        rig.add("warm", PROMPT)
        rig.run()
        assert rig.outputs["warm"] == cold
        assert not rig.wrong, rig.wrong
        assert rig.admitted["warm"] == fail_from * BLOCK, rig.admitted
        assert "error" not in rig.finish["warm"].lower()
        rig.settle(free)
        facts[str(fail_from)] = rig.steps
    return facts


@scenario
def daemon_killed_in_mid_load(world: World) -> dict[str, Any]:
    cold = world.warmed(PROMPT, 6)
    world.daemon.tell(load_s=20)
    rig = world.rig()
    free = rig.free
    rig.add("warm", PROMPT)
    rig.run(until=lambda: rig.free < free)
    rig.step()
    world.daemon.kill()
    began = time.monotonic()
    rig.run(20)
    took = time.monotonic() - began
    assert rig.outputs["warm"] == cold
    assert not rig.wrong
    rig.settle(free)
    rig.add("without", PROMPT[::-1])
    rig.run()
    world.daemon.start()
    rig.wait_attached()
    rig.add("again", PROMPT)
    rig.run()
    world.daemon.wait("saved", 6)
    other = world.rig()
    other.add("hit", PROMPT)
    other.run()
    assert other.admitted["hit"] == 96
    assert not rig.wrong
    assert not other.wrong
    return {"seconds": round(took, 2)}


@scenario
def connection_lost_in_mid_load(world: World) -> dict[str, Any]:
    """The daemon lives and may still write: the load is reported only after it has registered us again."""
    cold = world.warmed(PROMPT, 6)
    world.daemon.tell(load_s=0.8)
    rig = world.rig()
    free = rig.free
    rig.add("warm", PROMPT)
    rig.run(until=lambda: rig.free < free)
    rig.step()
    registered = world.daemon.counts()["register"]
    world.daemon.tell(drop=True)
    began = time.monotonic()
    rig.run(until=lambda: not rig.worker._worker.loads_in_flight)
    took = time.monotonic() - began
    assert world.daemon.counts()["register"] == registered + 1
    rig.run()
    assert rig.outputs["warm"] == cold
    assert not rig.wrong
    rig.settle(free)
    return {"seconds": round(took, 2)}


@scenario
def frozen_daemon(world: World) -> dict[str, Any]:
    world.warmed(PROMPT, 6)
    rig = world.rig()
    free = rig.free
    world.daemon.signal(signal.SIGSTOP)
    began = time.monotonic()
    rig.add("one", PROMPT)
    rig.run()
    first = time.monotonic() - began
    began = time.monotonic()
    for number in range(5):
        rig.add(f"more{number}", PROMPT[number:])
        rig.run()
    rest = time.monotonic() - began
    rig.settle(free)
    settled = time.monotonic() - began - rest
    world.daemon.signal(signal.SIGCONT)
    world.daemon.counts()
    time.sleep(0.3)
    rig.wait_attached()
    rig.scheduler.reset_prefix_cache()
    rig.add("thawed", PROMPT)
    rig.run()
    assert rig.admitted["thawed"] == 96, rig.admitted
    assert not rig.wrong
    rig.settle(free)
    return {"first_s": round(first, 2), "five_more_s": round(rest, 2), "settled_s": round(settled, 2)}


@scenario
def slow_queries(world: World) -> dict[str, Any]:
    world.warmed(PROMPT, 6)
    world.daemon.tell(query_s=0.4)
    rig = world.rig(extra={"trikv.query_timeout_ms": 50})
    free = rig.free
    rig.add("late", PROMPT)
    rig.run()
    assert rig.admitted["late"] == 0
    rig.settle(free)
    rig.scheduler.reset_prefix_cache()
    world.daemon.tell(query_s=0.02)
    time.sleep(0.6)
    rig.add("soon", PROMPT)
    rig.run()
    assert rig.admitted["soon"] == 96
    assert not rig.wrong
    return {}


@scenario
def stale_lease(world: World) -> dict[str, Any]:
    """A lease that ends before the request is scheduled is renewed or not promised."""
    cold = world.warmed(PROMPT, 6)
    world.daemon.tell(lease_s=0.4)
    rig = world.rig()
    free = rig.free
    if hasattr(rig.connector, "on_new_request"):
        rig.add("warm", PROMPT)
        time.sleep(0.6)
        rig.run()
        assert rig.admitted["warm"] == 96
        assert rig.outputs["warm"] == cold
        rig.settle(free)
        rig.scheduler.reset_prefix_cache()
    world.daemon.tell(lease_s=30)
    rig.add("lost", PROMPT)
    # Promise, then let the daemon forget the lease before the load comes.
    half = rig.connector._scheduler
    original = half.admit

    def admit(request: Any, blocks: Any, tokens: int) -> None:
        found = half._tracks[request.request_id].found
        if found is not None:
            found.lease += 1
        original(request, blocks, tokens)

    half.admit = admit
    rig.run()
    assert rig.outputs["lost"] == cold
    assert not rig.wrong
    rig.settle(free)
    return {}


@scenario
def absent_daemon(world: World) -> dict[str, Any]:
    world.daemon.kill()
    rig = world.rig(wait=False)
    free = rig.free
    began = time.monotonic()
    rig.add("alone", PROMPT)
    rig.run()
    took = time.monotonic() - began
    assert rig.outputs["alone"]
    rig.settle(free)
    world.daemon.start()
    rig.wait_attached()
    rig.add("saved", PROMPT)
    rig.run()
    world.daemon.wait("saved", 6)
    return {"seconds": round(took, 2)}


@scenario
def refusing_daemon(world: World) -> dict[str, Any]:
    world.warmed(PROMPT, 6)
    rig = world.rig()
    free = rig.free
    for knobs in ({"refuse": "overloaded"}, {"refuse": "not-ready"}, {"refuse": None, "garbage": True}):
        world.daemon.tell(**knobs)
        for number in range(3):
            rig.add(f"{knobs}{number}", [number, *PROMPT])
            rig.run()
        rig.settle(free)
    world.daemon.tell(garbage=False)
    rig.wait_attached()
    rig.scheduler.reset_prefix_cache()
    rig.add("well", PROMPT)
    rig.run()
    assert rig.admitted["well"] == 96
    assert not rig.wrong
    return {}


@scenario
def a_hook_that_fails(world: World) -> dict[str, Any]:
    """A bug in a hook costs hits, never the engine."""
    world.warmed(PROMPT, 6)
    for side, name in (
        ("s", "matched"), ("s", "add"), ("s", "_saves"), ("w", "start_saves"), ("w", "take_report"),
    ):
        rig = world.rig()
        free = rig.free
        half = rig.connector._scheduler if side == "s" else rig.worker._worker

        def broken(*_args: Any, **_more: Any) -> None:
            raise ZeroDivisionError("planted")

        setattr(half, name, broken)
        rig.add("still", PROMPT)
        rig.run()
        assert rig.outputs["still"], name
        assert not rig.wrong
        if name != "take_report":
            rig.settle(free)
    return {}


@scenario
def reset_forgets(world: World) -> dict[str, Any]:
    world.warmed(PROMPT, 6)
    rig = world.rig()
    assert rig.connector.reset_cache() is True
    rig.add("cold", PROMPT)
    rig.run()
    assert rig.admitted["cold"] == 0
    world.daemon.kill()
    until = time.monotonic() + 5
    while rig.connector._client.is_ready:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert rig.connector.reset_cache() is False
    return {}


@scenario
def policy_is_set(world: World) -> dict[str, Any]:
    rig = world.rig()
    assert rig.scheduler.recompute_kv_load_failures is True
    return {"policy": rig.config.kv_transfer_config.kv_load_failure_policy}


def main() -> None:
    folder = Path(sys.argv[1])
    wanted = sys.argv[2:]
    if not os.environ.get("RIG_LOG"):
        logging.disable(logging.ERROR)
    for function in SCENARIOS:
        if wanted and function.__name__ not in wanted:
            continue
        began = time.monotonic()
        line: dict[str, Any] = {"name": function.__name__, "ok": False}
        with tempfile.TemporaryDirectory() as place:
            world = World(str(folder), Path(place))
            try:
                line["facts"] = function(world)
                line["ok"] = True
            except Exception:  # noqa: BLE001  # reported to the test
                line["error"] = traceback.format_exc()
            finally:
                world.close()
        line["seconds"] = round(time.monotonic() - began, 2)
        print("RESULT " + json.dumps(line), flush=True)


assert inspect.isfunction(main)
if __name__ == "__main__":
    main()
