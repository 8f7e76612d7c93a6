"""A tool of a task, which runs as a process."""

from __future__ import annotations

import verifiers.v1 as vf


class CalcTools(vf.Toolset[vf.ToolsetConfig]):
    """Sums."""

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)


if __name__ == "__main__":
    CalcTools.run()
