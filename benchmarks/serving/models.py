"""Names of models and GPUs as people write them, and the shapes and memory that they mean. Rules, not rows."""

import re
from dataclasses import replace

from cordee.errors import CatalogueError
from cordee.hardware.catalog import Gpu
from cordee.hardware.load import USUAL_VISIBLE, load_catalogue
from cordee.units import GiB
from cordee.workload.load import load_shape
from cordee.workload.model import ModelShape

# Searched in this order in the name in lower case; the first that is found decides.
PATTERNS = (
    (r"deepseek-?v4|deepseek_v4|kimi-?k3|diffusiongemma|voxcpm|puzzle|gemma-?4-?12b|gemma-?4-?e\d", None),
    (r"kimi-dev-72b", "qwen2.5-72b"),
    (r"r1-distill-(?:llama)-8b", "llama-3.1-8b"),
    (r"r1-distill-(?:llama)-70b", "llama-3.1-70b"),
    (r"r1-distill-qwen-(1\.5|7|14|32)b", r"qwen2.5-\1b"),
    (r"deepseek-coder-v2-lite|deepseek-v2-lite", "deepseek-v2-lite"),
    (r"deepseek-coder-v2|deepseek-v2", "deepseek-v2"),
    (r"deepseek-coder-(6\.7|33)b", r"deepseek-coder-\1b"),
    (r"deepseek-?v3\.2", "deepseek-v3.2"),
    (r"deepseek-?(r1|v3)", "deepseek-v3"),
    (r"kimi-k2", "kimi-k2"),
    (r"glm-5", "glm-5"),
    (r"glm-4\.[56]-air", "glm-4.5-air"),
    (r"glm-4\.[567]", "glm-4.5"),
    (r"minimax-m2", "minimax-m2.5"),
    (r"gpt-oss-(20|120)b", r"gpt-oss-\1b"),
    (r"gemma-?([234])-(\d+b(?:-a4b)?)", r"gemma-\1-\2"),
    (r"gemma-(\d)b", r"gemma-\1b"),
    (r"llama-4-(scout|maverick)", r"llama-4-\1"),
    (r"llama-?3\.2-(\d)b", r"llama-3.2-\1b"),
    (r"llama-?3\.[13]-(8|70)b", r"llama-3.1-\1b"),
    (r"llama-?3(?:\.1)?-(8|70|405)b", r"llama-3-\1b"),
    (r"llama-?2-(7|13|70)b|vicuna-(7|13)b", r"llama-2-\1b"),
    (r"codellama-(\d+)b", r"codellama-\1b"),
    (r"tinyllama", "tinyllama-1.1b"),
    (r"mixtral-8x(7|22)b", r"mixtral-8x\1b"),
    (r"(?:mistral|magistral|devstral)-small|mistral-24b", "mistral-small-24b"),
    (r"mistral-nemo", "mistral-nemo-12b"),
    (r"mistral-large", "mistral-large-123b"),
    (r"mistral-7b.*v0\.3", "mistral-7b-v0.3"),
    (r"mistral-7b|zephyr-7b|bonito-v1", "mistral-7b"),
    (r"(codestral-22b|ministral-8b)", r"\1"),
    (r"qwen3-coder-30b|qwen3-30b", "qwen3-30b-a3b"),
    (r"qwen3-coder-480b", "qwen3-coder-480b-a35b"),
    (r"qwen3-next-80b", "qwen3-next-80b-a3b"),
    (r"qwen3-vl-(8b|30b-a3b|32b|235b-a22b)", r"qwen3-vl-\1"),
    # Qwen 3.6 has the shape of 3.5: its config.json. 3.8-27B keeps KV in 16 of 64 layers, as 3.5 does.
    (r"qwen3\.[568x] ?-?(27b|35b-a3b|122b-a10b|397b-a17b)|qwen-agentworld-(35b-a3b)", r"qwen3.5-\1\2"),
    (r"qwen3-(0\.6|1\.7|4|8|14|32)b", r"qwen3-\1b"),
    (r"qwen3-235b", "qwen3-235b-a22b"),
    (r"qwq-32b", "qwen2.5-32b"),
    (r"qwen2\.5-vl-(3|7|72)b", r"qwen2.5-vl-\1b"),
    (r"qwen2\.5-(?:coder-|math-)?(0\.5|1\.5|3|7|14|32|72)b", r"qwen2.5-\1b"),
    (r"qwen2-(7|72)b", r"qwen2-\1b"),
    (r"qwen1\.5-(7|14|72)b", r"qwen1.5-\1b"),
    (r"phi-4-mini", "phi-4-mini"),
    (r"phi-4", "phi-4"),
    (r"phi-3-mini", "phi-3-mini"),
    (r"granite-3\.\d-(2|8)b", r"granite-3.3-\1b"),
    (r"yi-(?:1\.5-)?(6|34)b", r"yi-\1b"),
    (r"solar-10\.7b", "solar-10.7b"),
    (r"opt-13b", "opt-13b"),
)

