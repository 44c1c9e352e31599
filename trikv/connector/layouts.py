"""Where a block's bytes lie in the engine's KV tensors: address arithmetic, nothing else.

Decided here: which dimension counts blocks, the order of a page (layers as the engine lists them,
inside a layer by falling stride), and when two neighbouring runs become one piece. This file does
not know sockets, vLLM's classes or copies; it reads sizes, strides and addresses of tensors and
never their data.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from trikv.wire import MEMORIES_MAX, PIECES_MAX

BLOCKS_MIN: Final = 3
"""With fewer blocks the dimension of K and V (extent 2) could pass for the blocks'."""
PIECE_BYTES_MAX: Final = (1 << 32) - 1
LAYOUT_BYTES_MAX: Final = 256


class LayoutError(Exception):
    """These tensors cannot be described as pieces; the message says which and why."""


class Storage(Protocol):
    """What is read of a `torch.UntypedStorage`."""

    def data_ptr(self) -> int:
        """Address of the first byte."""

    def nbytes(self) -> int:
        """Size in bytes."""


class Tensor(Protocol):
    """What is read of a `torch.Tensor`."""

    dtype: Any
    device: Any

    @property
    def shape(self) -> Sequence[int]:
        """Extents."""

    def stride(self) -> Sequence[int]:
        """Distances of neighbours, in elements."""

    def element_size(self) -> int:
        """Bytes of one element."""

    def data_ptr(self) -> int:
        """Address of element 0."""

    def untyped_storage(self) -> Storage:
        """The allocation behind it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """One allocation that holds pieces."""

    address: int
    size_bytes: int
    device: str  # "cpu", "cuda:0", ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous run: block b has `size_bytes` at `memory` + offset + b x stride."""

    memory: int
    offset: int
    stride: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A page as its pieces, one after another.

    Attributes:
        layer_ends: where in the page each layer's bytes end.
    """

    memories: tuple[Memory, ...]
    pieces: tuple[Piece, ...]
    layout: str
    page_bytes: int
    layer_ends: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension inside a block."""

    name: str
    extent: int
    stride_bytes: int


def pieces(
    tensors: Mapping[str, Tensor], block_count: int, page_bytes: int | Mapping[str, int]
) -> Plan:
    """Describe every layer's part of a block.

    Args:
        tensors: KV tensor of each layer, in the order of the page; views of one tensor count once.
        block_count: blocks that the engine hands out; a tensor may divide each into kernel blocks.
        page_bytes: bytes that one layer holds of a block, for all layers or by name.

    Raises:
        LayoutError: no dimension counts blocks, or a block has not the bytes it should have.
    """
    if block_count < BLOCKS_MIN:
        raise LayoutError(
            f"{block_count} blocks are too few to tell the dimension of blocks from others"
        )
    memories: dict[tuple[int, int, str], int] = {}
    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    ends, end = dict[str, int](), 0
    runs: list[Piece] = []
    texts: list[str] = []
    for name, tensor in tensors.items():
        if not hasattr(tensor, "data_ptr"):
            raise LayoutError(f"layer {name} holds {type(tensor).__name__}, not one tensor")
        view = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if view in seen:
            ends[name] = seen[view]
            continue
        wanted = page_bytes if isinstance(page_bytes, int) else page_bytes[name]
        stride, axes = _axes(name, tensor, block_count, wanted)
        texts.append(_text(tensor, axes))
        memory, offset = _place(tensor, memories)
        runs.extend(_runs(name, memory, offset, stride, axes, tensor.element_size()))
        end += wanted
        seen[view] = ends[name] = end
    merged = tuple(_merged(runs))
    if not 0 < len(merged) <= PIECES_MAX or len(memories) > MEMORIES_MAX:
        raise LayoutError(f"{len(merged)} pieces in {len(memories)} memories are out of bounds")
    return Plan(
        memories=tuple(Memory(address, size, device) for address, size, device in memories),
        pieces=merged,
        layout=_layout(texts),
        page_bytes=sum(piece.size_bytes for piece in merged),
        layer_ends=ends,
    )


