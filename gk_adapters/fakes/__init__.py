"""Fakes of every port: public, documented, and strict enough to fail where the real thing would.

    FakeFabric, FakeTransport     an in-memory network that moves real bytes, and on which everything can go wrong
    FakeSwitchboard, FakeSideChannel, FakeSideChannelServer     requests and replies, answered at once or never
    FakeMemory, FakeKVCache       bytes with an address, made up or real
    FakeBlockPool                 the real block pool, looking over its own shoulder
    FakePrefill, FakeKernel, FakeCallBuilder, FakeSampler       a model whose next token can be worked out by hand
    FakeClock                     time that moves when told to

Each module's docstring is a worked example that runs as a test. All of them pass the contract suites that the real
adapters pass.
"""

from gk_adapters.fakes.block_pool import FakeBlockPool
from gk_adapters.fakes.clock import FakeClock
from gk_adapters.fakes.fabric import FakeFabric, FaultRates, Landing, NoticeFate, ReadFate
from gk_adapters.fakes.kernel import (
    VOCAB_SIZE,
    FakeCallBuilder,
    FakeKernel,
    FakeSampler,
    FakeTensor,
    greedy_tokens,
    next_token,
    stamp,
)
from gk_adapters.fakes.memory import FakeKVCache, FakeMemory
from gk_adapters.fakes.prefill import FakePrefill
from gk_adapters.fakes.side_channel import FakeSideChannel, FakeSideChannelServer, FakeSwitchboard
from gk_adapters.fakes.transport import FakeRead, FakeTransport

__all__ = [
    "VOCAB_SIZE",
    "FakeBlockPool",
    "FakeCallBuilder",
    "FakeClock",
    "FakeFabric",
    "FakeKVCache",
    "FakeKernel",
    "FakeMemory",
    "FakePrefill",
    "FakeRead",
    "FakeSampler",
    "FakeSideChannel",
    "FakeSideChannelServer",
    "FakeSwitchboard",
    "FakeTensor",
    "FakeTransport",
    "FaultRates",
    "Landing",
    "NoticeFate",
    "ReadFate",
    "greedy_tokens",
    "next_token",
    "stamp",
]
