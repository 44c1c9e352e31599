"""A daemon in one file, for tests: a dict of pages, real copies, and ways to misbehave.

    python fake_daemon.py SOCKET

Reads one JSON object a line from stdin and sets its keys as knobs, answering `ok` on stdout:
`query_s`, `load_s`, `save_s` (delays), `refuse_declare` (so many times), `fail_loads` (positions
from this one on fail), `refuse` (a code for every query, save and load), `garbage` (a raise instead
of an answer), `drop` (close all connections), `negate` (flip every stored byte), `lease_s`,
`heartbeat_s`, `protocol` (named in the greeting), `counts` (answers with the counters), `fresh`
(forget everything but the connections).
"""

import asyncio
import contextlib
import ctypes
import json
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import capnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from trikv.wire import PROTOCOL, SCHEMA, ids_to_array

LIBC = ctypes.CDLL(None, use_errno=True)


class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def move(call: str, pid: int, remote: int, local: Any, size: int) -> bool:
    here = Vector(ctypes.addressof(local), size)
    there = Vector(remote, size)
    done = getattr(LIBC, call)(
        ctypes.c_int(pid),
        ctypes.byref(here),
        ctypes.c_ulong(1),
        ctypes.byref(there),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    return bool(done == size)


class Store:
    def __init__(self) -> None:
        self.epoch = random.getrandbits(63)
        self.copies: dict[Any, int] = {}
        self.streams: set[Any] = set()
        self.forget()

    def forget(self) -> None:
        self.knobs: dict[str, Any] = {"lease_s": 30.0, "heartbeat_s": 3.0}
        self.pages: dict[tuple[str, bytes], bytes] = {}
        self.fields: dict[str, str] = {}
        self.ranks: dict[str, tuple[Any, Any]] = {}
        self.leases: dict[int, list[tuple[str, bytes]]] = {}
        self.by_request: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    def count(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n

    async def misbehave(self, name: str, reply: Any) -> bool:
        self.count(name)
        await asyncio.sleep(self.knobs.get(f"{name}_s", 0))
        if self.knobs.get("garbage"):
            raise RuntimeError("planted")
        if code := self.knobs.get("refuse"):
            refuse(reply, code)
            return True
        return False


def refuse(reply: Any, code: str, message: str = "planted") -> None:
    error = reply.init("error")
    error.code, error.message = code, message


class Session(SCHEMA.Session.Server):  # type: ignore[misc]
    def __init__(self, store: Store, pid: int) -> None:
        self.store, self.pid = store, pid
        self.rank: dict[str, Any] | None = None
        self.instance = ""

    async def declare(self, instance: Any, _context: Any, **rest: Any) -> None:
        self.instance = str(instance.name)
        self.store.count("declare")
        if self.store.knobs.get("refuse_declare", 0) > 0:
            self.store.knobs["refuse_declare"] -= 1
            refuse(_context.results.reply, "conflict")
            return
        self.store.fields[self.instance] = json.dumps(
            {str(f.name): str(f.value) for f in instance.fields}
        )
        _context.results.reply.init("ok").namespace = ""

    async def register(self, rank: Any, _context: Any, **rest: Any) -> None:
        self.store.count("register")
        self.instance = str(rank.instance)
        while self.store.copies.get(self.instance, 0):  # noqa: ASYNC110  # an older session's copies end first
            await asyncio.sleep(0.01)
        group = rank.groups[0]
        self.rank = {
            "memories": [(int(m.process.address), int(m.process.bytes)) for m in rank.memories],
            "pieces": [
                (int(p.memory), int(p.offset), int(p.stride), int(p.bytes)) for p in group.pieces
            ],
            "count": int(group.blockCount),
            "fences": int(rank.fences.address),
        }
        ok = _context.results.reply.init("ok")
        ok.namespace = "ab" * 16
        ok.init("pageBytes", 1)[0] = sum(p[3] for p in self.rank["pieces"])

    def space(self) -> str:
        return self.store.fields.get(self.instance, "")

    async def query(self, query: Any, _context: Any, **rest: Any) -> None:
        reply = _context.results.reply
        request, size, blob = str(query.request), int(query.hashBytes), bytes(query.hashes)
        if await self.store.misbehave("query", reply):
            return
        keys = [(self.space(), blob[i : i + size]) for i in range(0, len(blob), size)]
        hit = next((i for i, key in enumerate(keys) if key not in self.store.pages), len(keys))
        ok = reply.init("ok")
        ok.hitCount, ok.leaseSeconds = hit, self.store.knobs["lease_s"]
        if hit:
            lease = random.getrandbits(62) + 1
            self.store.leases.pop(self.store.by_request.get(request, 0), None)
            self.store.leases[lease] = keys[:hit]
            self.store.by_request[request] = lease
            ok.lease = lease

    def runs(self, block: int) -> list[tuple[int, int]]:
        assert self.rank is not None
        runs = []
        for memory, offset, stride, size in self.rank["pieces"]:
            address, limit = self.rank["memories"][memory]
            assert 0 <= block < self.rank["count"]
            assert offset + block * stride + size <= limit
            runs.append((address + offset + block * stride, size))
        return runs

    async def save(self, save: Any, _context: Any, **rest: Any) -> None:
        reply = _context.results.reply
        size, blob = int(save.hashBytes), bytes(save.hashes)
        blocks, fence, generation = (
            ids_to_array(bytes(save.blocks)).tolist(),
            int(save.fence),
            int(save.generation),
        )
        if await self.store.misbehave("save", reply):
            return
        assert self.rank is not None
        saved = present = refused = 0
        for i, block in enumerate(blocks):
            key = (self.space(), blob[i * size : (i + 1) * size])
            if key in self.store.pages:
                present += 1
                continue
            page = bytearray()
            fine = True
            for address, n in self.runs(block):
                buffer = ctypes.create_string_buffer(n)
                fine = fine and move("process_vm_readv", self.pid, address, buffer, n)
                page += buffer.raw
            word = ctypes.create_string_buffer(8)
            fine = fine and move(
                "process_vm_readv", self.pid, self.rank["fences"] + 8 * fence, word, 8
            )
            if fine and int.from_bytes(word.raw, "little") == generation:
                self.store.pages[key] = bytes(page)
                saved += 1
            else:
                refused += 1
        self.store.count("saved", saved)
        self.store.count("voided", refused)
        ok = reply.init("ok")
        ok.savedCount, ok.presentCount, ok.refusedCount = saved, present, refused

    async def load(self, load: Any, _context: Any, **rest: Any) -> None:
        reply = _context.results.reply
        lease, first = self.store.leases.get(int(load.lease)), int(load.first)
        blocks = ids_to_array(bytes(load.blocks)).tolist()
        store = self.store
        store.copies[self.instance] = store.copies.get(self.instance, 0) + 1
        try:
            if await store.misbehave("load", reply):
                return
            if lease is None or first + len(blocks) > len(lease):
                refuse(reply, "lease-lost")
                return
            failed = []
            for i, block in enumerate(blocks):
                page, at = store.pages.get(lease[first + i]), 0
                if page is None or i >= store.knobs.get("fail_loads", 1 << 30):
                    failed.append(i)
                    continue
                for address, n in self.runs(block):
                    buffer = ctypes.create_string_buffer(page[at : at + n], n)
                    assert move("process_vm_writev", self.pid, address, buffer, n)
                    at += n
            store.count("loaded", len(blocks) - len(failed))
            reply.init("ok").failed = b"".join(i.to_bytes(4, "little") for i in failed)
        finally:
            store.copies[self.instance] -= 1

    async def release(self, requests: Any, _context: Any, **rest: Any) -> None:
        for request in requests:
            self.store.count("released")
            self.store.leases.pop(self.store.by_request.pop(str(request), 0), None)

    async def heartbeat(self, _context: Any, **rest: Any) -> None:
        self.store.count("heartbeat")

    async def reset(self, _context: Any, **rest: Any) -> None:
        ok = _context.results.reply.init("ok")
        ok.droppedCount = len(self.store.pages)
        self.store.pages.clear()


class Kv(SCHEMA.Kv.Server):  # type: ignore[misc]
    def __init__(self, store: Store, pid: int) -> None:
        self.store, self.pid = store, pid

    async def hello(self, hello: Any, _context: Any, **rest: Any) -> None:
        self.store.count("hello")
        ok = _context.results.reply.init("ok")
        ok.protocol = self.store.knobs.get("protocol", PROTOCOL)
        ok.software, ok.epoch = "fake", self.store.epoch
        ok.heartbeatSeconds = self.store.knobs["heartbeat_s"]
        ok.session = Session(self.store, self.pid)

    async def status(self, _context: Any, **rest: Any) -> None:
        _context.results.status.epoch = self.store.epoch


async def commands(store: Store) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        knobs = json.loads(line)
        if knobs.pop("drop", False):
            for stream in list(store.streams):
                stream.close()
        if knobs.pop("negate", False):
            store.pages = {k: bytes(255 - b for b in v) for k, v in store.pages.items()}
        if knobs.pop("fresh", False):
            store.forget()
        asked = knobs.pop("counts", False)
        store.knobs.update(knobs)
        facts = {
            **store.counts,
            "leases": len(store.leases),
            "pages": len(store.pages),
            "connections": len(store.streams),
        }
        say(json.dumps(facts) if asked else "ok")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main(path: str) -> None:
    store = Store()

    async def accept(stream: Any, pid: int) -> None:
        server = capnp.TwoPartyServer(stream, bootstrap=Kv(store, pid))
        store.streams.add(stream)
        with contextlib.suppress(capnp.KjException):
            await server.on_disconnect()
        store.streams.discard(stream)
        stream.close()
        server.close()

    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    listener.setblocking(False)  # noqa: FBT003
    async with capnp.kj_loop():
        say("ready")
        control = asyncio.create_task(commands(store))
        tasks = set()

        async def accepting() -> None:
            loop = asyncio.get_running_loop()
            while True:
                sock, _ = await loop.sock_accept(listener)
                pid = int.from_bytes(
                    sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little"
                )
                stream = await capnp.AsyncIoStream.create_unix_connection(sock=sock)
                task = asyncio.create_task(accept(stream, pid))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        accepting_task = asyncio.create_task(accepting())
        await control
        accepting_task.cancel()
        os._exit(0)  # stdin is closed: the test has ended


asyncio.run(main(sys.argv[1]))
