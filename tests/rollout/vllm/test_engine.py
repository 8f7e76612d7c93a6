"""vLLM as the engine: what it samples, scores and routes equals transformers and megatron.

Needs vLLM (`make .venv/.vllm`); `make test-vllm` runs it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make .venv/.vllm", allow_module_level=True)

from transformers import CONFIG_MAPPING

from pyrl_ext.data import prompt_dataset as source
from pyrl_ext.data.rewards import Scorer
from pyrl_ext.data.tokenizer import load_tokenizer
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.rollout import rollouts
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.process.client import ProcessEngine
from pyrl_ext.rollout.vllm import loading
from pyrl_ext.rollout.vllm.engine import VLLMEngine
from pyrl_ext.rollout.vllm.loading import Loading
from pyrl_ext.samples import Prompt, Sampling, Turn
from tests.helpers.configs import hf_of, write_sizes
from tests.helpers.engines import DOWN, Disturbed, Stale
from tests.helpers.ranks import run_ranks
from tests.helpers.turns import ScriptedFeed, answers, by_turn, first_turns, ragged
from tests.helpers.vllm_pair import (
    CONFIGS,
    WITH_VLLM,
    Pair,
    check_sets,
    join_vllm,
    prompts,
    random_weights,
    train_on_rank,
)

pytestmark = pytest.mark.vllm

MODELS = ("tiny", "tiny_qwen3")  # latent attention with sigmoid routers; grouped queries, softmax


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(CONFIGS / request.param)
    yield pair
    pair.vllm.close()


def test_start_lets_vllm_inspect_models_in_this_process(pair: Pair):
    from vllm.model_executor.models import registry

    assert registry._run_in_subprocess(os.getpid) == os.getpid()


def test_generate_has_the_logprobs_and_routes_of_transformers(pair: Pair):
    sampling = Sampling(max_new_tokens=24, samples_per_prompt=4, temperature=0.7)
    samples = pair.vllm.generate(prompts(1, 5, 33, 150, 200), sampling)
    assert [(s.prompt_id, s.index) for s in samples] == [(p, i) for p in range(5) for i in range(4)]
    worst, routed = pair.check(samples, sampling)
    assert worst < 1e-5 and routed > 1000


@pytest.mark.parametrize("more", [{"top_p": 0.6}, {"top_k": 5}, {"top_p": 0.8, "top_k": 20}])
def test_generate_reports_logprobs_of_the_filtered_distribution(pair: Pair, more: dict[str, Any]):
    sampling = Sampling(max_new_tokens=12, samples_per_prompt=3, temperature=1.3, **more)
    samples = pair.vllm.generate(prompts(4, 9, 150), sampling)  # the last one comes in parts
    assert pair.check(samples, sampling)[0] < 2e-5
    assert check_sets(pair, samples, sampling) > 9 * 12
    next(pair.vllm.stream(prompts(4, 9), sampling))  # aborts the others
    samples = pair.vllm.generate(prompts(4, 9), sampling)
    assert check_sets(pair, samples, sampling) > 6 * 12


def test_generate_does_not_depend_on_the_batch_of_a_sample(pair: Pair):
    sampling = Sampling(max_new_tokens=16, samples_per_prompt=3, seed=7)
    asked = prompts(3, 8, 40, 5, 6, 7, 30, 2)
    together = pair.vllm.generate(asked, sampling)
    alone = [s for p in asked for s in pair.vllm.generate([p], sampling)]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(together, alone, strict=True))
    other = pair.vllm.generate(asked, Sampling(max_new_tokens=16, samples_per_prompt=3, seed=8))
    assert sum(torch.equal(a.tokens, b.tokens) for a, b in zip(together, other, strict=True)) < 3
    group = [tuple(s.response) for s in together[:3]]
    assert len(set(group)) == 3


def test_generate_takes_the_argmax_when_greedy(pair: Pair):
    sampling = Sampling(max_new_tokens=10, greedy=True)
    for sample in pair.vllm.generate(prompts(4, 11), sampling):
        logits, _ = pair.forward(sample)
        likeliest = logits[sample.prompt_len - 1 : -1].argmax(-1)
        assert torch.equal(likeliest, sample.tokens[sample.prompt_len :])


def test_generate_keeps_the_stop_token_in_the_response(pair: Pair):
    (whole,) = pair.vllm.generate(prompts(6), Sampling(max_new_tokens=20))
    assert whole.finish_reason == "length" and len(whole.response) == 20
    stop = whole.response[7]
    (cut,) = pair.vllm.generate(prompts(6), Sampling(max_new_tokens=20, stop_ids=(stop,)))
    length = whole.response.index(stop) + 1
    assert cut.finish_reason == "stop" and cut.response == whole.response[:length]
    assert int(cut.route_mask.sum()) == len(cut.tokens) - 1


def test_load_weights_replaces_what_generates(pair: Pair):
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


def test_load_weights_that_is_interrupted_blocks_generation(pair: Pair):
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


def test_checksums_are_those_of_what_vllm_took_and_holds(pair: Pair):
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
    model.model.norm.weight.data[3] += 1e-3
    model.model.layers[2].mlp.experts.routed_experts.w2_weight.data[1, 2, 3] += 1e-3
    after = pair.vllm.checksums()
    assert {name for name in found if after[name] != found[name]} == {
        "vllm rank 0: model.norm.weight",
        "vllm rank 0: model.layers.2.mlp.experts.routed_experts.w2_weight",
    }
    pair.load(0)
    assert pair.vllm.checksums() == found
    with pytest.raises(ValueError, match=r"nowhere.*expected names of its weights"):
        pair.vllm.checksums(["nowhere"])


def test_load_weights_gives_vllm_all_experts_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Its memory is what it makes of the experts one by one."""
    given = list[int]()
    noted = Loading._noted

    def counted(self: Any, *args: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in noted(self, *args):
            given.append(tensor.dim())
            yield name, tensor

    monkeypatch.setattr(Loading, "_noted", counted)
    pair.load(4)
    assert given.count(3) == 3 * len(pair.hf.routed.layer_ids)
    stacked = pair.vllm.checksums()
    monkeypatch.setattr(loading, "places_of", lambda _: {})
    pair.load(0)
    assert pair.vllm.checksums() != stacked
    pair.load(4)
    assert pair.vllm.checksums() == stacked
    pair.load(0)


def test_generate_ends_with_the_token_that_completes_a_stop_string(pair: Pair):
    """A sample ends where its text, decoded from the start, first holds a stop string."""
    decode = load_tokenizer(CONFIGS / "tiny").decode
    free = Sampling(max_new_tokens=30, samples_per_prompt=8, temperature=2.0)
    whole = pair.vllm.generate(prompts(6, 90), free)
    texts = [decode(s.response) for s in whole]
    stop = (*(text[5:8] for text in texts[::3]), texts[1][4:6], texts[2][0], "<|user|>")
    cut = pair.vllm.generate(prompts(6, 90), replace(free, stop=stop))
    ends = []
    for before, after in zip(whole, cut, strict=True):
        count = range(1, 31)
        found = [n for n in count if any(s in decode(before.response[:n]) for s in stop)]
        assert after.response == before.response[: found[0] if found else 30]
        assert after.finish_reason == ("stop" if found else "length")
        ends.append(len(after.response))
    assert len(set(ends)) > 4
    endings = [decode(s.response) for s in cut if s.finish_reason == "stop"]
    assert any(text.endswith(stop[:-2]) for text in endings), "none spans several tokens"
    assert pair.check(cut, free)[0] < 1e-5


def test_generate_gives_responses_of_one_token(pair: Pair):
    sampling = Sampling(max_new_tokens=1, samples_per_prompt=2)
    samples = pair.vllm.generate(prompts(1, 64, 65, 200), sampling)
    assert [len(s.response) for s in samples] == [1] * 8
    assert pair.check(samples, sampling)[0] < 1e-5


def test_load_weights_replaces_only_the_tensors_it_names(pair: Pair):
    """Fused modules of a layer come whole; a part of one would be completed by anything."""
    first, then = (dict(random_weights(pair.hf, seed)) for seed in (0, 1))
    some = {n for n in first if n.startswith("model.layers.2.") or n == "model.norm.weight"}
    for engine in (pair.hf, pair.vllm):
        engine.load_weights(((n, then[n]) for n in first if n in some), 1, only=some)
    sampling = Sampling(max_new_tokens=8, samples_per_prompt=2)
    samples = pair.vllm.generate(prompts(5, 33), sampling)
    assert pair.check(samples, sampling)[0] < 1e-5
    taken = pair.hf.checksums()
    assert {n: pair.vllm.checksums()[n] for n in taken} == taken
    lacking = some - {"model.layers.2.mlp.experts.3.up_proj.weight"}
    with pytest.raises(ValueError, match=r"1 tensors of 1 layers .*experts\.3\.up_proj"):
        pair.vllm.load_weights(((n, then[n]) for n in lacking), 2, only=lacking)
    with pytest.raises(RuntimeError, match="version 2 failed"):
        pair.vllm.generate(prompts(5), sampling)
    pair.load(0)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_stream_that_is_closed_leaves_nothing_in_vllm(pair: Pair, error: Any):
    """Some samples have come, others run, a prompt is read in part, and some wait."""
    sampling = Sampling(max_new_tokens=12, samples_per_prompt=8, stop_ids=tuple(range(64)))
    asked = prompts(5, 200, 3, 180)
    whole = {(s.prompt_id, s.index): s for s in pair.vllm.stream(asked, sampling)}
    stream = pair.vllm.stream(asked, sampling)
    some = [next(stream) for _ in range(3)]
    with pytest.raises(RuntimeError, match="a stream is open"):
        next(pair.vllm.stream(asked, sampling))
    if error is None:
        stream.close()
    else:
        with pytest.raises(error):
            stream.throw(error)
    assert not pair.vllm._engine.has_unfinished_requests()
    again = list(pair.vllm.stream(asked, sampling))
    assert len(again) == 32 and pair.check(again, sampling)[0] < 1e-5
    for sample in some + again:
        assert torch.equal(sample.tokens, whole[sample.prompt_id, sample.index].tokens)


def test_stream_fails_when_vllm_lost_a_request(pair: Pair):
    sampling = Sampling(max_new_tokens=30, samples_per_prompt=2, stop_ids=tuple(range(16)))
    stream = pair.vllm.stream(prompts(5, 6, 7, 8), sampling)
    next(stream)
    pair.vllm._engine.abort_request([str(n) for n in range(8)])
    with pytest.raises(RuntimeError, match=r"ended without \d of 8 samples"):
        list(stream)


def test_stream_fails_when_its_weights_are_replaced(pair: Pair):
    sampling = Sampling(max_new_tokens=30, samples_per_prompt=2, stop_ids=tuple(range(16)))
    stream = pair.vllm.stream(prompts(5, 6, 7, 8), sampling)
    next(stream)
    pair.load(1)
    with pytest.raises(RuntimeError, match="version 0 of the weights was replaced"):
        list(stream)
    assert not pair.vllm._engine.has_unfinished_requests()
    pair.load(0)


def test_stream_that_ctrl_c_ends_inside_a_forward_leaves_a_usable_engine(pair: Pair):
    sampling = Sampling(max_new_tokens=12, samples_per_prompt=8)
    before = pair.vllm.generate(prompts(5, 200, 3), sampling)
    worker = pair.vllm._engine.engine_core.engine_core.model_executor.driver_worker.worker
    seen: list[int] = []

    def interrupt(*_: Any) -> None:
        seen.append(1)
        if len(seen) in (2, 9):  # while prompts are read, and while tokens are drawn
            raise KeyboardInterrupt

    hook = worker.model_runner.model.register_forward_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            pair.vllm.generate(prompts(5, 200, 3), sampling)
        assert not pair.vllm._engine.has_unfinished_requests()
    hook.remove()
    again = pair.vllm.generate(prompts(5, 200, 3), sampling)
    assert pair.check(again, sampling)[0] < 1e-5
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(before, again, strict=True))


