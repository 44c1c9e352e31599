"""RDMA verbs by the `ibverbs` wheel."""

import contextlib
import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from trikv.core.rails import PairFacts
from trikv.tiers.nics import NicFacts
from trikv.tiers.pairs import (
    HOPS,
    POLL_MAX,
    RD_ATOMIC_MAX,
    RETRIES,
    RNR_RETRIES,
    RNR_TIMER,
    TIMEOUT,
    Nic,
    NicError,
    QueuePair,
    Reads,
    Region,
    new_facts,
    translated,
)


def load() -> Callable[[NicFacts], Nic]:
    """Import it; see `verbs.load`."""
    library = importlib.import_module("ibverbs")
    return lambda facts: _WheelNic(library, facts)


class _WheelNic:
    def __init__(self, library: ModuleType, facts: NicFacts) -> None:
        self.facts, self._library = facts, library
        with translated(f"NIC {facts.name} cannot be opened"):
            found = {device.name: device for device in library.get_device_list()}
            self._context = found[facts.name].open()
            self._domain = self._context.alloc_pd()
            port = self._context.query_port(facts.port)
            self.mtu, self.lid = int(port.active_mtu), int(port.lid)
            self.rd_atomic = min(RD_ATOMIC_MAX, int(self._context.query_device().max_qp_rd_atom))

    def register(self, address: int, size: int) -> Region:
        flags = self._library.AccessFlags
        with translated(f"NIC {self.facts.name} cannot register {size} bytes"):
            access = flags.LOCAL_WRITE | flags.REMOTE_READ | flags.RELAXED_ORDERING
            region: Region = self._domain.reg_mr(address, size, int(access))
            return region

    def new_pair(self, depth: int) -> QueuePair:
        with translated(f"NIC {self.facts.name} has no queue pair"):
            return _WheelPair(self._library, self, self._context, self._domain, depth)

    def close(self) -> None:
        with translated(f"NIC {self.facts.name} cannot be closed"):
            self._domain.close()
            self._context.close()


class _WheelPair:
    def __init__(
        self,
        library: Any,  # noqa: ANN401  # the module, which has no types
        nic: _WheelNic,
        context: Any,  # noqa: ANN401
        domain: Any,  # noqa: ANN401
        depth: int,
    ) -> None:
        self._library, self._nic = library, nic
        self._channel = context.create_comp_channel()
        self.fd = int(self._channel.fd)
        os.set_blocking(self.fd, False)
        self._queue = context.create_cq(depth + 1, self._channel)
        self._pair = domain.create_qp(
            library.QPInitAttr(
                send_cq=self._queue,
                recv_cq=self._queue,
                qp_type=library.QPType.RC,
                max_send_wr=depth,
                max_recv_wr=1,
                max_send_sge=1,
                max_recv_sge=1,
            )
        )
        self.facts = new_facts(self._pair.qp_num, nic.facts, nic.lid, nic.mtu, nic.rd_atomic)
        self._request, self._place = library.SendWR, library.SGE
        self._read = int(library.WROpcode.RDMA_READ)
        self._signaled = int(library.SendFlags.SIGNALED)

    def connect(self, far: PairFacts) -> None:
        flags, own = self._library.AccessFlags, self.facts
        end = self._library.QPInfo(far.qpn, far.psn, far.lid, far.gid, 1, far.mtu)
        atomic = min(own.rd_atomic, far.rd_atomic)
        with translated("a queue pair cannot be joined"):
            access = int(flags.LOCAL_WRITE | flags.REMOTE_READ)
            self._pair.to_init(self._nic.facts.port, access)
            self._pair.to_rtr(
                end,
                sgid_index=self._nic.facts.gid.index,
                mtu=min(own.mtu, far.mtu),
                hop_limit=HOPS,
                min_rnr_timer=RNR_TIMER,
                max_dest_rd_atomic=atomic,
            )
            self._pair.to_rts(
                own.psn,
                timeout=TIMEOUT,
                retry_cnt=RETRIES,
                rnr_retry=RNR_RETRIES,
                max_rd_atomic=atomic,
            )

    def post(self, first: int, reads: Reads) -> None:
        request, place, read = self._request, self._place, self._read
        there, keys_there, here, sizes, keys_here = reads
        chain = [
            request(number, [place(near, size, lkey)], read, 0, far, rkey)
            for number, (far, rkey, near, size, lkey) in enumerate(
                zip(there, keys_there, here, sizes, keys_here, strict=True), first
            )
        ]
        chain[-1].send_flags = self._signaled
        try:
            self._pair.post_send(chain)
        except OSError as error:
            raise NicError(f"reads cannot be posted: {error}") from error

    def poll(self) -> list[tuple[int, int]]:
        try:
            return [(one.wr_id, int(one.status)) for one in self._queue.poll(POLL_MAX)]
        except OSError as error:
            raise NicError(f"a queue cannot be polled: {error}") from error

    def arm(self) -> None:
        with translated("a queue cannot be armed"):
            self._queue.req_notify()

    def drain(self) -> None:
        try:
            self._channel.get_cq_event()
            self._queue.ack_events(1)
        except OSError:  # no event: another wait has had it
            return

    def destroy(self) -> None:
        with translated("a queue pair cannot be destroyed"):
            self._pair.close()
        with contextlib.suppress(OSError):  # by now nothing can move bytes
            self._queue.close()
            self._channel.close()
