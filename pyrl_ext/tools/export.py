"""Write a run's weights as a Hugging Face folder.

The model, with its encoders, is built in one process on the CPU, or as overrides say: under
torchrun any layout writes the same files. Adapters are merged into the weights; --adapter has them
alone written, as a PEFT adapter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pyrl_ext.plan.command import called, parse
from pyrl_ext.plan.language.fields import Dtype


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: written; 1: failed, with the reason; 2: the overrides do not hold."""
    parser = argparse.ArgumentParser(prog=called("pyrl_ext.tools.export"), description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("out", type=Path, help="the folder to write, which must not exist")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set a value")
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest if left out")
    parser.add_argument("--dtype", choices=get_args(Dtype), help="the model's if left out")
    parser.add_argument("--tokenizer", help="folder or hub id; the run's if left out")
    parser.add_argument("--adapter", action="store_true", help="only the adapters")
    options = parse(parser, arguments)
    if (named := options.tokenizer) is not None and Path(named).is_dir():
        options.tokenizer = str(Path(named).resolve())
    if options.out.exists():
        print(f"error: export: {options.out} exists, expected a new folder", file=sys.stderr)
        return 1
    from pyrl_ext.tools.exported import run  # brings torch and megatron-core

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
