"""Digests of a block: equal for equal bytes wherever they lie, other ones for any other byte."""

from collections.abc import Callable

import pytest
import torch

from bench.block_bytes import BlockBytes

B, H, N, D, LAYERS = 5, 3, 4, 8, 2
Tensors = dict[str, torch.Tensor]


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _apart() -> Tensors:
    return {f"l{n}": _zeros(2, B, N, H, D) for n in range(LAYERS)}


def _block_outermost() -> Tensors:
    whole = _zeros(B, LAYERS, 2, N, H, D)
    return {f"l{n}": whole[:, n].permute(1, 0, 2, 3, 4) for n in range(LAYERS)}


def _one_storage() -> Tensors:
    whole = _zeros(LAYERS, 2, B, N, H, D)
    return {f"l{n}": whole[n] for n in range(LAYERS)}


def _padded() -> Tensors:
    return {f"l{n}": _zeros(2, B, N + 1, H, D)[:, :, :N] for n in range(LAYERS)}


MAKERS = [_apart, _block_outermost, _one_storage, _padded]


def reader(tensors: Tensors) -> BlockBytes:
    return BlockBytes(tensors, B, 2 * N * H * D * 2)


def fill(tensors: Tensors, block: int) -> None:
    """Give the block the same values, whatever the layout."""
    generator = torch.Generator().manual_seed(7)
    for tensor in tensors.values():
        values = torch.randn(2, N, H, D, generator=generator)
        tensor[:, block] = values.to(tensor.dtype)


@pytest.mark.parametrize("make", MAKERS)
def test_equal_blocks_have_equal_digests_and_any_byte_counts(make: Callable[[], Tensors]) -> None:
    tensors = make()
    fill(tensors, 1)
    fill(tensors, 4)
    blocks = reader(tensors)
    blocks.synchronise()
    before = blocks.digest(4)
    assert blocks.digest(1) == before
    assert blocks.digest(0) != before
    for tensor in tensors.values():
        for at in range(2):
            kept = tensor[at, 4, N - 1, H - 1, D - 1].clone()
            tensor[at, 4, N - 1, H - 1, D - 1] = 9
            assert blocks.digest(4) != before
            assert blocks.digest(1) == before
            tensor[at, 4, N - 1, H - 1, D - 1] = kept
    assert blocks.digest(4) == before


def test_layouts_with_the_same_order_inside_a_page_have_the_same_digest() -> None:
    made = [make() for make in MAKERS]
    for tensors in made:
        fill(tensors, 2)
    assert len({reader(tensors).digest(2) for tensors in made}) == 1
