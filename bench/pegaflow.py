"""PegaFlow's own server and client, to be measured beside ours in one run.

Never a dependency: where its wheel, torch or a GPU is missing, there is nothing to measure, and the
reason is printed. Its server links to a shared libpython and needs CUDA.
"""

import contextlib
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bench import daemons

T = TypeVar("T")
READY_S = 180.0
LAYER = "ALL_LAYERS"
BLOCK_SHAPE = (2, 16, 8, 64)  # K and V, tokens, heads, head: 32 KiB of bf16 a block
NAMESPACE = "bench"


class Forward(Protocol):
    """Work of the GPU; see `bench.gpu_engine`."""

    def begin(self) -> None:
        """Launch it."""
        ...

    def synchronize(self) -> None:
        """Wait for the GPU, as its connector does."""
        ...

    def end_s(self) -> float:
        """When it had ended."""
        ...


Ask = Callable[[int, int], float]
"""Of so many hashes, which of the prompts: seconds until the answer was there."""


def look_up(counts: Sequence[int], prompts: int) -> AbstractContextManager[Ask | None]:
    """Run its server with so many resident prompts of each size; None where that cannot be."""
    return _or_none(_filled(counts, prompts))


def beside(pool: str) -> AbstractContextManager[str | None]:
    """Run its server; gives its `host:port`, or None where it cannot run."""
    return _or_none(serve(pool))


@contextlib.contextmanager
def _or_none(way: AbstractContextManager[T]) -> Iterator[T | None]:
    """What it gives; or None, and a line that says why: ours is measured without."""
    why, made = missing(), None
    with contextlib.ExitStack() as stack:
        if not why:
            try:
                made = stack.enter_context(way)
            except Exception as error:  # noqa: BLE001  # whatever it is
                why = str(error)
        if why:
            print(f"not measured beside PegaFlow: {why}", file=sys.stderr)
        yield made


@contextlib.contextmanager
def _filled(counts: Sequence[int], prompts: int) -> Iterator[Ask]:
    with serve("4gb") as address:
        yield _fill(address, counts, prompts)


def missing() -> str:
    """Why its server cannot run here; empty: it can."""
    for package in ("pegaflow", "torch"):
        if importlib.util.find_spec(package) is None:
            return f"there is no package {package}"
    import torch  # noqa: PLC0415  # optional

    return "" if torch.cuda.is_available() else "there is no GPU"


@contextlib.contextmanager
def serve(pool: str) -> Iterator[str]:
    """Run its server for the first GPU; yields its `host:port`.

    Raises:
        RuntimeError: it did not start, or the body has raised that; with the end of its log.
    """
    spec = importlib.util.find_spec("pegaflow")
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(next(iter(spec.submodule_search_locations)))
    address, http = f"127.0.0.1:{_free_port()}", f"127.0.0.1:{_free_port()}"
    command = [str(package / "pegaflow-server-py"), "--addr", address, "--http-addr", http]
    command += ["--devices", "0", "--pool-size", pool, "--disable-numa-affinity"]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [*command, "--log-level", "warn"],
            env=_environment(package),
            stdout=log,
            stderr=log,
            preexec_fn=daemons.die_with_parent,  # noqa: PLW1509
        )
        try:
            _await_health(f"http://{http}/health", server)
            yield address
        except RuntimeError as error:
            log.seek(0)
            tail = log.read()[-2_000:].decode(errors="replace")
            raise RuntimeError(f"{error}\n{tail}") from None
        finally:
            server.terminate()
            server.wait(30)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _environment(package: Path) -> dict[str, str]:
    """So that it finds libpython, the CUDA libraries that pip has brought, and its own package."""
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    libraries = [str(path) for one in folders for path in Path(one, "nvidia").glob("*/lib")]
    before = os.environ.get("LD_LIBRARY_PATH", "")
    return os.environ | {
        "LD_LIBRARY_PATH": ":".join([sysconfig.get_config_var("LIBDIR"), *libraries, before]),
        "PYTHONPATH": ":".join([str(package.parent), *folders]),
        "PYTHONHOME": sys.base_prefix,
    }


