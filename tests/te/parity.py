"""Layouts over TransformerEngine's layers against one process of the local backend's.

    python -m tests.te.parity

As `tests.parity` and `tests.parity_modules`, of which it takes models, steps and bounds. Kernels
are formulas (`formulas`).
"""

import sys

from tests.te import formulas  # isort: skip  (before megatron-core)

from tests import parity_modules as modules
from tests.parity import BOUNDS, _layouts, run, too_far

LAYOUTS = {
    1: [
        *_layouts("te\nte recompute:selective\nte recompute:full", "glm", "qwen"),
        *_layouts("te", "glm mtp 2", "glm 384"),
        *_layouts("te attention:p2p recompute:full", "qwen"),
    ],
    2: [
        *_layouts("te tp2 ep2 etp1\nte cp2 recompute:full", "glm mtp"),
        *_layouts("te tp2\nte dp2 ep2 distributed overlapped", "glm", "qwen"),
        *_layouts("te pp2 vpp3", "qwen mixed", "glm mixed"),
        *_layouts("te cp2", "glm mixed"),
        *_layouts("te dp2 dynamic:2", "glm"),
        *_layouts("te cp2 attention:p2p recompute:selective", "glm mtp"),
        *_layouts("te cp2 ep2 attention:all_gather", "qwen mixed"),
        *_layouts("te dp2 dynamic:2 attention:a2a recompute:full", "glm"),
    ],
    4: [
        *_layouts("te pp2 vpp2 cp2 recompute:full\nte tp2 pp2", "glm"),
        *_layouts("te tp2 dp2 ep2 distributed", "qwen"),
        *_layouts("te tp2 pp2", "glm mtp 2"),
        *_layouts("te tp2 cp2 attention:p2p", "qwen"),
        *_layouts("te tp2 cp2 attention:a2a\nte pp2 cp2 attention:all_gather", "glm"),
    ],
}
# towers of both families: on the language model's ranks and on others, trained and frozen
BESIDE = {
    2: [
        *modules._layouts("shared -> te tp2 ep2 etp1", "qwen vl"),
        *modules._layouts("shared frozen -> te pp2", "kimi vl mtp"),
        *modules._layouts("shared -> te dp2 ep2 dynamic:2 attention:a2a distributed", "qwen vl"),
    ],
    3: modules._layouts("1 -> te cp2 attention:p2p recompute:selective", "qwen vl", "kimi vl mtp"),
}


def main() -> int:
    print(f"kernels: formulas ({formulas.__name__}); every tensor against the local backend's")
    cells = " ".join(f"{name:>9s}" for name in BOUNDS)
    print(f"{'layout':38s} {'model':13s} ranks {cells}  experts  seconds", flush=True)
    rows = run(LAYOUTS)
    bad = len(too_far(rows))
    print(
        f"{'encoders -> language model':48s} ranks {' '.join(f'{n:>9s}' for n in modules.BOUNDS)}"
    )
    beside = modules.run(BESIDE)
    bad += sum(bool(modules.too_far(row)) for row in beside)
    number = len(rows) + len(beside)
    print(f"kernels: formulas; {number} layouts, {bad} too far from one process")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
