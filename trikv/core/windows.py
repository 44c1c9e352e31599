"""Rolling windows over what engines ask for: how much of it could have been found at best.

Decided here: what is counted (HyperLogLog registers of all blocks asked for and of the missed ones,
beside exact numbers), how a window rolls, which namespaces have windows of their own, and how all
this survives a restart as bytes. This file knows neither clock nor file, and it is the only one
that knows the `hyperloglog` package.

A window is a ring of `SLOTS` slots; the oldest is cleared when a new one begins. So a window covers
between 11/12 of its length and all of it. A slot begins where the caller's clock is a multiple of
the slot's length. Registers are filled from numpy batches; the package's own estimator takes them.
"""

import functools
import hashlib
import json
import math
from typing import Any, Final, NamedTuple

import numpy as np
from hyperloglog.hll import estimate_bias, get_alpha, get_treshold
from numpy.typing import NDArray

from trikv.core.ceiling import TIERS, WindowFacts
from trikv.core.words import Words

PRECISION: Final = 15
REGISTERS: Final = 1 << PRECISION  # relative error 1.04 / sqrt(REGISTERS) = 0.57 %
REST_BITS: Final = 64 - PRECISION
SLOTS: Final = 12
ASKED, MISSED = 0, 1
EVERYONE: Final = ""
NAMESPACES_MAX: Final = 4
BUSY_MAX: Final = 1_024
PENDING_BLOCKS_MAX: Final = 8_192  # a millisecond of work
PENDING_BATCHES_MAX: Final = 1_024
FORMAT: Final = "trikv windows 1"

_ALPHA: Final[float] = get_alpha(PRECISION)
_LINEAR_MAX: Final[float] = float(get_treshold(PRECISION))
_POWERS: Final = np.ldexp(1.0, -np.arange(REST_BITS + 2))
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

Registers = NDArray[np.int8]


class StateError(ValueError):
    """Saved windows cannot be used; the message is one line."""