def _await_health(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:
            if answer.status == 200:  # noqa: PLR2004
                return
        if server.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError("its server did not start")
        time.sleep(0.1)


def _fill(address: str, counts: Sequence[int], prompts: int) -> Ask:
    """Register a KV cache and save the prompts from it."""
    import torch  # noqa: PLC0415  # optional

    blocks = torch.zeros((max(counts), *BLOCK_SHAPE), dtype=torch.bfloat16, device="cuda")
    rank = Rank(address, {LAYER: blocks}, max(counts), NAMESPACE)
    rank.client.start_session_watcher(NAMESPACE, NAMESPACE, 1, 1)
    names = {(count, n): f"{count} {n}" for count in counts for n in range(prompts)}
    for (count, _), name in names.items():
        rank.save(name, list(range(count)))
        rank.client.release(rank.lease(_hashes(name, count)))
    asked = {key: _hashes(name, key[0]) for key, name in names.items()}

    def ask(count: int, prompt: int) -> float:
        took_s, found = rank.query(asked[count, prompt])
        assert found is not None
        if found.lease:
            rank.client.release(found.lease)
        assert found.num_hit_blocks == count
        return took_s

    return ask


def _register(url: str, instance: str, layers: Mapping[str, Any], block_count: int) -> Any:  # noqa: ANN401
    """A client with these tensors: blocks outermost, or K and V before them."""
    import torch  # noqa: PLC0415  # optional
    from pegaflow.ipc_wrapper import CudaIPCWrapper  # noqa: PLC0415
    from pegaflow.pegaflow import EngineRpcClient  # noqa: PLC0415

    torch.cuda.synchronize()
    client = EngineRpcClient(url)
    wrapped = [pickle.dumps(CudaIPCWrapper(one)) for one in layers.values()]
    dims = [0 if one.shape[0] == block_count else 1 for one in layers.values()]
    strides = [
        [one.stride(at) * one.element_size() for at in range(dim + 1)]
        for one, dim in zip(layers.values(), dims, strict=True)
    ]
    is_known, why = client.register_context_batch(
        instance, NAMESPACE, 0, 0, 1, 1, 0,
        list(layers), wrapped, [block_count] * len(dims), [one[-1] for one in strides],
        [one[0] if len(one) > 1 else 0 for one in strides], [1 + dim for dim in dims],
        "direct", False,  # noqa: FBT003
    )  # fmt: skip
    if not is_known:
        raise RuntimeError(f"register: {why}")
    return client


class Rank:
    """One rank's tensors, registered with its server; they live as long as this does.

    Attributes:
        client: its own.
    """

    def __init__(
        self, address: str, layers: Mapping[str, Any], block_count: int, instance: str = ""
    ) -> None:
        """Register.

        Args:
            address: of its server, as `serve` yields it.
            layers: tensors whose blocks are outermost, or come after K and V.
            block_count: of each.
            instance: a name that no other rank has; empty: a made-up one.

        Raises:
            RuntimeError: it refuses them.
        """
        self._instance = instance or uuid.uuid4().hex
        self._layers = dict(layers)
        self.client = _register(f"http://{address}", self._instance, layers, block_count)

    def save(self, name: str, blocks: list[int], forward: Forward | None = None) -> float:
        """Save blocks under made-up hashes; returns seconds from the call to the answer.

        With a forward: from its end, which is waited for, as its connector does.
        """
        hashes = _hashes(name, len(blocks))
        saves = [(layer, blocks, hashes) for layer in self._layers]
        if forward is not None:
            forward.begin()
            forward.synchronize()
        begin_s = time.perf_counter()
        is_saved, why = self.client.save(self._instance, 0, 0, 0, saves)
        end_s = time.perf_counter()
        took_s = end_s - (begin_s if forward is None else forward.end_s())
        if not is_saved:
            raise RuntimeError(f"save: {why}")
        return took_s

    def load(self, name: str, blocks: list[int]) -> float:
        """Load them back into other blocks; returns seconds from the call to the last byte."""
        from pegaflow.pegaflow import PyLoadState  # noqa: PLC0415  # optional

        lease = self.lease(_hashes(name, len(blocks)))
        begin_s = time.perf_counter()
        state = PyLoadState()
        loads = [(lease, [blocks])]
        is_begun, why = self.client.load(
            self._instance, 0, 0, state.shm_name(), [list(self._layers)], loads
        )
        if not is_begun:
            raise RuntimeError(f"load: {why}")
        while not state.is_ready():
            if time.perf_counter() - begin_s > READY_S:
                raise RuntimeError("load: no end")
        took_s = time.perf_counter() - begin_s
        if state.get_state() != 1:
            raise RuntimeError(f"load: state {state.get_state()}")
        return took_s

    def query(self, hashes: list[bytes]) -> tuple[float, Any]:
        """Its look-up as its connector does it: seconds, and what was found; its lease is kept."""
        from pegaflow.pegaflow import QueryReady  # noqa: PLC0415  # optional

        begin_s = time.perf_counter()
        found = self.client.query_prefetch(self._instance, hashes, req_id=uuid.uuid4().hex)
        took_s = time.perf_counter() - begin_s
        return took_s, found if isinstance(found, QueryReady) else None

    def lease(self, hashes: list[bytes]) -> bytes:
        """Of all of them, once they are found: what is saved is found a moment later."""
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            _, found = self.query(hashes)
            if found is not None:
                if found.num_hit_blocks == len(hashes):
                    return bytes(found.lease)
                if found.lease:
                    self.client.release(found.lease)
        raise RuntimeError("what was saved is not found")


def _hashes(name: str, count: int) -> list[bytes]:
    blob = daemons.hashes(name, count)
    size = daemons.HASH_BYTES
    return [blob[at : at + size] for at in range(0, len(blob), size)]
