"""Files that run code when they are loaded: found by what is in them, whatever they are called.

A pickle can call any function of the machine that loads it, so an artifact has none unless its owner allows them; then
picklescan says which of them call what weights do not need.
"""

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cordee.errors import InputError, MissingExtraError
from cordee.storage.registry.store import Found
from cordee.units import plural

_SUFFIXES = {".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".dill"}
_ZIPPED = ("/data.pkl", ".pkl", ".pickle")
_PROTOCOL, _NEWEST_PROTOCOL = 0x80, 5


@dataclass(frozen=True, slots=True)
class Pickle:
    """A file with a pickle; `calls` are functions in it that weights do not need, empty if it was not scanned."""

    name: str
    calls: tuple[str, ...] = ()


def pickles_among(files: Iterable[Found]) -> list[Found]:
    """Return the files that hold a pickle."""
    return [each for each in files if _is_pickle(each.path)]


def check_pickles(files: Iterable[Found], *, allowed: bool) -> list[Pickle]:
    """Refuse pickles, or with `allowed` scan them, and refuse those that call what weights do not need.

    Raises:
        InputError: there are some that are not allowed, or dangerous ones.
        MissingExtraError: they are allowed, and the scanner is not installed.
    """
    found = pickles_among(files)
    if found and not allowed:
        names = ", ".join(each.name for each in found[:3]) + (", ..." if len(found) > 3 else "")
        raise InputError(
            f"{plural(len(found), 'file')} would run code when {'it is' if len(found) == 1 else 'they are'} loaded: "
            f"{names}",
            hint="save weights as safetensors; --allow-pickles scans them and pushes them as they are",
        )
    scanned = [Pickle(each.name, _calls(each.path)) for each in found]
    for each in scanned:
        if each.calls:
            raise InputError(
                f"{each.name} would call {', '.join(each.calls[:3])} when it is loaded",
                hint="weights need no such calls: find out where the file comes from, and do not load it",
            )
    return scanned


def _calls(path: Path) -> tuple[str, ...]:
    try:
        from picklescan.scanner import SafetyLevel, scan_file_path
    except ImportError:
        raise MissingExtraError(
            "pickles are scanned with picklescan, which is not installed", hint='pip install "cordee[artifacts]"'
        ) from None
    result = scan_file_path(str(path))
    if result.scan_err:
        raise InputError(f"{path} cannot be scanned", hint="it is damaged, or no pickle that torch would read")
    return tuple(f"{each.module}.{each.name}" for each in result.globals if each.safety == SafetyLevel.Dangerous)


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(2)
    if len(head) == 2 and head[0] == _PROTOCOL and head[1] <= _NEWEST_PROTOCOL:
        return True
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as zipped:
                return any(name.endswith(_ZIPPED) or name == "data.pkl" for name in zipped.namelist())
        except zipfile.BadZipFile:
            return path.suffix in _SUFFIXES
    return path.suffix in _SUFFIXES
