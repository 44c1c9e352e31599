"""Who can prove what: nothing without the secret, and nothing said elsewhere."""

import dataclasses
import itertools

import pytest

from trikv.core.errors import BadRequestError
from trikv.core.proofs import (
    PROOF_BYTES,
    Party,
    Secret,
    check_nonce,
    is_proven,
    prove,
    read_secret,
)

SECRET = Secret(b"correct horse battery staple")
DIALER = Party("node", "10.0.0.1:50057", b"d" * 32)
LISTENER = Party("meta", "10.0.0.2:50056", b"l" * 32)


@pytest.mark.parametrize("is_dialer", [True, False])
def test_each_side_can_be_checked_by_the_other(*, is_dialer: bool) -> None:
    proof = prove(SECRET, DIALER, LISTENER, is_dialer=is_dialer)
    assert len(proof) == PROOF_BYTES
    assert is_proven(SECRET, DIALER, LISTENER, proof, is_dialer=is_dialer)
    assert not is_proven(SECRET, DIALER, LISTENER, proof, is_dialer=not is_dialer)
    assert not is_proven(SECRET, LISTENER, DIALER, proof, is_dialer=is_dialer)
    assert not is_proven(Secret(SECRET + b"x"), DIALER, LISTENER, proof, is_dialer=is_dialer)
    for wrong in (b"", proof[:-1], proof + b"\0", bytes(32), proof[::-1]):
        assert not is_proven(SECRET, DIALER, LISTENER, wrong, is_dialer=is_dialer)


@pytest.mark.parametrize("field", ["role", "address", "nonce"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_proof_holds_for_these_two_parties_alone(field: str, which: int) -> None:
    parties = [DIALER, LISTENER]
    proof = prove(SECRET, *parties, is_dialer=True)
    value = getattr(parties[which], field)
    parties[which] = dataclasses.replace(parties[which], **{field: value[:-1]})
    assert not is_proven(SECRET, *parties, proof, is_dialer=True)


def test_no_two_parties_spell_the_same() -> None:
    texts = ["", "a", "b", "ab"]
    parties = [
        Party(role, address, nonce.encode())
        for role, address, nonce in itertools.product(texts, texts, texts)
    ]
    proofs = {prove(SECRET, one, LISTENER, is_dialer=True) for one in parties}
    assert len(proofs) == len(parties)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (b"0123456789abcdef", b"0123456789abcdef"),
        (b"  0123456789abcdef \nsecond line\n", b"0123456789abcdef"),
        (b"0123456789abcdef\r\n", b"0123456789abcdef"),
        (b"\xff" * 4096, b"\xff" * 4096),
    ],
)
def test_the_secret_is_the_first_line(text: bytes, secret: bytes) -> None:
    assert read_secret(text) == secret


@pytest.mark.parametrize(
    "text", [b"", b"\n0123456789abcdef", b"0123456789abcde", b"short\n" * 9, b"x" * 4097]
)
def test_other_secrets_are_refused_and_not_shown(text: bytes) -> None:
    with pytest.raises(ValueError, match="the first line must have 16 to 4096 bytes") as caught:
        read_secret(text)
    assert "short" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nonces_have_one_size() -> None:
    assert check_nonce(b"n" * 32) == b"n" * 32
    for wrong in (b"", b"n" * 31, b"n" * 33):
        with pytest.raises(BadRequestError):
            check_nonce(wrong)
