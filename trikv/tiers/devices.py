"""What a copier needs of a GPU, whoever drives it.

Decided here: nothing; the border between `copier`, which knows no CUDA, and `device`, which does.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from trikv.core.chunks import Sorted
from trikv.tiers.frames import AttachOrder, CopyOrder, Direction


class AttachError(Exception):
    """This memory cannot be mapped; the message says why, and which setting to change."""


class Mapped(Protocol):
    """Memory that a device has mapped."""

    def is_over(self, event: int) -> bool:
        """Whether the engine's work before it last recorded event `event` (from 1) is over."""
        ...

    def targets(self, order: CopyOrder) -> Sequence["Target"]:
        """What a copy moves one after another: its sections, each of all blocks; or one."""
        ...

    def has_sections(self, group: int) -> bool:
        """Whether copies of this group may be moved section after section."""
        ...

    def sort(self, order: CopyOrder) -> Sorted:
        """Put a copy's blocks in order."""
        ...


class Target(Protocol):
    """Memory of the engine, and which part of a page belongs there: all of it or a section."""

    @property
    def block_bytes(self) -> int:
        """Of one block, with padding."""
        ...


Key: TypeAlias = tuple[int, int, int]
"""Attachment, group and lease."""


class Landed(NamedTuple):
    """What of a load was begun ahead.

    Attributes:
        blocks: of the load, those of the chunks below before all others.
        parts: its chunks that are under way now.
        since_s: when they were begun.
        bus_s: how long the bus had them at most, before now.
    """

    blocks: Sorted
    parts: Sequence[slice] = ()
    since_s: float = 0.0
    bus_s: float = 0.0


class Lane(Protocol):
    """One direction of a device; used by one thread."""

    def rehearse(self) -> None:
        """Do what the first chunk of a copy needs, without one: it is done faster a second time."""
        ...

    def next_part(self, target: Target, begin: int, count: int, before: int) -> slice:
        """Which blocks the next chunk should have now.

        Args:
            target: of which.
            begin: blocks of it that have been started.
            count: of all.
            before: blocks in earlier chunks of the copy, those of its earlier sections included.
        """
        ...

    def start(self, target: Target, blocks: Sorted, part: slice) -> bool:
        """Begin a chunk; False: there is no room before the oldest one has ended."""
        ...

    def bring(self, key: Key, target: Target, blocks: Sorted) -> None:
        """Begin chunks of a load whose blocks are not known: near them, and no further.

        Only while nothing else is under way, and not where it would be of no use. What was brought
        a moment ago stays, what is older is dropped.

        Args:
            key: of the load that it is for. Its pages do not change as long as that may come.
            target: of the load.
            blocks: of these pages; whose blocks say nothing.
        """
        ...

    def land(self, key: Key, blocks: Sorted) -> Landed:
        """A copy has come: go on with what was brought for it; what was not for it is dropped."""
        ...

    def forget(self) -> None:
        """Drop what was brought; no byte of it moves any more."""
        ...

    def wait(self) -> None:
        """Return when the oldest chunk has ended: no byte of it moves any more."""
        ...

    def rest(self) -> None:
        """Do what takes its time: nothing is under way, and what has ended was reported."""
        ...

    def signal(self, mapped: Mapped, number: int, value: int) -> None:
        """Have word `number` (from 1) become `value` after all chunks that have been started."""
        ...


class Device(Protocol):
    """One GPU."""

    @property
    def facts(self) -> dict[str, str | int | float]:
        """For people; and `node`, the NUMA node near it, where that is known."""
        ...

    def attach(self, order: AttachOrder) -> Mapped:
        """Map a rank's memory.

        Raises:
            AttachError: not possible; nothing is left behind.
        """
        ...

    def detach(self, mapped: Mapped) -> None:
        """Unmap it; no chunk of it is under way."""
        ...

    def lane(self, direction: Direction) -> Lane:
        """The way in this direction; called once each, in the thread that will use it."""
        ...

    def prepare_pool(self, note: Callable[[bytes], None]) -> None:
        """What makes copies of the pool fast and can be done while they run already."""
        ...
