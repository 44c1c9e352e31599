"""The Trio side of a ring over a queue whose answers are chosen: every order, every moment."""

import errno
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.tiers.queues import ScriptedQueue, transfers
from trikv.process.guest import TRIO
from trikv.tiers.ring import BYTES_A_TURN, RETRIES_MAX, TURN_S, Ring, open_ring, turn_bytes
from trikv.tiers.transfers import HELD, Transfers

IO_S_MAX = 20.0
SEEDS = 200


@dataclass
class Caller:
    """One call of `run`, and what came of it."""

    job: Transfers
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_over: bool = False
    is_cut: bool = False

    async def run(self, ring: Ring) -> None:
        with self.scope:
            await ring.run(self.job)
        self.is_cut = self.scope.cancelled_caught
        self.is_over = True


async def settle() -> None:
    await wait_all_tasks_blocked()  # the descriptor of the queue is looked at before that


async def test_reads_begin_before_writes_and_each_has_its_depth() -> None:
    queue = ScriptedQueue(depths=(4, 2))
    async with open_ring(queue, -1) as ring, trio.open_nursery() as nursery:
        nursery.start_soon(ring.run, transfers(5, is_write=True))
        nursery.start_soon(ring.run, transfers(9))
        await settle()
        assert [one.is_write for one in queue.begun] == [False] * 4 + [True] * 2
        while queue.taken:  # writes go on while there are reads
            for ticket in list(queue.taken):
                queue.end(ticket)
            await settle()
        assert len(queue.begun) == 14


async def test_records_do_not_wait_behind_blocks() -> None:
    queue = ScriptedQueue(depths=(4, 1))
    blocks, record = transfers(3, is_write=True, size=1 << 20), transfers(1, is_write=True)
    async with open_ring(queue, -1) as ring, trio.open_nursery() as nursery:
        nursery.start_soon(ring.run, blocks)
        await settle()
        nursery.start_soon(ring.run, record)
        await settle()
        for ticket in range(1, 5):
            queue.end(ticket)
            await settle()
    assert [one.size for one in queue.begun] == [1 << 20, 4096, 1 << 20, 1 << 20]
    assert not blocks.results.any()
    assert not record.results.any()


async def test_one_turn_gives_the_kernel_some_megabytes() -> None:
    queue = ScriptedQueue(depths=(64, 2))
    given: list[int] = []
    submit = queue.submit

    def count() -> bool:
        given.append(len(queue.begun))
        return submit()

    queue.submit = count  # type: ignore[method-assign]
    async with open_ring(queue, -1) as ring, trio.open_nursery() as nursery:
        nursery.start_soon(ring.run, transfers(40, size=1 << 20))
        await settle()
        assert len(queue.taken) == 40
        turns = np.diff(given, prepend=0)
        assert turns[turns > 0][0] == BYTES_A_TURN[0] >> 20
        assert max(turns) <= BYTES_A_TURN[1] >> 20
        for ticket in list(queue.taken):
            queue.end(ticket)


def test_a_turn_gives_what_the_kernel_takes_in_its_time() -> None:
    least, most = BYTES_A_TURN
    slow, fast, now = 3 << 20, 1 << 40, most  # bytes that it takes in a turn's time
    for _ in range(20):
        now = turn_bytes(now, now, now / slow * TURN_S)
    assert abs(now - slow) < 1000
    for _ in range(30):
        now = turn_bytes(now, now, now / fast * TURN_S)
    assert now == most
    assert turn_bytes(now, least - 1, 1.0) == now
    for _ in range(30):
        now = turn_bytes(now, now, 1.0)
    assert now == least


async def test_a_kernel_that_takes_no_more_is_asked_again() -> None:
    queue = ScriptedQueue(refuses=5)
    async with open_ring(queue, -1) as ring, trio.open_nursery() as nursery:
        nursery.start_soon(ring.run, transfers(1))
        await settle()
        assert queue.refuses == 0
        queue.end(1)


async def test_a_kernel_that_takes_no_more_when_something_has_ended_is_asked_again() -> None:
    """What takes that one's place is pushed in the same turn."""
    queue = ScriptedQueue(depths=(1, 1))
    async with open_ring(queue, -1) as ring, trio.open_nursery() as nursery:
        nursery.start_soon(ring.run, transfers(2))
        await settle()
        queue.refuses = 3
        queue.end(1)
        await settle()
        assert queue.refuses == 0
        queue.end(2)


