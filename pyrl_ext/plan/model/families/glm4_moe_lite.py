"""GLM-4.7-Flash: DeepSeek-V3's layers, dense and sparse ones in any order."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pyrl_ext.plan.model.families.blocks import Latent, SigmoidRouted


class Glm4MoeLite(SigmoidRouted, Latent):
    """HF ``Glm4MoeLiteConfig``."""

    mlp_layer_types: Annotated[
        tuple[Literal["dense", "sparse"], ...] | None, Field(strict=False)
    ] = None

    @property
    def router_layers(self) -> tuple[int, ...]:
        if self.mlp_layer_types is None:
            return super().router_layers
        return tuple(i for i, kind in enumerate(self.mlp_layer_types) if kind == "sparse")

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        dense = self.first_k_dense_replace
        kinds = self.mlp_layer_types
        if kinds is not None and len(kinds) != self.num_hidden_layers:
            found.append(
                f"mlp_layer_types has {len(kinds)} entries, expected one for each of "
                f"num_hidden_layers {self.num_hidden_layers}"
            )
        elif dense is not None and self.router_layers != super().router_layers:
            found.append(
                f"first_k_dense_replace {dense} and mlp_layer_types disagree, expected the same "
                "dense layers; engine and trainer would build different models. Remove one"
            )
        return found


SIZES = Glm4MoeLite
