"""Look at a page in a headless browser: `python -m tests.helpers.browser PAGE.html OUT.png`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.deadline import DEADLINE

BROWSERS = ("chromium", "google-chrome")


def find() -> str | None:
    """The browser of this machine."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def look(
    page: Path, picture: Path, dark: bool = False, size: tuple[int, int] = (1280, 1600)
) -> str:
    """Lay out a page and write a picture of its top.

    Args:
        page: the HTML file
        picture: the PNG file to write
        dark: in the dark colour scheme
        size: of the window [px]

    Returns:
        The page as its scripts left it.
    """
    if (browser := find()) is None:
        names = ", ".join(BROWSERS)
        raise FileNotFoundError(f"browser: none of {names} found. Run make .venv/.browser")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--no-first-run",
            f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--virtual-time-budget=1000",  # scripts run to their end, however slow the machine is
            "--dump-dom", f"--screenshot={picture}", page.resolve().as_uri(),
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    if run.returncode or not picture.exists():
        raise RuntimeError(f"browser: {browser} left {run.returncode}: {run.stderr[-2000:]}")
    return run.stdout


def take(page: Path, picture: Path, height: int, dark: bool = False) -> None:
    """Write a picture of the top of a page with few colours, which is many times smaller."""
    from PIL import Image

    look(page, picture, dark, (1280, height))
    Image.open(picture).convert("RGB").quantize(256).save(picture, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--height", type=int, default=1600, help="of the window [px]")
    options = parser.parse_args()
    take(options.page, options.picture, options.height, options.dark)
    return 0


if __name__ == "__main__":
    sys.exit(main())
