"""Pipeline parallel: each stage has some of the decoder layers; the first has the encoder and the embedding, the
last the final norm and the head. Hidden states go from each rank to the one in its place in the next stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ecotone.errors import ContractError
from ecotone.protocol.wire import decode, encode
from ecotone.worker.parallel.division import layers_of_stage


class Stage(Protocol):
    """One stage's way to its neighbours. What passes in a step follows from the step's orders alone."""

    is_first: bool
    is_last: bool

    def relay_errors(self, errors: Mapping[str, str]) -> dict[str, str]:
        """Request -> why it cannot go on, known to the first stage alone (``errors`` of the others is ignored)
        until every stage in turn has called this."""
        ...

    def receive(self, num_tokens: int) -> Tensor:
        """``[num_tokens, hidden]`` of the stage before."""
        ...

    def send(self, hidden_states: Tensor) -> None:
        """``[T, hidden]`` to the stage behind."""
        ...


class _OnlyStage:
    """All layers in one place: there is nobody to hear from or to tell."""

    is_first = is_last = True

    def relay_errors(self, errors: Mapping[str, str]) -> dict[str, str]:
        return dict(errors)

    def receive(self, num_tokens: int) -> Tensor:
        raise ContractError(f"{num_tokens} hidden states are awaited of the stage before, and there is none")

    def send(self, hidden_states: Tensor) -> None:
        raise ContractError(f"{len(hidden_states)} hidden states are for the stage behind, and there is none")


ONLY_STAGE: Stage = _OnlyStage()


class DistributedStage:
    """A ``Stage`` over the default process group.

    Args:
        before, behind: global ranks; ``None`` at the ends.
        hidden_size, dtype, device: of hidden states.
    """

    def __init__(
        self, before: int | None, behind: int | None, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._before = before
        self._behind = behind
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self.is_first = before is None
        self.is_last = behind is None

    def relay_errors(self, errors: Mapping[str, str]) -> dict[str, str]:
        """See ``Stage``."""
        known = dict(errors)
        if self._before is not None:
            length = torch.empty(1, dtype=torch.int64)
            dist.recv(length, self._before)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(data, self._before)
            known = decode(data.numpy().tobytes(), dict[str, str])
        if self._behind is not None:
            data = torch.frombuffer(bytearray(encode(known)), dtype=torch.uint8)
            dist.send(torch.tensor([len(data)]), self._behind)
            dist.send(data, self._behind)
        return known

    def receive(self, num_tokens: int) -> Tensor:
        """See ``Stage``."""
        hidden_states = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        dist.recv(hidden_states, self._before)
        return hidden_states

    def send(self, hidden_states: Tensor) -> None:
        """See ``Stage``."""
        dist.send(hidden_states.contiguous(), self._behind)


def cut_stage(model: Any, stages: int, stage: int) -> None:
    """Take from ``model`` what other stages have. ``check_division`` has accepted the number of stages."""
    decoder, core = model.get_decoder(), model.base_model
    layers = layers_of_stage(len(decoder.layers), stages, stage)
    decoder.layers = nn.ModuleList(decoder.layers[index] for index in layers)
    # Layers have their own numbers, but models look up their kinds by position in the list.
    kinds = getattr(decoder.config, "layer_types", None)
    if kinds:
        decoder.config.layer_types = [kinds[index] for index in layers]
    if stage < stages - 1:
        decoder.norm = nn.Identity()
        model.set_output_embeddings(None)
    if stage > 0:
        decoder.embed_tokens = nn.Identity()  # models look for it where they look for their head
        for name, module in list(core.named_children()):
            if module is not decoder:
                setattr(core, name, None)
