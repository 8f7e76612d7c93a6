"""The run folder: plan, metrics, checkpoints, and how a run resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from pyrl_ext.megatron import checkpoint
from pyrl_ext.metrics.history import load_run
from pyrl_ext.metrics.report import print_report
from pyrl_ext.metrics.sinks import JsonlSink, Row, Sink, TensorBoardSink, count_rows
from pyrl_ext.metrics.terminal import TerminalSink
from pyrl_ext.metrics.wandb_sink import WandbSink
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.atomic_write import write_text
from pyrl_ext.parallel.collective_errors import agreeing
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import ConfigError, Difference, Plan
from pyrl_ext.plan.changes import FILE, PlanChange, read_changes
from pyrl_ext.plan.language.errors import Problem
from pyrl_ext.plan.model.freeze import ROUTER_BIAS
from pyrl_ext.rollout.recorded import Recorder, save_scores
from pyrl_ext.samples import Sample
from pyrl_ext.trainer.policy import REFERENCE, Policy, Scores


class RunFolder:
    """The files of a run; only the main rank touches files other than checkpoints.

    ``plan.json``, ``metrics.jsonl``, ``checkpoints/step-<n>``, ``tensorboard/``, ``wandb/`` and
    every step's samples (`rollout.recorded.Recorder`) when asked for, ``report.png`` at the end;
    ``plan_changes.jsonl`` when a resume changed the plan or another run's weights were the start.
    An earlier run that ``resume=never`` replaced is in ``before-<n>/``; ``error.txt`` of a start
    that failed becomes ``error-<n>.txt`` when the run goes on.

    Attributes:
        saved_at: the step of the newest checkpoint; None: there is none.
        save_failed: the last checkpoint could not be written.
    """

    def __init__(self, plan: Plan, topo: Topology):
        self.plan = plan
        self.topo = topo
        self.path = Path(plan.run)
        self.checkpoints = self.path / "checkpoints"
        self.sinks: list[Sink] = []
        self.terminal: TerminalSink | None = None
        self._recorder: Recorder | None = None
        self.saved_at: int | None = None
        self.save_failed = False
        self._differences: tuple[Difference, ...] = ()

    def check(self) -> None:
        """Check that this plan may continue the run in the folder, before anything is built.

        A run that finished no step continues nothing: any plan may start in its folder.

        Raises: ConfigError when the folder holds a run of a plan that computes something else,
            unless ``resume_allow`` names what differs, or when ``init_from`` holds another model.
            ValueError when it holds metrics but no checkpoint to resume from.
        """
        if self.plan.resume != "never":
            if checkpoint.latest(self.checkpoints) is not None:
                saved = self.path / "plan.json"
                if saved.exists():
                    self._differences = self.plan.check_resumes(Plan.read(saved))
                return
            self._check_history()
        if self.plan.init_from is not None:
            self._check_start(self.plan.init_from)

    def _check_start(self, init_from: str) -> None:
        """Refuse to start from no checkpoint, one of this run, or one of another model."""
        problems = list[str]()
        try:
            source = checkpoint.find(Path(init_from))
        except ValueError as error:
            problems.append(str(error))
        else:
            if source.resolve().parent == self.checkpoints.resolve():
                problems.append(
                    f"{source} is a checkpoint of this run, expected one of another run. Leave "
                    "init_from out to resume, or set run to another folder"
                )
            saved = Plan.read(source / checkpoint.PLAN)
            differences = self.plan.model_diff(saved)
            problems += [
                f"{source} holds another model, expected the same; {each}" for each in differences
            ]
            thawed = sorted(saved.frozen - self.plan.frozen)
            thawed = [name for name in thawed if not name.endswith(ROUTER_BIAS)]  # has no state
            if not differences and thawed:
                problems.append(
                    f"{source} is of a run with model.freeze {saved.model.freeze}, expected it to "
                    f"have trained all that this run trains; it has no optimizer state of "
                    f"{thawed[0]} ({len(thawed)} tensors). Export its weights and name them as "
                    "model.weights, or keep model.freeze"
                )
            mine = self.plan.optimizer.name
            theirs = saved.optimizer.name
            if self.plan.init_optimizer and mine != theirs:
                problems.append(
                    f"{source} holds the optimizer state of {theirs}, expected that of {mine}. "
                    "Leave init_optimizer out to start from its weights alone"
                )
        if problems:
            raise ConfigError(Problem(self.plan.source, 0, f"init_from: {x}") for x in problems)

    def _check_history(self) -> None:
        """Refuse metrics without a checkpoint: the run would start over and overwrite them."""
        steps = count_rows(self.path / "metrics.jsonl")
        damaged = checkpoint.incomplete(self.checkpoints)
        if steps or damaged:
            held = f"metrics of {steps} steps" if steps else f"{damaged[-1].name} without counters"
            raise ValueError(
                f"run folder {self.path}: holds {held} but no whole checkpoint to resume from; add "
                "resume=never to start over (what is there moves to before-<n>/), or put a "
                f"checkpoint back into {self.checkpoints}"
            )

    def resume(self, policy: Policy) -> None:
        """Load the newest complete checkpoint, if any, or the one that ``init_from`` names, and
        open the sinks at its step.

        Communicates: as `Policy.load`; a barrier where ``resume`` is ``never``.
        """
        if self.plan.resume == "never":
            self._set_aside()
        newest = checkpoint.latest(self.checkpoints)
        change = None
        if newest is not None:
            policy.load(newest)
            self.saved_at = policy.step
            if self._differences:
                change = PlanChange.resume(policy.step, self._differences)
        elif self.plan.init_from is not None:
            source = checkpoint.find(Path(self.plan.init_from)).resolve()
            policy.start_from(source, self.plan.init_optimizer)
            change = PlanChange.start(source, self.plan.init_optimizer)
        if (folder := self.plan.rollout.record) is not None:
            self._recorder = Recorder(self.path / folder, self.topo, policy.step)
        if not self.topo.is_main:
            return
        self._set_error_aside()
        if newest is not None:
            self._announce(newest, policy.step)
        if change is not None:
            self._record_change(change)
        write_text(self.path / "plan.json", self.plan.to_json())
        lines = JsonlSink(self.path / "metrics.jsonl")
        rows = lines.rewind(policy.step)
        if newest is not None and rows < policy.step:
            print(
                f"{lines.path}: {rows} rows before step {policy.step}, expected one a step: the "
                "others are lost, and the run's report goes without them",
                flush=True,
            )
        self.sinks = [lines]
        if self.plan.log.tensorboard:
            self.sinks.append(TensorBoardSink(self.path / "tensorboard", policy.step))
        if project := self.plan.log.wandb:
            config = json.loads(self.plan.to_json())
            self.sinks.append(WandbSink(self.path, project, config))
        if self.plan.log.progress:
            self.terminal = TerminalSink(self.plan.steps, policy.step)
            self.sinks.append(self.terminal)

    def _announce(self, newest: Path, step: int) -> None:
        for damaged in checkpoint.incomplete(self.checkpoints):
            if int(damaged.name.removeprefix("step-")) > step:
                print(f"{damaged} has no {checkpoint.COUNTERS}: not whole, skipped", flush=True)
        before = checkpoint.read_counters(newest)["layout"]
        now = checkpoint.layout(self.topo)
        moved = "" if before == now else f", written under {before}; now {now}"
        done = f"step {step} of {self.plan.steps}"
        print(f"resuming from {newest} ({done}){moved}", flush=True)
        self._announce_reference(newest, step)
        saved = Plan.read(newest / checkpoint.PLAN)
        schedule = self.plan.optimizer.schedule
        if self.plan.source_weights != saved.source_weights:
            print(
                "data.sources have other names or weights than when the checkpoint was written: "
                "prompts of a source may be skipped or repeated",
                flush=True,
            )
        if schedule != "constant" and saved.steps != self.plan.steps:
            print(
                f"the {schedule} schedule ends at step {self.plan.steps} now, at {saved.steps} "
                "when the checkpoint was written: the learning rate jumps to the new curve",
                flush=True,
            )
        if step > self.plan.steps:
            print(
                f"the run is past steps={self.plan.steps} already: nothing is trained. Set steps "
                "to a larger number to continue",
                flush=True,
            )

    def _announce_reference(self, newest: Path, step: int) -> None:
        """Say so if the checkpoint's reference and the plan's are not the same."""
        held = REFERENCE in checkpoint.copies_in(checkpoint.read_counters(newest))
        every = self.plan.objective.reference_refresh
        if held == bool(every):
            return
        if held:
            print(
                f"objective.reference_refresh is 0: the reference that {newest} holds is not used; "
                "the KL, if there is one, is to model.weights",
                flush=True,
            )
            return
        due = -(-step // every) * every
        print(f"{newest} holds no reference: it is model.weights until step {due}", flush=True)

    def _record_change(self, change: PlanChange) -> None:
        """Print a change of the plan, and append it to ``plan_changes.jsonl``."""
        file = self.path / FILE
        earlier = "".join(each.to_json() for each in read_changes(self.path))
        write_text(file, earlier + change.to_json())
        what = "changed on request" if change.init_from is None else "step 0 starts from"
        print(f"{what}: {change.text} (recorded in {file})", flush=True)

    def _set_aside(self) -> None:
        """Move the files of an earlier run to ``before-<n>/``. Communicates: a barrier."""
        if self.topo.is_main:
            names = [
                "plan.json",
                FILE,
                "metrics.jsonl",
                "checkpoints",
                "tensorboard",
                "report.png",
                "report.html",
                "report.csv",
                *(path.name for path in self.path.glob("error*.txt")),
                "trace",
                "wandb",
                *self._recorded(),
            ]
            held = [self.path / name for name in names if (self.path / name).exists()]
            if held:
                before = self._unused("before-{}")
                before.mkdir()
                for each in held:
                    each.rename(before / each.name)
                print(f"resume=never: the earlier run moved to {before}", flush=True)
        dist.barrier()

    def _set_error_aside(self) -> None:
        """Rename ``error.txt`` of an earlier start: it would speak of a run that goes on."""
        error = self.path / "error.txt"
        if error.exists():
            error.rename(self._unused("error-{}.txt"))

    def _unused(self, name: str) -> Path:
        """The first of ``name`` with 1, 2, ... in its place that does not exist."""
        number = 1
        while (path := self.path / name.format(number)).exists():
            number += 1
        return path

    def _recorded(self) -> set[str]:
        """The folders of recorded samples: this run's, and that of the earlier one."""
        folders = {self.plan.rollout.record}
        with suppress(OSError, ValueError, KeyError, TypeError):  # a plan that nothing reads
            saved = json.loads((self.path / "plan.json").read_bytes())
            folders.add(saved["rollout"]["record"])
        return {folder for folder in folders if folder}

    def write(self, row: Row) -> None:
        """One step's metrics to every sink.

        Communicates: a line of every rank. Raises: on every rank, if a sink fails.
        """
        with agreeing(f"RunFolder.write({self.path})", "steps", self.topo.world) as doing:
            doing.append(row["step"])
            for sink in self.sinks:
                sink.write(row)

    def note(self, text: str) -> None:
        """Show ``text`` in the live bar."""
        if self.terminal is not None:
            self.terminal.note(text)

    def enter(self, phase: str | None) -> None:
        """Show the phase that begins, as `Clock` names it, in the live bar."""
        if self.terminal is not None:
            self.terminal.enter(phase)

    def record(self, step: int, samples: Sequence[Sample]) -> None:
        """Save the samples that this rank owns of a step, if the plan asks for it.

        Communicates: a line of every rank.
        """
        if self._recorder is not None:
            self._recorder.save(step, samples)

    def record_evaluation(self, step: int, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Save the samples of each set of held-out prompts that this rank owns, if the plan asks
        for samples.

        Communicates: a line of every rank for each set.
        """
        if self._recorder is not None:
            for name, own in samples.items():
                self._recorder.of_set(name).save(step, own)

    def record_scores(
        self, step: int, index: BatchIndex, shard: BatchShard, scores: Scores | None
    ) -> None:
        """Save the trainer's log-probs of a step's rows next to the recorded samples.

        Communicates: a line of every rank. Raises: on every rank, if one cannot write.
        """
        if self._recorder is None or scores is None:
            return
        folder = self._recorder.folder
        with agreeing(f"RunFolder.record_scores({folder})", "steps", self.topo.world) as doing:
            doing.append(step)
            save_scores(folder, step, self.topo.rank, index, shard, scores.logprobs)

    def save(self, policy: Policy, prune: bool = True) -> None:
        """Save a checkpoint of ``policy.step`` unless it is saved.

        Args:
            prune: delete all but the newest ones that the plan keeps.
        """
        if self.saved_at == policy.step:
            return
        self.save_failed = True
        policy.save(self.checkpoints / f"step-{policy.step}")
        self.save_failed = False
        self.saved_at = policy.step
        if prune and self.topo.is_main:
            checkpoint.prune(self.checkpoints, self.plan.checkpoint.keep)

    def due(self, policy: Policy) -> bool:
        """True if the plan wants a checkpoint after ``policy.step`` steps."""
        every = self.plan.checkpoint.every
        return policy.step == self.plan.steps or bool(every and policy.step % every == 0)

    def close(self) -> None:
        """Close the files."""
        for sink in self.sinks:
            sink.close()

    def report(self) -> None:
        """Print the tables and alarms of the whole run and draw its plot."""
        if self.topo.is_main and (self.path / "metrics.jsonl").stat().st_size:
            print_report([load_run(self.path)], self.path / "report.png")


def next_start(plan: Plan) -> str:
    """Say what the same command does next, from what the run folder holds."""
    run = Path(plan.run)
    command = "the same command"
    if plan.resume == "never":
        command += " without resume=never"
    if (newest := checkpoint.latest(run / "checkpoints")) is not None:
        return f"{command} resumes from {newest}"
    metrics = run / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        return "there is no checkpoint: with resume=never the same command starts over"
    return "no step is finished: the same command starts from the beginning"
