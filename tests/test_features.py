"""The table of features that exclude each other, and the one message of all refusals."""

import itertools

import pytest

from redrafter import UnsupportedError, features
from redrafter.features import BATCH_INVARIANCE, IMAGES, TENSOR_PARALLELISM, Feature, FeatureSet

ALL = [value for value in vars(features).values() if isinstance(value, Feature)]
PAIRS = [(one, other) for one, other in itertools.permutations(ALL, 2) if FeatureSet("it", one).conflict(other)]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=[f"{one.words}, {other.words}" for one, other in PAIRS])
def test_a_refusal_names_both_features_and_what_to_type(one: Feature, other: Feature):
    has = FeatureSet("MyModel", one)
    with pytest.raises(UnsupportedError) as refused:
        has.add(other)
    said = str(refused.value)
    assert said.startswith(f"MyModel: {other.words} and {one.words} exclude each other: ")
    assert any(each.remedy and each.remedy in said for each in (one, other)), "nothing to type"
    assert other not in has
    has.add(other, found=False)


def test_each_pair_is_declared_once():
    twice = [pair for pair in PAIRS if pair[1] in pair[0].excludes and pair[0] in pair[1].excludes]
    assert not twice
    assert len(PAIRS) == 2 * sum(len(feature.excludes) for feature in ALL)


def test_a_feature_of_another_file_declares_its_own_conflicts():
    steering = Feature("steering", "leave out steer=True", {BATCH_INVARIANCE: "it is added to each row"})
    has = FeatureSet("it", TENSOR_PARALLELISM, steering)
    assert list(has) == [TENSOR_PARALLELISM, steering]
    assert has.conflict(BATCH_INVARIANCE).startswith("batch_invariant=True and tensor parallelism")
    with pytest.raises(UnsupportedError, match="batch_invariant=True and steering exclude each other: it is added"):
        FeatureSet("it", steering).check(BATCH_INVARIANCE)
    FeatureSet("it", steering).check(IMAGES)
