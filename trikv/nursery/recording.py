"""Records what engines ask for and save, without content, as a trace for `trikv replay`.

Decided here: what is written, and that recording never holds a call up. This file does not know
what a replay does; docs/replay.md has the format.

A block hash is written as a number of 53 bits, made with a random key that is forgotten when the
daemon ends: equal numbers are equal blocks, and no prompt can be tried against them.
"""

import json
import os
import secrets
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

import numpy as np
import structlog
import trio

from trikv.core.words import InstanceName, SpaceId, Words

log = structlog.get_logger()

BYTES_MAX: Final = 1 << 30
PENDING_MAX: Final = 4_096
WRITE_S: Final = 0.5
VERSION: Final = 1
ID_SHIFT: Final = 11  # what is left of 64 bits is exact in JSON
Row = tuple[float, InstanceName, SpaceId, Words, int | None]


@dataclass(slots=True, eq=False)
class Recorder:
    """Writes a file of calls.

    At the bound: with `PENDING_MAX` calls not written a call is left out and counted; with
    `BYTES_MAX` bytes recording ends, and the log says so.
    """

    path: str
    left_out_total: int = 0
    bytes_max: int = BYTES_MAX
    _pending: deque[Row] = field(default_factory=deque)
    _keys: list[int] = field(default_factory=lambda: [secrets.randbits(64) | 1 for _ in range(5)])
    _engines: dict[InstanceName, int] = field(default_factory=dict)
    _is_over: bool = False

    def note(
        self, now_s: float, engine: InstanceName, space: SpaceId, words: Words, first: int | None
    ) -> None:
        """A request asks for blocks, or saves some at position `first` and after.

        Ownership: `words` must not change.

        Cost: 1 µs.
        """
        if self._is_over or len(words) == 0:
            return
        if len(self._pending) >= PENDING_MAX:
            self.left_out_total += 1
        else:
            self._pending.append((now_s, engine, space, words, first))

    async def run(self, block_tokens: int) -> None:
        """Write what is noted until cancelled; an earlier file is kept as FILE.old.

        Cancellation: what is noted is written before this ends, at most `PENDING_MAX` calls.
        """
        try:
            file = await trio.to_thread.run_sync(self._open, block_tokens)
        except OSError as error:
            self._fail(error)
            return
        try:
            while not self._is_over:
                await trio.sleep(WRITE_S)
                await self._write(file)
        finally:
            with trio.CancelScope(shield=True):
                await self._write(file)
                await trio.to_thread.run_sync(file.close)
        log.info("trace.ended", file=self.path, left_out=self.left_out_total)

    def _open(self, block_tokens: int) -> TextIO:
        path = Path(self.path)
        with suppress(FileNotFoundError):
            path.replace(f"{path}.old")
        file = path.open("w", encoding="utf-8")
        file.write(json.dumps({"trikv_trace": VERSION, "block_tokens": block_tokens}) + "\n")
        return file

    def _fail(self, error: OSError) -> None:
        log.warning("trace.failed", file=self.path, reason=error.strerror)
        self._is_over = True

    async def _write(self, file: TextIO) -> None:
        rows = list(self._pending)
        self._pending.clear()
        try:
            size = await trio.to_thread.run_sync(self._write_rows, file, rows)
        except OSError as error:
            self._fail(error)
            return
        if size >= self.bytes_max:
            log.warning("trace.full", file=self.path, bytes=size)
            self._is_over = True

    def _write_rows(self, file: TextIO, rows: list[Row]) -> int:
        for now_s, engine, space, words, first in rows:
            number = self._engines.setdefault(engine, len(self._engines))
            row: dict[str, object] = {"t": round(now_s, 4), "engine": number, "space": int(space)}
            if first is not None:
                row["first"] = first
            file.write(json.dumps(row | {"ids": self.ids(words)}, separators=(",", ":")) + "\n")
        file.flush()
        return os.fstat(file.fileno()).st_size

    def ids(self, words: Words) -> list[int]:
        """The numbers that are written for block hashes."""
        mixed = np.full(len(words), self._keys[4], np.uint64)
        for column, key in enumerate(self._keys[:4]):
            mixed = (mixed ^ words[:, column]) * np.uint64(key)
            mixed ^= mixed >> np.uint64(32)
        ids: list[int] = (mixed >> np.uint64(ID_SHIFT)).tolist()
        return ids
