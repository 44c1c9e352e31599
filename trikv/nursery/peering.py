"""All dealings with other hosts, put together: announcing, lending, fetching.

Decided here: the order of start and end. Before capnp's loop runs nothing is dialled, and when this
ends, first what is fetched ends, then what is lent, then the metaservers are told goodbye.
This file does not know what the parts do.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog
import trio

from trikv import __version__
from trikv.address import Address
from trikv.core.below import Below
from trikv.core.cache import Cache
from trikv.core.counters import CallCounts
from trikv.core.lending import Lending
from trikv.core.lifting import Lifting
from trikv.core.remote import Remote
from trikv.core.shared import Shared
from trikv.meta.client import Identity, MetaClient
from trikv.meta.gate import Gate
from trikv.meta.messages import NODE
from trikv.nursery.borrowing import Local
from trikv.nursery.fetching import Fetching
from trikv.nursery.owning import Owner
from trikv.nursery.peerplan import PeerPlan
from trikv.options import SettingError
from trikv.tiers import verbs
from trikv.tiers.pairs import NicError
from trikv.tiers.rails import Rails, open_rails
from trikv.tiers.tcp import Memory
from trikv.tiers.verbs import NoVerbsError

log = structlog.get_logger()

RECEIVE_THREADS: Final = 32
CHECK_THREADS: Final = 2
RDMA_RAIL: Final = "rdma"
"""What a node with NICs tells metaservers: owners with it are preferred by those that have it."""


@dataclass(slots=True)
class Peering:
    """One node among others.

    Attributes:
        epoch: grows with each start of the daemon.
        calls: of other nodes, that have ended.
    """

    plan: PeerPlan
    pool: Memory
    slab_bytes: int
    cache: Cache
    below: Below
    shared: Shared
    remote: Remote
    epoch: int
    calls: CallCounts = field(default_factory=CallCounts)
    client: MetaClient = field(init=False)
    owner: Owner = field(init=False)
    lifting: Lifting = field(init=False)
    fetching: Fetching = field(init=False)
    gate: Gate = field(init=False)
    rails: Rails | None = None
    _opened: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        plan, shared = self.plan, self.shared
        address = str(plan.address)
        lending = Lending(self.cache, shared)
        self.lifting = Lifting(self.cache, self.below, shared, lending, shared.lift_bytes_max)
        names = (RDMA_RAIL,) if plan.nics else ()
        self.client = MetaClient(
            Identity(address, self.epoch, names),
            plan.metas,
            plan.secret,
            shared.snapshot,
            lambda: lending.grants.block_count,
        )
        shared.tell = self.client.tell
        shared.announce_anew = self.client.announce_anew
        self.remote.has_others = self.client.knows_others
        self.owner = Owner(lending, self.pool, trio.current_time)
        local = Local(
            address,
            plan.secret,
            self.pool,
            trio.CapacityLimiter(RECEIVE_THREADS),
            trio.CapacityLimiter(CHECK_THREADS),
            lambda: self.rails,
            plan.verify_every,
        )
        self.fetching = Fetching(self.remote, self.client, local)
        self.gate = Gate(plan.secret, NODE, address, f"trikv-daemon {__version__}")

    async def open(self) -> None:
        """Capnp's loop runs: metaservers and nodes may be dialled."""
        self._opened.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be a node until cancelled.

        Raises:
            SettingError: a NIC that was named cannot be used, or the data port is taken.
        """
        data = Address(host=self.plan.address.host, port=self.plan.data_port)
        async with self._open_rails() as rails, trio.open_nursery() as nursery:
            self.rails = rails
            try:
                await nursery.start(self.owner.run, data, rails)
            except* OSError as group:
                reason = first_of(group)
                raise SettingError(f"--peer-data-port: {data}: {reason}") from None
            await nursery.start(self.fetching.run)
            task_status.started()
            await self._opened.wait()
            await nursery.start(self.client.run)

    @asynccontextmanager
    async def _open_rails(self) -> AsyncIterator[Rails | None]:
        """The NICs, for as long as the block runs; the pool stays mapped until it has ended."""
        if not self.plan.nics:
            yield None
            return
        try:
            rails = await open_rails(
                verbs.load(),
                self.plan.nics,
                address=self.pool.address,
                size=len(self.pool.memory),
                slab_bytes=self.slab_bytes,
                banks=self.cache.pages.banks,
            )
        except (NoVerbsError, NicError) as error:
            if self.plan.must_have_nics:
                raise SettingError(f"--nics: {error}") from None
            log.warning("rdma.off", reason=str(error))
            yield None
            return
        if len(rails.rails) < len(self.plan.nics):
            log.warning("rdma.part", nics=len(rails.rails), nics_wanted=len(self.plan.nics))
        try:
            yield rails
        finally:
            rails.close()


def first_of(error: BaseException) -> BaseException:
    """The first error of a group, however deep."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def peering_of(
    plan: PeerPlan | None, cache: Cache, below: Below | None, pool: Memory, epoch: int
) -> Peering | None:
    """Wire one node; opens nothing. None without a plan."""
    if plan is None or below is None:
        return None
    lift_bytes_max = int(plan.ssd_fraction * cache.pages.capacity_bytes)
    shared = Shared(cache, below, lift_bytes_max=lift_bytes_max)
    remote = Remote(cache, below, shared)
    return Peering(plan, pool, cache.pages.slab_bytes, cache, below, shared, remote, epoch)
