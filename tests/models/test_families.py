"""Model families: their sizes are those of transformers' models, and of what was published."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from benchmarks.end_to_end import microbatch
from pyrl_ext.megatron.logprob_head import score_tokens
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.models.hf_folder import SafetensorsFolder, save_safetensors
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.rollout.build import build_engine
from pyrl_ext.rollout.hf.model import build_model, read_config
from pyrl_ext.samples import Prompt, Sampling
from pyrl_ext.schedule import plan_microbatches
from tests.helpers import passes
from tests.helpers.configs import write_sizes
from tests.helpers.models import (
    COUNTED,
    DEEPSEEK,
    GLM,
    LLAMA,
    MINIMAX,
    MIXTRAL,
    MODELS,
    MOONLIGHT,
    NEMOTRON,
    QWEN2,
    QWEN3_SMALL,
    QWEN35,
    QWEN35_DENSE,
    QWEN_NEXT,
    SMOLLM,
    TRAINED,
    changed,
    check_layouts,
    plan_of,
    policy_like_transformers,
    write_model,
)
from tests.helpers.passes import WholeBatch
from tests.helpers.tiny import random_batch, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

# sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hf", COUNTED.values(), ids=list(COUNTED))
def test_parameters_are_those_of_transformers(hf):
    config = CONFIG_MAPPING[hf["model_type"]].from_dict(hf)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert parameters(read_sizes(hf)).total == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    ("model", "billions", "digits"),
    [
        ("deepseek_v3", 671, 0),
        ("moonlight", 16, 0),
        ("qwen3_30b", 30.5, 1),
        ("qwen3_8b", 8.2, 1),
        ("llama31_8b", 8.03, 2),
        ("mixtral_8x7b", 46.7, 1),
        ("qwen25_7b", 7.62, 2),
        ("minimax_m2", 229, 0),
    ],
)
def test_parameters_have_the_published_totals(model, billions, digits):
    assert round(parameters(read_sizes(MODELS[model])).total / 1e9, digits) == billions


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
        (
            "llama31_8b",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
            "llama3 with low_freq_factor None",
        ),
        ("mixtral_8x7b", {"num_experts_per_tok": 9}, "at most num_local_experts 8"),
        ("qwen25_7b", {"attention_bias": False}, "every qwen2 model has biases"),
        ("minimax_m2", {"rotary_dim": 130}, "rotary_dim 130, expected at most head_dim 128"),
    ],
)
def test_contradictions_name_the_sizes(model, changes, words):
    (found,) = read_sizes(MODELS[model] | changes).contradictions()
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
        ("llama31_8b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is dynam"),
        ("llama31_8b", {"attention_bias": True}, "attention_bias is true"),
        ("llama31_8b", {"mlp_bias": True}, "mlp_bias is true"),
        ("mixtral_8x7b", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("mixtral_8x7b", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("deepseek_v3", {"scoring_func": "sqrtsoftplus"}, "scoring_func is sqrtsoftplus"),
        ("deepseek_v3", {"topk_method": "group_limited_greedy"}, "topk_method is group_limited"),
        ("qwen3_30b", {"scoring_func": "sigmoid"}, "score experts by softmax"),
        ("mixtral_8x7b", {"scoring_func": "softmax"}, None),
        ("nemotron3_nano", {"scoring_func": "softmax"}, "score experts by sigmoid"),
        ("qwen25_7b", {}, None),
        ("qwen25_7b", {"use_sliding_window": True}, "use_sliding_window is true"),
        ("qwen25_7b", {"layer_types": ["sliding_attention"] * 28}, "layer_types has sliding_att"),
        ("qwen25_7b", {"layer_types": ["full_attention"] * 28}, None),
        ("minimax_m2", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        ("minimax_m2", {"scoring_func": "softmax"}, "score experts by sigmoid"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type is per_head"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm is false"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias is false"),
        ("minimax_m2", {"shared_intermediate_size": 1536}, "shared_intermediate_size is 1536"),
        ("minimax_m2", {"attn_type_list": [0] * 62}, "attn_type_list has other numbers than 1"),
        ("minimax_m2", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("minimax_m2", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_type is llama3"),
    ],
)
def test_unsupported_names_what_the_trainer_cannot_run(model, changes, words):
    found = read_sizes(MODELS[model] | changes).unsupported()
    assert [words in each for each in found] == ([] if words is None else [True]), found


# the trainer's model -----------------------------------------------------------------------------


MIXED = {"num_hidden_layers": 6, "mlp_only_layers": [0, 3, 5]}
VARIANTS = {  # of qwen3_moe
    "dense first, between and last": MIXED,
    "every second dense": {
        "num_hidden_layers": 5,
        "mlp_only_layers": None,
        "decoder_sparse_step": 2,
    },
    "one expert a token": {"norm_topk_prob": False, "num_experts_per_tok": 1},
    "a key/value head each": {"num_key_value_heads": 4, "head_dim": None},
    "other rotary base": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    # what transformers 4 wrote
    "old rotary": {"rope_parameters": None, "rope_theta": 500000.0, "rope_scaling": None},
}
EXACT = TRAINED | {name: changed(changes) for name, changes in VARIANTS.items()}


@pytest.mark.parametrize("hf", EXACT.values(), ids=list(EXACT))
def test_family_equals_the_model_of_transformers(tmp_path, hf):
    """Log-probs, the tensors that come back, and the counts of parameters by how they are split."""
    theirs = write_model(tmp_path, hf)
    batch = random_batch(9)
    plan = plan_of(tmp_path, "replay=off")
    policy, back = policy_like_transformers(tmp_path, plan, theirs, batch)
    counts = parameters(plan.sizes)
    held = dict.fromkeys(("replicated", "tensor", "expert"), 0)
    for weight in policy.llm.table:
        if not weight.megatron_name.endswith("expert_bias"):
            part = "replicated" if weight.shard == "same" else "tensor"
            each = sum(back[name].numel() for name in weight.hf_names)
            held["expert" if weight.expert is not None else part] += each
    assert held == {part: getattr(counts, part) for part in held}


def negative_logprobs(logprobs, _entropy, fields):
    return -logprobs[fields.loss_mask].sum(), fields.loss_mask.sum(), {}


@pytest.mark.parametrize("name", ["llama", "llama, as SmolLM2", "mixtral", "qwen2", "minimax_m2"])
def test_gradients_are_those_of_transformers(tmp_path, name):
    """In float64, with transformers' names of checkpoints for its own gradients."""
    write_model(tmp_path, TRAINED[name])
    exact = {"dtype": torch.float64, "experts_implementation": "eager"}  # no grouped products
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **exact).eval()
    batch = random_batch(9)
    plan = plan_of(tmp_path, "replay=off")
    with passes.built(plan) as policy:
        schedule = plan_microbatches(batch.seqlens, 1, 64)
        passes.accumulate(policy, batch, schedule, negative_logprobs)
        ours = {name: gradient.clone() for name, gradient in policy.gradients()}
    first = 0
    for length in batch.seqlens:
        rows = slice(first, first + length)
        logprobs = theirs(batch.tokens[rows][None]).logits[0].log_softmax(-1)
        logprobs = logprobs.gather(-1, batch.targets[rows][:, None])[:, 0]
        (-logprobs[batch.loss_mask[rows]].sum() / batch.loss_mask.sum()).backward()
        first += length
    gradients: dict[str, Any] = {name: value.grad for name, value in theirs.named_parameters()}
    want = revert_weight_conversion(theirs, gradients)
    biases = {key for key in ours if key.endswith("e_score_correction_bias")}  # without gradients
    assert not any(ours.pop(key).any() for key in biases)
    assert ours.keys() == want.keys()
    for key, gradient in ours.items():
        off = (gradient - want[key]).norm()
        assert off <= 2e-5 * want[key].norm(), (key, float(off))  # 0 of experts without tokens


