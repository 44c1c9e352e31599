"""What the connector must do with vLLM's real scheduler and a daemon that does its part."""

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

from tests.connector.daemons import PATIENCE_S
from tests.connector.rig import Rig
from tests.connector.world import PROMPT, World, scenario


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
    until = time.monotonic() + PATIENCE_S
    while world.daemon.counts()["leases"]:
        assert time.monotonic() < until, world.daemon.counts()
        time.sleep(0.01)
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
def full_prompt_hit_computes_its_last_token(world: World) -> dict[str, Any]:
    """All blocks are loaded, and somebody must say what comes next."""
    prompt = PROMPT[:96]
    cold = world.warmed(prompt, 6)
    rig = world.rig()
    free = rig.free
    saved = world.daemon.counts().get("save")  # a real daemon counts otherwise
    rig.add("warm", prompt, 1)
    rig.run()
    assert rig.admitted["warm"] == 95
    assert world.daemon.counts()["loaded"] == 6
    assert rig.outputs["warm"] == cold[:1]
    assert not rig.wrong
    rig.settle(free)
    assert world.daemon.counts().get("save") == saved
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
def chunked_prefill(world: World) -> dict[str, Any]:
    """A prompt longer than a step: only what is computed is saved."""
    prompt = [3 + (i * i) % 191 for i in range(700)]
    cold = world.warmed(prompt, 43)
    rig = world.rig()
    rig.add("warm", prompt)
    rig.run()
    assert rig.admitted["warm"] == 43 * 16
    assert not rig.wrong
    assert rig.outputs["warm"] == cold
    return {"steps": rig.steps}


@scenario
def blocks_outlive_their_request(world: World) -> dict[str, Any]:
    """Saves read the blocks of an ended request while the next one wants them."""
    world.daemon.tell(save_s=0.2)
    rig = world.rig(blocks=9)
    free = rig.free
    prompts = {f"p{i}": [i + 3, *PROMPT] for i in range(5)}
    for name, prompt in prompts.items():
        rig.add(name, prompt, 1)
    rig.run()
    rig.settle(free)
    other = world.rig()
    world.daemon.tell(save_s=0)
    for name, prompt in prompts.items():
        other.add(name, prompt, 1)
    other.run()
    assert not other.wrong, other.wrong
    assert other.outputs == rig.outputs
    assert all(tokens == 96 for tokens in other.admitted.values()), other.admitted
    return {"steps": rig.steps}


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
    rig = world.rig(blocks=48)
    world.daemon.tell(load_s=0.004, save_s=0.002, query_s=0.001)
    facts = abort_at_random(world, rig)
    until = time.monotonic() + PATIENCE_S
    while world.daemon.counts()["leases"]:
        assert time.monotonic() < until, world.daemon.counts()
        rig.step()
        time.sleep(0.01)
    return facts


@scenario
def aborts_with_overlapping_steps(world: World) -> dict[str, Any]:
    return abort_at_random(world, world.rig(blocks=48, overlaps=True))


def abort_at_random(
    world: World, rig: Rig, meanwhile: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """500 requests come and most are aborted; at the end every block is free and none was wrong."""
    chance = random.Random(7)
    prompts = [
        [chance.randrange(3, 200) for _ in range(chance.randrange(33, 160))] for _ in range(12)
    ]
    free = rig.free
    alive: list[str] = []
    for number in range(500):
        meanwhile(number)
        rig.add(f"r{number}", chance.choice(prompts), chance.randrange(1, 5))
        alive.append(f"r{number}")
        for _ in range(chance.randrange(3)):
            rig.step()
            if chance.random() < 0.3:
                time.sleep(0.002)
        if len(alive) > chance.randrange(1, 8):
            rig.abort(alive.pop(chance.randrange(len(alive))))
        if chance.random() < 0.2:
            rig.scheduler.reset_prefix_cache()  # so that the daemon is asked
    for name in alive:
        rig.abort(name)
    rig.settle(free, 30)
    assert not rig.wrong, rig.wrong[:3]
    loaded = rig.worker._worker.tally.total["loaded_blocks"]
    assert loaded > 50
    return {"loaded_blocks": loaded, "steps": rig.steps}


@scenario
def preemption(world: World) -> dict[str, Any]:
    """Too few blocks for all requests; outputs and bytes as with enough of them."""
    outputs = []
    facts = {}
    for blocks, overlaps in ((96, False), (22, False), (22, True), (96, True)):
        rig = world.rig(blocks=blocks, overlaps=overlaps)
        free = rig.free
        for name in range(5):
            rig.add(f"p{name}", [(name * 37 + j * 11) % 199 + 3 for j in range(90)], 40)
        rig.run()
        rig.settle(free)
        assert not rig.wrong, rig.wrong[:3]
        outputs.append(rig.outputs)
        facts[f"{blocks} {overlaps}"] = [rig.steps, rig.admitted["p4"]]
    assert outputs[1] == outputs[0]
    assert outputs[2] == outputs[0]
    assert outputs[3] == outputs[0]
    return facts


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
def slow_queries(world: World) -> dict[str, Any]:
    world.warmed(PROMPT, 6)
    world.daemon.tell(query_s=1.5)
    rig = world.rig(extra={"trikv.query_timeout_ms": 400})
    free = rig.free
    rig.add("late", PROMPT)
    rig.run()
    assert rig.admitted["late"] == 0
    rig.settle(free)
    rig.scheduler.reset_prefix_cache()
    world.daemon.tell(query_s=0.02)
    time.sleep(1.7)
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
def reset_forgets(world: World) -> dict[str, Any]:
    world.warmed(PROMPT, 6)
    rig = world.rig()
    assert rig.connector.reset_cache() is True
    rig.add("cold", PROMPT)
    rig.run()
    assert rig.admitted["cold"] == 0
    world.daemon.kill()
    until = time.monotonic() + PATIENCE_S
    while rig.connector._client.is_ready:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert rig.connector.reset_cache() is False
    world.daemon.start()
    rig.wait_attached()
    until = time.monotonic() + PATIENCE_S
    for number in itertools.count():  # hits return, without a restart of the engine
        assert time.monotonic() < until
        rig.scheduler.reset_prefix_cache()
        rig.add(f"again {number}", PROMPT)
        rig.run()
        if rig.admitted[f"again {number}"]:
            return {"turns": number}
        time.sleep(0.05)
    raise AssertionError


@scenario
def policy_is_set(world: World) -> dict[str, Any]:
    rig = world.rig()
    assert rig.scheduler.recompute_kv_load_failures is True
    return {"policy": rig.config.kv_transfer_config.kv_load_failure_policy}
