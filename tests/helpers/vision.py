"""Small models with a vision tower: configs, checkpoints as they are published, images, and what
transformers makes of them."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from pyrl_ext.megatron.vision import build_tower
from pyrl_ext.models import shards, weight_table
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.families.vision import VisionLanguage
from tests.helpers.engines import single_experts
from tests.helpers.models import MOONLIGHT, QWEN35
from tests.helpers.tiny import QWEN3, random_batch, tiny_plan
from tests.helpers.towers import ImageBatch, with_images

IMAGE = 100  # the placeholder of a row
TOWER = {"hidden_size": 32, "intermediate_size": 40, "patch_size": 4}
QWEN_TOWER = TOWER | {"depth": 5, "num_heads": 4, "spatial_merge_size": 2, "in_channels": 3}
QWEN_TOWER |= {"temporal_patch_size": 2, "num_position_embeddings": 25, "out_hidden_size": 64}
QWEN_TOWER |= {"deepstack_visual_indexes": [1, 2], "hidden_act": "gelu_pytorch_tanh"}
QWEN_TEXT = {
    "model_type": "qwen3_vl_moe_text",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    "rope_theta": 10000.0,
    "pad_token_id": 0,
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 101}
TOKENS |= {"vision_start_token_id": 102, "vision_end_token_id": 103}
QWEN_VL = {
    "model_type": "qwen3_vl_moe",
    "text_config": QWEN_TEXT,
    "vision_config": QWEN_TOWER | {"model_type": "qwen3_vl_moe"},
    "tie_word_embeddings": False,
    **TOKENS,
}
QWEN35_VL = {
    "model_type": "qwen3_5_moe",
    "text_config": QWEN35 | {"rope_parameters": QWEN_TEXT["rope_scaling"] | {"rope_theta": 1e4}},
    "vision_config": {k: v for k, v in QWEN_TOWER.items() if k != "deepstack_visual_indexes"},
    "tie_word_embeddings": False,
    **TOKENS,
}
KIMI_VL = {
    "model_type": "kimi_k25",
    "text_config": MOONLIGHT,
    "vision_config": TOWER
    | {"num_hidden_layers": 5, "num_attention_heads": 4, "merge_kernel_size": [2, 2]}
    | {"pos_emb_height": 6, "pos_emb_width": 6},
    "projection_hidden_size": 32,
    "tie_word_embeddings": False,
    **TOKENS,
}
GRIDS = ((1, 4, 6), (1, 2, 2), (1, 8, 4), (1, 4, 6))


def write_model(folder: Path, hf: dict[str, Any]) -> Any:
    """A random model of transformers, and a checkpoint with the published names.

    transformers reads them, but does not write them."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[hf["model_type"]].from_dict(json.loads(json.dumps(hf)))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    biases = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *biases]:
            noise = torch.randn(value.shape)
            norm = "norm" in name and name.endswith("weight")
            value.copy_(value + 0.3 * noise if norm else 0.2 * noise)
    folder.mkdir(parents=True, exist_ok=True)
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    published = {"kimi_k25": kimi, "qwen3_vl_moe": qwen}.get(hf["model_type"], single_experts)
    own = {name: tensor.clone() for name, tensor in published(state).items()}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf))
    return model


