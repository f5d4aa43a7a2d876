"""Layout: every element has exactly one place, on every world size."""

import itertools

import pytest

from deepspeed.runtime.zero.layout import plan_buckets, plan_groups

GROUPS = {
    "odd": [[5, 3, 7]],
    "scalar": [[1]],
    "two groups": [[6, 1], [5, 4]],
    "empty group": [[], [3]],
    "many": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [11, 1, 1]],
}


def numbered(groups):
    counter = itertools.count()
    return [[(next(counter), numel) for numel in group] for group in groups]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shards_tile_each_group_without_gap_or_overlap(groups, world):
    for layout, group in zip(plan_groups(numbered(groups), world), groups, strict=True):
        owned = [element for rank in range(world) for element in range(*layout.shard_bounds(rank))]
        assert owned == list(range(sum(group)))
        assert layout.padded_numel >= layout.full_numel
        assert layout.padded_numel % (2 * world) == 0


@pytest.mark.parametrize(
    ("numels", "world", "padded", "shard"),
    [
        ([5, 3, 7], 1, 16, 16),
        ([5, 3, 7], 2, 16, 8),
        ([5, 3, 7], 3, 18, 6),
        ([1], 2, 4, 2),
        ([1], 3, 6, 2),
        ([8], 3, 12, 4),
        ([5, 3, 7, 4], 3, 24, 8),
    ],
)
def test_padding_and_shards_are_those_of_stock(numels, world, padded, shard):
    """Figures observed on DeepSpeed 0.19.8."""
    (layout,) = plan_groups(numbered([numels]), world)
    assert (layout.padded_numel, layout.shard_extent) == (padded, shard)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("bounds", [(0, 4), (2, 9), (0, 1000), (3, 3)])
def test_segments_cover_a_range_in_order(groups, bounds):
    start, end = bounds
    for layout in plan_groups(numbered(groups), 1):
        elements = []
        for segment in layout.segments(start, end):
            first = segment.slot.start + segment.param_start
            assert first - start == segment.offset
            elements += range(first, first + segment.numel)
        assert elements == list(range(start, min(end, layout.full_numel)))


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("bucket_numel", [1, 7, 1000])
def test_buckets_hold_every_element_once_at_its_owner(groups, world, bucket_numel):
    layouts = plan_groups(numbered(groups), world)
    seen = []
    for plan in plan_buckets(layouts, bucket_numel):
        assert plan.numel == sum(slot.numel for slot in plan.slots)
        assert len(plan.slots) == 1 or plan.numel <= bucket_numel
        filled = 0
        for item in plan.items:
            assert item.bucket_start == filled
            assert plan.owner_bounds[item.owner] <= filled < plan.owner_bounds[item.owner + 1]
            filled += item.numel
            low, high = layouts[item.slot.group].shard_bounds(item.owner)
            first = item.slot.start + item.param_start
            assert low <= first and first + item.numel <= high
            assert item.shard_start == first - low
            seen += [(item.slot.group, element) for element in range(first, first + item.numel)]
        assert filled == plan.numel
    expected = [
        (index, element) for index, layout in enumerate(layouts) for element in range(layout.full_numel)
    ]
    assert sorted(seen) == expected


def test_buckets_follow_reverse_model_order():
    layouts = plan_groups(numbered([[2, 2, 2], [2, 2]]), 2)
    order = [slot.index for plan in plan_buckets(layouts, 4) for slot in plan.slots]
    assert order == [4, 3, 2, 1, 0]
