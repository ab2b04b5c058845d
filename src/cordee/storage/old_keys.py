"""Keys that earlier versions of Cordee wrote into log records and manifests, and their names now."""

from typing import Any

OLD_KEYS = {
    "drained_us": "uploaded_us",
    "lacks": "missing_levels",
}


def renamed(fields: dict[str, object]) -> dict[str, Any]:
    """Return the fields under the names of this version.

    >>> renamed({"step": 3, "drained_us": 7})
    {'step': 3, 'uploaded_us': 7}
    """
    return {OLD_KEYS.get(key, key): value for key, value in fields.items()}
