"""An engine in a process of its own that may be killed: saves, then loads for ever.

python -m tests.gpu.engine_process ADDRESS MIB [hang]

With `hang` it has a save wait behind many seconds of kernels instead.
"""

import sys
import time

import torch

from bench.daemons import HASH_BYTES, hashes
from bench.gpu_engine import GpuEngine, gpu_engine
from trikv.connector.calls import pack
from trikv.connector.jobs import SaveJob

PIECE = 32 << 10
LAYERS = 32


def hang(engine: GpuEngine) -> None:
    """Queue a save whose event is many seconds away, and stay."""
    a = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16)
    for _ in range(900):  # some 12 ms each; the driver takes about a thousand before it blocks
        a @ a
    blob = hashes("hang", 4)
    engine.worker.start_saves([SaveJob(1, "hang", 0, HASH_BYTES, blob, pack(range(4)))])
    sys.stdout.write("saving\n")
    sys.stdout.flush()
    time.sleep(600)


def main() -> None:
    address, mebibytes = sys.argv[1], int(sys.argv[2])
    blocks = (mebibytes << 20) // (LAYERS * PIECE)
    tensors = {
        f"l{n}": torch.full((blocks, PIECE), n, dtype=torch.uint8, device="cuda")
        for n in range(LAYERS)
    }
    with gpu_engine(address, tensors, blocks) as engine:
        half = list(range(blocks // 2))
        if sys.argv[3:] == ["hang"]:
            hang(engine)
        engine.save("all", half)
        sys.stdout.write("saved\n")
        sys.stdout.flush()
        while True:
            engine.load("all", [blocks // 2 + at for at in half])


if __name__ == "__main__":
    main()
