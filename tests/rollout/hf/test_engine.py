"""The embedded engine against plain forwards, and sampling against brute force."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pyrl_ext.rollout.hf import run
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.hf.sampling import processed_logprobs
from pyrl_ext.samples import Prompt, Sampling
from tests.helpers.engines import (
    CONFIGS,
    DENSE,
    GLM,
    QWEN,
    assert_matches_plain,
    checkpoint,
    engine_of,
    plain,
    prompts_of,
    random_model,
)

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("family", CONFIGS)
def test_generate_matches_plain_forwards(family: str):
    """Fewer slots than samples, ragged prompts, early stops: continuous batching throughout."""
    config = CONFIGS[family]
    model = random_model(config)
    engine = engine_of(model, config, max_num_seqs=5)
    prompts = prompts_of([1, 7, 3, 12, 5], config["vocab_size"])
    sampling = Sampling(9, 1.3, stop_ids=(*range(20, 28),), samples_per_prompt=3, seed=5)
    samples = engine.generate(prompts, sampling)
    assert [(s.prompt_id, s.index) for s in samples] == [
        (p.id, i) for p in prompts for i in (0, 1, 2)
    ]
    reasons = {s.finish_reason for s in samples}
    assert reasons == {"stop", "length"}
    assert len({len(s.response) for s in samples}) > 2
    for sample in samples:
        sample.check()
        assert sample.weight_version == 3
        assert tuple(sample.tokens[: sample.prompt_len].tolist()) == next(
            p.tokens for p in prompts if p.id == sample.prompt_id
        )
        assert_matches_plain(model, sample, sampling)


def test_generate_keeps_the_stop_token_in_the_response():
    model = random_model(GLM)
    engine = engine_of(model, GLM)
    prompts = prompts_of([4] * 6, 128)
    free = engine.generate(prompts, Sampling(6, seed=1))
    stop = free[2].response[2]
    for before, after in zip(
        free, engine.generate(prompts, Sampling(6, seed=1, stop_ids=(stop,))), strict=True
    ):
        end = before.response.index(stop) + 1 if stop in before.response else 6
        assert after.response == before.response[:end]
        assert after.finish_reason == ("stop" if stop in before.response else "length")
        assert after.loss_mask[-1] and after.rollout_logprobs[-1] < 0


def test_generate_stores_routes_of_more_than_256_experts_in_two_bytes():
    config = {**QWEN, "num_experts": 300, "moe_intermediate_size": 4}
    model = random_model(config)
    engine = engine_of(model, config, max_num_seqs=2)
    samples = engine.generate(prompts_of([3, 5, 2], 96), Sampling(4))
    for sample in samples:
        _, routes = plain(model, sample.tokens)
        assert sample.check().routes is not None
        assert sample.routes is not None and sample.routes.dtype == torch.uint16
        for column, layer in enumerate(sample.layer_ids):
            got = sample.routes[:-1, column].long().sort(-1).values
            assert torch.equal(got, routes[layer][:-1].sort(-1).values)
    assert max(int(s.routes.long().max()) for s in samples if s.routes is not None) > 255


def test_generate_gives_tensors_that_a_loss_can_use():
    [sample] = engine_of(random_model(GLM), GLM).generate(prompts_of([3], 128), Sampling(2))
    scale = torch.ones((), requires_grad=True)
    (sample.rollout_logprobs * scale).sum().backward()
    assert scale.grad == sample.rollout_logprobs.sum()


def test_generate_gives_responses_of_one_token():
    engine = engine_of(random_model(GLM), GLM, max_num_seqs=2)
    samples = engine.generate(prompts_of([1, 2, 3], 128), Sampling(1, samples_per_prompt=2))
    assert [len(s.response) for s in samples] == [1] * 6
    assert all(s.routes is not None and s.routes.shape == (len(s.tokens), 3, 2) for s in samples)


def test_generate_gives_no_samples_without_prompts():
    assert engine_of(random_model(GLM), GLM).generate([], Sampling(4)) == []


def test_generate_does_not_depend_on_the_batch_of_a_sample(monkeypatch: pytest.MonkeyPatch):
    model = random_model(GLM)
    prompts = prompts_of([3, 9, 5, 6], 128)
    sampling = Sampling(8, samples_per_prompt=4, seed=11, stop_ids=(30, 31, 32))
    wide = engine_of(model, GLM).generate(prompts, sampling)
    expected = {(s.prompt_id, s.index): s.response for s in wide}
    assert len({tuple(r) for r in expected.values()}) > 8
    for options, order in (
        ({"max_num_seqs": 3}, prompts),
        ({}, prompts[::-1]),
        ({}, prompts[2:3]),
        ({}, prompts),
    ):
        if order is prompts and not options:
            monkeypatch.setattr(run, "MAX_PREFILL_TOKENS", 1)
        for sample in engine_of(model, GLM, **options).generate(order, sampling):
            assert sample.response == expected[sample.prompt_id, sample.index], (options, order)


def test_generate_draws_by_seed_prompt_and_index():
    engine = engine_of(random_model(GLM, std=0.05), GLM)
    prompts = [Prompt(0, (5, 6)), Prompt(1, (5, 6))]
    drawn = [
        tuple(s.response)
        for seed in (0, 1)
        for s in engine.generate(prompts, Sampling(6, samples_per_prompt=3, seed=seed))
    ]
    assert len(set(drawn)) == 12


def test_generate_takes_the_argmax_when_greedy():
    model = random_model(GLM)
    sampling = Sampling(6, temperature=0.5, top_k=3, greedy=True)
    for sample in engine_of(model, GLM).generate(prompts_of([4, 2], 128), sampling):
        logits, _ = plain(model, sample.tokens)
        best = logits.log_softmax(-1).max(-1)
        start = sample.prompt_len
        assert sample.response == best.indices[start - 1 : -1].tolist()
        torch.testing.assert_close(
            sample.rollout_logprobs[start:], best.values[start - 1 : -1], atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    "options",
    [{"top_k": 5}, {"top_p": 0.4}, {"top_k": 12, "top_p": 0.7, "temperature": 0.6}],
    ids=["top_k", "top_p", "all"],
)
def test_generate_reports_logprobs_of_the_filtered_distribution(options: dict[str, Any]):
    model = random_model(GLM)
    sampling = Sampling(5, samples_per_prompt=4, **options)
    for sample in engine_of(model, GLM).generate(prompts_of([4, 2], 128), sampling):
        assert_matches_plain(model, sample, sampling)


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 12, "top_p": 0.7}])
def test_generate_returns_the_tokens_that_were_kept(options: dict[str, Any]):
    """Rows finish at other times than they begin, so sets move with their samples."""
    model = random_model(GLM)
    sampling = Sampling(9, samples_per_prompt=5, stop_ids=tuple(range(20)), **options)
    asked = replace(sampling, sampling_mask=True)
    engine = engine_of(model, GLM, max_num_seqs=4)
    plainly = engine.generate(prompts_of([4, 2, 7], 128), sampling)
    drawn = engine.generate(prompts_of([4, 2, 7], 128), asked)
    for sample, other in zip(drawn, plainly, strict=True):
        assert sample.check().response == other.response and other.kept_ids is None
        assert sample.kept_counts is not None and sample.kept_ids is not None
        start, (logits, _) = sample.prompt_len, plain(model, sample.tokens)
        kept = processed_logprobs(logits[start - 1 : -1], sampling) > -torch.inf
        assert sample.kept_counts[start:].tolist() == kept.sum(1).tolist()
        assert sample.kept_ids.tolist() == kept.nonzero()[:, 1].tolist()
    greedy = replace(asked, greedy=True, samples_per_prompt=1)
    assert all(s.kept_ids is None for s in engine.generate(prompts_of([4], 128), greedy))


def test_generate_leaves_global_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    model = random_model(GLM)
    torch.manual_seed(3)
    engine_of(model, GLM).generate(prompts_of([4], 128), Sampling(3))
    assert torch.equal(torch.rand(4), expected)


def test_load_weights_makes_two_engines_equal():
    first = random_model(GLM, 0)
    second = random_model(GLM, 1)
    prompts = prompts_of([5, 3], 128)
    sampling = Sampling(6, samples_per_prompt=2)
    one = engine_of(first, GLM)
    two = engine_of(second, GLM)
    a = one.generate(prompts, sampling)
    b = two.generate(prompts, sampling)
    assert [s.response for s in a] != [s.response for s in b]
    one.load_weights(checkpoint(second).items(), version=4)
    again = one.generate(prompts, sampling)
    assert [s.response for s in again] == [s.response for s in b]
    assert {s.weight_version for s in again} == {4}


def test_load_weights_converts_float32_for_a_bfloat16_engine():
    engine = engine_of(random_model(GLM), GLM, dtype=torch.bfloat16)
    names = dict(engine.model.named_parameters())
    assert {p.dtype for p in names.values()} == {torch.bfloat16}
    biases = [b for n, b in engine.model.named_buffers() if n.endswith("e_score_correction_bias")]
    assert len(biases) == 3 and all(b.dtype == torch.float32 for b in biases)
    for sample in engine.generate(prompts_of([4, 2], 128), Sampling(4)):
        assert sample.check().rollout_logprobs.dtype == torch.float32


def test_load_weights_skips_mtp_layers():
    config = {**GLM, "num_nextn_predict_layers": 1}
    engine = HFEngine(config)
    tensors = checkpoint(random_model(GLM))
    extra = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    engine.load_weights({**tensors, **extra}.items(), 0)
    with pytest.raises(ValueError, match=r"model\.layers\.5\.x: unknown name"):
        engine.load_weights({**tensors, "model.layers.5.x": torch.zeros(1)}.items(), 0)


def test_generate_refuses_before_weights_were_loaded():
    with pytest.raises(RuntimeError, match="no weights were loaded yet"):
        HFEngine(GLM).generate([Prompt(0, (5,))], Sampling(2))


def test_load_weights_lists_all_bad_tensors_and_blocks_generation():
    engine = engine_of(random_model(GLM), GLM)
    tensors = checkpoint(random_model(GLM))
    bad = dict(tensors)
    missing = "model.layers.2.mlp.experts.5.up_proj.weight"
    del bad[missing]
    bad["model.layers.9.mlp.gate.weight"] = torch.zeros(8, 64)
    bad["model.norm.weight"] = torch.ones(63)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    bad[bias] = torch.full((8,), float("nan"))
    twice = "lm_head.weight"
    with pytest.raises(ValueError) as caught:
        engine.load_weights([*bad.items(), (twice, tensors[twice])], 4)
    text = str(caught.value)
    assert "5 problems" in text
    for line in (
        f"{missing}: missing",
        "model.layers.9.mlp.gate.weight: unknown name",
        "model.norm.weight: shape [63], expected [64]",
        f"{bias}: holds nan or inf",
        f"{twice}: given twice",
    ):
        assert line in text
    with pytest.raises(RuntimeError, match="loading version 4 failed"):
        engine.generate([Prompt(0, (5,))], Sampling(2))
    engine.load_weights(tensors.items(), 5)
    assert engine.generate([Prompt(0, (5,))], Sampling(2))[0].weight_version == 5


def test_load_weights_replaces_only_the_tensors_it_names():
    first = checkpoint(random_model(GLM))
    then = checkpoint(random_model(GLM, seed=1))
    some = {"model.norm.weight", "model.layers.2.mlp.experts.5.up_proj.weight"}
    engine = engine_of(random_model(GLM), GLM)
    parts = [(name, then[name]) for name in some]
    engine.load_weights(first.items(), 0)
    engine.load_weights(parts, 1, only=some)
    mixed = engine_of(random_model(GLM), GLM)
    mixed.load_weights((first | dict(parts)).items(), 1)
    assert engine.checksums() == mixed.checksums() and engine.version == 1
    for given, words in (
        (parts[:1], f"{parts[1][0]}: missing"),
        ([*parts, ("lm_head.weight", first["lm_head.weight"])], "lm_head.weight: not among the 2"),
    ):
        engine.load_weights(first.items(), 0)
        with pytest.raises(ValueError, match=words):
            engine.load_weights(given, 2, only=some)
        with pytest.raises(RuntimeError, match=r"2 tensors are to replace .* version 2 failed"):
            engine.load_weights(parts, 3, only=some)


def test_load_weights_needs_every_tensor_of_a_checkpoint():
    engine = HFEngine(GLM)
    tensors = checkpoint(random_model(GLM))
    for name in ("lm_head.weight", "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"):
        with pytest.raises(ValueError, match=f"{name}: missing"):
            engine.load_weights(((n, t) for n, t in tensors.items() if n != name), 0)


def test_load_weights_that_fails_half_way_blocks_generation():
    engine = engine_of(random_model(GLM), GLM)
    tensors = checkpoint(random_model(GLM))

    def broken() -> Any:
        yield from list(tensors.items())[:10]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        engine.load_weights(broken(), 4)
    with pytest.raises(RuntimeError, match="loading version 4 failed"):
        engine.generate([Prompt(0, (5,))], Sampling(2))


def test_generate_refuses_non_finite_logits():
    model = random_model(GLM)
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    with pytest.raises(RuntimeError, match=r"prompt 10\): non-finite logits"):
        engine_of(model, GLM).generate(prompts_of([4], 128), Sampling(3))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([Prompt(4, ())], r"prompt 4\): 0 tokens"),
        ([Prompt(4, (5, 128))], r"prompt 4\): token id 128, expected 0 to 127"),
        ([Prompt(4, (5,) * 510)], r"510 tokens \+ max_new_tokens 3, expected at most 512"),
    ],
)
def test_generate_refuses_bad_prompts(prompts: list[Prompt], message: str):
    with pytest.raises(ValueError, match=message):
        engine_of(random_model(GLM), GLM).generate(prompts, Sampling(3))


def test_HFEngine_refuses_bad_arguments():
    with pytest.raises(ValueError, match="model_type 'nothing'"):
        HFEngine({"model_type": "nothing"})
    with pytest.raises(ValueError, match="max_num_seqs: 0"):
        HFEngine(GLM, max_num_seqs=0)


def test_capabilities_follow_the_model():
    assert HFEngine(GLM).capabilities.routes
    assert not HFEngine(DENSE).capabilities.routes
