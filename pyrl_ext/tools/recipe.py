"""The config of a run for a model on given machines, each line with the reason for its value."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from pyrl_ext.plan.compile import compile_plan, draft_of, load, refuse
from pyrl_ext.plan.forecast.engine_memory import engine_memory
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.suggest import Suggestion, suggest
from pyrl_ext.plan.gym_tasks import is_gym_task
from pyrl_ext.plan.language.errors import ConfigError, show
from pyrl_ext.plan.language.paths import is_hub_id
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.hardware import GPUS, memory_limit
from pyrl_ext.plan.model.units import GIB, MIB, duration, size
from pyrl_ext.plan.plan import PartialPlan, Plan
from pyrl_ext.plan.records import has_chat_template
from pyrl_ext.plan.rules._rule import changed
from pyrl_ext.plan.rules.model import OTHER_WEIGHTS

__all__ = ["GPUS", "Data", "Gpus", "Recipe", "as_seen", "recipe"]

_COLUMN = 36  # where comments begin
_MOST_GPUS = 1024
_NODE = 8  # GPUs of a node: the largest engine
_SMALLEST_SHARE = 0.3  # of a GPU's memory for the engine
_LARGEST_SHARE = 0.95
_RESERVED = 0.15  # share of the host's memory for what a plan does not count
_SMALL = 50_000_000  # parameters
_SHORT = "parallel.cp=1"  # samples of this length need no ranks that share them
_LEAST = (_SHORT, "model.recompute=full", "rollout.offload_trainer=all")
_SEQUENCES = 64  # of the longest samples, for which an engine's cache has room


class Data(NamedTuple):
    """Prompts and reward of a run; all None: a built-in task."""

    prompts: str | None = None
    reward: str | None = None
    task: str | None = None


class Gpus(NamedTuple):
    """GPUs that a run is planned for."""

    number: int
    kind: str
    memory: int | None = None
    """Memory of each GPU [bytes]; None: that of the data sheet."""


@dataclass
class Recipe:
    """Values by `section.key`, in the order they are written, and their reasons."""

    head: list[str]
    """Comment at the top."""
    values: dict[str, object]
    why: dict[str, str]
    """Key, or section -> reason."""

    def set(self, key: str, value: object, why: str) -> None:
        """Set a value and its reason."""
        self.values[key] = value
        self.why[key] = why

    def text(self, absolute: bool = False) -> str:
        """The YAML. `absolute`: with absolute paths, for a file in another folder."""
        lines = [f"# {line}".rstrip() for line in self.head]
        current = None
        for key, value in self.values.items():
            section, _, name = key.rpartition(".")
            if section != current:
                lines.append("")
            if section and section != current:
                lines.append(_commented(f"{section}:", self.why.get(section)))
            current = section
            if absolute and key in ("model.path", "data.prompts") and not is_hub_id("", str(value)):
                value = os.path.abspath(str(value))
            lines.append(_commented(f"{'  ' * bool(section)}{name}: {_yaml(value)}", self.why[key]))
        return "\n".join(lines) + "\n"


def recipe(model: str, gpus: Gpus | None, data: Data) -> Recipe:
    """The recipe for a folder or hub id on `gpus`; None: on this machine's CPU.

    Raises:
        ValueError: with the problems of the model, the prompts or the reward, or with what the run
            needs where it does not fit
    """
    made = Recipe([], {}, {})
    _start(made, model, gpus)
    _batch(made, gpus)
    _objective(made, gpus)
    _data(made, model, gpus, data)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        try:
            _shorten(made, _draft(made, file))
            if gpus:
                _fit_gpus(made, model, gpus, file)
            else:
                _fit_host(made, model, file)
        except ConfigError as error:
            raise ValueError(as_seen(str(error), file, os.getcwd())) from None
    return made


def as_seen(message: str, file: Path, folder: str) -> str:
    """A message of the plan about `file`, which is alone in a temporary folder, as if it were in
    `folder`; without numbers of lines."""
    without_lines = re.sub(rf"{re.escape(str(file))}:\d+: ", "", message)
    return without_lines.replace(str(file.parent), folder)


def _start(made: Recipe, model: str, gpus: Gpus | None) -> None:
    name = os.path.basename(os.path.abspath(model))
    made.set("device", "cuda" if gpus else "cpu", "where the trainer runs")
    if not gpus:
        made.set("threads", 0, "all that torch takes")
    made.set("steps", 200 if gpus else 20, "each generates, scores and trains; resume with more")
    made.set("run", f"runs/{name}", "folder of metrics, checkpoints and the run's page")
    if gpus:
        made.set("hardware.gpu", gpus.kind, "the plan refuses what does not fit its memory")
        if gpus.memory is not None:
            memory = f"{gpus.memory // MIB}MiB"
            made.set("hardware.memory", memory, "of each, as nvidia-smi reports")
    else:
        memory = f"{_host_memory() // GIB}GiB"
        made.set("hardware.memory", memory, "of this machine; the plan refuses what does not fit")
    made.set("model.path", model, "family, sizes, tokenizer and weights")
    if os.path.isdir(model) and not _holds_weights(Path(model)):
        made.set("model.weights", None, "the folder holds none: random ones from the seed")
    dtype = "bfloat16" if gpus else "float32"
    made.set("model.dtype", dtype, "of weights and activations; the optimizer keeps float32")
    made.set("model.recompute", "none", "")


def _holds_weights(folder: Path) -> bool:
    """True if a folder holds weights, also those in a format that the plan refuses."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", *OTHER_WEIGHTS))


