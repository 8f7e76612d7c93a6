"""Models of published sizes meet the tensors of their repositories, without memory for them.

The tensors are those that transformers' class saves: names, shapes and dtypes on the meta device.
They are written as files without content (sparse: the header of every file, then nothing), so that
what reads a real checkpoint reads these. Where a repository has more than transformers' class, a
case says so.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.core_model_loading import revert_weight_conversion

from pyrl_ext.models.hf_folder import INDEX, SafetensorsFolder
from pyrl_ext.plan.model.families.vision import VisionLanguage
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.rollout.hf.model import model_class
from tests.helpers.configs import hf_of

# Repository whose config.json the sizes are, by folder of configs/
REPOSITORIES = {
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
    "glm47": "zai-org/GLM-4.7-Flash",
    "glm47_355b": "zai-org/GLM-4.7",
    "llama31_8b": "meta-llama/Llama-3.1-8B-Instruct",
    "minimax_m2": "MiniMaxAI/MiniMax-M2",
    "mixtral_8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "moonlight": "moonshotai/Moonlight-16B-A3B-Instruct",
    "nemotron3_nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "qwen25_7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3_30b": "Qwen/Qwen3-30B-A3B-Thinking-2507",
    "qwen3_next_80b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3_vl_30b": "Qwen/Qwen3-VL-30B-A3B-Instruct",
}
CODES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
SHARD = 5_000_000_000  # bytes of tensors in a file, as repositories have it


class Stored(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def saved_by_transformers(name: str) -> dict[str, Stored]:
    """The tensors that transformers' class saves of a model in bfloat16."""
    hf = hf_of(name)
    config = CONFIG_MAPPING[hf["model_type"]].from_dict(hf)
    with torch.device("meta"):
        model = model_class(config).from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    # from_pretrained loads these so; of minimax_m2's biases it says nothing
    exact = (*model._keep_in_fp32_modules_strict, "e_score_correction_bias")
    tensors = revert_weight_conversion(model, model.state_dict())
    found = {}
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if key.endswith(("gate_up_proj", "down_proj")):  # a layer's experts in one tensor
            shape = (shape[0], shape[2], shape[1])  # the repository has their rows as columns
        found[key] = Stored(shape, torch.float32 if key.endswith(exact) else torch.bfloat16)
    return found


def layer_ahead(name: str, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors of a repository's layer for multi-token prediction, which transformers' classes
    lack: those of a decoder layer with experts, and what is around them."""
    hf = hf_of(name)
    hidden = hf["hidden_size"]
    layers = hf["num_hidden_layers"]
    vector = Stored((hidden,), torch.bfloat16)
    both = Stored((hidden, 2 * hidden), torch.bfloat16)
    last = f"model.layers.{layers - 1}."
    decoder = {key.removeprefix(last): x for key, x in tensors.items() if key.startswith(last)}
    if name == "qwen3_next_80b":
        found = {f"mtp.layers.0.{key}": x for key, x in decoder.items()}
        found["mtp.fc.weight"] = both
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            found[f"mtp.{norm}.weight"] = vector
        return found
    prefix = f"model.layers.{layers}."
    table = tensors["model.embed_tokens.weight"]
    found = {prefix + key: x for key, x in decoder.items()}
    found |= {prefix + key: table for key in ("embed_tokens.weight", "shared_head.head.weight")}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        found[f"{prefix}{norm}.weight"] = vector
    return found | {f"{prefix}eh_proj.weight": both}


def write_without_content(folder: Path, tensors: dict[str, Stored]) -> None:
    """A checkpoint's files and index; the tensors in them take no room on the disk."""
    files: list[dict[str, Stored]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        size += tensor.nbytes
        if size > SHARD and files[-1]:
            files.append({})
            size = tensor.nbytes
        files[-1][key] = tensor
    weight_map: dict[str, str] = {}
    for number, held in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        _write_header(folder / file, held)
        weight_map |= dict.fromkeys(held, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _write_header(file: Path, held: dict[str, Stored]) -> None:
    header = {}
    end = 0
    for key, tensor in held.items():
        start, end = end, end + tensor.nbytes
        header[key] = {
            "dtype": CODES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little"))
        opened.write(text)
        opened.truncate(8 + len(text) + end)


def check(folder: SafetensorsFolder, name: str, mtp_layers: int) -> set[str]:
    """Check the folder against the table of the sizes; returns the names that are loaded."""
    sizes = read_sizes(hf_of(name))
    table = sizes.weights(mtp_layers)
    if isinstance(sizes, VisionLanguage):
        table += sizes.tower_weights()
    folder.check(table, sizes.ignored(mtp_layers))
    for weight in table:
        for key, shape in zip(weight.hf_names, weight.shapes, strict=True):
            assert tuple(folder(key).shape) == shape, key
    return {key for weight in table for key in weight.hf_names}


@pytest.mark.parametrize("name", REPOSITORIES)
def test_a_published_model_meets_its_tensors(name, tmp_path):
    """Every tensor is loaded, each with its shape and dtype; those of a layer for multi-token
    prediction only with `model.mtp: on`."""
    tensors = saved_by_transformers(name)
    sizes = read_sizes(hf_of(name))
    ahead = layer_ahead(name, tensors) if sizes.num_nextn_predict_layers else {}
    write_without_content(tmp_path, tensors | ahead)
    folder = SafetensorsFolder(tmp_path, sizes.hidden_size)
    assert check(folder, name, 0) == folder.names - ahead.keys()
    exact = {key for row in sizes.weights(0) if row.float32 for key in row.hf_names}
    assert exact == {key for key, stored in tensors.items() if stored.dtype == torch.float32}
    if ahead:
        copies = {key for key in ahead if key.endswith(("embed_tokens.weight", "head.weight"))}
        assert check(folder, name, 1) == folder.names - copies
    last = sizes.weights(0)[-1].hf_names[-1]
    assert folder(last)[-2:].numel()


def test_a_published_model_lacks_nothing(tmp_path):
    """A tensor of another name or shape is an error."""
    tensors = saved_by_transformers("mixtral_8x7b")
    w1 = "model.layers.31.block_sparse_moe.experts.7.w1.weight"
    tensors[w1.replace("w1", "gate_proj")] = tensors.pop(w1)
    write_without_content(tmp_path, tensors)
    with pytest.raises(ValueError, match=rf"1 tensors are missing \['{w1}'\], 1 are unknown"):
        check(SafetensorsFolder(tmp_path, 4096), "mixtral_8x7b", 0)


def test_the_repository_of_deepseek_v3_is_refused_in_eight_bits(tmp_path):
    """It has matrices in float8 with scales of blocks, of which transformers' class knows nothing;
    the message says to convert it."""
    tensors = saved_by_transformers("deepseek_v3")
    tensors |= layer_ahead("deepseek_v3", tensors)
    whole = ("embed_tokens.weight", "head.weight", "gate.weight", "eh_proj.weight")
    for key, (shape, _) in [*tensors.items()]:
        if len(shape) == 2 and not key.endswith(whole):
            tensors[key] = Stored(shape, torch.float8_e4m3fn)
            blocks = tuple(-(-size // 128) for size in shape)
            tensors[f"{key}_scale_inv"] = Stored(blocks, torch.float32)
    write_without_content(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"is F8_E4M3 .*Convert the checkpoint to bfloat16"):
        check(SafetensorsFolder(tmp_path, 7168), "deepseek_v3", 0)
