"""The page's map of ranks: where each one is, and with whom it communicates."""

from __future__ import annotations

from itertools import batched, pairwise

from pyrl_ext.plan.model import ranks
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.html.svg import SERIES, Markup, join, table, tag

_NODE, _DEVICE = 52, 142  # widths [px]

MEANINGS = {
    "tp": "share every layer's products, and the rows between them",
    "cp": "share the rows of one sequence",
    "dp": "hold the same parameters for other samples",
    "dp_cp": "add up gradients of dense parameters, and spread optimizer state",
    "pp": "hold the stages of one model, in order",
    "ep": "hold the experts of one layer, and exchange tokens",
    "expt_tp": "share the width of an expert",
    "expt_dp": "add up gradients of experts, and spread their optimizer state",
}


def ranks_section(plan: Plan) -> Markup:
    """Nodes by devices with every rank's coordinates, and the groups in words."""
    groups = ranks.groups(plan.parallel)
    hint = "Colour: pipeline stage. Point at a rank, or select it, to see its groups."
    say = tag("p", hint, id="groups-of", class_="say", aria_live="polite")
    return join((say, _nodes(plan, groups), _groups(groups)))


def _nodes(plan: Plan, groups: dict[str, tuple[tuple[int, ...], ...]]) -> Markup:
    everyone = ranks.ranks(plan.parallel)
    # rank -> the groups it is in, as words that the page's script compares
    member: dict[int, list[str]] = {each.rank: [] for each in everyone}
    for kind, found in groups.items():
        for index, group in enumerate(found):
            for rank in group:
                member[rank].append(f"{kind}:{index}")
    columns = min(plan.hardware.gpus_per_node, plan.world_size)
    head = [tag("th", "node", scope="col")]
    head += [tag("th", f"device {i}", scope="col") for i in range(columns)]
    rows = [
        tag("tr", tag("th", str(node), scope="row"), [_cell(plan, each, member) for each in here])
        for node, here in enumerate(batched(everyone, columns))
    ]
    caption = "Ranks by node and device, with the coordinates that differ"
    grid_table = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", head)),
        tag("tbody", rows),
        class_="ranks",
        style=f"width: {_NODE + columns * _DEVICE}px",
    )
    return tag("div", grid_table, class_="scroll")


def _cell(plan: Plan, rank: ranks.Rank, member: dict[int, list[str]]) -> Markup:
    sizes = plan.parallel.model_dump() | {
        "etp": plan.parallel.etp_size,
        "edp": plan.world_size // plan.parallel.pp,
    }
    axes = [axis for axis in ("tp", "cp", "dp", "pp", "ep") if sizes[axis] > 1]
    if plan.parallel.etp_size not in (1, plan.parallel.tp):
        axes.append("etp")
    words = [tag("span", f"{axis}{getattr(rank, axis)}", class_="axis") for axis in axes]
    return tag(
        "td",
        tag("div", tag("b", str(rank.rank)), tag("i", class_="shared"), class_="head"),
        tag("div", words, class_="axes"),
        class_=f"edge-{rank.pp % SERIES}",
        tabindex="0",
        data_rank=str(rank.rank),
        data_groups=" ".join(member[rank.rank]),
    )


def _groups(groups: dict[str, tuple[tuple[int, ...], ...]]) -> Markup:
    if not groups:
        return tag("p", "One rank: no groups.")
    rows = [
        (
            tag("code", kind),
            f"{len(found)} of {len(found[0])} ranks",
            _examples(found),
            MEANINGS[kind],
        )
        for kind, found in groups.items()
    ]
    return table(("group", "how many", "which ranks", "its ranks"), rows, "Groups of ranks")


def _examples(groups: tuple[tuple[int, ...], ...], most: int = 4) -> str:
    """The first groups and the last one."""
    if len(groups) <= most:
        return " | ".join(map(_ranks, groups))
    shown = [*map(_ranks, groups[: most - 1]), "…", _ranks(groups[-1])]
    return " | ".join(shown)


def _ranks(group: tuple[int, ...]) -> str:
    """Rising ranks of equal distance: 0-3, or 0, 8, … 56."""
    if len(group) > 2 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    if len(group) > 4 and len({b - a for a, b in pairwise(group)}) == 1:
        return f"{group[0]}, {group[1]}, … {group[-1]}"
    return ", ".join(map(str, group))
