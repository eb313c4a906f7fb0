"""``python -m ecotone``."""

from ecotone.cli import main

main()
