"""The sections of the YAML: one frozen model a section, one described field a key.

A description names the unit in brackets; sizes such as 2GiB are read by it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pyrl_ext.plan.language.fields import (
    MAX_SAMPLES,
    Count,
    Dtype,
    Folder,
    NonNegative,
    Positive,
    Rate,
    RelativePath,
    Section,
    Text,
    bounded,
)
from pyrl_ext.plan.model.cp_cost import CpCost
from pyrl_ext.plan.schema.evaluate import Evaluate
from pyrl_ext.plan.schema.layout import Module, Parallel
from pyrl_ext.plan.schema.log import Log
from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.plan.schema.objective import Name, Objective
from pyrl_ext.plan.schema.servers import Servers
from pyrl_ext.plan.schema.teacher import Teacher
from pyrl_ext.plan.schema.turns import Turns

__all__ = ["Config", "Lora", "Module", "Objective", "Parallel", "Turns"]

Momentum = Annotated[float, Field(ge=0, lt=1)]
File = Annotated[Text, RelativePath()]
Reward = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$")]


class Model(Section):
    """Which network is trained, from which weights, in which precision."""

    family: Literal[
        "glm4_moe_lite", "glm4_moe", "deepseek_v3", "qwen3_moe", "qwen3", "qwen3_vl_moe",
        "kimi_k25", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
        "nemotron_h", "llama", "mixtral", "qwen2", "minimax_m2",
    ]  # fmt: skip
    """architecture, HF's model_type; a class in plan/model/families/"""
    path: Folder | None = None
    """folder of a Hugging Face model, relative to this YAML file, or a hub id: stands for family,
    config, tokenizer and weights, as far as they are not next to it; a plan names those instead;
    `model: <folder>` is the same"""
    config: Folder
    """HF config.json, relative to this YAML file, or a hub id"""
    tokenizer: Folder | None = None
    """folder with tokenizer.json, relative to this YAML file, or a hub id; null: none"""
    weights: Folder | None = None
    """folder of safetensors, relative to this YAML file, or a hub id; null: random weights from the
    seed"""
    dtype: Dtype = "float32"
    """of weights and activations; statistics stay float32"""
    backend: Literal["local", "te"] = "local"
    """layers and Adam: megatron-core's and torch's own, or transformer-engine's (needs a GPU)"""
    te_attention: Literal["p2p", "all_gather", "a2a"] | None = None
    """core attention by transformer-engine's kernels, and what its context-parallel ranks exchange:
    keys and values in a ring, those of all rows at once, or heads for rows (te); null: this
    package's"""
    recompute: Literal["none", "selective", "full"] = "none"
    """activations recomputed in the backward pass, to save memory"""
    recompute_modules: list[Literal["core_attn", "moe", "moe_act"]] = Field(
        default=["core_attn", "moe"]
    )
    """with recompute selective: core attention; all of the experts with their exchange between
    ranks (moe); or only what enters the last product of routed experts (moe_act), the cheapest"""
    fp8: Literal["blockwise", "tensorwise", "mxfp8"] | None = None
    """8-bit matrix products, with one scale per block of 128, tensor, or block of 32 (B200);
    weights and their updates keep their dtype (te); null: none"""
    router_bias_update_rate: NonNegative = 0.0
    """step of the routers' expert bias towards balance; 0 keeps the loaded bias"""
    freeze: list[Text] = Field(default=[])
    """weights that are not trained: patterns with *, ? and [...] of their names in the Hugging
    Face checkpoint, such as model.layers.*.mlp.gate.weight"""
    mtp: bool = False
    """train the MTP (multi-token prediction) layers as well"""
    megatron: dict[str, Any] = Field({})
    """fields of megatron-core's TransformerConfig that have no key here, passed on as they are"""


class Batching(Section):
    """How much is generated per step, and how it is split for training."""

    prompts: Count = 0
    """prompts per rollout step"""
    samples_per_prompt: Count = 0
    """responses to each prompt: the size of a group"""
    samples: Annotated[int, Field(ge=0, le=MAX_SAMPLES)] = 0
    """records of data.path per step (objective: sft)"""
    minibatches: Positive = 1
    """optimizer steps in a pass over a step's samples; whole groups each"""
    epochs: Positive = 1
    """passes over a step's samples, each through all minibatches in order; old and reference
    log-probs, advantages and routes are those of before the first one"""
    tokens_per_microbatch: Positive = 8192
    """most that a rank holds in one forward pass [tokens]; cp ranks share a sample, and hold cp
    times as many; bounds activations"""

    _step_is_bounded = bounded(("prompts", "samples_per_prompt"), "samples a step", MAX_SAMPLES)

    @property
    def updates(self) -> int:
        """Optimizer steps of a step, if none is skipped."""
        return self.minibatches * self.epochs