def _axes(name: str, tensor: Tensor, block_count: int, page_bytes: int) -> tuple[int, list[_Axis]]:
    """The step from block to block, and the axes inside a block, outermost first."""
    shape, strides, item = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    # Blocks come before heads, tokens and content in every layout, and nothing but K and V (extent
    # 2, less than BLOCKS_MIN) comes before blocks: so the first multiple is the one.
    where = next(
        (i for i, extent in enumerate(shape) if extent and extent % block_count == 0), None
    )
    if where is None:
        raise LayoutError(
            f"layer {name}: no dimension of {list(shape)} counts {block_count} blocks"
        )
    kernel_blocks = shape[where] // block_count
    content = item * kernel_blocks
    for index, extent in enumerate(shape):
        content *= extent if index != where else 1
    if content != page_bytes:
        raise LayoutError(
            f"layer {name}: a block of {list(shape)} has {content} bytes,"
            f" not {page_bytes} as declared"
        )
    axes = [
        _Axis(f"d{index}", extent, strides[index] * item)
        for index, extent in enumerate(shape)
        if index != where and extent > 1
    ]
    if kernel_blocks > 1:
        axes.append(_Axis("k", kernel_blocks, strides[where] * item))
    if any(axis.stride_bytes < item for axis in axes) or strides[where] < 1:
        raise LayoutError(f"layer {name}: strides {list(strides)} let elements share memory")
    axes.sort(key=lambda axis: -axis.stride_bytes)
    return strides[where] * item * kernel_blocks, axes


def _place(tensor: Tensor, memories: dict[tuple[int, int, str], int]) -> tuple[int, int]:
    """The number of the tensor's storage, noted when new, and where in it the tensor begins."""
    storage = tensor.untyped_storage()
    base = storage.data_ptr()
    number = memories.setdefault((base, storage.nbytes(), str(tensor.device)), len(memories))
    return number, tensor.data_ptr() - base


def _runs(
    name: str, memory: int, offset: int, stride: int, axes: list[_Axis], item: int
) -> Iterable[Piece]:
    """The contiguous runs of one layer's block, in page order."""
    run = item
    outer = list(axes)
    while outer and outer[-1].stride_bytes == run:
        run *= outer.pop().extent
    if run > PIECE_BYTES_MAX:
        raise LayoutError(f"layer {name}: a run of {run} bytes is too long for one piece")
    steps = [[i * axis.stride_bytes for i in range(axis.extent)] for axis in outer]
    return [Piece(memory, offset + sum(at), stride, run) for at in itertools.product(*steps)]


def _merged(runs: list[Piece]) -> list[Piece]:
    """Join runs that follow each other in the page as well as in memory."""
    merged: list[Piece] = []
    for run in runs:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.memory == run.memory
            and last.stride == run.stride
            and last.offset + last.size_bytes == run.offset
            and last.size_bytes + run.size_bytes <= PIECE_BYTES_MAX
        ):
            merged[-1] = Piece(
                last.memory, last.offset, last.stride, last.size_bytes + run.size_bytes
            )
        else:
            merged.append(run)
    return merged


def _text(tensor: Tensor, axes: list[_Axis]) -> str:
    """Element type, kind of device and order of a layer's bytes: equal where pages are shared."""
    kind = str(tensor.device).partition(":")[0]
    order = ".".join(f"{axis.name}x{axis.extent}" for axis in axes)
    return f"{kind}/{str(tensor.dtype).removeprefix('torch.')}/{order or 'one'}"


def _layout(texts: list[str]) -> str:
    """One line for all layers; a digest where they differ too much to be listed."""
    parts = [f"{len(list(same))}*{text}" for text, same in itertools.groupby(texts)]
    line = "+".join(parts)
    if len(line.encode()) <= LAYOUT_BYTES_MAX:
        return line
    return f"{parts[0][:120]}+...sha256:{hashlib.sha256(line.encode()).hexdigest()}"
