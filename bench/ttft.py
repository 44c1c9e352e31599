"""Time to the first token of a real vLLM engine, cold and warm: without a connector, with others.

    python -m bench.ttft [--json] [--connectors none,pegaflow,trikv,trikv-held] [--prompts 8]
        [--tokens 10000] [--rate 4] [--out-tokens 1] [--layers 32] [--model PATH]
        [--pegaflow FOLDER]

Llama-3.1-8B's shape with dummy weights, token ids from a seed, prompts arriving at the rate. For
each connector one engine process, cold then warm, with the engine's own prefix cache emptied in
between, then another process, warm from its start. `none`: cold, then `own`: the same prompts from
the engine's own prefix cache, which is the floor. `trikv-held`: forwards wait for loads
(`trikv.hold_ms`). PegaFlow is the baseline of the same round where it runs before; it is left out
where it is not installed, `--pegaflow` names its unpacked wheel.

Checked in each run, else the exit status is 1: all outputs of a prompt are equal over connectors
and rounds (`same_outputs`), all but the last block's tokens were cached, and (`bytes_equal`) every
`--every`-th block of `--checked` further prompts holds after a load what was saved. These are
looked at in rounds of their own, which no figure comes from, since looking waits for the GPU.

On a CPU, with a model of a few megabytes: `python -m bench.ttft --tiny --prompts 3 --out-tokens 8`;
each engine takes 20 to 40 s to start.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import daemons, pegaflow
from bench.lines import Line, print_json, print_table
from bench.ttft_engine import Job, Measured, Round
from bench.ttft_verdict import COLD, OWN, PEER, RESTARTED, WARM, Bytes, Verdict, checked, places

ROOT = Path(__file__).resolve().parent.parent
CONNECTORS = ("none", PEER, "trikv", "trikv-held")
HOLD_MS = 100
LOG_BYTES = 3_000
LLAMA = {  # Llama-3.1-8B
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "tie_word_embeddings": False,
}


class EngineError(Exception):
    """An engine process did not do its job; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Connector:
    """How engines reach a cache.

    Attributes:
        transfer: for `KVTransferConfig`.
        environ: what their environment has more.
        has_notes: blocks are looked at.
    """

    name: str
    transfer: dict[str, Any] | None = None
    environ: tuple[tuple[str, str], ...] = ()
    has_notes: bool = False


def write_model(folder: Path, options: argparse.Namespace, tokens_max: int) -> Path:
    """The folder of the model that is served."""
    if options.model is not None:
        return Path(options.model)
    if options.tiny:
        from examples import tiny_model  # noqa: PLC0415  # its packages are not in every engine

        tiny_model.write_model(
            folder, tiny_model.Model(layers=options.layers, tokens_max=tokens_max)
        )
        return folder
    folder.mkdir()
    config = LLAMA | {"num_hidden_layers": options.layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def base_job(folder: Path, options: argparse.Namespace) -> Job:
    """What all engines have in common."""
    tokens_max = 1 << (options.tokens + options.out_tokens).bit_length()
    model = write_model(folder / "model", options, tokens_max)
    arguments = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "seed": 0,
        "max_model_len": tokens_max,
        "block_size": options.block_tokens,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if options.tiny:
        arguments |= {"dtype": "float32", "enforce_eager": True}
    else:
        arguments |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.5}
        arguments |= {"load_format": "dummy"} if options.model is None else {}
    return Job(
        arguments=arguments | options.engine_args,
        transfer=None,
        rounds=[],
        prompts=options.prompts + options.checked,
        tokens=options.tokens,
        out_tokens=options.out_tokens,
        vocabulary=json.loads((model / "config.json").read_text())["vocab_size"],
        rate=options.rate,
        settle_s=options.settle_s,
    )


@contextlib.contextmanager
def connected(name: str, options: argparse.Namespace) -> Iterator[Connector]:
    """Start what a connector needs.

    Raises:
        RuntimeError: it cannot be; says why.
    """
    if name == "none":
        yield Connector(name)
        return
    if name == PEER:
        why = pegaflow.missing()
        if why:
            raise RuntimeError(why)
        with pegaflow.serve(options.pool) as address:
            host, _, port = address.rpartition(":")
            environ = (("PEGAFLOW_HOST", f"http://{host}"), ("PEGAFLOW_PORT", port))
            transfer = {"kv_connector": "PegaKVConnector", "kv_role": "kv_both"}
            yield Connector(
                name, transfer | {"kv_connector_module_path": "pegaflow.connector"}, environ
            )
        return
    with daemons.daemon("--pool-size", options.pool, "--http-addr", "off") as address:
        extra: dict[str, Any] = {"trikv.address": address, "bench.every": options.every}
        if options.tiny:
            extra["trikv.query_timeout_ms"] = 10_000  # a CPU that computes answers late
        if name == "trikv-held":
            extra["trikv.hold_ms"] = HOLD_MS
        transfer = {
            "kv_connector": "CheckedConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "bench.checked",
            "kv_connector_extra_config": extra,
        }
        yield Connector(name, transfer, has_notes=True)


def lives(connector: Connector, options: argparse.Namespace) -> list[list[Round]]:
    """The rounds of each engine process."""

    def rounds(name: str, *, resets: bool = True) -> list[Round]:
        timed = [Round(name, 0, options.prompts, resets)]
        if connector.has_notes:
            timed.append(Round(checked(name), options.prompts, options.checked, resets=True))
        return timed

    if connector.transfer is None:
        return [rounds(COLD) + rounds(OWN, resets=False)]
    return [rounds(COLD) + rounds(WARM), rounds(RESTARTED)]


