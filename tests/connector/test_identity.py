"""Weights are told apart by what they are, not by where; and so is all else that matters."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.connector.tiny import CONFIG, write_model
from trikv.connector.identity import (
    IdentityError,
    Weights,
    canonical,
    fields,
    weights_identity,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def of(folder: Path, **more: Any) -> str:
    return weights_identity(Weights(model=str(folder), **more))


def test_another_folder_is_the_same_model(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one")
    two = tmp_path / "deep" / "two"
    shutil.copytree(one, two)
    os.utime(two / "model-1-of-1.safetensors", (1, 1))
    assert of(one) == of(two)


def test_other_splitting_into_files_is_the_same_model(tmp_path: Path) -> None:
    assert of(write_model(tmp_path / "one")) == of(write_model(tmp_path / "two", files=3))


def test_a_fine_tune_of_equal_names_and_shapes_differs(tmp_path: Path) -> None:
    assert of(write_model(tmp_path / "one")) != of(write_model(tmp_path / "two", seed=1))


@pytest.mark.parametrize("tensor", range(6))
def test_every_tensor_counts(tmp_path: Path, tensor: int) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    file = two / "model-1-of-1.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[tensor]
    tensors[name] = tensors[name] * np.float32(1.001)
    save_file(tensors, file)
    assert of(one) != of(two)


def test_configuration_counts_but_its_writers_marks_do_not(tmp_path: Path) -> None:
    one, two, three = (write_model(tmp_path / name) for name in ("one", "two", "three"))
    marks = {"_name_or_path": "/somewhere", "transformers_version": "9.9"}
    (two / "config.json").write_text(json.dumps(CONFIG | marks))
    (three / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0}))
    assert of(one) == of(two)
    assert of(one) != of(three)


def test_quantisation_files_count(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    (two / "hf_quant_config.json").write_text('{"kv_scale": 2}')
    assert of(one) != of(two)


def test_a_revision_stands_for_what_it_names() -> None:
    name = "someone/some-model"
    one = weights_identity(Weights(name, commit=COMMIT))
    assert one == weights_identity(Weights("a-mirror/some-model", commit=COMMIT))
    assert one != weights_identity(Weights(name, commit=COMMIT[::-1]))
    assert one != weights_identity(Weights(name, commit=COMMIT, load_format="gguf"))


@pytest.mark.parametrize("commit", [None, "main", ""])
def test_a_name_alone_is_not_enough(commit: str | None) -> None:
    with pytest.raises(IdentityError, match="weights_epoch"):
        weights_identity(Weights("someone/some-model", commit=commit))


def test_dummy_weights_differ_by_seed_and_software() -> None:
    names = {
        weights_identity(Weights("any", load_format="dummy", seed=seed, software=software))
        for seed in (0, 1)
        for software in ("vllm 0.32.0", "vllm 0.33.0")
    }
    assert len(names) == 4


def test_other_formats_are_told_apart_by_size_and_time(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x" * 100)
    os.utime(file, (5, 5))
    one = of(file)
    assert one == of(file)
    os.utime(file, (6, 6))
    two = of(file)
    file.write_bytes(b"x" * 101)
    os.utime(file, (6, 6))
    assert len({one, two, of(file)}) == 3


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0{}"])
def test_broken_files_never_pass_for_a_model(tmp_path: Path, content: bytes) -> None:
    """A folder whose weights cannot be read has no identity, unless it holds none at all."""
    folder = write_model(tmp_path / "one")
    sound = of(folder)
    (folder / "model-1-of-1.safetensors").write_bytes(content)
    try:
        broken = of(folder)
    except (IdentityError, ValueError):
        return
    assert broken != sound


def config(folder: Path, **changes: Any) -> Any:
    """The few attributes of a VllmConfig that are read."""
    hf_config = SimpleNamespace(to_dict=lambda: dict(changes.get("hf", CONFIG)), _commit_hash=None)
    found = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            hf_config=hf_config,
            dtype="torch.float32",
            seed=0,
            quantization=None,
            max_model_len=1024,
            revision=None,
            served_model_name="mine",
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", block_size=16, prefix_caching_hash_algo="sha256"
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        load_config=SimpleNamespace(load_format="auto"),
    )
    for path, value in changes.items():
        if path != "hf":
            part, _, name = path.partition("__")
            setattr(getattr(found, part), name, value)
    return found


def named(vllm_config: Any, **more: Any) -> dict[str, str]:
    facts = {"software": "s", "hash_probe": "p", "hash_generation": "tagged"} | more
    return fields(vllm_config, **facts)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"hf": CONFIG | {"num_hidden_layers": 3}}, {}),
        ({"model_config__dtype": "torch.bfloat16"}, {}),
        ({"model_config__quantization": "fp8"}, {}),
        ({"model_config__disable_sliding_window": True}, {}),
        ({"cache_config__cache_dtype": "fp8"}, {}),
        ({"cache_config__block_size": 32}, {}),
        ({"cache_config__prefix_caching_hash_algo": "sha256_cbor"}, {}),
        ({"parallel_config__tensor_parallel_size": 2}, {}),
        ({"parallel_config__decode_context_parallel_size": 2}, {}),
        ({}, {"hash_probe": "other"}),
        ({}, {"hash_generation": "plain"}),
        ({}, {"tenant": "t"}),
        ({}, {"weights_epoch": "2"}),
    ],
)
def test_whatever_changes_bytes_changes_a_field(
    tmp_path: Path, changes: dict[str, Any], more: dict[str, str]
) -> None:
    folder = write_model(tmp_path / "one")
    one, other = named(config(folder)), named(config(folder, **changes), **more)
    assert {name for name in one if one[name] != other[name]}
    assert one.keys() == other.keys()


TWO = {"parallel_config__tensor_parallel_size": 2}
EIGHT = {"parallel_config__tensor_parallel_size": 8}


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, True),
        ({"model_config__quantization": "fp8", "hf_quantization": {"bits": 8}}, True),
        ({"model_config__quantization": "fp8"}, False),
        ({"load_config__load_format": "dummy"}, False),
    ],
)
def test_ranks_that_hold_the_same_count_once_if_weights_do_not_depend_on_their_number(
    tmp_path: Path, changes: dict[str, Any], *, shares: bool
) -> None:
    folder = write_model(tmp_path / "one")
    kept = changes.pop("hf_quantization", None)

    def made(split: dict[str, int], replicas: int) -> dict[str, str]:
        vllm_config = config(folder, **changes, **split)
        vllm_config.model_config.hf_config.quantization_config = kept
        return named(vllm_config, replicas=replicas)

    assert (made(EIGHT, 8) == made(TWO, 2) == made({}, 1)) is shares
    assert made(EIGHT, 2) != made(TWO, 2)
    assert made(EIGHT, 1) != made({}, 1)


def test_a_made_up_draft_keeps_engines_of_other_splits_apart(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one")
    found = []
    for split, replicas in ((EIGHT, 8), ({}, 1)):
        vllm_config = config(folder, **split)
        draft = config(write_model(tmp_path / "draft", seed=3))
        vllm_config.speculative_config = SimpleNamespace(
            method="deepseek_mtp",
            draft_model_config=draft.model_config,
            draft_load_config=SimpleNamespace(load_format="dummy"),
        )
        found.append(named(vllm_config, replicas=replicas))
    assert found[0] != found[1]


def test_place_and_name_change_only_the_label(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    first = named(config(one))
    second = named(config(two, model_config__served_model_name=["yours", "theirs"]))
    assert {name for name in first if first[name] != second[name]} == {"label"}


def test_length_counts_only_where_rope_depends_on_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one")
    long = {"model_config__max_model_len": 4096}
    assert named(config(folder)) == named(config(folder, **long))
    hf = CONFIG | {"rope_scaling": {"rope_type": "longrope"}}
    assert named(config(folder, hf=hf)) != named(config(folder, hf=hf, **long))


def test_a_draft_model_counts(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one")
    drafts = [write_model(tmp_path / f"draft{seed}", seed=seed) for seed in (1, 2)]
    found = []
    for draft in drafts:
        vllm_config = config(folder)
        vllm_config.speculative_config = SimpleNamespace(
            method="eagle", draft_model_config=config(draft).model_config
        )
        found.append(named(vllm_config)["draft"])
    assert len({*found, named(config(folder))["draft"]}) == 3


def test_an_epoch_stands_in_for_an_unknown_revision() -> None:
    vllm_config = config(Path("someone/some-model"))
    with pytest.raises(IdentityError):
        named(vllm_config)
    assert named(vllm_config, weights_epoch="1") != named(vllm_config, weights_epoch="2")


def test_fields_fit_the_wire(tmp_path: Path) -> None:
    for name, value in named(config(write_model(tmp_path / "one"))).items():
        assert 0 < len(name.encode()) <= 64
        assert len(value.encode()) <= 4096


def test_canonical_text_does_not_depend_on_order() -> None:
    assert canonical({"b": [1, {"d": 2, "c": {3, 4}}], "a": None}) == canonical(
        {"a": None, "b": [1, {"c": {4, 3}, "d": 2}]}
    )
