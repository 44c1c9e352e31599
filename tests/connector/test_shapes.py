"""Which engines are refused, watched idly or served; and what a user may set."""

from types import SimpleNamespace
from typing import Any

import pytest

from trikv.connector.settings import read_settings
from trikv.connector.shapes import Abilities, refusal, shape, unsupported

NEW = Abilities(has_sleep_hooks=True, has_fixed_seed=True, has_mamba_hits=True)
OLD = Abilities(has_sleep_hooks=False, has_fixed_seed=False, has_mamba_hits=False)
SEEDED = {"PYTHONHASHSEED": "0"}


class FullAttentionSpec:
    block_size = 16
    page_size_bytes = 4096


class MLAAttentionSpec(FullAttentionSpec):
    real_page_size_bytes = 4000


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


class UniformTypeKVCacheSpecs:
    block_size = 16
    page_size_bytes = 8096

    def __init__(self) -> None:
        self.kv_cache_specs = {"a": FullAttentionSpec(), "b": MLAAttentionSpec()}


def groups(*specs: Any, layers: tuple[str, ...] = ("a", "b")) -> Any:
    found = [SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers)) for spec in specs]
    return SimpleNamespace(kv_cache_groups=found, num_blocks=100)


def engine(**changes: Any) -> Any:
    found = SimpleNamespace(
        model_config=SimpleNamespace(),
        cache_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    found.cache_config.prefix_caching_hash_algo = "sha256"
    for path, value in changes.items():
        part, _, name = path.partition("__")
        setattr(getattr(found, part), name, value)
    return found


@pytest.mark.parametrize(
    ("changes", "specs", "can", "environ", "words"),
    [
        ({}, FullAttentionSpec(), NEW, {}, ""),
        ({}, FullAttentionSpec(), OLD, SEEDED, ""),
        ({}, FullAttentionSpec(), OLD, {}, "set PYTHONHASHSEED"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, FullAttentionSpec(), NEW, {},
         "set PYTHONHASHSEED"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash_cbor"}, FullAttentionSpec(), NEW, {},
         "set PYTHONHASHSEED"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, FullAttentionSpec(), NEW, SEEDED,
         ""),
        ({"model_config__enable_sleep_mode": True}, FullAttentionSpec(), OLD, SEEDED,
         "--enable-sleep-mode"),
        ({"model_config__enable_sleep_mode": True}, FullAttentionSpec(), NEW, {}, ""),
        ({"model_config__is_encoder_decoder": True}, FullAttentionSpec(), NEW, {},
         "--kv-transfer-config"),
        ({}, MambaSpec(), OLD, SEEDED, "before vLLM 0.23"),
        ({}, MambaSpec(), NEW, {}, ""),
        ({}, FullAttentionSpec(), NEW, {"PYTORCH_CUDA_ALLOC_CONF": "a:b,Expandable_Segments: True"},
         "PYTORCH_CUDA_ALLOC_CONF"),
        ({}, FullAttentionSpec(), NEW, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
         "in PYTORCH_ALLOC_CONF"),
        ({}, FullAttentionSpec(), NEW, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, ""),
    ],
)  # fmt: skip
def test_refusals(
    changes: dict[str, Any], specs: Any, can: Abilities, environ: dict[str, str], words: str
) -> None:
    why = refusal(engine(**changes), groups(specs), can, environ)
    assert bool(why) is bool(words)
    assert words in why
    assert "\n" not in why


@pytest.mark.parametrize(
    ("changes", "specs", "words"),
    [
        ({}, [FullAttentionSpec()], ""),
        ({}, [MLAAttentionSpec()], ""),
        ({}, [UniformTypeKVCacheSpecs()], ""),
        ({"parallel_config__tensor_parallel_size": 2}, [FullAttentionSpec()], ""),
        ({"parallel_config__tensor_parallel_size": 64}, [MLAAttentionSpec()], ""),
        ({"parallel_config__tensor_parallel_size": 65}, [FullAttentionSpec()], "64 ranks"),
        ({"parallel_config__nnodes_within_dp": 2}, [FullAttentionSpec()], "several hosts"),
        ({"parallel_config__pipeline_parallel_size": 2}, [FullAttentionSpec()], "pipeline par"),
        ({"parallel_config__prefill_context_parallel_size": 2}, [FullAttentionSpec()],
         "prefill-context parallelism"),
        ({"parallel_config__decode_context_parallel_size": 4}, [MLAAttentionSpec()],
         "decode-context parallelism"),
        ({}, [FullAttentionSpec(), SlidingWindowSpec()], "2 cache groups"),
        ({}, [], "0 cache groups"),
        ({}, [SlidingWindowSpec()], "SlidingWindowSpec"),
        ({}, [MambaSpec()], "MambaSpec"),
        ({"cache_config__calculate_kv_scales": True}, [FullAttentionSpec()], "calculate_kv_scales"),
        ({"model_config__enable_sleep_mode": True}, [FullAttentionSpec()], "sleep mode"),
    ],
)  # fmt: skip
def test_unsupported(changes: dict[str, Any], specs: list[Any], words: str) -> None:
    why = unsupported(engine(**changes), groups(*specs))
    assert bool(why) is bool(words)
    assert words in why


def test_shape_is_the_groups_and_by_layer() -> None:
    found = shape(engine(), groups(UniformTypeKVCacheSpecs()))
    assert (found.block_tokens, found.block_count) == (16, 100)
    assert found.page_bytes == {"a": 4096, "b": 4000}
    assert (found.rank_count, found.replicas) == (1, 1)


MLA, FULL = MLAAttentionSpec(), FullAttentionSpec()
MIXED = UniformTypeKVCacheSpecs()  # a draft with heads beside a latent


@pytest.mark.parametrize(
    ("spec", "ranks", "use_mla", "told", "replicas"),
    [
        # Before 0.31: by what the layers are.
        (MLA, 8, True, None, 8),
        (MLA, 1, True, None, 1),
        (MLA, 8, False, None, 1),
        (FULL, 8, False, None, 1),
        (FULL, 8, True, None, 1),
        (MIXED, 8, True, None, 1),
        # Since: by what vLLM says, whatever we would think.
        (MLA, 8, True, 8, 8),
        (MLA, 8, True, 1, 1),
        (MIXED, 8, True, 1, 1),
        (FULL, 8, False, 2, 2),
        # What cannot be true is not believed.
        (MLA, 8, True, 3, 1),
        (MLA, 8, True, 0, 1),
        (MLA, 2, True, 8, 1),
    ],
)
def test_ranks_hold_the_same_bytes_only_where_vllm_says_so(
    spec: Any,
    ranks: int,
    use_mla: bool,  # noqa: FBT001
    told: int | None,
    replicas: int,
) -> None:
    found = groups(spec)
    if told is not None:
        found.kv_tp_replicas = told
    changes = {"parallel_config__tensor_parallel_size": ranks, "model_config__use_mla": use_mla}
    known = shape(engine(**changes), found)
    assert (known.rank_count, known.replicas) == (ranks, replicas)


def test_hidden_states_that_are_kept_as_a_latent_are_not_taken_for_one() -> None:
    config = engine(parallel_config__tensor_parallel_size=4, model_config__use_mla=True)
    config.speculative_config = SimpleNamespace(method="deepseek_mtp")
    assert shape(config, groups(MLA)).replicas == 4
    config.speculative_config = SimpleNamespace(method="extract_hidden_states")
    assert shape(config, groups(MLA)).replicas == 1


def test_settings_have_defaults() -> None:
    found = read_settings({"someone.else": 1})
    assert (found.address, found.tenant, found.query_s, found.save_s) == (None, "", 0.1, 2.0)
    assert read_settings(None) == found


def test_settings_are_read() -> None:
    found = read_settings(
        {"trikv.address": "unix:/x", "trikv.tenant": "t", "trikv.query_timeout_ms": 50}
    )
    assert (found.address, found.tenant, found.query_s) == ("unix:/x", "t", 0.05)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"trikv.tennant": "t"}, "trikv.tennant is unknown"),
        ({"trikv.tenant": 5}, "trikv.tenant must be a text"),
        ({"trikv.tenant": "x" * 2000}, "at most 1024 bytes"),
        ({"trikv.query_timeout_ms": "100"}, "trikv.query_timeout_ms must be a number"),
        ({"trikv.query_timeout_ms": -1}, "from 0 to"),
        ({"trikv.save_timeout_ms": 1e9}, "from 0 to"),
        ({"trikv.save_timeout_ms": True}, "must be a number"),
    ],
)
def test_wrong_settings_are_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_settings(extra)
