"""Shows what TriKV is for: an engine ends, and the next one need not compute again.

    make demo          or          python examples/demo.py

Starts `trikv-daemon` with a small pool on a private socket, then five times a real vLLM engine on
the CPU: without TriKV (the reference), with an empty cache, as a new process that finds the cache,
and two at once on one pool. Then with a pool that can promise one prompt, and an SSD: three long
prompts are saved, engine and daemon end, and new ones find all three. Last, a daemon with a pool
that outlives it is killed under a running engine, which finds its prompts in the next daemon. The
model is made here with random weights, so its words mean nothing; what counts is that they are the
same words. Ends with 1 if an output differs from the reference or if nothing was loaded.
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONNECTOR = {
    "kv_connector": "TriKVConnector",
    "kv_connector_module_path": "trikv.connector",
    "kv_role": "kv_both",
    # What is there is waited for, however slow this machine is: by default an engine rather
    # computes than wait more than 0.1 s for an answer or 2 s for a disk.
    "kv_connector_extra_config": {
        "trikv.query_timeout_ms": 30_000,
        "trikv.load_wait_ms": 30_000,
    },
}
MODEL = ("--layers", "8", "--hidden", "512")  # 18 M weights: computing a prompt takes over a second
BLOCK = 32  # tokens
BLOCKS_A_MIB = 2  # of the model below
QUESTIONS = {  # request: document and question; the last one shares all but its end with another
    "lighthouse": ("lighthouse", "How were the stones held together?"),
    "bakery": ("bakery", "What does the thumb measure?"),
    "river": ("river", "Why is the line redrawn?"),
    "river, new question": ("river", "How is the boat kept in its place?"),
}
SAME = ("lighthouse", "bakery", "river")
VARIED = ("lighthouse", "bakery", "river, new question", "river")
SWAPPED = ("river", "lighthouse", "bakery")
SHARED = Path("/dev/shm")  # in memory, on every Linux
DAEMON_S_MAX = 30.0
ENGINE_S_MAX = 400.0
BEGUN_S = time.monotonic()

Request = dict[str, Any]


class DemoError(Exception):
    """Something did not run, or did not run as promised."""


def say(text: str) -> None:
    """Tell how far we are."""
    print(f"[{time.monotonic() - BEGUN_S:4.0f} s] {text}", flush=True)


def die_with_parent() -> None:
    """Make the kernel kill this child when the demo is gone, however it went."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def process(
    arguments: list[str], log: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program as the leader of a group that ends with the block."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  # the demo has no threads
        )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def tail(log: Path, lines: int = 15) -> str:
    """Return the end of a log, for a person who must find out what went wrong."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def wait_ready(child: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a daemon serves."""
    deadline_s = time.monotonic() + DAEMON_S_MAX
    while "daemon.ready" not in log.read_text(errors="replace"):
        if child.poll() is not None or time.monotonic() > deadline_s:
            message = f"the daemon did not become ready:\n{tail(log)}"
            raise DemoError(message)
        time.sleep(0.05)


@contextlib.contextmanager
def daemon(folder: Path, pool: str, *more: str, name: str = "daemon") -> Iterator[str]:
    """Run a daemon and yield its socket; a clean end must come soon after SIGTERM."""
    socket, log = folder / "trikv.sock", folder / f"{name}.log"
    arguments = ["-m", "trikv.nursery.serve", "--addr", f"unix:{socket}", "--pool-size", pool]
    arguments += more
    with process(arguments, log) as child:
        wait_ready(child, log)
        yield str(socket)
        child.send_signal(signal.SIGTERM)
        if child.wait(DAEMON_S_MAX) != 0:
            message = f"the daemon ended with {child.returncode}:\n{tail(log)}"
            raise DemoError(message)


def prompts(names: tuple[str, ...]) -> list[dict[str, str]]:
    """Make the prompts of these requests: a text, a question."""
    texts = {path.stem: path.read_text() for path in (HERE / "documents").glob("*.txt")}
    return [
        {"name": name, "text": f"{texts[document]}\nQuestion: {question}\nAnswer:"}
        for name, (document, question) in ((name, QUESTIONS[name]) for name in names)
    ]


