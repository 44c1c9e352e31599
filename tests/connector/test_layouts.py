"""Address arithmetic against torch: the bytes that pieces name are the block's in the tensor."""

import ctypes
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trikv.connector.layouts import LayoutError, Plan, pieces

B, N, H, D = 5, 4, 3, 8  # blocks, tokens, heads, head size; all different
Tensors = dict[str, torch.Tensor]


def filled(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randint(0, 1 << 20, tensor.shape, generator=generator).to(tensor.dtype))
    return tensor


def apart(order: str) -> Callable[[], Tensors]:
    """K and V in a dimension of their own; `order` names the physical dimensions."""
    extents = {"b": B, "2": 2, "n": N, "h": H, "d": D}

    def make() -> Tensors:
        return {f"l{i}": filled(torch.empty([extents[c] for c in order]), i) for i in range(2)}

    return make


def packed(logical: str, physical: str) -> Callable[[], Tensors]:
    """K and V packed into the content; a view in `logical` order over memory in `physical` order.

    `l` in `physical` puts all layers into one storage.
    """
    extents = {"b": B, "h": H, "n": N, "c": 2 * D, "l": 3}

    def make() -> Tensors:
        if "l" not in physical:
            place = [physical.index(c) for c in logical]
            shape = [extents[c] for c in physical]
            return {f"l{i}": filled(torch.empty(shape).permute(place), i) for i in range(2)}
        whole = torch.empty([extents[c] for c in physical])
        at = physical.index("l")
        rest = physical.replace("l", "")
        place = [rest.index(c) for c in logical]
        return {f"l{i}": filled(whole.select(at, i).permute(place), i) for i in range(extents["l"])}

    return make


def latent() -> Tensors:
    return {f"l{i}": filled(torch.empty(B, N, 576, dtype=torch.bfloat16), i) for i in range(2)}


def padded_rows() -> Tensors:
    """A block's page is longer than its content: the rest belongs to nobody."""
    storage = torch.empty(B * 1024)
    view = torch.as_strided(storage, (B, H, N, 2 * D), (1024, N * 2 * D, 2 * D, 1), 0)
    return {"l0": filled(view, 0)}


def padded_tokens() -> Tensors:
    storage = torch.empty(B * N * 640, dtype=torch.float16)
    return {"l0": filled(torch.as_strided(storage, (B, N, 576), (N * 640, 640, 1), 32), 0)}


def offset_in_storage() -> Tensors:
    storage = torch.empty(4096)
    return {
        "l0": filled(torch.as_strided(storage, (2, B, N, H, D), (B * 96, 96, 24, 8, 1), 100), 0)
    }


LAYOUTS: dict[str, tuple[Callable[[], Tensors], int, int]] = {
    # name: tensors, pieces expected, memories expected
    "2BNHD flash attention 0.20": (apart("2bnhd"), 4, 2),
    "2BHND cpu 0.20": (apart("2bhnd"), 4, 2),
    "B2NHD flashinfer": (apart("b2nhd"), 2, 2),
    "B2HND": (apart("b2hnd"), 2, 2),
    "BHN2D logical HND": (packed("bhnc", "bhnc"), 2, 2),
    "BHN2D logical NHD": (packed("bhnc", "bnhc"), 2, 2),
    "LBHNC": (packed("bhnc", "lbhnc"), 3, 1),
    "LBNHC": (packed("bhnc", "lbnhc"), 3, 1),
    "LHBNC": (packed("bhnc", "lhbnc"), 3 * H, 1),
    "BLHNC": (packed("bhnc", "blhnc"), 1, 1),
    "BLNHC": (packed("bhnc", "blnhc"), 1, 1),
    "BHLNC": (packed("bhnc", "bhlnc"), 3 * H, 1),
    "MLA": (latent, 2, 2),
    "padded rows": (padded_rows, 1, 1),
    "padded tokens": (padded_tokens, N, 1),
    "offset": (offset_in_storage, 2, 1),
}


