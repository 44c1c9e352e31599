"""Requests that cannot be are refused before anything is done for them."""

import struct

import numpy as np
import pytest
import trio

from tests.tiers.peers import MIB, owner_pool
from trikv.tiers import tcpframes
from trikv.tiers.tcpowner import TcpOwner


@pytest.mark.parametrize(
    "pieces", [[(-1, 8)], [(0, 0)], [(0, -4)], [(0, 17 * MIB)], [(0, 16 * MIB), (0, 1)]]
)
def test_pieces_that_cannot_be_are_no_request(pieces: list[tuple[int, int]]) -> None:
    data = tcpframes.pack_request(0, bytes(16), np.array(pieces, np.int64))
    head = tcpframes.read_request(data[: tcpframes.REQUEST_BYTES])
    with pytest.raises(tcpframes.BadFrameError):
        tcpframes.read_pieces(head, data[tcpframes.REQUEST_BYTES :])


def test_a_request_for_the_end_of_numbers_is_outside() -> None:
    owner = TcpOwner(owner_pool(MIB), limiter=trio.CapacityLimiter(1))
    token = owner.lend(np.array([(0, MIB)], np.int64))
    last = struct.unpack("<q", b"\xff" * 7 + b"\x7f")[0]
    assert not owner._lent[token].covers(np.array([(last, 16 * MIB)], np.int64))
    assert not owner._lent[token].covers(np.array([(MIB - 8, 9)], np.int64))
    assert owner._lent[token].covers(np.array([(MIB - 8, 8), (0, MIB)], np.int64))