async def test_the_rest_of_a_short_one_is_moved() -> None:
    queue = ScriptedQueue()
    job = transfers(1, size=12288, pieces=3, address=1 << 20, offset=8192)
    async with open_ring(queue, -1) as ring, trio.open_nursery() as nursery:
        nursery.start_soon(ring.run, job)
        await settle()
        queue.end(1, 5000)
        await settle()
        rest = queue.taken[2]
        assert rest.offset == 8192 + 5000
        assert rest.pieces.tolist() == [
            [(1 << 20) + 5000, 8192 - 5000],
            [(1 << 20) + 8192, 4096],
        ]
        queue.end(2, 3192)
        await settle()
        assert queue.taken[3].pieces.tolist() == [[(1 << 20) + 8192, 4096]]
        queue.end(3)
    assert job.results.tolist() == [0]


async def test_what_never_gets_anywhere_fails() -> None:
    queue = ScriptedQueue()
    job = transfers(1)
    async with open_ring(queue, -1) as ring, trio.open_nursery() as nursery:
        nursery.start_soon(ring.run, job)
        for ticket in range(1, RETRIES_MAX + 2):
            while ticket not in queue.taken:
                await trio.lowlevel.checkpoint()
            queue.end(ticket, -errno.EAGAIN if ticket % 2 else -errno.EINTR)
    assert job.results.tolist() in ([errno.EAGAIN], [errno.EINTR])


async def test_cancelled_before_it_is_begun() -> None:
    queue = ScriptedQueue(depths=(1, 1))
    first, second = Caller(transfers(1)), Caller(transfers(2))
    async with open_ring(queue, -1) as ring, trio.open_nursery() as nursery:
        nursery.start_soon(first.run, ring)
        await settle()
        nursery.start_soon(second.run, ring)
        await settle()
        second.scope.cancel()
        await settle()
        assert second.is_cut
        assert not queue.cancelled
        queue.end(1)
    assert len(queue.begun) == 1
    assert first.job.results.tolist() == [0]


async def test_cancelled_half_begun() -> None:
    """The half that was begun is waited for, the other half is dropped."""
    queue = ScriptedQueue(depths=(2, 1))
    caller = Caller(transfers(5))
    async with open_ring(queue, -1) as ring, trio.open_nursery() as nursery:
        nursery.start_soon(caller.run, ring)
        await settle()
        caller.scope.cancel()
        await settle()
        assert not caller.is_over
        assert queue.cancelled == [1, 2]
        queue.end(2, -errno.ECANCELED)
        await settle()
        assert not caller.is_over
        queue.end(1)
    assert caller.is_cut
    assert caller.job.results.tolist() == [0] + [errno.ECANCELED] * 4


async def test_cancelled_too_late() -> None:
    """All had been done: that is an answer, and the cancellation comes at the next checkpoint."""
    queue = ScriptedQueue()
    caller = Caller(transfers(2))
    async with open_ring(queue, -1) as ring, trio.open_nursery() as nursery:
        nursery.start_soon(caller.run, ring)
        await settle()
        caller.scope.cancel()
        await settle()
        queue.end(1)
        queue.end(2)
    assert caller.is_over
    assert not caller.is_cut
    assert not caller.job.results.any()


async def test_a_short_one_that_is_cancelled_is_not_begun_again() -> None:
    queue = ScriptedQueue()
    caller = Caller(transfers(1))
    async with open_ring(queue, -1) as ring, trio.open_nursery() as nursery:
        nursery.start_soon(caller.run, ring)
        await settle()
        caller.scope.cancel()
        await settle()
        queue.end(1, 512)
    assert caller.is_cut
    assert len(queue.begun) == 1


def test_a_hang_is_told_to_everybody_once() -> None:
    async def live() -> None:
        queue = ScriptedQueue(depths=(2, 1))
        callers = [Caller(transfers(3)), Caller(transfers(1)), Caller(transfers(1, is_write=True))]
        async with open_ring(queue, -1, io_s_max=IO_S_MAX) as ring:
            async with trio.open_nursery() as nursery:
                for caller in callers:
                    nursery.start_soon(caller.run, ring)
                    await settle()  # in this order
                queue.end(1)
                begin_s = trio.current_time()
            assert IO_S_MAX <= trio.current_time() - begin_s <= 1.5 * IO_S_MAX
            assert ring.is_stalled
            assert callers[0].job.results.tolist() == [0, HELD, HELD]
            assert callers[1].job.results.tolist() == [errno.ESHUTDOWN]
            assert callers[2].job.results.tolist() == [HELD]
            late = list(queue.taken)
            for ticket in late:
                queue.end(ticket)  # after all
            await settle()
            assert callers[0].job.results.tolist() == [0, HELD, HELD]
        assert queue.is_closed

    trio.run(live, clock=MockClock(autojump_threshold=0))


