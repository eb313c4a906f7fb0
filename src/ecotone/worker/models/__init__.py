"""Models: Hugging Face checkpoints behind one adapter."""

from ecotone.worker.models.adapter import ModelAdapter
from ecotone.worker.models.encode import EncodeFailure
from ecotone.worker.models.loading import load_model

__all__ = ["EncodeFailure", "ModelAdapter", "load_model"]