class Logprob(Section):
    """How the trainer scores tokens with the LM head."""

    head: Literal["fused", "logits"] = "fused"
    """fused: chunk by chunk, only loss tokens in the update; logits: of a whole microbatch"""
    chunk_bytes: Positive | None = None
    """of a chunk's logits and their gradients [bytes] (fused); null: 4 GiB on a GPU, 1 GiB on a
    CPU"""
    cache_bytes: Count = 0
    """of a microbatch's logits kept for the backward pass [bytes]; others are recomputed (fused)"""
    accept_rounded_logits: bool = False
    """allow bfloat16 logits (head: logits), which alone move probability ratios by 3 %"""
    loss_in_chunk: bool = False
    """run the loss inside each chunk: logits are computed once; costs one more float32 gradient of
    the head (fused)"""


class Kernels(Section):
    """Which backend runs the operators of this package on a GPU."""

    backend: Literal["auto", "native", "triton"] = "auto"
    """native: CUDA C++; auto: the first that supports a call; a named one raises if it does not"""


class Rollout(Servers):
    """The engine that generates responses."""

    engine: Literal["hf", "recorded", "vllm"] | None = None
    """hf: embedded, for small models; recorded: read from a file; vllm; null with objective: sft;
    left out with device cpu: hf"""
    dtype: Dtype | None = None
    """of the engine's weights; null: model.dtype"""
    quantization: Literal["fp8"] | None = None
    """fp8: the engine keeps the matrices of attention, feed-forward layers and experts in 8 bits,
    with a scale for each block of 128 x 128, and quantizes them anew at each publish; routers,
    norms, embedding and head keep rollout.dtype; null: all do (vllm)"""
    tp: Positive = 1
    """tensor-parallel size of the engine [GPUs]"""
    gpus: Positive | None = None
    """GPUs reserved for the engine; null: it shares the trainer's"""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    """share of a GPU's memory that the engine takes for weights and key/value cache (vllm)"""
    sleep: bool = True
    """release the engine's weights and cache on a shared GPU while the trainer works (hf, vllm)"""
    offload_trainer: Literal["none", "optimizer", "all"] = "none"
    """trainer state that is offloaded to host memory while the engine generates on a shared GPU;
    all: the weights of the reference and of teachers too"""
    transport: Literal["auto", "inprocess", "shm", "ipc", "broadcast"] = "auto"
    """how weights reach the engine. inprocess: it runs in the trainer's process and takes them as
    they are; the others run it in a separate process, and pass them through shared memory (shm,
    CPU), through the GPU that both use (ipc), or by gloo or NCCL (broadcast). auto: broadcast with
    separate gpus, else inprocess. Remote engines take them by TCP (auto) or broadcast"""
    bucket_bytes: Positive = 2**30
    """of weights that travel to the engine together [bytes]; a layer's experts, and a tensor, are
    never split"""
    engine_options: dict[str, Any] = Field(default={})
    """arguments of the engine that have no key here, passed on as they are (vllm)"""
    speculation: Literal["mtp"] | None = None
    """mtp: the engine drafts a token with each MTP layer of the model, and samples which of them to
    keep, so that responses have the same distribution; null: it drafts none (vllm)"""
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """divisor of the logits, in the engine and in the trainer"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """sample from the smallest set of tokens with this probability; 1: from all"""
    top_k: Count = 0
    """sample from the k likeliest tokens; 0: from all"""
    max_new_tokens: Count = 0
    """longest response [tokens]"""
    stop: list[Text] = Field(default=[])
    """a response that holds one of these texts ends with the token that completes it"""
    oversample: Annotated[float, Field(ge=1, le=32)] = 1.0
    """prompts asked for each one trained on; the slowest are aborted, which favors short answers"""
    max_num_seqs: Positive | None = None
    """sequences that an engine runs at a time; null: 128 for hf, 1024 for vllm"""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """log-probabilities the engine reports: after or before temperature"""
    accept_truncated_sampling: bool = False
    """score the full distribution, although top_p or top_k restricts the sampled tokens"""
    path: File | None = None
    """recorded samples, relative to this YAML file (recorded)"""
    record: Text | None = None
    """folder for every step's samples, relative to the run folder, which path can replay; null:
    samples are not kept"""
    check_tensors: Count | Literal["all"] = 16
    """number of tensors whose digest is compared after each publish, in rotation; 0: none"""
    max_mismatch: Rate | None = None
    """stop the run if the mean absolute difference of the trainer's and the engine's log-probs is
    larger at any step; null: check the first step after each start only, against 1e-4 in float32,
    else 0.1, or 0.5 if routers are not replayed (none with accept_truncated_sampling)"""


class Replay(Section):
    """The passes in which the trainer's routers use experts that were chosen before."""

    source: Literal["engine", "trainer"] = "engine"
    """who chose them: the engine (R3), or the trainer's routers in the pass for old log-probs (R2),
    which then replays nothing"""
    old: bool = True
    """in the forward pass for the log-probs before the update"""
    reference: bool = True
    """in the forward pass of the reference policy"""
    train: bool = True
    """in the forward and backward passes of the update"""

    @property
    def enabled(self) -> bool:
        """True if any pass replays."""
        return self.old or self.reference or self.train

    @property
    def summary(self) -> str:
        """As short as it can be written."""
        on = "on" if self.source == "engine" else "trainer"
        return on if self.enabled else "off"

    @property
    def of_engine(self) -> bool:
        """True if any pass replays the engine's routes, so that it must return them."""
        return self.enabled and self.source == "engine"

    @property
    def of_trainer(self) -> bool:
        """True if the pass for old log-probs records routes that later passes replay."""
        return self.enabled and self.source == "trainer"


