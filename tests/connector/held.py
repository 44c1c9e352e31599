"""Loads that a step's forward waits for, with vLLM's real scheduler."""

import threading
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, set_forward_context

from tests.connector.rig import Rig
from tests.connector.world import PROMPT, World, scenario
from trikv.connector import engine
from trikv.connector.layers import LoadLostError

HOLD = {"trikv.hold_ms": 10_000}


def counts(rig: Rig) -> dict[str, int]:
    return dict(rig.connector._scheduler.tally.total)


def held(world: World, *, overlaps: bool) -> dict[str, Any]:
    cold = world.warmed(PROMPT, 6)
    rig = world.rig(extra=HOLD, overlaps=overlaps)
    free = rig.free
    rig.add("warm", PROMPT)
    rig.run(until=lambda: "warm" in rig.admitted)
    steps = rig.steps
    rig.run()
    rig.settle(free)
    assert rig.admitted["warm"] == 96, rig.admitted
    assert not rig.wrong, rig.wrong
    assert rig.outputs["warm"] == cold
    assert counts(rig)["loads_held"] == 1
    assert world.daemon.counts()["loaded"] == 6
    return {"steps": steps}


@scenario
def a_forward_waits_for_its_load(world: World) -> dict[str, Any]:
    return held(world, overlaps=False)


@scenario
def a_forward_waits_for_its_load_while_vllm_schedules_ahead(world: World) -> dict[str, Any]:
    return held(world, overlaps=True)


@scenario
def nobody_is_held_up_by_another_s_load(world: World) -> dict[str, Any]:
    cold = world.warmed(PROMPT, 6)
    rig = world.rig(extra=HOLD)
    free = rig.free
    rig.add("busy", [9, *PROMPT], 40)
    rig.run(until=lambda: "busy" in rig.admitted)
    rig.add("warm", PROMPT)
    rig.run()
    rig.settle(free)
    assert rig.outputs["warm"] == cold
    assert not rig.wrong
    assert rig.admitted["warm"] == 96
    assert "loads_held" not in counts(rig)
    return {}


@scenario
def a_load_that_fails_is_there_before_the_step_ends(world: World) -> dict[str, Any]:
    """The rig's forward reads at once, so it waits in `start_load_kv`, as on a CPU."""
    cold = world.warmed(PROMPT, 6)
    rig = world.rig(extra=HOLD, overlaps=True)
    world.daemon.tell(fail_loads=3)
    healed = threading.Timer(0.5, lambda: world.daemon.tell(fail_loads=1 << 30))
    healed.start()
    rig.add("warm", PROMPT)
    rig.run()
    healed.join()
    assert rig.outputs["warm"] == cold
    assert not rig.wrong
    assert counts(rig)["loads_held"] == 1
    return {}


@scenario
def a_daemon_that_breaks_off_is_asked_again(world: World) -> dict[str, Any]:
    cold = world.warmed(PROMPT, 6)
    world.daemon.tell(load_s=0.6)
    rig = world.rig(extra=HOLD, overlaps=True)

    def cut() -> None:
        world.daemon.tell(load_s=0)
        world.daemon.tell(drop=True)

    timer = threading.Timer(0.3, cut)
    rig.add("warm", PROMPT)
    timer.start()
    rig.run()
    timer.join()
    assert rig.outputs["warm"] == cold
    assert not rig.wrong
    return {}


@scenario
def a_forward_s_context_says_whether_hooks_are_called(world: World) -> dict[str, Any]:
    """The real one: full graphs and microbatches are told from what leaves layers to Python."""
    config = world.rig(extra=HOLD).config
    modes = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
    seen = []
    for metadata, slices in (({"layer": object()}, None), (None, None), ([{}, {}], [1, 2])):
        for mode in modes:
            with set_forward_context(
                metadata, config, cudagraph_runtime_mode=mode, ubatch_slices=slices
            ):
                seen.append(engine.forward_mode(get_forward_context()))
    assert seen == ["NONE", "PIECEWISE", "", *[""] * 6], seen
    return {}


@scenario
def without_its_blocks_no_step_ends(world: World) -> dict[str, Any]:
    world.warmed(PROMPT, 6)
    world.daemon.tell(fail_loads=3)
    rig = world.rig(extra=HOLD, overlaps=True)
    rig.worker._worker._overlap._recover_s = 0.2
    rig.add("warm", PROMPT)
    with pytest.raises(LoadLostError, match="request warm"):
        rig.run()
    return {}