def qwen(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of a layer as columns."""
    return {n: t.mT.contiguous() if ".experts." in n else t for n, t in state.items()}


RENAMED = {
    r"^lm_head": "language_model.lm_head",
    r"^model\.language_model": "language_model.model",
    r"^model\.vision_tower\.layers": "vision_tower.encoder.blocks",
    r"^model\.vision_tower\.final": "vision_tower.encoder.final",
    r"^model\.vision_tower": "vision_tower",
    r"pos_emb\.position_embeddings": "pos_emb.weight",
    r"attn\.proj": "wo",
    r"(blocks\.\d+)\.norm1": r"\1.norm0",
    r"(blocks\.\d+)\.norm2": r"\1.norm1",
    r"mlp\.fc1": "mlp.fc0",
    r"mlp\.fc2": "mlp.fc1",
    r"^model\.mm_projector\.in_proj": "mm_projector.proj.0",
    r"^model\.mm_projector\.out_proj": "mm_projector.proj.2",
    r"^model\.mm_projector": "mm_projector",
}


def kimi(state: dict[str, Tensor], heads: int = 4) -> dict[str, Tensor]:
    """Experts one by one, queries, keys and values in one, rotated pairs next to each other."""
    found = {}
    for name, tensor in single_experts(state).items():
        if fused := re.fullmatch(r"(model\.vision_tower.*)\.attn\.q_proj\.(.*)", name):
            parts = [state[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            for i in (0, 1):
                pairs = parts[i].unflatten(0, (heads, 2, -1)).transpose(1, 2)
                parts[i] = pairs.reshape(parts[i].shape)
            found[f"{fused[1]}.wqkv.{fused[2]}"] = torch.cat(parts)
        elif not re.search(r"vision_tower.*\.attn\.[kv]_proj", name):
            found[name] = tensor
    renamed = {}
    for name, tensor in found.items():
        for ours, theirs in RENAMED.items():
            name = re.sub(ours, theirs, name)
        renamed[name] = tensor.contiguous().clone()
    return renamed


def pixels_of(hf: dict[str, Any], grids=GRIDS) -> Tensor:
    """[P, patch] of random images."""
    vision = hf["vision_config"]
    each = 3 * vision.get("temporal_patch_size", 1) * vision["patch_size"] ** 2
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(t * h * w for t, h, w in grids), each, generator=generator)


def rows_of(model: Any, pixels: Tensor, grids) -> Tensor:
    """[rows, (1 + deep) * width] of transformers' tower."""
    if model.config.model_type == "kimi_k25":
        pixels = pixels.unflatten(1, (3, 4, 4))
    found = model.model.get_image_features(pixels, torch.tensor(grids))
    parts = [found.pooler_output, *getattr(found, "deepstack_features", ())]
    return torch.cat([torch.cat(part) for part in parts], dim=1)


def whole_tower(plan: Plan, topo: Topology) -> Any:
    """The plan's tower in this process, with the weights that a run draws for it."""
    assert isinstance(plan.sizes, VisionLanguage)
    tower: Any = build_tower(plan, topo)[0]
    tower.table = table = plan.sizes.tower_weights()
    read = weight_table.RandomWeights(table, plan.sizes.initializer_range, plan.seed)
    weight_table.load(table, _live(tower), read, topo)
    return tower


def tower_tensors(tower: Any, value: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """``value`` of each parameter of a whole tower, by the names of the checkpoint."""
    live = _live(tower)
    found = {}
    for row in tower.table:
        whole = shards.whole_of(row, [value(live[row.megatron_name]).detach()])
        found |= {n: x.clone() for n, x in zip(row.hf_names, whole, strict=True)}
    return found


def _live(tower: Any) -> dict[str, Tensor]:
    return weight_table.named_parameters_global([tower], 0, 1)


def kimi_plan(folder: Path, *overrides: str) -> Plan:
    """A run of `KIMI_VL`, whose config is written to ``folder``, with several microbatches."""
    path = folder / "config.json"
    if not path.exists():
        written = path.with_suffix(f".{os.getpid()}")  # of several ranks
        written.write_text(json.dumps(KIMI_VL))
        written.rename(path)
    names = "model.family=kimi_k25", f"model.config={path}"
    options = "replay=off", "batching.tokens_per_microbatch=80", "model.router_bias_update_rate=0"
    return tiny_plan(*names, *options, *overrides, config=QWEN3)


def image_batch() -> ImageBatch:
    """Rows without routes, and images for `KIMI_VL`."""
    batch = replace(random_batch(), routes=None, layer_ids=())
    batch = with_images(batch, ("vision",), 3, 3 * KIMI_VL["vision_config"]["patch_size"] ** 2)
    return replace(batch, old_logprobs=batch.rollout_logprobs)