def page_bytes(tensors: Tensors, blocks: int = B) -> dict[str, int]:
    return {name: t.numel() * t.element_size() // blocks for name, t in tensors.items()}


def gathered(plan: Plan, block: int) -> bytes:
    """What the daemon would copy."""
    return b"".join(
        ctypes.string_at(
            plan.memories[p.memory].address + p.offset + block * p.stride, p.size_bytes
        )
        for p in plan.pieces
    )


def raw(tensor: torch.Tensor) -> bytes:
    """The elements' bytes, first to last; numpy knows no bfloat16."""
    return (
        torch.empty(tensor.numel(), dtype=tensor.dtype)
        .copy_(tensor.flatten())
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def reference(tensors: Tensors, block: int, where: int) -> bytes:
    """The block's elements by torch alone: layers in order, inside a layer by falling stride."""
    parts = []
    for tensor in tensors.values():
        mine = tensor.select(where, block)
        order = sorted(range(mine.dim()), key=lambda i: -mine.stride(i))
        parts.append(raw(mine.permute(order)))
    return b"".join(parts)


@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_are_the_blocks_bytes(name: str) -> None:
    make, piece_count, memory_count = LAYOUTS[name]
    tensors = make()
    where = 1 if next(iter(tensors.values())).shape[0] == 2 else 0
    plan = pieces(tensors, B, page_bytes(tensors))
    assert len(plan.pieces) == piece_count
    assert len(plan.memories) == memory_count
    for block in range(B):
        assert gathered(plan, block) == reference(tensors, block, where)
    assert plan.page_bytes == sum(page_bytes(tensors).values())
    begin = 0
    for layer, tensor in tensors.items():  # each layer's bytes end where it is said
        end = plan.layer_ends[layer]
        assert gathered(plan, 1)[begin:end] == reference({layer: tensor}, 1, where)
        begin = end
    assert begin == plan.page_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_stay_in_their_memory_and_blocks_apart(name: str) -> None:
    tensors = LAYOUTS[name][0]()
    plan = pieces(tensors, B, page_bytes(tensors))
    seen: set[tuple[int, int]] = set()
    for piece, block in itertools.product(plan.pieces, range(B)):
        begin = piece.offset + block * piece.stride
        assert begin >= 0
        assert begin + piece.size_bytes <= plan.memories[piece.memory].size_bytes
        bytes_here = {(piece.memory, at) for at in range(begin, begin + piece.size_bytes)}
        assert not seen & bytes_here
        seen |= bytes_here


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_gathered_from_one_engine_can_be_scattered_into_another(name: str) -> None:
    """A page read out of one engine's memory is the same block in another's, at any block id."""
    make = LAYOUTS[name][0]
    source, target = make(), make()
    for tensor in target.values():
        tensor.fill_(-1)
    one, other = (pieces(t, B, page_bytes(t)) for t in (source, target))
    page, at = gathered(one, 1), 0
    for piece in other.pieces:
        address = other.memories[piece.memory].address + piece.offset + 3 * piece.stride
        ctypes.memmove(address, page[at : at + piece.size_bytes], piece.size_bytes)
        at += piece.size_bytes
    for name_, tensor in target.items():
        where = 1 if tensor.shape[0] == 2 else 0
        assert torch.equal(tensor.select(where, 3), source[name_].select(where, 1))
        assert (tensor.select(where, 2) == -1).all()


@pytest.mark.parametrize("ratio", [2, 4])
def test_kernel_blocks_inside_a_managers_block(ratio: int) -> None:
    tensors = {"l0": filled(torch.empty(B * ratio, 2, N, H, D), 0)}
    plan = pieces(tensors, B, page_bytes(tensors))
    assert len(plan.pieces) == 1
    for block in range(B):
        expected = tensors["l0"][block * ratio : (block + 1) * ratio].contiguous().numpy().tobytes()
        assert gathered(plan, block) == expected


def test_kernel_blocks_with_k_and_v_apart() -> None:
    tensors = {"l0": filled(torch.empty(2, B * 2, N, H, D), 0)}
    plan = pieces(tensors, B, page_bytes(tensors))
    assert len(plan.pieces) == 2
    for block in range(B):
        expected = tensors["l0"][:, block * 2 : block * 2 + 2].contiguous().numpy().tobytes()
        assert gathered(plan, block) == expected


def test_no_extent_fools_the_search_for_blocks() -> None:
    """Every other dimension may have the extent of the blocks', or two."""
    for blocks, tokens, heads, size in [(4, 4, 4, 4), (8, 2, 8, 16), (16, 16, 2, 16), (3, 2, 2, 2)]:
        for shape, where in [
            ((2, blocks, tokens, heads, size), 1),
            ((blocks, 2, tokens, heads, size), 0),
            ((blocks, heads, tokens, 2 * size), 0),
            ((blocks, tokens, size), 0),
        ]:
            tensors = {"l0": filled(torch.empty(shape), 0)}
            plan = pieces(tensors, blocks, page_bytes(tensors, blocks))
            for block in range(blocks):
                assert gathered(plan, block) == reference(tensors, block, where), shape


def test_shared_and_repeated_tensors_count_once() -> None:
    tensor = filled(torch.empty(B, H, N, 2 * D), 0)
    plan = pieces({"l0": tensor, "l1": tensor}, B, tensor[0].numel() * 4)
    assert len(plan.pieces) == 1
    assert plan.layer_ends == {"l0": plan.page_bytes, "l1": plan.page_bytes}


def test_pages_of_other_layouts_have_other_names() -> None:
    texts = {}
    for name in (
        "2BNHD flash attention 0.20",
        "2BHND cpu 0.20",
        "BHN2D logical HND",
        "BHN2D logical NHD",
        "MLA",
    ):
        tensors = LAYOUTS[name][0]()
        texts[name] = pieces(tensors, B, page_bytes(tensors)).layout
    assert len(set(texts.values())) == len(texts)
    assert all(text.startswith("2*cpu/") for text in texts.values())


def test_one_order_of_bytes_has_one_name_wherever_it_lies() -> None:
    engines = [LAYOUTS[name][0]() for name in ("LBHNC", "LHBNC", "BLHNC", "BHLNC")]
    plans = [pieces(tensors, B, page_bytes(tensors)) for tensors in engines]
    assert len({plan.layout for plan in plans}) == 1
    assert len({gathered(plan, 2) for plan in plans}) == 1


def test_many_unlike_layers_get_a_short_name() -> None:
    tensors = {f"l{i}": torch.empty(B, 1 + i % 7, N, 2 * (i + 1)) for i in range(60)}
    layout = pieces(tensors, B, page_bytes(tensors)).layout
    assert len(layout.encode()) <= 256
    assert "sha256:" in layout


@pytest.mark.parametrize(
    ("tensors", "blocks", "page", "words"),
    [
        ({"l": torch.empty(7, N, H, D)}, 5, 96 * 4, "no dimension"),
        ({"l": torch.empty(B, N, H, D)}, B, 96 * 4 + 64, "not 448"),
        ({"l": torch.empty(2, 2, N, H, D)}, 2, 96 * 8, "too few"),
        ({"l": torch.empty(B, 1, N).expand(B, H, N)}, B, N * H * 4, "share memory"),
        ({"l": [torch.empty(B, 4), torch.empty(B, 8)]}, B, 48, "not one tensor"),
        ({}, B, 1, "0 pieces"),
    ],
)
def test_what_cannot_be_described_is_refused(
    tensors: Tensors, blocks: int, page: int, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        pieces(tensors, blocks, page)


@given(
    order=st.permutations(["b", "x", "y", "z"]),
    extents=st.tuples(*[st.integers(1, 6)] * 3),
    blocks=st.integers(3, 7),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.uint8]),
)
def test_any_order_of_dimensions(
    order: list[str], extents: tuple[int, int, int], blocks: int, dtype: torch.dtype
) -> None:
    size = dict(zip("xyz", extents, strict=True), b=blocks)
    memory = torch.empty([size[c] for c in order], dtype=dtype)
    tensor = filled(memory.permute([order.index(c) for c in "bxyz"]), 1)
    plan = pieces({"l": tensor}, blocks, page_bytes({"l": tensor}, blocks)["l"])
    for block in range(blocks):
        assert gathered(plan, block) == reference({"l": tensor}, block, 0)
