"""Words of commands, and numbers in the metrics that engines report in Prometheus' text form."""

from collections.abc import Iterator, Mapping


def words(settings: Mapping[str, object]) -> Iterator[str]:
    """Yield the words of settings: "" is a switch, None is left out, a list repeats its name.

    >>> list(words({"--port": 80, "--metrics": "", "--ctx-size": None, "--api-key": ["a", "b"]}))
    ['--port', '80', '--metrics', '--api-key', 'a', '--api-key', 'b']
    """
    for name, value in settings.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                yield from (name,) if each == "" else (name, str(each))


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
