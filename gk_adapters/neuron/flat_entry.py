"""A kernel's entry without tuples of tensors: what the call from torch can carry.

The wrapper that puts an NKI kernel into a torch graph takes arguments one by one: those that are tensors become
operands, everything else is a constant of the build. A tuple of caches would be such a constant. So the entry that is
launched has one parameter per cache, and returns every cache that it writes after its result: that is how an operand
becomes an alias of an output.

Source: aws-neuron-sdk, "How to work with NKI kernels from torch-neuronx", and torch_neuronx's `nki_hop`.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from typing import Any

from gk_core.errors import LayoutError

__all__ = ["cache_arguments", "flat_entry", "plain_function"]

_K, _V = "k_buffers", "v_buffers"


def cache_arguments(num_buffers: int) -> tuple[str, ...]:
    """Names of the parameters that the kernel writes, K first.

    >>> cache_arguments(2)
    ('K_cache_buf_0', 'K_cache_buf_1', 'V_cache_buf_0', 'V_cache_buf_1')
    """
    return tuple(f"{half}_cache_buf_{i}" for half in "KV" for i in range(num_buffers))


def plain_function(kernel: Any) -> Callable[..., Any]:
    """The Python function inside an `nki.jit` kernel; a kernel may not call another one that is marked as an entry.

    Raises:
        LayoutError: there is none to be found.
    """
    for _ in range(4):
        if inspect.isfunction(kernel):
            return kernel
        kernel = next((f for n in ("func", "fn", "function", "__wrapped__") if (f := getattr(kernel, n, None))), None)
    raise LayoutError(f"no Python function inside the kernel {kernel!r}")


def flat_entry(kernel: Any, num_buffers: int) -> Callable[..., Any]:
    """A function over `kernel` with one parameter per cache in the places of `k_buffers` and `v_buffers`.

    It returns (result, K caches, V caches). Its source can be read by `inspect`, which some NKI releases parse.

    Raises:
        LayoutError: the kernel has no such parameters, or no buffers.
    """
    body = plain_function(kernel)
    parameters = list(inspect.signature(body).parameters)
    if num_buffers < 1 or _K not in parameters or _V not in parameters:
        raise LayoutError(f"a kernel with {_K} and {_V} and at least one buffer is needed, got {parameters}")
    caches = cache_arguments(num_buffers)
    tuples = {_K: caches[:num_buffers], _V: caches[num_buffers:]}
    flat = [name for p in parameters for name in tuples.get(p, (p,))]
    passed = [f"({', '.join(tuples[p])},)" if p in tuples else p for p in parameters]
    name = f"{body.__name__}_{num_buffers}"
    source = (
        f"def {name}({', '.join(flat)}):\n"
        f"    result = body({', '.join(passed)})\n"
        f"    return (result, {', '.join(caches)})\n"
    )
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"body": body}
    exec(compile(source, file, "exec"), namespace)
    entry: Callable[..., Any] = namespace[name]
    return entry
