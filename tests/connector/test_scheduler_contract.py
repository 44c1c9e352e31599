"""The connector on vLLM's real schedulers: one process a version runs all scenarios.

Also the installed version against the real daemon, for the scenarios that need no planted fault;
and with each version engines of several ranks, on a real daemon that they start themselves.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.connector.tiny import write_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ROOT / ".cache" / "vllm"
RUNS = {  # name: vLLM version (empty: the installed one) and kind of daemon
    "0.20.0": ("0.20.0", "fake"),
    "installed": ("", "fake"),
    "0.33.0": ("0.33.0", "fake"),
    "installed, real daemon": ("", "real"),
}


def bodies(*modules: str) -> dict[str, str]:
    text = "\n".join((HERE / f"{name}.py").read_text() for name in modules)
    found = re.finditer(r"@scenario\ndef (\w+).*?(?=\n@|\ndef |\Z)", text, re.S)
    return {match[1]: match[0] for match in found}


BODIES = bodies("flows", "faults", "held")
CASES = [
    (run, name)
    for run, (_, kind) in RUNS.items()
    for name, body in BODIES.items()
    if kind == "fake" or ".tell(" not in body
]
CASES += [("installed, real daemon", name) for name in bodies("real")]
CASES += [(run, name) for run in ("0.20.0", "installed", "0.33.0") for name in bodies("ranks")]


class Run:
    """A process that prints results as it goes."""

    def __init__(self, child: "subprocess.Popen[str]", errors: Path) -> None:
        self.child, self.errors = child, errors
        self.results: dict[str, dict[str, Any]] = {}

    def result(self, name: str) -> dict[str, Any]:
        assert self.child.stdout is not None
        while name not in self.results:
            line = self.child.stdout.readline()
            if not line:
                pytest.fail(f"ended before {name}: {self.errors.read_text()[-3000:]}")
            if line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
                self.results[result["name"]] = result
        return self.results[name]


@pytest.fixture(scope="module")
def runs(start_shared: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Start all of them at once: they wait more than they compute."""
    folder = tmp_path_factory.mktemp("contract")
    write_model(folder / "model")
    found = {}
    for name, (version, kind) in RUNS.items():
        errors = folder / f"{name}.err"
        names = [scenario for run, scenario in CASES if run == name]
        with errors.open("w") as sink:
            child = start_shared(
                [
                    sys.executable,
                    "-m",
                    "tests.connector.world",
                    str(folder / "model"),
                    kind,
                    *names,
                ],
                stdout=subprocess.PIPE,
                stderr=sink,
                cwd=ROOT,
                env=environ(version, folder),
            )
        found[name] = Run(child, errors)
    return found


def environ(version: str, folder: Path) -> dict[str, str]:
    paths = [os.environ.get("PYTHONPATH", "")]
    if version:
        if not (SOURCES / version).exists():
            tool = [sys.executable, "tools/vllm_sources.py", version]
            subprocess.run(tool, cwd=ROOT, check=True, timeout=400)
        paths.insert(0, str(SOURCES / version))
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # no platform is found without its "cpu"
        alias = folder / "alias" / "vllm-0+cpu.dist-info"
        alias.mkdir(parents=True, exist_ok=True)
        (alias / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
        paths.append(str(alias.parent))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONHASHSEED": "0",  # block hashes are random without it before 0.29
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def test_scenarios_are_found() -> None:
    assert len(BODIES) >= 20
    assert sum(1 for run, _ in CASES if run == "installed, real daemon") >= 7


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("run", "name"), CASES)
def test_scenario(runs: dict[str, Run], run: str, name: str) -> None:
    result = runs[run].result(name)
    assert result["ok"], result["error"]
