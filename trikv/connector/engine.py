"""What this vLLM is and can do, found by looking at it instead of comparing version numbers.

Decided here: what each ability is recognised by. vLLM is imported when asked, so that importing
this file needs none.
"""

import inspect
from importlib import import_module, metadata
from typing import Any, Final

from trikv.connector.shapes import Abilities

PROBE_BLOCKS: Final = 3
LAYER_MODES: Final = frozenset({"NONE", "PIECEWISE"})
"""Of CUDA graphs: those that leave each attention layer to Python."""


def abilities(base: type) -> Abilities:
    """What vLLM can do, by what its connector base and its hashing have."""
    hashing = import_module("vllm.v1.core.kv_cache_utils")
    scheduling = import_module("vllm.v1.core.sched.output")
    return Abilities(
        has_sleep_hooks=hasattr(base, "supports_sleep_mode"),
        has_fixed_seed=hasattr(hashing, "resolve_none_hash_seed"),
        has_mamba_hits=hasattr(base, "set_xfer_handshake_metadata_pp_aware"),
        has_deferred_frees=hasattr(base, "has_pending_push_work"),
        has_loads_first=hasattr(base, "register_cross_layers_kv_cache")
        or hasattr(scheduling.SchedulerOutput, "has_sync_kv_loads"),
    )


def hash_generation(base: type) -> str:
    """How salts, images and adapters enter a block hash: as tagged tuples since 0.31."""
    return "tagged" if hasattr(base, "get_mem_pool_context") else "plain"


def hash_probe(vllm_config: Any, block_tokens: int) -> str:  # noqa: ANN401
    """The last block hash of a fixed token list, by vLLM's own hasher.

    Engines that hash differently then differ in their namespace, instead of never hitting.
    """
    hashing = import_module("vllm.v1.core.kv_cache_utils")
    function = import_module("vllm.utils.hashing").get_hash_fn_by_name(
        vllm_config.cache_config.prefix_caching_hash_algo
    )
    hashing.init_none_hash(function)  # the engine does the same later, with the same result
    maker = hashing.get_request_block_hasher
    lookahead = [getattr(vllm_config, "num_hash_lookahead_tokens", 0)]
    hasher = maker(
        block_tokens, function, *lookahead[: len(inspect.signature(maker).parameters) - 2]
    )
    request = import_module("vllm.v1.request").Request(
        "trikv-probe",
        list(range(1, PROBE_BLOCKS * block_tokens + 2)),
        import_module("vllm").SamplingParams(max_tokens=1),
        None,
        block_hasher=hasher,
    )
    return bytes(request.block_hashes[-1]).hex()


def forward_mode(context: Any) -> str:  # noqa: ANN401
    """How a step runs its layers, by its forward context; empty: hooks cannot be counted on.

    A replayed full graph calls no hook; runner V2 shows none of it but a context without metadata.
    Microbatches call them in threads, for a part of the tokens each.
    """
    mode = str(getattr(getattr(context, "cudagraph_runtime_mode", None), "name", ""))
    is_whole = getattr(context, "ubatch_slices", True) is None
    has_work = bool(getattr(context, "attn_metadata", None))
    return mode if mode in LAYER_MODES and is_whole and has_work else ""


def rank(vllm_config: Any) -> int:  # noqa: ANN401
    """Which of the tensor-parallel ranks this worker is."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return 0
    state = import_module("vllm.distributed.parallel_state")
    return int(state.get_tensor_model_parallel_rank())


def hit_source() -> Any:  # noqa: ANN401
    """Where hits come from, for vLLM's statistics since 0.32: the daemon's host memory."""
    try:
        return import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource.HOST
    except (ImportError, AttributeError):
        return None


def software() -> str:
    """Both versions, for the daemon's log."""
    version = getattr(import_module("vllm"), "__version__", "unknown")
    return f"trikv {_version('trikv')}, vllm {version}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
