"""vLLM, from outside: KV planning, attention backend, models, connector and the plugin that registers them.

    versions   which vLLM is installed, and whether it is one that these adapters know
    hma        honest specs -> vLLM's hybrid KV-cache manager -> a checked KVCachePlan
    plugin     the entry point that vLLM calls

Importing this package does not import vLLM.
"""
