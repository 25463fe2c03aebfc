"""Stock vLLM's NIXL worker as a peer to measure: its own methods on an object that holds what those methods read.

The worker is made without its constructor, which would want a whole engine; what is timed is vLLM's code, unchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from gk_adapters.vllm.versions import Era, require_era
from gk_core.errors import MissingDependencyError
from gk_core.region import KVRegion

__all__ = ["NoPost", "StockNixlWorker"]

_LOCAL, _REMOTE = "ours", "theirs"


class NoPost:
    """An agent that prepares transfers and posts none, so that planning alone is measured."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.make_prepped_xfer = agent.make_prepped_xfer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        """Nothing moves."""
        return "DONE"


class StockNixlWorker:
    """One rank, two KV cache groups, one region per K or V half, matching TP sizes.

    Args:
        agent: NIXL agent; the peer must be known to it already.
        regions: ours.

    Raises:
        MissingDependencyError: vLLM is not installed.
        UnsupportedError: another vLLM than 0.26 to 0.28.
    """

    def __init__(self, agent: Any, regions: Sequence[KVRegion]) -> None:
        try:
            from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata, pull_worker, tp_mapping
        except ImportError as error:
            raise MissingDependencyError(f"this benchmark needs vLLM: {error}; install gk-decode[vllm]") from error
        require_era(Era.SHAPES, "this benchmark's peer")
        self._metadata, self._tp_mapping = metadata, tp_mapping
        kind: Any = pull_worker.NixlPullConnectorWorker
        worker = self.worker = kind.__new__(kind)
        worker.nixl_wrapper = agent
        worker.nixl_memory_type = "DRAM"
        worker.engine_id, worker.tp_rank, worker.device_id, worker.world_size = _LOCAL, 0, 0, 1
        worker.block_size = 128
        worker.num_blocks, worker.num_regions = regions[0].num_blocks, len(regions)
        worker.block_len_per_layer = [r.block_bytes for r in regions]
        worker.kv_caches_base_addr = {_LOCAL: {0: [r.base_address for r in regions]}}
        worker._has_mamba = worker.use_mla = worker._bidirectional_kv_xfer_enabled = False
        worker._physical_blocks_per_logical_kv_block = 1
        worker._engine_last_active = {}
        worker._recving_transfers = defaultdict(list)
        worker.dst_num_blocks = {_LOCAL: regions[0].num_blocks}
        worker.kv_cache_config = SimpleNamespace(kv_cache_groups=[None, None])
        worker.transfer_topo = SimpleNamespace(
            get_engine_info=lambda _: SimpleNamespace(
                remote_tp_size=1, remote_block_size=128, remote_physical_blocks_per_logical=1
            ),
            tp_ratio=lambda _: 1,
            block_size_ratio=lambda _: 1,
        )

    def register_local(self) -> Any:
        """`register_local_xfer_handler`: an Nx3 array of all blocks and NIXL's list of it."""
        return self.worker.register_local_xfer_handler(self.worker.block_size)

    def connect(self, remote_name: str, remote: Sequence[KVRegion]) -> None:
        """What `add_remote_agent` leaves behind, for a peer whose regions pair with ours one to one."""
        worker = self.worker
        mapping = self._tp_mapping.TPMapping(
            source_ranks_per_group=((0,), (0,)),
            all_source_ranks=(0,),
            rank_to_attention_slot={0: 0},
            rank_offset_factor=0,
        )
        handle, worker.src_blocks_data = self.register_local()
        worker.src_xfer_handles_by_block_size = {worker.block_size: handle}
        worker.tp_mappings = {_REMOTE: mapping}
        worker.dst_num_blocks[_REMOTE] = remote[0].num_blocks
        worker._group_spec_types = ()
        rows = worker._build_fa_local.__func__(
            SimpleNamespace(
                transfer_topo=worker.transfer_topo,
                num_blocks=remote[0].num_blocks,
                device_id=0,
                block_len_per_layer=[r.block_bytes for r in remote],
                _stack_descs=worker._stack_descs,
            ),
            [r.base_address for r in remote],
            1,
        )
        descriptors = worker.nixl_wrapper.get_xfer_descs(rows, "DRAM")
        worker.dst_xfer_side_handles = {_REMOTE: {0: worker.nixl_wrapper.prep_xfer_dlist(remote_name, descriptors)}}

    def request(self, local: tuple[list[int], ...], remote: tuple[list[int], ...]) -> Any:
        """What vLLM's scheduler hands the worker for one request."""
        there = self._metadata.RemoteMeta(
            block_ids=remote, host="127.0.0.1", port=1, engine_id=_REMOTE, request_id="theirs"
        )
        return self._metadata.ReqMeta(local_block_ids=local, local_physical_block_ids=local, tp_size=1, remote=there)

    def read(self, request: Any) -> Any:
        """`_read_blocks_for_req`; the handle of the read."""
        self.worker._read_blocks_for_req("ours", request)
        return self.worker._recving_transfers.pop("ours")[0]

    def is_done(self, handle: Any) -> bool:
        """Whether a posted read has ended well."""
        return bool(self.worker.nixl_wrapper.check_xfer_state(handle) == "DONE")
