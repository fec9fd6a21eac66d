"""Every operation in plain torch: the definitions that faster kernels are compared with.

`decoder`, `attention` and `recurrence` hold operations as people run them on a CPU; `paged` and `ssm` those of the
kernels.
"""

from kernels.reference.attention import attention, store_kv
from kernels.reference.attention_plan import AttentionPlan, plan_attention
from kernels.reference.blocks import copy_blocks_out
from kernels.reference.decoder import geglu, linear, rms_norm, rotary, rotary_tables, swiglu

__all__ = [
    "AttentionPlan",
    "attention",
    "copy_blocks_out",
    "geglu",
    "linear",
    "plan_attention",
    "rms_norm",
    "rotary",
    "rotary_tables",
    "store_kv",
    "swiglu",
]
