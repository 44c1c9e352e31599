"""RDMA verbs by rdma-core's `pyverbs`, a package of distributions."""

import contextlib
import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
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
    QueuePair,
    Reads,
    Region,
    new_facts,
    translated,
)


def load() -> Callable[[NicFacts], Nic]:
    """Import it; see `verbs.load`."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        names = ("enums", "device", "pd", "mr", "cq", "qp", "wr", "addr")
        parts = {name: importlib.import_module(f"pyverbs.{name}") for name in names}
    finally:  # importing it takes the root logger over
        root.handlers[:] = handlers
        root.setLevel(level)
    return lambda facts: _DistroNic(parts, facts)


class _DistroNic:
    def __init__(self, parts: dict[str, Any], facts: NicFacts) -> None:
        self.facts, self._parts = facts, parts
        with translated(f"NIC {facts.name} cannot be opened"):
            self._context = parts["device"].Context(name=facts.name)
            self._domain = parts["pd"].PD(self._context)
            port = self._context.query_port(facts.port)
            self.mtu, self.lid = int(port.active_mtu), int(port.lid)
            self.rd_atomic = min(RD_ATOMIC_MAX, int(self._context.query_device().max_qp_rd_atom))

    def register(self, address: int, size: int) -> Region:
        enums = self._parts["enums"]
        access = (
            enums.IBV_ACCESS_LOCAL_WRITE
            | enums.IBV_ACCESS_REMOTE_READ
            | enums.IBV_ACCESS_RELAXED_ORDERING
        )
        with translated(f"NIC {self.facts.name} cannot register {size} bytes"):
            region: Region = self._parts["mr"].MR(self._domain, size, access, address=address)
            return region

    def new_pair(self, depth: int) -> QueuePair:
        with translated(f"NIC {self.facts.name} has no queue pair"):
            return _DistroPair(self._parts, self, self._context, self._domain, depth)

    def close(self) -> None:
        with translated(f"NIC {self.facts.name} cannot be closed"):
            self._domain.close()
            self._context.close()


class _DistroPair:
    """Posts by the extended calls: objects of requests leak in what distributions have."""

    def __init__(
        self,
        parts: dict[str, Any],
        nic: _DistroNic,
        context: Any,  # noqa: ANN401  # it has no types
        domain: Any,  # noqa: ANN401
        depth: int,
    ) -> None:
        self._parts, self._nic, enums, pairs = parts, nic, parts["enums"], parts["qp"]
        before = _event_fds()
        self._channel = parts["cq"].CompChannel(context)
        self.fd = _channel_fd(self._channel, before)
        os.set_blocking(self.fd, False)
        self._queue = parts["cq"].CQ(context, depth + 1, channel=self._channel)
        room = pairs.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        wanted = pairs.QPInitAttrEx(
            qp_type=enums.IBV_QPT_RC,
            scq=self._queue,
            rcq=self._queue,
            cap=room,
            pd=domain,
            comp_mask=enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags=enums.IBV_QP_EX_WITH_RDMA_READ,
        )
        self._pair = pairs.QPEx(context, wanted)
        self.facts = new_facts(self._pair.qp_num, nic.facts, nic.lid, nic.mtu, nic.rd_atomic)
        self._place = parts["wr"].SGE(0, 0, 0)
        self._signaled = enums.IBV_SEND_SIGNALED

    def connect(self, far: PairFacts) -> None:
        address, enums, own, nic = self._parts["addr"], self._parts["enums"], self.facts, self._nic
        text = far.gid.hex()
        with translated("a queue pair cannot be joined"):
            gid = address.GID(":".join(text[at : at + 4] for at in range(0, len(text), 4)))
            route = address.GlobalRoute(dgid=gid, sgid_index=nic.facts.gid.index, hop_limit=HOPS)
            wanted = self._parts["qp"].QPAttr(port_num=nic.facts.port)
            wanted.qp_access_flags = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ
            wanted.dest_qp_num, wanted.rq_psn, wanted.sq_psn = far.qpn, far.psn, own.psn
            wanted.path_mtu = min(own.mtu, far.mtu)
            wanted.max_rd_atomic = wanted.max_dest_rd_atomic = min(own.rd_atomic, far.rd_atomic)
            wanted.min_rnr_timer, wanted.timeout = RNR_TIMER, TIMEOUT
            wanted.retry_cnt, wanted.rnr_retry = RETRIES, RNR_RETRIES
            wanted.ah_attr = address.AHAttr(
                port_num=nic.facts.port, is_global=1, gr=route, dlid=far.lid
            )
            self._pair.to_rts(wanted)

    def post(self, first: int, reads: Reads) -> None:
        pair, place, last = self._pair, self._place, len(reads[0]) - 1
        with translated("reads cannot be posted"):
            pair.wr_start()
            for number, (far, rkey, near, size, lkey) in enumerate(zip(*reads, strict=True)):
                pair.wr_id, pair.wr_flags = first + number, self._signaled if number == last else 0
                pair.wr_rdma_read(rkey, far)
                place.addr, place.length, place.lkey = near, size, lkey
                pair.wr_set_sge(place)
            pair.wr_complete()

    def poll(self) -> list[tuple[int, int]]:
        with translated("a queue cannot be polled"):
            _, ended = self._queue.poll(POLL_MAX)
            return [(one.wr_id, int(one.status)) for one in ended]

    def arm(self) -> None:
        with translated("a queue cannot be armed"):
            self._queue.req_notify()

    def drain(self) -> None:
        try:  # it acknowledges too
            self._channel.get_cq_event(self._queue)
        except Exception:  # noqa: BLE001  # no event: another wait has had it
            return

    def destroy(self) -> None:
        with translated("a queue pair cannot be destroyed"):
            self._pair.close()
        with contextlib.suppress(Exception):  # by now nothing can move bytes
            self._queue.close()
            self._channel.close()


def _channel_fd(channel: Any, before: set[int]) -> int:  # noqa: ANN401
    """A completion channel's descriptor: bindings before 57 do not tell it."""
    told = getattr(channel, "fd", None)
    return int(told) if told is not None else (_event_fds() - before).pop()


def _event_fds() -> set[int]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in str(Path(f"/proc/self/fd/{entry}").readlink()):
                found.add(int(entry))
        except OSError:  # closed meanwhile
            continue
    return found
