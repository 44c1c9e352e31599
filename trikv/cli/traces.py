"""Traces of requests: public files, our own recordings, and traces that are made on the spot.

Decided here: which formats are read, and what a request is when it is replayed: a time, a session
and the ids of its leading blocks. This file does not know what a replay does with them.

Formats, all JSON lines; docs/replay.md describes them for people:

* Mooncake: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids`.
* Agent files: the same and `session`.
* Ours (`trikv-daemon --record-trace`): a first line `{"trikv_trace": 1, "block_tokens": N}`, then
  `{"t": seconds, "engine": n, "space": n, "ids": [...]}` for what a request asked for, and with
  `"first": position` for what it saved.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.words import Words

MOONCAKE_BLOCK_TOKENS: Final = 512
AGENT_BLOCK_TOKENS: Final = 64
MADE: Final = "made:"
OUR_VERSION: Final = 1

Ints = NDArray[np.int64]
Row = dict[str, Any]


class TraceError(ValueError):
    """A trace cannot be used; the message is one line that names file and line."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of time, in columns.

    Attributes:
        at_s: when each request arrives, from 0.
        session: int64, who asks; -1 where nothing is known.
        starts: request r's ids are `ids[starts[r]:starts[r + 1]]`.
        ids: blocks in prefix order; equal ids are equal blocks with equal prefixes.
        first: int64, the position in its request of the first of these ids; 0 but for saves.
        is_save: bool; a row that only saves asks for nothing.
        input_tokens: of each request.
        is_cut: its last line was half written, and is left out: the daemon was killed.
    """

    name: str
    block_tokens: int
    at_s: NDArray[np.float64]
    session: Ints
    starts: Ints
    ids: Ints
    first: Ints
    is_save: NDArray[np.bool_]
    input_tokens: Ints
    is_cut: bool = False

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def distinct(self) -> int:
        """How many different blocks there are."""
        return len(np.unique(self.ids))

    @property
    def asked(self) -> int:
        """Block requests: what hit rates are a share of."""
        return int(np.diff(self.starts)[~self.is_save].sum())

    def words(self) -> Words:
        """A block hash for each id, uint64[n, 4]: splitmix64 of id and word."""
        x = self.ids.astype(np.uint64)[:, None] * np.uint64(4) + np.arange(1, 5, dtype=np.uint64)
        x *= np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    def take(self, rows: Ints) -> "Trace":
        """The same trace with these requests only, in this order."""
        parts = [self.ids[self.starts[row] : self.starts[row + 1]] for row in rows.tolist()]
        lengths = np.array([0, *map(len, parts)])
        return replace(
            self,
            at_s=self.at_s[rows],
            session=self.session[rows],
            starts=np.cumsum(lengths),
            ids=np.concatenate(parts) if parts else self.ids[:0],
            first=self.first[rows],
            is_save=self.is_save[rows],
            input_tokens=self.input_tokens[rows],
        )


def ceiling(trace: Trace) -> float:
    """The hit rate of a cache without bounds, by counting: no cache is involved."""
    seen: set[int] = set()
    hits = 0
    ids, starts = trace.ids.tolist(), trace.starts.tolist()
    for row, is_save in enumerate(trace.is_save.tolist()):
        mine = ids[starts[row] : starts[row + 1]]
        if not is_save:
            hits += next((at for at, one in enumerate(mine) if one not in seen), len(mine))
        seen.update(mine)
    return hits / trace.asked if trace.asked else 0.0


def interleave(trace: Trace, at_once: int) -> Trace:
    """Sessions that were recorded one after another, with `at_once` of them running at a time.

    The gaps inside a session stay as they are; a session begins when one of the running ones ends.
    """
    order = np.argsort(trace.session, kind="stable")
    at_s = trace.at_s.copy()
    free_s = [0.0] * at_once
    for session in np.unique(trace.session).tolist():
        rows = order[trace.session[order] == session]
        lane = int(np.argmin(free_s))
        # Not quite together, so that equal sessions are not in step.
        begin_s = free_s[lane] + 0.5 * lane if free_s[lane] == 0.0 else free_s[lane]
        at_s[rows] = trace.at_s[rows] - trace.at_s[rows[0]] + begin_s
        free_s[lane] = float(at_s[rows].max()) + 1.0
    return replace(trace, at_s=at_s).take(np.argsort(at_s, kind="stable"))


def read_trace(path: str) -> Trace:
    """Read a file of any of the formats.

    Raises:
        TraceError: no such file, or a line is not what a trace consists of.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            lines = list(file)  # JSON may hold what `splitlines` takes for the end of a line
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not a text file") from None
    is_cut = len(lines) > 1 and not lines[-1].endswith("\n") and not _is_json(lines[-1])
    rows = list(_rows(path, lines[:-1] if is_cut else lines))
    is_ours = bool(rows) and "trikv_trace" in rows[0]
    trace = _ours(path, rows[0], rows[1:]) if is_ours else _public(path, rows)
    return replace(trace, is_cut=is_cut)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _rows(path: str, lines: list[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise TraceError(f"{path}:{number}: not JSON") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{number}: not an object")
        yield row


def _public(path: str, rows: list[Row]) -> Trace:
    try:
        is_agent = bool(rows) and "session" in rows[0]
        return from_lists(
            Path(path).stem,
            AGENT_BLOCK_TOKENS if is_agent else MOONCAKE_BLOCK_TOKENS,
            ids=[row["hash_ids"] for row in rows],
            at_s=[row["timestamp"] / 1000 for row in rows],
            session=[row.get("session", -1) for row in rows],
            input_tokens=[row["input_length"] for row in rows],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: a line lacks or spoils a field: {error}") from None


def _ours(path: str, head: Row, rows: list[Row]) -> Trace:
    if head["trikv_trace"] != OUR_VERSION:
        raise TraceError(f"{path}: version {head['trikv_trace']}, this program reads {OUR_VERSION}")
    try:
        tokens = int(head["block_tokens"])
        return from_lists(
            Path(path).stem,
            tokens,
            # Blocks of different spaces never meet.
            ids=[[one * 1024 + row["space"] % 1024 for one in row["ids"]] for row in rows],
            at_s=[row["t"] for row in rows],
            session=[row["engine"] for row in rows],
            first=[row.get("first", 0) for row in rows],
            is_save=["first" in row for row in rows],
            input_tokens=[len(row["ids"]) * tokens for row in rows],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: a line lacks or spoils a field: {error}") from None


def from_lists(
    name: str,
    block_tokens: int,
    *,
    ids: list[list[int]],
    at_s: list[float],
    session: list[int],
    input_tokens: list[int],
    first: list[int] | None = None,
    is_save: list[bool] | None = None,
) -> Trace:
    """A trace from one list a column, in the order of time."""
    lengths = np.array([0, *map(len, ids)], np.int64)
    flat = np.fromiter((one for request in ids for one in request), np.int64, int(lengths.sum()))
    times = np.array(at_s, np.float64)
    trace = Trace(
        name,
        block_tokens,
        times - (times.min() if len(times) else 0.0),
        np.array(session, np.int64),
        np.cumsum(lengths),
        flat,
        np.array(first if first is not None else [0] * len(ids), np.int64),
        np.array(is_save if is_save is not None else [False] * len(ids), np.bool_),
        np.array(input_tokens, np.int64),
    )
    order = np.argsort(trace.at_s, kind="stable")
    return trace if bool((order[1:] > order[:-1]).all()) else trace.take(order)
