"""A daemon that is told to end while copies run, once, twice, or with no time to drain."""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import capnp
import numpy as np

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import (
    UNTIMED,
    Engine,
    attached,
    hashes,
    start_daemon,
    status,
    wait_for,
    wire_ok,
)

BLOCKS, PAGE = 64, 1 << 20


async def scatter(engine: Engine) -> None:
    """Register blocks of many small pieces, so that each copy takes a while."""
    pieces = [{"memory": 0, "offset": at, "stride": PAGE, "bytes": 64} for at in range(0, PAGE, 64)]
    group = {"blockCount": BLOCKS, "pieces": pieces, "layout": "scattered"}
    wire_ok(await engine.register(0, groups=[group]))


async def begin_copies(engine: Engine) -> tuple[list[Any], list[Any]]:
    """Begin 16 loads into blocks 16 to 31 and 16 saves of blocks 32 to 47; none is waited for."""
    await scatter(engine)
    for block in range(16):
        engine.memory[0][block] = block + 1
        wire_ok(await engine.save(hashes(f"old-{block}"), [block], request=f"old-{block}"))
    leases = [
        wire_ok(await engine.query(hashes(f"old-{block}"), f"old-{block}")).lease
        for block in range(16)
    ]
    engine.memory[0][32:48] = 99
    loads = [
        asyncio.ensure_future(engine.load(lease, [16 + block]))
        for block, lease in enumerate(leases)
    ]
    saves = [
        asyncio.ensure_future(engine.save(hashes(f"new-{n}"), [32 + n], request=f"new-{n}"))
        for n in range(16)
    ]
    return loads, saves


def check_loads(engine: Engine, outcomes: Sequence[Any]) -> int:
    """Whatever was answered as arrived is right; returns how many."""
    arrived = 0
    for block, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, capnp.KjException), outcome
        elif outcome.which() == "ok" and not outcome.ok.failed:
            arrived += 1
            assert (engine.memory[0][16 + block] == block + 1).all()
        elif outcome.which() == "error":
            assert outcome.error.code == "shutting-down"
    return arrived


def test_sigterm_lets_loads_and_saves_in_flight_end(start: Start, tmp_path: Path) -> None:
    daemon = start_daemon(start, tmp_path, "--pool-size", "256mb", "--drain-seconds", "60")

    async def main() -> None:
        async with attached(daemon.address, block_count=BLOCKS, page_bytes=PAGE) as engine:
            loads, saves = await begin_copies(engine)
            await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
            assert not all(one.done() for one in loads), "all over: nothing was shown"
            daemon.process.send_signal(signal.SIGTERM)
            outcomes = await asyncio.gather(*loads, *saves, return_exceptions=True)
            assert check_loads(engine, outcomes[:16]) == 16, "drained, not broken off"
            for saved in outcomes[16:]:
                assert wire_ok(saved).savedCount == 1

    asyncio.run(main())
    assert daemon.process.wait(PATIENCE_S) == 0
    assert not daemon.path.exists()


def test_calls_that_are_given_up_end_all_the_same(start: Start, tmp_path: Path) -> None:
    daemon = start_daemon(start, tmp_path, "--pool-size", "256mb", *UNTIMED)

    async def main() -> None:
        async with attached(daemon.address, block_count=BLOCKS, page_bytes=PAGE) as engine:
            loads, saves = await begin_copies(engine)
            await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
            given_up = [call for call in (*loads, *saves) if call.cancel()]
            assert len(given_up) > 16, "all over: nothing was shown"
            await asyncio.gather(*given_up, return_exceptions=True)
            await engine.session.release([f"old-{n}" for n in range(16)])

            def rests(facts: dict[str, Any]) -> bool:
                pool = facts["pool"]
                return not (pool["leaseCount"] or pool["pinnedBytes"] or pool["fillingCount"])

            facts = await wait_for(daemon.address, rests)
            assert facts["engines"][0]["state"] == "ready"
            seen = engine.memory[0].copy()
            await asyncio.sleep(0.5)
            assert np.array_equal(engine.memory[0], seen)
            dropped = wire_ok((await engine.session.reset()).reply).droppedCount
            assert dropped == facts["pool"]["blockCount"]
            await wait_for(daemon.address, lambda facts: facts["pool"]["usedBytes"] == 0)

    asyncio.run(main())
    assert daemon.end() == 0


def test_a_second_sigterm_in_the_middle_of_copies_does_not_wait(
    start: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(start, tmp_path, "--pool-size", "256mb", "--drain-seconds", "600")

    async def main() -> None:
        async with attached(daemon.address, block_count=BLOCKS, page_bytes=PAGE) as engine:
            loads, saves = await begin_copies(engine)
            await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
            daemon.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.01)
            daemon.process.send_signal(signal.SIGTERM)
            outcomes = await asyncio.gather(*loads, *saves, return_exceptions=True)
            assert check_loads(engine, outcomes[:16]) > 0
            assert await asyncio.to_thread(daemon.process.wait, PATIENCE_S) in {0, 1}
            seen = engine.memory[0].copy()
            await asyncio.sleep(0.5)
            assert np.array_equal(engine.memory[0], seen), "a dead daemon writes nothing"

    asyncio.run(main())
    again = start_daemon(start, tmp_path)  # what it left behind is no obstacle
    assert asyncio.run(status(again.address))["state"] == "serving"
    assert again.end() == 0


def test_after_the_drain_deadline_an_answer_still_means_that_nothing_is_written(
    start: Start, tmp_path: Path
) -> None:
    """Loads of many small pieces, no time to drain: after the answer memory is still."""
    daemon = start_daemon(start, tmp_path, "--pool-size", "256mb", "--drain-seconds", "0")

    async def main() -> None:
        async with attached(daemon.address, block_count=BLOCKS, page_bytes=PAGE) as engine:
            await scatter(engine)
            engine.memory[0][:] = 7
            blob = hashes(*range(64))
            wire_ok(await engine.save(blob, list(range(64))))
            engine.memory[0][:] = 0
            lease = wire_ok(await engine.query(blob)).lease
            call = asyncio.ensure_future(engine.load(lease, list(range(64))))
            await asyncio.sleep(0.03)
            daemon.process.send_signal(signal.SIGTERM)
            reply = wire_ok(await call)
            seen = engine.memory[0].copy()
            await asyncio.sleep(1)
            assert np.array_equal(engine.memory[0], seen)
            failed = set(np.frombuffer(reply.failed, "<i4").tolist())
            assert failed, "the load was over before the deadline: nothing was shown"
            for block in set(range(64)) - failed:
                assert (seen[block] == 7).all()

    asyncio.run(main())
    assert daemon.process.wait(PATIENCE_S) == 0
