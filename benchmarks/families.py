"""Every model family against transformers: the table of docs/weights.md.

A shipped config with smaller sizes is given random fp32 weights and saved by transformers. The
trainer reads them; its logits of the same tokens are compared with those of transformers, and what
it writes in several files with what it read. The bar: logits within 1e-4, tensors bit for bit.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.configs import TINY, hf_config, write_config
from benchmarks.end_to_end import batch_of, microbatch
from benchmarks.tables import markdown
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.models.hf_folder import save_checkpoint_hf
from pyrl_ext.parallel import topology
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.rollout.hf.model import unbound_steps
from pyrl_ext.trainer.policy import Policy

QWEN3_8B = {
    **{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "head_dim": 128},
    **{"intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
    **{"max_position_embeddings": 40960, "initializer_range": 0.02},
}
QWEN35_35B = {
    **{"model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048},
    **{"num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2},
    **{"head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144},
    **{"initializer_range": 0.02, "full_attention_interval": 4},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
MODELS: dict[str, str | dict[str, Any]] = {
    **{"GLM-4.7-Flash": "glm47", "GLM-4.7": "glm47_355b", "DeepSeek-V3": "deepseek_v3"},
    **{"Moonlight": "moonlight", "Qwen3-30B-A3B": "qwen3_30b", "Qwen3-8B": QWEN3_8B},
    **{"Qwen3-Next-80B-A3B": "qwen3_next_80b", "Qwen3.5-35B-A3B": QWEN35_35B},
    "Nemotron-3-Nano-30B-A3B": "nemotron3_nano",
    **{"Llama-3.1-8B": "llama31_8b", "Mixtral-8x7B": "mixtral_8x7b"},
    **{"Qwen2.5-7B": "qwen25_7b", "MiniMax-M2": "minimax_m2"},
}
SMALLER = {
    **{"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "head_dim": 32},
    **{"intermediate_size": 256, "moe_intermediate_size": 48, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "n_routed_experts": 32, "num_experts": 32},
    **{"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24},
    **{"linear_value_head_dim": 32, "shared_expert_intermediate_size": 48},
    **{"v_head_dim": 24, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    **{"hybrid_override_pattern": "MEM*-M", "mamba_num_heads": 4, "mamba_head_dim": 24},
    "rotary_dim": 16,
    **{"n_groups": 2, "ssm_state_size": 16, "moe_shared_expert_intermediate_size": 96},
    **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
}
COLUMNS = (
    "family",
    "as a small",
    "tensors of the whole",
    "logits differ by",
    "largest logit",
    "weights there and back",
    "layers",
)
TOKENS = 96
ALLOWED = 1e-4


def smaller(hf: dict[str, Any]) -> dict[str, Any]:
    sizes = {key: size for key, size in SMALLER.items() if hf.get(key) is not None}
    if "kv_lora_rank" not in hf:
        sizes["num_key_value_heads"] = 2
    if experts := hf.get("num_local_experts"):
        sizes["num_local_experts"] = min(32, experts)
    if pattern := sizes.get("hybrid_override_pattern"):
        sizes["num_hidden_layers"] = len(pattern)
    return hf | sizes


def write_model(folder: Path, hf: dict[str, Any], spread: float = 0.1) -> Any:
    """A random model of transformers with the config ``hf``, saved by it, with ``hf`` next to it as
    checkpoints have it."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[hf["model_type"]].from_dict(dict(hf))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    unbound_steps(model)
    biases = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *biases]:
            noise = torch.randn(value.shape)
            # next to one or zero, as the model's norms are centred
            value.copy_(value + 0.3 * noise if "norm" in name else spread * noise)
    model.save_pretrained(folder)
    write_config(folder, hf)
    return model


def plan_of(folder: Path, hf: dict[str, Any]) -> Plan:
    model = {"family": hf["model_type"], "config": f"{folder}/config.json", "weights": folder}
    settings = [f"model.{key}={value}" for key, value in model.items()]
    return compile_plan(TINY, [*settings, "replay=off"])


def logits_of(policy: Policy, tokens: Tensor) -> Tensor:
    """[T, V] of megatron, of one sequence."""
    rows = len(tokens)
    batch = batch_of([rows], tokens=tokens, targets=tokens)
    micro = microbatch(batch, [0], policy.topo.place())
    packed = PackedSequences.of(micro)
    (model,) = policy.llm.models
    with torch.no_grad():
        inputs = micro.tokens[None], packed.positions[None], None
        return model.eval()(*inputs, packed_seq_params=packed)[0][:rows]


def row(name: str, source: str | dict[str, Any], folder: Path) -> tuple[tuple[str, ...], bool]:
    """A row of the table, and whether it is within the bar."""
    whole = source if isinstance(source, dict) else hf_config(source)
    hf = smaller(whole)
    theirs = write_model(folder, hf)
    tokens = torch.randint(3, 512, (TOKENS,))
    plan = plan_of(folder, hf)
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo, trainable=False)
        with torch.no_grad():
            exact = theirs(tokens[None]).logits[0]
        off = (logits_of(policy, tokens) - exact).abs().max().item()
        third = (folder / "model.safetensors").stat().st_size // 3
        save_checkpoint_hf(folder / "back", policy.weights(), plan, topo, max_shard_bytes=third)
    saved = load_file(folder / "model.safetensors")
    back = {}
    for file in (folder / "back").glob("*.safetensors"):
        back |= load_file(file)
    equal = saved.keys() == back.keys() and all(back[n].equal(t) for n, t in saved.items())
    table = read_sizes(whole).weights(0)
    te = not (plan.sizes.state_mixer or plan.sizes.normalizes_all_heads)
    cells = (
        f"`{hf['model_type']}`",
        name,
        f"{sum(len(weight.hf_names) for weight in table):,}",
        f"{off:.1e}",
        f"{exact.abs().max():.1f}",
        "bit for bit" if equal else "DIFFERS",
        "local; te as a small model" if te else "local",
    )
    return cells, equal and off <= ALLOWED


def main() -> int:
    """Exit code 1 where a family is outside the bar."""
    logging.disable(logging.WARNING)
    disable_progress_bar()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, source in track(list(MODELS.items()), "families", transient=True):
            rows.append(row(name, source, Path(folder) / name))
    print(markdown(COLUMNS, [cells for cells, _ in rows], words=2))
    return 0 if all(holds for _, holds in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