def _batch(made: Recipe, gpus: Gpus | None) -> None:
    count = gpus.number if gpus else 0
    samples = 8 if gpus else 4
    made.set("batching.prompts", max(64, count) if gpus else 8, "of a step")
    made.set("batching.samples_per_prompt", samples, "a group, whose rewards are compared")
    made.set("batching.minibatches", 2 if gpus else 1, "optimizer steps of a step")
    tokens = 8192 if gpus else 1024
    made.set("batching.tokens_per_microbatch", tokens, "at once on a rank; holds a whole sample")
    if gpus:
        made.set("rollout.engine", "vllm", "generates on the trainer's GPUs, in turns with it")
        made.set("rollout.tp", 1, "")
        made.set("rollout.gpu_memory_utilization", 0.5, "")
        made.set("rollout.offload_trainer", "none", "")
        made.set("rollout.max_new_tokens", 4096, "longest response; longer ones take more memory")
    else:
        made.set("rollout.engine", "hf", "embedded: generates in the trainer's process")
        made.set("rollout.max_new_tokens", 64, "longest response; few, since a CPU is slow")


def _objective(made: Recipe, gpus: Gpus | None) -> None:
    made.set("objective.preset", "dapo", "GRPO with room for unlikely tokens to grow")
    if not gpus:
        made.set("objective.dynamic_sampling", 2, "most rounds of prompts; few, on a CPU")
    made.set("objective.tis_cap", 2.0, "weight by trainer/engine probability, at most 2")
    random = "model.weights" in made.values
    why = "random weights take large steps" if random else "usual for pretrained weights"
    made.set("optimizer.lr", 1e-3 if random else 1e-6, why)
    if gpus:
        made.set("optimizer.distributed", False, "")


def _data(made: Recipe, model: str, gpus: Gpus | None, data: Data) -> None:
    if data.prompts is not None:
        made.set("data.prompts", data.prompts, "one in eight is held out for evaluation")
        made.set("data.reward", data.reward, "scores a response, in separate processes")
        made.set("data.max_prompt_tokens", 1024 if gpus else 256, "longer prompts are errors")
        return
    if data.task is not None and is_gym_task(data.task):
        made.set("data.task", data.task, "prompts without end, and their scorer")
        folder = Path(model)
        if not folder.is_dir() or has_chat_template(folder):
            made.set("data.chat", True, "questions in the model's chat template")
        made.set("data.max_prompt_tokens", 1024 if gpus else 256, "longer prompts are errors")
        return
    why = "built in" if data.task else "built in, to run at once; or set prompts and reward"
    made.set("data.task", data.task or "countdown", why)
    made.set("data.max_prompt_tokens", 64, "its prompts are short")


