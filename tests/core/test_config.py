"""Settings from flag, environment and file: which wins, and what a wrong one says."""

import contextlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trikv.config import OPTIONS, Settings, load
from trikv.options import Option, SettingError, read_bool, read_bytes

GOOD: dict[str, tuple[str, object, str, object]] = {  # two values of each: text, value
    "addr": ("/a", "/a", "h:1", "h:1"),
    "pool-size": ("4mb", 4 << 20, "30gb", 30 << 30),
    "slab-size": ("1mb", 1 << 20, "2mb", 2 << 20),
    "use-hugepages": ("true", True, "no", False),
    "numa": ("off", "off", "auto", "auto"),
    "persist": ("/dev/shm/a", "/dev/shm/a", "/dev/shm/b", "/dev/shm/b"),
    "takeover": ("true", True, "false", False),
    "max-blocks": ("1", 1, "1073741824", 1 << 30),
    "max-engines": ("1", 1, "4096", 4096),
    "eviction-policy": ("s3-fifo", "s3-fifo", "leaf-first-lru", "leaf-first-lru"),
    "enable-lfu-admission": ("true", True, "no", False),
    "quota-file": ("/q.toml", "/q.toml", "q", "q"),
    "ssd-cache-path": ("/a,/b", ("/a", "/b"), "c", ("c",)),
    "ssd-cache-capacity": ("8mb", 8 << 20, "2tb", 2 << 40),
    "ssd-write-through": ("true", True, "no", False),
    "ssd-write-budget": ("1mb", 1 << 20, "2tb", 2 << 40),
    "ssd-ring": ("threads", "threads", "auto", "auto"),
    "metaserver-addr": ("a:1", ("a:1",), "a:1, b:2", ("a:1", "b:2")),
    "nics": ("off", ("off",), "mlx5_0,mlx5_1", ("mlx5_0", "mlx5_1")),
    "peer-data-port": ("0", 0, "65535", 65_535),
    "peer-ssd-fraction": ("0.1", 0.1, "0", 0.0),
    "verify-peer": ("always", "always", "sample", "sample"),
    "cluster-secret-file": ("/s", "/s", "s", "s"),
    "insecure": ("true", True, "no", False),
    "record-trace": ("/t.jsonl", "/t.jsonl", "t", "t"),
    "trace-block-tokens": ("1", 1, "1048576", 1 << 20),
    "copy-threads": ("1", 1, "64", 64),
    "gpu-staging": ("auto", None, "2gb", 2 << 30),
    "lease-seconds": ("1", 1.0, "3600", 3600.0),
    "heartbeat-seconds": ("0.5", 0.5, "3600", 3600.0),
    "fill-seconds": ("1", 1.0, "3600.0", 3600.0),
    "drain-seconds": ("0", 0.0, "600", 600.0),
    "freeze-seconds": ("0", 0.0, "3600", 3600.0),
    "state-dir": ("/a", "/a", "b/c", "b/c"),
    "http-addr": ("off", "off", "[::1]:0", "[::1]:0"),
    "metric-hll-windows": ("60s", (60.0,), "24h, 15M,30d", (900.0, 86400.0, 2592000.0)),
    "log-level": ("debug", "debug", "error", "error"),
    "log-format": ("json", "json", "console", "console"),
}
BAD: dict[str, list[str]] = {
    "pool-size": ["4194303", "4095kb", "-4mb", "mb", "4 m b", "4pb", "1e9", "inf", "nan", "0x10"],
    "slab-size": ["1048575", "0"],
    "use-hugepages": ["2", "maybe", "t", "None"],
    "numa": ["0", "on"],
    "takeover": ["maybe", "2"],
    "max-blocks": ["0", "1073741825", "1.0", "1e3", "x"],
    "max-engines": ["0", "4097", "-1"],
    "eviction-policy": ["lru", "S3-FIFO"],
    "enable-lfu-admission": ["2", "lfu"],
    "ssd-cache-path": [",", "a,", "a,a", " , ", ",".join(map(str, range(17)))],
    "ssd-cache-capacity": ["8191kb", "much"],
    "ssd-write-through": ["2"],
    "ssd-write-budget": ["1023kb", "-1"],
    "ssd-ring": ["io_uring", "Threads"],
    "metaserver-addr": ["a:1,", "a:1,a:1"],
    "nics": ["mlx5_0,,mlx5_1"],
    "peer-ssd-fraction": ["0.3", "-1", "much"],
    "verify-peer": ["never"],
    "peer-data-port": ["-1", "65536", "any"],
    "insecure": ["2"],
    "trace-block-tokens": ["0", "1048577", "x"],
    "copy-threads": ["0", "65", "two"],
    "gpu-staging": ["1023kb", "much"],
    "metric-hll-windows": [
        "59s",
        "31d",
        "15",
        "m",
        "1.5h",
        "15m,",
        "60s,1m",
        "-5m",
        "1h,2h,3h,4h,5h,6h,7h",
    ],
    "lease-seconds": ["0.99", "3600.1", "nan", "inf", "-inf", "1s"],
    "heartbeat-seconds": ["0.49", "3601"],
    "fill-seconds": ["0.99", "3601"],
    "drain-seconds": ["-0.1", "600.1"],
    "freeze-seconds": ["-1", "3601"],
    "log-level": ["INFO", "trace", "warn"],
    "log-format": ["xml", "Json"],
}
BY_NAME = {option.name: option for option in OPTIONS}
WRONG = [(BY_NAME[name], text) for name, texts in BAD.items() for text in texts]

