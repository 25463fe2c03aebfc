"""One decode step over fixed rows, in which a fault stays with the row that causes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from gk_core.decode_step import AttentionControl, ControlShape, DecodeRow
from gk_core.errors import GkError
from gk_core.kernel_contract import TensorLike
from gk_core.metrics import DECODE_ROWS, DECODE_STEPS
from gk_core.ports import CallBuilder, DecodeKernel, Metrics, Sampler

__all__ = ["StepRunner"]

T = TypeVar("T", bound=TensorLike)

Rows = list[DecodeRow | None]


class StepRunner(Generic[T]):
    """Rows and tokens in, next tokens out.

    Where a whole call is refused, each active row is tried alone: it writes the same bytes to the same slots again, and
    only what is refused alone has failed.

    Args:
        shape: rows, block size, window, longest context.
        kernel, builder, sampler: the model.
        metrics: where to count.
        build_control: rows -> control.
    """

    def __init__(
        self,
        *,
        shape: ControlShape,
        kernel: DecodeKernel[T],
        builder: CallBuilder[T],
        sampler: Sampler[T],
        metrics: Metrics,
        build_control: Callable[[Sequence[DecodeRow | None], ControlShape], AttentionControl],
    ) -> None:
        self._shape = shape
        self._kernel, self._builder, self._sampler = kernel, builder, sampler
        self._metrics = metrics
        self._build_control = build_control

    def run(self, rows: Rows, token_ids: tuple[int, ...]) -> tuple[int | GkError | None, ...]:
        """Next token of each active row, or why it has none; None for inactive rows.

        Args:
            rows: one per row of the shape, None where inactive.
            token_ids: what each row is fed; anything for inactive rows.
        """
        active = [i for i, row in enumerate(rows) if row is not None]
        if not active:
            return (None,) * len(rows)
        self._metrics.observe(name=DECODE_ROWS, value=len(active))
        results: list[int | GkError | None] = [None] * len(rows)
        whole = self._try(rows, token_ids)
        if not isinstance(whole, GkError):
            for i in active:
                results[i] = whole[i]
        elif len(active) == 1:
            results[active[0]] = whole
        else:
            for i in active:
                alone = self._try([row if j == i else None for j, row in enumerate(rows)], token_ids)
                results[i] = alone if isinstance(alone, GkError) else alone[i]
        return tuple(results)

    def _try(self, rows: Rows, token_ids: tuple[int, ...]) -> tuple[int, ...] | GkError:
        try:
            control = self._build_control(rows, self._shape)
            hidden = self._kernel.step(call=self._builder.build(token_ids=token_ids, control=control))
            self._metrics.count(name=DECODE_STEPS)
            return self._sampler.sample(hidden=hidden, active=control.active)
        except GkError as error:
            return error
