"""A sparse model from a dense one: the experts of each layer are copies of its MLP.

    python -m benchmarks.upcycle build/smollm/hf build/smollm/moe-8 --experts 8 --top-k 2

It reads a Llama folder in Hugging Face's format and writes a Mixtral folder. Routers are random,
their softmax over the chosen experts sums to 1, so without noise the logits stay the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pyrl_ext.models.weight_table import stream_of

PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
INITIALIZER_RANGE = 0.02
LEFT_OUT = ("model_type", "architectures", "mlp_bias", "pretraining_tp", "_model_name_or_path")


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dense", type=Path, help="folder of a Llama model")
    parser.add_argument("sparse", type=Path, help="made if it is not there")
    parser.add_argument("--experts", type=int, default=8, help="of each layer [%(default)s]")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token [%(default)s]")
    parser.add_argument(
        "--noise", type=float, default=0.01, help="of expert weights, relative [%(default)s]"
    )
    parser.add_argument("--seed", type=int, default=0, help="of routers and noise [%(default)s]")
    given = parser.parse_args()
    upcycle(given.dense, given.sparse, given.experts, given.top_k, given.noise, given.seed)
    print(f"wrote {given.sparse}: {given.experts} experts a layer, {given.top_k} a token")


def upcycle(dense: Path, sparse: Path, experts: int, topk: int, noise: float, seed: int) -> None:
    """Write the Llama model of the folder ``dense`` as a Mixtral model to the folder ``sparse``.

    Args:
        experts: of each layer.
        topk: experts of a token.
        noise: standard deviation of each expert weight's factor around 1.

    Raises: ValueError if ``dense`` is no Llama model without biases, if ``topk`` is not 1 to
        ``experts``, or if both folders are the same.
    """
    config = json.loads((dense / "config.json").read_text(encoding="utf-8"))
    biased = config.get("attention_bias") or config.get("mlp_bias")
    if config["model_type"] != "llama" or biased:
        raise ValueError(f"{dense}/config.json: expected model_type llama, without biases")
    if not 1 <= topk <= experts:
        raise ValueError(f"--top-k {topk}, expected 1 to {experts}, the experts of a layer")
    if dense.resolve() == sparse.resolve():
        raise ValueError(f"{sparse}, expected another folder than that of the dense model")
    sparse.mkdir(parents=True, exist_ok=True)
    for file in dense.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copy(file, sparse)  # the tokenizer; the config is written below
    # what transformers' Llama has where its config does not say it; Mixtral's differ
    usual = {
        "num_key_value_heads": config["num_attention_heads"],
        "rms_norm_eps": 1e-6,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False,
    }
    if "rope_parameters" not in config:
        usual["rope_theta"] = 10000.0
    kept = usual | {name: value for name, value in config.items() if name not in LEFT_OUT}
    of_experts = {"num_local_experts": experts, "num_experts_per_tok": topk, "sliding_window": None}
    names = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    written = json.dumps(names | kept | of_experts, indent=2) + "\n"
    (sparse / "config.json").write_text(written, encoding="utf-8")
    (sparse / "model.safetensors").unlink(missing_ok=True)
    tensors = sparse_tensors(dense, config, experts, noise, seed)
    save_file(tensors, sparse / "model.safetensors", metadata={"format": "pt"})


def sparse_tensors(
    dense: Path, config: dict[str, Any], experts: int, noise: float, seed: int
) -> dict[str, Tensor]:
    """Published name -> tensor of the Mixtral model; see `upcycle`."""
    found: dict[str, Tensor] = {}
    for file in sorted(dense.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            layer, is_mlp, part = name.partition(".mlp.")
            if not is_mlp:
                found[name] = tensor
                continue
            projection = PARTS[part.removesuffix(".weight")]
            for expert in range(experts):
                own = f"{layer}.block_sparse_moe.experts.{expert}.{projection}.weight"
                factor = 1 + noise * torch.randn(tensor.shape, generator=stream_of(own, seed))
                found[own] = (tensor * factor).to(tensor.dtype)
    std = config.get("initializer_range", INITIALIZER_RANGE)
    for layer in range(config["num_hidden_layers"]):
        router = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        values = torch.randn(experts, config["hidden_size"], generator=stream_of(router, seed))
        found[router] = (std * values).to(found["model.embed_tokens.weight"].dtype)
    return found


if __name__ == "__main__":
    main()
