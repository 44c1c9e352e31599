"""Writes blocks in a child that is killed at a random moment, and looks at what is there.

    python -m tests.tiers.killed_writer PATH FIRST_SEED COUNT RING

Prints how many blocks were acknowledged and found in all, or the seed that went wrong. What was
acknowledged is found after a kill: the kernel had it. The children are forked from here, since a
start of Python takes longer than all that one of them does.
"""

import os
import random
import select
import signal
import sys
import traceback
from collections.abc import Callable

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.slots import Reads, Writes
from trikv.tiers.runs import Memory
from trikv.tiers.ssd import Disk, open_disk

REGION_BYTES, CAPACITY = 2 << 20, 8 << 20
SHAPES = ((65536,), (32768,), (131072,))
READY, BEGUN, ACKNOWLEDGED, CUT = "ready", "begun", "acknowledged", "cut"
REGIONS = 3


def content(words: NDArray[np.uint64], size: int) -> NDArray[np.uint8]:
    """The bytes of blocks follow from their first word."""
    steps = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words[:, None] * np.uint64(0xD6E8FEB86659FD93) ^ steps).view(np.uint8)


def origins(count: int) -> NDArray[np.uint8]:
    return np.full((count, 32), 7, np.uint8)


async def write_until_killed(path: str, ring: str, seed: int, say: Callable[..., None]) -> None:
    rng = random.Random(seed)
    async with open_disk(path, CAPACITY, ring=ring, region_bytes=REGION_BYTES) as disk:
        async for _ in disk.scan():
            pass
        say(READY)
        say(CUT, *range(REGIONS))
        shapes = [rng.choice(SHAPES) for _ in range(REGIONS)]
        for region, shape in enumerate(shapes):
            assert await disk.cut(region, shape)
        sequence = disk.first_sequence
        while True:
            async with trio.open_nursery() as nursery:
                for region in rng.sample(range(REGIONS), 2):
                    if rng.random() < 0.05:
                        say(CUT, region)
                        shapes[region] = rng.choice(SHAPES)
                        assert await disk.cut(region, shapes[region])
                    one = batch(rng, region, shapes[region], sequence)
                    sequence += 16
                    nursery.start_soon(write, disk, *one, say)


def batch(
    rng: random.Random, region: int, shape: tuple[int, ...], sequence: int
) -> tuple[Writes, Memory]:
    size = shape[0]
    count = rng.randrange(1, 9)
    positions = np.array(sorted(rng.sample(range(REGION_BYTES // size), count)))
    words = np.zeros((count, 4), np.uint64)
    words[:, 0] = words[:, 2] = sequence + np.arange(count)
    memory = Memory(size * count)
    memory.bytes[:] = content(words[:, 0], size).reshape(-1)
    addresses = memory.address + np.arange(count, dtype=np.uint64)[:, None] * np.uint64(size)
    writes = Writes(
        np.full(count, region),
        positions,
        addresses.astype(np.uint64),
        shape,
        origins(count),
        words,
        np.zeros(count, np.int32),
        sequence + np.arange(count),
    )
    return writes, memory


async def write(disk: Disk, writes: Writes, memory: Memory, say: Callable[..., None]) -> None:
    slots = writes.regions * 1000 + writes.positions
    say(BEGUN, *slots.tolist())
    assert (await disk.write(writes)).all()
    for slot, word in zip(slots.tolist(), writes.words[:, 0].tolist(), strict=True):
        say(ACKNOWLEDGED, slot, word)
    assert memory.address == int(writes.addresses[0, 0])  # and it was kept until now


async def look(path: str, wanted: set[int]) -> int:
    """All that is found is exact, and what is wanted is found."""
    right: set[int] = set()
    async with open_disk(path, CAPACITY, region_bytes=REGION_BYTES) as disk:
        async for found in disk.scan():
            for shape in SHAPES:
                rows = np.flatnonzero(found.lengths == shape[0])
                if not len(rows):
                    continue
                memory = Memory(len(rows) * shape[0])
                places = memory.address + np.arange(len(rows), dtype=np.uint64) * np.uint64(
                    shape[0]
                )
                reads = Reads(
                    found.regions[rows],
                    found.positions[rows],
                    places[:, None].astype(np.uint64),
                    shape,
                    found.sums[rows],
                )
                good = await disk.read(reads)
                words = found.words[rows[good], 0]
                there = memory.bytes.reshape(-1, shape[0])[good]
                assert np.array_equal(there, content(words, shape[0])), "wrong bytes"
                right |= set(words.tolist())
    assert wanted <= right, f"lost {len(wanted - right)} acknowledged blocks"
    return len(right)


def fork(call: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def live_and_die(path: str, ring: str, seed: int) -> set[int]:
    """Blocks that were acknowledged and not overwritten by anything that was begun later."""
    reader, writer = os.pipe()

    def say(*words: object) -> None:
        os.write(writer, (" ".join(map(str, words)) + "\n").encode())

    pid = fork(lambda: trio.run(write_until_killed, path, ring, seed, say))
    os.close(writer)
    rng = random.Random(seed)
    told, enough = b"", rng.randrange(2, 80)
    while told.count(b"\n") < enough and (chunk := os.read(reader, 1 << 12)):
        told += chunk
    select.select([], [], [], rng.uniform(0, 0.005))  # seconds
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGKILL, f"ended with {code}"
    while chunk := os.read(reader, 1 << 16):
        told += chunk
    os.close(reader)
    kept: dict[int, int] = {}
    for line in told.decode().splitlines():
        what, *numbers = line.split()
        for number in map(int, numbers if what != ACKNOWLEDGED else []):
            kept = {
                slot: word
                for slot, word in kept.items()
                if (slot // 1000 if what == CUT else slot) != number
            }
        if what == ACKNOWLEDGED:
            kept[int(numbers[0])] = int(numbers[1])
    return set(kept.values())


def main() -> None:
    """Kill so many, one after another, on the same file."""
    path, first, count, ring = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    total = 0
    for seed in range(first, first + count):
        wanted = live_and_die(path, ring, seed)
        total += len(wanted)
        pid = fork(lambda wanted=wanted: trio.run(look, path, wanted))
        if os.waitpid(pid, 0)[1] != 0:
            sys.exit(f"seed {seed}")
    print(f"{count} killed, {total} acknowledged blocks found", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
