"""Statistics of sequences: totals of several ones."""

from dataclasses import fields

from redrafter.scheduler.sequence import Stats


def test_a_total_has_every_count_and_the_depths_of_the_deepest_tree():
    counts = {each.name: number for number, each in enumerate(fields(Stats), 1) if each.default == 0}
    deep, shallow = (Stats(**counts, accepted_by_depth=depths) for depths in ([3, 2, 1], [5]))
    doubled = {name: 2 * count for name, count in counts.items()}
    assert Stats.total([deep, shallow]) == Stats(**doubled, accepted_by_depth=[8, 2, 1])
    assert Stats.total([]) == Stats()
