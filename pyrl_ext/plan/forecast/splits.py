"""`--suggest 32xH200` with remote engines: GPUs for the trainer, for the engines, and steps ahead.

Splits by whole hosts are sorted by an estimate of what bounds a step: publishing, and the slower of
training, taken to scale with GPUs, and generating with full engines. For the first that
fit, the fastest layout of the trainer is searched, and its loop is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pyrl_ext.plan.compile import draft_of, load, refuse
from pyrl_ext.plan.forecast.hardware import GPUS
from pyrl_ext.plan.forecast.loop import Steady
from pyrl_ext.plan.forecast.publishing import engine_costs
from pyrl_ext.plan.forecast.remote_engines import steady_states
from pyrl_ext.plan.forecast.rollout_time import Decoder
from pyrl_ext.plan.forecast.step_time import step_time
from pyrl_ext.plan.forecast.suggest import Search, Suggestion, suggest
from pyrl_ext.plan.forecast.workload import step_samples
from pyrl_ext.plan.language.errors import ConfigError, Key, Problem
from pyrl_ext.plan.plan import PartialPlan, Plan

HOSTS = ("rollout", "launch", "hosts")
PER_HOST = ("rollout", "launch", "gpus")
AHEAD = ("rollout", "ahead")
AHEADS = (0, 1, 2, 4)
# The smallest value of rollout.ahead is taken whose step is at most so much longer than the best.
NEARLY = 1.02
WANTED = 3
"""Splits that are found, if as many fit."""


class Split(NamedTuple):
    """Some GPUs train, the others generate."""

    overrides: tuple[str, ...]
    """To add to the given ones: engines, layout and steps ahead."""
    trainer: Suggestion
    engines: int
    """GPUs that generate."""
    state: Steady


class Splits(NamedTuple):
    """Result of the search."""

    found: tuple[Split, ...]
    """Fastest first."""
    number: int
    """Splits that there are."""
    tried: tuple[Search, ...]
    """The searches for layouts of some of them."""


def suggest_splits(
    path: str | Path,
    overrides: Sequence[str],
    gpus: int,
    gpu: str,
    progress: Callable[[float], None] = lambda share: None,
) -> Splits:
    """The fastest splits of `gpus` devices of the kind `gpu`; keys that the overrides set stay.

    Raises:
        ConfigError: with problems that every layout has, or where no GPU is left to train on
    """
    source = load(path, overrides)
    draft = draft_of(source)
    refuse(source)
    pinned = frozenset(source.overrides)
    options = sorted(_options(draft, pinned, gpus, gpu), key=lambda each: each[0])
    if not options:
        message = f"{gpus}x{gpu}, expected more than the GPUs of an engine; one trains at least"
        raise ConfigError([Problem("command line: --suggest", 0, message)])
    found: list[Split] = []
    tried: list[Search] = []
    for _, texts, engines in options:
        if len(found) == WANTED:
            break

        def shown(share: float, done: int = len(tried)) -> None:
            progress((done + share) / len(options))

        tried.append(suggest(path, [*overrides, *texts], gpus - engines, gpu, 1, shown))
        if best := tried[-1].found:
            found.append(_split(best[0], texts, engines, draft, AHEAD in pinned))
    found.sort(key=lambda each: each.state.seconds)
    return Splits(tuple(found), len(options), tuple(tried))


def _split(
    best: Suggestion, texts: Sequence[str], engines: int, draft: PartialPlan, fixed: bool
) -> Split:
    """The split with the fewest steps ahead that are nearly as fast as the best."""
    given = draft.rollout.ahead
    states = steady_states(best.plan, best.time, [given] if fixed else AHEADS)
    least = min(each.seconds for each in states)
    state = next(each for each in states if each.seconds <= NEARLY * least)
    ahead = [] if state.ahead == given else [f"rollout.ahead={state.ahead}"]
    return Split((*texts, *best.overrides, *ahead), best, engines, state)


def _options(
    draft: PartialPlan, pinned: frozenset[Key], gpus: int, gpu: str
) -> Iterator[tuple[float, tuple[str, ...], int]]:
    """(seconds that bound a step, overrides, GPUs that generate) of every split."""
    rollout = draft.rollout
    node = draft.hardware.gpus_per_node
    machine = {("hardware", "gpu"): gpu}
    given = draft.changed(machine)
    time = step_time(given)
    assert time is not None, "the plan names a GPU"
    trained = time.trainer * given.world_size
    if rollout.servers or {HOSTS, PER_HOST} & pinned:  # the split is given
        engines = draft.num_engines * rollout.tp
        if engines < gpus:
            yield 0.0, (), engines
        return
    each = node if gpus > node else rollout.tp
    for number in range(1, -(-gpus // each)):
        engines = number * each
        hosts, per_host = (number, each) if gpus > node else (1, engines)
        names = _names(rollout.launch.hosts, hosts)
        texts = []
        if names != rollout.launch.hosts:
            texts.append(f"rollout.launch.hosts=[{', '.join(names)}]")
        if per_host != rollout.launch.gpus:
            texts.append(f"rollout.launch.gpus={per_host}")
        plan = draft.changed(machine | {HOSTS: names, PER_HOST: per_host})
        if rollout.min_servers > plan.num_engines:
            texts.append(f"rollout.min_servers={plan.num_engines}")
        publish = sum(cost.seconds for cost in engine_costs(plan, GPUS[gpu], 0.0))
        yield max(trained / (gpus - engines), _full(plan, gpu)) + publish, tuple(texts), engines


def _full(plan: Plan, gpu: str) -> float:
    """Seconds in which engines that are always full generate the samples of a step."""
    engine = Decoder(plan, GPUS[gpu])
    tokens = sum(each.response for each in step_samples(plan))
    return tokens / plan.num_engines / engine.running * engine.token_seconds(engine.running)


def _names(given: Sequence[str], number: int) -> list[str]:
    """The given hosts, and names for those that are missing."""
    more = (f"engines-{i}" for i in range(number))
    return [*given, *more][:number]
