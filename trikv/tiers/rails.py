"""This host's rails: open NICs that know the pool, for reading and for being read.

Decided here: into how many regions the pool is registered, and on how many threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import trio

from trikv.core.banks import ONE_BANK, Banks
from trikv.core.rails import Reach
from trikv.core.stripes import Begins
from trikv.tiers.nics import NicFacts
from trikv.tiers.pairs import Nic, NicError, Region

REGION_BYTES_MAX: Final = 3 << 30
"""Larger regions of 4 KiB pages overflow what NICs remember of them, at half the speed."""


@dataclass(frozen=True, slots=True, eq=False)
class Rail:
    """One NIC, and its keys for the pool's regions here."""

    nic: Nic
    regions: tuple[Region, ...]

    @property
    def keys(self) -> list[int]:
        """By which this host's own requests name each region."""
        return [region.lkey for region in self.regions]

    def close(self) -> None:
        """Forget the pool; no queue pair of this NIC is left.

        Raises:
            NicError: the NIC keeps some of it; the pool stays mapped.
        """
        for region in self.regions:
            region.close()
        self.nic.close()


@dataclass(frozen=True, slots=True, eq=False)
class Rails:
    """All rails.

    Ownership: the pool stays mapped until `close` has returned.

    Attributes:
        address: of the pool.
        bytes: of the pool.
        begins: offsets of its regions.
        nodes: the NUMA node of each region's memory, or `ANY_BANK`, which is `ANY_NODE`.
        refused: why NICs were left out, a line each.
    """

    rails: tuple[Rail, ...]
    address: int
    bytes: int
    begins: tuple[int, ...]
    nodes: tuple[int, ...]
    refused: tuple[str, ...]

    @property
    def reach(self) -> Reach:
        """What a peer needs to read here; its keys are a secret."""
        keys = tuple(tuple(one.rkey for one in rail.regions) for rail in self.rails)
        return Reach(self.address, self.bytes, self.begins, keys)

    @property
    def places(self) -> Begins:
        """Addresses at which regions begin."""
        return np.array(self.begins, np.int64) + self.address

    def close(self) -> None:
        """See `Rail.close`."""
        for rail in self.rails:
            rail.close()


async def open_rails(
    open_nic: Callable[[NicFacts], Nic],
    nics: Sequence[NicFacts],
    *,
    address: int,
    size: int,
    slab_bytes: int,
    banks: Banks = ONE_BANK,
) -> Rails:
    """Open NICs and register the pool with each, on a thread a NIC: it pins every page.

    A NIC that cannot is left out: its driver refuses, or more memory is pinned than `LimitMEMLOCK`
    allows, where each NIC counts again.

    Args:
        open_nic: of a binding.
        nics: in the order of rails.
        address: of the pool.
        size: of the pool, in bytes.
        slab_bytes: regions begin at multiples of it, so no page lies in two.
        banks: in which the pool lies.
    """
    step = max(1, REGION_BYTES_MAX // slab_bytes) * slab_bytes
    begins = tuple(range(0, size, step))
    made: dict[int, Rail] = {}

    def register(number: int, facts: NicFacts) -> None:
        nic = open_nic(facts)
        regions: list[Region] = []
        try:
            for begin in begins:
                regions.append(nic.register(address + begin, min(step, size - begin)))  # noqa: PERF401  # those made are closed
        except NicError:
            Rail(nic, tuple(regions)).close()
            raise
        made[number] = Rail(nic, tuple(regions))

    async def one(number: int, facts: NicFacts) -> None:
        try:
            await trio.to_thread.run_sync(register, number, facts, limiter=limiter)
        except NicError as error:
            refused.append(str(error))

    refused: list[str] = []
    limiter = trio.CapacityLimiter(max(1, len(nics)))
    try:
        async with trio.open_nursery() as nursery:
            for number, facts in enumerate(nics):
                nursery.start_soon(one, number, facts)
    except BaseException:
        for rail in made.values():
            rail.close()
        raise
    rails = tuple(made[number] for number in sorted(made))
    nodes = tuple(banks.at(np.array(begins, np.int64)).tolist())
    return Rails(rails, address, size, begins, nodes, tuple(refused))
