"""The doctor's report as tables. Needs rich, and the plan's words for sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyrl_ext.plan.forecast.units import duration, size
from pyrl_ext.tools.doctor.checks import Check
from pyrl_ext.tools.doctor.facts import Facts
from pyrl_ext.tools.doctor.features import Feature

if TYPE_CHECKING:  # brings torch
    from pyrl_ext.tools.doctor.hosts import Hosts


def show(report: dict[str, Any], problems: Sequence[str]) -> None:
    """The facts, the features, the checks and the problems, as tables."""
    console, facts, hosts = Console(), report["facts"], report.get("hosts")
    found: Sequence[Feature] = report["features"]
    checked: Sequence[Check] = report["checks"]
    table = Table(title=f"{facts['host']}: what is here", title_justify="left", show_header=False)
    for name, value in _lines(facts):
        table.add_row(name, escape(value))
    console.print(table)
    table = Table(
        "feature", "here", "how to get it", title="What that allows", title_justify="left"
    )
    for each in found:
        get = escape(each.get) if each.missing else ""
        table.add_row(each.name, escape("; ".join(each.missing)) or "yes", get)
    console.print(table)
    if checked:
        table = Table("the plan's", "found", title="The plan on this host", title_justify="left")
        for check in checked:
            table.add_row(escape(check.name), escape(check.found) + (" !" if check.problem else ""))
        console.print(table)
    if hosts is not None:
        _show_hosts(console, hosts)
    for problem in problems:
        console.print(f"PROBLEM  {problem}", markup=False, highlight=False, soft_wrap=True)
    if not problems:
        console.print("nothing stands in the way")


def _lines(facts: Facts) -> list[tuple[str, str]]:
    packages = ", ".join(f"{n} {v}" for n, v in facts["packages"].items() if v)
    commands = ", ".join(f"{n} {v}" for n, v in facts["commands"].items() if v)
    gpus = [f"{g['name']}, {size(g['memory'])}, sm {g['capability']}" for g in facts["gpus"]]
    shared, disk = facts["shared_memory"], facts["disk"]
    of_torch, kernels = facts["torch"], facts["extension"]
    cuda = f"CUDA {of_torch.get('cuda') or 'no'}, sees {of_torch.get('gpus')} GPUs"
    built = f"{kernels.get('isa')}, CUDA {'yes' if kernels.get('cuda') else 'no'}"
    return [
        ("system", f"{facts['system']}, Python {facts['python']}"),
        ("processor", f"{facts['processor']}; {facts['cores']} cores"),
        ("memory", size(facts["memory"])),
        (
            "shared memory",
            f"{size(shared['free'])} free of {size(shared['total'])}" if shared else "none",
        ),
        ("disk", f"{size(disk['free'])} free of {size(disk['total'])}" if disk else "none"),
        ("open files", " of ".join(map(str, facts["open_files"]))),
        ("packages", packages or "none"),
        ("torch", of_torch.get("error") or cuda),
        ("kernels", kernels.get("error") or built),
        ("commands", commands or "none"),
        ("GPUs", "; ".join(gpus) or "none"),
        ("driver, links", f"{facts['driver'] or 'none'}, {facts['links'] or 'none'}"),
        ("network", ", ".join(f"{n} {a}" for n, a in facts["interfaces"].items()) or "none"),
    ]


def _show_hosts(console: Console, hosts: Hosts) -> None:
    console.print("hosts: " + "; ".join(f"{h}: {len(r)} ranks" for h, r in hosts.ranks.items()))
    table = Table("group", "ranks", "hosts", "all-reduce", "GB/s sent", "plan's GB/s")
    table.title, table.title_justify = "Collectives, all groups of a kind at once", "left"
    for each in hosts.timings:
        assumed = f"{each.assumed / 1e9:.3g}" if each.assumed else "names no GPU"
        rate = f"{each.rate / 1e9:.3g}" + (" !" if each.problem else "")
        across = "several" if each.across else "one"
        table.add_row(each.group, str(each.size), across, duration(each.seconds), rate, assumed)
    console.print(table)