class Optimizer(Section):
    """AdamW or Muon, and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon steps matrices, each expert's too, by their momentum, made orthogonal; AdamW steps
    embedding, output layer and vectors (extra muon)"""
    lr: Annotated[float, Field(ge=0, le=100)]
    """learning rate after the warmup"""
    betas: Annotated[tuple[Momentum, Momentum], Field(strict=False)] = (0.9, 0.98)
    """decay of the first and second moment, as a list of two"""
    eps: Rate = 1e-8
    """added to the root of the second moment"""
    moments: Literal["float32", "bfloat16"] = "float32"
    """type in which AdamW keeps its two moments; bfloat16 takes half the memory"""
    muon_momentum: Momentum = 0.95
    """decay of the momentum of matrices, with name muon"""
    muon_rms: Rate = 0.2
    """root mean square of a matrix's update at lr 1, with name muon; with 0.2 a learning rate of
    AdamW fits"""
    weight_decay: NonNegative = 0.0
    """decoupled weight decay"""
    clip_grad: NonNegative = 1.0
    """largest gradient norm; 0: never clipped"""
    warmup_steps: Count = 0
    """optimizer steps of linear warmup"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """after the warmup; linear and cosine fall until the run's end; wsd (warmup, stable, decay)
    falls linearly in the last decay_steps"""
    min_lr: NonNegative = 0.0
    """learning rate that is reached right after the last step; a constant schedule does not read
    it"""
    decay_steps: Count = 0
    """optimizer steps of decay at the run's end, with schedule wsd"""
    distributed: bool = False
    """spread the optimizer state over the dp ranks"""
    overlap_grad_reduce: bool = False
    """reduce gradients over the dp ranks while the last backward pass still runs"""


REWARD_REASONS = {
    "error": "the reward function raised an error",
    "timeout": "a call exceeded data.reward_timeout",
    "lost": "its worker process ended",
    "reward": "it returned something other than finite numbers",
}
"""Why a response has no reward, by the word that metrics use."""


class PromptKeys(Section):
    """Keys that describe prompts and their reward."""

    task: Name | None = None
    """task that brings prompts and reward: a built-in one, or reasoning_gym:<name>"""
    task_options: dict[str, Any] = Field({})
    """arguments of the task, as it names them"""
    prompts: Folder | None = None
    """.jsonl, .parquet or a folder of data files, relative to this YAML file, or a dataset's id on
    the hub"""
    subset: Text | None = None
    """configuration of a dataset that prompts names; null: its only one"""
    split: Text = "train"
    """split of a folder or dataset that prompts names"""
    eval_prompts: Folder | None = None
    """held-out prompts, a file, folder or dataset like prompts; null: every eighth of those"""
    eval_split: Text | None = None
    """split of eval_prompts, or of prompts where that is null, that is held out"""
    columns: dict[Text, Text] = Field({})
    """field -> its column in files and datasets, such as {prompt: question}; a.b is the entry b of
    the column a"""
    chat: bool = False
    """make each prompt a user's message, by the tokenizer's chat template"""
    system_prompt: Text | None = None
    """system message before it, with chat; null: none"""
    reward: Reward | None = None
    """module:function that scores a response, or exact_match, number_match or math_verify; null
    with a task: the task's own"""


class SourceKeys(PromptKeys):
    """One of several sources of prompts."""

    weight: Rate = 1.0
    """share of the prompts of a step, relative to the weights of the other sources"""
    levels: list[dict[str, Any]] = Field([])
    """options of the task by level of difficulty, the easiest first, each over task_options"""
    rise_at: float | None = None
    """mean reward of a step at which the next level begins, with levels"""
    environment: Text | None = None
    """environment that answers the policy and gives the reward, named as in turns.environment;
    null: a trajectory is one response, which the reward scores"""
    environment_options: dict[str, Any] = Field({})
    """keyword arguments of the environment's class"""
    teacher: Folder | None = None
    """folder or hub id of the model that teaches these prompts; null: teacher.model"""


