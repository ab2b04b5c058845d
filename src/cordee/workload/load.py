"""Load model shapes from the catalogue that Cordee ships, or from a config.json; this file does I/O."""

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from cordee.errors import CatalogueError, ShapeError
from cordee.near import close
from cordee.workload.families import shape_from_config
from cordee.workload.model import ModelShape

_DATA = Path(__file__).parent / "data"
NEAR = 4


def load_shape(model: str) -> ModelShape:
    """Return the shape of a catalogue name (`llama-3-70b`), of a config.json, or of a folder that holds one.

    Raises:
        CatalogueError: neither a known name nor a path that exists.
        ShapeError: the config.json cannot be read as a model.
    """
    entry = _catalogue().get(model.lower())
    if entry is not None:
        return shape_from_config(entry, name=model.lower())
    path = _config_path(model)
    config, quantised = _read_json(path), path.with_name("hf_quant_config.json")
    if "quantization_config" not in config and quantised.is_file():  # ModelOpt writes a file of its own
        config = {**config, "quantization_config": _read_json(quantised)}
    return shape_from_config(config, name=path.parent.name or path.stem)


def load_config(model: str) -> dict[str, Any]:
    """Return the config.json that `load_shape` reads, whether or not its family is known here.

    Raises:
        CatalogueError: neither a known name nor a path that exists.
        ShapeError: the file cannot be read.
    """
    entry = _catalogue().get(model.lower())
    if entry is not None:
        return {key: value for key, value in entry.items() if key not in ("source", "as_of")}
    return _read_json(_config_path(model))


def _config_path(model: str) -> Path:
    """Return the config.json that a path names, or that its folder holds.

    Raises:
        CatalogueError: nothing is there.
        ShapeError: a folder without one.
    """
    path = Path(model)
    if model and path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ShapeError(f"{model} has no config.json", hint="give the folder of a Hugging Face model")
    if not path.is_file():
        raise _unknown(model)
    return path


def _unknown(model: str) -> CatalogueError:
    if ":" in model:
        return CatalogueError(
            f"{model!r} is no model with formulas",
            hint=f"`cordee plan {model} --gpus 8xH100 --trace` traces the model that a function builds",
        )
    first, *others = close(model.lower(), _catalogue(), NEAR) or [""]
    near = f"did you mean {first}? " if first else ""
    near += f"also near: {', '.join(others)}; " if others else ""
    hint = "give a path to a config.json, or a name that `cordee plan --models` lists"
    return CatalogueError(f"unknown model {model!r}", hint=near + hint)


def model_path(model: str) -> str | None:
    """Return the absolute path of the file or folder that `load_shape` reads; None for a name in the catalogue."""
    return None if model.lower() in _catalogue() else str(Path(model).absolute())


def model_names() -> tuple[str, ...]:
    """Return the names in the catalogue."""
    return tuple(_catalogue())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ShapeError(f"{path} cannot be read: {error}", hint="it must be a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise ShapeError(f"{path} is not a JSON object", hint="it must be a Hugging Face config.json")
    # A multimodal config has its language model one level down; what is said beside it holds for the model as a whole.
    text = config.get("text_config")
    if not isinstance(text, dict) or "model_type" not in text:
        return config
    beside = {
        key: config[key] for key in ("vision_config", "tie_word_embeddings", "quantization_config") if key in config
    }
    return beside | text


@cache
def _catalogue() -> dict[str, dict[str, Any]]:
    files = ("shapes.toml", "shapes_serving.toml")
    return {name: entry for file in files for name, entry in tomllib.loads((_DATA / file).read_text("utf-8")).items()}
