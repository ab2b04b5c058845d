"""Words of commands, and numbers in the metrics that engines report in Prometheus' text form."""

import re
from collections.abc import Iterable, Iterator, Mapping

_SECRET = re.compile(r"(^|[-_])(key|keys|token|secret|password)$", re.IGNORECASE)


def words(settings: Mapping[str, object]) -> Iterator[str]:
    """Yield the words of settings: "" is a switch, None is left out, a list repeats its name.

    >>> list(words({"--port": 80, "--metrics": "", "--ctx-size": None, "--api-key": ["a", "b"]}))
    ['--port', '80', '--metrics', '--api-key', 'a', '--api-key', 'b']
    """
    for name, value in settings.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                yield from (name,) if each == "" else (name, str(each))


def masked(argv: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command for a log: values of options such as --api-key are left out.

    >>> list(masked(["vllm", "--api-key", "abc", "--hf-token=abc", "--port", "80"]))
    ['vllm', '--api-key', '***', '--hf-token=***', '--port', '80']
    """
    hide = False
    for word in argv:
        name, equals, _ = word.partition("=")
        is_secret = name.startswith("-") and _SECRET.search(name) is not None
        if hide:
            yield "***"
        else:
            yield f"{name}=***" if is_secret and equals else word
        hide = is_secret and not equals and not hide


def sum_of(metrics: bytes, *names: str) -> int | None:
    """Return the sum of all samples of these metrics; None: there is none.

    >>> sum_of(b'# TYPE a gauge\\na{model="m"} 2.0\\na{model="n"} 1\\nab 7\\n', "a")
    3
    """
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in metrics.decode(errors="replace").splitlines()
        if line.startswith(names) and line.split("{")[0].split(" ")[0] in names
    ]
    return round(sum(found)) if found else None
