"""The embedded engine against plain forwards, and sampling against brute force."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.hf.sampling import draw, processed_logprobs, stream_keys, uniforms
from pyrl_ext.samples import Prompt, Sample, Sampling, route_dtype

GLM: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "configs/tiny/config.json").read_text()
)
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
DENSE = {**QWEN, "model_type": "qwen3"}
CONFIGS = {"glm4_moe_lite": GLM, "qwen3_moe": QWEN, "qwen3": DENSE}


def build(config: dict[str, Any], seed: int = 0, std: float = 0.2) -> Any:
    """A random model with sharp logits and unequal router biases."""
    generator = torch.Generator().manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[config["model_type"]].from_dict(config), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.1 * noise if "norm" in name else std * noise)
    return model


def checkpoint(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of its safetensors."""
    found = {}
    tied = model.config.tie_word_embeddings
    for name, value in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                stem = name.removesuffix("gate_up_proj") + f"{expert}."
                gate, up = both.chunk(2)
                found[stem + "gate_proj.weight"], found[stem + "up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                found[name.removesuffix("down_proj") + f"{expert}.down_proj.weight"] = down
        elif not (tied and name == "lm_head.weight"):
            found[name] = value
    return found


def engine_of(model: Any, config: dict[str, Any], **options: Any) -> HFEngine:
    engine = HFEngine(config, **options)
    engine.load_weights(checkpoint(model).items(), version=3)
    return engine


def prompts_of(sizes: list[int], vocab: int, seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [Prompt(10 + i, tuple(rng.integers(3, vocab, n).tolist())) for i, n in enumerate(sizes)]


def plain(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits [T, V] of one full forward, and the experts [T, K] of every router layer."""
    routes: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        return lambda module, args, output: routes.__setitem__(layer, output[2])

    hooks = [
        module.register_forward_hook(keep(int(name.split(".")[2])))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits, routes


def assert_matches_plain(model: Any, sample: Sample, sampling: Sampling) -> None:
    logits, routes = plain(model, sample.tokens)
    size, start = len(sample.tokens), sample.prompt_len
    expected = processed_logprobs(logits[start - 1 : -1], sampling)
    chosen = sample.tokens[start:, None]
    torch.testing.assert_close(
        sample.rollout_logprobs[start:], expected.gather(1, chosen)[:, 0], atol=1e-5, rtol=0
    )
    assert sample.layer_ids == tuple(sorted(routes))
    if sample.routes is not None:
        assert sample.routes.dtype == torch.uint8
        for column, layer in enumerate(sample.layer_ids):
            got = sample.routes[:-1, column].long().sort(-1).values
            assert torch.equal(got, routes[layer][:-1].sort(-1).values), f"layer {layer}"
        assert sample.route_mask.tolist() == [True] * (size - 1) + [False]
        assert not sample.routes[-1].any()
    assert sample.loss_mask.tolist() == [False] * start + [True] * (size - start)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", CONFIGS)
def test_samples_match_plain_forwards(family: str, attention: str):
    """Fewer slots than samples, ragged prompts, early stops: continuous batching throughout."""
    config = CONFIGS[family]
    model = build(config)
    engine = engine_of(model, config, max_running=5, attention=attention)
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


def test_stop_token_is_part_of_the_response():
    model = build(GLM)
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


def test_more_than_256_experts_take_two_bytes():
    config = {**QWEN, "num_experts": 300, "moe_intermediate_size": 4}
    model = build(config)
    engine = engine_of(model, config, max_running=2)
    samples = engine.generate(prompts_of([3, 5, 2], 96), Sampling(4))
    for sample in samples:
        _, routes = plain(model, sample.tokens)
        assert sample.check().routes is not None
        assert sample.routes is not None and sample.routes.dtype == torch.uint16
        for column, layer in enumerate(sample.layer_ids):
            got = sample.routes[:-1, column].long().sort(-1).values
            assert torch.equal(got, routes[layer][:-1].sort(-1).values)
    assert max(int(s.routes.long().max()) for s in samples if s.routes is not None) > 255


def test_samples_can_take_part_in_a_loss():
    [sample] = engine_of(build(GLM), GLM).generate(prompts_of([3], 128), Sampling(2))
    scale = torch.ones((), requires_grad=True)
    (sample.rollout_logprobs * scale).sum().backward()
    assert scale.grad == sample.rollout_logprobs.sum()


def test_one_new_token():
    engine = engine_of(build(GLM), GLM, max_running=2)
    samples = engine.generate(prompts_of([1, 2, 3], 128), Sampling(1, samples_per_prompt=2))
    assert [len(s.response) for s in samples] == [1] * 6
    assert all(s.routes is not None and s.routes.shape == (len(s.tokens), 3, 2) for s in samples)


def test_no_prompts_no_samples():
    assert engine_of(build(GLM), GLM).generate([], Sampling(4)) == []


def test_sample_does_not_depend_on_its_batch():
    model = build(GLM)
    prompts = prompts_of([3, 9, 5, 6], 128)
    sampling = Sampling(8, samples_per_prompt=4, seed=11, stop_ids=(30, 31, 32))
    wide = engine_of(model, GLM).generate(prompts, sampling)
    expected = {(s.prompt_id, s.index): s.response for s in wide}
    assert len({tuple(r) for r in expected.values()}) > 8
    for options, order in (
        ({"max_running": 3}, prompts),
        ({"max_prefill_tokens": 1}, prompts),
        ({}, prompts[::-1]),
        ({}, prompts[2:3]),
    ):
        for sample in engine_of(model, GLM, **options).generate(order, sampling):
            assert sample.response == expected[sample.prompt_id, sample.index], (options, order)


def test_seed_prompt_and_index_all_change_the_draw():
    engine = engine_of(build(GLM, std=0.05), GLM)
    prompts = [Prompt(0, (5, 6)), Prompt(1, (5, 6))]
    drawn = [
        tuple(s.response)
        for seed in (0, 1)
        for s in engine.generate(prompts, Sampling(6, samples_per_prompt=3, seed=seed))
    ]
    assert len(set(drawn)) == 12


def test_greedy_is_argmax_of_the_model():
    model = build(GLM)
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
def test_filtered_samples_report_the_filtered_distribution(options: dict[str, Any]):
    model = build(GLM)
    sampling = Sampling(5, samples_per_prompt=4, **options)
    for sample in engine_of(model, GLM).generate(prompts_of([4, 2], 128), sampling):
        assert_matches_plain(model, sample, sampling)


def brute_force(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities of one row, token by token from the most likely one."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    kept = order[:top_k] if top_k else order
    mass = np.exp(scaled[kept] - scaled.max())
    mass /= mass.sum()
    chosen, total = [], 0.0
    for token, p in zip(kept, mass, strict=True):
        if top_p < 1 and total >= top_p:
            break
        chosen.append((token, p))
        total += p
    probs = np.zeros(len(scaled))
    for token, p in chosen:
        probs[token] = p / sum(q for _, q in chosen)
    return probs


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.85, 0.2, 1e-6])
def test_processed_logprobs_against_brute_force(temperature: float, top_k: int, top_p: float):
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)) * 3
    sampling = Sampling(1, temperature, top_p, top_k)
    got = processed_logprobs(logits, sampling).numpy()
    for row in range(6):
        expected = brute_force(logits[row].numpy(), temperature, top_k, top_p)
        np.testing.assert_allclose(np.exp(got[row]), expected, atol=1e-6)
        assert (np.isneginf(got[row]) == (expected == 0)).all()


def test_draw_follows_the_distribution_and_never_takes_a_cut_token():
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -2.0, 0.0]).expand(60_000, -1)
    keys = stream_keys(7, torch.arange(60_000), torch.zeros(60_000, dtype=torch.int64))
    sampling = Sampling(1, temperature=0.8, top_p=0.9)
    tokens, logprobs = draw(logits, keys, torch.full((60_000,), 4), sampling)
    expected = brute_force(logits[0].numpy(), 0.8, 0, 0.9)
    counts = np.bincount(tokens.numpy(), minlength=6) / 60_000
    assert (counts[expected == 0] == 0).all()
    assert abs(counts - expected).max() < 4 * 0.5 / 60_000**0.5
    np.testing.assert_allclose(logprobs.exp().numpy(), expected[tokens.numpy()], atol=1e-6)


def test_uniforms_are_uniform_and_uncorrelated():
    ids, places = torch.arange(400), torch.arange(50)
    keys = stream_keys(0, ids, torch.zeros_like(ids))
    u = torch.stack([uniforms(keys, places[i].expand(400)) for i in range(50)]).numpy()
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * (1 / 12 / u.size) ** 0.5
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees, 0.1 %
    for axis in (0, 1):
        near = np.corrcoef(
            u.take(range(u.shape[axis] - 1), axis).ravel(), np.delete(u, 0, axis).ravel()
        )
        assert abs(near[0, 1]) < 4 / u.size**0.5
    assert len(np.unique(u)) == u.size


def test_splitmix_reference_value():
    """The stream of key k at position p is splitmix64's output number p + 1 from the state k."""
    state, mask = 1234567, 2**64 - 1
    for position in range(3):
        z = (state + (position + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        got = uniforms(torch.tensor([state]), torch.tensor([position])).item()
        assert got == ((z >> 16) + 0.5) * 2.0**-48


def test_global_random_numbers_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    model = build(GLM)
    torch.manual_seed(3)
    engine_of(model, GLM).generate(prompts_of([4], 128), Sampling(3))
    assert torch.equal(torch.rand(4), expected)


def test_two_engines_and_new_weights():
    first, second = build(GLM, 0), build(GLM, 1)
    prompts, sampling = prompts_of([5, 3], 128), Sampling(6, samples_per_prompt=2)
    one, two = engine_of(first, GLM), engine_of(second, GLM)
    a, b = one.generate(prompts, sampling), two.generate(prompts, sampling)
    assert [s.response for s in a] != [s.response for s in b]
    one.load_weights(checkpoint(second).items(), version=4)
    again = one.generate(prompts, sampling)
    assert [s.response for s in again] == [s.response for s in b]
    assert {s.weight_version for s in again} == {4}


def test_bfloat16_engine_takes_float32_weights():
    engine = engine_of(build(GLM), GLM, dtype=torch.bfloat16)
    names = dict(engine.model.named_parameters())
    assert {p.dtype for p in names.values()} == {torch.bfloat16}
    biases = [b for n, b in engine.model.named_buffers() if n.endswith("e_score_correction_bias")]
    assert len(biases) == 3 and all(b.dtype == torch.float32 for b in biases)
    for sample in engine.generate(prompts_of([4, 2], 128), Sampling(4)):
        assert sample.check().rollout_logprobs.dtype == torch.float32


def test_multi_token_prediction_layers_are_not_used():
    config = {**GLM, "num_nextn_predict_layers": 1}
    engine, tensors = HFEngine(config), checkpoint(build(GLM))
    extra = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    engine.load_weights({**tensors, **extra}.items(), 0)
    with pytest.raises(ValueError, match=r"model\.layers\.5\.x: unknown name"):
        engine.load_weights({**tensors, "model.layers.5.x": torch.zeros(1)}.items(), 0)


def test_no_generation_before_weights():
    with pytest.raises(RuntimeError, match="no weights were loaded yet"):
        HFEngine(GLM).generate([Prompt(0, (5,))], Sampling(2))


def test_bad_weights_are_all_listed_and_block_generation():
    engine, tensors = engine_of(build(GLM), GLM), checkpoint(build(GLM))
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


def test_some_tensors_beside_those_that_are_there():
    first, then = checkpoint(build(GLM)), checkpoint(build(GLM, seed=1))
    some = {"model.norm.weight", "model.layers.2.mlp.experts.5.up_proj.weight"}
    engine = engine_of(build(GLM), GLM)
    parts = [(name, then[name]) for name in some]
    engine.load_weights(first.items(), 0)
    engine.load_weights(parts, 1, only=some)
    mixed = engine_of(build(GLM), GLM)
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


def test_every_tensor_of_a_checkpoint_is_needed():
    engine, tensors = HFEngine(GLM), checkpoint(build(GLM))
    for name in ("lm_head.weight", "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"):
        with pytest.raises(ValueError, match=f"{name}: missing"):
            engine.load_weights(((n, t) for n, t in tensors.items() if n != name), 0)


def test_weights_that_fail_half_way_block_generation():
    engine, tensors = engine_of(build(GLM), GLM), checkpoint(build(GLM))

    def broken() -> Any:
        yield from list(tensors.items())[:10]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        engine.load_weights(broken(), 4)
    with pytest.raises(RuntimeError, match="loading version 4 failed"):
        engine.generate([Prompt(0, (5,))], Sampling(2))


def test_overflowing_model_is_an_error():
    model = build(GLM)
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    with pytest.raises(RuntimeError, match=r"prompt 10\): non-finite logits"):
        engine_of(model, GLM).generate(prompts_of([4], 128), Sampling(3))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([Prompt(4, ())], r"prompt 4\): 0 tokens"),
        ([Prompt(4, (5, 128))], r"prompt 4\): token id 128, expected 0 to 127"),
        ([Prompt(4, (5,)), Prompt(4, (6,))], r"prompt 4\): id given twice"),
        ([Prompt(4, (5,) * 510)], r"510 tokens \+ max_new_tokens 3, expected at most 512"),
    ],
)
def test_bad_prompts(prompts: list[Prompt], message: str):
    with pytest.raises(ValueError, match=message):
        engine_of(build(GLM), GLM).generate(prompts, Sampling(3))


def test_bad_configs():
    with pytest.raises(ValueError, match="model_type 'nothing'"):
        HFEngine({"model_type": "nothing"})
    with pytest.raises(ValueError, match="max_running: 0"):
        HFEngine(GLM, max_running=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("samples_per_prompt", 0),
        ("stop", ("ab", "")),
    ],
)
def test_bad_sampling(field: str, value: Any):
    with pytest.raises(ValueError, match=re.escape(f"Sampling.{field}: {value}")):
        Sampling(**{"max_new_tokens": 4, field: value})


def test_capabilities():
    assert HFEngine(GLM).capabilities.routes
    assert not HFEngine(DENSE).capabilities.routes
    assert "processed" in HFEngine(GLM).capabilities.logprobs


def test_route_dtype():
    assert route_dtype(256) == torch.uint8
    assert route_dtype(257) == torch.uint16
    with pytest.raises(ValueError, match="65537 experts, expected 0 to 65536"):
        route_dtype(65537)


def sample() -> Sample:
    return Sample(
        prompt_id=7,
        index=2,
        tokens=torch.tensor([5, 6, 7, 1]),
        prompt_len=2,
        loss_mask=torch.tensor([False, False, True, True]),
        rollout_logprobs=torch.tensor([0.0, 0.0, -1.0, -2.0]),
        routes=torch.zeros(4, 2, 2, dtype=torch.uint8),
        layer_ids=(1, 3),
        route_mask=torch.tensor([True, True, True, False]),
        weight_version=0,
        finish_reason="stop",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_len": 4}, "prompt_len 4 of 4 tokens"),
        ({"prompt_len": 0}, "prompt_len 0 of 4 tokens"),
        ({"tokens": torch.tensor([5.0, 6, 7, 1])}, r"tokens torch\.float32, expected int64"),
        ({"loss_mask": torch.ones(3, dtype=torch.bool)}, r"loss_mask \[3\]"),
        ({"loss_mask": torch.ones(4, dtype=torch.bool)}, "token 0 has loss_mask True"),
        ({"rollout_logprobs": torch.tensor([0, 0, -1, float("nan")])}, "token 3 has log-prob nan"),
        ({"rollout_logprobs": torch.tensor([0, 0, 0.5, -1.0])}, "token 2 has log-prob 0.5"),
        ({"rollout_logprobs": torch.tensor([0, -3.0, -1, -1.0])}, "token 1 has log-prob -3.0"),
        ({"routes": torch.zeros(4, 2, 2)}, r"routes torch\.float32"),
        ({"routes": torch.zeros(3, 2, 2, dtype=torch.uint8)}, r"routes \[3, 2, 2\]"),
        ({"routes": None}, "routes None"),
        ({"layer_ids": (3, 1)}, r"layer_ids \(3, 1\)"),
        ({"route_mask": torch.ones(4, dtype=torch.bool)}, "route_mask True at token 3"),
        ({"finish_reason": "eos"}, "finish_reason 'eos'"),
    ],
)
def test_sample_check(change: dict[str, Any], message: str):
    assert sample().check().response == [7, 1]
    with pytest.raises(ValueError, match=rf"prompt 7, sample 2\): {message}"):
        dataclasses.replace(sample(), **change).check()
