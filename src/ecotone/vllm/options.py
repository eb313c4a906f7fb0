"""The connector's options in vLLM: ``ec_connector_extra_config``."""

from __future__ import annotations

from typing import Any

import msgspec

from ecotone.config import Positive, parse_config
from ecotone.connectors.config import EcotoneOptions, parse_options
from ecotone.errors import ConfigError

_WHAT = "ec_connector_extra_config of EcotoneConnector"


class VllmOptions(EcotoneOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every option of Ecotone's connector, and what only vLLM needs.

    Attributes:
        revision: names the weights, where the encodings can outlive this engine or be used by others (a shared
            node, or ``disk``). ``None``: the digest of a local checkpoint, or the commit of one that came from a
            hub.
        encoder_widths: elements in one row of the encoder's output by modality, e.g. ``{"image": 8192}``, for an
            ``ec_consumer`` of a model whose rows are wider than its config tells. Producers measure it.
    """

    revision: str | None = None
    encoder_widths: dict[str, Positive] = msgspec.field(default_factory=dict)

    @property
    def outlive_engine(self) -> bool:
        """Whether somebody else, or a later start, can find what this engine stores."""
        return self.node_path is not None or self.disk is not None


_OWN = {field.name for field in msgspec.structs.fields(VllmOptions)} - {
    field.name for field in msgspec.structs.fields(EcotoneOptions)
}


def parse_vllm_options(extra: dict[str, Any]) -> tuple[VllmOptions, dict[str, Any]]:
    """``ec_connector_extra_config``: all options, and those among them that Ecotone's connector knows, as given.

    Raises:
        ConfigError: an unknown key (the known ones are listed) or a value out of range.
    """
    options = parse_config(VllmOptions, extra, _WHAT)
    for_connector = {name: value for name, value in extra.items() if name not in _OWN}
    parse_options(for_connector)
    if options.revision == "":
        raise ConfigError("revision='' names no weights: leave it out, or give the name of a checkpoint's version")
    return options, for_connector
