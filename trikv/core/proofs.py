"""That both ends of a connection know the cluster secret, without either saying it.

Decided here: what is proven, by whom first, and what a secret must be. Each side sends a nonce; the
one who dialled proves first, so that nobody can collect proofs by asking. A proof is an HMAC-SHA256
over both parties' roles, addresses and nonces: it cannot be replayed in another connection, turned
round, or used for another role. It says who speaks, once; it encrypts nothing, and does not protect
what is sent afterwards from someone who sits on the wire. This file does not know files or sockets.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final, NewType

from trikv.core.errors import BadRequestError

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
SECRET_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = 4_096

Secret = NewType("Secret", bytes)
"""What all nodes of a cluster know; never logged, never sent."""


@dataclass(frozen=True, slots=True)
class Party:
    """One end of a connection, by its own words.

    Attributes:
        role: what it is, e.g. `node`, `meta`, `tool`.
        address: where it can be reached; empty for a tool.
        nonce: `NONCE_BYTES` random bytes, fresh for this connection.
    """

    role: str
    address: str
    nonce: bytes


def read_secret(text: bytes) -> Secret:
    """The secret in a file: its first line, without blanks around it.

    Raises:
        ValueError: the message is one line and does not show the secret.
    """
    line = text.partition(b"\n")[0].strip()
    if not SECRET_BYTES_MIN <= len(line) <= SECRET_BYTES_MAX:
        raise ValueError(
            f"the first line must have {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes, "
            f"not {len(line)}"
        )
    return Secret(line)


def check_nonce(nonce: bytes) -> bytes:
    """A nonce from outside.

    Raises:
        BadRequestError: it has the wrong size.
    """
    if len(nonce) != NONCE_BYTES:
        raise BadRequestError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    return nonce


def prove(secret: Secret, dialer: Party, listener: Party, *, is_dialer: bool) -> bytes:
    """The proof of one of the two parties: `PROOF_BYTES`."""
    made = hmac.new(secret, b"trikv proof 1\0", hashlib.sha256)
    made.update(b"dialer" if is_dialer else b"listener")
    for party in (dialer, listener):
        for part in (party.role.encode(), party.address.encode(), party.nonce):
            made.update(len(part).to_bytes(4, "little") + part)
    return made.digest()


def is_proven(
    secret: Secret, dialer: Party, listener: Party, proof: bytes, *, is_dialer: bool
) -> bool:
    """Whether a proof is that party's; takes the same time for every wrong one."""
    expected = prove(secret, dialer, listener, is_dialer=is_dialer)
    return hmac.compare_digest(expected, proof)
