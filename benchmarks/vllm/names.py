"""What is compared, by the names it has in the figures."""

from __future__ import annotations

NONE, EXAMPLE, ECOTONE = "no EC connector", "ECExampleConnector", "Ecotone"
ENGINES = (NONE, EXAMPLE, ECOTONE)

HIT, MISS, HELD = "image seen before", "new image", "image still in vLLM's cache"
SHARES = {"50% repeated": 0.5, "90% repeated": 0.9}

COPY, COPYING, ECCPU = "copy_", "Ecotone, load=copy", "ECCPUConnector"
EXAMPLE_IN_MEMORY = "ECExampleConnector in /dev/shm"
