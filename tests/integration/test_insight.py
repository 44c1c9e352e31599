"""What a daemon tells about other sizes and orders of eviction."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Start
from tests.integration.daemons import attached, hashes, start_daemon, wait_for, wire_ok


def test_status_tells_what_other_sizes_would_give(start: Start, tmp_path: Path) -> None:
    daemon = start_daemon(start, tmp_path, "--pool-size", "4mb", "--slab-size", "1mb")
    prompts = [hashes(*(f"{prompt}/{n}" for n in range(48))) for prompt in range(3)]

    async def main() -> None:
        async with attached(daemon.address, page_bytes=1 << 16) as engine:
            for turn in range(4):  # 9 MB of prompts in turn: nothing is found in 4 MB
                for number, blob in enumerate(prompts):
                    request = f"{turn}/{number}"
                    for _ in range(3):  # asking again is no use more
                        wire_ok(await engine.query(blob, request=request))
                    wire_ok(await engine.save(blob, list(range(48)), request=request))
                    await engine.session.release([request])

    asyncio.run(main())
    facts = asyncio.run(
        wait_for(daemon.address, lambda one: one["shadows"] and _rate(one, 8) > 0.749)
    )
    assert _rate(facts, 0.5) == 0.0
    assert _rate(facts, 8) == pytest.approx(0.75, abs=0.001)  # all but the first of four turns
    told = {row["policy"] for row in facts["shadows"]}
    assert {"leaf-first-lru", "s3-fifo", "w-tinylfu"} <= told
    words = [sys.executable, "-m", "trikv.cli.main", "status", "--addr", daemon.address]
    out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert "+200 GiB would give +7" in out
    assert "orders    leaf-first 0.0%, s3-fifo" in out
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert daemon.end() == 0


def _rate(facts: dict[str, Any], pools: float) -> float:
    curve, pool = facts["curve"], facts["pool"]
    rates = {row["capacityBytes"]: row["hitRate"] for row in curve}
    return float(rates.get(pools * pool["capacityBytes"], -1.0))