def run_engine(job: Job, environ: dict[str, str], name: str, folder: Path, limit_s: float) -> None:
    """One engine process, its job and its rounds in `folder`/NAME.json and .jsonl.

    Raises:
        EngineError: it failed or took too long; rounds that had ended are there.
    """
    job_file, log_file = folder / f"{name}.json", folder / f"{name}.log"
    job.write(job_file)
    command = [sys.executable, "-m", "bench.ttft_engine", str(job_file)]
    with log_file.open("w") as log:
        child = subprocess.Popen(
            [*command, str(folder / f"{name}.jsonl")],
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,  # its own processes end with it
        )
    code: int | None = None  # it took too long
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if code != 0:
        tail = log_file.read_bytes()[-LOG_BYTES:].decode(errors="replace")
        why = f"took more than {limit_s:.0f} s" if code is None else f"ended with {code}"
        raise EngineError(f"{name}: the engine {why}\n{tail}")


def environment(connector: Connector, options: argparse.Namespace) -> dict[str, str]:
    """Of an engine: ours, with this folder first and hashes that all processes share."""
    folders = [str(ROOT)]
    if connector.name == PEER and options.pegaflow:
        folders.append(options.pegaflow)
    folders += filter(None, [os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": os.pathsep.join(folders), "PYTHONHASHSEED": "0"}
    return os.environ | ours | dict(connector.environ)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines, which may not be there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(options: argparse.Namespace, folder: Path, failures: list[str]) -> Iterator[Line]:
    """All connectors one after another; what goes wrong is appended to `failures`."""
    base = base_job(folder, options)
    verdict = Verdict(options.block_tokens, options.tokens, (), not options.tiny, failures)
    last = options.prompts + options.checked
    block_count = verdict.hit_tokens // options.block_tokens
    verdict.looked_at = places(range(options.prompts, last), block_count, options.every)
    for name in options.connectors:
        with contextlib.ExitStack() as stack:
            try:
                connector = stack.enter_context(connected(name, options))
            except (RuntimeError, OSError) as error:
                print(f"{name} is not measured: {error}", file=sys.stderr, flush=True)
                failures += [f"{name}: not measured"] if name != PEER else []
                continue
            rounds, seen = run_lives(connector, base, options, folder, failures)
        yield from verdict.lines(name, rounds, seen if connector.has_notes else None)


def run_lives(
    connector: Connector, base: Job, options: argparse.Namespace, folder: Path, failures: list[str]
) -> tuple[list[Measured], Bytes]:
    """Both engine processes of a connector, the second also where the first has failed."""
    measured, seen = [], Bytes()
    for number, rounds in enumerate(lives(connector, options)):
        name = f"{connector.name}-{number}"
        notes = folder / f"{name}.notes"
        transfer = connector.transfer
        if transfer is not None and connector.has_notes:
            extra = transfer["kv_connector_extra_config"] | {"bench.notes": str(notes)}
            transfer = transfer | {"kv_connector_extra_config": extra}
        fields = {field: getattr(base, field) for field in asdict(base)}
        job = Job(**fields | {"transfer": transfer, "rounds": rounds})
        environ = environment(connector, options)
        try:
            run_engine(job, environ, name, folder, options.engine_s)
        except EngineError as error:
            print(error, file=sys.stderr, flush=True)
            failures.append(f"{name}: an engine failed")
        measured += [Measured(**row) for row in read_lines(folder / f"{name}.jsonl")]
        seen.add(read_lines(notes))
    return measured, seen


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", action="store_true", help="JSON lines instead of a table")
    add("--connectors", default=",".join(CONNECTORS), help="in this order")
    add("--prompts", type=int, default=8)
    add("--tokens", type=int, default=10_000, help="of each prompt; --tiny: 600")
    add("--rate", type=float, default=4.0, help="prompts a second")
    add("--out-tokens", type=int, default=1)
    add("--layers", type=int, default=32, help="--tiny: 2")
    add("--model", help="folder of a model with weights, instead of dummy ones")
    add("--pegaflow", metavar="FOLDER", help="PegaFlow's unpacked wheel")
    add("--checked", type=int, default=2, help="further prompts whose bytes are compared")
    add("--every", type=int, default=64, help="compare every so many blocks; --tiny: 4")
    add("--block-tokens", type=int, default=16, help="of the engines; --tiny: 32")
    add("--pool", default="24gb", help="of each cache; --tiny: 256mb")
    add("--settle-s", type=float, default=1.5, help="pause after each round, in which saves end")
    add("--engine-s", type=float, default=400.0, help="time that an engine process gets")
    add("--engine-args", type=json.loads, default={}, help="JSON, for vLLM's AsyncEngineArgs")
    add("--tiny", action="store_true", help="a small model, for a CPU")
    known, _ = parser.parse_known_args()
    if known.tiny:
        parser.set_defaults(tokens=600, layers=2, every=4, block_tokens=32, pool="256mb")
    options = parser.parse_args()
    options.connectors = options.connectors.split(",")
    for name in options.connectors:
        if name not in CONNECTORS:
            parser.error(f"--connectors: {name} is none of {', '.join(CONNECTORS)}")
    if min(options.prompts, options.checked, options.every) < 1:
        parser.error("--prompts, --checked and --every: at least 1")
    return options


def main() -> None:
    """Measure and print."""
    options = parse()
    if options.pegaflow:
        sys.path.append(options.pegaflow)
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as own:
        folder = Path(os.environ.get("BENCH_LOGS", own))
        lines: Iterable[Line] = measure(options, Path(tempfile.mkdtemp(dir=folder)), failures)
        if options.json:
            print_json("ttft", lines)
        else:
            print_table(lines)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
