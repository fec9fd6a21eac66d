import pytest

from engine.kv_cache.layout import group_layers, neighbours
from kernels.layer_groups import LayerGroup, LayerPlace, owners

ALL, LOCAL = LayerGroup(), LayerGroup(64)


def test_layers_of_one_kind_are_one_group():
    layout = group_layers([LOCAL] * 5)
    assert (layout.stores, layout.groups) == (5, (LOCAL,))
    assert layout.places == tuple(LayerPlace(0, store) for store in range(5))


def test_alternating_layers_are_two_groups_without_waste():
    layout = group_layers([LOCAL, ALL, LOCAL, ALL])
    assert (layout.stores, layout.groups) == (2, (LOCAL, ALL))
    assert layout.places == (LayerPlace(0, 0), LayerPlace(1, 0), LayerPlace(0, 1), LayerPlace(1, 1))


@pytest.mark.parametrize(
    ("local", "every", "stores", "groups"),
    [(22, 4, 4, 7), (29, 5, 5, 7), (40, 8, 8, 6), (1, 3, 3, 2), (3, 1, 1, 4), (4, 6, 6, 2)],
)
def test_nothing_is_wasted_for_every_token_and_groups_are_few(local, every, stores, groups):
    layout = group_layers([LOCAL] * local + [ALL] * every)
    assert (layout.stores, len(layout.groups)) == (stores, groups)
    assert len(set(layout.places)) == local + every
    whole = [place for place in layout.places if layout.groups[place.group].window is None]
    assert len(whole) == every and every % stores == 0


def test_no_layer_attends():
    assert (group_layers([]).stores, group_layers([]).groups) == (0, ())


def test_neighbours_of_a_kind_share_one_store():
    kinds = [LOCAL, ALL, LOCAL, ALL, LOCAL]
    assert neighbours(kinds, 2) == (0, 1, 0, 1, 4)
    layout = group_layers(kinds, neighbours(kinds, 2))
    assert owners(layout.places) == (0, 1, 0, 1, 4)
    assert layout.stores * len(layout.groups) == 3
    assert neighbours(kinds, 1) == (0, 1, 2, 3, 4)
    assert neighbours([ALL] * 5, 3) == (0, 0, 0, 3, 3)


def test_a_layer_can_use_only_what_one_of_its_kind_stores():
    for wrong in ((0, 0), (1, 1)):
        with pytest.raises(ValueError, match="own kind"):
            group_layers([LOCAL, ALL], wrong)
