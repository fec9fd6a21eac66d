"""What compiled CPU kernels are given: int64 words at an address, these are their indices.

With arrays and tuples numba takes more than a minute to compile the kernels; with addresses and numbers, seconds.
"""

from __future__ import annotations

from numba.extending import register_jitable

TASK_WEIGHTS = 32768  # weights that one task of a product takes, about
SPLIT = 128  # cached positions that one task of attention takes for a token
TILE_ROWS = 96  # queries (tokens * query heads of a KV head) that one task of attention takes together
TILE_KEYS = 64  # cached positions that are widened at a time
PAD = 16  # floats between rows of a tile beyond their own, so that they don't fall into the same cache sets
SYNC_BYTES = 128  # of a phase: ticket and count of done tasks, each in a cache line of its own
UNPACKED_ROWS = 16  # of the cache that are unpacked at a time, behind the scores
RUN_ROOM = 2 * SPLIT * 24  # bytes for where the blocks of two splits lie

# Phases of a layer, in order.
(ATTN_NORMED, Q_DONE, K_DONE, V_DONE, STORED, ATTENDED, COMBINED, O_DONE, MLP_NORMED, GATED_DONE, DOWN_DONE, PHASES) = (
    range(12)
)
# Phases of a call around its layers, before theirs: embeddings, the last norm, rows that the head takes, logits.
EMBEDDED, LAST_NORMED, HEAD_ROWS, HEAD_DONE, END_PHASES = range(5)

# A matrix: its panels, their format, bytes of a panel and blocks of a row, rows, float32 bias (0: none), float32
# factor, and the addresses of the kernels that multiply a panel, and two panels by tiles of tokens (0: none).
ADDRESS, FORMAT, PANEL_BYTES, BLOCKS, ROWS_OUT, BIAS, FACTOR, DOT, TILE_PRODUCT, MATRIX_WORDS = range(10)

# A product on its own: float32 x [tokens, columns] -> out [tokens, rows], by way of rows of activations.
(JOB_MATRIX, JOB_X, JOB_TOKENS, JOB_COLUMNS, JOB_ROWS, JOB_OUT, JOB_FUNCTIONS) = range(7)
(JOB_SCRATCH, JOB_SCRATCH_BYTES, JOB_WORDS) = range(7, 10)

# A layer: seven matrices, then the float32 weights of its norms (0: queries and keys are not normed).
Q, K, V, O, GATE, UP, DOWN, MATRICES = range(8)  # noqa: E741
ATTN_NORM, MLP_NORM, Q_NORM, K_NORM = range(MATRICES * MATRIX_WORDS, MATRICES * MATRIX_WORDS + 4)
LAYER_WORDS = K_NORM + 1

# A model. EPS, ROPE_SCALE and what scores are multiplied by lie as float32 at SCALARS. EMBEDDING and HEAD are matrices.
(LAYERS, LAYER_RECORDS, HIDDEN, HEADS, KV_HEADS, DIM, SCALARS, INV_FREQ, NORM, FUNCTIONS) = range(10)
EMBEDDING, HEAD, MODEL_WORDS = range(10, 13)

# FUNCTIONS: addresses of the kernels that others call.
(QUANTISE_ROW, NORM_ROW, NORMED, PRODUCT, GATED, STORE, ATTENTION, ATTEND, ATTEND_TILE, COMBINED_ROWS) = range(10)
SCORE, ACCUMULATE, SCORE_TILE, ADD_VALUES, FUNCTION_WORDS = range(10, 15)

# A step of TOKENS tokens. float32: X [TOKENS, hidden] the residual stream, QKV, ATTENDED_OUT [TOKENS, heads, dim],
# PARTS [split tokens, heads, splits, dim + 2] (values, largest score, sum of weights), OUT like X, SINK_Q [TOKENS,
# heads, dim] the queries as sinks beyond the window are scored. ROWS and ACT are rows of activations, of the layer's
# width and the MLP's. SCRATCH of a thread: ANGLES, and from WORK on what the task at hand needs.
(MODEL, TOKENS, X, ROWS, QKV, QKV_WIDTH, ATTENDED_OUT, PARTS, SPLITS, ACT, OUT) = range(11)
(SCRATCH, SCRATCH_BYTES, WORK, SINK_Q) = range(11, 15)
# int64 [TOKENS] positions, rows of the block tables, and rows of PARTS (-1: part of a tile); records of the groups of
# layers and of each layer's place.
(POSITIONS, SEQUENCES, PART_ROWS, GROUPS, GROUP_COUNT, PLACES) = range(15, 21)
# The cache: int64 addresses of extents, blocks [STORES, 2, block size, KV heads, HEAD_BYTES] in each, and of extents of
# their scales, [STORES, SCALE_PLANES, block size, KV heads, SCALE_BYTES]; float32 BALANCE [layers, KV heads, dim] or 0.
(EXTENTS, EXTENT_BLOCKS, STORES, BLOCK_SIZE, KV_KIND, HEAD_BYTES) = range(21, 27)
(SCALE_EXTENTS, SCALE_PLANES, SCALE_BYTES, BALANCE) = range(27, 31)
# int64 TOKEN_IDS [TOKENS] if X is to be made of them, else 0; float32 LOGITS [LOGIT_COUNT, vocabulary] of the tokens at
# int64 LOGIT_ROWS.
TOKEN_IDS, LOGITS, LOGIT_ROWS, LOGIT_COUNT, STEP_WORDS = range(31, 36)

# A group of layers: int64 [TOKENS] slots, int32 tables [sequences, TABLE_WIDTH], what its queries see, and the items
# that attention is cut into for each KV head.
SLOTS, TABLES, TABLE_WIDTH, WINDOW, SINKS, ITEMS, ITEM_COUNT, GROUP_WORDS = range(8)
NO_WINDOW = 2**62

# An item: a token and one of its splits, or (SPLIT_INDEX -1) a tile of several tokens, over some KV heads.
FIRST_TOKEN, TOKEN_COUNT, SPLIT_INDEX, FIRST_KV, LAST_KV, ITEM_WORDS = range(6)

# A layer's place: its group, the index in the group's blocks, and the layer that stores there.
GROUP, STORE_INDEX, OWNER, PLACE_WORDS = range(4)


@register_jitable
def padded_to(count: int, multiple: int) -> int:
    return (count + multiple - 1) // multiple * multiple


@register_jitable
def padded(columns: int) -> int:
    return padded_to(columns, 32)


@register_jitable
def row_bytes(columns: int) -> int:
    """Of activations for each row: a code per column, scale and sum per block."""
    return (columns + 31) // 32 * 40


@register_jitable
def tiled(tokens: int) -> int:
    """Rows that a product of so many tokens reads: one, or whole tiles of four."""
    return 1 if tokens == 1 else (tokens + 3) // 4 * 4
