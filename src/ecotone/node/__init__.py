"""Where encodings live: keys, extents, index, eviction, region."""

from ecotone.node.attach import RegionServer, attach_region
from ecotone.node.embedded import EmbeddedNode
from ecotone.node.eviction import EVICTION_POLICIES, Candidate, EvictionPolicy, make_policy
from ecotone.node.exchange import (
    Abort,
    Absent,
    Acquire,
    AnyAnswer,
    AnyOp,
    Commit,
    Done,
    Extent,
    Forget,
    ForgetAll,
    Layout,
    Lookup,
    NodeExchange,
    NoRoom,
    Pending,
    Ready,
    Release,
    Settled,
    Ticket,
    Unreachable,
)
from ecotone.node.extents import ExtentAllocator
from ecotone.node.index import Index
from ecotone.node.keys import Namespace, namespace_of, options_digest
from ecotone.node.region import Region, RegionDescriptor

__all__ = [
    "EVICTION_POLICIES",
    "Abort",
    "Absent",
    "Acquire",
    "AnyAnswer",
    "AnyOp",
    "Candidate",
    "Commit",
    "Done",
    "EmbeddedNode",
    "EvictionPolicy",
    "Extent",
    "ExtentAllocator",
    "Forget",
    "ForgetAll",
    "Index",
    "Layout",
    "Lookup",
    "Namespace",
    "NoRoom",
    "NodeExchange",
    "Pending",
    "Ready",
    "Region",
    "RegionDescriptor",
    "RegionServer",
    "Release",
    "Settled",
    "Ticket",
    "Unreachable",
    "attach_region",
    "make_policy",
    "namespace_of",
    "options_digest",
]
