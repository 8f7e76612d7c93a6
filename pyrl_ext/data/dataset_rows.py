"""Records of datasets that the library `datasets` loads, and records with other column names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from pyrl_ext.data.files import DataError, Records, open_records
from pyrl_ext.parallel.waiting import announced
from pyrl_ext.plan import Plan
from pyrl_ext.plan.records import rename


class DatasetRows:
    """Rows of one split of a dataset, mapped from the library's cache and not held in memory.

    Args:
        name: id on the hub, or a folder of data files
        subset: name of a configuration; None: the only one
        split: such as ``train`` or ``train[:1000]``

    Raises:
        DataError: the library is not installed, or does not load it
    """

    def __init__(self, name: str, subset: str | None, split: str):
        if find_spec("datasets") is None:
            raise DataError(
                f"{name}: a dataset needs the package datasets, expected it. Run "
                "pip install 'pyrl-ext[tasks]'"
            )
        import datasets  # brings pandas, and takes a second

        self.path = Path(name)
        self.split = split
        waits = f"the dataset {name}, which is loaded or downloaded"
        try:
            with announced(waits, advice="Set HF_HUB_OFFLINE=1 if it is in the cache."):
                loaded = datasets.load_dataset(name, subset, split=split)
        except Exception as error:  # the library raises what its readers and the hub's client do
            reason = " ".join(str(error).split())[:600]
            raise DataError(
                f"{name}, subset {subset}, split {split}: {type(error).__name__}: {reason}, "
                "expected a dataset that datasets.load_dataset loads; see data.subset and "
                "data.split"
            ) from error
        self._rows = cast(Any, loaded)

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, number: int) -> str:
        """See `Records.where`."""
        return f"{self.path}, {self.split}: row {number}"

    def read(self, number: int) -> Any:
        """See `Records.read`; null is the same as an absent field."""
        row: dict[str, Any] = self._rows[number]
        return {name: value for name, value in row.items() if value is not None}


class Renamed:
    """Records whose fields have other names in their file.

    Args:
        columns: field -> its name there; ``a.b`` is the entry ``b`` of ``a``
    """

    def __init__(self, records: Records, columns: Mapping[str, str]):
        self.path = records.path
        self._records = records
        self._columns = columns

    def __len__(self) -> int:
        return len(self._records)

    def where(self, number: int) -> str:
        """See `Records.where`."""
        return self._records.where(number)

    def read(self, number: int) -> Any:
        """See `Records.read`."""
        return rename(self._records.read(number), self._columns)


def open_data(
    plan: Plan, name: str, split: str, subset: str | None, columns: Mapping[str, str]
) -> Records:
    """The records of a key of the plan.

    Args:
        name: of a file, a folder or a dataset of the hub
        split, subset: of a folder or dataset
        columns: as of `Renamed`

    Raises:
        DataError: they cannot be opened
    """
    if plan.is_dataset(name):
        path = name if plan.is_hub_id(name) else plan.resolve(name)
        records: Records = DatasetRows(path, subset, split)
    else:
        records = open_records(plan.resolve(name))
    return Renamed(records, columns) if columns else records
