"""vLLM drafts tokens with the MTP layers that the trainer sends (`rollout.speculation: mtp`).

Needs vLLM (`make .venv/.vllm`); `make test-vllm` runs it.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make .venv/.vllm", allow_module_level=True)

from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.rollout.draft_layers import draft_shapes
from pyrl_ext.rollout.hf.sampling import processed_logprobs
from pyrl_ext.samples import Sample, Sampling
from tests.helpers.configs import CONFIGS, hf_of
from tests.helpers.models import DEEPSEEK, GLM
from tests.helpers.ranks import run_ranks
from tests.helpers.vllm_pair import (
    WITH_VLLM,
    Pair,
    drafting_weights,
    prompts,
    train_on_rank,
    with_drafts,
)

pytestmark = pytest.mark.vllm

LAYER = "model.layers.4."


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = with_drafts(tmp_path_factory.mktemp("drafts"), hf_of("tiny"))
    pair = Pair(folder, sampling_mask=False, draft_layers=1)
    yield pair
    pair.vllm.close()


def tokens_per_pass(samples: list[Sample]) -> float:
    return sum(len(s.response) for s in samples) / sum(s.passes for s in samples)


@pytest.mark.parametrize(
    "more", [{}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"greedy": True}], ids=str
)
def test_generate_has_the_logprobs_and_routes_of_transformers(pair: Pair, more: dict[str, Any]):
    """Also where drafted tokens were rejected, whose routes vLLM computed."""
    sampling = Sampling(max_new_tokens=40, samples_per_prompt=4, **more)
    samples = pair.vllm.generate(prompts(5, 70), sampling)
    worst, routed = pair.check(samples, sampling)
    assert worst < 1e-4 and routed == sum(len(s.tokens) - 1 for s in samples)
    assert 1.4 < tokens_per_pass(samples) < 2


def test_generate_samples_the_distribution_of_transformers(pair: Pair):
    """A sampler that accepts drafted tokens too often, or at another temperature, has other
    log-probs on average than the entropy of the distribution."""
    sampling = Sampling(max_new_tokens=12, samples_per_prompt=128, temperature=1.3)
    samples = pair.vllm.generate(prompts(5, 9, 12), sampling)
    assert tokens_per_pass(samples) > 1.4
    gap = variance = 0.0
    for sample in samples:
        start = sample.prompt_len
        logp = processed_logprobs(pair.forward(sample)[0][start - 1 : -1], sampling).double()
        mean = (logp.exp() * logp).sum(1)
        variance += float(((logp.exp() * logp.square()).sum(1) - mean.square()).sum())
        gap += float((logp.gather(1, sample.tokens[start:, None])[:, 0] - mean).sum())
    assert abs(gap) / math.sqrt(variance) < 4


def test_generate_does_not_depend_on_the_batch_of_a_sample(pair: Pair):
    sampling = Sampling(max_new_tokens=20, samples_per_prompt=2)
    alone = pair.vllm.generate(prompts(5), sampling)
    together = pair.vllm.generate(prompts(5, 70, 33), sampling)
    assert [s.response for s in alone] == [s.response for s in together[:2]]


def test_generate_ends_with_the_stop_token_of_a_draft(pair: Pair):
    """Tokens that were drafted behind it are no part of the response."""
    sampling = Sampling(max_new_tokens=40, samples_per_prompt=8)
    whole = pair.vllm.generate(prompts(5, 9), sampling)
    stop = whole[0].response[6]
    stopped = pair.vllm.generate(
        prompts(5, 9), Sampling(40, samples_per_prompt=8, stop_ids=(stop,))
    )
    for sample, longer in zip(stopped, whole, strict=True):
        end = longer.response.index(stop) + 1 if stop in longer.response else 40
        assert sample.response == longer.response[:end]
    assert pair.check(stopped, sampling)[0] < 1e-4


def test_load_weights_takes_the_mtp_layer_and_needs_all_of_it(pair: Pair):
    weights = drafting_weights(pair.hf, pair.config, 1)
    pair.give(weights, 1)
    sampling = Sampling(max_new_tokens=40, samples_per_prompt=2)
    good = tokens_per_pass(pair.vllm.generate(prompts(5, 70), sampling))
    before = pair.vllm.checksums()
    blind = drafting_weights(pair.hf, pair.config, 1, eye=0.0)
    pair.give(blind, 2)
    samples = pair.vllm.generate(prompts(5, 70), sampling)
    assert pair.check(samples, sampling)[0] < 1e-4  # a worse draft makes nothing wrong
    assert tokens_per_pass(samples) < 1.2 < good
    after = pair.vllm.checksums()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"{LAYER}eh_proj.weight", f"vllm rank 0: draft {LAYER}eh_proj.weight"}
    names = {name.partition("draft ")[2] for name in after if "draft " in name}
    assert not any("embed_tokens" in name or "head.weight" in name for name in names)
    lacking = {name: t for name, t in weights.items() if name != f"{LAYER}enorm.weight"}
    with pytest.raises(ValueError, match=rf"{LAYER}enorm.weight: missing"):
        pair.vllm.load_weights(lacking.items(), 3)
    with pytest.raises(RuntimeError, match="loading version 3 failed"):
        pair.vllm.generate(prompts(5), sampling)
    pair.load(0)
    assert tokens_per_pass(pair.vllm.generate(prompts(5, 70), sampling)) > 1.4


def test_load_weights_of_some_layers_leaves_the_others(pair: Pair):
    pair.load(0)
    sampling = Sampling(max_new_tokens=40, samples_per_prompt=2)
    expected = [s.tokens.tolist() for s in pair.vllm.generate(prompts(5, 70), sampling)]
    blind = drafting_weights(pair.hf, pair.config, 0, eye=0.0)
    layer = {name: blind[name] for name in draft_shapes(pair.config)}
    pair.vllm.load_weights(layer.items(), 1, only=layer.keys())
    samples = pair.vllm.generate(prompts(5, 70), sampling)
    assert tokens_per_pass(samples) < 1.2 and pair.check(samples, sampling)[0] < 1e-4
    pair.load(0)
    weights = drafting_weights(pair.hf, pair.config, 0)
    first = {name: weights[name] for name in weights if name.startswith("model.layers.0.")}
    pair.vllm.load_weights(first.items(), 2, only=first.keys())
    again = pair.vllm.generate(prompts(5, 70), sampling)
    assert [s.tokens.tolist() for s in again] == expected and tokens_per_pass(again) > 1.4


@pytest.mark.parametrize("config", [DEEPSEEK, GLM], ids=lambda c: c["model_type"])
def test_generate_equals_transformers_for_other_families(config: dict[str, Any], tmp_path: Path):
    pair = Pair(with_drafts(tmp_path, config), sampling_mask=False, draft_layers=1)
    sampling = Sampling(max_new_tokens=24, samples_per_prompt=4, temperature=0.7)
    samples = pair.vllm.generate(prompts(5, 33, 150), sampling)
    worst, routed = pair.check(samples, sampling)
    assert worst < 1e-4 and routed > 500 and tokens_per_pass(samples) > 1.4
    pair.vllm.close()


def test_engine_that_drafts_by_ngrams_takes_no_mtp_layers(tmp_path: Path):
    """vLLM's own options, without a key of the plan."""
    folder = with_drafts(tmp_path, hf_of("tiny"))
    ngrams = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    pair = Pair(folder, sampling_mask=False, speculative_config=ngrams)
    sampling = Sampling(max_new_tokens=24, samples_per_prompt=2)
    samples = pair.vllm.generate(prompts(5, 70), sampling)
    assert pair.check(samples, sampling)[0] < 1e-4
    assert {s.passes for s in samples} == {0}
    pair.vllm.close()


