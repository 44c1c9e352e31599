"""Tables in the documentation are held to the code."""

import re
from pathlib import Path

from trikv.config import OPTIONS
from trikv.core.counters import Counters

ROOT = Path(__file__).resolve().parents[1]


def test_each_counter_has_a_row_and_each_row_a_counter() -> None:
    rows = re.findall(r"^\| `(trikv_\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert rows == [name for name, _ in Counters().items()]


def test_each_setting_of_the_daemon_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [option.name for option in OPTIONS if f"`--{option.name}`" not in readme]
    assert not missing
