"""Starts one vLLM engine, runs prompts greedily and writes what happened as JSON.

    python examples/run_engine.py MODEL --prompts PROMPTS.json --out RESULT.json
        [--kv-transfer-config JSON] [--together] [...]

`PROMPTS.json` is `[{"name": ..., "text": ...}, ...]`. Prompts run one after another, so that each
one's counters and its time to the first token are its own; `--together` hands all to the engine at
once and leaves both out. To connect to TriKV, pass the JSON of the README and set `TRIKV_SOCKET`
(or `TRIKV_HOST` and `TRIKV_PORT`). Engine logs go to stdout and stderr.
"""

import argparse
import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

DEFAULTS = {  # offline, silent, small; what is set already wins
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
}
SOURCES = "vllm:prompt_tokens_by_source"
LOCAL, EXTERNAL = "local_cache_hit", "external_kv_transfer"
PEERS_S_MAX = 300.0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Run prompts through one vLLM engine.")
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kv-transfer-config", type=json.loads, help="JSON, as for `vllm serve`")
    parser.add_argument("--max-tokens", type=int, default=24, help="made for each prompt")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--block-size", type=int, default=32, help="tokens; CPU: times 32")
    parser.add_argument(
        "--blocks", type=int, help="of the engine's own cache; few cause preemption"
    )
    parser.add_argument(
        "--no-prefix-caching", action="store_true", help="switch the engine's own off"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="all prompts at once")
    parser.add_argument("--until", type=Path, help="run the list until this file is there")
    parser.add_argument("--meet", type=Path, help="folder: start when --peers engines are there")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument(
        "--outage",
        type=Path,
        help="folder: after the first run write `before`, wait for `after`, forget the own cache "
        "and run again, as soon as a prompt is found outside",
    )
    return parser.parse_args()


def start_engine(options: argparse.Namespace) -> Any:
    """Return an `LLM` that has answered one prompt too short to be cached."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    more: dict[str, Any] = {}
    if options.kv_transfer_config is not None:
        more["kv_transfer_config"] = KVTransferConfig(**options.kv_transfer_config)
    if options.blocks is not None:
        more["num_gpu_blocks_override"] = options.blocks
    engine = LLM(
        model=options.model,
        dtype="float32",
        block_size=options.block_size,
        disable_log_stats=False,  # the counters below
        enable_prefix_caching=not options.no_prefix_caching,
        enforce_eager=True,
        max_model_len=options.max_model_len,
        tensor_parallel_size=options.tensor_parallel_size,
        **more,
    )
    engine.generate(["Hi"], SamplingParams(max_tokens=2), use_tqdm=False)
    return engine


def counters(engine: Any) -> dict[str, float]:
    """Read the engine's counters of prompt tokens, by `name{source}`."""
    found: dict[str, float] = {}
    for metric in engine.get_metrics():
        if hasattr(metric, "value") and ("prompt_tokens" in metric.name or "cache" in metric.name):
            source = metric.labels.get("source")
            key = f"{metric.name}{{{source}}}" if source else metric.name
            found[key] = found.get(key, 0) + metric.value
    return found


def describe(name: str, output: Any) -> dict[str, Any]:
    """Take from a `RequestOutput` what does not depend on other requests."""
    made = output.outputs[0]
    return {
        "name": name,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens or 0,
        "output": list(made.token_ids),
        "text": made.text,
        "finish_reason": made.finish_reason,
    }


def run(
    engine: Any, prompts: list[dict[str, str]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run all prompts; return one record each, in their order."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    texts = [prompt["text"] for prompt in prompts]
    if options.together:
        outputs = engine.generate(texts, greedy, use_tqdm=False)
        return [describe(p["name"], o) for p, o in zip(prompts, outputs, strict=True)]
    records = []
    for prompt in prompts:
        before = counters(engine)
        (output,) = engine.generate([prompt["text"]], greedy, use_tqdm=False)
        after = counters(engine)
        record = describe(prompt["name"], output)
        for key, source in (("local_tokens", LOCAL), ("external_tokens", EXTERNAL)):
            label = f"{SOURCES}{{{source}}}"
            record[key] = int(after.get(label, 0) - before.get(label, 0))
        record["ttft_ms"] = round(output.metrics.first_token_latency * 1000, 1)
        records.append(record)
    return records


def end_as_group() -> None:
    """As the leader of a session: let SIGTERM, or the end of our parent, end all our processes.

    vLLM's EngineCore outlives a front end that is killed.
    """
    if os.getsid(0) != os.getpid():
        return
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


def meet(folder: Path, peers: int) -> None:
    """Wait until `peers` engines have started, so that they run at the same time."""
    (folder / str(os.getpid())).touch()
    deadline_s = time.monotonic() + PEERS_S_MAX
    while len(list(folder.iterdir())) < peers:
        if time.monotonic() > deadline_s:
            message = f"the other engine did not start within {PEERS_S_MAX:.0f} s"
            raise TimeoutError(message)
        time.sleep(0.01)


def run_after_outage(
    engine: Any, prompts: list[dict[str, str]], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], float]:
    """Run again once somebody else's cache is back; returns also when that was seen, monotonic."""
    folder, deadline_s = options.outage, time.monotonic() + PEERS_S_MAX
    (folder / "before").touch()
    while not (folder / "after").exists():
        if time.monotonic() > deadline_s:
            message = f"nobody went on within {PEERS_S_MAX:.0f} s"
            raise TimeoutError(message)
        time.sleep(0.01)
    while True:
        engine.reset_prefix_cache()
        begun_s = time.monotonic()
        first = run(engine, prompts[:1], options)
        if first[0]["external_tokens"] or time.monotonic() > deadline_s:
            return first + run(engine, prompts[1:], options), begun_s


def main() -> None:
    """Start, run, write."""
    options = parse()
    end_as_group()
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    ranks = options.tensor_parallel_size
    if ranks > 1:  # CPU: else each rank wants NUMA nodes of its own, and all cores
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    prompts = json.loads(options.prompts.read_text())
    begun_s = time.monotonic()
    engine = start_engine(options)
    started_s = time.monotonic()
    if options.meet is not None:
        meet(options.meet, options.peers)
    requests = run(engine, prompts, options)
    while options.until is not None and not options.until.exists():
        requests += run(engine, prompts, options)
    found_s = 0.0
    if options.outage is not None:
        requests, found_s = run_after_outage(engine, prompts, options)
    result = {
        "found_s": found_s,
        "start_s": round(started_s - begun_s, 1),
        "run_s": round(time.monotonic() - started_s, 2),
        "requests": requests,
        "counters": counters(engine),
    }
    options.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
