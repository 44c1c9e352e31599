"""One real vLLM engine for `bench.ttft`: starts, runs rounds of prompts, writes what it measured.

    python -m bench.ttft_engine JOB.json OUT.jsonl

A process of its own, so that nothing of an engine is left for the next one. One line is written as
each round ends. This file does not know daemons or what is expected of the figures.
"""

import asyncio
import dataclasses
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from examples.run_engine import DEFAULTS, end_as_group

SEED = 7
RESET_TRIES = 100
FIRST_TOKEN_ID = 10  # below are special ones


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """Prompts that arrive one after another at the job's rate.

    Attributes:
        first: number of the first prompt.
        resets: the engine forgets its own prefix cache before.
    """

    name: str
    first: int
    count: int
    resets: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What one engine process does.

    Attributes:
        arguments: for vLLM's `AsyncEngineArgs`.
        transfer: for its `KVTransferConfig`; None: no connector.
        prompts: how many there are; one more is drawn, to warm the engine up.
        vocabulary: token ids are below.
        rate: prompts a second.
        settle_s: pause after each round, in which saves end.
    """

    arguments: dict[str, Any]
    transfer: dict[str, Any] | None
    rounds: list[Round]
    prompts: int
    tokens: int
    out_tokens: int
    vocabulary: int
    rate: float
    settle_s: float

    @classmethod
    def read(cls, path: Path) -> "Job":
        """From a file that `write` has made."""
        fields = json.loads(path.read_text())
        fields["rounds"] = [Round(**one) for one in fields["rounds"]]
        return cls(**fields)

    def write(self, path: Path) -> None:
        """Into a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)))


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One round, by prompt."""

    name: str
    first: int
    ttft_ms: list[float]
    cached_tokens: list[int]
    outputs: list[list[int]]


def draw_prompts(job: Job) -> list[list[int]]:
    """The same ones in every process; the last is the one that warms up."""
    ids = random.Random(SEED)
    choices = range(FIRST_TOKEN_ID, job.vocabulary)
    return [ids.choices(choices, k=job.tokens) for _ in range(job.prompts + 1)]


def start(job: Job) -> Any:  # noqa: ANN401  # vLLM's
    """Start the engine and its processes."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415  # once the environment is set
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    more = {} if job.transfer is None else {"kv_transfer_config": KVTransferConfig(**job.transfer)}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**job.arguments, **more))


async def ask(
    engine: Any,  # noqa: ANN401
    prompt: list[int],
    out_tokens: int,
    name: str,
) -> tuple[float, int, list[int]]:
    """Milliseconds to the first token, prompt tokens that were cached, and the output."""
    from vllm import SamplingParams  # noqa: PLC0415

    greedy = SamplingParams(temperature=0, max_tokens=out_tokens, ignore_eos=True, detokenize=False)
    ttft_ms, cached, output = 0.0, 0, []
    begin_s = time.perf_counter()
    async for answer in engine.generate({"prompt_token_ids": prompt}, greedy, name):
        if not output:
            ttft_ms = (time.perf_counter() - begin_s) * 1e3
        output = list(answer.outputs[0].token_ids)
        cached = answer.num_cached_tokens or 0
    return ttft_ms, cached, output


async def forget(engine: Any) -> None:  # noqa: ANN401
    """Empty the engine's own prefix cache, which waits for blocks that are still in use."""
    for _ in range(RESET_TRIES):
        if await engine.reset_prefix_cache() is not False:
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("the engine did not give up its own prefix cache")


async def run_round(
    engine: Any,  # noqa: ANN401
    job: Job,
    round_: Round,
    prompts: list[list[int]],
) -> Measured:
    """Send the prompts at the rate, and wait for all answers."""
    if round_.resets:
        await forget(engine)
    asked = []
    for number in range(round_.first, round_.first + round_.count):
        name = f"{round_.name}/{number}/{os.getpid()}-{time.time_ns()}"  # unique on this machine
        asked.append(asyncio.create_task(ask(engine, prompts[number], job.out_tokens, name)))
        await asyncio.sleep(1 / job.rate)
    answers = await asyncio.gather(*asked)
    await asyncio.sleep(job.settle_s)
    times, cached, outputs = (list(column) for column in zip(*answers, strict=True))
    return Measured(round_.name, round_.first, times, cached, outputs)


async def run(job: Job, out: Path) -> None:
    """Start the engine, warm it up, run all rounds."""
    prompts = draw_prompts(job)
    begin_s = time.perf_counter()
    engine = start(job)
    print(f"ready after {time.perf_counter() - begin_s:.1f} s", flush=True)
    try:
        await ask(engine, prompts[-1], job.out_tokens, f"warm-up/{os.getpid()}-{time.time_ns()}")
        with out.open("w") as file:
            for round_ in job.rounds:
                measured = await run_round(engine, job, round_, prompts)
                file.write(json.dumps(dataclasses.asdict(measured)) + "\n")
                file.flush()
    finally:
        engine.shutdown()


def main() -> None:
    """Read the job, run it."""
    end_as_group()
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    job, out = (Path(one) for one in sys.argv[1:])
    asyncio.run(run(Job.read(job), out))


if __name__ == "__main__":
    main()
