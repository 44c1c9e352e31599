"""What callers get without the secret, or with a wrong one: nothing."""

import socket
from pathlib import Path
from typing import Any

import capnp
import pytest

from tests.conftest import Start
from tests.meta.callers import ONE, SECRET, TWO, greet, greeting, is_closed, on_wire, raw
from tests.meta.metas import A, RunningMeta, keys, start_meta
from trikv import address as addresses
from trikv import wire
from trikv.core.proofs import Secret, prove
from trikv.meta.link import Link, MetaError, dial
from trikv.meta.messages import NODE, TOOL, read_greeting, write_greeting


@on_wire
async def test_a_stranger_gets_nothing_but_a_greeting(guarded: RunningMeta) -> None:
    async with raw(guarded) as meta:
        reply = (await meta.prove(proof=b"")).reply
        assert reply.error.code == "conflict", "hello comes first"
        challenge = (await greet(meta, greeting())).ok
        assert challenge.needsProof
        assert len(challenge.greeting.nonce) == 32
        for method in ("status", "heartbeat", "leave", "begin", "finish"):
            with pytest.raises(capnp.KjException) as caught:
                await getattr(meta.cast_as(wire.SCHEMA.MetaSession), method)()
            assert caught.value.type == "UNIMPLEMENTED"
        reply = (await meta.prove(proof=bytes(32))).reply
        assert reply.which() == "error"
        assert reply.error.code == "forbidden"
        reply = await greet(meta, greeting())
        assert reply.which() == "error", "no second try"
        assert await is_closed(meta, 30)


@on_wire
async def test_a_proof_is_good_for_one_connection_and_one_greeting(guarded: RunningMeta) -> None:
    async with raw(guarded) as meta:
        theirs = read_greeting((await greet(meta, greeting())).ok.greeting).party
        proof = prove(SECRET, greeting().party, theirs, is_dialer=True)
        async with raw(guarded) as other:  # replayed, with the nonce that it was made for
            await greet(other, greeting())
            assert (await other.prove(proof=proof)).reply.error.code == "forbidden"
        reply = (await meta.prove(proof=proof)).reply
        assert reply.which() == "ok"
        assert bytes(reply.ok.proof) == prove(SECRET, greeting().party, theirs, is_dialer=False), (
            "it proves itself too"
        )
        assert (await meta.prove(proof=proof)).reply.error.code == "conflict"
        assert (await greet(meta, greeting())).error.code == "conflict"
        await reply.ok.session.status()


@on_wire
async def test_a_proof_for_another_role_or_address_is_refused(guarded: RunningMeta) -> None:
    for said, proven in ((greeting(TOOL), greeting()), (greeting(address=TWO), greeting())):
        async with raw(guarded) as meta:
            theirs = read_greeting((await greet(meta, said)).ok.greeting).party
            proof = prove(SECRET, proven.party, theirs, is_dialer=True)
            assert (await meta.prove(proof=proof)).reply.error.code == "forbidden"


@on_wire
async def test_a_tool_may_look_and_not_join(guarded: RunningMeta) -> None:
    link = await dial(addresses.parse(guarded.address), TOOL, "", SECRET)
    try:
        assert (await link.status())["isOpen"] is False
        with pytest.raises(MetaError, match="is no node"):
            await link.join(1, [])
        with pytest.raises(MetaError, match="join first"):
            await link.locate(A, keys(1, 1))
        with pytest.raises(MetaError, match="join first"):
            await link.begin()
    finally:
        link.close()


@on_wire
async def test_both_sides_must_have_the_secret_or_neither(guarded: RunningMeta) -> None:
    place = addresses.parse(guarded.address)
    with pytest.raises(MetaError, match="give --cluster-secret-file"):
        await dial(place, NODE, ONE, None)
    with pytest.raises(MetaError, match="not the secret of this cluster"):
        await dial(place, NODE, ONE, Secret(SECRET + b"!"))


def test_a_metaserver_without_the_secret_is_not_believed(start: Start, tmp_path: Path) -> None:
    opened = start_meta(start, tmp_path)

    @on_wire
    async def test(_meta: RunningMeta) -> None:
        place = addresses.parse(opened.address)
        with pytest.raises(MetaError, match="has no secret"):
            await dial(place, NODE, ONE, SECRET)
        link = await dial(place, TOOL, "", None)
        assert (await link.status())["isOpen"] is True
        link.close()

    test(opened)


class _Impostor(wire.SCHEMA.Meta.Server):
    """Says that it knows the secret, and does not."""

    async def hello_context(self, context: Any) -> None:
        ok = context.results.init("reply").init("ok")
        write_greeting(ok.init("greeting"), greeting("meta"))
        ok.needsProof = True

    async def prove_context(self, context: Any) -> None:
        ok = context.results.init("reply").init("ok")
        ok.proof = bytes(context.params.proof)  # the caller's own, turned round


@on_wire
async def test_an_impostor_is_not_believed(guarded: RunningMeta) -> None:
    del guarded
    ours, theirs = socket.socketpair()
    ours.setblocking(False)  # noqa: FBT003
    theirs.setblocking(False)  # noqa: FBT003
    their_stream = await capnp.AsyncIoStream.create_unix_connection(sock=theirs)
    our_stream = await capnp.AsyncIoStream.create_unix_connection(sock=ours)
    impostor = capnp.TwoPartyServer(their_stream, bootstrap=_Impostor())
    link = Link(our_stream, capnp.TwoPartyClient(our_stream))
    try:
        with pytest.raises(MetaError, match="does not know the secret"):
            await link.start(NODE, ONE, SECRET)
    finally:
        link.close()
        their_stream.close()
        impostor.close()


@pytest.mark.parametrize(
    "address", ["", "10.0.0.1", "unix:/a", "0.0.0.0:5", "[::]:5", "10.0.0.1:0", "x" * 300 + ":1"]
)
def test_a_node_needs_an_address_that_others_can_dial(guarded: RunningMeta, address: str) -> None:
    @on_wire
    async def test(guarded: RunningMeta) -> None:
        async with raw(guarded) as meta:
            assert (await greet(meta, greeting(address=address))).error.code == "bad-request"

    test(guarded)


@on_wire
async def test_other_protocols_and_nonces_are_refused(guarded: RunningMeta) -> None:
    async with raw(guarded) as meta:
        request = meta.hello_request()
        write_greeting(request.greeting, greeting())
        request.greeting.protocol = wire.PROTOCOL + 2
        assert (await request.send()).reply.error.code == "unsupported-version"
        assert (await greet(meta, greeting(nonce=b"short"))).error.code == "bad-request"


@on_wire
async def test_a_crowd_without_the_secret_does_not_fill_the_log(guarded: RunningMeta) -> None:
    before = len(guarded.events("proof.refused"))
    for _ in range(20):
        with pytest.raises(MetaError, match="not the secret"):
            await dial(addresses.parse(guarded.address), NODE, ONE, Secret(SECRET + b"!"))
    assert len(guarded.events("proof.refused")) - before < 10
    assert guarded.events("proof.refused")[0]["reason"] == "another secret"
