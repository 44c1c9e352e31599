"""Which part of a load each layer of a forward waits for, and when vLLM's hooks are trusted for it.

Decided here: where a page is cut into sections, and that a layer may be computed while those of
later layers still arrive. The hooks are vLLM's, which does not call them in every kind of forward,
so they are believed in two steps:

| | |
| --- | --- |
| before | in an earlier forward of this process, run in the same way, every layer's was called |
| after | every layer's was called in this one too, else its result must not be used |

A stream waits when a layer is launched into it, each stream for itself: it matters neither in which
order layers come nor where. This file knows neither vLLM nor tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, Protocol

from trikv.connector.calls import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trikv.connector.jobs import LoadJob

LAYERS_MIN: Final = 8
ORDERED_BYTES_MIN: Final = 64 << 20
"""A smaller load is over before it pays: a section costs a word, and requests of smaller parts."""
LAST_PARTS: Final = (4, 16)
"""A quarter of the layers comes last, of these again a quarter.

To compute a layer takes a quarter of the time that its blocks of some thousand tokens need to come,
or less: a section is computed while the next one comes, and only the last one is waited for.
"""


class LoadLostError(Exception):
    """Blocks that a forward has read did not arrive: its result must not be used."""


class Words(Protocol):
    """Words of the GPU that its streams can wait for."""

    @property
    def stream(self) -> int:
        """What the engine puts its work into now."""
        ...

    def hold(self, number: int, value: int) -> None:
        """What is put into that stream from now on waits for the word to be `value`."""
        ...

    def write(self, number: int, value: int) -> None:
        """The word becomes `value`, at once; any thread."""
        ...

    def read(self) -> Sequence[int]:
        """All words as they are now."""
        ...


def section_ends(layer_ends: Mapping[str, int]) -> tuple[int, ...]:
    """Where in a page each section ends, in bytes, by where layers do; empty: it is not cut."""
    ends = sorted(set(layer_ends.values()))
    if len(ends) < LAYERS_MIN:
        return ()
    cuts = {ends[len(ends) - len(ends) // part - 1] for part in LAST_PARTS}
    return tuple(sorted(cuts | {ends[-1]}))


class Layers:
    """One rank's layers. All methods run on the worker's main thread."""

    def __init__(self, layer_ends: Mapping[str, int], ends: tuple[int, ...], words: Words) -> None:
        """Make them.

        Args:
            layer_ends: where in a page each layer's bytes end.
            ends: of sections, as above; not empty.
            words: of the GPU that they are computed on.
        """
        self.ends = ends
        self._words = words
        self._sections = {name: bisect_left(ends, end) for name, end in layer_ends.items()}
        self._trusted: set[str] = set()  # ways to run a forward
        self._is_betrayed = False
        self._way = ""  # of this step; empty: hooks are not counted on
        self._called: set[str] = set()  # in this step
        self._held: list[LoadJob] = []  # that layers of this step wait for, section by section
        self._waited: dict[int, int] = {}  # up to which section each stream does

    def may_order(self, job: LoadJob) -> bool:
        """Whether a load is worth to be sent section after section; its step may still differ."""
        size = len(job.blocks) // ID_BYTES * self.ends[-1]
        return job.is_held and bool(self._trusted) and size >= ORDERED_BYTES_MIN

    def began(self, way: str) -> None:
        """How this step's forward is run is known, before or after it."""
        self._way = "" if self._is_betrayed else way

    def hold(self, job: LoadJob) -> bool:
        """Have the layers that come now wait for their part of a load; False: not so in this step.

        The stream waits for the first section at once: nobody else needs the GPU meanwhile.
        """
        if not (job.is_ordered and self._way in self._trusted):
            return False
        self._called.clear()
        self._held.append(job)
        self._words.hold(job.signal, self._value(job, 0))
        self._waited = {self._words.stream: 0}  # with all loads before it
        return True

    def called(self, layer: str) -> None:
        """A layer is launched now: what its stream is given from now on waits for its section."""
        if self._held:
            self._wait(self._sections.get(layer, len(self.ends) - 1))
        self._called.add(layer)

    def _wait(self, section: int) -> None:
        stream = self._words.stream
        if section > self._waited.get(stream, -1):
            for job in self._held:
                self._words.hold(job.signal, self._value(job, section))
            self._waited[stream] = section

    def _value(self, job: LoadJob, section: int) -> int:
        """Of the load's word when a section is there."""
        return job.value - len(self.ends) + 1 + section

    def prove(self) -> None:
        """The forward has been launched; what it waited for is certain now.

        Raises:
            LoadLostError: a layer was not waited for. Hooks are never believed again.
        """
        held, self._held = self._held, []
        self._waited.clear()
        missing = self._sections.keys() - self._called if held else ()
        if missing:
            self._is_betrayed = True
            self._trusted.clear()
            raise LoadLostError(
                f"vLLM ran layer {min(missing)}, one of {len(missing)}, without calling its hook:"
                f" it may have read blocks of request {held[0].request} before they arrived"
            )

    def ended(self) -> bool:
        """The step is over; True where its way to run a forward has just come to be trusted."""
        way, self._way = self._way, ""
        is_new = bool(way) and way not in self._trusted
        is_new = is_new and self._sections.keys() <= self._called
        if is_new:
            self._trusted.add(way)
        self._called.clear()
        return is_new