def _shorten(made: Recipe, draft: PartialPlan) -> None:
    """Set shorter responses if the model has too few positions for a prompt and the response."""
    positions = draft.sizes.max_position_embeddings
    room = max(1, positions - draft.data.max_prompt_tokens)
    if draft.rollout.max_new_tokens > room:
        made.set("rollout.max_new_tokens", room, f"the model has {positions} positions")


def _fit_host(made: Recipe, model: str, file: Path) -> None:
    """Set the least recomputation with which the run fits this machine."""
    room = int((1 - _RESERVED) * _host_memory())
    peak = 0
    for recompute in ("none", "selective", "full"):
        made.set("model.recompute", recompute, "activations that the backward pass computes again")
        draft = _draft(made, file)
        if parameters(draft.sizes).total < _SMALL:
            made.set("threads", 1, "matrices this small are slower on two")
        peak = max(stage.peak for stage in stage_memory(draft))
        if peak <= room:
            file.write_text(made.text(absolute=True), encoding="utf-8")
            compile_plan(file)
            made.head = [
                f"{model} on this machine's CPU: about {size(peak)} of memory.",
                "",
                "  pyrl plan run.yaml    is it consistent, does it fit",
                "  pyrl train run.yaml",
            ]
            return
    raise ValueError(
        f"{model}: about {size(peak)} in one process, expected at most {size(room)} of this "
        f"machine's {size(_host_memory())}. Take a smaller model, or GPUs: --gpus 8xH100"
    )


def _fit_gpus(made: Recipe, model: str, gpus: Gpus, file: Path) -> None:
    """Set the fastest layout that fits, with the smallest engine that does."""
    count, kind, memory = gpus
    if found := _search(made, count, kind, file):
        _take(made, model, found, f"{count} {kind}")
        return
    of_memory = f" of {size(memory)}" if memory else ""
    what = f"{model} does not fit {count} {kind}{of_memory}"
    other = 1
    while other <= _MOST_GPUS:
        if _search(made, other, kind, file, _LEAST):
            raise ValueError(f"{what}, expected for example {other}. Use --gpus {other}x{kind}")
        other = 2 * other
    larger = [name for name, gpu in GPUS.items() if gpu.memory > 1.1 * GPUS[kind].memory]
    others = f"GPUs with more memory ({', '.join(larger)}) or " if larger else ""
    raise ValueError(
        f"{what}, nor {_MOST_GPUS}: an engine has at most the {_NODE} GPUs of a node, expected "
        f"{others}engines on separate hosts (docs/remote_engines.md)"
    )


def _search(
    made: Recipe, count: int, kind: str, file: Path, fixed: tuple[str, ...] = (_SHORT,)
) -> Suggestion | None:
    """The fastest layout with the smallest engine and the `fixed` overrides; sets the engine's
    keys. None: none fits."""
    made.values["batching.prompts"] = max(64, count)
    for tp in (1, 2, 4, _NODE):
        made.set("rollout.tp", tp, "GPUs of an engine: the fewest that hold its weights and cache")
        if count % tp or (share := _engine_share(_draft(made, file))) is None:
            continue
        made.set("rollout.gpu_memory_utilization", share, "of a GPU, for both")
        file.write_text(made.text(absolute=True), encoding="utf-8")
        try:
            found = suggest(file, fixed, count, kind, 1).found
        except ConfigError as error:
            if "rollout.tp: " in str(error):  # such as heads that it does not divide
                continue
            raise
        if found:
            return found[0]
    return None


def _draft(made: Recipe, file: Path) -> PartialPlan:
    """The plan of the values so far, written to `file`; its rules are not checked."""
    file.write_text(made.text(absolute=True), encoding="utf-8")
    source = load(file)
    draft = draft_of(source)
    refuse(source)
    if "vision_config" in draft.hf:
        name = draft.model.family
        raise ValueError(
            f"{made.values['model.path']}: {name} reads images, expected a model of text alone. "
            "Start from a config with encoders: pyrl configs --copy qwen3_vl_30b"
        )
    return draft


