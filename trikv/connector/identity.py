"""What a block's bytes depend on, as named texts: engines exchange blocks iff all are equal.

Decided here: the fields, and how weights are told apart without reading them all: fine-tunes of one
base have equal names and shapes, so some bytes of every tensor count; the folder they lie in does
not. This file does not import vLLM: it reads attributes of its configuration, which versions may
lack.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PAGE_ORDER: Final = "1"
"""Grows when `layouts` orders a page's pieces in another way."""
SAMPLE_BYTES: Final = 64
SAMPLES: Final = 8
HEADER_BYTES_MAX: Final = 100_000_000  # as the format itself allows
VOLATILE: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
SIDE_FILES: Final = ("quantize_config.json", "hf_quant_config.json", "quant_config.json")
LENGTH_DEPENDENT_ROPE: Final = ("longrope", "su", "dynamic")
COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class IdentityError(Exception):
    """It cannot be told which weights these are; the message names the setting that helps."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a model's weights come from."""

    model: str  # folder, file or hub name
    commit: str | None = None  # of the hub, where it was loaded from one
    load_format: str = "auto"
    seed: int = 0
    software: str = ""  # what fills dummy weights


def digest(*parts: bytes | str) -> str:
    """One short name for all parts; their borders count."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()[:32]


def canonical(value: object) -> str:
    """JSON with sorted keys; what JSON lacks becomes text, what means nothing is left out."""
    return json.dumps(_cleaned(value), sort_keys=True, default=str, ensure_ascii=True)


def _cleaned(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(k): _cleaned(v) for k, v in value.items() if str(k) not in VOLATILE}
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    return value


def weights_identity(weights: Weights) -> str:
    """A text that differs when the weights do, and does not when only their place does.

    Raises:
        IdentityError: nothing but a name is known of them.
    """
    if weights.load_format == "dummy":
        return f"dummy:{weights.software}:seed {weights.seed}"
    place = Path(weights.model)
    if not place.exists():
        if weights.commit and COMMIT.fullmatch(weights.commit):
            return f"revision:{weights.commit}:{weights.load_format}"
        raise IdentityError(
            f"it is unknown which revision of {weights.model} is loaded: set --revision to a"
            " commit, or kv_connector_extra_config trikv.weights_epoch to a text that changes"
            " with the weights"
        )
    tensors = sorted(place.glob("*.safetensors")) if place.is_dir() else []
    if tensors:
        return f"content:{_content(place, tensors)}"
    return f"files:{digest(weights.load_format, str(weights.seed), *_listing(place))}"


def _content(folder: Path, files: list[Path]) -> str:
    """Configuration, names, shapes, some bytes of every tensor, however split into files."""
    parts: list[bytes | str] = []
    for name in ("config.json", *SIDE_FILES):
        file = folder / name
        if file.is_file():
            parts += [name, canonical(json.loads(file.read_bytes()))]
    found = sorted(sample for file in files for sample in _samples(file))
    return digest(*parts, *(part for sample in found for part in sample))


def _samples(file: Path) -> Iterator[tuple[str, str, bytes]]:
    """Name, description and sampled bytes of each tensor in a safetensors file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > HEADER_BYTES_MAX:
            raise IdentityError(f"{file} is no safetensors file")
        header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            what = f"{entry['dtype']}{entry['shape']}"
            yield name, what, b"".join(_read(stream, 8 + length + begin, end - begin))


