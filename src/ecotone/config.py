"""Configuration: closed structs, parsed once, unknown keys refused with the list of known ones."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from ecotone.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
# Digits enough for any machine; with thousands of them a number is infinite, or cannot be converted at all.
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: str | int, name: str = "size") -> int:
    """A size in bytes from ``"2GiB"``, ``"512 MB"``, ``"4096"`` or a number.

    Raises:
        ConfigError: not a size, or not above 0.
    """
    match = _SIZE.fullmatch(str(value)) if not isinstance(value, bool) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{name}={value!r} is not a size in bytes: write e.g. 4096, '512MB' or '2GiB'")
    size = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ConfigError(f"{name}={value!r} must be above 0 bytes")
    return size


def parse_config(kind: type[T], options: dict[str, Any], what: str) -> T:
    """``options`` as a ``kind``.

    Raises:
        ConfigError: an unknown key (the known ones are listed), a wrong type or a value out of range.
    """
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ConfigError(f"{what}: unknown option {unknown[0]!r}; known are {', '.join(sorted(known))}")
    for name, hint in get_type_hints(kind).items():
        if get_origin(hint) is Literal and name in options and options[name] not in get_args(hint):
            raise ConfigError(f"{what}: {name}={options[name]!r} is not one of {', '.join(get_args(hint))}")
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: {error}") from None


Positive = Annotated[int, msgspec.Meta(ge=1)]


class ECConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which EC connector an engine uses.

    Attributes:
        connector: a name known to the factory, or ``module:Class`` of an ``ECConnectorFactory``.
        role: ``ec_both`` stores and uses, ``ec_producer`` only encodes and stores, ``ec_consumer`` only uses.
        options: the connector's own options.
    """

    connector: str = "EcotoneConnector"
    role: Literal["ec_producer", "ec_consumer", "ec_both"] = "ec_both"
    options: dict[str, Any] = {}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine runs a model.

    Attributes:
        model: folder of a Hugging Face checkpoint.
        task: ``generate`` tokens, or ``embed`` prompts into vectors.
        device: ``auto`` takes the first CUDA device, or the CPU.
        dtype: of weights and activations; ``auto`` is float32 on a CPU, the checkpoint's on a GPU.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: requests that run at the same time.
        max_model_len: longest prompt plus output in tokens; ``None`` takes the model's own.
        block_size: tokens in a KV block.
        kv_blocks: KV blocks there are.
        encoder_cache_rows: capacity of a rank's encoder cache, in encoder rows.
        encoder_budget_rows: encoder rows computed in a step; ``None`` takes ``encoder_cache_rows``.
        max_image_pixels: larger images, and frames of videos, are refused before they are decoded; so is a video
            whose frames have 8 times as many in all.
        max_video_frames: longer videos are refused.
        max_audio_seconds: longer clips are refused.
        revision: names the weights; part of every cache key. ``None`` takes a digest of the checkpoint files.
        tenant: separates caches of parties that must not share; part of every cache key.
        seed: of requests that bring none.
        ec: the EC connector; ``None`` runs without one.
        tensor_parallel_size: ranks that divide each layer among them.
        pipeline_parallel_size: stages that divide the layers among them, each of ``tensor_parallel_size`` ranks.
        executor: how steps reach the ranks. ``auto`` takes ``uniproc`` for one rank and ``multiproc`` for more;
            ``ray_single_reply`` fetches nothing but the output rank's answers.
        mm_encoder_tp_mode: whether the ranks of a stage divide the encoder's ``weights``, or each hold all of them
            and divide the images (``data``).
    """

    model: str
    task: Literal["generate", "embed"] = "generate"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_num_batched_tokens: Positive = 2048
    max_num_seqs: Positive = 64
    max_model_len: Positive | None = None
    block_size: Positive = 16
    kv_blocks: Positive = 1024
    encoder_cache_rows: Positive = 8192
    encoder_budget_rows: Positive | None = None
    max_image_pixels: Positive = 100_000_000
    max_video_frames: Positive = 256
    max_audio_seconds: Positive = 600
    revision: str | None = None
    tenant: str = ""
    seed: int = 0
    ec: ECConfig | None = None
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    executor: Literal["auto", "uniproc", "multiproc", "ray", "ray_single_reply"] = "auto"
    mm_encoder_tp_mode: Literal["weights", "data"] = "weights"

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