def test_a_slow_disk_does_not_hang() -> None:
    """Each operation is in time, all together take far longer."""

    async def live() -> None:
        queue = ScriptedQueue(depths=(1, 1))
        job = transfers(10)
        async with open_ring(queue, -1, io_s_max=IO_S_MAX) as ring, trio.open_nursery() as nursery:
            nursery.start_soon(ring.run, job)
            for ticket in range(1, 11):
                await trio.sleep(0.9 * IO_S_MAX)
                queue.end(ticket)
        assert not job.results.any()

    trio.run(live, clock=MockClock(autojump_threshold=0))


async def act(queue: ScriptedQueue, callers: list[Caller], rng: random.Random) -> None:
    """One thing that may happen."""
    what = rng.random()
    if queue.taken and what < 0.6:
        taken = queue.taken[rng.choice(sorted(queue.taken))]
        result = rng.choice(
            [None, None, None, -errno.EIO, -errno.EAGAIN, 0, rng.randrange(1, taken.size + 1)]
        )
        if taken.ticket in queue.cancelled and rng.random() < 0.5:
            result = -errno.ECANCELED
        queue.end(taken.ticket, result)
    elif what < 0.8 and callers:
        rng.choice(callers).scope.cancel()
    elif what < 0.9:
        queue.refuses = rng.randrange(3)
    else:
        await trio.sleep(rng.choice([0.0, 1.0, 5.0]))


async def world(seed: int) -> None:
    """Callers come, are cancelled, get all kinds of answers; one in three worlds hangs at last."""
    rng = random.Random(seed)
    queue = ScriptedQueue(depths=(rng.randrange(1, 5), rng.randrange(1, 3)))
    callers: list[Caller] = []
    hangs = rng.random() < 0.33
    async with open_ring(queue, -1, io_s_max=IO_S_MAX) as ring, trio.open_nursery() as nursery:
        for step in range(rng.randrange(5, 60)):
            if rng.random() < 0.3:
                is_write, pieces = rng.random() < 0.4, rng.choice([1, 2, 4])
                size = rng.choice([4096, 32768])
                address, offset = (step + 1) << 24, step << 24
                caller = Caller(
                    transfers(
                        rng.randrange(0, 6),
                        is_write=is_write,
                        size=size,
                        pieces=pieces,
                        address=address,
                        offset=offset,
                    )
                )
                callers.append(caller)
                nursery.start_soon(caller.run, ring)
            await act(queue, callers, rng)
            if rng.random() < 0.7:
                await settle()
            check(queue, callers)
        while not hangs and not all(caller.is_over for caller in callers):
            for ticket in list(queue.taken):
                queue.end(ticket)
            await settle()
    check(queue, callers)
    assert all(caller.is_over for caller in callers)
    assert hangs or ring.is_stalled or not queue.taken


def check(queue: ScriptedQueue, callers: list[Caller]) -> None:
    """Nobody has left while the queue has memory of his that he does not know to be held."""
    for caller in callers:
        if not caller.is_over:
            continue
        first = caller.job.offsets[:1].tolist()
        size = int(caller.job.pieces[:, 1].sum()) // max(1, len(caller.job.offsets))
        theirs = {
            (one.offset - first[0]) // size
            for one in queue.taken.values()
            if first and first[0] <= one.offset < first[0] + size * len(caller.job.offsets)
        }
        assert theirs <= set(np.flatnonzero(caller.job.results == HELD).tolist())
        if caller.is_cut:
            assert len(caller.job.offsets) == 0 or not theirs
        else:
            known = {0, errno.EIO, errno.EAGAIN, errno.ESHUTDOWN, HELD}
            if HELD in caller.job.results:
                known.add(errno.ECANCELED)  # what is held has to be told, also to the cancelled
            assert set(caller.job.results.tolist()) <= known


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_no_memory_is_left_to_the_kernel_unheard(first: int) -> None:
    for seed in range(first, first + 50):
        TRIO._r.seed(seed)
        try:
            trio.run(world, seed, clock=MockClock(autojump_threshold=0))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
