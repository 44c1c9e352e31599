"""Tables in the documentation are held to the code."""

import re
from pathlib import Path

from trikv.config import OPTIONS
from trikv.meta import settings as meta_settings
from trikv.meta import status as meta_status
from trikv.nursery.metrics import names

ROOT = Path(__file__).resolve().parents[1]


def test_each_metric_has_a_row_and_each_row_a_metric() -> None:
    rows = re.findall(r"^\| `(trikv_\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert rows == [*names(), *meta_status.names()]


def test_each_test_that_the_faults_name_exists() -> None:
    text = (ROOT / "docs/faults.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(
            rf"^(?:async )?def {name}\(", (ROOT / "tests" / path).read_text(), re.MULTILINE
        )
    ]
    assert not missing
    rows = re.findall(r"^\| (?!fault|---).*", text, re.MULTILINE)
    assert len(rows) > 30
    assert not [row for row in rows if "::" not in row]


def test_each_setting_of_the_daemon_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [option.name for option in OPTIONS if f"`--{option.name}`" not in readme]
    assert not missing


def test_each_setting_of_the_metaserver_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    part = readme.partition("## Several hosts")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `--([\w-]+)`", part, re.MULTILINE)
    assert rows == [option.name for option in meta_settings.OPTIONS]