WriteFile = Callable[[str], str]


@pytest.fixture
def write_file(tmp_path: Path) -> WriteFile:
    def write(text: str) -> str:
        path = tmp_path / "trikv.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refusal(arguments: list[str], environ: dict[str, str]) -> str:
    with pytest.raises(SettingError) as caught:
        load(arguments, environ)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_each_setting_is_an_option_and_is_tried_here() -> None:
    assert [option.key for option in OPTIONS] == [field.name for field in fields(Settings)]
    assert GOOD.keys() == BY_NAME.keys()
    assert BAD.keys() == BY_NAME.keys() - {
        "addr",
        "cluster-secret-file",
        "http-addr",
        "persist",
        "quota-file",
        "record-trace",
        "state-dir",
    }  # whoever opens them says


def test_without_sources_all_are_defaults() -> None:
    settings = load([], {})
    for option in OPTIONS:
        assert getattr(settings, option.key) == option.default


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_flag_before_environment_before_file_before_default(
    option: Option, write_file: WriteFile
) -> None:
    first, first_value, second, second_value = GOOD[option.name]
    toml = write_file(f'{option.name} = "{first}"')

    def read(arguments: list[str], environ: dict[str, str]) -> object:
        return getattr(load(arguments, environ), option.key)

    assert read(["--config", toml], {}) == first_value
    assert read([], {"TRIKV_CONFIG": toml}) == first_value
    assert read(["--config", toml], {option.variable: second}) == second_value
    assert read([f"--{option.name}", first], {option.variable: second}) == first_value
    assert read(["--config", toml, f"--{option.name}={second}"], {}) == second_value
    assert read(["--config", toml], {option.variable: ""}) == first_value
    assert option.variable == "TRIKV_" + option.name.upper().replace("-", "_")


def test_the_named_file_comes_before_the_environments(write_file: WriteFile) -> None:
    toml = write_file("max-engines = 3")
    assert load(["--config", toml], {"TRIKV_CONFIG": "/nowhere"}).max_engines == 3


def test_a_file_may_use_numbers_and_truth(write_file: WriteFile) -> None:
    toml = write_file(
        "pool-size = 4194304\nuse-hugepages = true\nlease-seconds = 1.5\nfill-seconds = 2\n"
        "addr = ''\n# comment\n"
    )
    settings = load(["--config", toml], {})
    assert settings.pool_size == 4 << 20
    assert settings.use_hugepages is True
    assert (settings.lease_seconds, settings.fill_seconds) == (1.5, 2.0)
    assert settings.addr is None


def test_a_truth_as_flag_needs_no_value() -> None:
    assert load(["--use-hugepages"], {}).use_hugepages is True
    assert load(["--use-hugepages", "false"], {"TRIKV_USE_HUGEPAGES": "1"}).use_hugepages is False
    assert load(["--use-hugepages", "--max-engines", "2"], {}).max_engines == 2