@contextlib.contextmanager
def engine(
    folder: Path, name: str, names: tuple[str, ...], *more: str, socket: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Start one engine process on these requests; with `socket` it is attached to TriKV."""
    (folder / f"{name}.prompts").write_text(json.dumps(prompts(names)))
    arguments = [str(HERE / "run_engine.py"), str(folder / "model"), *more]
    arguments += ["--block-size", str(BLOCK)]
    arguments += [
        "--prompts",
        str(folder / f"{name}.prompts"),
        "--out",
        str(folder / f"{name}.json"),
    ]
    if socket:
        arguments += ["--kv-transfer-config", json.dumps(CONNECTOR)]
    places = {"TRIKV_SOCKET": socket, "VLLM_RPC_BASE_PATH": str(folder)}  # vLLM leaves its sockets
    with process(arguments, folder / f"{name}.log", **places) as child:
        yield child


def finish(folder: Path, name: str, child: subprocess.Popen[bytes]) -> list[Request]:
    """Wait for an engine process and return what it did."""
    try:
        code = child.wait(ENGINE_S_MAX)
    except subprocess.TimeoutExpired:
        code = -1
    if code != 0:
        message = f"engine '{name}' failed ({code}):\n{tail(folder / f'{name}.log')}"
        raise DemoError(message)
    requests: list[Request] = json.loads((folder / f"{name}.json").read_text())["requests"]
    for request in requests:
        if request["cached_tokens"] != request["local_tokens"] + request["external_tokens"]:
            message = f"the engine's counts disagree: {request}"
            raise DemoError(message)
    return requests


def run_all(folder: Path, socket: str) -> dict[str, list[Request]]:
    """Run the five engines."""
    results = {}
    plan: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], str], ...] = (
        ("reference", "without TriKV, its own cache off", VARIED, ("--no-prefix-caching",), ""),
        ("first", "with TriKV, nothing cached yet", SAME, (), socket),
        ("second", "a new process with TriKV, cache full", VARIED, (), socket),
    )
    for name, what, names, more, at in plan:
        say(f"engine '{name}': {what} (20-60 s)")
        with engine(folder, name, names, *more, socket=at) as child:
            results[name] = finish(folder, name, child)
    say("engines 'left' and 'right': two at once on one pool (30-90 s)")
    meeting = folder / "meeting"
    meeting.mkdir()
    meet = ("--meet", str(meeting))
    with (
        engine(folder, "left", VARIED, *meet, socket=socket) as left,
        engine(folder, "right", SWAPPED, *meet, socket=socket) as right,
    ):
        results["left"] = finish(folder, "left", left)
        results["right"] = finish(folder, "right", right)
    return results


Tiers = dict[str, dict[str, int]]


def run_below(folder: Path) -> tuple[dict[str, list[Request]], Tiers]:
    """Save three prompts, end everything, and look for them; also blocks found, by tier."""
    tokens = max(len(one["text"]) for one in prompts(SAME))  # a character is a token
    mib = -(-tokens // (BLOCK * BLOCKS_A_MIB))
    pool, disk = f"{2 * mib + 6}mb", folder / "ssd"
    ssd = ("--ssd-cache-path", str(disk), "--ssd-cache-capacity", f"{4 * mib + 64}mb")
    say(f"a pool of {pool} that can promise one prompt, and an SSD")
    results, tiers = {}, {}
    for name, names in (("to SSD", SAME), ("from SSD", VARIED)):
        say(f"daemon and engine '{name}' (20-60 s)")
        with daemon(folder, pool, *ssd, name=f"daemon {name}") as socket:
            before = read_tiers(socket)
            with engine(folder, name, names, socket=socket) as child:
                results[name] = finish(folder, name, child)
            after = read_tiers(socket)
            tiers[name] = {tier: count - before[tier] for tier, count in after.items()}
    return results, tiers


def run_through(folder: Path, pool: str) -> tuple[list[Request], float]:
    """Kill the daemon under an engine and start another one; returns seconds until a hit began."""
    kept = SHARED / f"trikv-demo-{os.getpid()}"
    outage, log = folder / "outage", folder / "daemon killed.log"
    outage.mkdir()
    socket = folder / "trikv.sock"
    arguments = ["-m", "trikv.nursery.serve", "--addr", f"unix:{socket}", "--pool-size", pool]
    arguments += ["--persist", str(kept)]
    name = "survivor"
    try:
        with process(arguments, log) as first:
            wait_ready(first, log)
            say(f"engine '{name}': its daemon is killed, its pool is kept (20-60 s)")
            more = ("--outage", str(outage))
            with engine(folder, name, SAME, *more, socket=str(socket)) as child:
                deadline_s = time.monotonic() + ENGINE_S_MAX
                while not (outage / "before").exists():
                    if child.poll() is not None or time.monotonic() > deadline_s:
                        finish(folder, name, child)
                    time.sleep(0.01)
                killed_s = time.monotonic()
                first.kill()
                first.wait()
                with daemon(folder, pool, "--persist", str(kept), name="daemon after"):
                    (outage / "after").touch()
                    requests = finish(folder, name, child)
        found_s = json.loads((folder / f"{name}.json").read_text())["found_s"]
        return requests, found_s - killed_s
    finally:
        shutil.rmtree(kept, ignore_errors=True)


def read_tiers(socket: str) -> dict[str, int]:
    """Blocks that engines were promised of late, by where they were found."""
    everyone = [one for one in read_status(socket)["windows"] if not one["namespace"]]
    longest = max(everyone, key=lambda one: float(one["seconds"]))
    return {hits["tier"]: int(hits["blocks"]) for hits in longest["hits"]}


def read_status(socket: str) -> dict[str, Any]:
    """Ask the daemon what it did, as a user would."""
    command = [
        sys.executable,
        "-m",
        "trikv.cli.main",
        "status",
        "--json",
        "--addr",
        f"unix:{socket}",
    ]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    facts: dict[str, Any] = json.loads(answer)
    return facts


def compare(results: dict[str, list[Request]], counters: dict[str, int]) -> list[str]:
    """Print the daemon's counts; return what is wrong if the engines counted otherwise."""
    saved, loaded = counters["trikv_save_blocks_total"], counters["trikv_load_blocks_total"]
    tokens = sum(request["external_tokens"] for run in results.values() for request in run)
    print(f"The daemon counts {saved} blocks of {BLOCK} tokens saved and {loaded} loaded,")
    print(f"{loaded * BLOCK} tokens; the engines count {tokens}.")
    return [] if loaded * BLOCK == tokens else ["engines and daemon disagree on what was loaded"]


def judge(requests: list[Request], tiers: dict[str, int]) -> list[str]:
    """Say how engine and daemon came back; return which of the three prompts are not whole."""
    missing = [
        f"'{one['name']}' did not come back whole"
        for one in requests
        if one["cached_tokens"] < (one["prompt_tokens"] - 1) // BLOCK * BLOCK
        and one["name"] in SAME
    ]
    if not missing and tiers["ssd"]:
        print("A pool that can promise one prompt: all three came back whole, from SSD.")
    return missing if tiers["ssd"] else [*missing, "nothing came from SSD"]


def report(results: dict[str, list[Request]], tiers: Tiers) -> list[str]:
    """Print the table; return what is wrong, nothing if all is well."""
    expected = {request["name"]: request["output"] for request in results["reference"]}
    wrong = []
    print("\n                                  prompt tokens   cached by    first    same")
    print("engine     request               all  computed   own  TriKV  token ms  output")
    for name, requests in results.items():
        print("-" * 79)
        for request in requests:
            same = "yes" if request["output"] == expected[request["name"]] else "NO"
            if same == "NO":
                wrong.append(f"engine '{name}', {request['name']}: another output")
            computed = request["prompt_tokens"] - request["cached_tokens"]
            print(
                f"{name:10} {request['name']:20} {request['prompt_tokens']:4} {computed:9} "
                f"{request['local_tokens']:5} {request['external_tokens']:6} "
                f"{request['ttft_ms']:9.0f}  {'-' if name == 'reference' else same:>6}"
            )
        if name in tiers:
            parts = [f"{count * BLOCK} from {tier}" for tier, count in tiers[name].items()]
            print(f"{'':10} of TriKV's tokens: {', '.join(parts)}")
        loaded = sum(request["external_tokens"] for request in requests)
        if name in ("second", "left", "right", "from SSD", "survivor") and loaded == 0:
            wrong.append(f"engine '{name}' loaded nothing from TriKV")
    print("-" * 79)
    cold, warm = results["reference"], results["second"]
    loaded = sum(request["external_tokens"] for request in warm)
    total = sum(request["prompt_tokens"] for request in warm)
    cold_ms, warm_ms = (sum(r["ttft_ms"] for r in run) / len(run) for run in (cold, warm))
    print(f"Second engine: {loaded} of {total} prompt tokens came from TriKV. First token after")
    print(f"{warm_ms:.0f} ms on average; in the engine without any cache after {cold_ms:.0f} ms.")
    return wrong


def demo(folder: Path, pool: str) -> list[str]:
    """Run everything in `folder`; return what is wrong."""
    say("a model with random weights, 72 MB")
    subprocess.run([sys.executable, HERE / "tiny_model.py", folder / "model", *MODEL], check=True)
    say(f"trikv-daemon with a pool of {pool}")
    with daemon(folder, pool) as socket:
        results = run_all(folder, socket)
        counters = read_status(socket)["counters"]
    below, tiers = run_below(folder)
    survivor, outage_s = run_through(folder, pool)
    wrong = report({**results, **below, "survivor": survivor}, tiers) + compare(results, counters)
    wrong += judge(below["from SSD"], tiers["from SSD"])
    print("Engine 'survivor': its daemon was killed. The next one, on the same pool,")
    print(f"answered the running engine {outage_s:.1f} s later.")
    return wrong


def main() -> int:
    """Run the demo in a folder of its own, kept only when something went wrong."""
    parser = argparse.ArgumentParser(description="See an engine find what another one computed.")
    parser.add_argument("--pool-size", default="256mb")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="trikv-demo-"))
    wrong: list[str] = []
    try:
        wrong = demo(folder, options.pool_size)
    except DemoError as error:
        wrong = [str(error)]
    finally:
        if not wrong:
            shutil.rmtree(folder)
    if wrong:
        print("\n".join(["", *wrong, f"The logs are in {folder}."]))
        return 1
    print("Every output is the one of the engine without TriKV.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