def _engine_share(plan: Plan) -> float | None:
    """Share of a GPU for the engine's weights and some of the longest samples; None: they take
    more than a GPU has."""
    memory = engine_memory(plan)
    assert memory is not None, "the engine is vLLM on GPUs of a known kind"
    if memory.least > _LARGEST_SHARE * memory.limit:
        return None
    wanted = memory.weights + _SEQUENCES * (memory.state + memory.cache * memory.sample)
    share = math.ceil(20 * wanted / memory.limit) / 20
    return min(_LARGEST_SHARE, max(_SMALLEST_SHARE, share))


def _take(made: Recipe, model: str, found: Suggestion, gpus: str) -> None:
    """Set what the search found, and say so at the top."""
    plan = found.plan
    layout = {"dp": plan.parallel.dp} | plan.parallel.model_dump(exclude_defaults=True)
    whys = {
        "dp": "copies of the model that share the samples",
        "tp": "ranks that share each matrix",
        "pp": "stages of layers",
        "cp": "ranks that share a sample",
        "ep": "ranks that share the experts of a layer",
        "etp": "ranks that share an expert",
    }
    rest = made.values
    made.values = {}
    for key, value in rest.items():
        if key.startswith("batching.") and "parallel.dp" not in made.values:
            made.why["parallel"] = f"the fastest of `pyrl plan --suggest {gpus.replace(' ', 'x')}`"
            for name, part in layout.items():
                made.set(f"parallel.{name}", part, whys.get(name, "so that the layers fit"))
        made.values[key] = value
        if key == "model.recompute" and changed(plan.model, "recompute_modules"):
            why = "core attention, and the cheapest of the experts' inputs"
            made.set("model.recompute_modules", plan.model.recompute_modules, why)
    made.set("model.recompute", plan.model.recompute, "the least that fits; full saves most memory")
    tokens = plan.batching.tokens_per_microbatch
    made.set("batching.tokens_per_microbatch", tokens, "on a rank at once; holds a whole sample")
    if plan.logprob.chunk_bytes is not None:
        why = "of logits at a time; 4 GiB, a GPU's default, take too much memory"
        made.set("logprob.chunk_bytes", plan.logprob.chunk_bytes, why)
    if plan.rollout.tp != made.values["rollout.tp"]:
        made.set("rollout.tp", plan.rollout.tp, "GPUs of an engine: for the fastest step")
    offload = plan.rollout.offload_trainer
    made.set("rollout.offload_trainer", offload, "goes to host memory while the engine generates")
    spread = plan.optimizer.distributed
    made.set("optimizer.distributed", spread, "its state is spread over copies of the model")
    made.head = [
        f"{model} on {gpus}: about {size(found.peak)} at the peak of {size(_limit(plan))}, and",
        f"{duration(found.time.total)} a step, as the plan estimates; no run checked it yet.",
        "",
        "  pyrl plan run.yaml    is it consistent, does it fit",
        f"  torchrun --nproc-per-node {min(plan.world_size, _NODE)} -m pyrl_ext.train run.yaml",
    ]
    if plan.world_size > _NODE:
        made.head += ["", f"{plan.world_size // _NODE} nodes: see docs/clusters.md"]


def _limit(plan: Plan) -> int:
    return memory_limit(plan) or 0


def _host_memory() -> int:
    """Memory of this machine [bytes]."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _commented(text: str, why: str | None) -> str:
    return f"{text:{_COLUMN}}  # {why}" if why else text


def _yaml(value: object) -> str:
    """A value as YAML on one line; text in quotes if it would be read as something else."""
    if isinstance(value, str) and (": " in value or not _is_plain(value)):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return value if isinstance(value, str) else show(value)


def _is_plain(text: str) -> bool:
    """True if YAML reads `text` as it is, without quotes."""
    try:
        return yaml.safe_load(text) == text
    except yaml.YAMLError:  # such as @name
        return False
