"""Weights & Biases: one run there for a run folder. Needs the package wandb."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from pyrl_ext.metrics.alarms import alarming
from pyrl_ext.metrics.glossary import described
from pyrl_ext.metrics.sinks import Row
from pyrl_ext.parallel.atomic_write import write_text


class WandbSink:
    """The metrics of a run in Weights & Biases over our steps, and alerts.

    An alert is sent when a metric leaves its band in the glossary, and again once it was back in
    between. The id of the run there is in ``folder/wandb/id``: a resumed run goes on in it, and
    wandb ignores, with a warning, the steps that it has already.

    Args:
        folder: of the run; what wandb writes is in ``folder/wandb``.
        project: of the run there.
        config: shown with the run.

    Raises: RuntimeError with wandb's reason when it cannot start.
    """

    def __init__(self, folder: Path, project: str, config: Mapping[str, object]) -> None:
        import wandb

        identity = folder / "wandb" / "id"
        if not identity.exists():
            write_text(identity, secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=project,
                name=folder.resolve().name,
                id=identity.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=folder,
                config=dict(config),
                settings=wandb.Settings(console="off"),  # it would redraw the progress line
            )
        except wandb.Error as error:
            raise RuntimeError(
                f"log.wandb: {project}, but wandb did not start ({error}), expected a project's "
                "name, an account and a way to its server. Run `wandb login`; or set "
                f"WANDB_MODE=offline, and later `wandb sync` what is in {folder / 'wandb'}"
            ) from error
        self._alarming = set[str]()

    def write(self, row: Row) -> None:
        """Log one step."""
        step = int(row["step"])
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=step)
        found = set(alarming(row))
        for name in sorted(found - self._alarming):
            text = f"{row[name]:.4g} at step {step}. {described(name).definition}"
            self._run.alert(name[:63], text, "ERROR")
        self._alarming = self._alarming - row.keys() | found

    def close(self) -> None:
        """Send what is left, and mark the run as finished."""
        self._run.finish()
