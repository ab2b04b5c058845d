"""One training on every kind of GPU: which cards hold it, how long a sequence, how large a batch, at what price.

Each kind is asked for the fewest GPUs of one node on which some layout fits. The limits of that layout follow: the
longest sequence with the fewest sequences in a micro-batch, and the most sequences in a micro-batch of the length that
is asked for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from cordee.errors import CatalogueError, LayoutError
from cordee.hardware.catalog import Gpu, Price, price_of
from cordee.plan.buffers import cuda_bytes_of
from cordee.plan.candidates import Candidate
from cordee.plan.layout import Layout
from cordee.plan.longest import longest_context, variants
from cordee.plan.memory import gpu_state_bytes, peak_bytes
from cordee.plan.memory_interval import held_surely
from cordee.plan.optimum import Case
from cordee.plan.request import Request
from cordee.plan.search import best_layout, best_sure, default_choices, evaluate, fewest_gpus_to_hold
from cordee.plan.space import Choices
from cordee.plan.training import Training
from cordee.plan.wanted import LayoutWanted

LARGEST_MICRO_BATCH = 4096


@dataclass(frozen=True)
class Card:
    """A kind of GPU: the fewest of them that hold the training, and how far these go.

    Attributes:
        gpus: the fewest of one node on which a layout fits; where none does, all of a node.
        candidate: the best layout on so many, or the one nearest to fitting.
        price: of one GPU; None: unknown.
        seq_tokens: the longest sequence that this layout holds, with everything recomputed if that is longer.
        micro_batch: the most sequences of the asked length that it holds at once, in the same way.
        sure_seq_tokens, sure_micro_batch: the same at the upper end of the plan's interval.
    """

    gpu: Gpu
    gpus: int
    training: Training
    candidate: Candidate
    price: Price | None
    seq_tokens: int = 0
    micro_batch: int = 0
    sure_seq_tokens: int = 0
    sure_micro_batch: int = 0

    @property
    def fits(self) -> bool:
        """Return whether so many of them hold it."""
        return self.candidate.fits

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars of all of them in an hour; None without a price."""
        return None if self.price is None else self.price.usd_per_gpu_hour * self.gpus

    @property
    def usd_per_billion_tokens(self) -> float | None:
        """Dollars of training on 10^9 tokens; None without a price, or where it does not fit."""
        return self.candidate.usd_per_billion_tokens


@dataclass(frozen=True)
class Cards:
    """Every kind of GPU, those that fit first: the cheapest to rent first, and those without a price by memory."""

    request: Request
    fitting: tuple[Card, ...]
    rejected: tuple[Card, ...]
    unable: tuple[tuple[str, str], ...]  # kinds that cannot compute it, each with the reason

    @property
    def smallest(self) -> Card | None:
        """The card with the least memory of all, one of which is enough; None if no single one is."""
        return _smallest(self.fitting)

    @property
    def smallest_sure(self) -> Card | None:
        """The same of the cards on which it is not tight."""
        return _smallest(card for card in self.fitting if not card.candidate.tight)

    @property
    def cheapest(self) -> Card | None:
        """The fitting cards that cost least in an hour; None if none has a price."""
        return next((card for card in self.fitting if card.price is not None), None)


def ask_cards(request: Request, gpus: Sequence[Gpu]) -> Cards:
    """Ask a request of each of these kinds of GPU, whatever GPU and number it names itself.

    Raises:
        LayoutError: settings that contradict each other on every kind of GPU.
        ShapeError: a model that is planned for serving only.
    """
    found, unable, nearest = [], [], _Nearest()
    last: LayoutError | None = None
    for gpu in gpus:
        try:
            found.append(_card(replace(request, gpu=gpu), gpu, nearest))
        except CatalogueError as error:
            unable.append((gpu.name, error.message))
        except LayoutError as error:
            unable.append((gpu.name, error.message))
            last = error
    if not found:
        raise last or CatalogueError("no GPU of the catalogue computes this", hint="use another --precision")
    fitting = sorted((card for card in found if card.fits), key=_rank)
    rejected = sorted((card for card in found if not card.fits), key=lambda card: card.candidate.shortfall_bytes)
    return Cards(request, tuple(fitting), tuple(rejected), tuple(unable))


