"""Every operation in plain torch: the definitions that faster kernels are compared with.

`decoder` and `recurrence` hold operations as people run them on a CPU; `paged` and `ssm` those of the kernels.
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
