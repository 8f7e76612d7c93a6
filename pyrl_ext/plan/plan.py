"""The compiled plan: the checked sections, what follows from them, and the comparison on resume."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import ValidationError

from pyrl_ext.plan.json_text import flatten, json_text
from pyrl_ext.plan.language.errors import ConfigError, Key, Problem, show
from pyrl_ext.plan.language.fields import section_of
from pyrl_ext.plan.language.hf_hub import config_of
from pyrl_ext.plan.language.paths import is_hub_id, path_beside
from pyrl_ext.plan.model import ranks
from pyrl_ext.plan.model.chunks import SPLIT_WAYS, ModelChunk, even_layout, plan_stages
from pyrl_ext.plan.model.families.blocks import Latent
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.plan.model.freeze import frozen_rows
from pyrl_ext.plan.model.latent_gather import Exchanged, exchanged_elements
from pyrl_ext.plan.model.layer_kinds import hybrid_pattern
from pyrl_ext.plan.model.lora import adapter_faults
from pyrl_ext.plan.model.sizes import ModelSizes
from pyrl_ext.plan.model.units import CHUNK_BYTES, DTYPE_BYTES
from pyrl_ext.plan.resume import Difference, is_allowed, refusal
from pyrl_ext.plan.schema import Config, Parallel, PromptKeys
from pyrl_ext.plan.schema.evaluate import DEFAULT_EVERY
from pyrl_ext.plan.schema.turns import NamedEnvironment
from pyrl_ext.schedule.alignment import TILE_ROWS, alignment
from pyrl_ext.schedule.learning_rate import LearningRate

# What a resumed run may change: how long, how often, where; it computes the same but for rounding.
FREE_ON_RESUME = (
    "threads",
    "steps",
    "run",
    "resume",
    "resume_allow",
    "log",
    "checkpoint",
    "evaluate",
    "hardware",
    "estimate",
    "device",
    "parallel",
    "optimizer.distributed",
    "batching.tokens_per_microbatch",
    "model.backend",
    "model.path",
    "model.recompute",
    "model.recompute_modules",
    "logprob",
    "kernels",
    "data.reward_timeout",
    "data.reward_workers",
    "data.reward_concurrency",
    "data.reward_retries",
    "data.reward_min_share",
    "cp_cost",
    "objective.dynamic_sampling_shortage",
    "rollout.gpus",
    "rollout.gpu_memory_utilization",
    "rollout.sleep",
    "rollout.offload_trainer",
    "rollout.bucket_bytes",
    "rollout.record",
    "rollout.check_tensors",
    "rollout.max_mismatch",
    "rollout.transport",
    "rollout.overlap_publish",
    "rollout.delta_sync",
    "turns.timeout",
    "rollout.servers",
    "rollout.launch",
    "rollout.min_servers",
    "rollout.keys",
    "rollout.tls",
    "lora.publish",
    "rollout.request_timeout",
    "rollout.publish_timeout",
    "rollout.senders",
    "teacher.servers",
    "teacher.key",
    "teacher.request_timeout",
    "turns.min_share",
)
# Derived from the rest, or only where the YAML lay.
NOT_COMPARED = ("source", "notes", "unsupported", "fetched")


class Plan(Config):
    """Everything the run needs to know, frozen; `to_json` and `read` round-trip."""

    source: str
    """absolute path of the YAML file; relative paths in the plan start at its folder"""
    hf: dict[str, Any]
    """the HF config, as read"""
    teacher_hf: dict[str, dict[str, Any]] = {}  # noqa: RUF012 (pydantic copies it)
    """the HF configs of the teachers, as read, by the folder or hub id"""
    notes: tuple[str, ...] = ()
    """informational notes"""
    unsupported: tuple[str, ...] = ()
    """what this plan names that the trainer cannot run yet"""
    fetched: dict[str, str] = {}  # noqa: RUF012 (pydantic copies it)
    """hub id -> its folder on this node, once it is there"""

    @property
    def derived(self) -> dict[str, Any]:
        """Derived values: row counts, the stages' layers, the ranks' coordinates and groups."""
        return {
            "hybrid_layer_pattern": hybrid_pattern(self.stages, self.sizes.layer_kinds),
            "world_size": self.world_size,
            "fingerprint": self.fingerprint,
            "row_alignment": self.row_alignment,
            "max_rows": self.max_rows,
            "samples_per_minibatch": self.samples_per_minibatch,
            "router_layers": self.router_layers,
            "stages": [[vars(chunk) for chunk in stage] for stage in self.stages],
            "ranks": {n: [g.place(r)._asdict() for r in g.ranks] for n, g in self.grids.items()},
            "groups": {name: grid.groups for name, grid in self.grids.items()},
        }

    @property
    def fingerprint(self) -> str:
        """Hash of all that a resumed run may not change."""
        fields = json.dumps(self._compared(), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()[:16]

    def _compared(self) -> dict[str, Any]:
        """Values by dotted name of all that a resumed run may not change."""
        keys = ("ranks", "parallel", "patches_per_microbatch")
        free = {f"modules.{name}.{key}" for name in self.modules for key in keys}
        return flatten(self.model_dump(mode="json"), {*FREE_ON_RESUME, *NOT_COMPARED, *free})

    @cached_property
    def sizes(self) -> ModelSizes:
        """The sizes of the model."""
        return read_sizes(self.hf)

    @property
    def router_layers(self) -> tuple[int, ...]:
        """0-based global ids of the decoder layers that have a router."""
        return self.sizes.router_layers

    @property
    def num_mtp_layers(self) -> int:
        """Multi-token-prediction layers that are trained."""
        return self.sizes.num_nextn_predict_layers if self.model.mtp else 0

    @property
    def draft_layers(self) -> int:
        """MTP layers that the engine holds too, to draft tokens."""
        return self.num_mtp_layers if self.rollout.speculation == "mtp" else 0

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Megatron's names of the language model's tensors that `model.freeze` names."""
        patterns = self.model.freeze
        table = self.sizes.weights(self.num_mtp_layers) if patterns else []
        return frozenset(row.megatron_name for row in frozen_rows(table, patterns))

    @cached_property
    def stages(self) -> tuple[tuple[ModelChunk, ...], ...]:
        """[pp][vpp] what every model chunk of every pipeline rank holds."""
        return plan_stages(self.parallel, self.sizes.num_hidden_layers, self.num_mtp_layers)

    @property
    def grids(self) -> dict[str, ranks.Grid]:
        """Module -> its ranks: the language model's, those behind them, or its first stage's."""
        grids = {"llm": ranks.Grid("llm", 0, self.parallel)}
        first = self.parallel.world_size
        for name, module in self.modules.items():
            if module.ranks == "shared":  # a replica on each
                replicas = Parallel(dp=self.parallel.world_size // self.parallel.pp)
                grids[name] = ranks.Grid(name, grids["llm"].first, replicas)
            else:
                grids[name] = ranks.Grid(name, first, Parallel(**module.parallel.model_dump()))
                first = grids[name].ranks.stop
        return grids

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return max(grid.ranks.stop for grid in self.grids.values())

    @property
    def has_rollouts(self) -> bool:
        """True if an engine generates the samples; else they are records of data.path."""
        return self.rollout.engine is not None

    @property
    def trains_on_sampling_mask(self) -> bool:
        """True if log-probs are taken over the tokens that top-p and top-k kept."""
        rollout = self.rollout
        truncated = rollout.top_p < 1 or rollout.top_k > 0
        return self.has_rollouts and truncated and not rollout.accept_truncated_sampling

    @property
    def loss_in_chunk(self) -> bool:
        """True if the loss runs inside each chunk of the LM head, as distributions are compared
        there."""
        return self.logprob.loss_in_chunk or self.objective.compares_distributions

    @property
    def scores_in_update(self) -> bool:
        """True if the old log-probs are those of the update's own forward passes: a step has one
        update, and nothing reads them before it. The first step of a run is scored before, to
        check the engine."""
        objective = self.objective
        replay = self.replay
        read_before = (
            self.rollout.max_mismatch is not None  # every batch is checked before its update
            or self.rollout.record is not None
            or objective.corrects_sequences
            or objective.teaches_sampled
            or (objective.kl_coef > 0 and objective.kl_in == "reward")
            or replay.of_trainer
            or self.loss_in_chunk
        )
        same_pass = self.batching.updates == 1 and replay.old == replay.train
        return self.has_rollouts and same_pass and not read_before

    @property
    def scores_every_row(self) -> bool:
        """True if log-probs before the update are wanted of prompts too: they are recorded, or a
        loss of the user's may read them. Otherwise the LM head scores loss tokens alone."""
        return self.rollout.record is not None or ":" in self.objective.loss

    @property
    def head_chunk_bytes(self) -> int:
        """Bytes of a chunk's logits and their gradients in the LM head, with null resolved."""
        return self.logprob.chunk_bytes or CHUNK_BYTES[self.device]

    @property
    def vocab_columns(self) -> int:
        """Columns of a rank's shard of the vocabulary, padding included."""
        return -(-self.sizes.vocab_size // self.parallel.tp)

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.batching.samples or self.batching.prompts * self.batching.samples_per_prompt

    @property
    def prompts_asked(self) -> int:
        """Prompts that a rollout step asks the engines for; it trains on batching.prompts."""
        return math.ceil(round(self.batching.prompts * self.rollout.oversample, 6))

    @property
    def prompt_keys(self) -> Mapping[str, PromptKeys]:
        """Beginning of keys below data -> those that describe prompts: "sources.<name>." for each
        source, or "" for data itself."""
        if not self.data.sources:
            return {"": self.data}
        return {f"sources.{name}.": source for name, source in self.data.sources.items()}

    @property
    def source_weights(self) -> dict[str, float]:
        """Source of prompts -> its weight; empty without `data.sources`."""
        return {name: source.weight for name, source in self.data.sources.items()}

    @property
    def environments(self) -> dict[str, NamedEnvironment]:
        """Source of prompts -> its environment, for sources that have one; "" without
        `data.sources`. Those of verifiers are not among them."""
        turns = self.turns
        if turns.environment is None or turns.taskset is not None:
            return {}
        if not turns.by_source:
            return {"": NamedEnvironment(turns.environment, turns.options)}
        found: dict[str, NamedEnvironment] = {}
        for name, source in self.data.sources.items():
            if source.environment is not None:
                key = f"data.sources.{name}.environment"
                options = source.environment_options
                found[name] = NamedEnvironment(source.environment, options, key, f"{key}_options")
        return found

    @property
    def samples_per_minibatch(self) -> int:
        """Samples of one optimizer step."""
        return self.samples // self.batching.minibatches

    @property
    def row_alignment(self) -> int:
        """Rows of a packed sequence are padded to a multiple of this."""
        return alignment(self.parallel.tp, self.parallel.cp, self.tile_rows)

    @property
    def tile_rows(self) -> int:
        """Rows of a tensor-parallel rank are a multiple of this (FP8)."""
        return TILE_ROWS[self.model.fp8]

    @property
    def longest(self) -> int:
        """Rows of the longest sample: its last token is never an input."""
        generated = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if self.turns.kind is not None:
            generated = self.turns.max_tokens
        return (generated if self.has_rollouts else self.data.max_tokens) - 1

    @property
    def drops_samples(self) -> bool:
        """True if a group may have fewer samples than were begun: others failed."""
        return self.turns.kind is not None or self.data.reward_min_share < 1

    @property
    def most_sampled(self) -> int:
        """Tokens that the policy may sample in a trajectory."""
        return self.turns.most_sampled(self.rollout.max_new_tokens)

    @property
    def max_rows(self) -> int:
        """Rows of the longest sample, padded."""
        return -(-self.longest // self.row_alignment) * self.row_alignment

    @property
    def exchanged_elements(self) -> Exchanged | None:
        """Elements that context-parallel ranks exchange, as latents and as heads; None: without
        latents or context parallelism, or if transformer-engine's attention exchanges heads."""
        cp = self.parallel.dynamic_cp or self.parallel.cp
        if not isinstance(self.sizes, Latent) or cp == 1 or self.model.te_attention:
            return None
        return exchanged_elements(self.sizes, self.parallel.tp)

    @property
    def gathers_latents(self) -> bool:
        """True if context-parallel ranks gather latents, not keys and values of all heads."""
        exchanged = self.exchanged_elements
        return exchanged is not None and exchanged.gathers_latents

    @property
    def rollout_dtype(self) -> str:
        """Type of the engine's weights."""
        return self.rollout.dtype or self.model.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of one of the trainer's weights, and of an element of its activations."""
        return DTYPE_BYTES[self.model.dtype]

    @property
    def recomputed_modules(self) -> frozenset[str]:
        """Modules that the backward pass recomputes; none where it recomputes whole layers."""
        if self.model.recompute != "selective":
            return frozenset()
        return frozenset(self.model.recompute_modules)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state for each parameter that AdamW steps: two moments, and a float32
        copy of a weight that is not float32 itself."""
        copy = 0 if self.model.dtype == "float32" else 4
        return copy + 2 * DTYPE_BYTES[self.optimizer.moments]

    @property
    def engine_bytes(self) -> int:
        """Bytes of one of the engine's weights."""
        return DTYPE_BYTES[self.rollout_dtype]

    @property
    def shares_gpus(self) -> bool:
        """True if the engine uses the trainer's GPUs."""
        own = self.rollout.gpus is not None or self.remote_engines
        return self.device == "cuda" and not own and self.rollout.engine in ("hf", "vllm")

    @property
    def remote_engines(self) -> bool:
        """True if the engines are servers, on other hosts, that the trainer reaches over HTTP."""
        return bool(self.rollout.servers or self.rollout.launch.hosts)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the remote engines: as given, or of those that `launch` starts."""
        rollout = self.rollout
        scheme = "http" if rollout.tls is None else "https"
        return (*rollout.servers, *rollout.launch.addresses(rollout.tp, scheme))

    @property
    def num_engines(self) -> int:
        """Engines that generate at the same time; each has rollout.tp GPUs."""
        gpus = self.rollout.gpus or self.parallel.world_size
        return len(self.addresses) or gpus // self.rollout.tp

    @property
    def max_num_seqs(self) -> int:
        """Sequences that an engine runs at a time, with null resolved."""
        return self.rollout.max_num_seqs or (1024 if self.rollout.engine == "vllm" else 128)

    @property
    def engine_sleeps(self) -> bool:
        """True if the engine gives the GPU that it shares back while the trainer works."""
        return self.shares_gpus and self.rollout.sleep

    @property
    def sends_all(self) -> bool:
        """True if every publish sends all weights: engines forget them, or may be started again."""
        return self.engine_sleeps or self.remote_engines

    @property
    def transport(self) -> Literal["inprocess", "shm", "ipc", "broadcast", "servers"]:
        """Transport of weights to the engine, with auto resolved; servers: one send to all."""
        if self.remote_engines:
            return "servers"
        if self.rollout.transport != "auto":
            return self.rollout.transport
        return "inprocess" if self.rollout.gpus is None else "broadcast"

    @property
    def lora_publish(self) -> Literal["merge", "adapter"] | None:
        """Form in which the engine gets adapters, with null resolved; None: it gets none."""
        if self.lora is None or self.rollout.engine not in ("hf", "vllm"):
            return None
        return self.lora.publish or ("merge" if adapter_faults(self, self.sizes) else "adapter")

    @property
    def engine_of_rank(self) -> tuple[int | None, ...]:
        """By trainer rank, the engine that it holds, or holds a part of; None: it holds none.

        One in a separate process belongs to one rank, one in process to as many as it has parts.
        Ranks of an encoder alone hold none: their memory is not made for the language model.
        Every rank asks remote engines, all of them, for its share of the prompts.
        """
        if self.remote_engines:
            return tuple(range(self.world_size))
        ranks = self.parallel.world_size
        tp = self.rollout.tp
        engines = self.num_engines
        owners = {engine * ranks // engines: engine for engine in range(engines)}
        if self.transport == "inprocess":
            owners = {rank: rank // tp for rank in range(ranks)}
        return tuple(owners.get(rank) for rank in range(self.world_size))

    @property
    def config_path(self) -> str:
        """Absolute path of the HF config.json; of a hub id, see `config_of`."""
        config = self.model.config
        found = config_of(config).path if self.is_hub_id(config) else ""
        return found or self.resolve(config)

    @property
    def teachers(self) -> dict[str, str]:
        """Source of prompts -> folder or hub id of its teacher; "" without `data.sources`. Sources
        without a teacher are left out."""
        if self.data.sources:
            given = {name: each.teacher for name, each in self.data.sources.items()}
        else:
            given = {"": None}
        found = {source: name or self.teacher.model for source, name in given.items()}
        return {source: name for source, name in found.items() if name is not None}

    @property
    def teacher_plans(self) -> dict[str, Plan]:
        """Folder or hub id of a teacher -> its plan: that model on the ranks of the trainer; empty
        with `teacher.servers`."""
        if self.teacher.servers:
            return {}
        names = dict.fromkeys(self.teachers.values())
        return {name: self._teacher_plan(name) for name in names if name in self.teacher_hf}

    @property
    def teacher_folders(self) -> dict[str, str]:
        """Folder or hub id of a teacher -> absolute folder; a hub id until it is fetched."""
        names = dict.fromkeys(self.teachers.values())
        return {name: str(self._local_or_hub(name)) for name in names}

    def _teacher_plan(self, folder: str) -> Plan:
        hf = self.teacher_hf[folder]
        fields = self.model_dump(mode="json", include={*Config.model_fields})
        config = folder if self.is_hub_id(folder) else f"{folder}/config.json"
        fields["model"] = {
            "family": hf["model_type"],
            "config": config,
            "tokenizer": folder,
            "weights": folder,
            "dtype": self.teacher.dtype or self.model.dtype,
            "backend": self.model.backend,
        }
        fields["replay"] = dict.fromkeys(("old", "reference", "train"), False)
        fields["data"] |= {"sources": {}}
        fields |= {"modules": {}, "lora": None, "objective": {}, "teacher": {}}
        sizes = read_sizes(hf)
        layout = self.parallel
        if not sizes.num_experts:
            fields["parallel"] |= {"ep": 1, "etp": None}
        layers = sizes.num_hidden_layers
        if layout.pp > 1 and (layers != self.sizes.num_hidden_layers or self.num_mtp_layers):
            for key in SPLIT_WAYS:
                del fields["parallel"][key]
            even = even_layout(layers, 0, layout.pp * layout.vpp_size)
            fields["parallel"]["pipeline_model_parallel_layout"] = even
        derived = {"source": self.source, "hf": hf, "fetched": self.fetched}
        return Plan.model_validate(fields | derived)

    @property
    def tokenizer_path(self) -> str | None:
        """Absolute folder of the tokenizer; a hub id until it is fetched."""
        return self._local_or_hub(self.model.tokenizer)

    @property
    def weights_path(self) -> str | None:
        """Absolute folder of the initial weights; a hub id until they are fetched."""
        return self._local_or_hub(self.model.weights)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, if none is skipped."""
        return self.steps * self.batching.updates

    def learning_rate(self, module: str = "llm") -> LearningRate:
        """The learning rate of a module, by optimizer step."""
        keys = self.modules.get(module)
        options = self.optimizer
        return LearningRate(
            lr=options.lr if keys is None or keys.lr is None else keys.lr,
            min_lr=options.min_lr,
            schedule=options.schedule,
            warmup_steps=options.warmup_steps,
            decay_steps=options.decay_steps,
            steps=self.optimizer_steps,
        )

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations; 0: never."""
        if self.evaluate.every is not None:
            return self.evaluate.every
        held_out = self.rollout.engine != "recorded" if self.has_rollouts else self.data.held_out
        return DEFAULT_EVERY if held_out else 0

    @property
    def records_path(self) -> str | None:
        """Absolute path of the records of a run without rollouts."""
        return self.resolve(self.data.path) if self.data.path else None

    @property
    def recorded_path(self) -> str | None:
        """Absolute path of the recorded samples."""
        return self.resolve(self.rollout.path) if self.rollout.path else None

    def resolve(self, path: str) -> str:
        """`path` as an absolute path; relative ones start at the YAML file's folder."""
        return path_beside(self.source, path)

    def is_hub_id(self, name: str) -> bool:
        """True if `name` is taken as owner/name of a model hub: no such folder next to the YAML."""
        return is_hub_id(self.source, name)

    def is_dataset(self, name: str) -> bool:
        """True if `name` is a folder, or an id of the hub: the library datasets loads it. What
        would lie in a folder that is there is no id."""
        if Path(self.resolve(name)).is_dir():
            return True
        owner = Path(self.resolve(name.partition("/")[0]))
        return self.is_hub_id(name) and not owner.is_dir()

    def _local_or_hub(self, name: str | None) -> str | None:
        if name is None:
            return None
        return self.fetched.get(name, name) if self.is_hub_id(name) else self.resolve(name)

    def to_json(self) -> str:
        """JSON with a line a field; what is derived is for readers, and computed anew when read."""
        return json_text(self.model_dump(mode="json") | {"derived": self.derived})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Raises `ValueError` where `text` is not one."""
        tree = json.loads(text)
        if not isinstance(tree, dict):
            raise ValueError(f"{show(tree)}, expected a JSON object of the plan's sections")
        tree = {key: tree[key] for key in tree.keys() - {"derived", "world_size"}}
        return cls.model_validate_json(json.dumps(tree))

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """The plan saved as JSON at `path`. Raises `ConfigError` where there is none."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            message = f"{error.strerror or error}, expected a saved plan"
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            message = f"not a plan of this version: {place}: {first['msg']}"
        except (ValueError, RecursionError) as error:
            message = f"not a saved plan: {error}"
        advice = "Copy plan.json of one of the run's checkpoints there, or use another run folder"
        raise ConfigError([Problem(str(path), 0, f"{message}. {advice}")])

    def diff(self, saved: Plan) -> tuple[Difference, ...]:
        """Fields in which this plan and a `saved` one differ and a resumed run may not."""
        before = saved._compared()
        after = self._compared()
        found = (Difference(name, before.get(name), after.get(name)) for name in after | before)
        return tuple(each for each in found if each.saved != each.now)

    def check_resumes(self, saved: Plan) -> tuple[Difference, ...]:
        """What changes on request if this plan continues `saved`. Raises `ConfigError` with every
        field that `resume_allow` does not name, or that can never change."""
        found = self.diff(saved)
        allow = self.resume_allow
        if refused := [each for each in found if not is_allowed(each.name, allow)]:
            raise ConfigError(Problem(self.source, 0, text) for text in refusal(refused, allow))
        return found

    def model_diff(self, other: Plan) -> tuple[Difference, ...]:
        """Fields for which the weights of `other` are not weights of this plan's model."""
        if self.model.family != other.model.family:  # then all sizes have other names
            return (Difference("model.family", other.model.family, self.model.family),)
        before = other._model()
        after = self._model()
        found = (Difference(name, before.get(name), after.get(name)) for name in after | before)
        return tuple(each for each in found if each.saved != each.now)

    def _model(self) -> dict[str, Any]:
        """Values by dotted name of all that decides which tensors the model has and what they
        compute."""
        lora = self.lora.model_dump(exclude={"publish", "weights"}) if self.lora else None
        tree = {
            "model": {"mtp": self.model.mtp},
            "hf": self.sizes.model_dump(exclude={"initializer_range"}),
            "lora": lora,
            "modules": {name: {"train": keys.train} for name, keys in self.modules.items()},
        }
        return flatten(tree, set())


class PartialPlan(Plan):
    """A plan before its rules are checked, of the fields that are right; reading another raises
    `InvalidField`. Frozen for its readers; its methods alone set fields."""

    @classmethod
    def of(cls, source: str, tree: Mapping[str, Any], wrong: Set[Key]) -> PartialPlan:
        """The sections of `tree`, and their defaults, without the fields in `wrong`."""
        kept = {name: tree[name] for name in Config.model_fields if name in tree}
        return _constructed(cls, kept | {"source": source}, (), wrong)

    def learn(self, hf: dict[str, Any]) -> None:
        """Set the HF config, once it was read."""
        vars(self)["hf"] = hf

    def learn_teachers(self, teacher_hf: dict[str, dict[str, Any]]) -> None:
        """Set the HF configs of the teachers, once they were read."""
        vars(self)["teacher_hf"] = teacher_hf

    def changed(self, values: Mapping[Key, Any]) -> Self:
        """This plan with other values, unchecked; what follows from them is computed again."""
        plan = self.model_copy()
        for key, value in values.items():
            vars(plan)[key[0]] = _replaced(getattr(plan, key[0]), key[1:], value)
        vars(plan).pop("stages", None)
        vars(plan).pop("frozen", None)
        return plan


def _constructed(kind: Any, value: Any, at: Key, wrong: Set[Key]) -> Any:
    """`value` as the type `kind`, unchecked, without the fields in `wrong` and their defaults."""
    if not isinstance(value, dict):
        return value
    if get_origin(kind) is dict:
        return {k: _constructed(get_args(kind)[1], v, (*at, k), wrong) for k, v in value.items()}
    if (section := section_of(kind)) is None:
        return value
    kinds = {name: field.annotation for name, field in section.model_fields.items()}
    inner = {k: _constructed(kinds.get(k), v, (*at, k), wrong) for k, v in value.items()}
    made = section.model_construct(**inner)
    for name in (key[-1] for key in wrong if key[:-1] == at):
        vars(made).pop(name, None)  # its default would be an answer too
    return made


def _replaced(holder: Any, key: Key, value: Any) -> Any:
    """A copy of the section or mapping `holder` with another value at `key`, unchecked."""
    if not key:
        return value
    if isinstance(holder, dict):
        return holder | {key[0]: _replaced(holder[key[0]], key[1:], value)}
    inner = _replaced(getattr(holder, key[0]), key[1:], value)
    return holder.model_copy(update={key[0]: inner})
