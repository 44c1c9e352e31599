"""What no linter checks: sizes, dead modules, and traces of the machine that a file was made on."""

import ast
import importlib.util
import subprocess
import tomllib
import zipfile
from pathlib import Path

import grimp
import pytest
from hatchling.build import build_wheel

ROOT = Path(__file__).resolve().parent.parent
MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
FOLDERS = ("trikv", "tests", "examples", "bench", "tools")

# Written apart, so that this file does not find itself.
TRACES = [
    "/" + "work/",
    "../" + "shared",
    "/" + "root/",
    "/" + "home/",
    "/opt/" + "pypi",
    ".lib" + "rary/",
]


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def tracked() -> list[Path]:
    """All files that a commit of everything would hold."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in names.split("\0") if name and (path := ROOT / name).is_file()]


def test_modules_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources()
        if (lines := len(path.read_text().splitlines())) > MODULE_LINES_MAX
    }
    assert not long


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": lines
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert not long


def test_no_module_is_dead() -> None:
    """Each module is imported by another one, is named in pyproject.toml, or can be run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["scripts"].values()]
    named += [target for group in project["entry-points"].values() for target in group.values()]
    entries = {target.split(":")[0] for target in named}
    graph = grimp.build_graph("trikv", cache_dir=None)
    dead = [
        module
        for module in sorted(graph.modules)
        if module not in entries
        and not graph.find_children(module)  # a package lives through its modules
        and not graph.find_modules_that_directly_import(module)
        and not is_program(module)
    ]
    assert not dead


def is_program(module: str) -> bool:
    path = ROOT / (module.replace(".", "/") + ".py")
    return path.exists() and "\nif __name__ == " in path.read_text()


@pytest.mark.parametrize(
    ("library", "module"),
    [
        ("hyperloglog", "trikv.core.windows"),
        ("prometheus_client", "trikv.process.pages"),
        ("hypercorn", "trikv.process.http"),
        ("starlette", "trikv.process.http"),
        ("liburing", "trikv.tiers.uring_package"),
        ("xxhash", "trikv.core.sums"),
    ],
)
def test_a_library_is_known_to_one_module(library: str, module: str) -> None:
    graph = grimp.build_graph("trikv", include_external_packages=True, cache_dir=None)
    assert graph.find_modules_that_directly_import(library) == {module}


WALL_CLOCK = {
    "time": {"time", "time_ns", "ctime", "localtime", "gmtime", "clock_gettime"},
    "datetime": {"datetime", "date", "now", "utcnow", "today"},
}


def test_nothing_that_decides_looks_at_the_wall_clock() -> None:
    """It may be set back and forth.

    It is looked at for the epoch, a name that differs each start, and for the age of hit-rate
    windows that another daemon has left.
    """
    looks = set()
    for path in sorted((ROOT / "trikv").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                is_one = node.attr in WALL_CLOCK.get(node.value.id, ())
            else:
                module = node.module if isinstance(node, ast.ImportFrom) else None
                is_one = module in WALL_CLOCK
            if is_one:
                looks.add((path.name, ast.unparse(node)))
    assert looks == {("serve.py", "time.time_ns"), ("ceiling.py", "time.time_ns")}


def test_entry_points_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = [
        *project["scripts"].values(),
        *project["entry-points"]["vllm.general_plugins"].values(),
    ]
    for target in targets:
        module, function = target.split(":")
        path = ROOT / (module.replace(".", "/") + ".py")
        assert path.is_file(), target
        names = [
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef)
        ]
        assert function in names, target


def test_no_file_names_the_machine_it_was_made_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {trace}"
        for path in tracked()
        for trace in TRACES
        if trace in path.read_bytes().decode("utf-8", errors="replace")
    ]
    assert not found


def test_the_wheel_holds_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wheel = zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path)))
    assert wheel.read("trikv/schema/kv.capnp") == (ROOT / "schema" / "kv.capnp").read_bytes()
    assert "trikv/py.typed" in wheel.namelist()


def test_every_bug_that_is_planted_has_a_place() -> None:
    """Else nobody sees that the simulation has become blind to it."""
    spec = importlib.util.spec_from_file_location("planted_bugs", ROOT / "tools/planted_bugs.py")
    assert spec is not None
    assert spec.loader is not None
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    for name, place, old, new in planted.BUGS:
        assert (ROOT / "trikv" / place).read_text().count(old) == 1, name
        assert old != new
