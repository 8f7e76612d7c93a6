"""Cases of one family of benchmarks, a row each: ``python -m benchmarks.gpu.bench FAMILY``.

``--build`` makes every case with its true shapes, on meta tensors where the case lives on a device,
and runs ours on them: no GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmarks.cases import FAMILIES, cases_of, with_gpu_bars
from benchmarks.gpu.rows import FAILED, MISSED, OK, first_line, note
from benchmarks.measure import Case, measure

LEFT_OUT = ("bars", "baselines", "case")


def cases(family: str, device: str) -> Iterator[Case]:
    """The cases of a family; a row where one cannot be made, and then no more of it."""
    found = cases_of(family)(device)
    while True:
        try:
            case = next(found)
        except StopIteration:
            return
        except Exception as error:
            note(f"{family}: the next case", FAILED, first_line(error))
            return
        yield with_gpu_bars(family, case)


def timed(case: Case) -> None:
    """Times of a case, as the table of ``benchmarks.run`` has them."""
    row = measure(case, "cuda")
    missed = [bar for bar in row["bars"] if not bar["pass"]]
    why = "; ".join(f"{bar['bar']}, found {bar['found']:.3g}" for bar in missed)
    numbers = {name: value for name, value in row.items() if name not in LEFT_OUT}
    for name, of in row["baselines"].items():
        numbers[f"times {name}"] = of["times"]
    bars = {bar["bar"]: bar["found"] for bar in row["bars"]}
    note(case.name, MISSED if missed else OK, why, **numbers, bars=bars)


def build(case: Case) -> None:
    """Ours on tensors without data, or the product that is its floor: off a GPU ours goes tile by
    tile, in thousands of operators. Baselines stay built: some ask for values (``nonzero``)."""
    run = case.product[0] if case.product else case.run
    run()
    note(case.name, moved_MB=case.moved / 1e6, baselines=len(case.baselines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", choices=FAMILIES, nargs="+", metavar="FAMILY")
    parser.add_argument("--build", action="store_true", help="on meta tensors")
    given = parser.parse_args()
    for family in given.families:
        for case in cases(family, "meta" if given.build else "cuda"):
            try:
                (build if given.build else timed)(case)
            except Exception as error:
                note(case.name, FAILED, first_line(error))


if __name__ == "__main__":
    main()