class Data(PromptKeys):
    """Prompts and rewards: a task, a file and a function, or several sources; or records."""

    sources: dict[str, SourceKeys] = Field({})
    """sources of prompts by name, in place of task or prompts. Each has its own keys from task to
    reward, as above; weight, its share of the prompts relative to other sources (default 1); for a
    task levels, a list of options over task_options, the easiest first, and rise_at, the mean
    reward of a step at which the next level begins; with turns.environment sources, environment
    and environment_options in place of a reward; teacher in place of teacher.model"""
    reward_timeout: Rate | None = None
    """longest time that a call of the reward function may take [seconds]; null: no limit"""
    reward_workers: Positive = 1
    """most worker processes of the reward function, on each rank that scores"""
    reward_concurrency: Positive = 64
    """calls that a worker runs at the same time if the reward function is async def"""
    reward_retries: Count = 0
    """calls that are made again at once for a response whose call failed"""
    reward_min_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of a step's responses that must have a reward; others are dropped and counted; with
    fewer the step fails; 1: every failure ends the run"""
    max_prompt_tokens: Count = 0
    """longest prompt [tokens]"""
    path: File | None = None
    """.jsonl or .parquet of messages, or tokens and loss_mask, or a folder in which rollouts were
    recorded, relative to this YAML file"""
    max_tokens: Count = 0
    """longest record of data.path [tokens]"""
    truncate: bool = False
    """cut records that are longer, and count them; false: they are errors"""
    held_out: Count = 0
    """records at the end of data.path that are evaluated and not trained on"""
    shuffle: bool = True
    """a new order every epoch, drawn from the seed"""


class Checkpoint(Section):
    """Checkpoints, from which a run resumes."""

    every: Count = 50
    """steps between checkpoints; 0: only the last step"""
    keep: Positive = 2
    """newest checkpoints kept on disk"""
    hf: bool = False
    """write the weights of every checkpoint as a Hugging Face folder too: hf/ in it, with config
    and tokenizer"""


class Hardware(Section):
    """The machines the run is planned for; memory and time are estimated for them."""

    gpu: Literal["A100", "H100", "H200", "B200"] | None = None
    """one rank's device; null: unknown, so no limit is checked"""
    memory: Positive | None = None
    """usable memory of a device [bytes]; null: that of the GPU named above"""
    gpus_per_node: Positive = 8
    """devices that share a node and its fast links"""


class Estimate(Section):
    """Lengths that the time of a step is estimated for; training does not read them."""

    prompt_tokens: Positive | None = None
    """mean length of prompts [tokens]; null: half the longest, or a quarter of data.max_tokens"""
    response_tokens: Positive | None = None
    """mean length of responses [tokens]; null: as for prompts"""
    images: NonNegative = 1.0
    """mean number of images in a sample (modules.vision)"""
    image_patches: Positive = 1024
    """size of an image [patches] (modules.vision)"""
    spread: Annotated[float, Field(ge=0, le=10)] = 0.5
    """standard deviation of the logarithm of lengths; 0: all the same"""


class Config(Section):
    """The whole YAML file."""

    device: Literal["cpu", "cuda"]
    """where the trainer runs"""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """number of CPU threads of each rank; 0: torch's default"""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """of weights, data and sampling"""
    steps: Positive = 100
    """steps of the run"""
    run: Text
    """run folder, relative to where the command is started; left out: runs/<name of this file>"""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest whole checkpoint in the run folder; never: start over, and
    move what an earlier run wrote there into before-<n>/"""
    resume_allow: list[Text] = Field(default=[])
    """keys and sections that may change when the run is resumed, such as optimizer.lr; the option
    --allow of the command sets it. Keys that would break the saved state are never accepted"""
    init_from: Text | None = None
    """run folder or checkpoint folder of another run, from whose weights this one starts at step 0,
    relative to where the command is started; null: model.weights. A KL stays to model.weights"""
    init_optimizer: bool = False
    """start with the optimizer state of init_from, too; false: with none"""
    hardware: Hardware = Hardware()
    model: Model
    parallel: Parallel = Parallel()
    cp_cost: CpCost = CpCost()
    modules: dict[str, Module] = Field({})
    """encoders by name, such as vision; parallel is the language model's"""
    lora: Lora | None = None
    """adapters on a frozen base; null: all weights are trained"""
    batching: Batching
    logprob: Logprob = Logprob()
    kernels: Kernels = Kernels()
    rollout: Rollout = Rollout()
    turns: Turns = Turns()
    replay: Replay = Replay()
    objective: Objective = Objective()
    teacher: Teacher = Teacher()
    optimizer: Optimizer
    data: Data
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    estimate: Estimate = Estimate()
