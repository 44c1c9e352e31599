"""An engine in a process of its own that may be killed: saves, then loads for ever.

python -m tests.gpu.engine_process ADDRESS MIB
"""

import sys

import torch

from bench.gpu_engine import gpu_engine

PIECE = 32 << 10
LAYERS = 32


def main() -> None:
    address, mebibytes = sys.argv[1], int(sys.argv[2])
    blocks = (mebibytes << 20) // (LAYERS * PIECE)
    tensors = {
        f"l{n}": torch.full((blocks, PIECE), n, dtype=torch.uint8, device="cuda")
        for n in range(LAYERS)
    }
    with gpu_engine(address, tensors, blocks) as engine:
        half = list(range(blocks // 2))
        engine.save("all", half)
        sys.stdout.write("saved\n")
        sys.stdout.flush()
        while True:
            engine.load("all", [blocks // 2 + at for at in half])


if __name__ == "__main__":
    main()
