"""Models that teach the tiny one: transformers' own, with the tokenizer of configs/tiny."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from tests.helpers.tiny import CONFIG

TINY = CONFIG.parent / "tiny"


def write_dense(folder: Path, seed: int = 1, **sizes: Any) -> Any:
    """A dense model of two layers, whose vocabulary has more rows than the tokenizer has tokens;
    written to ``folder``."""
    values: dict[str, Any] = {
        "vocab_size": 144,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    return _write(Qwen3Config(**(values | sizes)), folder, seed)


def write_sparse(folder: Path, seed: int = 2) -> Any:
    """A model of the tiny one's sizes with other weights, written to ``folder``."""
    return _write(AutoConfig.from_pretrained(str(TINY)), folder, seed)


def _write(config: Any, folder: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(str(folder))
    for file in TINY.iterdir():
        if file.name != "config.json":
            shutil.copy(file, folder)
    return model


def logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[T - 1] float64, of each token after the first under transformers' model."""
    with torch.no_grad():
        logits = model(tokens[None].long()).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(-1, tokens[1:, None].long())[:, 0]


def divergence(policy: torch.Tensor, teacher: torch.Tensor, kind: str, share: float = 0.5) -> Any:
    """[T] as published, from log-probs [T, V]: the KL from the policy, the KL from the teacher, or
    those of both from their mixture."""

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p.exp() * (p - q)).sum(-1)

    if kind == "reverse":
        return kl(policy, teacher)
    if kind == "forward":
        return kl(teacher, policy)
    mixed = torch.logaddexp(teacher + math.log(share), policy + math.log(1 - share))
    return share * kl(teacher, mixed) + (1 - share) * kl(policy, mixed)
