"""Small values that kernels hold beside tensors: registers, dynamic slices, configuration objects."""

from __future__ import annotations

from typing import Any, NamedTuple

from gk_kernels.simulator.errors import PoisonError, UsageError, refuse


class NKIObject:
    """Base class of a kernel's own configuration objects; keyword arguments become attributes."""

    __slots__ = ()

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            setattr(self, name, value)


class VirtualRegister(NKIObject):
    """A scalar register. It takes part in no Python arithmetic, comparison or control flow."""

    __slots__ = ("_frozen", "_value")

    def __init__(self, state: int | None = None, frozen: bool = False) -> None:
        self._value = state
        self._frozen = frozen

    def read(self) -> int:
        """The register's value.

        Raises:
            PoisonError: nothing was ever put into it.
        """
        if self._value is None:
            refuse(
                "a register must be set before it is read",
                "an uninitialised register",
                "register_move or register_load first",
                PoisonError,
            )
        return self._value

    def write(self, value: int) -> None:
        """Set the value (loop induction registers are copies: setting them changes nothing outside)."""
        self._value = int(value)

    def _refuse(self, *_: Any) -> Any:
        refuse(
            "a register's value is not known while the kernel is built",
            "Python arithmetic or control flow on it",
            "nl.fori_loop, nl.while_loop, scalar_offset, register_move",
            UsageError,
        )

    __bool__ = __int__ = __index__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __floordiv__ = __mod__ = _refuse


class DynamicSlice(NamedTuple):
    """`nl.ds(start, size)`; start may be a register."""

    start: Any
    size: int


class Indirect(NamedTuple):
    """A dynamic index carried by a view.

    Attributes:
        kind: "scalar" or "vector".
        index: what holds the index.
        multiplier: elements per index step.
        bound: size of the indexed dimension; valid indices are 0..bound-1.
        dim: dimension of the view that takes part in the indirection, -1 when it was removed.
    """

    kind: str
    index: Any
    multiplier: int
    bound: int
    dim: int
