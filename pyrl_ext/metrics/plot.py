"""The picture of a run: reward, length of responses, entropy, and the mismatch of rollout engine
and trainer; without rollouts the loss and the gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrl_ext.metrics.history import RunHistory, aim
from pyrl_ext.parallel.atomic_write import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Blue, orange, green, purple of the Okabe-Ito set: distinct for color-blind readers and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#8E5EA2", "#56B4E9", "#6B6B6B")
HELD_OUT: dict[str, Any] = {
    "linestyle": "--",
    "marker": "o",
    "markersize": 7,
    "markeredgecolor": "white",
}
INK = "#2B2B2B"
Key = tuple[str, dict[str, Any]]  # of a legend: label, style
STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": "#B8B8B8",
    "axes.labelcolor": INK,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "legend.fontsize": 11,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
}


def plot(runs: Sequence[RunHistory], path: str | Path) -> None:
    """Draw the runs into one PNG of 1280 x 960 pixels.

    Args:
        runs: at least one; each has a colour.
        path: of the PNG; its folder exists. A link is replaced, not followed.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.24, 7.68), dpi=125)
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
        FigureCanvasAgg(figure)
        if any(aim(run) == "reward" for run in runs):
            panels = figure.subplots(2, 2, sharex=True).ravel()
            _draw_curve(panels[0], runs, "reward", "mean reward of a sample", "prompts")
            _draw_mean(panels[1], runs, "rollout/response_len", "Response length", "tokens")
            _draw_mean(panels[2], runs, "policy/entropy", "Entropy of the policy", "nats")
            _draw_mismatch(panels[3], runs)
        else:
            panels = figure.subplots(2, 1, sharex=True)
            _draw_curve(panels[0], runs, "loss", "nats a loss token", "records")
            _draw_mean(panels[1], runs, "grad_norm", "Gradient norm", "L2 norm, before clipping")
        for panel in panels[-(len(panels) // 2) :]:
            panel.set_xlabel("step")
            panel.xaxis.get_major_locator().set_params(integer=True)
        with replacing(Path(path)) as partial:
            figure.savefig(partial, format=Path(path).suffix[1:] or None)


def _draw_curve(
    axes: Axes, runs: Sequence[RunHistory], name: str, unit: str, held_out: str
) -> None:
    """The metric ``name`` in training, and of what is held out."""
    window = _draw_training(axes, runs, name)
    for run, colour in _coloured(runs):
        steps, evaluated = run.series(f"eval_{name}")
        own = COLOURS[1] if len(runs) == 1 else _darker(colour)
        axes.plot(steps, evaluated, color=own, **HELD_OUT)
    axes.set_ylabel(unit)
    training = "training" if window == 1 else f"training, mean of {window} steps"
    keys: list[Key] = [(training, {}), (f"held-out {held_out}", HELD_OUT)]
    _head(axes, name.capitalize(), runs, keys)


def _draw_mean(axes: Axes, runs: Sequence[RunHistory], name: str, title: str, unit: str) -> None:
    """The metric ``name`` in training."""
    _draw_training(axes, runs, name)
    axes.set_ylabel(unit)
    axes.set_title(title, pad=8)


def _draw_training(axes: Axes, runs: Sequence[RunHistory], name: str) -> int:
    """Every step, pale, and the mean of some steps. Returns: their number."""
    window = 1
    for run, colour in _coloured(runs):
        steps, values = run.series(name)
        if len(values):
            window = 2 * (len(values) // 50) + 1
            axes.plot(steps, values, color=colour, linewidth=1, alpha=0.35)
            axes.plot(steps, _running_mean(values, window), color=colour)
    return window


def _draw_mismatch(axes: Axes, runs: Sequence[RunHistory]) -> None:
    solid = {"linestyle": "-"}
    dashed = {"linestyle": "--"}
    keys: list[Key] = [("mean |difference|", solid), ("k3, estimate of KL", dashed)]
    positive = False
    crosses = 0
    for run, colour in _coloured(runs):
        for number, name in enumerate(("mismatch/abs_mean", "mismatch/k3")):
            steps, values = run.series(name)
            good = np.isfinite(values)
            own = colour if len(runs) > 1 else COLOURS[number]
            axes.plot(steps, values, color=own, **keys[number][1])
            positive |= bool((values[good] > 0).any())
            if not good.all():
                crosses += 1
                _mark(axes, steps[~good], own, height=0.025 * crosses)
    if positive:
        axes.set_yscale("log")
    axes.set_ylabel("nats, log scale" if positive else "nats")
    if crosses:
        keys.append(("not finite", {"linestyle": "", "marker": "x"}))
    _head(axes, "Log-probs, engine and trainer", runs, keys, names=False)


def _mark(axes: Axes, steps: np.ndarray, colour: str, height: float) -> None:
    """Crosses near the bottom at steps whose value cannot be drawn."""
    heights = np.full(len(steps), height)
    transform = axes.get_xaxis_transform()
    axes.plot(steps, heights, color=colour, linestyle="", marker="x", transform=transform)


def _head(
    axes: Axes, title: str, runs: Sequence[RunHistory], keys: list[Key], names: bool = True
) -> None:
    """The title, and below it a legend of line styles and, with ``names``, of several runs."""
    from matplotlib.lines import Line2D

    several = len(runs) > 1
    handles = [
        Line2D([], [], color="#6B6B6B" if several else COLOURS[min(n, 1)], label=label, **style)
        for n, (label, style) in enumerate(keys)
    ]
    if several and names:
        for run, colour in reversed(_coloured(runs)):
            handles.insert(0, Line2D([], [], color=colour, linewidth=5, label=run.name))
    columns = 2
    axes.set_title(title, pad=8 + 18 * -(-len(handles) // columns))
    place: dict[str, Any] = {
        "loc": "lower left",
        "bbox_to_anchor": (-0.008, 1.0),
        "borderaxespad": 0.1,
    }
    legend = axes.legend(handles=handles, ncols=columns, columnspacing=1.5, **place)
    legend.set_in_layout(False)  # the title's padding makes room for it
    for text in legend.get_texts():
        text.set_parse_math(False)  # the name of a run may hold $


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over ``window`` values around each, fewer at the ends; ``window`` is odd."""
    ones = np.ones(window)
    counts = np.convolve(np.ones(len(values)), ones, "same")
    return np.convolve(values, ones, "same") / counts


def _coloured(runs: Sequence[RunHistory]) -> list[tuple[RunHistory, str]]:
    return [(run, COLOURS[place % len(COLOURS)]) for place, run in enumerate(runs)]


def _darker(colour: str) -> str:
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = to_rgb(colour)
    return to_hex((0.7 * red, 0.7 * green, 0.7 * blue))
