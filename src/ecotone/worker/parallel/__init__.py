"""Ranks that compute one model together, over torch.distributed."""
