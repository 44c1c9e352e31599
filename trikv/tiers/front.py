"""The superblock of an open disk: what must be on the medium before anybody goes on.

Decided here: that each change is written to one copy, then to the other, each synchronised; that
the first is never the only one that is known to be whole; that a disk on which this fails is off.
"""

from collections.abc import Awaitable, Callable

import numpy as np
import trio

from trikv.core.pages import PAGE_ALIGN
from trikv.core.superblock import COPIES, Superblock
from trikv.tiers.runs import Memory, join
from trikv.tiers.transfers import Transfers

Run = Callable[[Transfers], Awaitable[None]]
Sync = Callable[[], Awaitable[None]]


class DiskFailedError(Exception):
    """What had to reach the medium did not; the disk is off."""


async def write_page(run: Run, offset: int, page: bytes) -> bool:
    """Write one page; true when that went well.

    Cancellation: waits for the ring, which bounds how long.
    """
    memory = Memory(PAGE_ALIGN)
    memory.bytes[:] = np.frombuffer(page, np.uint8)
    places = np.array([offset]), np.array([[memory.address]], np.uint64)
    transfers, _, _ = join(*places, (PAGE_ALIGN,), is_write=True, keep=memory)
    with trio.CancelScope(shield=True):
        await run(transfers)
    return not transfers.results.any()


class Front:
    """Writes the superblock of one disk, one change at a time."""

    def __init__(self, superblock: Superblock, run: Run, sync: Sync) -> None:
        self._superblock = superblock
        self._run = run
        self._sync = sync
        self._lock = trio.Lock()

    async def begin(self) -> None:
        """Open an epoch.

        What was read may not be on the medium yet: the process that wrote it was killed.
        """
        with trio.CancelScope(shield=True):
            await self._synchronise()
        self._superblock.epoch += 1
        self._superblock.is_clean = False
        await self._write()

    async def void(self, origin: bytes, sequence: int) -> None:
        """Declare records dead."""
        self._superblock.voids.add(origin, sequence)
        await self._write()

    async def end(self) -> None:
        """Vouch for all that was written, once it is on the medium."""
        with trio.CancelScope(shield=True):
            await self._synchronise()
        self._superblock.is_clean = True
        await self._write()

    async def _write(self) -> None:
        """Write both copies.

        Raises:
            DiskFailedError: they may not be on the medium.
        """
        with trio.CancelScope(shield=True):  # the ring bounds how long
            async with self._lock:
                self._superblock.revision += 1
                page = self._superblock.pack()
                for _ in range(COPIES):
                    copy = (self._superblock.newest + 1) % COPIES
                    if not await write_page(self._run, copy * PAGE_ALIGN, page):
                        raise DiskFailedError("its superblock cannot be written")
                    await self._synchronise()
                    self._superblock.newest = copy
        await trio.lowlevel.checkpoint_if_cancelled()

    async def _synchronise(self) -> None:
        try:
            await self._sync()
        except OSError as error:
            raise DiskFailedError(f"it cannot be synchronised: {error.strerror}") from error
