"""Layouts over TransformerEngine's layers against one process of the local backend's.

    python -m tests.te.parity

As `tests.parity`, of which it takes models, steps and bounds. Kernels are formulas (`formulas`).
"""

import sys

from tests.te import formulas  # isort: skip  (before megatron-core)

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
        *_layouts("te pp2 vpp3\nte cp2", "qwen mixed", "glm mixed"),
        *_layouts("te dp2 dynamic:2", "glm"),
        *_layouts("te cp2 attention:p2p recompute:selective", "glm mtp"),
        *_layouts("te cp2 ep2 attention:all_gather", "qwen mixed"),
        *_layouts("te dp2 dynamic:2 attention:a2a recompute:full", "glm"),
    ],
    4: [
        *_layouts("te pp2 vpp2 cp2 recompute:full\nte tp2 pp2", "glm"),
        *_layouts("te tp2 dp2 ep2 distributed\nte tp2 cp2", "qwen"),
        *_layouts("te tp2 pp2", "glm mtp 2"),
        *_layouts("te tp2 cp2 attention:p2p", "qwen"),
        *_layouts("te tp2 cp2 attention:a2a\nte pp2 cp2 attention:all_gather", "glm"),
    ],
}


def main() -> int:
    print(f"kernels: formulas ({formulas.__name__}); every tensor against the local backend's")
    cells = " ".join(f"{name:>9s}" for name in BOUNDS)
    print(f"{'layout':38s} {'model':13s} ranks {cells}  experts  seconds", flush=True)
    rows = run(LAYOUTS)
    bad = too_far(rows)
    print(f"kernels: formulas; {len(rows)} layouts, {len(bad)} too far from one process")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
