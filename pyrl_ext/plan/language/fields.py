"""The base class of the schema's sections, and the kinds of values they share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator


class InvalidField(LookupError):
    """A field was read that is missing or wrong; whoever asked cannot be answered yet."""


class Section(BaseModel):
    """A mapping of the YAML: strict types, no unknown key, frozen.

    Rules also run on sections that have wrong fields. Those are left out of the object
    (`model_construct`), and reading one raises `InvalidField`, so a rule that needs it is skipped.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    if not TYPE_CHECKING:  # a type checker should still find misspelt fields

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise InvalidField(name)
            raise AttributeError(f"{type(self).__name__} has no field {name!r}")


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field of this type is, or may be; None: another value."""
    kinds = (
        (annotation, *get_args(annotation)) if type(None) in get_args(annotation) else (annotation,)
    )
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


@dataclass(frozen=True)
class RelativePath:
    """Marks text as a path that starts at the folder of the YAML file that contains it."""

    or_hub_id: bool = False
    """owner/name of a model hub is meant where there is no such folder"""


# Beyond these nothing is meant: numbers that neither int64 nor float32 holds, and sizes that no
# cluster has and that would take the plan minutes to enumerate.
MAX_RANKS = 2**17
MAX_SAMPLES = 2**17
NO_BOUNDS = (2**62, 1e30)
Positive = Annotated[int, Field(ge=1, le=NO_BOUNDS[0])]
Count = Annotated[int, Field(ge=0, le=NO_BOUNDS[0])]
Size = Annotated[int, Field(ge=1, le=MAX_RANKS)]
NonNegative = Annotated[float, Field(ge=0, le=NO_BOUNDS[1])]
Rate = Annotated[float, Field(gt=0, le=NO_BOUNDS[1])]
Dtype = Literal["float32", "bfloat16"]
Text = Annotated[str, Field(min_length=1)]
Folder = Annotated[Text, RelativePath(or_hub_id=True)]


def bounded(names: tuple[str, ...], what: str, most: int) -> Any:
    """The validator of a section that the product of its sizes `names` is at most `most`."""

    def check[S: Section](section: S) -> S:
        sizes = {name: getattr(section, name) for name in names}
        if (product := math.prod(sizes.values())) > most:
            factors = " * ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(f"{factors} = {product} {what}, expected at most {most}")
        return section

    return model_validator(mode="after")(check)
