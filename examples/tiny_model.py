"""Writes a small model with random weights that vLLM can serve: nothing is downloaded.

    python examples/tiny_model.py FOLDER [--arch llama|qwen3] [--seed N] [--name NAME]

The tokenizer knows bytes only, so one character of English text is one token. Weights are drawn
wide: with the usual small ones a random model repeats itself whatever it read, with these the next
token depends on every token before it, and a wrong byte in the cache shows in the output.
The same arguments give the same files, byte for byte.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SPECIAL = ("<pad>", "<s>", "</s>")
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
HEADS = 4
KV_HEADS = 2
WIDTH = 1.6  # of a weight row, times 1/sqrt(inputs); 1.0 would keep the size of what flows through


@dataclass(frozen=True, slots=True)
class Model:
    """What is written; equal values give equal files."""

    arch: str = "llama"
    seed: int = 0
    name: str = "tiny"
    layers: int = 4
    hidden: int = 128
    tokens_max: int = 4096

    @property
    def head(self) -> int:
        """Size of one attention head."""
        return self.hidden // HEADS


def write_model(folder: Path, model: Model) -> None:
    """Fill `folder` with configuration, tokenizer and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    vocabulary = -(-tokenizer.get_vocab_size() // 64) * 64
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.tokens_max,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT,
            **texts,
        },
    )
    write_json(folder / "config.json", configuration(model, vocabulary))
    write_json(
        folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    )
    weights = dict(draw_weights(model, vocabulary))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write `content` so that people can read it."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def byte_tokenizer() -> Tokenizer:
    """Build a tokenizer with one token a byte and no merges."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def configuration(model: Model, vocabulary: int) -> dict[str, object]:
    """Describe the model as `transformers` does."""
    return {
        "_name_or_path": model.name,
        "architectures": [ARCHITECTURES[model.arch]],
        "model_type": model.arch,
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": 2 * model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": model.head,
        "max_position_embeddings": model.tokens_max,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def draw_weights(model: Model, vocabulary: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield every tensor by its name in the checkpoint, always in the same order."""
    random = np.random.default_rng(model.seed)
    hidden, inner = model.hidden, 2 * model.hidden
    query, key = HEADS * model.head, KV_HEADS * model.head

    def draw(rows: int, columns: int, width: float) -> npt.NDArray[np.float32]:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(width)

    def ones(size: int) -> npt.NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    yield "model.embed_tokens.weight", draw(vocabulary, hidden, 1.0)
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, (rows, columns) in shapes.items():
            yield f"{at}{name}.weight", draw(rows, columns, WIDTH / hidden**0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", ones(hidden)
        if model.arch == "qwen3":
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                yield f"{at}{name}.weight", ones(model.head)
    yield "model.norm.weight", ones(hidden)
    yield "lm_head.weight", draw(vocabulary, hidden, WIDTH / hidden**0.5)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Write a small random model for vLLM.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="llama")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights; two seeds are two models"
    )
    parser.add_argument("--name", default="tiny", help="written into config.json")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--hidden", type=int, default=128, help="width of the model; a multiple of 128"
    )
    parser.add_argument("--tokens-max", type=int, default=4096)
    options = vars(parser.parse_args())
    folder = options.pop("folder")
    write_model(folder, Model(**options))


if __name__ == "__main__":
    main()
