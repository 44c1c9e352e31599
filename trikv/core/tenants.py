"""Quotas: whose blocks go when one tenant wants room, and whose may not.

Decided here: who is a tenant, what a floor and a share promise, and in which order tenants give.
This file does not know engines, files of settings, or in which order one tenant's blocks go.

While there is room nobody is asked. When room is needed for a tenant, blocks go in this order:

1. of tenants above their share (with what they want now), the one most above first, down to it;
2. of tenants above their floor, the one with the coldest block first, down to it, and replicas
   (blocks that other nodes hold too) before all others;
3. the tenant's own. Others' floors are never touched.

A tenant that no rule names has the default's floor and share for itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.policies import Ground, Maker, Policy
from trikv.core.words import Entries, SpaceId, Stamp

TENANTS_MAX: Final = 64  # each has orders of its own
OTHERS: Final = 0
OTHERS_NAME: Final = "(others)"
STEP_BLOCKS: Final = 64  # taken from one tenant before the coldest is looked for again
NO_PART: Final = -1

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant is promised, in parts of the pool.

    Attributes:
        floor: what others' needs leave it, if it has so much.
        share: with more than this it gives first.
    """

    floor: float = 0.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Rules:
    """Quotas by name of tenant."""

    default: Quota = Quota()
    named: Mapping[str, Quota] = field(default_factory=dict)

    def of(self, name: str) -> Quota:
        """The quota of a tenant."""
        return self.named.get(name, self.default)


class Tenants:
    """The tenants of one pool, or of one disk below it.

    Attributes:
        rules: of now; see `follow`.
        asking: who wants room now.

    At the bound: tenants beyond `TENANTS_MAX` are one, named `OTHERS_NAME`.
    """

    def __init__(self, pool_bytes: int, rules: Rules) -> None:
        self.rules = rules
        self.asking = OTHERS
        self._pool_bytes = pool_bytes
        self._names = [OTHERS_NAME]
        self._numbers = {OTHERS_NAME: OTHERS}
        self._of_space: dict[SpaceId, int] = {}
        self._orders: list[TenantOrders] = []
        self._beside: list[Tenants] = []

    def beside(self, pool_bytes: int) -> "Tenants":
        """The same tenants in another place: floors and shares are parts of its own size."""
        made = Tenants(pool_bytes, self.rules)
        self._beside.append(made)
        return made

    def follow(self, rules: Rules) -> None:
        """Other rules, here and beside; they count from the next eviction on."""
        for one in (self, *self._beside):
            one.rules = rules

    def rows_beside(self) -> dict[str, tuple[int, int, int]]:
        """Bytes used, floor and share of each tenant that has blocks beside, all places summed."""
        sums: dict[str, tuple[int, int, int]] = {}
        for place in self._beside:
            for name, *sizes in place.rows():
                before = sums.get(name, (0, 0, 0))
                sums[name] = (before[0] + sizes[0], before[1] + sizes[1], before[2] + sizes[2])
        return sums

    def assign(self, space: SpaceId, name: str) -> None:
        """Blocks of this space are a tenant's."""
        if name not in self._numbers and len(self._names) < TENANTS_MAX:
            self._numbers[name] = len(self._names)
            self._names.append(name)
        self._of_space[space] = self._numbers.get(name, OTHERS)

    def forget(self, space: SpaceId) -> None:
        """No blocks of this space are left."""
        self._of_space.pop(space, None)

    def of(self, space: SpaceId) -> int:
        """The tenant of a space."""
        return self._of_space.get(space, OTHERS)

    def add_orders(self, orders: "TenantOrders") -> None:
        """Count what is in them."""
        self._orders.append(orders)

    def used_bytes(self) -> list[int]:
        """Bytes of each tenant's sealed blocks."""
        used = [0] * len(self._names)
        for orders in self._orders:
            for tenant, count in orders.counts():
                used[tenant] += count * orders.block_bytes
        return used

    def floors(self) -> list[int]:
        """Each tenant's floor in bytes."""
        return [int(self.rules.of(name).floor * self._pool_bytes) for name in self._names]

    def shares(self) -> list[int]:
        """Each tenant's share in bytes."""
        return [int(self.rules.of(name).share * self._pool_bytes) for name in self._names]

    def rows(self) -> Iterator[tuple[str, int, int, int]]:
        """Name, bytes used, floor and share of each tenant that has blocks."""
        columns = zip(self._names, self.used_bytes(), self.floors(), self.shares(), strict=True)
        return (row for row in columns if row[1])

    def may_lose(self, tenants: NDArray[np.int64], block_bytes: int) -> bool:
        """True when all these blocks may go without touching the floor of one who does not ask.

        Those of no tenant, below 0, may.
        """
        used, floors = self.used_bytes(), self.floors()
        found, counts = np.unique(tenants, return_counts=True)
        return all(
            tenant in {self.asking, NO_PART} or used[tenant] - count * block_bytes >= floors[tenant]
            for tenant, count in zip(found.tolist(), counts.tolist(), strict=True)
        )


