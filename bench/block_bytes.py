"""The bytes of a block in an engine's KV tensors, whatever their layout, as one digest.

Addressed by the same plan that the connector offers to the daemon.
"""

import hashlib
from collections.abc import Mapping

import torch

from trikv.connector import layouts


class BlockBytes:
    """Reads blocks of one rank's tensors; waits for all work of the GPU first."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        block_count: int,
        page_bytes: int | Mapping[str, int],
    ) -> None:
        """Plan the reading of tensors as `WorkerHalf.register` is given them."""
        plan = layouts.pieces(tensors, block_count, page_bytes)
        flat = {}
        for tensor in tensors.values():
            storage = tensor.untyped_storage()
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            flat[storage.data_ptr()] = empty.set_(storage, 0, (storage.nbytes(),), (1,))
        self._memories = [flat[memory.address] for memory in plan.memories]
        self._pieces = plan.pieces
        self._has_gpu = any(memory.device.startswith("cuda") for memory in plan.memories)

    def synchronise(self) -> None:
        """Wait until nothing that was queued may still write."""
        if self._has_gpu:
            torch.cuda.synchronize()

    def digest(self, block: int) -> str:
        """Of the block's page: all its pieces, one after another."""
        parts = []
        for piece in self._pieces:
            begin = piece.offset + block * piece.stride
            parts.append(self._memories[piece.memory][begin : begin + piece.size_bytes])
        page = torch.cat(parts).cpu().numpy()
        return hashlib.blake2b(page.data, digest_size=16).hexdigest()
