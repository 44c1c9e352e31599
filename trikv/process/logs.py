"""How the daemon's log looks: one line an event, on stderr.

Decided here: renderer and level; nothing per block is logged above debug. A line that cannot be
written (the reader has gone, the disk is full) is lost: no call may fail for it.
"""

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog


class Sink:
    """Takes lines as long as they can be written, and never raises."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write, or lose, a line."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: it has been closed
            self._stream.write(text)

    def flush(self) -> None:
        """Hand over what was written."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def set_up_logging(level: str, log_format: str) -> None:
    """Send structlog's events to stderr."""
    is_terminal = sys.stderr.isatty()
    as_json = log_format == "json" or (log_format == "auto" and not is_terminal)
    renderer = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=is_terminal)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: structlog.WriteLogger(cast("TextIO", Sink(sys.stderr))),
        cache_logger_on_first_use=True,
    )
