"""Engines of several ranks on the real daemon: heads apart, or the same bytes on all of them.

With each vLLM: versions say otherwise which ranks hold the same.
"""

import time
from typing import Any

from tests.connector.daemons import PATIENCE_S, RealDaemon
from tests.connector.rig import Rig
from tests.connector.world import PROMPT, World, scenario

BLOCKS = len(PROMPT) // 16
PAGE = 4096  # a rank's part of a block, rounded up


def serve_for_real(world: World) -> None:
    """Put a real daemon in the place of the world's own."""
    world.daemon.kill()
    world.daemon.path.unlink(missing_ok=True)
    world.daemon = RealDaemon(world.folder)


def pool(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.daemon.status()["pool"]
    return found


def computed_once(world: World, blocks: int, **options: Any) -> list[int]:
    """An engine computes and saves the prompt, then ends; returns its output."""
    rig = world.rig(**options)
    rig.add("cold", PROMPT)
    rig.run()
    until = time.monotonic() + PATIENCE_S
    while pool(world)["blockCount"] < blocks:
        assert time.monotonic() < until, pool(world)
        rig.step()
        time.sleep(0.01)
    assert rig.admitted["cold"] == 0
    ended(world, rig)
    return rig.outputs["cold"]


def found(world: World, expected: list[int], tokens: int, **options: Any) -> None:
    """Another engine finds so much of the prompt; all its ranks have the right bytes."""
    rig = world.rig(**options)
    rig.add("warm", PROMPT)
    rig.run()
    assert rig.admitted["warm"] == tokens, rig.admitted
    assert rig.outputs["warm"] == expected
    ended(world, rig)


def ended(world: World, rig: Rig) -> None:
    assert not rig.wrong, rig.wrong[:3]
    rig.close()
    world.rigs.remove(rig)


@scenario
def ranks_with_heads_apart(world: World) -> dict[str, Any]:
    serve_for_real(world)
    output = computed_once(world, BLOCKS, ranks=2)
    assert pool(world)["usedBytes"] == BLOCKS * 2 * PAGE
    found(world, output, 96, ranks=2)
    found(world, output, 0, ranks=1)
    return {}


@scenario
def two_ranks_that_hold_the_same(world: World) -> dict[str, Any]:
    serve_for_real(world)
    output = computed_once(world, BLOCKS, ranks=2, is_latent=True)
    assert pool(world)["usedBytes"] == BLOCKS * PAGE, "stored once"
    found(world, output, 96, ranks=2, is_latent=True)
    return {}


@scenario
def eight_ranks_that_hold_the_same_share_with_four_and_with_one(world: World) -> dict[str, Any]:
    serve_for_real(world)
    output = computed_once(world, BLOCKS, ranks=8, is_latent=True)
    status = world.daemon.status()
    assert status["pool"]["usedBytes"] == BLOCKS * PAGE, "stored once"
    counters = status["counters"]
    assert counters["trikv_save_blocks_total"] == BLOCKS, "each block is saved by one rank"
    for ranks in (8, 4, 1):
        found(world, output, 96, ranks=ranks, is_latent=True)
    assert pool(world)["usedBytes"] == BLOCKS * PAGE
    loaded = world.daemon.status()["counters"]["trikv_load_blocks_total"]
    assert loaded == BLOCKS * (8 + 4 + 1), "each rank loads all blocks"
    return {}
