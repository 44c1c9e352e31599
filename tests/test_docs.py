"""Tables in the documentation are held to the code."""

import re
from pathlib import Path

from trikv.config import OPTIONS
from trikv.nursery.metrics import names

ROOT = Path(__file__).resolve().parents[1]


def test_each_metric_has_a_row_and_each_row_a_metric() -> None:
    rows = re.findall(r"^\| `(trikv_\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert rows == names()


def test_each_setting_of_the_daemon_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [option.name for option in OPTIONS if f"`--{option.name}`" not in readme]
    assert not missing
