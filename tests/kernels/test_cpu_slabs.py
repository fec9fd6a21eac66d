"""Arrays side by side in slabs: whole cache lines, nobody's memory twice, and freed with the last array."""

import weakref

import numpy as np

from kernels.cpu.slabs import LINE, SLAB, Slabs, aligned_zeros


def test_arrays_share_slabs_and_overlap_nowhere():
    slabs, sizes = Slabs(), [1, 63, 64, 65, SLAB // 4 - 1, SLAB // 4, SLAB // 4, SLAB // 4, SLAB // 2, 7]
    arrays = [slabs.take(1, size) for size in sizes]
    assert len({id(array.base) for array in arrays[:5]}) == 1, "one slab"
    for i, array in enumerate(arrays):
        assert array.ctypes.data % LINE == 0 and array.shape == (1, sizes[i])
        array[:] = i
    assert all((array == i).all() for i, array in enumerate(arrays))


def test_a_slab_is_freed_with_its_last_array():
    slabs = Slabs()
    first, second = slabs.take(100), slabs.take(100)
    slab = weakref.ref(first.base)
    del first
    assert slab() is not None and second.base is slab()
    del second
    assert slab() is None
    assert slabs.take(10).ctypes.data % LINE == 0


def test_zeros_begin_with_a_cache_line_in_any_type():
    for dtype in (np.uint8, np.float32):
        array = aligned_zeros((3, 5), dtype)
        assert array.ctypes.data % LINE == 0 and array.shape == (3, 5) and array.dtype == dtype and not array.any()
