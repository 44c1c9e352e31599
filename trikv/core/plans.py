"""What the cache is asked about and what it answers, as records.

Decided here: nothing; `Cache` makes them, and whoever copies hands the plans back.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trikv.core.banks import ANY_BANK
from trikv.core.chains import Chain
from trikv.core.leases import Lease
from trikv.core.words import Entries, InstanceName, Offsets, RequestId, ShapeId, SpaceId, TransferId


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a cache; each has its behaviour at the bound in the method that meets it."""

    lease_s: float = 30.0
    leases_max: int = 16_384
    leased_fraction: float = 0.5
    fill_s: float = 30.0
    filling_fraction: float = 0.5
    filling_fraction_many_ranks: float = 0.1
    fetching_fraction: float = 0.5
    chains_max: int = 65_536


@dataclass(frozen=True, slots=True)
class Key:
    """Who calls about what: an instance's request in one space.

    Attributes:
        near: the bank of the pool near all ranks of the instance.
        replicas: so many of the instance's ranks hold the same page; see `core.replicas`.
    """

    instance: InstanceName
    request: RequestId
    space: SpaceId
    near: int = field(default=ANY_BANK, compare=False)
    replicas: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class SpaceFacts:
    """How blocks of a space lie in the pool."""

    shape: ShapeId
    page_count: int
    block_bytes: int  # of the pool: all its pages with their padding


@dataclass(frozen=True, slots=True)
class Hit:
    """Answer to a query.

    Attributes:
        asked_before: so many of the blocks, from the first on, an earlier query of the request has
            asked for: whoever counts what engines want does not count these again.
        landed: a tier of `TIERS` after the first: how many of the blocks came from there, and no
            query was told of them before.
        coming: so many blocks behind these are on their way, or can be had from below.
        coming_s: an estimate of how long they take.
    """

    count: int
    lease: Lease | None
    asked_before: int
    landed: tuple[int, ...] = ()
    coming: int = 0
    coming_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A copy from an engine's memory into pages that are claimed for it until `complete_save`."""

    transfer: TransferId
    key: Key
    page: int
    positions: NDArray[np.int64]  # which blocks of the message are to be copied
    entries: Entries
    offsets: Offsets
    present_count: int
    refused_count: int
    chain: Chain  # the request's, kept for the touch at the end even when the request ends before


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A copy of pinned pages into an engine's memory; the pins end with `complete_load`."""

    transfer: TransferId
    entries: Entries
    offsets: Offsets
