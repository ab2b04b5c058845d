"""Counters and histograms of the gateway for Prometheus, under OpenTelemetry's gen_ai names and names as vLLM's."""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
INTERVALS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TOKENS = (1, 4, 16, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576)
WINDOW_S = 30.0

Labels = tuple[tuple[str, str], ...]


def labels(**pairs: str) -> Labels:
    """Return labels in a form that can be a key."""
    return tuple(pairs.items())


class Histogram:
    """Counts by upper bound."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self.bounds = name, about, bounds
        self._counts: defaultdict[Labels, list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
        self._sums: defaultdict[Labels, float] = defaultdict(float)

    def observe(self, value: float, of: Labels) -> None:
        """Count a value."""
        self._counts[of][bisect_left(self.bounds, value)] += 1
        self._sums[of] += value

    def lines(self) -> Iterable[str]:
        """Yield its lines."""
        yield from _head(self.name, self.about, "histogram")
        for of, counts in self._counts.items():
            total = 0
            for bound, count in zip([*map(str, self.bounds), "+Inf"], counts, strict=True):
                total += count
                yield f"{self.name}_bucket{_text((*of, ('le', bound)))} {total}"
            yield f"{self.name}_sum{_text(of)} {self._sums[of]:.9g}"
            yield f"{self.name}_count{_text(of)} {total}"


class Counter:
    """A sum that only grows, or with `kind` gauge a value."""

    def __init__(self, name: str, about: str, kind: str = "counter") -> None:
        self.name, self.about, self.kind = name, about, kind
        self.values: defaultdict[Labels, float] = defaultdict(float)

    def add(self, value: float, of: Labels = ()) -> None:
        """Add to it."""
        self.values[of] += value

    def lines(self) -> Iterable[str]:
        """Yield its lines."""
        yield from _head(self.name, self.about, self.kind)
        for of, value in self.values.items():
            yield f"{self.name}{_text(of)} {value:.12g}"


class Metrics:
    """All that the gateway counts."""

    def __init__(self) -> None:
        self.duration = Histogram("gen_ai_server_request_duration_seconds", "Time of a request.", SECONDS)
        self.ttft = Histogram("gen_ai_server_time_to_first_token_seconds", "Time to the first token.", SECONDS)
        self.tpot = Histogram("gen_ai_server_time_per_output_token_seconds", "Time per output token.", INTERVALS)
        self.tokens = Histogram("gen_ai_client_token_usage", "Tokens of a request.", TOKENS)
        self.requests = Counter("cordee_gateway_requests_total", "Requests by status.")
        self.moved = Counter("cordee_gateway_requests_moved_total", "Requests that went on with another replica.")
        self.refused = Counter("cordee_gateway_requests_refused_total", "Requests that were not admitted, by reason.")
        self.prompt = Counter("cordee_gateway_prompt_tokens_total", "Tokens of prompts.")
        self.cached = Counter("cordee_gateway_prompt_tokens_cached_total", "Tokens of prompts found in a prefix cache.")
        self.generated = Counter("cordee_gateway_generation_tokens_total", "Tokens of answers.")
        self.running = Counter("cordee_gateway_num_requests_running", "Requests with a replica.", "gauge")
        self.waiting = Counter("cordee_gateway_num_requests_waiting", "Requests without a replica.", "gauge")
        self.replicas = Counter("cordee_gateway_replica_usable", "1: the replica gets requests.", "gauge")

    def text(self) -> str:
        """Return them in Prometheus' text format."""
        return "\n".join(line for each in vars(self).values() for line in each.lines()) + "\n"


class Recent:
    """The values of one latency in the last 30 seconds, 512 at most, for a quantile."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=512)

    def add(self, value: float, now_s: float) -> None:
        """Note a value."""
        self._values.append((now_s, value))

    def quantile(self, fraction: float, now_s: float) -> float | None:
        """Return the value below which a fraction of them lies; None without values."""
        values = sorted(value for at_s, value in self._values if now_s - at_s <= WINDOW_S)
        return values[min(len(values) - 1, int(fraction * len(values)))] if values else None


class Rate:
    """Requests that ended, and their tokens, by second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, list[int]]] = deque(maxlen=round(WINDOW_S))

    def add(self, now_s: float, tokens: int) -> None:
        """Note the end of a request."""
        second = int(now_s)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, [0, 0]))
        self._seconds[-1][1][0] += 1
        self._seconds[-1][1][1] += tokens

    def per_s(self, now_s: float) -> tuple[float, float]:
        """Return requests and tokens per second over the last 30 seconds."""
        counted = [each for second, each in self._seconds if now_s - second <= WINDOW_S]
        return sum(each[0] for each in counted) / WINDOW_S, sum(each[1] for each in counted) / WINDOW_S


def _head(name: str, about: str, kind: str) -> Iterable[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"


def _text(of: Labels) -> str:
    if not of:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in of) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
