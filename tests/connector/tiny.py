"""A model folder of a few kilobytes: a configuration that vLLM accepts, and some weights."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def write_model(folder: Path, *, seed: int = 0, files: int = 1) -> Path:
    """Weights from `seed`, split over so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    random = np.random.default_rng(seed)
    tensors = {
        f"model.layers.{i}.weight": random.standard_normal((40, 30), dtype=np.float32)
        for i in range(6)
    }
    for number in range(files):
        part = {name: t for i, (name, t) in enumerate(tensors.items()) if i % files == number}
        save_file(part, folder / f"model-{number + 1}-of-{files}.safetensors")
    return folder
