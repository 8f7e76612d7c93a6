"""``pyrl doctor [CONFIG [section.key=value ...]]``: say what this machine has and allows.

With a config it also says whether the machine can run the plan; under torchrun, on all hosts at
once, what differs between them and how fast their groups communicate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyrl_ext.plan import ConfigError, compile_plan
from pyrl_ext.plan.command import called
from pyrl_ext.plan.forecast.units import duration, size
from pyrl_ext.tools.doctor.checks import Check, checks, launched_ranks
from pyrl_ext.tools.doctor.facts import Facts, facts_of_host
from pyrl_ext.tools.doctor.features import Feature, features


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: nothing stands in the way; 1: something does; 2: the plan does not hold."""
    options = _parser().parse_args(arguments)
    plan = None
    if options.config:
        try:
            plan = compile_plan(options.config, options.overrides)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
    facts = facts_of_host(Path(plan.run) if plan else Path.cwd())
    found = features(facts)
    checked = checks(plan, facts, found) if plan else ()
    lacking = [
        f"{each.name}: {'; '.join(each.missing)}"
        for each in found
        if each.required and not each.there
    ]
    problems = [*lacking, *(f"{c.name}: {c.problem}" for c in checked if c.problem)]
    report: dict[str, Any] = {"facts": facts, "features": found, "checks": checked}
    hosts = None
    if plan and launched_ranks() == plan.world_size > 1 and not lacking:
        from pyrl_ext.tools.doctor.hosts import compare_hosts  # brings torch

        hosts = compare_hosts(plan, facts, problems)
        problems, report["hosts"] = list(hosts.problems), hosts
    if os.environ.get("RANK", "0") != "0":
        return 0  # the first rank's exit code says it; torchrun ends all when another fails first
    if options.json:
        print(json.dumps({**report, "problems": problems}, default=asdict, indent=2))
    else:
        show(Console(), facts, found, checked, hosts, problems)
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=called("pyrl_ext.doctor"), description=__doc__)
    parser.add_argument("config", nargs="?", help="the YAML file of a plan")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set a value")
    parser.add_argument("--json", action="store_true", help="print all of it for a script")
    return parser


def show(
    console: Console,
    facts: Facts,
    found: Sequence[Feature],
    checked: Sequence[Check],
    hosts: Any,
    problems: Sequence[str],
) -> None:
    """The facts, the features, the checks and the problems, as tables."""
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


def _show_hosts(console: Console, hosts: Any) -> None:
    console.print("hosts: " + "; ".join(f"{h}: {len(r)} ranks" for h, r in hosts.ranks.items()))
    table = Table("group", "ranks", "hosts", "all-reduce", "GB/s sent", "plan's GB/s")
    table.title, table.title_justify = "Collectives, all groups of a kind at once", "left"
    for each in hosts.timings:
        assumed = f"{each.assumed / 1e9:.3g}" if each.assumed else "names no GPU"
        rate = f"{each.rate / 1e9:.3g}" + (" !" if each.problem else "")
        across = "several" if each.across else "one"
        table.add_row(each.group, str(each.size), across, duration(each.seconds), rate, assumed)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