@pytest.mark.parametrize(("option", "text"), WRONG, ids=lambda one: getattr(one, "name", one))
def test_a_wrong_value_names_its_source(option: Option, text: str, write_file: WriteFile) -> None:
    flag = refusal([f"--{option.name}={text}"], {option.variable: GOOD[option.name][0]})
    assert flag.startswith(f"--{option.name}: {text!r}: ")
    assert "TRIKV_" not in flag
    variable = refusal([], {option.variable: text})
    assert variable.startswith(f"{option.variable}: {text!r}: ")
    toml = write_file(f'{option.name} = "{text}"')
    file = refusal([], {"TRIKV_CONFIG": toml})
    assert file.startswith(f"{toml}: {option.name}: {text!r}: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pool-sise", "1gb"], "--pool-sise"),
        (["--pool", "1gb"], "--pool"),  # no abbreviations: a new flag must not change an old line
        (["--pool-size"], "--pool-size"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], said: str) -> None:
    assert said in refusal(arguments, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pool_size = 1", "unknown setting 'pool_size'"),
        ("[daemon]\npool-size = 1", "unknown setting 'daemon'"),
        ("max-engines = [1]", "max-engines: expected"),
        ("max-engines = 2024-01-01", "max-engines: expected"),
        ("max-engines = true", "max-engines: 'true'"),
        ("use-hugepages = 1.0", "use-hugepages: '1.0'"),
        ("max-engines = 1\nmax-engines = 2", "Cannot overwrite"),
        ("max-engines", "Expected '='"),
    ],
)
def test_a_wrong_file_is_one_line(text: str, said: str, write_file: WriteFile) -> None:
    toml = write_file(text)
    message = refusal(["--config", toml], {})
    assert toml in message
    assert said in message


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"addr = '\xff'")
    for path in (str(tmp_path / "gone"), str(tmp_path), str(binary), "/dev/null/x"):
        assert path in refusal(["--config", path], {})


def test_a_file_of_the_environment_that_cannot_be_read_names_the_variable() -> None:
    assert "TRIKV_CONFIG" in refusal([], {"TRIKV_CONFIG": "/nowhere"})


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--help"], {})
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for option in OPTIONS:
        assert f"--{option.name}" in shown


# -- sizes and truths

UNITS = {
    "": 0,
    "b": 0,
    "k": 10,
    "kb": 10,
    "KiB": 10,
    "m": 20,
    "MB": 20,
    "Gi": 30,
    "gb": 30,
    "T": 40,
}


@given(st.integers(0, 1 << 12), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_sizes_are_in_units_of_1024(count: int, unit: str, gap: str) -> None:
    assert read_bytes(f"{gap}{count}{gap}{unit}{gap}") == count << UNITS[unit]


@pytest.mark.parametrize(("text", "expected"), [("1.5kb", 1536), ("0.5", 0), ("2.25gb", 9 << 28)])
def test_sizes_may_have_a_fraction(text: str, expected: int) -> None:
    assert read_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "b", ".5gb", "1.gb", "1,5gb", "1gbb", "1bg", "1kk", "--1"])
def test_these_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        read_bytes(text)


@pytest.mark.parametrize("text", ["9007199254740993", "9" * 400])
def test_a_size_is_exact_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert read_bytes(text) == int(text)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_refusal(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert read_bytes(text) >= 0


@pytest.mark.parametrize("word", ["true", "yes", "on", "1", " TRUE "])
def test_true(word: str) -> None:
    assert read_bool(word) is True


@pytest.mark.parametrize("word", ["false", "no", "off", "0", "Off"])
def test_false(word: str) -> None:
    assert read_bool(word) is False


@pytest.mark.parametrize("word", ["", "10", "y", "truee"])
def test_neither(word: str) -> None:
    with pytest.raises(ValueError, match="true or false"):
        read_bool(word)


def test_paths_are_repeated_or_listed(write_file: WriteFile) -> None:
    assert load(["--ssd-cache-path", "/a", "--ssd-cache-path=/b"], {}).ssd_cache_path == (
        "/a",
        "/b",
    )
    toml = write_file('ssd-cache-path = ["/a", "/b"]')
    assert load(["--config", toml], {}).ssd_cache_path == ("/a", "/b")
    toml = write_file("ssd-cache-path = [1]")
    assert "ssd-cache-path: expected" in refusal(["--config", toml], {})