@pytest.mark.parametrize(("biased", "word"), [(False, "are unknown"), (True, "are missing")])
def test_load_lists_names_that_do_not_fit(tmp_path, biased, word):
    write_model(tmp_path, GLM | {"attention_bias": not biased})
    folder = SafetensorsFolder(tmp_path)
    sizes = read_sizes(GLM | {"attention_bias": biased})
    with pytest.raises(
        ValueError, match=rf"9 (tensors )?{word} \['model.layers.0.self_attn.k_proj"
    ):
        folder.check(sizes.weights(0), sizes.ignored(0))


STATES = {"qwen3_next": QWEN_NEXT, "qwen3_5_moe": QWEN35, "nemotron_h": NEMOTRON}
SEVERAL = {"deepseek_v3": DEEPSEEK, "moonlight": MOONLIGHT, "glm4_moe": GLM, "qwen3": QWEN3_SMALL}
SEVERAL |= {"llama": LLAMA, "smollm": SMOLLM, "mixtral": MIXTRAL, "qwen2": QWEN2}
SEVERAL |= {"minimax_m2": MINIMAX}

ENGINES = SEVERAL | STATES | {"mixed": changed(MIXED), "raw": changed({"norm_topk_prob": False})}


@pytest.mark.parametrize("hf", ENGINES.values(), ids=list(ENGINES))
def test_build_engine_has_the_model_of_the_trainer(tmp_path, hf):
    """Log-probs of generated tokens, and every router's experts, agree."""
    write_model(tmp_path, hf)
    replay = "on" if read_sizes(hf).router_layers else "off"
    few = ("rollout.max_new_tokens=6", "model.recompute=selective")
    plan = plan_of(tmp_path, *few, f"replay={replay}")
    with passes.built(plan) as policy:
        engine = build_engine(plan, policy.topo.device)
        engine.load_weights(policy.weights(), version=0)
        prompts = [Prompt(i, tuple(range(3 + i, 9 + 2 * i))) for i in range(4)]
        samples = engine.generate(prompts, Sampling(max_new_tokens=6, samples_per_prompt=2, seed=1))
        samples = [replace(sample, reward=0.0) for sample in samples]
        layers = plan.router_layers if plan.replay.enabled else None
        batch = WholeBatch.of(
            samples,
            torch.zeros(len(samples)),
            num_experts=plan.sizes.num_experts,
            layer_ids=layers,
        )
        schedule = plan_microbatches(batch.seqlens, 1, 64)
        scores, metrics = passes.step(policy, batch, schedule, bool(layers))
    at = batch.loss_mask
    # qwen3_next: 3.6e-5 with AMX
    torch.testing.assert_close(
        scores.logprobs[at], batch.rollout_logprobs[at], atol=6e-5, rtol=1e-6
    )
    assert tuple(scores.agreement) == plan.router_layers
    rows = int(batch.route_mask.sum())
    assert all(found == (rows, rows, rows) for found in scores.agreement.values())
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", ["minimax_m2", "glm4_moe"])
def test_build_model_keeps_the_biases_of_routers_in_float32(name):
    model = build_model(read_config(TRAINED[name]), torch.bfloat16, torch.device("cpu"))
    kinds = {n.endswith("e_score_correction_bias"): t.dtype for n, t in model.state_dict().items()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


def test_Policy_of_every_layout_equals_one_process(tmp_path):
    layouts = {
        "tp2 with yarn and groups": ("deepseek_v3", "parallel.tp=2"),
        "tp2 with wide queries": ("moonlight", "parallel.tp=2"),
        "tp2 with biases": ("glm4_moe", "parallel.tp=2"),
        "tp2 without experts": ("qwen3", "parallel.tp=2"),
        "pp2 without experts": ("qwen3", "parallel.pp=2"),
        "pp2, tied": ("qwen3, tied", "parallel.pp=2"),
        "tp2 that share a key/value head": ("one head", "parallel.tp=2"),
        "cp2": ("mixed", "parallel.cp=2"),
        "dp2 ep2": ("mixed", "parallel.dp=2", "parallel.ep=2"),
        "tp2 beyond the original context": ("llama", "parallel.tp=2"),
        "cp2 beyond the original context": ("llama", "parallel.cp=2"),
        "pp2 of smollm": ("smollm", "parallel.pp=2"),
        "tp2 of qwen2": ("qwen2", "parallel.tp=2"),
        "cp2 of qwen2": ("qwen2", "parallel.cp=2"),
        "tp2 of minimax_m2": ("minimax_m2", "parallel.tp=2"),
        "tp2 ep2 of minimax_m2": (
            "minimax_m2",
            "parallel.tp=2",
            "parallel.ep=2",
            "parallel.etp=1",
        ),
        "cp2 of minimax_m2": ("minimax_m2", "parallel.cp=2"),
        "tp2 ep2 of mixtral": ("mixtral", "parallel.tp=2", "parallel.ep=2", "parallel.etp=1"),
        "pp2 of mixtral": (
            "mixtral",
            "parallel.pp=2",
            "parallel.num_layers_in_first_pipeline_stage=1",
        ),
    }
    models = {"qwen3, tied": TRAINED["qwen3, tied"], "mixed": changed(MIXED)}
    models["one head"] = changed({"num_key_value_heads": 1})
    check_layouts(tmp_path, SEVERAL | models, layouts)


def test_Policy_of_states_in_every_layout_equals_one_process(tmp_path):
    stages = "parallel.pipeline_model_parallel_layout="
    split = {
        "tp2": ("parallel.tp=2",),
        "cp2": ("parallel.cp=2", "model.recompute=full"),
        "pp2": ("parallel.pp=2", "parallel.vpp=2"),
        "dp2 ep2 dynamic": ("parallel.dp=2", "parallel.ep=2", "parallel.dynamic_cp=2"),
    }
    layouts = {}
    for model, stage in (("qwen3_next", "Et|t|t|tL"), ("nemotron_h", "Et|tt|t|tL")):
        for name, overrides in split.items():
            more = (stages + stage,) if name == "pp2" else ()
            layouts[f"{model} {name}"] = (model, *overrides, *more)
    layouts |= {f"{name}, 3.5": ("qwen3_5_moe", *split[name]) for name in ("tp2", "cp2")}
    # gated norms enlarge rounding: one process differs from transformers by 3.2e-5
    check_layouts(tmp_path, STATES, layouts, atol=1e-4)


AHEAD = {"enorm": "enorm", "hnorm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}
AHEAD = {name: f"model.layers.2.{given}.weight" for name, given in AHEAD.items()}
AHEAD_NEXT = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
AHEAD_NEXT = {name: f"mtp.{AHEAD_NEXT.get(name, name)}.weight" for name in AHEAD}
LAYERS = ["linear_attention", "full_attention"]
NEXT = QWEN_NEXT | {"layer_types": LAYERS, "mlp_only_layers": []}
MULTI_TOKEN = {
    "glm4_moe": (GLM | {"num_nextn_predict_layers": 1}, {}, AHEAD, 0),
}
MULTI_TOKEN |= {
    name: (
        hf | {"layer_types": LAYERS},
        {"layer_types": [*LAYERS, "full_attention"]},
        AHEAD_NEXT,
        1,
    )
    for name, hf in {"qwen3_next": NEXT, "qwen3_5, dense": QWEN35_DENSE}.items()
}


@pytest.mark.parametrize(("hf", "more", "names", "centre"), MULTI_TOKEN.values(), ids=MULTI_TOKEN)
def test_MultiTokenGPT_predicts_a_token_further_ahead(tmp_path, hf, more, names, centre):
    """Its layer is one of transformers' decoder layers, between what checkpoints name."""
    hf = hf | {"num_hidden_layers": 2}
    config = (write_sizes(tmp_path, hf), f"model.family={hf['model_type']}")
    plan = tiny_plan(*config, "model.mtp=true", "objective.mtp_coef=0.1", "replay=off")
    batch = random_batch(9)
    batch = passes.select(batch, [batch.seqlens.index(max(batch.seqlens))])
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    with passes.built(plan) as policy:
        model: Any = policy.llm.models[0]
        with torch.no_grad():
            for value in model.parameters():
                value += 0.2 * torch.randn(value.shape)
        layer = ("mtp.layers.0.", "model.layers.2.")
        named = ((name.replace(*layer), value) for name, value in policy.weights())
        save_safetensors(tmp_path, named, hf | more | {"num_hidden_layers": 3})
        model.train()
        micro = microbatch(batch, [0], policy.topo.place(), 1)
        packed = PackedSequences.of(micro)
        scored = partial(score_tokens, plan, policy.topo.groups.tp, micro, True)
        inputs = micro.tokens[None], packed.positions[None], None
        _, (found, _entropy) = model(*inputs, packed_seq_params=packed, output_processor=scored)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    saved = load_file(tmp_path / "model.safetensors")
    tensors = {
        name: saved[given] + (centre if "norm" in name else 0) for name, given in names.items()
    }
    logits = logits_ahead(theirs, tensors, batch)
    want = logits[:-1].log_softmax(-1).gather(-1, batch.targets[1:, None])[:, 0]
    assert len(want) > 9
    torch.testing.assert_close(found[: len(want)].detach(), want, atol=3e-5, rtol=0)


@torch.no_grad()
def logits_ahead(theirs, tensors, batch):
    """[T, V] of the token after the target, with the last layer of ``theirs`` as the one ahead."""

    def norm(name, x):
        weight = tensors[name]
        return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)

    hidden, ahead = (theirs.model.embed_tokens(ids[None]) for ids in (batch.tokens, batch.targets))
    positions = torch.cat([torch.arange(n) for n in batch.seqlens])
    angles = theirs.model.rotary_emb(hidden, positions[None])
    for layer in theirs.model.layers[:2]:
        hidden = layer(hidden, attention_mask=None, position_embeddings=angles)
    both = torch.cat((norm("enorm", ahead), norm("hnorm", theirs.model.norm(hidden))), -1)
    hidden = both @ tensors["fc"].T
    hidden = theirs.model.layers[2](hidden, attention_mask=None, position_embeddings=angles)
    return theirs.lm_head(norm("norm", hidden))[0]
