"""The records of a disk: written a page at a time, many in one go, never in two ways at once.

Decided here: that one round of writing is under way at a time and takes along whatever came
meanwhile, and which record pages are kept in memory (a page holds records of neighbours, so it is
written whole). This file does not know what the records say.
"""

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.pages import PAGE_ALIGN
from trikv.core.slots import RECORD, RECORDS_A_PAGE, Regions
from trikv.tiers.runs import Memory, join
from trikv.tiers.transfers import Transfers

IMAGE_BYTES_MAX: Final = 64 << 20
ROUND_PAGES: Final = 256


@dataclass(slots=True, eq=False)
class _Request:
    """Records that one caller wants on the disk."""

    regions: NDArray[np.int64]
    positions: NDArray[np.int64]
    records: NDArray[np.void]
    written: NDArray[np.bool_]
    is_done: bool = False


class Table:
    """Record pages of a disk.

    At the bound: images beyond `IMAGE_BYTES_MAX` are dropped, least recently used first, and read
    again when a record of their region is to be written.
    """

    def __init__(self, regions: Regions, run: Callable[[Transfers], Awaitable[None]]) -> None:
        self._regions = regions
        self._run = run
        self._images: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self._image_bytes = 0
        self._queue: deque[_Request] = deque()
        self._lock = trio.Lock()
        self._memory = Memory(ROUND_PAGES * PAGE_ALIGN)

    def cut(self, region: int) -> None:
        """The region has been cut anew: it has no records."""
        pages = int(self._regions.record_pages(np.array([region])).item())
        self._keep(region, np.zeros(pages * PAGE_ALIGN, np.uint8))

    async def put(
        self, regions: NDArray[np.int64], positions: NDArray[np.int64], records: NDArray[np.void]
    ) -> NDArray[np.bool_]:
        """Write records; true where one is on the disk.

        Cancellation: waits for its round, which others share; the ring bounds how long.
        """
        request = _Request(regions, positions, records, np.zeros(len(regions), np.bool_))
        self._queue.append(request)
        with trio.CancelScope(shield=True):
            async with self._lock:
                while not request.is_done:
                    await self._round()
        await trio.lowlevel.checkpoint_if_cancelled()
        return request.written

    async def _round(self) -> None:
        """Write what is wanted by now; whatever happens, its callers have their answer."""
        requests = list(self._queue)
        self._queue.clear()
        try:
            await self._write_records(requests)
        finally:
            for request in requests:
                request.is_done = True

    async def _write_records(self, requests: list[_Request]) -> None:
        regions = np.concatenate([request.regions for request in requests])
        positions = np.concatenate([request.positions for request in requests])
        records = np.concatenate([request.records for request in requests])
        for region in np.unique(regions).tolist():
            image = await self._image(region)
            mine = np.flatnonzero(regions == region)
            image.view(RECORD)[positions[mine]] = records[mine]
        places = np.stack([regions, positions // RECORDS_A_PAGE], axis=1)
        pages, of = np.unique(places, axis=0, return_inverse=True)
        written = np.zeros(len(pages), np.bool_)
        for first in range(0, len(pages), ROUND_PAGES):
            written[first : first + ROUND_PAGES] = await self._write(pages[first:][:ROUND_PAGES])
        parts = np.split(written[of.reshape(-1)], np.cumsum([len(one.regions) for one in requests]))
        for request, part in zip(requests, parts, strict=False):  # the last one is empty
            request.written[:] = part
        self._shrink()

    async def _write(self, pages: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Copy pages of the images, so that these may change, and write the copies."""
        for index, (region, page) in enumerate(pages.tolist()):
            start = page * PAGE_ALIGN
            copy = self._memory.bytes[index * PAGE_ALIGN : (index + 1) * PAGE_ALIGN]
            copy[:] = self._images[region][start : start + PAGE_ALIGN]
        offsets = self._regions.layout.records_at(pages[:, 0]) + pages[:, 1] * PAGE_ALIGN
        addresses = np.arange(len(pages), dtype=np.uint64) * np.uint64(PAGE_ALIGN)
        addresses += np.uint64(self._memory.address)
        transfers, order, of = join(
            offsets, addresses[:, None], (PAGE_ALIGN,), is_write=True, keep=self._memory
        )
        await self._run(transfers)
        written = np.zeros(len(pages), np.bool_)
        written[order] = transfers.results[of] == 0
        return written

    async def _image(self, region: int) -> NDArray[np.uint8]:
        """The record pages of a region; those that cannot be read are taken to be empty."""
        image = self._images.get(region)
        if image is not None:
            self._images.move_to_end(region)
            return image
        size = int(self._regions.record_pages(np.array([region])).item()) * PAGE_ALIGN
        memory = Memory(size)
        offsets = self._regions.layout.records_at(np.array([region]))
        places = offsets, np.array([[memory.address]], np.uint64)
        transfers, _, _ = join(*places, (size,), is_write=False, keep=memory)
        await self._run(transfers)
        is_read = not transfers.results.any()
        image = memory.bytes.copy() if is_read else np.zeros(size, np.uint8)
        self._keep(region, image)
        return image

    def _keep(self, region: int, image: NDArray[np.uint8]) -> None:
        self._drop(region)
        self._images[region] = image
        self._image_bytes += len(image)

    def _drop(self, region: int) -> None:
        image = self._images.pop(region, None)
        if image is not None:
            self._image_bytes -= len(image)

    def _shrink(self) -> None:
        while self._image_bytes > IMAGE_BYTES_MAX and len(self._images) > 1:
            self._drop(next(iter(self._images)))
