"""Model families: their sizes are those of transformers' models, and of what was published."""

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from pyrl_ext.plan.shape import embedding_parameters, mtp_parameters, parameters, read_shape

CONFIGS = Path(__file__).parents[1] / "configs"
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
}
SHIPPED = {path.parent.name: json.loads(path.read_text()) for path in CONFIGS.glob("*/config.json")}
MODELS = SHIPPED | {"qwen3_8b": QWEN3_8B}


def without(hf, *names):
    return {name: value for name, value in hf.items() if name not in names}


# sizes -------------------------------------------------------------------------------------------

VARIATIONS = {
    "tied head": ("deepseek_v3", {"tie_word_embeddings": True}),
    "latent attention with biases": ("deepseek_v3", {"attention_bias": True}),
    "no narrow queries, biases": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "narrow queries": ("moonlight", {"q_lora_rank": 96}),
    "all layers sparse": ("moonlight", {"first_k_dense_replace": 0}),
    "all layers dense": ("moonlight", {"first_k_dense_replace": 27}),
    "flash without narrow queries": ("tiny", {"q_lora_rank": None}),
    "no biases": ("glm47_355b", {"attention_bias": False}),
    "no head norms": ("glm47_355b", {"use_qk_norm": False}),
    "more shared experts": ("glm47_355b", {"n_shared_experts": 3}),
    "grouped queries with biases": ("qwen3_30b", {"attention_bias": True}),
    "every third sparse": ("qwen3_30b", {"decoder_sparse_step": 3}),
    "dense, tied, biases": ("qwen3_8b", {"tie_word_embeddings": True, "attention_bias": True}),
}
LEFT_OUT = {  # transformers' defaults stand for what a checkpoint does not say
    "deepseek_v3": ("first_k_dense_replace", "rope_scaling", "norm_topk_prob"),
    "glm47_355b": ("head_dim", "use_qk_norm", "first_k_dense_replace", "attention_bias"),
    "glm47": ("first_k_dense_replace",),
    "qwen3_30b": ("head_dim", "mlp_only_layers", "decoder_sparse_step"),
    "qwen3_8b": ("head_dim",),
}
COUNTED = (
    MODELS
    | {name: MODELS[model] | changes for name, (model, changes) in VARIATIONS.items()}
    | {f"{name}, defaults": without(MODELS[name], *keys) for name, keys in LEFT_OUT.items()}
)


@pytest.mark.parametrize("hf", COUNTED.values(), ids=list(COUNTED))
def test_parameters_are_those_of_transformers(hf):
    config = CONFIG_MAPPING[hf["model_type"]].from_dict(hf)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert parameters(read_shape(hf)).total == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    ("model", "billions", "digits"),
    [("deepseek_v3", 671, 0), ("moonlight", 16, 0), ("qwen3_30b", 30.5, 1), ("qwen3_8b", 8.2, 1)],
)
def test_totals_are_the_published_ones(model, billions, digits):
    assert round(parameters(read_shape(MODELS[model])).total / 1e9, digits) == billions


def test_totals_that_were_published_without_the_embedding():
    def billions(model, embeddings, part):
        shape = read_shape(MODELS[model])
        each = embedding_parameters(shape).total
        return (getattr(parameters(shape), part) - embeddings * each) / 1e9

    # the layer for multi-token prediction is counted, embedding and head are not
    ahead = mtp_parameters(read_shape(MODELS["glm47_355b"])).total / 1e9
    assert round(billions("glm47_355b", 2, "total") + ahead) == 355
    assert round(billions("glm47_355b", 2, "active")) == 32
    assert round(billions("moonlight", 2, "active"), 2) == 2.24
    assert round(billions("deepseek_v3", 1, "active"), 1) == 36.6


def test_deepseek_v3_is_what_transformers_has_by_itself():
    """Its config class has the published sizes as defaults, but for the longer context."""
    ours, theirs = MODELS["deepseek_v3"], CONFIG_MAPPING["deepseek_v3"]()
    longer = {"architectures", "dtype", "rope_scaling", "max_position_embeddings", "rope_theta"}
    named = {k: getattr(theirs, k) for k in ours if k not in longer and hasattr(theirs, k)}
    assert len(named) > 25
    assert {key: ours[key] for key in named} == named
    assert ours["max_position_embeddings"] == 40 * theirs.max_position_embeddings


def test_a_dense_model_has_no_experts():
    shape = read_shape(QWEN3_8B)
    assert shape.router_layers == () and shape.route_bytes_per_token == 0
    assert (shape.num_experts, shape.topk, shape.shared_expert_width) == (0, 0, 0)
    counts = parameters(shape)
    assert counts.active == counts.total and counts.expert == 0


def test_routed_layers_and_bytes():
    for model, routers, each in (
        ("glm47_355b", range(3, 92), 89 * 8),
        ("moonlight", range(1, 27), 26 * 6),
        ("qwen3_30b", range(48), 384),
        ("deepseek_v3", range(3, 61), 58 * 8),
    ):
        shape = read_shape(MODELS[model])
        assert shape.router_layers == tuple(routers)
        assert shape.route_bytes_per_token == each
        assert shape.contradictions() == ()


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (
            "deepseek_v3",
            {"topk_group": 1, "num_experts_per_tok": 33},
            "33, expected at most the 32",
        ),
        ("deepseek_v3", {"n_group": 7}, "n_group 7 and topk_group 4"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn"}}, "yarn with factor None"),
        ("glm47_355b", {"num_key_value_heads": 7}, "num_key_value_heads 7 does not divide"),
    ],
)
def test_sizes_that_contradict_each_other(model, changes, words):
    (found,) = read_shape(MODELS[model] | changes).contradictions()
    assert words in found


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("deepseek_v3", {"topk_group": 3}, None),  # 8 // 3 is two as well
        ("deepseek_v3", {"topk_group": 2}, "num_experts_per_tok 8 with topk_group 2"),
        ("deepseek_v3", {"topk_group": 8}, None),  # no group is left out
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is true"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is false"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is linear"),
        ("moonlight", {"norm_topk_prob": False}, "norm_topk_prob is false with num_exp"),
        ("moonlight", {"num_experts_per_tok": 1}, "norm_topk_prob is true with num_exp"),
        ("glm47_355b", {"attention_bias": True}, None),
        ("qwen3_8b", {"attention_bias": True}, "attention_bias is true"),
        ("qwen3_8b", {"use_sliding_window": True}, "use_sliding_window is true"),
        ("qwen3_8b", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is yarn"),
    ],
)
def test_what_the_trainer_cannot_run_is_named(model, changes, words):
    found = read_shape(MODELS[model] | changes).unsupported()
    assert [words in each for each in found] == ([] if words is None else [True]), found