def _read(stream: Any, begin: int, size: int) -> Iterator[bytes]:  # noqa: ANN401
    """All of a small run, else its first and last bytes and some between."""
    if size <= SAMPLE_BYTES * SAMPLES:
        stream.seek(begin)
        yield stream.read(size)
        return
    for number in range(SAMPLES):
        stream.seek(begin + (size - SAMPLE_BYTES) * number // (SAMPLES - 1))
        yield stream.read(SAMPLE_BYTES)


def _listing(place: Path) -> list[str]:
    """Path, size and time of each file, for formats that are not looked into."""
    files = sorted(f for f in place.iterdir() if f.is_file()) if place.is_dir() else [place]
    stats = [(file, file.stat()) for file in files]
    return [f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats]


def model_weights(model_config: Any, load_config: Any, software: str) -> Weights:  # noqa: ANN401
    """What vLLM's configuration says about where weights come from."""
    commit = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
    revision = getattr(model_config, "revision", None)
    if not commit and revision and COMMIT.fullmatch(str(revision)):
        commit = revision
    return Weights(
        # Object stores keep weights apart from the configuration.
        model=str(getattr(model_config, "model_weights", "") or model_config.model),
        commit=str(commit) if commit else None,
        load_format=_name(getattr(load_config, "load_format", "auto")),
        seed=int(getattr(model_config, "seed", 0) or 0),
        software=software,
    )


def _name(value: object) -> str:
    return str(getattr(value, "value", value)).removeprefix("torch.")


def _known(weights: Weights, epoch: str) -> str:
    """The identity, or with an epoch given by the user the name alone."""
    try:
        return weights_identity(weights)
    except IdentityError:
        if not epoch:
            raise
        return f"named:{weights.model}"


def _config_digest(model_config: Any) -> str:  # noqa: ANN401
    hf_config = model_config.hf_config
    content = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    text = canonical(content)
    if any(f'"{kind}"' in text for kind in LENGTH_DEPENDENT_ROPE):
        text += f" max_model_len {model_config.max_model_len}"
    return digest(
        text, _name(getattr(model_config, "quantization", None)), _name_of_window(model_config)
    )


def _name_of_window(model_config: Any) -> str:  # noqa: ANN401
    return "no window" if getattr(model_config, "disable_sliding_window", False) else ""


def _label(model_config: Any) -> str:  # noqa: ANN401
    """What people call the model; no part of the identity."""
    name = getattr(model_config, "served_model_name", None) or model_config.model
    if isinstance(name, list | tuple):
        name = name[0]
    return str(name).rstrip("/").rpartition("/")[2] or str(name)


def _draft(vllm_config: Any, software: str, epoch: str) -> str:  # noqa: ANN401
    """The draft model: its layers' keys and values lie in the same blocks."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return "none"
    method = _name(getattr(speculative, "method", ""))
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or not getattr(draft, "model", None):
        return method
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    weights = _known(model_weights(draft, load, software), epoch)
    return f"{method}:{_config_digest(draft)}:{weights}"


def _is_cut_from_one(model_config: Any, *weights: str) -> bool:  # noqa: ANN401
    """Whether the same weights come out however many ranks they are cut for.

    Made-up ones are drawn a rank, and what is quantized at load is quantized after the cut.
    """
    kept = getattr(model_config.hf_config, "quantization_config", None)
    return not any("dummy:" in one for one in weights) and (
        getattr(model_config, "quantization", None) is None or kept is not None
    )


def fields(
    vllm_config: Any,  # noqa: ANN401
    *,
    software: str,
    hash_probe: str,
    hash_generation: str,
    tenant: str = "",
    weights_epoch: str = "",
    replicas: int = 1,
) -> dict[str, str]:
    """Everything that a block's bytes and names depend on, less the geometry that workers register.

    Args:
        vllm_config: of the engine.
        software: that fills dummy weights.
        hash_probe: tells how blocks are hashed.
        hash_generation: likewise.
        tenant: a text of the user's.
        weights_epoch: likewise.
        replicas: so many tensor-parallel ranks hold the same bytes.

    Raises:
        IdentityError: the weights cannot be told from others.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    weights = _known(model_weights(model, vllm_config.load_config, software), weights_epoch)
    attention = getattr(vllm_config, "attention_config", None)
    backend = getattr(attention, "backend", None) or os.environ.get("VLLM_ATTENTION_BACKEND")
    layout = getattr(cache, "kv_cache_layout", None) or os.environ.get("VLLM_KV_CACHE_LAYOUT")
    draft = _draft(vllm_config, software, weights_epoch)
    is_cut = _is_cut_from_one(model, weights, draft)
    return {
        "label": _label(model),
        "model_config": _config_digest(model),
        "weights": weights,
        "weights_epoch": weights_epoch,
        "tenant": tenant,
        "dtype": _name(model.dtype),
        "cache_dtype": _name(cache.cache_dtype),
        "cache_dtype_skips": ",".join(getattr(cache, "kv_cache_dtype_skip_layers", None) or ()),
        "block_tokens": str(cache.block_size),
        "page_order": PAGE_ORDER,
        "attention": _name(backend) if backend else "auto",
        "kv_layout": _name(layout) if layout else "auto",
        "device": _name(getattr(getattr(vllm_config, "device_config", None), "device_type", "")),
        "tensor_parallel": str(parallel.tensor_parallel_size // (replicas if is_cut else 1)),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "prefill_context_parallel": str(getattr(parallel, "prefill_context_parallel_size", 1)),
        "decode_context_parallel": str(getattr(parallel, "decode_context_parallel_size", 1)),
        "hash_algorithm": _name(cache.prefix_caching_hash_algo),
        "hash_lookahead": str(getattr(vllm_config, "num_hash_lookahead_tokens", 0) or 0),
        "hash_generation": hash_generation,
        "hash_probe": hash_probe,
        "draft": draft,
    }