OWN_ROUTES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.helpers.vllm_pair import Pair, prompts
from pyrl_ext.samples import Sampling

pair = Pair(Path(sys.argv[2]), True, sampling_mask=False, draft_layers=1, block_size=32)
for more in ({}, {"temperature": 0.7, "top_k": 20}, {"greedy": True}):
    sampling = Sampling(max_new_tokens=6, samples_per_prompt=2, **more)
    samples = pair.vllm.generate(prompts(5, 70), sampling)
    worst, routed = pair.check(samples, sampling)
    assert worst < 1e-4 and routed == sum(len(s.tokens) - 1 for s in samples)
    assert sum(len(s.response) for s in samples) > 1.3 * sum(s.passes for s in samples)
pair.vllm.close()
"""


def test_generate_has_the_routes_of_transformers_by_vllms_own_way(tmp_path: Path):
    """By the worker that GPUs have, with interpreted kernels."""
    folder = with_drafts(tmp_path, hf_of("tiny"))
    command = [sys.executable, "-c", OWN_ROUTES, str(Path(__file__).parents[3]), str(folder)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("tp", [1, 2])
def test_train_sends_the_mtp_layer_and_counts_passes(tp: int, tmp_path: Path):
    config = with_drafts(tmp_path, hf_of("tiny")) / "config.json"
    run = ("steps=2", "evaluate.every=0", "log.progress=false", "rollout.check_tensors=all")
    run = (*run, "model.mtp=true", f"model.config={config}", f"run={tmp_path}/run")
    run = (*run, "rollout.engine=vllm", "rollout.speculation=mtp", f"rollout.tp={tp}")
    run = (*run, f"model.tokenizer={CONFIGS}/tiny", "parallel.dp=2")
    assert run_ranks(train_on_rank, 2, CONFIGS / "tiny.yaml", *run, preload=WITH_VLLM) == [0, 0]
    for row in read_rows(tmp_path / "run" / "metrics.jsonl"):
        assert row["mismatch/max"] < 1e-5 and row["route/agree_topk"] == 1.0
        assert 1 <= row["rollout/tokens_per_pass"] < 2
        assert row["publish/checked"] == 129 + 42
