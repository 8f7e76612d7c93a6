"""Small models of every family: HF configs, checkpoints of transformers' models, and what the
trainer computes of them under a layout."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import families
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.schedule import plan_microbatches
from tests.helpers import passes
from tests.helpers.configs import CONFIGS, hf_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import QWEN3, random_batch, tiny_plan

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
# tests/helpers/vision.py has the models with a vision tower
TEXT = {name: hf for name, hf in SHIPPED.items() if "vision_config" not in hf}
MODELS = TEXT | {"qwen3_8b": QWEN3_8B}


def without(hf, *names):
    return {name: value for name, value in hf.items() if name not in names}


VARIATIONS = {
    "tied head": ("deepseek_v3", {"tie_word_embeddings": True}),
    "latent attention with biases": ("deepseek_v3", {"attention_bias": True}),
    "no narrow queries, biases": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "narrow queries": ("moonlight", {"q_lora_rank": 96}),
    "all layers sparse": ("moonlight", {"first_k_dense_replace": 0}),
    "all layers dense": ("moonlight", {"first_k_dense_replace": 4}),
    "flash without narrow queries": ("tiny", {"q_lora_rank": None}),
    "no biases": ("glm47_355b", {"attention_bias": False}),
    "no head norms": ("glm47_355b", {"use_qk_norm": False}),
    "more shared experts": ("glm47_355b", {"n_shared_experts": 3}),
    "grouped queries with biases": ("qwen3_30b", {"attention_bias": True}),
    "every third sparse": ("qwen3_30b", {"decoder_sparse_step": 3}),
    "dense, tied, biases": ("qwen3_8b", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama, tied": ("llama31_8b", {"tie_word_embeddings": True}),
    "qwen2, tied": ("qwen25_7b", {"tie_word_embeddings": True}),
    "wide heads": ("mixtral_8x7b", {"head_dim": 160}),
    "norms over all of wide heads": ("minimax_m2", {"head_dim": 160, "num_key_value_heads": 12}),
}
LEFT_OUT = {  # transformers' defaults stand for what a checkpoint does not say
    "deepseek_v3": ("first_k_dense_replace", "rope_scaling", "norm_topk_prob"),
    "glm47_355b": ("head_dim", "use_qk_norm", "first_k_dense_replace", "attention_bias"),
    "glm47": ("first_k_dense_replace",),
    "qwen3_30b": ("head_dim", "mlp_only_layers", "decoder_sparse_step"),
    "qwen3_8b": ("head_dim",),
    "llama31_8b": ("num_key_value_heads", "rope_scaling", "mlp_bias"),
    "mixtral_8x7b": ("num_key_value_heads", "rope_theta"),
    "qwen25_7b": ("num_key_value_heads", "rope_theta", "sliding_window"),
    "minimax_m2": ("head_dim", "num_key_value_heads", "rope_theta", "rotary_dim"),
}
FEWER = {"num_hidden_layers": 4}
COUNTED = (
    MODELS
    | {name: MODELS[model] | FEWER | changes for name, (model, changes) in VARIATIONS.items()}
    | {f"{name}, defaults": without(MODELS[name], *n) | FEWER for name, n in LEFT_OUT.items()}
)
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
EXPERTS = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
# a context of 8 positions stretched to 512, so that most rows are beyond it
YARN = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "mscale": 1.0,
    "mscale_all_dim": 0.6,
}
DEEPSEEK = MODELS["deepseek_v3"] | SMALL | EXPERTS | LATENT
DEEPSEEK |= {"q_lora_rank": 32, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
DEEPSEEK |= {"rope_scaling": YARN, "num_nextn_predict_layers": 0}
MOONLIGHT = MODELS["moonlight"] | SMALL | EXPERTS | LATENT
GLM = MODELS["glm47_355b"] | SMALL | EXPERTS | {"head_dim": 32, "first_k_dense_replace": 1}
GLM |= {"num_nextn_predict_layers": 0}
QWEN3_SMALL = QWEN3_8B | SMALL | {"head_dim": 32}
QWEN_NEXT = MODELS["qwen3_next_80b"] | SMALL | {"head_dim": 32, "mlp_only_layers": [1]}
QWEN_NEXT |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN_NEXT |= {"shared_expert_intermediate_size": 40, "linear_key_head_dim": 16}
QWEN_NEXT |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_value_head_dim": 12}
QWEN35 = without(QWEN_NEXT, "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob")
QWEN35 |= {"model_type": "qwen3_5_moe_text", "num_key_value_heads": 2}
QWEN35_DENSE = without(QWEN35, *(name for name in QWEN35 if "expert" in name or "moe" in name))
QWEN35_DENSE |= {"model_type": "qwen3_5_text"}
NEMOTRON = MODELS["nemotron3_nano"] | SMALL | {"hybrid_override_pattern": "ME*-M", "head_dim": 32}
NEMOTRON |= {"num_hidden_layers": 5, "layer_norm_epsilon": 1e-4, "ssm_state_size": 12}
NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "moe_intermediate_size": 24}
NEMOTRON |= {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 40}
LLAMA = MODELS["llama31_8b"] | SMALL
# a context of 12 positions stretched to 96; wavelengths below, between and above its two bounds
LLAMA |= {"rope_scaling": LLAMA["rope_scaling"] | {"original_max_position_embeddings": 12}}
SMOLLM = without(LLAMA, "rope_scaling") | {"tie_word_embeddings": True, "rope_theta": 1e5}
SMOLLM |= {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 72}
MIXTRAL = MODELS["mixtral_8x7b"] | SMALL | {"num_hidden_layers": 3, "intermediate_size": 40}
QWEN2 = MODELS["qwen25_7b"] | SMALL
MINIMAX = MODELS["minimax_m2"] | SMALL | {"num_hidden_layers": 3, "intermediate_size": 40}
MINIMAX |= {"num_local_experts": 12, "num_experts_per_tok": 4, "head_dim": 20, "rotary_dim": 12}
TRAINED = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, yarn by its defaults": DEEPSEEK
    | {"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    "deepseek_v3, yarn in parts of dimensions": DEEPSEEK
    | {"rope_scaling": YARN | {"truncate": False, "attention_factor": 1.3}},
    "deepseek_v3, tied": DEEPSEEK | {"tie_word_embeddings": True, "rope_scaling": None},
    "moonlight": MOONLIGHT,
    "glm4_moe": GLM,
    "glm4_moe, no head norms, no biases": GLM | {"use_qk_norm": False, "attention_bias": False},
    "glm4_moe, rotated a quarter, groups": GLM
    | {"partial_rotary_factor": 0.25, "n_group": 3, "topk_group": 2},
    "qwen3": QWEN3_SMALL,
    "qwen3_next": QWEN_NEXT,
    "qwen3_5_moe": QWEN35,
    "qwen3_5": QWEN35_DENSE,
    "nemotron_h": NEMOTRON,
    "llama": LLAMA,
    "llama, as SmolLM2": SMOLLM,
    "llama, a key/value head each": without(LLAMA, "num_key_value_heads"),
    "mixtral": MIXTRAL,
    "minimax_m2": MINIMAX,
    "minimax_m2, three heads a group": MINIMAX
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 28},
    "minimax_m2, as transformers saves it": without(MINIMAX, "rotary_dim", "rope_theta")
    | {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.4}},
    "qwen2": QWEN2,
    "qwen2, tied, three heads a group": QWEN2
    | {"num_attention_heads": 6, "hidden_size": 72, "tie_word_embeddings": True},
    "mixtral, three experts a token": MIXTRAL | {"num_experts_per_tok": 3, "head_dim": 32},
    "qwen3, tied": QWEN3_SMALL | {"tie_word_embeddings": True, "num_key_value_heads": 4},
}

HF = hf_of("tiny_qwen3")


def changed(changes):
    """The tiny config with ``changes``; None leaves a key out."""
    return {k: v for k, v in (HF | changes).items() if v is not None}


write_model = partial(families.write_model, spread=0.2)


def plan_of(folder, *overrides):
    family = json.loads((folder / "config.json").read_text())["model_type"]
    names = (f"model.weights={folder}", f"model.config={folder}/config.json")
    return tiny_plan(f"model.family={family}", *names, *overrides, config=QWEN3)


def exact_logprobs(model, batch):
    """[T] fp32, of each row's target, one sequence at a time."""
    found = []
    first = 0
    for length in batch.seqlens:
        rows = slice(first, first + length)
        with torch.no_grad():
            exact = model(batch.tokens[rows][None]).logits[0].double().log_softmax(-1)
        found.append(exact.gather(-1, batch.targets[rows][:, None])[:, 0])
        first += length
    return torch.cat(found).float()


