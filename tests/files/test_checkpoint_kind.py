"""The kind and the quantisation of a checkpoint are read from its config.json."""

import pytest

from redrafter.files.checkpoint_kind import scheme_name

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}, "input_activations": None}


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, 4 bits in groups of 128"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq, 8 bits"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}},
            "compressed-tensors pack-quantized, 4 bits in groups of 128",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
            "torchao Int8WeightOnlyConfig",
        ),
        ({"load_in_4bit": True}, "of an unnamed method"),
    ],
)
def test_a_quantisation_is_named_with_its_bits_and_groups(settings, name):
    assert scheme_name(settings) == name
