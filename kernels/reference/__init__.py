"""Every operation in plain torch: the definitions that faster kernels are compared with.

`decoder` holds the decoder's own operations as people run them on a CPU; `paged` those of the cache's kernels.
"""

from kernels.reference.decoder import (
    AttentionPlan,
    attention,
    copy_blocks,
    linear,
    plan_attention,
    rms_norm,
    rotary,
    rotary_tables,
    store_kv,
    swiglu,
)

__all__ = [
    "AttentionPlan",
    "attention",
    "copy_blocks",
    "linear",
    "plan_attention",
    "rms_norm",
    "rotary",
    "rotary_tables",
    "store_kv",
    "swiglu",
]
