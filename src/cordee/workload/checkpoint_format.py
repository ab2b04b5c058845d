"""The number format of a checkpoint's weights, from the `quantization_config` of its config.json.

Hugging Face Transformers, compressed-tensors and NVIDIA ModelOpt write it, each with names of its own; engines read the
same fields. `cordee.plan.serving.formats` knows the sizes of the formats.
"""

from collections.abc import Mapping
from typing import Any

PLAIN = "bf16"
METHODS = {"mxfp4": "mxfp4", "fbgemm_fp8": "fp8", "modelopt_fp4": "nvfp4"}
WEIGHT_ONLY = {"awq", "gptq", "gptq_marlin", "awq_marlin", "auto-round", "auto_round", "hqq"}
ALGORITHMS = {
    "FP8": "fp8", "FP8_PB_WO": "fp8-block", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "NVFP4": "nvfp4", "W4A16_AWQ": "int4",
    "W4A16": "int4", "W8A16": "int8-wo", "W8A8_SQ_PER_CHANNEL": "int8", "INT8_SQ": "int8",
}  # fmt: skip


def native_format(config: Mapping[str, Any]) -> str:
    """Return the name of the format of a checkpoint's weights; a method that is not known gives its own name.

    >>> native_format({"quantization_config": {"quant_method": "awq", "bits": 4}})
    'int4'
    >>> native_format({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    'fp8-block'
    """
    found = config.get("quantization_config")
    if not isinstance(found, Mapping) or not found:
        return PLAIN
    inner = found.get("quantization")  # hf_quant_config.json of ModelOpt has it one level down
    if isinstance(inner, Mapping):
        found = {**found, **inner}
    method, algorithm = str(found.get("quant_method", "")).lower(), str(found.get("quant_algo", "")).upper()
    if algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm]
    if method in METHODS:
        return METHODS[method]
    if method == "fp8":
        return "fp8-block" if found.get("weight_block_size") else "fp8"
    if method in WEIGHT_ONLY:
        return {4: "int4", 8: "int8-wo"}.get(found.get("bits", found.get("w_bit", 4)), method)
    if method == "bitsandbytes":
        return "int4" if found.get("load_in_4bit") else "int8-wo"
    if method == "compressed-tensors":
        groups = {_group(each, str(found.get("format", ""))) for each in found.get("config_groups", {}).values()}
        return groups.pop() if len(groups) == 1 else "mixed precision"
    return method or algorithm.lower() or "unknown"


def _group(group: Mapping[str, Any], packing: str) -> str:
    """Return the format of one group of layers; activations of None are in 16 bits, so weights are unpacked."""
    weights = group.get("weights") or {}
    packing, bits, kind = str(group.get("format") or packing), weights.get("num_bits"), weights.get("type")
    if kind == "float":
        if bits == 8:
            return "fp8-block" if weights.get("strategy") == "block" else "fp8"
        return "mxfp4" if packing.startswith("mxfp4") else "nvfp4"
    if bits == 8:
        return "int8-wo" if group.get("input_activations") is None else "int8"
    return "int4" if bits == 4 else f"int{bits}"
