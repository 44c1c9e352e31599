"""How the daemon's log looks: one line an event, on stderr.

Decided here: renderer and level; nothing per block is logged above debug.
"""

import logging
import sys

import structlog


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
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
