"""Scenarios on vLLM's real scheduler: their registry, and the program that runs them.

    python -m tests.connector.world MODEL {fake|real} [NAME ...]

Prints one line a scenario: RESULT {"name", "ok", "facts" or "error", "seconds"}. Started by
test_scheduler_contract.py, once for each vLLM version.
"""

import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.connector.daemons import FakeDaemon, RealDaemon
from tests.connector.rig import Rig

PROMPT = [10 + (i * 7) % 200 for i in range(100)]
MODULES = ("flows", "faults", "held", "real", "ranks")


class World:
    """A daemon of one's own, and engines that are closed at the end."""

    def __init__(self, model: str, folder: Path, *, is_real: bool) -> None:
        self.model, self.folder = model, folder
        self.daemon = (RealDaemon if is_real else FakeDaemon)(folder)
        self.rigs: list[Rig] = []

    def rig(self, *, wait: bool = True, **options: Any) -> Rig:
        rig = Rig(self.model, self.daemon.address, **options)
        self.rigs.append(rig)
        if wait:
            rig.wait_attached()
        return rig

    def warmed(self, prompt: list[int], blocks: int) -> list[int]:
        """Let an engine compute and save a prompt, then end it; returns its output."""
        rig = self.rig()
        rig.add("cold", prompt)
        rig.run()
        self.daemon.wait("saved", blocks)
        assert not rig.wrong
        rig.close()
        self.rigs.remove(rig)
        return rig.outputs["cold"]

    def close(self) -> None:
        for rig in self.rigs:
            rig.close()
        self.daemon.close()


Scenario = Callable[[World], dict[str, Any] | None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def run(name: str, model: str, *, is_real: bool) -> dict[str, Any]:
    began = time.monotonic()
    line: dict[str, Any] = {"name": name, "ok": False}
    with tempfile.TemporaryDirectory() as folder:
        world = World(model, Path(folder), is_real=is_real)
        try:
            line["facts"] = SCENARIOS[name](world)
            line["ok"] = True
        except Exception:  # noqa: BLE001  # reported to the test
            line["error"] = traceback.format_exc()
        finally:
            world.close()
    line["seconds"] = round(time.monotonic() - began, 2)
    return line


def main() -> None:
    model, kind, *names = sys.argv[1:]
    if not os.environ.get("RIG_LOG"):
        logging.disable(logging.ERROR)
    for module in MODULES:
        import_module(f"tests.connector.{module}")
    for name in names or SCENARIOS:
        line = json.dumps(run(name, model, is_real=kind == "real"))
        sys.stdout.write(f"RESULT {line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.modules["tests.connector.world"] = sys.modules["__main__"]  # one registry, not two
    main()
