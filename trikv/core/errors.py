"""What can go wrong in a way that a caller can act on.

Decided here: the names of refusals, and their stable codes on the wire and in metrics.
This file does not know: who raises them, or how they travel. Failures of the world (a disk, a
peer) are declared by the tier that sees them; `IllegalEventError` is our own bug and no reply.
"""


class KvError(Exception):
    """Base of the service's errors; `code` is its stable name on the wire and in metrics."""

    code = "internal"

    def __init__(self, message: str, **context: object) -> None:
        super().__init__(message)
        self.context = context  # facts for the log line


class BadRequestError(KvError):
    """The request contradicts itself or a limit: asking again will not help."""

    code = "bad-request"


class UnsupportedVersionError(KvError):
    """The two sides share no protocol version."""

    code = "unsupported-version"


class ForbiddenError(KvError):
    """The caller may not do this: wrong user, wrong process or no secret."""

    code = "forbidden"


class NotReadyError(KvError):
    """The service starts or recovers: ask again later."""

    code = "not-ready"


class ConflictError(KvError):
    """The request contradicts what another caller has done."""

    code = "conflict"


class OverloadedError(KvError):
    """A bound is reached; nothing was changed."""

    code = "overloaded"


class LeaseLostError(KvError):
    """The lease is unknown, expired or released: query again."""

    code = "lease-lost"


class EngineLostError(KvError):
    """The engine's session ended while the work was under way."""

    code = "engine-lost"


class ShuttingDownError(KvError):
    """The service drains: it finishes what it accepted and accepts nothing new."""

    code = "shutting-down"


class IllegalEventError(Exception):
    """An event that its subject's state does not allow: our own bug, never a reply."""
