"""Where KV blocks live: allocator, block tables, prefix cache, page growth, swap space. No torch."""

from minipaged.memory.allocator import BlockAllocator, BlockPool, OutOfBlocksError
from minipaged.memory.block_table import BlockCopy, BlockTable
from minipaged.memory.kv_manager import KVManager
from minipaged.memory.page_growth import Chunked, OnDemand, PageGrowth, Reserve
from minipaged.memory.prefix_cache import CachedBlock, PrefixCache
from minipaged.memory.prefix_hits import Admission, Hit, KVSequence
from minipaged.memory.swap_space import SwapSpace

__all__ = [
    "Admission",
    "BlockAllocator",
    "BlockCopy",
    "BlockPool",
    "BlockTable",
    "CachedBlock",
    "Chunked",
    "Hit",
    "KVManager",
    "KVSequence",
    "OnDemand",
    "OutOfBlocksError",
    "PageGrowth",
    "PrefixCache",
    "Reserve",
    "SwapSpace",
]
