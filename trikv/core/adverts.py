"""What a node has yet to tell one metaserver.

Decided here: that of several changes to a block only the last is told, in which portions, what
happens when the metaserver cannot keep up, and how both sides notice that they disagree. This file
does not know connections, or what the node holds.

The digest sums up what was told since the last full announcement; the metaserver counts the same.
A portion whose answer was lost was either taken or not: the next digest says which.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from trikv.core.owners import digest_of
from trikv.core.words import Words

KEYS_MAX: Final = 262_144
"""Changes that wait; beyond, all are dropped and everything is announced anew."""
PORTION_KEYS: Final = 2_048
"""What is told at once: a metaserver is busy with it for a millisecond or two."""
PORTION_KEYS_MAX: Final = 8_192
"""What may be told at once."""
PORTION_PARTS_MAX: Final = 64
DIGEST_MASK: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of one origin that are held now, or no longer.

    Attributes:
        is_below: held, but on a disk only: to be asked for where nobody has them in memory.
    """

    origin: bytes
    words: Words
    is_held: bool
    is_below: bool = False

    @property
    def kind(self) -> tuple[bool, bool]:
        """What it says of its blocks."""
        return self.is_held, self.is_below

    @property
    def digest(self) -> int:
        """What it adds to the sum, in memory or below."""
        made = digest_of(self.origin, self.words)
        return made if self.is_held else -made


@dataclass(slots=True)
class Adverts:
    """Changes in order, until they are told.

    At the bound: `KEYS_MAX` changes wait; a further one drops them all, and `is_lost` says that
    only a full announcement helps.
    """

    keys_max: int = KEYS_MAX
    told: int = 0
    is_lost: bool = True  # nothing was ever announced
    dropped_total: int = 0
    _waiting: deque[Part] = field(default_factory=deque)
    _key_count: int = 0
    _sent: list[Part] = field(default_factory=list)

    def __len__(self) -> int:
        return self._key_count

    @property
    def untold(self) -> int:
        """How many changes wait or are in flight."""
        return self._key_count + sum(len(part.words) for part in self._sent)

    def offer(self, part: Part) -> None:
        """A change; a copy of the words is not made. While all is lost, nothing waits."""
        if self.is_lost:
            return
        if self._key_count + len(part.words) > self.keys_max:
            self.lose()
            self.dropped_total += len(part.words)
            return
        if len(part.words):
            self._waiting.append(part)
            self._key_count += len(part.words)

    def lose(self) -> None:
        """Drop everything: what was told is not known any more."""
        self.dropped_total += self._key_count
        self.is_lost = True
        self._waiting.clear()
        self._sent = []
        self._key_count = 0

    def begin(self) -> None:
        """A full announcement begins: changes from here on are told after it."""
        self._waiting.clear()
        self._sent = []
        self._key_count = 0
        self.is_lost = False

    def finish(self) -> None:
        """The full announcement has been taken: both sides count from here."""
        self.told = 0

    def take(self) -> list[Part]:
        """The next portion: in flight until `taken` or `agree`; the same again until then."""
        if not self._sent and self._waiting:
            self._sent = net(self._pop())
        return self._sent

    def taken(self) -> None:
        """The portion in flight was taken."""
        self.told = (self.told + sum(part.digest for part in self._sent)) & DIGEST_MASK
        self._sent = []

    def agree(self, digest: int) -> bool:
        """Compare with the metaserver's digest; settles what became of a portion in flight."""
        in_flight = (self.told + sum(part.digest for part in self._sent)) & DIGEST_MASK
        if digest == self.told:
            return True  # what is in flight, if anything, did not arrive
        if digest == in_flight:
            self.taken()
            return True
        return False

    def _pop(self) -> list[Part]:
        """The oldest changes, as many as fit into a portion."""
        parts: list[Part] = []
        room = PORTION_KEYS
        while self._waiting and room and len(parts) < PORTION_PARTS_MAX // 2:
            part = self._waiting.popleft()
            if len(part.words) > room:
                self._waiting.appendleft(replace(part, words=part.words[room:]))
                part = replace(part, words=part.words[:room])
            room -= len(part.words)
            self._key_count -= len(part.words)
            parts.append(part)
        return parts


def net(parts: list[Part]) -> list[Part]:
    """Of each block only the last change; a part an origin and kind, in no promised order."""
    made: list[Part] = []
    for origin in dict.fromkeys(part.origin for part in parts):
        ours = [part for part in parts if part.origin == origin]
        words = np.concatenate([part.words for part in ours])
        kinds = list(dict.fromkeys(part.kind for part in ours))
        of = np.concatenate([np.full(len(part.words), kinds.index(part.kind)) for part in ours])
        if len(np.unique(words[:, 0])) < len(words):  # else nothing stands twice
            _, last = np.unique(words[::-1], axis=0, return_index=True)
            last = np.sort(len(words) - 1 - last)
            words, of = words[last], of[last]
        for number, kind in enumerate(kinds):
            chosen = words[of == number]
            if len(chosen):
                made.append(Part(origin, chosen, *kind))
    return made
