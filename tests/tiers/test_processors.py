"""How many processors there are to use."""

import os
from pathlib import Path

import pytest

from trikv.tiers import processors


@pytest.mark.parametrize(
    ("above", "inside", "wanted"),
    [
        ("max 100000", "50000 100000", 0.5),
        ("25000 100000", "50000 100000", 0.25),
        ("max 100000", "max 100000", None),
        ("nonsense", "", None),
        (None, None, None),
    ],
)
def test_the_smallest_quota_counts(
    tmp_path: Path, above: str | None, inside: str | None, wanted: float | None
) -> None:
    own, root = tmp_path / "own", tmp_path / "groups"
    own.write_text("1:name=systemd:/other\n0::/a/b\n")
    (root / "a" / "b").mkdir(parents=True)
    for folder, text in ((root / "a", above), (root / "a" / "b", inside)):
        if text is not None:
            (folder / "cpu.max").write_text(text)
    whole = len(os.sched_getaffinity(0))
    assert processors.count(own, root) == (whole if wanted is None else wanted)


def test_a_system_without_control_groups_has_what_affinity_allows(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert processors.count(missing, missing) == len(os.sched_getaffinity(0))
