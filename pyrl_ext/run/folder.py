"""The run folder: the plan it was started with, metrics, checkpoints, and how a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyrl_ext.dist.topology import Topology
from pyrl_ext.megatron import checkpoint
from pyrl_ext.metrics.report import load_run, print_report
from pyrl_ext.metrics.sinks import JsonlSink, ProgressSink, Row, Sink, TensorBoardSink
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.recorded import Recorder
from pyrl_ext.samples import Sample
from pyrl_ext.trainer.policy import Policy


class RunFolder:
    """What a run writes; only the main rank touches files other than checkpoints.

    ``plan.json``, ``metrics.jsonl``, ``checkpoints/step-<n>``, ``tensorboard/`` and every step's
    samples (`rollout.recorded.Recorder`) when asked, ``report.png`` at the end.
    """

    def __init__(self, plan: Plan, topo: Topology):
        self.plan, self.topo = plan, topo
        self.path = Path(plan.run)
        self.checkpoints = self.path / "checkpoints"
        self.sinks: list[Sink] = []
        self.progress: ProgressSink | None = None
        self._recorder: Recorder | None = None
        self._saved_at: int | None = None

    def check(self) -> None:
        """Raises: ConfigError when the folder holds a run of a plan that computes otherwise."""
        saved = self.path / "plan.json"
        if saved.exists():
            self.plan.check_resumes(Plan.read(saved))

    def resume(self, policy: Policy) -> None:
        """Load the newest checkpoint, if any, and open the sinks where it stands."""
        newest = checkpoint.latest(self.checkpoints)
        if newest is not None:
            policy.load(newest)
            self._saved_at = policy.step
        if not self.topo.is_main:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "plan.json").write_text(self.plan.to_json())
        if newest is not None:
            before, now = checkpoint.written_under(newest), checkpoint.layout(self.topo)
            moved = "" if before == now else f", written under {before}; now {now}"
            done = f"step {policy.step} of {self.plan.steps}"
            print(f"going on from {newest} ({done}){moved}", flush=True)
        if (folder := self.plan.rollout.record) is not None:
            self._recorder = Recorder(self.path / folder, policy.step)
        lines = JsonlSink(self.path / "metrics.jsonl")
        lines.rewind(policy.step)
        self.sinks = [lines]
        if self.plan.log.tensorboard:
            self.sinks.append(TensorBoardSink(self.path / "tensorboard", policy.step))
        if self.plan.log.progress:
            self.progress = ProgressSink(self.plan.steps, policy.step)
            self.sinks.append(self.progress)

    def write(self, row: Row) -> None:
        """One step's metrics to every sink."""
        for sink in self.sinks:
            sink.write(row)

    def note(self, text: str) -> None:
        """How far the step is, on the progress line."""
        if self.progress is not None:
            self.progress.note(text)

    def record(self, step: int, samples: Sequence[Sample]) -> None:
        """Keeps the samples of a step, where the plan asks for it."""
        if self._recorder is not None:
            self._recorder.save(step, samples)

    def save(self, policy: Policy) -> None:
        """A checkpoint of ``policy.step``, unless there is one; older ones are pruned after it."""
        if self._saved_at == policy.step:
            return
        policy.save(self.checkpoints / f"step-{policy.step}")
        self._saved_at = policy.step
        if self.topo.is_main:
            checkpoint.prune(self.checkpoints, self.plan.checkpoint.keep)

    def due(self, policy: Policy) -> bool:
        """Whether the plan wants a checkpoint after ``policy.step`` steps."""
        every = self.plan.checkpoint.every
        return policy.step == self.plan.steps or bool(every and policy.step % every == 0)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def report(self) -> None:
        """The table and the picture of the whole run."""
        if self.topo.is_main and (self.path / "metrics.jsonl").stat().st_size:
            print_report([load_run(self.path)], self.path / "report.png")