@functools.lru_cache(maxsize=BUSY_MAX)
def salt_of(fingerprint: bytes, group: int, epoch: int) -> int:
    """What tells equal block hashes of two cache groups apart, the same after each start."""
    text = fingerprint + group.to_bytes(4, "little") + epoch.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def mix(keys: NDArray[np.uint64], salts: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Block hashes are uniform already; mixing makes them so again once a salt was added."""
    mixed = keys ^ salts
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MIX[0]
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MIX[1]
    mixed ^= mixed >> np.uint64(31)
    return mixed


def places(mixed: NDArray[np.uint64]) -> tuple[NDArray[np.int64], Registers]:
    """Which register each hash belongs to, and the value that it must reach at least."""
    register = (mixed & np.uint64(REGISTERS - 1)).astype(np.int64)
    rest = (mixed >> np.uint64(PRECISION)).astype(np.float64)  # 49 bits: exact
    return register, (REST_BITS + 1 - np.frexp(rest)[1]).astype(np.int8)


def estimate(registers: Registers) -> float:
    """How many distinct keys reached these registers, in about 30 us.

    The same number as the package's `card`, whose 32,768 powers take 0.5 ms: too long for the 30
    sketches of one scrape.
    """
    empty = REGISTERS - int(np.count_nonzero(registers))
    if empty:
        linear = REGISTERS * math.log(REGISTERS / empty)
        if linear <= _LINEAR_MAX:
            return linear
    raw = _ALPHA * REGISTERS**2 / float(_POWERS.take(registers, mode="clip").sum())
    return raw - float(estimate_bias(raw, PRECISION)) if raw <= 5 * REGISTERS else raw


class Batch(NamedTuple):
    """The blocks of one request that no earlier query of it asked for."""

    namespace: str
    salt: int
    keys: NDArray[np.uint64]
    hit_blocks: tuple[int, ...]  # a tier; hits come before misses


class Scope:
    """The windows of everyone or of one namespace; memory for all slots, given when first used."""

    def __init__(self, lengths: int, begin_s: float) -> None:
        self.begin_s = begin_s
        # Touched now, not as time passes: a daemon's memory is flat from the start.
        self.registers: Registers = np.full((lengths, 2, SLOTS, REGISTERS), 0, np.int8)
        self.counts = np.zeros((lengths, SLOTS, 1 + len(TIERS)), np.int64)  # asked, hits by tier

    def clear(self, window: int, slots: NDArray[np.int64]) -> None:
        """Begin these slots of one window anew."""
        self.registers[window][:, slots] = 0
        self.counts[window][slots] = 0


class Windows:
    """All windows.

    At the bound: the `namespaces_max` busiest namespaces have windows of their own, the others are
    in everyone's only; what waits to be filled in is filled in at once when it is too much.
    """

    def __init__(
        self, lengths_s: tuple[float, ...], *, now_s: float, namespaces_max: int = NAMESPACES_MAX
    ) -> None:
        """Begin with empty windows.

        Args:
            lengths_s: of the windows, ascending.
            now_s: seconds on a clock that never goes back; its zero means nothing.
            namespaces_max: how many namespaces have windows of their own.
        """
        self.lengths_s = lengths_s
        self.namespaces_max = namespaces_max
        self.has_changed = False
        self._slot_s = tuple(length_s / SLOTS for length_s in lengths_s)
        self._shift_s = 0.0  # from the caller's clock to that of the saved windows
        self._numbers = [self._number(window, now_s) for window in range(len(lengths_s))]
        self._turn_s = -math.inf
        self._scopes = {EVERYONE: Scope(len(lengths_s), now_s)}
        self._busy: dict[str, float] = {}
        self._pending: list[Batch] = []
        self._pending_blocks = 0
        self._advance(now_s)

    def begin(self, *, now_s: float) -> None:
        """Count time from here; for whoever makes windows before there is a clock."""
        self._shift_s = self._scopes[EVERYONE].begin_s - now_s

    def record(
        self, namespace: str, salt: int, words: Words, hit_blocks: tuple[int, ...], *, now_s: float
    ) -> None:
        """Count blocks that a request asked for; in some microseconds, whatever their number.

        Args:
            namespace: fingerprint in hex.
            salt: see `salt_of`.
            words: hashes of the blocks, those at hand first; copied.
            hit_blocks: a tier of `TIERS`: how many were at hand there; none in those left out.
            now_s: seconds on the caller's clock.
        """
        if len(words) == 0:
            return
        at_s = now_s + self._shift_s
        if at_s >= self._turn_s:
            self._advance(at_s)
        hit_blocks += (0,) * (len(TIERS) - len(hit_blocks))
        self._pending.append(Batch(namespace, salt, words[:, 0].copy(), hit_blocks))
        self._pending_blocks += len(words)
        if self._pending_blocks >= PENDING_BLOCKS_MAX or len(self._pending) >= PENDING_BATCHES_MAX:
            self._settle()

    def read(self, *, now_s: float) -> list[WindowFacts]:
        """The facts of each window, everyone's first, then those of the busiest namespaces."""
        at_s = now_s + self._shift_s
        self._advance(at_s)
        busiest = sorted(self._scopes, key=lambda name: (name != EVERYONE, -self._busy_of(name)))
        return [
            self._facts(name, self._scopes[name], window, at_s)
            for name in busiest
            for window in range(len(self.lengths_s))
        ]

    def tend(self, *, now_s: float) -> None:
        """Fill in what waits; to be called every second or so."""
        self._advance(now_s + self._shift_s)

    @property
    def memory_bytes(self) -> int:
        """Memory of all registers and numbers."""
        return sum(one.registers.nbytes + one.counts.nbytes for one in self._scopes.values())

    # -- rolling

    def _number(self, window: int, at_s: float) -> int:
        return math.floor(at_s / self._slot_s[window])

    def _advance(self, at_s: float) -> None:
        """Fill in what waits, which belongs to the slots so far, then begin new ones if it is time.

        A clock that goes back stays in the slot that has begun.
        """
        self._settle()
        if at_s < self._turn_s:
            return
        for window, before in enumerate(self._numbers):
            number = max(before, self._number(window, at_s))
            self._numbers[window] = number
            fresh = np.arange(max(before, number - SLOTS) + 1, number + 1) % SLOTS
            if len(fresh):
                for scope in self._scopes.values():
                    scope.clear(window, fresh)
        self._turn_s = min(
            (number + 1) * self._slot_s[window] for window, number in enumerate(self._numbers)
        )
        self._choose(at_s)

    def _choose(self, at_s: float) -> None:
        """Give windows to the busiest namespaces, and take them from idle ones.

        A namespace must be twice as busy to displace another, so that two do not take turns.
        """
        for name in [name for name in self._scopes if name != EVERYONE]:
            if not self._scopes[name].counts[-1].any():
                del self._scopes[name]
        fade = 0.5 ** (1 / SLOTS)
        self._busy = {name: busy * fade for name, busy in self._busy.items() if busy * fade > 1}
        others = [name for name in self._busy if name not in self._scopes]
        mine = [name for name in self._scopes if name != EVERYONE]
        if others and mine and len(mine) >= self.namespaces_max:
            coldest = min(mine, key=self._busy_of)
            busiest = max(others, key=self._busy_of)
            if self._busy_of(busiest) > 2 * self._busy_of(coldest):
                del self._scopes[coldest]
                self._scopes[busiest] = Scope(len(self.lengths_s), at_s)

    def _busy_of(self, name: str) -> float:
        return self._busy.get(name, 0.0)

    # -- counting

    def _settle(self) -> None:
        """Fill in what waits."""
        if not self._pending:
            return
        batches, self._pending, self._pending_blocks = self._pending, [], 0
        self.has_changed = True
        counts = np.array([(len(batch.keys), *batch.hit_blocks) for batch in batches])
        lengths, hits = counts[:, 0], counts[:, 1:].sum(axis=1)
        salts = np.array([batch.salt for batch in batches], np.uint64)
        keys = np.concatenate([batch.keys for batch in batches])
        register, value = places(mix(keys, np.repeat(salts, lengths)))
        position = np.arange(len(keys)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        is_missed = position >= np.repeat(hits, lengths)
        self._fill(self._scopes[EVERYONE], counts, register, value, is_missed)
        self._welcome(batches)
        names = {batch.namespace: None for batch in batches}
        for name in names.keys() & self._scopes.keys():
            rows = np.array([batch.namespace == name for batch in batches])
            mine = slice(None) if len(names) == 1 else np.repeat(rows, lengths)
            self._fill(
                self._scopes[name], counts[rows], register[mine], value[mine], is_missed[mine]
            )

    def _welcome(self, batches: list[Batch]) -> None:
        """Note who was busy; a free place goes to whoever comes first."""
        for batch in batches:
            name = batch.namespace
            if name not in self._busy and len(self._busy) >= BUSY_MAX:
                del self._busy[min(self._busy, key=self._busy_of)]
            self._busy[name] = self._busy_of(name) + len(batch.keys)
            if name not in self._scopes and len(self._scopes) <= self.namespaces_max:
                begin_s = max(
                    number * slot_s
                    for number, slot_s in zip(self._numbers, self._slot_s, strict=True)
                )
                self._scopes[name] = Scope(len(self.lengths_s), begin_s)

    def _fill(
        self,
        scope: Scope,
        counts: NDArray[np.int64],
        register: NDArray[np.int64],
        value: Registers,
        is_missed: NDArray[np.bool_],
    ) -> None:
        total = counts.sum(axis=0)
        missed_register, missed_value = register[is_missed], value[is_missed]
        for window, number in enumerate(self._numbers):
            slot = number % SLOTS
            scope.counts[window, slot] += total
            np.maximum.at(scope.registers[window, ASKED, slot], register, value)
            np.maximum.at(scope.registers[window, MISSED, slot], missed_register, missed_value)

    def _facts(self, name: str, scope: Scope, window: int, at_s: float) -> WindowFacts:
        asked, *hits = scope.counts[window].sum(axis=0).tolist()
        all_asked, all_missed = np.maximum.reduce(scope.registers[window], axis=1)
        distinct = min(asked, round(estimate(all_asked)))
        missed = min(asked - sum(hits), distinct, round(estimate(all_missed)))
        length_s = self.lengths_s[window]
        covered_s = min(length_s, max(0.0, at_s - scope.begin_s))
        return WindowFacts(length_s, covered_s, name, asked, tuple(hits), distinct, missed)

    # -- a restart

    def dump(self, *, now_s: float, wall_s: float) -> list[bytes]:
        """All windows as bytes, in parts that belong one after another.

        Args:
            now_s: seconds on the caller's clock.
            wall_s: the time of day in seconds, which goes on while no process runs.
        """
        self._advance(now_s + self._shift_s)
        self.has_changed = False
        head = {
            "format": FORMAT,
            "lengths_s": self.lengths_s,
            "tiers": TIERS,
            "wall_s": wall_s,
            "at_s": now_s + self._shift_s,
            "numbers": self._numbers,
            "busy": self._busy,
            "scopes": [[name, scope.begin_s] for name, scope in self._scopes.items()],
        }
        parts = [json.dumps(head).encode() + b"\n"]
        for scope in self._scopes.values():
            parts += [scope.counts.tobytes(), scope.registers.tobytes()]
        return parts

    def load(self, saved: bytes, *, now_s: float, wall_s: float) -> None:
        """Go on where `dump` stopped; the time between counts as time in which nobody asked.

        A time of day that went back counts as no time.

        Raises:
            StateError: not ours, or of other windows; nothing was changed.
        """
        text, _, body = saved.partition(b"\n")
        try:
            head: dict[str, Any] = json.loads(text)
            kind = (head["format"], tuple(head["lengths_s"]), tuple(head["tiers"]))
            names = [(str(name), float(begin_s)) for name, begin_s in head["scopes"]]
            numbers = [int(number) for number in head["numbers"]]
            busy = {str(name): float(value) for name, value in head["busy"].items()}
            idle_s = max(0.0, wall_s - float(head["wall_s"]))
            shift_s = float(head["at_s"]) + idle_s - now_s
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError("of another format") from error
        if kind != (FORMAT, self.lengths_s, TIERS) or len(numbers) != len(self.lengths_s):
            raise StateError("of other windows, or of another format")
        scopes = _read_scopes(names, body, len(self.lengths_s))
        self._pending, self._pending_blocks, self._turn_s = [], 0, -math.inf
        self._scopes, self._numbers, self._busy, self._shift_s = scopes, numbers, busy, shift_s
        self._advance(now_s + shift_s)


def _read_scopes(names: list[tuple[str, float]], body: bytes, lengths: int) -> dict[str, Scope]:
    scopes = {name: Scope(lengths, begin_s) for name, begin_s in names}
    arrays = [array for one in scopes.values() for array in (one.counts, one.registers)]
    if EVERYONE not in scopes or len(body) != sum(array.nbytes for array in arrays):
        raise StateError("of another size")
    at = 0
    for array in arrays:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(body, np.uint8, array.nbytes, at)
        at += array.nbytes
    return scopes
