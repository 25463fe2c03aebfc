"""Ports keep to their form: few methods, keyword-only, typed, documented."""

from __future__ import annotations

import inspect
import typing

import pytest

from gk_core import ports

PORTS = [getattr(ports, name) for name in ports.__all__ if getattr(getattr(ports, name), "_is_protocol", False)]


def methods_of(port: type) -> dict[str, typing.Any]:
    return {n: f for n, f in vars(port).items() if inspect.isfunction(f) and not n.startswith("_")}


METHODS = [pytest.param(f, id=f"{p.__name__}.{n}") for p in PORTS for n, f in methods_of(p).items()]


def test_the_ports_that_the_engines_need_exist() -> None:
    """One per outside thing."""
    assert {p.__name__ for p in PORTS} >= {
        "BlockPool", "Clock", "DecodeKernel", "KVCachePlanner", "KVTransport", "NoticePort", "PrefillModel",
        "Sampler", "SideChannel", "SideChannelServer", "WeightSource",
    }  # fmt: skip


@pytest.mark.parametrize("port", PORTS, ids=lambda p: p.__name__)
def test_a_port_has_few_methods(port: type) -> None:
    """More is two ports."""
    assert 1 <= len(methods_of(port)) <= 5
    assert port.__doc__


@pytest.mark.parametrize("method", METHODS)
def test_a_port_method_is_keyword_only_typed_and_documented(method: typing.Any) -> None:
    """No positional arguments, no **kwargs, no Any; a docstring that says what it promises."""
    signature = inspect.signature(method)
    kinds = [p.kind for p in list(signature.parameters.values())[1:]]
    assert set(kinds) <= {inspect.Parameter.KEYWORD_ONLY}
    annotations = [p.annotation for p in list(signature.parameters.values())[1:]] + [signature.return_annotation]
    assert inspect.Parameter.empty not in annotations
    assert not any("Any" in str(a) for a in annotations)
    assert method.__doc__


@pytest.mark.parametrize("port", PORTS, ids=lambda p: p.__name__)
def test_an_adapter_that_lacks_one_method_cannot_be_made(port: type) -> None:
    """At start-up, naming the method; whole, it can."""
    methods = {name: (lambda self, **_: None) for name in methods_of(port)}
    type("Whole", (port,), methods)()
    for name in methods:
        lacking = {n: f for n, f in methods.items() if n != name}
        with pytest.raises(TypeError, match=rf"abstract class Lacking.*\b{name}\b"):
            type("Lacking", (port,), lacking)()