class TenantOrders:
    """The blocks of one shape, in an order for each tenant and for its replicas.

    Cost: what the orders cost, for each tenant that has blocks of this shape; 20 µs a call more
    than one order, and some 5 µs a tenant when room is needed.
    """

    def __init__(
        self,
        tenants: Tenants,
        maker: Maker,
        ground: Ground,
        *,
        space: NDArray[np.int32],
        replica: Bools,
        block_bytes: int,
    ) -> None:
        """Order the entries of one shape.

        Args:
            tenants: of the pool.
            maker: of the order of one tenant's blocks.
            ground: of all orders.
            space: the space of each entry; the caller's column.
            replica: whether other nodes hold it too, as of its next touch; the caller's column.
            block_bytes: of this shape, in the pool.
        """
        self.block_bytes = block_bytes
        self._tenants = tenants
        self._maker = maker
        self._ground = ground
        self._space = space
        self._replica = replica
        self._part = np.full(len(ground.recency), NO_PART, np.int16)  # 2 * tenant + not a replica
        self._orders: dict[int, Policy] = {}
        tenants.add_orders(self)

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def counts(self) -> Iterator[tuple[int, int]]:
        """Tenants, and how many blocks each has here; a tenant may come twice."""
        return ((part // 2, len(order)) for part, order in self._orders.items())

    def tenants_of(self, entries: Entries) -> NDArray[np.int64]:
        """The tenant of each sealed block; -1 of those in no order, which are nobody's."""
        return self._part[entries].astype(np.int64) // 2

    def used(self, entries: Entries) -> None:
        """As the orders do."""
        for order, mine in self._split(entries):
            order.used(mine)

    def touch(self, entries: Entries, stamp: int) -> None:
        """As the orders do; the entries are of one space."""
        if len(entries) == 0:
            return
        tenant = self._tenants.of(SpaceId(self._space.item(entries.item(0))))
        parts = (2 * tenant + ~self._replica.take(entries)).astype(np.int16)
        before = self._part.take(entries)
        moved = entries[(before != parts) & (before != NO_PART)]
        for order, mine in self._split(moved):
            order.forget(mine)
        self._part[entries] = parts
        for order, mine in self._split(entries):
            order.touch(mine, stamp)

    def victims(self, count: int, evictable: Bools) -> Entries:
        """Take out up to `count` entries, of tenants in the order that this file's head tells."""
        gone = [np.empty(0, np.int32)]
        for part, most in self._givers(count):
            missing = count - sum(map(len, gone))
            if missing <= 0:
                break
            gone.append(self._orders[part].victims(min(most, missing), evictable))
        taken = np.concatenate(gone)
        self._part[taken] = NO_PART
        return taken

    def unpark(self, entries: Entries) -> None:
        """As the orders do."""
        for order, mine in self._split(entries):
            order.unpark(mine)

    def forget(self, entries: Entries) -> None:
        """As the orders do."""
        for order, mine in self._split(entries):
            order.forget(mine)
        self._part[entries] = NO_PART

    def coldest(self) -> Stamp | None:
        """A stamp not newer than that of any block that may go."""
        used, floors = self._tenants.used_bytes(), self._tenants.floors()
        asking = self._tenants.asking
        stamps = [
            stamp
            for part, order in self._orders.items()
            if part // 2 == asking or used[part // 2] > floors[part // 2]
            if (stamp := order.coldest()) is not None
        ]
        return min(stamps, default=None)

    def _split(self, entries: Entries) -> Iterator[tuple[Policy, Entries]]:
        """The orders of known entries, and which of them are in each, as they stand."""
        if len(entries) == 0:
            return
        parts = self._part.take(entries)
        if bool((parts == parts[0]).all()):  # as nearly always
            if parts[0] != NO_PART:
                yield self._order(parts.item(0)), entries
            return
        for part in np.unique(parts).tolist():
            if part != NO_PART:
                yield self._order(part), entries[parts == part]

    def _order(self, part: int) -> Policy:
        order = self._orders.get(part)
        if order is None:
            order = self._orders[part] = self._maker(self._ground)
        return order

    def _givers(self, count: int) -> Iterator[tuple[int, int]]:
        """Parts to take from, in turn, and how many blocks at most each time."""
        asking, each = self._tenants.asking, self.block_bytes
        used, floors = self._tenants.used_bytes(), self._tenants.floors()
        wanted = [one + count * each * (at == asking) for at, one in enumerate(used)]
        over = [want - share for want, share in zip(wanted, self._tenants.shares(), strict=True)]
        for tenant in sorted(range(len(over)), key=lambda one: -over[one]):
            if over[tenant] > 0:
                yield from self._take(tenant, over[tenant], used)
        spent: set[int] = set()
        while True:
            may = [
                (part % 2, stamp, part)
                for part, order in self._orders.items()
                if part not in spent and used[part // 2] - floors[part // 2] >= each
                if (stamp := order.coldest()) is not None
            ]
            if not may:
                break
            part = min(may)[2]
            tenant, before = part // 2, len(self._orders[part])
            most = min(STEP_BLOCKS, (used[tenant] - floors[tenant]) // each)
            yield part, most
            took = before - len(self._orders[part])
            used[tenant] -= took * each
            if took < most:
                spent.add(part)
        yield from self._take(asking, used[asking], used)

    def _take(self, tenant: int, size: int, used: list[int]) -> Iterator[tuple[int, int]]:
        """Replicas first, then the others of one tenant, until `size` bytes are gone."""
        goal = used[tenant] - size
        for part in (2 * tenant, 2 * tenant + 1):
            if part in self._orders and used[tenant] > goal:
                before = len(self._orders[part])
                yield part, -(-(used[tenant] - goal) // self.block_bytes)
                used[tenant] -= (before - len(self._orders[part])) * self.block_bytes
