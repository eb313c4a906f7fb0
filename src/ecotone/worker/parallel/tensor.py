"""Tensor parallel: transformers' plan for a language model, carried out on its modules.

A plan says for each linear layer and embedding how it is divided. A column-wise layer makes some of the features,
and the row-wise one behind it takes just those and sums up over the ranks: nothing is exchanged in between. Heads
stay whole, so the keys and values that a rank computes, and stores, are those of its heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ecotone.errors import UnsupportedModelError
from ecotone.worker.parallel.group import Group, share_of

# model_type -> rules for its language model that transformers' own plan lacks.
_DECODER = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
EXTRA_RULES: Mapping[str, Mapping[str, str]] = {"qwen3_vl": _DECODER}


def tensor_parallel_plan(model: Any) -> dict[str, str]:
    """Module name (``*`` for layer numbers) -> style, of the language model and its head.

    Raises:
        UnsupportedModelError: there is no plan for its layers, or one in a style that is not known here.
    """
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    rules = EXTRA_RULES.get(model.config.model_type, {})
    plan = {**model.tp_plan, **{f"{prefix}.{name}": style for name, style in rules.items()}}
    plan = {name: style for name, style in plan.items() if name.startswith((f"{prefix}.", "lm_head"))}
    if not any(name.startswith(f"{prefix}.layers.") for name in plan):
        raise UnsupportedModelError(f"{type(model).__name__}: there is no tensor-parallel plan for its layers")
    unknown = sorted(set(plan.values()) - _STYLES.keys())
    if unknown:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its tensor-parallel plan has the style {unknown[0]!r}; known are "
            f"{', '.join(_STYLES)}"
        )
    return plan


def shard(model: Any, group: Group) -> None:
    """Keep this rank's share of the language model's weights, and make its modules sum up with the others.
    ``check_division`` has accepted the number of ranks.

    Raises:
        UnsupportedModelError: see ``tensor_parallel_plan``.
    """
    plan = tensor_parallel_plan(model)
    cutter = _Cutter(group)
    for name, module in list(model.named_modules()):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None and not isinstance(module, nn.Identity):  # it is on another stage
            _STYLES[style](module, cutter, group)


class _Cutter:
    """Cuts weights; one that two modules share (a head tied to the embedding) stays shared."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._cut: dict[tuple[nn.Parameter, int], nn.Parameter] = {}

    def cut(self, module: nn.Module, name: str, axis: int) -> None:
        whole: nn.Parameter | None = getattr(module, name, None)
        if whole is None:
            return
        if (whole, axis) not in self._cut:
            first, last = share_of(whole.shape[axis], self._group.size, self._group.rank)
            part = whole.detach().narrow(axis, first, last - first).clone()
            self._cut[whole, axis] = nn.Parameter(part, requires_grad=False)
        setattr(module, name, self._cut[whole, axis])


def _colwise(module: nn.Module, cutter: _Cutter, _: Group) -> None:
    cutter.cut(module, "weight", 0)
    cutter.cut(module, "bias", 0)


def _colwise_gather_output(module: nn.Module, cutter: _Cutter, group: Group) -> None:
    features = len(_weight(module))
    _colwise(module, cutter, group)
    padding = share_of(features, group.size, 0)[1] - len(_weight(module))
    inner: Callable[[Tensor], Tensor] = module.forward

    def forward(x: Tensor) -> Tensor:
        parts = group.all_gather(functional.pad(inner(x), (0, padding)))
        return torch.cat(parts, dim=-1)[..., :features]

    module.forward = forward


def _rowwise(module: nn.Module, cutter: _Cutter, group: Group) -> None:
    cutter.cut(module, "weight", 1)

    def forward(x: Tensor) -> Tensor:
        out = group.all_reduce(functional.linear(x, _weight(module)))
        # The bias counts once, not once for each rank.
        bias: Tensor | None = getattr(module, "bias", None)
        return out if bias is None else out + bias

    module.forward = forward


def _embedding_rowwise(module: nn.Module, cutter: _Cutter, group: Group) -> None:
    first, last = share_of(len(_weight(module)), group.size, group.rank)
    cutter.cut(module, "weight", 0)
    inner: Callable[[Tensor], Tensor] = module.forward

    def forward(ids: Tensor) -> Tensor:
        elsewhere = (ids < first) | (ids >= last)
        embeds = inner((ids - first).masked_fill(elsewhere, 0))
        return group.all_reduce(embeds.masked_fill(elsewhere[..., None], 0))

    module.forward = forward


def _whole(_module: nn.Module, _cutter: _Cutter, _group: Group) -> None:
    """Every rank has all of it, and needs nothing of the others: norms of single heads."""


def _weight(module: nn.Module) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight


_STYLES: Mapping[str, Callable[[nn.Module, _Cutter, Group], None]] = {
    "colwise": _colwise,
    "colwise_gather_output": _colwise_gather_output,
    "rowwise": _rowwise,
    "embedding_rowwise": _embedding_rowwise,
    "replicated_with_grad_allreduce": _whole,
}
