"""A taskset that imports what is not there."""

import not_installed  # noqa: F401  # pyright: ignore
