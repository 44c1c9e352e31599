"""The task that owns the hit-rate windows: it fills them in, and keeps them over a restart.

Decided here: how often windows are filled in and saved, and where. A daemon that is killed loses
what came after the last save. This file does not know what a window is made of.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog
import trio

from trikv.address import Address
from trikv.core.windows import StateError
from trikv.nursery.store import Store
from trikv.tiers import statefile
from trikv.tiers.statefile import StateFileError

log = structlog.get_logger()

TEND_S: Final = 1.0
SAVE_S: Final = 60.0


def state_path(folder: str | None, address: Address) -> Path | None:
    """Where the windows of the daemon at `address` are kept: in `folder`, else beside its socket.

    Returns:
        None without a folder for a daemon that listens on TCP.
    """
    if address.is_unix:
        place = Path(address.path)
        return (Path(folder) if folder else place.parent) / f"{place.name}.windows"
    return Path(folder) / f"port-{address.port}.windows" if folder else None


def wall_s() -> float:
    """The time of day in seconds."""
    return time.time_ns() / 1e9


@dataclass(slots=True)
class CeilingTask:
    """Keeps a store's windows.

    Attributes:
        path: of the file; None: nothing is kept.
    """

    store: Store
    path: Path | None
    _limiter: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))
    _said: str = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read what the last daemon left, then run until cancelled and leave it to the next one.

        Cancellation: the last save does not wait for anybody; it is over within a fraction of a
        second.
        """
        windows, now_s = self.store.windows, self.store.now_s
        windows.begin(now_s=now_s())
        if self.path is not None:
            await self._load(self.path)
        task_status.started()
        saved_s = now_s()
        try:
            while True:
                await trio.sleep(TEND_S)
                windows.tend(now_s=now_s())
                if self.path is not None and windows.has_changed and now_s() - saved_s >= SAVE_S:
                    saved_s = now_s()
                    await trio.to_thread.run_sync(
                        self._write, self.path, self._dump(), limiter=self._limiter
                    )
        finally:
            windows.tend(now_s=now_s())
            if self.path is not None and windows.has_changed:
                self._write(self.path, self._dump())

    async def _load(self, path: Path) -> None:
        try:
            saved = await trio.to_thread.run_sync(statefile.read, path, limiter=self._limiter)
            if saved is not None:
                self.store.windows.load(saved, now_s=self.store.now_s(), wall_s=wall_s())
        except (StateFileError, StateError) as error:
            log.warning("windows.empty", path=str(path), reason=str(error))

    def _dump(self) -> list[bytes]:
        return self.store.windows.dump(now_s=self.store.now_s(), wall_s=wall_s())

    def _write(self, path: Path, parts: list[bytes]) -> None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            statefile.write(path, parts)
        except OSError as error:
            reason = error.strerror or str(error)
            if reason != self._said:
                log.warning("windows.unsaved", path=str(path), reason=reason)
            self._said = reason
        else:
            self._said = ""
