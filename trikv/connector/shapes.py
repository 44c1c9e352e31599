"""Which engines the connector serves, which it watches idly, and which it refuses to start in.

Decided here: refusals (a setting that would make the cache lie or never hit), and shapes that are
not supported yet. This file does not import vLLM; it reads attributes that versions may lack.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trikv.wire import RANKS_MAX

FULL_ATTENTION: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "TQFullAttentionSpec"})
"""Blocks of these stay with their request until it ends; others give blocks back in mid-request."""
RANDOM_HASHES: Final = ("xxhash", "xxhash_cbor")
ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""PyTorch reads either; vLLM itself looks at the second only."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What this vLLM can do, found by looking at it, not by its number."""

    has_sleep_hooks: bool  # 0.33
    has_fixed_seed: bool  # 0.29
    has_mamba_hits: bool  # 0.23
    has_deferred_frees: bool = True  # 0.24
    has_loads_first: bool = True  # a step begins the loads that it needs before its forward


@dataclass(frozen=True, slots=True)
class Shape:
    """What the halves need to know of an engine that is served."""

    block_tokens: int
    block_count: int
    page_bytes: Mapping[str, int]  # by layer
    rank_count: int = 1
    replicas: int = 1  # so many ranks in a row hold the same bytes


def refusal(
    vllm_config: Any,  # noqa: ANN401
    kv_cache_config: Any,  # noqa: ANN401
    can: Abilities,
    environ: Mapping[str, str],
) -> str:
    """Why the engine must not start like this, naming the setting; empty: it may."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    if getattr(model, "enable_sleep_mode", False) and not can.has_sleep_hooks:
        return (
            "TriKV cannot follow sleep mode before vLLM 0.33, which moves the KV cache:"
            " start without --enable-sleep-mode"
        )
    for variable in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environ.get(variable, "").replace(" ", "").lower():
            return (
                "TriKV cannot share memory of expandable segments:"
                f" start without expandable_segments:True in {variable}"
            )
    if not environ.get("PYTHONHASHSEED") and (
        not can.has_fixed_seed or algorithm.removesuffix("_cbor") == "xxhash"
    ):
        why = (
            f"--prefix-caching-hash-algo {algorithm}" if can.has_fixed_seed else "vLLM before 0.29"
        )
        return f"with {why} block hashes differ at each start: set PYTHONHASHSEED, e.g. to 0"
    if getattr(model, "is_encoder_decoder", False):
        return "TriKV does not support encoder-decoder models: start without --kv-transfer-config"
    if not can.has_mamba_hits and any("Mamba" in name for name in _kinds(kv_cache_config)):
        return (
            "TriKV cannot be used with mamba layers before vLLM 0.23:"
            " start without --kv-transfer-config"
        )
    return ""


def unsupported(vllm_config: Any, kv_cache_config: Any) -> str:  # noqa: ANN401
    """Why nothing is cached in this engine; empty: it is served."""
    split = _unsupported_split(vllm_config.parallel_config)
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or ()
    if split:
        return split
    if len(groups) != 1:
        return f"{len(groups)} cache groups are not supported yet"
    odd = sorted(set(_kinds(kv_cache_config)) - FULL_ATTENTION)
    if odd:
        return f"cache groups of {', '.join(odd)} are not supported yet"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return (
            "KV scales that are measured at run time (calculate_kv_scales) differ between engines"
        )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return "sleep mode is not supported yet"
    return ""


def _unsupported_split(parallel: Any) -> str:  # noqa: ANN401
    for name in ("pipeline", "prefill-context", "decode-context"):
        if (getattr(parallel, f"{name.replace('-', '_')}_parallel_size", 1) or 1) > 1:
            return f"{name} parallelism is not supported yet"
    if parallel.tensor_parallel_size > RANKS_MAX:
        return f"an engine of more than {RANKS_MAX} ranks is not supported"
    if (getattr(parallel, "nnodes_within_dp", 1) or 1) > 1:
        return "ranks on several hosts are not supported: a daemon serves those of its own"
    return ""


def shape(vllm_config: Any, kv_cache_config: Any) -> Shape:  # noqa: ANN401
    """The one group's block and its bytes in each layer, and who holds them."""
    (group,) = kv_cache_config.kv_cache_groups
    specs = {name: _spec(group.kv_cache_spec, name) for name in group.layer_names}
    return Shape(
        block_tokens=int(group.kv_cache_spec.block_size),
        block_count=int(kv_cache_config.num_blocks),
        # A padded page is handed over without its padding.
        page_bytes={
            name: int(getattr(spec, "real_page_size_bytes", None) or spec.page_size_bytes)
            for name, spec in specs.items()
        },
        rank_count=int(vllm_config.parallel_config.tensor_parallel_size),
        replicas=_replicas(vllm_config, kv_cache_config),
    )


def _replicas(vllm_config: Any, kv_cache_config: Any) -> int:  # noqa: ANN401
    """How many tensor-parallel ranks in a row hold the same bytes, as vLLM itself says; else 1.

    From 0.31 on it says so in numbers. Before, every layer being MLA's says it: its latent has no
    heads to split, and vLLM's own connectors take it as equal on all ranks. Hidden states that are
    kept as if they were MLA's are not meant. With grouped heads fewer than ranks nothing is said of
    which head a rank has: models decide that, and layers may differ.
    """
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    told = getattr(kv_cache_config, "kv_tp_replicas", None)
    if told is None:
        speculative = getattr(vllm_config, "speculative_config", None)
        is_latent = (
            bool(getattr(vllm_config.model_config, "use_mla", False))
            and set(_kinds(kv_cache_config)) == {"MLAAttentionSpec"}
            and getattr(speculative, "method", None) != "extract_hidden_states"
        )
        told = ranks if is_latent else 1
    return told if told >= 1 and ranks % told == 0 else 1


def _spec(spec: Any, layer: str) -> Any:  # noqa: ANN401
    """A layer's own spec where the group holds several of one kind."""
    return getattr(spec, "kv_cache_specs", {}).get(layer, spec)


def _kinds(kv_cache_config: Any) -> list[str]:  # noqa: ANN401
    """Class names of all layers' specs."""
    return [
        type(_spec(group.kv_cache_spec, layer)).__name__
        for group in getattr(kv_cache_config, "kv_cache_groups", None) or ()
        for layer in group.layer_names
    ]