def test_stream_yields_samples_as_they_finish(pair: Pair):
    sampling = Sampling(max_new_tokens=40, samples_per_prompt=8, stop_ids=tuple(range(8)))
    lengths = [len(s.response) for s in pair.vllm.stream(prompts(3, 4), sampling)]
    assert len(lengths) == 16 and lengths == sorted(lengths) and len(set(lengths)) > 3


def feed_of(*lengths: int, turns: int = 4, **more: Any) -> ScriptedFeed:
    """Two trajectories a prompt, with answers of at most eight tokens."""
    script = ragged(turns, 128)
    return ScriptedFeed(first_turns(prompts(*lengths), 2, 8), script, max_tokens=256, **more)


def test_answer_has_the_logprobs_and_routes_of_transformers(pair: Pair):
    """Contexts of which a block of 128 tokens is in the cache, whose routes an earlier turn has."""
    sampling = Sampling(8, samples_per_prompt=2, seed=4, stop_ids=tuple(range(10)))
    first = pair.vllm.generate(prompts(3, 130, 150), sampling)
    samples = by_turn(answers(pair.vllm, feed_of(3, 130, 150), sampling))
    assert len(samples) == 24 and pair.check([*samples.values()], sampling, whole=False)[0] < 1e-5
    for sample in first:
        assert torch.equal(samples[sample.prompt_id, sample.index, 0].tokens, sample.tokens)
    for prompt, index in {key[:2] for key in samples}:
        turns = [samples[prompt, index, turn] for turn in range(4)]
        routed = torch.zeros(256, dtype=torch.bool)
        for sample in turns:
            cached = 128 if prompt and sample.turn else 0
            assert not sample.route_mask[:cached].any() and sample.route_mask[cached:-1].all()
            routed[: len(sample.tokens)] |= sample.route_mask
        assert routed[: len(turns[-1].tokens) - 1].all()
    assert len({tuple(s.response) for s in samples.values()}) > 20
    again = pair.vllm.generate(prompts(3, 130, 150), sampling)  # a stream reads no cache
    assert pair.check(again, sampling)[0] < 1e-5


