"""The places at which batch-invariant attention begins anew; they follow from positions alone."""

TILE = 64  # positions that are weighed together
NEAR = 4096  # positions whose splits are short
NEAR_SPLIT, FAR_SPLIT = 128, 512  # positions of a split before and behind that
