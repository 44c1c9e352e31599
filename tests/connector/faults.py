"""What the connector must do when the daemon, the connection or the connector itself fails."""

import os
import random
import signal
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from tests.connector.rig import BLOCK, LOADS_LAST, Rig
from tests.connector.world import PROMPT, World, scenario
from trikv.connector.plugin import register


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


def computed_from(world: World, prompt: list[int], cold: list[int], position: int) -> int:
    """A prompt of which only the tokens before a position can be loaded; returns the steps."""
    rig = world.rig()
    free = rig.free
    rig.add("warm", prompt)
    rig.run()
    assert rig.outputs["warm"] == cold
    assert not rig.wrong, rig.wrong
    assert rig.admitted["warm"] == position, rig.admitted
    assert "error" not in rig.finish["warm"].lower()
    rig.settle(free)
    return rig.steps


@scenario
def failed_blocks_are_computed(world: World) -> dict[str, Any]:
    cold = world.warmed(PROMPT, 6)
    facts = {}
    for fail_from in (0, 2, 5):
        world.daemon.tell(fail_loads=fail_from)
        facts[str(fail_from)] = computed_from(world, PROMPT, cold, fail_from * BLOCK)
    return facts


@scenario
def failed_blocks_of_a_whole_prompt_are_computed(world: World) -> dict[str, Any]:
    """Its last block counts a token less than it holds."""
    prompt = PROMPT[: 6 * BLOCK]
    cold = world.warmed(prompt, 6)
    for fail_from in (5, 2, 0):
        world.daemon.tell(fail_loads=fail_from)
        computed_from(world, prompt, cold, fail_from * BLOCK)
    return {}


@scenario
def daemon_killed_in_mid_load(world: World) -> dict[str, Any]:
    """The load is on its way when the daemon freezes; it is given up at its death, not before."""
    cold = world.warmed(PROMPT, 6)
    rig = world.rig()
    free = rig.free
    half = rig.connector._scheduler
    admit = half.admit

    def freeze_and_admit(request: Any, blocks: Any, tokens: int) -> None:
        world.daemon.signal(signal.SIGSTOP)
        admit(request, blocks, tokens)

    half.admit = freeze_and_admit
    rig.add("warm", PROMPT)
    rig.run(until=lambda: rig.free < free)
    half.admit = admit
    for _ in range(20):
        rig.step()
        time.sleep(0.005)
    assert rig.worker._worker.loads_in_flight == 1
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
def daemon_comes_and_goes(world: World) -> dict[str, Any]:
    """Killed and started again while requests come: right tokens, no lost block, hits again."""
    chance = random.Random(11)
    prompts = [[chance.randrange(3, 200) for _ in range(100)] for _ in range(4)]
    outputs: dict[int, list[int]] = {}
    rig = world.rig(extra={"trikv.query_timeout_ms": 500})
    free = rig.free
    for number in range(60):
        which = number % len(prompts)
        rig.add(f"r{number}", prompts[which])
        if number % 10 == 4:
            for _ in range(chance.randrange(4)):
                rig.step()
            world.daemon.kill()
        rig.run()
        assert outputs.setdefault(which, rig.outputs[f"r{number}"]) == rig.outputs[f"r{number}"]
        rig.scheduler.reset_prefix_cache()
        if number % 10 == 6:
            world.daemon.start()
            rig.wait_attached()
    assert not rig.wrong, rig.wrong[:3]
    rig.settle(free)
    hits = sum(1 for tokens in rig.admitted.values() if tokens)
    assert hits >= 10
    return {"hits": hits}


@scenario
def connection_lost_in_mid_load(world: World) -> dict[str, Any]:
    """The daemon lives and may still write: the load ends only when it registers us again."""
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
    rig = world.rig(extra={"trikv.query_timeout_ms": 100})
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
    for number in range(5):  # the first has 10 ms: whoever was late is given less time
        rig.scheduler.reset_prefix_cache()
        rig.add(f"thawed{number}", PROMPT)
        rig.run()
        if rig.admitted[f"thawed{number}"]:
            break
        time.sleep(0.1)
    assert rig.admitted[f"thawed{number}"] == 96, rig.admitted
    assert not rig.wrong
    rig.settle(free)
    return {
        "thaws": number + 1,
        "first_s": round(first, 2),
        "five_more_s": round(rest, 2),
        "settled_s": round(settled, 2),
    }


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
    for knobs in (
        {"refuse": "overloaded"},
        {"refuse": "not-ready"},
        {"refuse": None, "garbage": True},
    ):
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
        ("s", "matched"),
        ("s", "add"),
        ("s", "_saves"),
        ("w", "start_saves"),
        ("w", "take_report"),
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


def complaint(rig: Rig, role: KVConnectorRole) -> str:
    try:
        KVConnectorFactory.create_connector(rig.config, role, rig.kv_config)
    except ValueError as error:
        return str(error)
    return "not refused"


@scenario
def refusals_name_the_setting(world: World) -> dict[str, Any]:
    rig = world.rig(wait=False)
    model, cache = rig.config.model_config, rig.config.cache_config
    found: dict[str, Any] = {}

    def refused(words: str) -> None:
        for role in KVConnectorRole:
            found[words] = complaint(rig, role)
            assert words in found[words]
            assert "\n" not in found[words]

    if not hasattr(KVConnectorBase_V1, "supports_sleep_mode"):
        model.enable_sleep_mode = True
        refused("--enable-sleep-mode")
        model.enable_sleep_mode = False
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    refused("PYTORCH_CUDA_ALLOC_CONF")
    del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
    seed = os.environ.pop("PYTHONHASHSEED")
    algorithm, cache.prefix_caching_hash_algo = cache.prefix_caching_hash_algo, "xxhash"
    refused("PYTHONHASHSEED")
    cache.prefix_caching_hash_algo = algorithm
    if LOADS_LAST:  # 0.29 and later: sha256 starts from a fixed seed
        KVConnectorFactory.create_connector(rig.config, KVConnectorRole.WORKER, rig.kv_config)
    else:
        refused("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = seed
    rig.config.kv_transfer_config.kv_connector_extra_config["trikv.tenants"] = "x"
    refused("trikv.tenants")
    return found


@scenario
def unsupported_engines_run_without_a_cache(world: World) -> dict[str, Any]:
    rig = world.rig(wait=False)
    rig.add("any", PROMPT)
    request = rig.scheduler.requests["any"]
    rig.run()
    rig.config.parallel_config.pipeline_parallel_size = 2
    made = [
        KVConnectorFactory.create_connector(rig.config, role, rig.kv_config)
        for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
    ]
    rig.config.parallel_config.pipeline_parallel_size = 1
    connector, worker = made
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.request_finished_all_groups(request, ([1],)) == (False, None)
    assert connector.has_pending_push_work() is False
    assert connector.reset_cache() is None
    worker.register_kv_caches(rig.kv)
    worker.bind_connector_metadata(connector.build_connector_meta(None))
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_finished({"any"}) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    for one in made:
        one.shutdown()
    return {}


@scenario
def found_by_name(world: World) -> dict[str, Any]:
    """Through the entry point vLLM needs no module path."""
    register()
    register()
    found = KVConnectorFactory.get_connector_class_by_name("TriKVConnector")
    assert issubclass(found, KVConnectorBase_V1)
    assert found.requires_piecewise_for_cudagraph({}) is False
    assert found.build_kv_connector_stats({"queries": 1}).reduce() == {"queries": 1}
    return {}
