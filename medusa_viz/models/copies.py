"""A copy of a model's modules and config that shares every tensor."""

from __future__ import annotations

import copy

from torch import nn

from medusa_viz.models.placing import BackboneError


def own_copy(model: nn.Module) -> nn.Module:
    """Modules and config to change freely. Leaf modules are shared whole: packed linears cannot be copied, and no leaf
    reads the attention's name. Raises BackboneError for a model that cannot be copied."""
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    shared = [*model.parameters(), *model.buffers(), *leaves]
    try:
        return copy.deepcopy(model, {id(part): part for part in shared})
    except (RuntimeError, TypeError) as error:
        raise BackboneError(f"The modules of {type(model).__name__} cannot be copied: "
                            f"{str(error).splitlines()[0]:.120}") from error
