"""Greedy sampling over vocabulary shards: two numbers per row and rank cross the wire, every rank gets the same token.

Dims: R rows of the replica, T rows of this rank, H hidden, V vocabulary, n shards, W = ceil(V / n) columns of a shard.

The rule is `gk_core.greedy`'s: the lowest id among the largest logits; padding is never chosen; NaN is refused, on
every rank at once, so that none waits in a collective for one that has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from gk_adapters.neuron.grid import kernel_grid, require_grid, row_chunks
from gk_core.errors import LayoutError
from gk_core.greedy import vocab_shard
from gk_core.ports import Sampler

__all__ = ["MaxKernel", "NeuronGreedySampler", "ShardedArgmax", "launch_max"]

MaxKernel = Callable[[torch.Tensor, int], torch.Tensor]
"""(float32 logits [R, W], grid) to the largest logit of each row [R]."""

_MIN_KERNEL_COLUMNS = 128
"""Below this the max kernel does not apply and torch's own op is used."""


def launch_max(kernel: MaxKernel, logits: torch.Tensor, *, lnc: int, grid: int | None = None) -> torch.Tensor:
    """Row maxima [R] by a kernel, in as many launches as its programs can hold.

    Args:
        grid: only to assert a grid that somebody else chose; default: the one for this lnc.

    Raises:
        LayoutError: a grid that is not the one for this lnc; nothing was launched.
    """
    chunks = list(row_chunks(logits.shape[0], lnc))
    if grid is not None:
        for rows in chunks:
            require_grid(grid, num_rows=len(rows), lnc=lnc)
    return torch.cat([kernel(logits[r.start : r.stop], kernel_grid(len(r), lnc)) for r in chunks])


class ShardedArgmax:
    """Token ids from logits that are sharded over the vocabulary.

    Args:
        vocab_size: V.
        num_shards, index: n, and which shard this rank holds.
        group: of the n ranks, in the order of their shards; None where n is 1.
        lnc: the process's logical NeuronCore config, for the kernel's grid.
        kernel: row maxima on the device; None: torch's own.

    Raises:
        LayoutError: more than one shard without a group, or a group of another size or order.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        num_shards: int = 1,
        index: int = 0,
        group: dist.ProcessGroup | None = None,
        lnc: int = 1,
        kernel: MaxKernel | None = None,
    ) -> None:
        self.shard = vocab_shard(vocab_size, num_shards, index)
        self.columns = len(vocab_shard(vocab_size, num_shards, 0))
        if num_shards > 1 and group is None:
            raise LayoutError(f"{num_shards} vocabulary shards need the process group of their ranks, got none")
        if group is not None and (dist.get_world_size(group), dist.get_rank(group)) != (num_shards, index):
            raise LayoutError(
                f"shard {index} of {num_shards} needs that place in its group, got rank {dist.get_rank(group)} of "
                f"{dist.get_world_size(group)}"
            )
        kernel_grid(1, lnc)
        self.num_shards = num_shards
        self.group = group
        self.lnc = lnc
        self.kernel = kernel

    def __call__(self, logits: torch.Tensor, active: Sequence[bool] | None = None) -> torch.Tensor:
        """Token ids, int64 [R]; the same on every rank. Rows that are not active get an id that means nothing.

        Args:
            logits: [R, W] of this rank's shard, any float dtype; columns past the shard's tokens are padding.
            active: per row; default: all.

        Raises:
            LayoutError: another shape; or, on every rank, an active row whose logits hold NaN.
        """
        if logits.ndim != 2 or logits.shape[1] != self.columns or not logits.shape[0]:
            raise LayoutError(f"logits must be [rows, {self.columns}], got {list(logits.shape)}")
        on = torch.tensor([True] * logits.shape[0] if active is None else list(active), device=logits.device)
        if on.shape[0] != logits.shape[0]:
            raise LayoutError(f"{logits.shape[0]} rows of logits but {on.shape[0]} of activity")
        values, ids = self._local(logits)
        if self.num_shards > 1:
            values, ids = self._gathered(values, ids)
        else:
            values, ids = values[None], ids[None]
        wrong = on & torch.isnan(values).any(dim=0)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0, 0])
            raise LayoutError(f"row {row}: a logit is NaN; no token can be chosen")
        best = values.max(dim=0).values
        last = torch.iinfo(ids.dtype).max
        return torch.where(values == best, ids, last).min(dim=0).values.to(torch.int64)

    def _local(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(largest real logit, its lowest global id) per row; NaN where there is one."""
        rows, width = logits.shape[0], len(self.shard)
        if not width:
            first = torch.full((rows,), self.shard.start, dtype=torch.int32, device=logits.device)
            return torch.full((rows,), -torch.inf, device=logits.device), first
        real = logits[:, :width].float()
        if self.kernel is not None and width >= _MIN_KERNEL_COLUMNS:
            values = launch_max(self.kernel, real, lnc=self.lnc)
        else:
            values = real.max(dim=1).values
        # Which of several equal maxima an op names is unspecified, and whether a kernel hands NaN on is too.
        places = torch.arange(self.shard.start, self.shard.stop, dtype=torch.int32, device=logits.device)
        ids = torch.where(real == values[:, None], places, self.shard.stop).min(dim=1).values
        values = torch.where(torch.isnan(real).any(dim=1), torch.nan, values)
        return values, ids.to(torch.int32)

    def _gathered(self, values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [n, R], by one collective of 8 bytes per row and rank."""
        mine = torch.stack((values.view(torch.int32), ids), dim=1)
        theirs = [torch.empty_like(mine) for _ in range(self.num_shards)]
        dist.all_gather(theirs, mine, group=self.group)
        both = torch.stack(theirs)
        return both[:, :, 0].contiguous().view(torch.float32), both[:, :, 1]


class NeuronGreedySampler(Sampler[torch.Tensor]):
    """Final norm and this rank's columns of the vocabulary projection, then `ShardedArgmax`.

    Args:
        project: hidden rows [R, H] to this rank's logits [R, W].
        argmax: over the TP ranks' shards.
    """

    def __init__(self, *, project: Callable[[torch.Tensor], torch.Tensor], argmax: ShardedArgmax) -> None:
        self._project = project
        self._argmax = argmax

    def sample(self, *, hidden: torch.Tensor, active: tuple[bool, ...]) -> tuple[int, ...]:
        """One token id per row; 0 for inactive rows.

        Args:
            hidden: all rows [R, H], or this rank's share [T, H] with R = T * n, which is then gathered.

        Raises:
            LayoutError: rows that are neither; an active row's logits hold NaN.
        """
        rows, shards = len(active), self._argmax.num_shards
        if hidden.shape[0] != rows:
            if hidden.shape[0] * shards != rows:
                raise LayoutError(f"{rows} rows over {shards} ranks: hidden has {hidden.shape[0]} rows, pad the batch")
            hidden = self._gather_rows(hidden)
        ids = self._argmax(self._project(hidden), active).tolist()
        return tuple(token if on else 0 for token, on in zip(ids, active, strict=True))

    def _gather_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        # As bytes: not every backend of torch.distributed has every float dtype.
        mine = hidden.contiguous().view(torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self._argmax.num_shards)]
        dist.all_gather(theirs, mine, group=self._argmax.group)
        return torch.cat(theirs).view(hidden.dtype)