def _smallest(cards: Iterable[Card]) -> Card | None:
    alone = (card for card in cards if card.gpus == 1)
    return min(alone, key=lambda card: (card.gpu.memory_bytes, _rank(card)), default=None)


def _rank(card: Card) -> tuple[bool, float, int, str]:
    """Return the sort key: by dollars an hour, then what has no price by its memory."""
    usd = card.usd_per_hour
    return (usd is None, usd or 0.0, card.gpus * card.gpu.memory_bytes, card.gpu.name)


@dataclass
class _Nearest:
    """The layouts nearest to fitting on kinds whose memory holds not even the state: they differ in no byte.

    The search is the same for all kinds that have the same choices and the same CUDA context, so it runs once.
    """

    found: dict[tuple[Choices, int, Training, float], Layout] = field(default_factory=dict)

    def of(self, case: Case, wanted: LayoutWanted) -> Layout:
        """Return the layout that needs the fewest bytes.

        Raises:
            LayoutError: no layout divides.
        """
        key = (default_choices(case), case.gpus, case.training, cuda_bytes_of(case.gpu))
        if key not in self.found:
            self.found[key] = best_layout(case, wanted).nearest.layout
        return self.found[key]


def _holds_state(case: Case, wanted: LayoutWanted) -> bool:
    """Return whether so many GPUs may hold the training: all of their memory is larger than its state."""
    if wanted.offload not in (None, "none"):
        return True
    return case.gpus >= fewest_gpus_to_hold(gpu_state_bytes(case.shape, case.training), case.gpu)


def _card(request: Request, gpu: Gpu, nearest: _Nearest) -> Card:
    """Return the fewest GPUs of a node that hold the training, in powers of two; in a layout that fits surely if any.

    Raises:
        LayoutError: no number of them divides the batch and the model.
    """
    counts = [2**n for n in range(gpu.gpus_per_node.bit_length()) if 2**n <= gpu.gpus_per_node]
    found: tuple[Case, Candidate] | None = None
    for count in counts:
        case = replace(request, gpus=count).case(request.settings.framework or "torch")
        large_enough = _holds_state(case, request.layout)
        if not large_enough and count < counts[-1]:
            continue
        try:
            if large_enough:
                candidate = best_sure(case, request.layout, request.price)
                candidate = candidate or best_layout(case, request.layout, request.price).nearest
            else:
                candidate = evaluate(case, nearest.of(case, request.layout))
        except LayoutError:
            # Some numbers of GPUs do not divide a batch or a model that others do.
            if count == counts[-1] and found is None:
                raise
            continue
        found = case, candidate
        if candidate.fits:
            break
    assert found is not None, "the last count raises or answers"
    case, candidate = found
    card = Card(gpu, case.gpus, case.training, candidate, price_of(request.prices, gpu, request.capacity))
    if not candidate.fits:
        return card
    layouts = variants(candidate.layout, case.training.sequences_together)
    if request.layout.recompute is not None:
        layouts = layouts[:1]
    longest = [longest_context(case, layout) for layout in layouts]
    sure = replace(case, gpu=held_surely(case.gpu, case.training))
    return replace(
        card,
        seq_tokens=max(each.seq_tokens for each in longest),
        micro_batch=max(_largest_micro_batch(case, layout) for layout in layouts),
        sure_seq_tokens=max(each.sure_seq_tokens for each in longest),
        sure_micro_batch=max(_largest_micro_batch(sure, layout) for layout in layouts),
    )


def _largest_micro_batch(case: Case, layout: Layout) -> int:
    """Return the most sequences that a GPU holds at once in this layout; memory never falls as they grow."""
    unit = case.training.sequences_together

    def holds(units: int) -> bool:
        size = units * unit
        batch = replace(case.training, global_batch=layout.dp * size * (2 * layout.pp if layout.pp > 1 else 1))
        sized = replace(layout, micro_batch=size)
        return float(peak_bytes(case.shape, sized, batch, cuda_bytes_of(case.gpu))) <= case.gpu.visible_bytes

    low, high = 0, LARGEST_MICRO_BATCH // unit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low * unit
