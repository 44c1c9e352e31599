"""Who is let in: the proof on a connection before anything else is answered.

Decided here: that nothing but `hello` is answered before the proof, that a caller without one is
not kept, and what either side says. The same at a metaserver's door and at a node's for its peers.
No capnp object leaves this file.
"""

import secrets
from typing import Any, Final, Protocol

import structlog

from trikv.core.counters import CallCounts
from trikv.core.errors import ConflictError, ForbiddenError, KvError, OverloadedError
from trikv.core.proofs import NONCE_BYTES, Party, Secret, is_proven, prove
from trikv.meta import messages
from trikv.meta.messages import Greeting
from trikv.process.accepting import Connection
from trikv.process.edges import read
from trikv.process.guards import at_once
from trikv.process.guest import Guest

log = structlog.get_logger()

PROVE_S: Final = 5.0
REFUSED_S: Final = 0.2
"""After a wrong proof: time in which the answer leaves."""
UNPROVEN_MAX: Final = 256
QUIET_S: Final = 10.0
"""Between two lines of the log about callers who were turned away."""


class Refusals(Protocol):
    """Where is counted who was turned away."""

    connection_refused_total: int
    error_total: int
    proof_refused_total: int


class Gate:
    """Who may call.

    At the bound: with `UNPROVEN_MAX` callers that have not proven themselves, further ones are
    closed at once, so that strangers take neither memory nor the places of nodes.
    """

    def __init__(self, secret: Secret | None, role: str, address: str, software: str) -> None:
        """Make one.

        Args:
            secret: None: every caller is let in.
            role: what we are.
            address: where we are reached, by our own words.
            software: for the other side's logs.
        """
        self.secret = secret
        self.role = role
        self.address = address
        self.software = software
        self.unproven_count = 0
        self._unsaid = 0
        self._quiet_until_s = 0.0

    def say_refused(self, what: str, address: str, *, now_s: float) -> None:
        """Log that somebody was turned away, but not everybody of a crowd."""
        self._unsaid += 1
        if now_s >= self._quiet_until_s:
            log.warning("proof.refused", reason=what, addr=address, count=self._unsaid)
            self._unsaid, self._quiet_until_s = 0, now_s + QUIET_S

    def greet(self) -> Greeting:
        """Our greeting to one caller."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Greeting(Party(self.role, self.address, nonce), self.software)


class GatedConnection(Connection):
    """A connection on which nothing is answered before the proof."""

    def __init__(self, guest: Guest, calls: CallCounts, counters: Refusals, gate: Gate) -> None:
        super().__init__(guest, calls, counters)
        if gate.unproven_count >= UNPROVEN_MAX:
            reason = f"{UNPROVEN_MAX} callers have not proven themselves"
            gate.say_refused(reason, "", now_s=self.loop.time())
            raise OverloadedError(reason)
        self.gate = gate
        self.greetings: tuple[Greeting, Greeting] | None = None  # the caller's, ours
        self.is_proven = self.is_refused = False
        self._refusals = counters
        gate.unproven_count += 1
        self._timer = self.loop.call_later(PROVE_S, self._refuse_silent)

    @property
    def caller(self) -> Party:
        """Who has proven itself."""
        assert self.greetings is not None
        return self.greetings[0].party

    def check(self, proof: bytes) -> bytes:
        """Let the caller in; returns our own proof.

        Raises:
            ConflictError: not now.
            ForbiddenError: it does not know the secret.
        """
        secret = self.gate.secret
        if self.is_proven or self.greetings is None:
            raise ConflictError("prove comes once, after hello")
        theirs, ours = (greeting.party for greeting in self.greetings)
        if secret is None:
            self._let_in()
            return b""
        if not is_proven(secret, theirs, ours, proof, is_dialer=True):
            self.turn_away()
            raise ForbiddenError("not the secret of this cluster: see --cluster-secret-file")
        self._let_in()
        return prove(secret, theirs, ours, is_dialer=False)

    def turn_away(self) -> None:
        """The caller is told that it is refused, and then hung up on."""
        self._refusals.proof_refused_total += 1
        address = self.greetings[0].party.address if self.greetings else ""
        self.gate.say_refused("another secret", address, now_s=self.loop.time())
        self.greetings, self.is_refused = None, True
        self._timer.cancel()
        self._timer = self.loop.call_later(REFUSED_S, self.hang_up)

    def close(self) -> None:
        """The connection is gone."""
        self._timer.cancel()
        if not self.is_proven:
            self.gate.unproven_count -= 1

    def _let_in(self) -> None:
        self.is_proven = True
        self._timer.cancel()
        self.gate.unproven_count -= 1

    def _refuse_silent(self) -> None:
        log.debug("connection.refused", reason=f"no proof within {PROVE_S} s")
        self._refusals.connection_refused_total += 1
        self.hang_up()


class GateServant:
    """What every bootstrap capability behind a gate answers."""

    connection: GatedConnection

    @at_once
    def hello_context(self, context: Any) -> None:
        """See the schema."""
        connection = self.connection
        reply = context.results.init("reply")
        try:
            if connection.is_proven or connection.is_refused:
                raise ConflictError("hello comes first, and once")
            theirs = read(messages.read_greeting, context.params.greeting)
        except KvError as error:
            return connection.refuse(reply, error)
        ours = connection.gate.greet()
        connection.greetings = (theirs, ours)
        ok = reply.init("ok")
        messages.write_greeting(ok.init("greeting"), ours)
        ok.needsProof = connection.gate.secret is not None
        return None
