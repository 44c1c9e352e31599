"""What of the GPU path needs no GPU: tables of pieces, arguments, versions, exports, orders."""

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import fake_cuda
from trikv.connector import cuda, layouts
from trikv.core.layout import Piece
from trikv.nursery.serve import cuda_refusal
from trikv.tiers import frames, kernels
from trikv.tiers.drivers import version_problem

SIZES = st.lists(st.sampled_from([1, 2, 3, 8, 16, 48, 4096]), min_size=1, max_size=6)


@given(
    lengths=SIZES, bases=st.lists(st.integers(0, 64), min_size=6, max_size=6), odd=st.integers(0, 3)
)
def test_a_table_says_where_each_unit_of_a_page_comes_from(
    lengths: list[int], bases: list[int], odd: int
) -> None:
    """The kernel's arithmetic, by hand, for every unit of two blocks."""
    length = np.array(lengths, np.int64)
    address = np.array([at * 10_000 + bases[at] for at in range(len(lengths))], np.int64)
    stride = length + odd
    table = kernels.table(address, stride, length)
    width = table.width
    assert all(int(one) % width == 0 for one in (*address, *stride, *length))
    assert table.units * width == int(length.sum())
    rows = table.rows.reshape(3, -1).astype(np.int64)
    for block in (0, 7):
        expected = [
            int(address[p] + block * stride[p]) + n
            for p in range(len(lengths))
            for n in range(lengths[p])
        ]
        seen = []
        for unit in range(table.units):
            if table.each:
                piece = unit // table.each
                first = piece * table.each
            else:
                piece = int(np.searchsorted(rows[2], unit, side="right")) - 1
                first = int(rows[2][piece])
            begin = int(rows[0][piece] + block * rows[1][piece]) + (unit - first) * width
            seen += range(begin, begin + width)
        assert seen == expected


@pytest.mark.parametrize("rows", [1, 28, 960])
def test_a_launch_fills_the_gpu_and_has_a_block_for_each_row(rows: int) -> None:
    size = np.array([32 << 10] * 72, np.int64)
    table = kernels.table(np.arange(72) << 20, size, size)
    assert table.width == 16
    assert table.grid_x(rows) >= 1
    assert rows * table.grid_x(rows) <= max(rows, kernels.BLOCKS_MAX)


def test_arguments_are_read_as_the_kernel_declares_them() -> None:
    length = np.array([64, 64], np.int64)
    table = kernels.table(np.array([1 << 40, 1 << 41]), length, length)
    arguments = kernels.Arguments()
    ids = np.array([5, 9], np.int32)
    arguments.set(table, 1 << 42, ids, 1 << 43, 4096, into_engine=True)
    kinds = [ctypes.c_uint64, *[ctypes.c_uint32] * 3, *[ctypes.c_uint64] * 2, ctypes.c_uint32]
    pointers = list((ctypes.c_uint64 * 8).from_address(arguments.address))
    values = [kind.from_address(at).value for kind, at in zip(kinds, pointers, strict=False)]
    assert values == [1 << 42, 2, 4, 8, 1 << 43, 4096, 1]
    assert list((ctypes.c_int32 * 2).from_address(pointers[7])) == [5, 9]
    assert 4 * kernels.ROWS_MAX + 3 * 8 + 4 * 4 <= 4096


@pytest.mark.parametrize("name", ["lane", "device", "rehearsals"])
def test_the_made_up_cuda_of_benchmarks_has_what_copiers_call(name: str) -> None:
    source = (Path(kernels.__file__).parent / f"{name}.py").read_text()
    made_up = fake_cuda.module()
    called = set(re.findall(r"\bgpu\.([A-Za-z_]+)", source))
    assert called
    assert [one for one in called if not hasattr(made_up, one)] == []


def test_the_kernel_s_source_has_one_of_each_width() -> None:
    for width in kernels.WIDTHS:
        assert f"void move_{width}(" in kernels.SOURCE
    assert f"int of[{kernels.ROWS_MAX}]" in kernels.SOURCE


@pytest.mark.parametrize(
    ("driver", "bindings", "words"),
    [
        (13_000, "13.3.1", ""),
        (13_000, "12.9.0", ""),
        (12_040, "12.8.0", ""),
        (12_040, "13.3.1", "install trikv[cu12] instead of trikv[cu13]"),
    ],
)
def test_a_driver_that_is_too_old_is_named(driver: int, bindings: str, words: str) -> None:
    said = version_problem(driver, bindings)
    assert said == "" if not words else words in said
    assert "12.4" in said or not words


def test_a_daemon_without_cuda_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "trikv[daemon,cu13]" in cuda_refusal()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert cuda_refusal() == ""


