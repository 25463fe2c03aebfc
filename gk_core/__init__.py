"""gk_core: giga-kernel decode for GPT-OSS as plain values and pure functions; needs attrs and nothing else.

Read in this order:

    errors, untrusted who has to act; showing what a stranger sent
    model_geometry    layers, heads, parity: even layers slide, odd are full, 2j and 2j+1 share buffer j
    kv_spec           honest per-layer specs, groups, shared buffers
    kv_layout         the address of every byte, packed FP8 included
    kv_budget         memory <-> blocks <-> tokens
    block_table       block tables, trimmed to the window; slots
    decode_step       rows -> attention control
    decode_mesh       TP x DP x EP, and who owns what
    weight_layouts, weight_parts, checkpoint_tensors, stack_builder, stacked_experts, stacked_weights
                      every stacked weight and where its elements come from
    kernel_contract   one decode call, and every refusal
    greedy            argmax over vocabulary shards
    region            registered memory as strided runs
    disaggregation    roles, and the one-token-short rule
    rank_grid, peer_layout, handshake
                      what a cache says of itself, and what peers must agree on
    peer_map, transfer_plan
                      which remote bytes land where
    hand_off          what travels through the client from prefill to decode
    integrity         optional checksums of what moved
    notices, lease, pull, peers
                      what the two sides tell each other, and their state machines
    metrics           names of what is counted
    ports             what the engines need of the world
    prefill_engine    prefill -> lease -> hand off
    decode_request    what goes into a decode engine and what comes out
    pull_run, pull_desk, offers, step_runner
                      one pull carried out, all of them, hand-offs outside a pull, a step in which a fault stays
                      with its row
    decode_engine     admit -> pull -> step -> emit -> finish
"""
