"""Block bookkeeping and scheduling, exactly as vLLM 0.30.0 does them. Standard library only."""

from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.events import EventLog, StepEvent
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.request_queue import create_request_queue
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import NewRequestData, SchedulerOutput

__all__ = [
    "BlockPool",
    "EventLog",
    "KVCacheBlock",
    "KVCacheManager",
    "NewRequestData",
    "Scheduler",
    "SchedulerOutput",
    "StepEvent",
    "create_request_queue",
]
