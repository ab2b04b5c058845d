"""Shared by all drawings: escaping, numbers as SVG wants them, and the one palette, light and dark."""

from markupsafe import escape

SPAN_COLOURS: dict[str, tuple[str, str]] = {  # class of GPU time: (light, dark)
    "useful": ("#2f8f6f", "#4bb08d"),
    "checkpoint": ("#e3a72f", "#e9b949"),
    "restart": ("#7d93b2", "#8aa2c4"),
    "stall": ("#b59ac4", "#b79fc9"),
    "loading": ("#a3b6d0", "#6d86ab"),
    "serving": ("#2b7fa8", "#4fa6d3"),
    "idle_held": ("#c3d8c9", "#586f62"),
    "draining": ("#d9b48a", "#c39a6c"),
    "lost": ("#cf4a3a", "#e8695a"),
    "unreported": ("#b8b2a6", "#77736a"),
    "idle": ("#e4e0d6", "#34373d"),
}
"""They differ by lightness as well as by hue."""

CLASSES = tuple(name for name in SPAN_COLOURS if name != "idle")
"""The classes of held time, in the order in which they are shown."""

SERVING_CLASSES = ("loading", "serving", "idle_held", "draining")
"""Those of replicas only."""

_INK = {  # name: (light, dark)
    "paper": ("#fbfaf6", "#15181d"),
    "card": ("#ffffff", "#1c2027"),
    "ink": ("#1e242c", "#e7e5df"),
    "soft": ("#646b75", "#9aa1ab"),
    "rule": ("#dedad0", "#343a44"),
    "accent": ("#b1442f", "#f08a73"),
}


def text(value: object) -> str:
    """Return the value escaped for HTML and XML, attributes included.

    >>> text('<b> "x" & y')
    '&lt;b&gt; &#34;x&#34; &amp; y'
    """
    return str(escape(printable(value)))


def printable(value: object) -> str:
    """Return the value's text without the characters that XML forbids."""
    return "".join(char for char in str(value) if char in "\t\n" or ord(char) >= 32)


def class_label(name: str) -> str:
    """Return the name of a class as people read it.

    >>> class_label("idle_held")
    'idle held'
    """
    return name.replace("_", " ")


def num(value: float) -> str:
    """Return a coordinate, to a hundredth.

    >>> num(3.0), num(1 / 3)
    ('3', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def palette_css() -> str:
    """Return the CSS variables `--useful`, `--ink`, ... for light pages, dark ones and paper."""
    names = _INK | SPAN_COLOURS
    light = "".join(f"--{name}:{pair[0]};" for name, pair in names.items())
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in names.items())
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"@media print{{:root{{{light}}}}}"
    )


def twins(wide: str, narrow: str) -> str:
    """Return two drawings of the same values, of which a page shows the one that it has room for."""
    css = (
        ".twins .narrow{display:none}"
        "@media(max-width:640px){.twins .wide{display:none}.twins .narrow{display:block;min-width:0}}"
    )
    return f'<div class="twins"><style>{css}</style>{wide}{narrow}</div>'