def one_update(plan):
    """(log-probs, metrics, weights before and after) of an update, on this rank."""
    with passes.built(plan) as policy:
        batch = random_batch()
        before = {name: tensor.clone() for name, tensor in policy.weights()}
        sizes = policy.topo.dp_size, 128, plan.row_alignment, policy.topo.cp_size
        schedule = plan_microbatches(batch.seqlens, *sizes)
        scores, metrics = passes.step(policy, batch, schedule, replay=False)
        return scores.logprobs, metrics, before, {n: t.clone() for n, t in policy.weights()}


def on_rank(group, layouts, folder):
    common = ("replay=off", "optimizer.eps=1e-2")
    return {
        name: one_update(plan_of(folder / model, *common, *overrides))
        for name, (model, *overrides) in layouts.items()
    }


def check_layouts(folder, models, layouts, atol=3e-5):
    """Log-probs, weights and an update of every layout, two ranks each, are those of one process.

    Args:
        models: name -> HF config.
        layouts: name -> name of a model, overrides.
        atol: of log-probs.
    """
    exact = {}
    for name, hf in models.items():
        exact[name] = exact_logprobs(write_model(folder / name, hf), random_batch())
    (single,) = run_ranks(on_rank, 1, {name: (name,) for name in models}, folder)
    for results in run_ranks(on_rank, 2, layouts, folder):
        for name, (model, *_) in layouts.items():
            logprobs, metrics, before, after = results[name]
            torch.testing.assert_close(logprobs, exact[model], atol=atol, rtol=1e-6, msg=name)
            saved = load_file(folder / model / "model.safetensors")
            assert before.keys() == saved.keys()
            assert all(torch.equal(tensor, saved[key]) for key, tensor in before.items()), name
            assert metrics == pytest.approx(single[model][1], rel=2e-5, abs=1e-6), name
            for key, tensor in after.items():
                want = single[model][3][key]
                torch.testing.assert_close(tensor, want, atol=1e-6, rtol=1e-5, msg=f"{name} {key}")


def policy_like_transformers(folder, plan, theirs, batch):
    """The policy that one process builds of the checkpoint in `folder`, and the tensors that come
    back, after a comparison with transformers' model `theirs`: log-probs, tensors, their sizes."""
    assert plan.unsupported == ()
    with passes.built(plan) as policy:
        schedule = plan_microbatches(batch.seqlens, 1, 64)
        scores = passes.scores(policy, batch, schedule, replay=False)
        back = {name: tensor.clone() for name, tensor in policy.weights()}
        live = sum(p.numel() for chunk in policy.llm.chunks for p in chunk.parameters())
    want = exact_logprobs(theirs, batch)
    torch.testing.assert_close(scores.logprobs, want, atol=3e-5, rtol=1e-6)
    saved = load_file(folder / "model.safetensors")
    assert back.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in back.items())
    assert parameters(plan.sizes).total == live == sum(p.numel() for p in theirs.parameters())
    return policy, back