def test_answer_never_reads_keys_of_earlier_weights(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """A publish in the middle of trajectories, between and within answers; also when the cache is
    not cleared, as vLLM refuses to while requests run."""
    sampling = Sampling(8, seed=4)
    for version, clears in ((1, True), (0, False)):
        if not clears:
            monkeypatch.setattr(pair.vllm._engine, "reset_prefix_cache", lambda: False)
        before = by_turn(answers(pair.vllm, feed_of(130, 150, turns=1), sampling))
        open_one = pair.vllm.answer(feed_of(150), sampling)
        next(open_one)
        pair.load(version)
        with pytest.raises(RuntimeError, match=r"answer: version \d of the weights was"):
            list(open_one)
        later = [
            Turn(Prompt(s.prompt_id, (*s.tokens.tolist(), 5, 6)), s.index, 1, 8)
            for s in before.values()
        ]
        feed = ScriptedFeed(later, lambda _: None, max_tokens=256)
        samples = [*answers(pair.vllm, feed, sampling)]
        assert pair.check(samples, sampling)[0] < 1e-5
        assert {(s.turn, s.weight_version) for s in samples} == {(1, version)}


def test_answer_that_is_closed_leaves_nothing_in_vllm(pair: Pair):
    feed = feed_of(3, 130)
    stream = pair.vllm.answer(feed, Sampling(8))
    feed.reply(next(stream))
    stream.close()
    assert not pair.vllm._engine.has_unfinished_requests()
    assert pair.vllm.capabilities.turns
    assert len([*answers(pair.vllm, feed_of(3, 130), Sampling(8))]) == 16


def test_generate_computes_requests_again_that_lost_their_cache(pair: Pair):
    """Nine blocks of 32 keys and values for twelve samples that need two to four each."""
    small = Pair(pair.config, block_size=32, num_gpu_blocks_override=10)
    sampling = Sampling(max_new_tokens=40, samples_per_prompt=4)
    samples = small.vllm.generate(prompts(20, 70, 3), sampling)
    assert small.preempted > 3
    assert small.check(samples, sampling)[0] < 1e-5
    roomy = pair.vllm.generate(prompts(20, 70, 3), sampling)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(samples, roomy, strict=True))
    small.vllm.close()


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    **{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    **{"intermediate_size": 128, "moe_intermediate_size": 32, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    **{"max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-6},
    "rope_scaling": {
        **{"type": "yarn", "factor": 8, "original_max_position_embeddings": 64},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    },
}
GLM = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    **{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    **{"intermediate_size": 128, "moe_intermediate_size": 32, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    **{"attention_bias": True, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1},
    **{"num_experts_per_tok": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
    **{"max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-6},
}
DENSE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    **{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-6},
    "tie_word_embeddings": True,
}


LLAMA = DENSE | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
}
MIXTRAL = DENSE | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "tie_word_embeddings": False,
}
QWEN2 = {name: value for name, value in DENSE.items() if name != "head_dim"} | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 128,  # heads of 32
}
MINIMAX = DENSE | {
    "model_type": "minimax_m2",
    "architectures": ["MiniMaxM2ForCausalLM"],
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
}
OTHERS = [DEEPSEEK, GLM, DENSE, LLAMA, MIXTRAL, QWEN2, MINIMAX]


@pytest.mark.parametrize("config", OTHERS, ids=lambda c: c["model_type"])
def test_generate_equals_transformers_for_other_families(config: dict[str, Any], tmp_path: Path):
    """Groups of experts, a stretched rotary, biases, rotary of half a head, norms over all heads,
    no experts at all; with what transformers writes in a config.json."""
    CONFIG_MAPPING[config["model_type"]].from_dict(config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "topk_method" not in written and "scoring_func" not in written
    pair = Pair(tmp_path)
    sampling = Sampling(max_new_tokens=24, samples_per_prompt=4, temperature=0.7)
    samples = pair.vllm.generate(prompts(5, 33, 150), sampling)
    worst, routed = pair.check(samples, sampling)
    assert worst < 1e-4 and (routed > 500 or not pair.hf.routed.layer_ids)
    pair.vllm.close()


def test_generate_is_as_exact_as_transformers_in_bfloat16_with_states(tmp_path: Path):
    """vLLM for CPUs has no float32 there; weights come twice, long prompts in parts."""
    config = hf_of("tiny_qwen3_next")
    config |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    write_sizes(tmp_path, config)
    pair = Pair(tmp_path, dtype="bfloat16")
    half = HFEngine(tmp_path, dtype=torch.bfloat16)
    weights = [(name, tensor.bfloat16()) for name, tensor in random_weights(pair.hf, 1)]
    for engine in (half, pair.hf, pair.vllm):
        engine.load_weights(weights, version=1)
    sampling = Sampling(max_new_tokens=12, samples_per_prompt=2)
    samples = pair.vllm.generate(prompts(1, 5, 33, 150), sampling)
    exact = [pair.forward(sample) for sample in samples]
    pair.hf = half
    rounded = [pair.forward(sample) for sample in samples]
    gaps = torch.zeros(2)
    same = torch.zeros(2)
    for sample, (logits, routes), (nearly, others) in zip(samples, exact, rounded, strict=True):
        of_exact, of_nearly = (
            x[:-1].double().log_softmax(-1).gather(1, sample.tokens[1:, None])[:, 0]
            for x in (logits, nearly)
        )
        at = sample.loss_mask[1:]
        has = sample.route_mask
        assert has[:-1].all() and not has[-1] and sample.routes is not None
        for i, logprobs in enumerate((sample.rollout_logprobs[1:], of_nearly)):
            gaps[i] += (logprobs - of_exact)[at].abs().sum()
        want = routes[has].long().sort(-1).values
        for i, found in enumerate((sample.routes, others)):
            same[i] += (found[has].long().sort(-1).values == want).all(-1).float().mean()
    assert 0 < gaps[0] < 1.5 * gaps[1]
    assert same[0] > same[1] - 0.02 * len(samples)
    pair.vllm.close()


OWN_ROUTES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pyrl_ext.samples import Sampling
from tests.helpers.ranks import run_ranks
from tests.helpers.turns import ScriptedFeed, answers, first_turns, ragged
from tests.helpers.vllm_pair import CONFIGS, Pair, check_sets, prompts


def check(model):
    pair = Pair(CONFIGS / model, True, block_size=32, num_gpu_blocks_override=10)
    cached = []
    step = pair.vllm._engine.step

    def counting():
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    pair.vllm._engine.step = counting
    sampling = Sampling(max_new_tokens=6, samples_per_prompt=2)
    for attempt in range(2):  # the second time prompts are in the prefix cache
        worst, routed = pair.check(pair.vllm.generate(prompts(5, 90), sampling), sampling)
        print("worst", worst, "routed", routed, "cached", cached)
        assert worst < 1e-5 and (not attempt or cached[-1] == 64)
    turns = ScriptedFeed(first_turns(prompts(40), 2, 3), ragged(3, 128), max_tokens=256)
    turns = [*answers(pair.vllm, turns, sampling)]
    assert pair.check(turns, sampling)[0] < 1e-5, "of cached tokens too"
    assert len(turns) == 6 and max(cached) >= 32
    left = pair.vllm.stream(prompts(5, 90), sampling)
    next(left)
    left.close()
    pair.load(1)
    pair.preempted = 0
    worst, _ = pair.check(pair.vllm.generate(prompts(5, 90, 30, 31), sampling), sampling)
    assert worst < 1e-5, "the prefix cache holds keys and values of earlier weights"
    assert pair.preempted > 0
    stop = Sampling(max_new_tokens=6, samples_per_prompt=2, stop=tuple("0123456789"))
    samples = pair.vllm.generate(prompts(5, 40), stop)
    assert pair.check(samples, stop)[0] < 1e-5
    assert any(s.finish_reason == "stop" for s in samples), "no stop string was met"
    pair.vllm.close()
    pair = Pair(CONFIGS / model, True, block_size=32, sampling_mask=True)
    for more in ({"top_k": 5}, {"top_p": 0.8, "top_k": 20}):
        sampling = Sampling(max_new_tokens=4, samples_per_prompt=2, **more)
        samples = pair.vllm.generate(prompts(5, 70), sampling)
        assert pair.check(samples, sampling)[0] < 1e-5
        assert check_sets(pair, samples, sampling) > 4 * 4
    (greedy,) = pair.vllm.generate(prompts(5), Sampling(max_new_tokens=4, greedy=True))
    assert greedy.response == pair.forward(greedy)[0][4:-1].argmax(-1).tolist()
    pair.vllm.close()

for model in sys.argv[2:]:
    check(model)
"""


def test_generate_has_the_routes_of_transformers_by_vllms_own_way():
    """Chunked prompts, shared prefixes, cached ones, pre-empted requests, an aborted stream, stop
    strings, the last token without a route."""
    command = [sys.executable, "-c", OWN_ROUTES, str(Path(__file__).parents[3]), *MODELS]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("worst") == 2 * len(MODELS)


ROUTES_OF_RANKS = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.helpers.ranks import run_ranks
from tests.helpers.vllm_pair import check_routes_of_ranks

if __name__ == "__main__":
    run_ranks(check_routes_of_ranks, 2, sys.argv[2])  # without vLLM: see cpu.prepare
"""


@pytest.mark.parametrize("model", MODELS)
def test_generate_of_two_ranks_has_routes_by_vllms_own_way(model: str):
    """Each rank has a scheduler; vLLM gives routes to the first rank of the tensor parallel group
    alone."""
    command = [sys.executable, "-c", ROUTES_OF_RANKS, str(Path(__file__).parents[3]), model]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


def test_train_equals_with_an_engine_a_rank_and_one_for_two_ranks(tmp_path: Path):
    short = ("steps=2", "evaluate.every=0", "log.progress=false", "rollout.engine=vllm")
    config = CONFIGS / "tiny.yaml"
    rows = list[list[dict[str, Any]]]()
    memory = Path("/dev/shm")
    left = set(memory.glob("-tp*"))
    for ranks, tp in ((2, 1), (4, 2)):
        folder = tmp_path / str(tp)
        run = (*short, f"run={folder}", f"parallel.dp={ranks}", f"rollout.tp={tp}")
        assert run_ranks(train_on_rank, ranks, config, *run, preload=WITH_VLLM) == [0] * ranks
        rows.append(read_rows(folder / "metrics.jsonl"))
    for a, b in zip(*rows, strict=True):
        assert a["reward"] == b["reward"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        for row in (a, b):
            assert row["mismatch/max"] < 1e-5 and row["route/agree_topk"] == 1.0
    assert set(memory.glob("-tp*")) == left  # or the next run on this host fails


def load_on_half(group: dist.ProcessGroup) -> list[str]:
    """Loads experts together and one by one; names of parameters that are not the same."""
    join_vllm(group)
    hf = HFEngine(CONFIGS / "tiny")
    engine = VLLMEngine(
        CONFIGS / "tiny",
        num_experts=8,
        layer_ids=hf.routed.layer_ids,
        max_tokens=256,
        tp=2,
        options={"enable_expert_parallel": True},
    )
    engine.load_weights(random_weights(hf, 4), 0)
    found = engine.checksums()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "places_of", lambda _: {})
        engine.load_weights(random_weights(hf, 5), 1)
        assert engine.checksums() != found
        engine.load_weights(random_weights(hf, 4), 2)
    after = engine.checksums()
    places = loading.places_of(engine._engine.model_executor.driver_worker.worker._held_model())
    assert places == {4 * group.rank() + place: place for place in range(4)}
    engine.close()
    return [name for name in found if found[name] != after[name]]


def test_load_weights_gives_a_worker_its_experts():
    """Half of them each. vLLM's kernel for CPUs does not run them."""
    assert run_ranks(load_on_half, 2, preload=WITH_VLLM) == [[], []]


class FailingScorer(Scorer):
    """The reward function fails as soon as a group is complete."""

    def __call__(self, samples: Any) -> Any:
        raise ZeroDivisionError("no reward")


def train_with_a_reward_that_fails(group: dist.ProcessGroup, *run: Any) -> tuple[int, str]:
    """On the first rank; exit code, and what was printed to stderr."""
    said = io.StringIO()
    if group.rank() == 0:
        source.Scorer = FailingScorer
    with contextlib.redirect_stderr(said):
        return train_on_rank(group, *run), said.getvalue()


def test_train_ends_on_both_ranks_of_an_engine_when_a_reward_fails_on_one(tmp_path: Path):
    """While vLLM has further groups to generate, on both."""
    run = (f"run={tmp_path}", "rollout.engine=vllm", "rollout.tp=2", "parallel.dp=2")
    more = ("steps=2", "batching.prompts=4", "evaluate.every=0", "rollout.max_num_seqs=8")
    given = (CONFIGS / "tiny.yaml", *run, *more)
    found = run_ranks(train_with_a_reward_that_fails, 2, *given, preload=WITH_VLLM)
    assert [code for code, _ in found] == [1, 1]
    assert "rank 0: ZeroDivisionError: no reward" in "".join(said for _, said in found)


class Touched(Disturbed):
    """vLLM's own memory changes after the first load."""

    factor = 1.5

    def load_weights(self, named: Any, version: int, only: Any = None) -> None:
        super().load_weights(named, version, only)
        worker = self.engine._engine.model_executor.driver_worker.worker
        worker.model_runner.model.model.norm.weight.data *= self.factor
        self.factor = 1.0


BROKEN = {"stale": lambda e: Disturbed(e, Stale(DOWN)), "touched": lambda e: Touched(e, list)}


def train_broken(group: dist.ProcessGroup, kind: str, *run: Any) -> tuple[int, str]:
    """Exit code of a run over a broken engine, and what it printed to stderr."""
    build = rollouts.build_engine
    said = io.StringIO()
    rollouts.build_engine = lambda *given: BROKEN[kind](build(*given))
    with contextlib.redirect_stderr(said):
        return train_on_rank(group, *run), said.getvalue()


MESSAGES = {
    "stale": (  # one expert of 24 keeps its first weights: the step after it is not trained on
        1,
        "sync_weights: rank 0, version 1: 1 of ",
        "\n  model.layers.2.mlp.experts.3.down_proj.weight",
    ),
    "touched": (  # vLLM's own memory changes after the load: the first batch's log-probs tell
        0,
        "rollout.max_mismatch: step 0: ",
        "\n  rank 0: vllm rank 0: model.norm.weight changed",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_train_ends_at_a_broken_publish(kind: str, tmp_path: Path):
    steps, *messages = MESSAGES[kind]
    run = (f"run={tmp_path}", "rollout.engine=vllm", "rollout.check_tensors=all", "steps=3")
    more = ("batching.prompts=4", "evaluate.every=0")
    given = (kind, CONFIGS / "tiny.yaml", *run, *more)
    ((code, said),) = run_ranks(train_broken, 1, *given, preload=WITH_VLLM)
    assert code == 1 and all(message in said for message in messages), said[-3000:]
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert len(rows) == steps
    assert all(row["mismatch/max"] < 1e-4 and row["publish/checked"] > 100 for row in rows)


def served(model: str) -> VLLMEngine:
    """Built in another process, with a process for each half of the model."""
    layers = HFEngine(CONFIGS / model).routed.layer_ids
    return VLLMEngine(
        CONFIGS / model, num_experts=8, layer_ids=layers, max_tokens=256, max_num_seqs=16, tp=2
    )


def test_ProcessEngine_with_two_workers_equals_transformers(tmp_path: Path):
    """Each half reads the weights itself; after a failed publish both take the next one."""
    pair = Pair.__new__(Pair)  # of transformers and the served one
    pair.hf = HFEngine(CONFIGS / "tiny")
    sampling = Sampling(max_new_tokens=8, samples_per_prompt=2)
    log = tmp_path / "engine.log"
    with closing(
        ProcessEngine(served, ("tiny",), transport="shm", bucket_bytes=20_000, readers=2, log=log)
    ) as engine:
        for seed in (0, 1):
            weights = random_weights(pair.hf, seed)
            pair.hf.load_weights(weights, seed)
            for broken, problem in ((weights[:-1], "missing"), (weights * 2, "given twice")):
                with pytest.raises(ValueError, match=problem):
                    engine.load_weights(broken, version=7)
                with pytest.raises(RuntimeError, match="loading version 7 failed"):
                    engine.generate(prompts(5), sampling)
            engine.load_weights(weights, seed)
            samples = engine.generate(prompts(5, 33), sampling)
            assert pair.check(samples, sampling)[0] < 1e-5
            assert {sample.weight_version for sample in samples} == {seed}
            taken = engine.checksums([name for name, _ in weights])
            assert taken == pair.hf.checksums()