class FakeDriver:
    """Two allocations."""

    def __init__(self) -> None:
        self.asked = 0

    def allocation(self, address: int) -> cuda.Allocation:
        self.asked += 1
        base = address // 10_000 * 10_000
        return cuda.Allocation(base, 10_000, bytes([base // 10_000]) * 64)

    def uuid(self) -> bytes:
        return b"u" * 16


def test_storages_of_one_allocation_are_exported_once() -> None:
    memories = tuple(
        layouts.Memory(address, 100, "cuda:0") for address in (10_500, 12_000, 30_000, 10_000)
    )
    plan = layouts.Plan(memories, (layouts.Piece(0, 0, 10, 10),), "bytes", 10, {})
    driver = FakeDriver()
    exported = cuda.export(plan, driver)  # type: ignore[arg-type]
    assert exported.places == ((0, 500), (0, 2000), (1, 0), (0, 0))
    assert [one.address for one in exported.allocations] == [10_000, 30_000]
    assert driver.asked == 2


class FakeLibrary:
    """A CUDA driver with one allocation of a page at 1 << 20, and a device of four."""

    ipc_code = 0
    part = b"G" * 16

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:  # noqa: N802
        base._obj.value, size._obj.value = address.value >> 20 << 20, 4096
        return 0

    def cuIpcGetMemHandle(self, handle: Any, base: Any) -> int:  # noqa: N802
        handle[:] = base.value.to_bytes(64, "little")
        return self.ipc_code

    def cuCtxGetDevice(self, device: Any) -> int:  # noqa: N802
        device._obj.value = 3
        return 0

    def cuDeviceGetUuid(self, uuid: Any, device: Any) -> int:  # noqa: N802
        uuid[:] = b"G" * 16
        return int(device.value != 3)

    def cuDeviceGetUuid_v2(self, uuid: Any, device: Any) -> int:  # noqa: N802
        uuid[:] = self.part
        return int(device.value != 3)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    made = FakeLibrary()
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda _: made)
    return made


def test_an_allocation_is_exported_whole(library: FakeLibrary) -> None:
    found = cuda.Driver().allocation((1 << 20) + 77)
    assert found == cuda.Allocation(1 << 20, 4096, (1 << 20).to_bytes(64, "little"))
    library.ipc_code = 999
    with pytest.raises(layouts.LayoutError, match="cuIpcGetMemHandle failed with CUDA error 999"):
        cuda.Driver().allocation(1 << 20)


@pytest.mark.parametrize("code", [cuda.INVALID_VALUE, cuda.NOT_SUPPORTED])
def test_virtual_memory_is_refused_by_the_names_of_all_that_makes_it(
    library: FakeLibrary, code: int
) -> None:
    library.ipc_code = code
    with pytest.raises(layouts.LayoutError) as caught:
        cuda.Driver().allocation(1 << 20)
    for name in (
        "expandable_segments:True",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "--enable-sleep-mode",
        "--enable-cumem-allocator",
    ):
        assert name in str(caught.value)


def test_a_part_of_a_gpu_is_refused(library: FakeLibrary) -> None:
    """The older call gives the whole GPU's UUID, the newer one that of a MIG instance."""
    assert cuda.Driver().uuid() == b"G" * 16
    library.part = b"M" * 16
    with pytest.raises(layouts.LayoutError, match="MIG is not supported"):
        cuda.Driver().uuid()


def test_events_are_recorded_in_turns() -> None:
    class Event:
        def __init__(self, number: int) -> None:
            self.number, self.count = number, 0

        def record(self, stream: str) -> None:
            assert stream == "the engine's"
            self.count += 1

        def ipc_handle(self) -> bytes:
            return bytes([self.number]) * 64

    made = [Event(at) for at in range(3)]
    events = cuda.StepEvents(made, lambda: "the engine's")
    assert [events.record() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert [one.count for one in made] == [3, 2, 2]
    assert events.handles == [bytes([at]) * 64 for at in range(3)]


@given(
    count=st.integers(0, 50),
    cuts=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    is_ordered=st.booleans(),
)
def test_orders_survive_the_socket_however_it_cuts_them(
    *, count: int, cuts: list[int], is_ordered: bool
) -> None:
    piece = Piece(1, 1 << 40, 1 << 20, 4096)
    attach = frames.AttachOrder(
        (b"h" * 64,), (b"e" * 64,), (frames.GroupOrder(9, (piece,), (7, 4096)),)
    )
    copy = frames.CopyOrder(
        7,
        2,
        frames.Direction.LOAD,
        3,
        np.arange(count, dtype=np.int32)[::-1],
        np.arange(count, dtype=np.int64) << 33,
        4,
        (1 << 32) - 1,
        is_ordered,
    )
    mask = np.arange(count) % 3 == 0
    stream = b"".join(
        [
            frames.pack(frames.Kind.ATTACH, 1, frames.pack_attach(attach)),
            frames.pack(frames.Kind.COPY, -2, frames.pack_copy(copy)),
            frames.pack(frames.Kind.STOP, 3),
            frames.pack(frames.Kind.ENDED, 4, frames.pack_ended(mask, 0.25)),
            frames.pack(frames.Kind.NOTE, 5, frames.pack_facts(event="x", bytes=3)),
        ]
    )
    heard: list[tuple[frames.Kind, int, bytes]] = []
    reader = frames.Frames()
    while stream:
        size = cuts[len(heard) % len(cuts)]
        reader.feed(stream[:size], lambda *frame: heard.append(frame))
        stream = stream[size:]
    kinds = [(kind.name, number) for kind, number, _ in heard]
    assert kinds == [("ATTACH", 1), ("COPY", -2), ("STOP", 3), ("ENDED", 4), ("NOTE", 5)]
    assert frames.read_attach(heard[0][2]) == attach
    got = frames.read_copy(heard[1][2])
    assert (got.attachment, got.group, got.direction, got.event) == (7, 2, copy.direction, 3)
    assert (got.signal, got.value, got.is_ordered) == (4, (1 << 32) - 1, is_ordered)
    assert got.blocks.tolist() == copy.blocks.tolist()
    assert got.offsets.tolist() == copy.offsets.tolist()
    arrived, took_s = frames.read_ended(heard[3][2])
    assert arrived.tolist() == mask.tolist()
    assert took_s == 0.25
    assert frames.read_facts(heard[4][2]) == {"event": "x", "bytes": 3}
