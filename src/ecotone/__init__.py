"""Ecotone: a distributed encoder cache for multimodal inference."""
