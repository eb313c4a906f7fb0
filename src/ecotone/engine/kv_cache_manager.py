"""Which blocks of the ranks' paged KV store belong to which request."""

from __future__ import annotations

from collections.abc import Set

from ecotone.engine.request import Request
from ecotone.errors import IntegrityError


class KVCacheManager:
    """Hands out KV blocks of ``block_size`` tokens: ids from 0 to ``num_blocks - 1``, the same on every rank."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: list[int] = []  # given back; a stack: the ids used last are warm in a cache
        self._num_used = 0  # ids from here on were never given out: of a large store, only what is used is listed
        self._blocks: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody owns."""
        return self.num_blocks - self._num_used + len(self._free)

    def can_allocate(self, request: Request, num_tokens: int) -> bool:
        """Whether ``allocate`` would succeed now."""
        return self._missing(request, num_tokens) <= self.num_free_blocks

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Give ``request`` blocks for ``num_tokens`` more than it has computed: all that is missing, or nothing.

        Returns:
            Whether it has them now.
        """
        missing = self._missing(request, num_tokens)
        if missing > self.num_free_blocks:
            return False
        if missing > 0:
            blocks = self._blocks.setdefault(request.req_id, [])
            blocks.extend(self._take() for _ in range(missing))
        return True

    def free(self, request: Request) -> None:
        """Take back the blocks of ``request``. Idempotent."""
        self._free.extend(reversed(self._blocks.pop(request.req_id, [])))

    def get_block_ids(self, request: Request) -> tuple[int, ...]:
        """The blocks of ``request``, in the order of its tokens."""
        return tuple(self._blocks.get(request.req_id, ()))

    def owners(self) -> Set[str]:
        """Ids of the requests that own blocks."""
        return self._blocks.keys()

    def check_integrity(self) -> None:
        """Every block is free or owned by exactly one request.

        Raises:
            IntegrityError: a block is lost or owned twice.
        """
        seen = sorted([*self._free, *(block for blocks in self._blocks.values() for block in blocks)])
        if seen != list(range(self._num_used)) or self._num_used > self.num_blocks:
            raise IntegrityError(
                f"KV cache manager: {self._num_used} of {self.num_blocks} blocks were used, but free and owned "
                f"are {seen}"
            )

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_used += 1
        return self._num_used - 1

    def _missing(self, request: Request, num_tokens: int) -> int:
        needed = -(-(request.num_computed_tokens + num_tokens) // self.block_size)
        return needed - len(self._blocks.get(request.req_id, ()))
