"""The last finished step of a run that fails: its weights are kept, if they are valid."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress

from pyrl_ext.parallel.collective_errors import AgreedError, AgreedStop, agreeing
from pyrl_ext.parallel.user_code import describe
from pyrl_ext.train.folder import RunFolder, next_start
from pyrl_ext.trainer.step import Step


class LastStep:
    """Writes a checkpoint of the last finished step when the run fails.

    Not if the failure may have left half an update in the weights, if they are not finite, or if
    some ranks have not failed: those wait in a collective of the step, and cannot take part. A rank
    that is lost meanwhile ends all others (`heartbeats`), and every collective has a timeout.
    """

    def __init__(self, run: RunFolder, step: Step):
        self.run = run
        self.step = step
        self._updating = False

    @contextmanager
    def kept(self) -> Generator[None]:
        """Keep the step if the block fails; a note on the error says where, or why not.

        A second Ctrl-C ends the run at once. Communicates: as `RunFolder.save`, if all ranks fail.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            with suppress(OSError, ValueError):  # the run folder cannot be read
                error.add_note(self._keep(error))
            raise

    @contextmanager
    def updating(self) -> Generator[None]:
        """The weights are of no whole step while the block runs, nor once it has failed."""
        self._updating = True
        yield
        self._updating = False

    def advice(self) -> str:
        """What to say if a rank is lost now."""
        return self._told("it takes every rank")

    def _keep(self, error: BaseException) -> str:
        try:
            return self._told(self._why_not(error))
        except Exception as problem:
            return self._told(describe(problem))

    def _why_not(self, error: BaseException) -> str:
        """Write the checkpoint, unless there is a reason against it. Raises: if that fails."""
        policy = self.step.policy
        world = self.run.topo.world
        if not policy.step or self.run.saved_at == policy.step:
            return ""
        if self._updating:
            return "the failed update may have changed some of the weights"
        if self.run.save_failed:
            return "see above"
        if world is not None and not isinstance(error, AgreedError | AgreedStop):
            return "the other ranks have not failed and cannot take part"
        with agreeing("LastStep", "steps", world) as doing:
            doing.append(policy.step)
            self.step.recover()
        self.run.save(policy, prune=False)
        return ""

    def _told(self, why_not: str) -> str:
        """What is kept, and what the same command does."""
        step = self.step.policy.step
        then = next_start(self.run.plan)
        if not step:
            return then
        if self.run.saved_at == step:
            return f"the weights after step {step} are kept: {then}"
        return f"no checkpoint of step {step} could be written: {why_not}; {then}"
