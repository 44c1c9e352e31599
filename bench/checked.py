"""The connector, noting what some blocks hold when they are saved and when a load has ended.

Only for requests whose id begins with `checked`, since to look it waits for the GPU. Two settings
in `kv_connector_extra_config`: `bench.notes`, a file that gets one JSON object a block, and
`bench.every`: every so many blocks of a prompt are looked at.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.block_bytes import BlockBytes
from trikv.connector.calls import unpack
from trikv.connector.connector import TriKVConnector
from trikv.connector.jobs import LoadJob, SaveJob

PREFIX = "checked"


class CheckedConnector(TriKVConnector):
    """Notes digests of blocks by their position in the prompt.

    A hook of this class that fails ends the engine: nothing would be known of the bytes.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:  # noqa: ANN401
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._notes = Path(extra["bench.notes"])
        self._every = int(extra["bench.every"])
        self._bytes: BlockBytes | None = None
        self._loads: dict[str, LoadJob] = {}  # under way
        self._ended: list[LoadJob] = []  # in this step

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Plan how to read what the connector offers."""
        super().register_kv_caches(kv_caches)
        pages = self._shape.page_bytes
        tensors = {name: kv_caches[name] for name in pages if name in kv_caches}
        self._bytes = BlockBytes(tensors, self._shape.block_count, pages)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Keep the jobs until their loads have ended."""
        self._loads |= {job.request: job for job in self._jobs.loads if _is_checked(job)}
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """Note the blocks that the step gives to a save: its forward is queued by now."""
        super().wait_for_save()
        self._note("save", (job for job in self._jobs.saves if _is_checked(job)), frozenset())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Find the loads that have ended: those reported, and those that this step waited for."""
        sent, loaded = super().get_finished(finished_req_ids)
        held = {request for request, job in self._loads.items() if job.is_held}
        ended = held | (self._loads.keys() & (loaded or set()))
        self._ended += [self._loads.pop(request) for request in ended]
        return sent, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Note the blocks that have arrived."""
        failed: set[int] = super().get_block_ids_with_load_errors()
        ended, self._ended = self._ended, []
        self._note("load", ended, frozenset(failed))
        return failed

    def _note(self, kind: str, jobs: Iterable[LoadJob | SaveJob], without: frozenset[int]) -> None:
        rows = [
            (job, job.first + at, block)
            for job in jobs
            for at, block in enumerate(unpack(job.blocks))
            if (job.first + at) % self._every == 0 and block not in without
        ]
        if not rows:
            return
        assert self._bytes is not None
        self._bytes.synchronise()
        with self._notes.open("a") as file:
            for job, position, block in rows:
                note = {"kind": kind, "request": job.request, "position": position}
                note["is_held"] = isinstance(job, LoadJob) and job.is_held
                file.write(json.dumps(note | {"digest": self._bytes.digest(block)}) + "\n")


def _is_checked(job: LoadJob | SaveJob) -> bool:
    return job.request.startswith(PREFIX)
