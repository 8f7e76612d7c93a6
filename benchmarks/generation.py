"""``python -m benchmarks.generation``: the embedded engine's attention next to transformers' own.

The same samples of a model of SmolLM2-135M's widths (3 query heads to a key head) with random
weights. transformers' ``sdpa`` copies the cache for each query head in every step. Floor of both: a
step reads weights and cache once. The bar is 1.2 times as fast. The tokens have to be the same but
for rounding: at least nine of ten.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch

from benchmarks.tables import show
from pyrl_ext.rollout.hf.attention import NAME
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.samples import Prompt, Sampling

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 4096,  # the head is not what is measured
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
KINDS = {"ours": NAME, "sdpa": "sdpa"}
BAR = 1.2


def build() -> HFEngine:
    """An engine with random weights."""
    engine = HFEngine(CONFIG, max_num_seqs=64)
    torch.manual_seed(0)
    engine.load_weights(
        ((n, torch.randn(shape) * 0.05) for n, shape in engine.shapes().items()), version=0
    )
    return engine


def main() -> int:
    """Exit code 1: other tokens."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of both")
    parser.add_argument("--new", type=int, default=32, help="tokens of a response")
    options = parser.parse_args()
    engine = build()
    prompts = [Prompt(n, tuple(1 + (n * 7 + i) % 4000 for i in range(400))) for n in range(16)]
    sampling = Sampling(options.new, samples_per_prompt=4, seed=0)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    tokens: dict[str, list[int]] = {}
    for _ in range(options.rounds):
        for kind, name in KINDS.items():
            engine.model.set_attn_implementation(name)
            start = time.perf_counter()
            samples = engine.generate(prompts, sampling)
            seconds[kind].append(time.perf_counter() - start)
            tokens[kind] = [t for sample in samples for t in sample.response]
    new = options.new * 64
    rows = [(kind, f"{median(s):.2f}", f"{new / median(s):,.0f}") for kind, s in seconds.items()]
    show(("attention", "s", "new tokens/s"), rows, title=f"64 samples, {options.new} new tokens")
    ratio = median(b / a for a, b in zip(seconds["ours"], seconds["sdpa"], strict=True))
    print(f"{'PASS' if ratio >= BAR else 'FAIL'}  times as fast at least {BAR}:  {ratio:.2f}")
    pairs = zip(tokens["ours"], tokens["sdpa"], strict=True)
    equal = sum(a == b for a, b in pairs) / len(tokens["ours"])
    print(f"equal tokens: {equal:.4f}")
    return 0 if equal > 0.9 else 1


if __name__ == "__main__":
    raise SystemExit(main())
