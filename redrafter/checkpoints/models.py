"""Load models from directories or the hub, whole or each process its own part of every weight, and bind them.

The parts follow transformers' tensor-parallel plan for the model.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils.hub import cached_file

from redrafter.checkpoints.gguf_weights import GgufWeights
from redrafter.checkpoints.packed_loading import packed_arguments
from redrafter.checkpoints.quantization import feature_of, quantize_model, refuse_saving, settle_groups
from redrafter.drafting.step_times import LARGE_BYTES
from redrafter.errors import ArgumentError, CheckpointError, UnsupportedError, did_you_mean, first_line, warn
from redrafter.features import GGUF_FILE, QUANTISED_WEIGHTS, TENSOR_PARALLELISM, FeatureSet
from redrafter.files.checkpoint_kind import check_config, check_path, check_source, load_error, wrong_kind_error
from redrafter.files.dtype_names import dtype_name, known_dtype
from redrafter.files.gguf_file import SUFFIX, find_gguf, part_names, read_gguf, reading
from redrafter.files.headers import read_headers, weight_files
from redrafter.kernels.cpu.grouped_product import multiplies_bfloat16
from redrafter.model.linear_layers import forward_bytes, is_quantized, quantization_of
from redrafter.model.options import SCHEMES, STORED_SCHEMES
from redrafter.model.passed_tests import passed_tests, stamps_of_model
from redrafter.model.quantized_layers import quantized_form
from redrafter.model.supported import base_of
from redrafter.model.target import Target
from redrafter.model.weights import hold_in_memory
from redrafter.parallel.local_shards import use_local_shards
from redrafter.parallel.ranks import join_ranks

# Keyword arguments of `load_model` itself; it hands all others to transformers.
LOAD_ARGUMENTS = ("dtype", "device", "trust_remote_code", "caller", "quantization", "tp_size")
_WITHOUT = "load it in one process, without tp_size and torchrun"
_HUB_ARGUMENTS = ("cache_dir", "revision", "subfolder", "token")


def bind(model: str | Path | PreTrainedModel | Target, **load: Any) -> Target:
    """Return a hub id, a directory, a GGUF file or a loaded model as a `Target`, loaded by `load_model` if need be.

    A target is returned as it is.
    """
    model = base_of(model)
    if not isinstance(model, str | Path | PreTrainedModel | Target):
        raise ArgumentError(f"a model is a hub id, a directory, a GGUF file or a module, got {type(model).__name__}")
    if isinstance(model, Target):
        check_quantization(load.get("quantization"), model)
        _check_unused(*(key for key in load if key not in LOAD_ARGUMENTS))
        return model
    if isinstance(model, PreTrainedModel):
        return Target(load_model(model, **load))
    before = stamps_of_model(model, load)
    loaded = load_model(model, **load)
    return Target(loaded, passed=passed_tests(loaded, before if before == stamps_of_model(model, load) else None, load))


def load_model(
    name: str | Path | PreTrainedModel,
    *,
    dtype: object,
    device: Any,
    trust_remote_code: bool,
    caller: Callable[..., object] | None = None,
    quantization: str | None = None,
    tp_size: int = 1,
    **kwargs: object,
) -> PreTrainedModel:
    """Load a causal LM from a hub id, a directory or a GGUF file.

    A loaded model is returned itself, without a PEFT wrapper.

    Args:
        name: Hub id, directory, GGUF file or loaded model.
        dtype: Dtype of the weights, as `AutoModelForCausalLM.from_pretrained` takes it. Where the weights of a GGUF
            file are computed as they are stored, on a CPU or with quantization="gguf", it is that of the others; "auto"
            is then float32 on a CPU, and bfloat16 elsewhere. Unused for a loaded model.
        device: Device to move the model to; None leaves it where it is.
        trust_remote_code: Whether code in the checkpoint may run.
        caller: The `from_pretrained` whose argument an unknown keyword may be a misspelling of.
        quantization: A scheme by which to quantise its weights, or the word for how they are stored; None for that too.
        tp_size: Processes that share the model; all of them call this. 1 for a whole model.
        kwargs: For `from_pretrained` of transformers' auto class. With a device map, or
            `quantization_config=GgufConfig(dequantize=True)`, weights of a GGUF file are dequantised.

    Raises:
        ArgumentError: If an argument is unknown, or does not suit the model.
        CheckpointError: If the model cannot be loaded, or lacks weights.
        UnsupportedError: If the model cannot be quantised, or shared by processes.
    """
    check_quantization(quantization, name)
    if not isinstance(name, str | Path):
        check_loaded_size(base_of(name), tp_size)
        _check_unused(*kwargs)
        with _device_errors(device):
            return base_of(name) if device is None else base_of(name).to(device)
    # Before transformers, whose error for a missing directory speaks of hub ids.
    (check_path if kwargs.get("local_files_only") else check_source)(str(name))
    check_config(Path(name))
    dtype = known_dtype(dtype) if isinstance(dtype, str) else dtype
    asked = quantization in STORED_SCHEMES
    if asked:
        _check_stored(str(quantization), name, kwargs | {"trust_remote_code": trust_remote_code})
        quantization = None
    _check_reserved_keywords(kwargs)
    if tp_size != 1:
        split_device(device)
        check_splits(str(name), tp_size, trust_remote_code, kwargs, quantization=quantization)
        from transformers.distributed.configuration_utils import DistributedConfig

        # Each rank's part is loaded onto its own GPU already.
        device = None
        kwargs = kwargs | {"distributed_config": DistributedConfig(tp_size=tp_size, tp_plan="auto")}
    file, as_saved, weights = find_gguf(name), dtype == "auto", None
    folder = Path(name, str(kwargs.get("subfolder") or ""))
    if not kwargs.keys() & {"variant", "use_safetensors"} and weight_files(folder)[0]:
        read_headers(folder)  # refuses what transformers would load from the wrong file
    if file is not None:
        as_stored = quantization is None and not kwargs.keys() & {"quantization_config", "device_map"}
        # A GPU's products with groups take less memory, and more time than those with ordinary weights.
        as_stored &= asked or torch.device(device or "cpu").type == "cpu"
        with _device_errors(device):
            weights = GgufWeights(read_gguf(file), device="cpu" if device is None else device, as_stored=as_stored)
        kwargs = {"quantization_config": GgufConfig(dequantize=True)} | kwargs
        dtype = weights.dtype if dtype == "auto" else dtype
    try:
        kwargs = packed_arguments(name, kwargs, trust_remote_code=trust_remote_code) or kwargs
        with reading(name, weights=weights) as (source, gguf):
            loaded: Any = auto_class(name, trust_remote_code, kwargs).from_pretrained(
                source, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **gguf, **kwargs
            )
        if weights is not None:
            weights.group_layers(loaded[0])
    except Exception as error:
        raise _unknown_keyword_error(error, kwargs, caller) or load_error("model", name, error) from error
    model, info = loaded
    # transformers only warns and initializes missing weights randomly.
    if info["missing_keys"]:
        if Path(name).is_dir() and (wrong_kind := wrong_kind_error(Path(name), "model")):
            raise wrong_kind
        raise CheckpointError(f"{name} is not whole: missing {', '.join(sorted(info['missing_keys'])[:5])}")
    if weights is not None:
        model.name_or_path = model.config.name_or_path = str(name)
        # A GGUF file has no generation config, and may have several end tokens.
        ends, config = weights.file.ends, model.config.get_text_config(decoder=True)
        pad = ends[0] if ends and config.pad_token_id is None else config.pad_token_id
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=ends if len(ends) > 1 else (*ends, None)[0], pad_token_id=pad
        )
    with _device_errors(device):
        # Quantized layer by layer on the way to the device, which need not hold the whole model in 16 bits.
        if quantization is not None:
            if tp_size != 1:
                use_local_shards(model)  # whose layers have groups of their own input features
            quantize_model(model, str(name), quantization, device)
        if device is not None:
            model.to(device)
        settle_groups(model, str(name), as_saved)
        refuse_saving(model, str(name))
        hold_in_memory(model)
        if model.device.type == "cpu":
            # transformers loads to the CPU unless it is given a device, so a GPU would be left idle without a word.
            if device is None and "device_map" not in kwargs and torch.cuda.is_available():
                warn(f"{name} is on the CPU: device='cuda' decodes on the GPU")
            elif as_saved and quantized_form(model) is None and not is_quantized(model.config):
                _recommend_dtype(model, str(name))
        return model


def _recommend_dtype(model: PreTrainedModel, name: str) -> None:
    """Warn where a model was saved in a dtype in which a CPU verifies drafts more slowly than it could.

    With bfloat16 instructions, a step of SmolLM2-135M over 8 tokens takes a third less time in bfloat16 than in
    float32. Without them, drafted decoding of it takes 2.8 times as long in bfloat16, and undrafted decoding as long.
    """
    native = multiplies_bfloat16()
    faster = torch.bfloat16 if native else torch.float32
    slower = (torch.float32, torch.float16) if native else (torch.bfloat16, torch.float16)
    if model.dtype in slower and forward_bytes(model) >= LARGE_BYTES:
        faster_name = dtype_name(faster)
        warn(
            f"{name} is decoded in {dtype_name(model.dtype)}, as it was saved, and this CPU verifies drafts faster in "
            f"{faster_name}: give dtype='{faster_name}' (--dtype {faster_name}), or the dtype that you want"
        )


def load_config(name: str | Path, *, trust_remote_code: bool = False, **hub_options: object) -> PretrainedConfig:
    """Load the config of a model, whose dtype is the one that `load_model` takes for "auto".

    Raises `CheckpointError` if it cannot be read. `hub_options` are further arguments of `AutoConfig.from_pretrained`.
    """
    try:
        with reading(name) as (source, gguf):
            config: PretrainedConfig = AutoConfig.from_pretrained(
                source, trust_remote_code=trust_remote_code, **gguf, **hub_options
            )
    except Exception as error:  # as many kinds as there are models
        raise load_error("model", name, error) from error
    if (file := find_gguf(name)) is not None:
        config.name_or_path, config.dtype = str(name), read_gguf(file).dtype
    return config


def config_to_load(name: str | Path, load: Mapping[str, Any]) -> PretrainedConfig:
    """Return the config of a model that is to be loaded with these arguments of `load_model`.

    Raises `CheckpointError` if it cannot be read.
    """
    given: PretrainedConfig | None = load.get("config")
    if given is not None:
        return given
    return load_config(name, **{key: load[key] for key in ("trust_remote_code", *_HUB_ARGUMENTS) if key in load})


def locate_gguf(model: Any, load: dict[str, Any]) -> Any:
    """Resolve `gguf_file=` of a `from_pretrained` to the path of that file, downloaded if need be.

    The argument, and those that only say where on the hub the file is, are taken out of `load`. Without it, the model
    is returned as it is.
    """
    name = load.pop("gguf_file", None)
    if name is None:
        return model
    if not isinstance(model, str | Path):
        _check_unused("gguf_file")
    if not str(name).endswith(SUFFIX):
        raise ArgumentError(f"gguf_file must name a {SUFFIX} file, got {str(name)!r}")
    where = {key: load.pop(key) for key in _HUB_ARGUMENTS if key in load}
    if Path(model).is_dir():
        return find_gguf(Path(model, where.get("subfolder") or "", name))
    try:
        first, *_ = [cached_file(str(model), part, **where) for part in part_names(str(name))]
        return Path(str(first))
    except Exception as error:
        raise load_error("model", model, error) from error


def auto_class(name: str | Path, trust_remote_code: bool, kwargs: dict[str, object]) -> Any:
    """Return the class for causal LMs, unless transformers knows the model type only among models that see images."""
    if "config" in kwargs or find_gguf(name) is not None:
        return AutoModelForCausalLM
    hub_options = {key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs}
    config: dict[str, Any] = {}  # for an adapter, whose base the class finds, or a missing file, which its error names
    with suppress(OSError):
        config, _ = PretrainedConfig.get_config_dict(str(name), **hub_options)
    sees = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    own_code = trust_remote_code and "AutoModelForCausalLM" in config.get("auto_map", {})
    return AutoModelForImageTextToText if config.get("model_type") in sees and not own_code else AutoModelForCausalLM


@contextmanager
def _device_errors(device: object) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AssertionError, TypeError) as error:
        raise device_error(f"device={str(device)!r}", device, error) from error


def device_error(typed: str, device: object, error: Exception) -> ArgumentError:
    """Return the error for a device that torch cannot use, with what to do about it.

    Args:
        typed: How the user named the device, such as `--device cuda`.
        device: The device, or its name.
        error: The error that torch raised.
    """
    kind, _, index = str(device).partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reason, advice = first_line(error).partition(". ")[0].rstrip("."), None
    if "device type at start of device string" in reason:
        reason, advice = "torch knows no such device", "take cpu, or cuda or cuda:0 where there is a GPU"
    elif kind not in ("cpu", "cuda", "None"):
        advice = "take cpu, or cuda or cuda:0 where there is a GPU"
    elif kind == "cuda" and not torch.backends.cuda.is_built():
        advice = f"torch {torch.__version__} is built without CUDA: install a build with it (pytorch.org), or take cpu"
    elif kind == "cuda" and not count:
        advice = "torch finds no NVIDIA GPU: see whether nvidia-smi and CUDA_VISIBLE_DEVICES show one, or take cpu"
    elif kind == "cuda" and index.isdecimal() and int(index) >= count:
        advice = f"the GPUs here are {', '.join(f'cuda:{number}' for number in range(count))}"
    return ArgumentError(f"{typed} cannot be used: {reason}" + ("" if advice is None else f"; {advice}"))


def check_loaded_size(model: PreTrainedModel, tp_size: int) -> None:
    """Raise `ArgumentError` unless a loaded model is split over as many processes as are asked for."""
    size = getattr(model, "_tp_size", None) or 1
    if tp_size not in (1, size):
        raise ArgumentError(
            f"tp_size={tp_size}: this model is loaded already, whole; give its directory or hub id, so that each "
            "process reads its own part"
        )


def check_splits(
    name: str, tp_size: int, trust_remote_code: bool, kwargs: Mapping[str, Any], *, quantization: str | None = None
) -> None:
    """Check that `tp_size` processes can share a model, and open the connections between them.

    Args:
        name: Directory or hub id of the model.
        tp_size: Number of processes.
        trust_remote_code: Whether code in the checkpoint may run.
        kwargs: Further arguments for transformers.
        quantization: The scheme by which its weights are quantised once they are loaded; None for none.

    Raises:
        ArgumentError: Another number of processes was started, or it does not divide the model's heads.
        CheckpointError: The model's config cannot be read.
        UnsupportedError: transformers has no plan for the model, or it is quantised.
    """
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ArgumentError(f"tp_size must be a positive integer, got {tp_size!r}")
    shared = FeatureSet(name, TENSOR_PARALLELISM)
    if find_gguf(name) is not None:
        shared.check(GGUF_FILE)
    config = config_to_load(name, {**kwargs, "trust_remote_code": trust_remote_code})
    text = config.get_text_config(decoder=True)
    if quantization is not None:
        shared.check(feature_of(quantization))
    if "quantization_config" in kwargs or getattr(config, "quantization_config", None):
        shared.check(QUANTISED_WEIGHTS)
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedError(
            f"transformers has no tensor-parallel plan (base_model_tp_plan) for {text.model_type} models, such as "
            f"{name}: {_WITHOUT}"
        )
    # Elsewhere every process attends with all heads.
    if any(key.rsplit(".", 1)[-1] == "k_proj" and style == "colwise" for key, style in plan.items()):
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        # Each rank needs whole heads of both kinds; ranks may share a key-value head, which each of them then holds.
        sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        if tp_size not in sizes:
            raise ArgumentError(
                f"tp_size={tp_size} does not divide the {heads} heads and {kv_heads} key-value heads of {name}: "
                f"take {', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
                if len(sizes) > 1
                else f"tp_size={tp_size}: {name} has one head, which cannot be split: {_WITHOUT}"
            )
    join_ranks(tp_size)


def split_device(device: object) -> None:
    """Raise `ArgumentError` for a device that a process cannot choose, as its rank says which GPU it has."""
    if device is not None and str(device) != ("cuda" if torch.cuda.is_available() else "cpu"):
        own = "with tensor parallelism each process has its own device; leave it out"
        raise ArgumentError(f"device={str(device)!r}: {own}")


def _unknown_keyword_error(
    error: Exception, keywords: Mapping[str, object], caller: Callable[..., object] | None
) -> ArgumentError | None:
    """Return an error for a keyword argument that neither transformers nor the model's class takes, with a suggestion.

    None where what transformers raised has another cause.
    """
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    if match is None or match[1] not in keywords:
        return None
    parameters = {} if caller is None else inspect.signature(caller).parameters
    arguments = [name for name, item in parameters.items() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    hint = did_you_mean(match[1], arguments)
    return ArgumentError(f"from_pretrained() has no argument {match[1]!r}, here or in transformers{hint}")


def _check_reserved_keywords(keywords: Mapping[str, object]) -> None:
    """Refuse keyword arguments of transformers that this library sets itself or has another name for."""
    if "torch_dtype" in keywords:
        raise ArgumentError(f"from_pretrained() takes dtype={keywords['torch_dtype']!r} for torch_dtype")
    if "output_loading_info" in keywords:
        raise ArgumentError("from_pretrained() returns an engine alone: leave out output_loading_info")
    if "drafter_tp_size" in keywords:
        raise ArgumentError("what drafts is whole in every process that shares the target: leave out drafter_tp_size")


def _check_unused(*arguments: str) -> None:
    """Raise `ArgumentError` for arguments of loading that are given with a loaded model, by their names."""
    if arguments:
        raise ArgumentError(f"leave {', '.join(arguments)} out: it is for a model's name, and this one is loaded")


def check_quantization(quantization: str | None, model: object, argument: str = "quantization") -> None:
    """Raise `ArgumentError` unless `quantization` is a scheme, a word for how a checkpoint is stored, or None.

    The model must not be loaded yet; it is None for what a checkpoint holds.
    """
    if quantization not in (*SCHEMES, *STORED_SCHEMES, None):
        raise ArgumentError(
            f"{argument} must be one of {', '.join(SCHEMES)}, which quantise at loading, or None, or one of "
            f"{', '.join(STORED_SCHEMES)}, which say how the checkpoint is stored, got {quantization!r}"
        )
    if not isinstance(model, str | Path | None) and quantization is not None:
        _check_unused(argument)


def _check_stored(quantization: str, name: str | Path, load: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` unless a model is stored as `quantization` says, as vLLM's argument of that name may."""
    stored: str | None = "gguf"
    if find_gguf(name) is None:
        entries = quantization_of(config_to_load(name, load))
        stored = None if entries is None else str(entries.get("quant_method") or "bitsandbytes")
    if stored != quantization:
        is_stored = "not quantised" if stored is None else f"stored as {stored}"
        raise ArgumentError(
            f"quantization={quantization!r} (--quantization {quantization}): {name} is {is_stored}; leave it out, "
            "as how a checkpoint is stored is recognised"
        )
