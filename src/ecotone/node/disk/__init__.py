"""The disk tier: one safetensors file per entry, adopted after a restart, verified before its first use."""

from ecotone.node.disk.store import make_root
from ecotone.node.disk.tier import DiskConfig, DiskTier, Fsync, open_disk_tier

__all__ = ["DiskConfig", "DiskTier", "Fsync", "make_root", "open_disk_tier"]
