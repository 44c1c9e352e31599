"""The calls of an engine as records: what `wire` reads and the service answers.

Decided here: nothing; a record is a message whose sizes have been checked. Units and bounds are in
schema/kv.capnp, whose names these are.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trikv.core.layout import Piece, Range
from trikv.core.namespace import Fields
from trikv.core.words import InstanceName, LeaseId, RequestId, Words


@dataclass(frozen=True, slots=True)
class Declare:
    """A scheduler says what its engine is."""

    instance: InstanceName
    rank_count: int
    fields: Fields


@dataclass(frozen=True, slots=True)
class GroupPieces:
    """Where one cache group's blocks lie on a rank."""

    block_count: int
    pieces: tuple[Piece, ...]
    layout: str
    replicas: int = 1
    sections: tuple[int, ...] = ()  # where in a page each one ends; none: the page is one


@dataclass(frozen=True, slots=True)
class Signals:
    """An array of uint32 words in one memory of a rank."""

    memory: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory that a rank has exported by CUDA IPC.

    Attributes:
        device: 16 bytes, the GPU's UUID.
        handles: 64 bytes each, one a range of the registration.
        events: 64 bytes each.
        signals: words in which loads show their end; None: it has none.
    """

    device: bytes
    handles: tuple[bytes, ...]
    events: tuple[bytes, ...]
    signals: Signals | None = None


@dataclass(frozen=True, slots=True)
class Register:
    """A worker says where its part of every block lies.

    Attributes:
        ranges: of its process's memory, or made-up addresses that keep allocations of a GPU apart.
        gpu: where the memory is a GPU's.
    """

    instance: InstanceName
    rank: int
    ranges: tuple[Range, ...]
    groups: tuple[GroupPieces, ...]
    fence_address: int
    fence_count: int
    gpu: GpuMemory | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """How many leading blocks are at hand?"""

    request: RequestId
    group: int
    words: Words
    wait_s: float = 0.0
    is_alone: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """Keep these blocks."""

    rank: int
    group: int
    request: RequestId
    first: int
    words: Words
    blocks: NDArray[np.int32]
    fence: int
    generation: int
    event: int = 0
    signal: int = 0  # as in `Load`; when all bytes have been read
    value: int = 0
    altered: str | None = None  # see `Engines.check_altered`; None: the caller does not say


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Put these leased blocks there."""

    rank: int
    lease: LeaseId
    first: int
    blocks: NDArray[np.int32]
    budget_s: float
    event: int = 0
    signal: int = 0  # number of a word, from 1; 0: none
    value: int = 0  # what the word becomes when all blocks have arrived
    is_ordered: bool = False  # section after section


@dataclass(frozen=True, slots=True)
class Named:
    """Answer to declare and register."""

    namespace: str  # 32 hex digits, or empty while the instance is incomplete
    page_bytes: tuple[int, ...]
    notes: tuple[str, ...]
    writers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a query."""

    hit_count: int
    lease: int
    lease_s: float
    coming_count: int = 0
    coming_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Saved:
    """Answer to a save."""

    saved_count: int
    present_count: int
    refused_count: int