# GiB that CUDA reports, from logs of engines, for cards that the catalogue of GPUs has no entry for.
VISIBLE_GIB = (
    (r"gh200.*144", 140.0), (r"gh200", 94.5), (r"gb200", 184.3), (r"gb300", 276.6), (r"h20\b.*141|h200", 139.8),
    (r"h20\b", 95.0), (r"h100.*nvl|h100.*94", 93.0), (r"h[18]00", 79.18), (r"a[18]00.*40", 39.49), (r"a[18]00", 79.2),
    (r"b200", 178.36), (r"b300", 267.7), (r"pro 6000", 94.97), (r"pro 5000", 47.2), (r"5090", 31.36), (r"5080", 15.47),
    (r"4090", 23.52), (r"3090", 23.58), (r"a6000|6000 ada", 47.4), (r"l40s?\b", 44.39), (r"a40\b", 44.35),
    (r"a10g?\b", 22.06), (r"l4\b", 22.05), (r"t4\b", 14.58), (r"v100.*32", 31.73), (r"v100", 15.77),
    (r"mi300", 191.98), (r"gb10", 119.7),
)  # fmt: skip


def find_shape(name: str) -> ModelShape | None:
    """Return the shape that a name means; None where it is not known."""
    lowered = name.lower().replace("_", "-")
    for pattern, catalogue_name in PATTERNS:
        match = re.search(pattern, lowered)
        if match:
            if catalogue_name is None:
                return None
            try:
                found = re.sub(r"\\(\d)", lambda group, match=match: match[int(group[1])] or "", catalogue_name)
                return load_shape(found)
            except CatalogueError:
                return None
    return None


def find_gpu(name: str, memory_gb: float | None) -> tuple[Gpu, int] | None:
    """Return a GPU of this name with the bytes that CUDA reports; a figure in GiB in the name is taken as it stands."""
    lowered = name.lower()
    stated = re.search(r"([0-9.]+) gib", lowered)
    sized = f"{lowered} {memory_gb:g}" if memory_gb else lowered
    usual = next((gib for pattern, gib in VISIBLE_GIB if re.search(pattern, sized)), None)
    if usual is None and memory_gb and not re.search(r"ascend|arc|tpu|gaudi", lowered):
        usual = memory_gb * USUAL_VISIBLE
    gib = float(stated[1]) if stated else usual
    if gib is None:
        return None
    # Only its name and its links matter here: with NVLink, or without.
    linked = re.search(r"[abh][1-8]00|gb?200|gh200|v100", lowered) is not None
    hopper = re.search(r"h[128]00|h20\b|b[23]00|gh200", lowered) is not None
    like = load_catalogue().find_gpu("H100" if hopper else "A100" if linked else "RTX-4090")
    memory_bytes = round((memory_gb or gib) * 1e9)
    return replace(like, name=name, memory_bytes=memory_bytes), round(gib * GiB)
