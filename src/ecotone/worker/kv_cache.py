"""Keys and values of the language model, in blocks. Which block is whose is the scheduler's business alone."""

from __future__ import annotations

from torch import Tensor

from ecotone.errors import ResourceError


class PagedKVCache:
    """Per layer, two pools of ``num_blocks * block_size`` token slots.

    A layer's pools are made when it first writes, with the heads and widths it writes, so they follow whatever
    part of the heads a tensor-parallel rank has. Layers are numbered as the model numbers them; a pipeline stage
    writes, and so holds, its own layers only.

    Raises:
        ResourceError: there is no memory for a layer's pools; the message says how much was asked for.
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of all pools made so far."""
        return sum(pool.nbytes for pool in (*self._keys, *self._values) if pool is not None)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` ``[heads, T, width]`` of a layer in ``slots``, int64 ``[T]``."""
        self._write(self._keys, layer, slots, keys)
        self._write(self._values, layer, slots, values)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[heads, n, width]`` of a layer from ``slots``, int64 ``[n]``, in that order."""
        return self._read(self._keys, layer, slots), self._read(self._values, layer, slots)

    def _write(self, pools: list[Tensor | None], layer: int, slots: Tensor, states: Tensor) -> None:
        pool = pools[layer]
        if pool is None:
            pool = pools[layer] = self._make_pool(states)
        pool.index_copy_(0, slots, states.transpose(0, 1))

    def _read(self, pools: list[Tensor | None], layer: int, slots: Tensor) -> Tensor:
        pool = pools[layer]
        if pool is None:
            raise IndexError(f"KV layer {layer} is read before anything was written to it")
        return pool.index_select(0, slots).transpose(0, 1)

    def _make_pool(self, states: Tensor) -> Tensor:
        heads, _, width = states.shape
        num_slots = self.num_blocks * self.block_size
        try:
            return states.new_zeros(num_slots, heads, width)
        except (RuntimeError, TypeError) as error:  # TypeError: the number of slots is no 64-bit integer
            nbytes = num_slots * heads * width * states.element_size()
            raise ResourceError(
                f"{self.num_blocks} KV blocks of {self.block_size} tokens: no memory for {nbytes} bytes,"
                f" needed twice in each of {len(self._keys)} layers"
            ) from error
