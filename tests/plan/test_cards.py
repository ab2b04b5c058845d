"""Which card holds a training: the fewest of each kind, how far they go, and their order."""

from dataclasses import replace

import pytest

from cordee.errors import CatalogueError
from cordee.hardware.load import load_catalogue
from cordee.plan import Request, Settings, cards
from cordee.plan.cards import Cards, ask_cards
from cordee.plan.cards_document import cards_document
from cordee.plan.memory import peak_bytes
from cordee.plan.memory_interval import held_surely
from cordee.plan.search import best_layout
from cordee.plan.wanted import layout_wanted
from cordee.workload.load import load_shape

CATALOGUE = load_catalogue()


def _cards(model: str = "llama-3-8b", names: tuple[str, ...] = (), **settings: object) -> Cards:
    shape = load_shape(model)
    gpus = tuple(gpu for gpu in CATALOGUE.gpus if not names or gpu.name in names)
    request = Request(
        shape=shape, gpu=gpus[0], gpus=1, prices=CATALOGUE.prices, settings=Settings(**settings),  # type: ignore[arg-type]
    )  # fmt: skip
    return ask_cards(request, gpus)


def test_every_kind_is_judged_once_and_the_cheapest_is_first() -> None:
    found = _cards(train="qlora", seq_tokens=4096, global_batch=16)
    every = (*found.fitting, *found.rejected)
    judged = [*(card.gpu.name for card in every), *(name for name, _ in found.unable)]
    assert sorted(judged) == sorted(gpu.name for gpu in CATALOGUE.gpus)
    assert all("bf16" not in CATALOGUE.find_gpu(name).flop_per_s for name, _ in found.unable)
    priced = [card.usd_per_hour for card in found.fitting if card.usd_per_hour is not None]
    assert priced == sorted(priced) and len(priced) > 5
    assert [card.price is None for card in found.fitting] == sorted(card.price is None for card in found.fitting)
    assert found.cheapest is found.fitting[0]


def test_the_smallest_card_has_no_smaller_one_that_fits() -> None:
    found = _cards(train="qlora", seq_tokens=4096, global_batch=16)
    small = found.smallest
    assert small is not None and small.gpus == 1
    request = found.request
    unable = {name for name, _ in found.unable}
    for gpu in (each for each in CATALOGUE.gpus if each.name not in unable):
        case = Request(shape=request.shape, gpu=gpu, gpus=1, settings=request.settings).case()
        assert best_layout(case).fits == (gpu.memory_bytes >= small.gpu.memory_bytes)


def test_limits_are_the_last_that_fit() -> None:
    (card,) = _cards(names=("RTX-3090",), train="qlora", seq_tokens=2048, global_batch=16).fitting
    shape, layout = load_shape("llama-3-8b"), layout_wanted("dp1 full", None, None).plainest(1)

    def peak(seq: int, micro_batch: int) -> float:
        training = Settings(train="qlora", seq_tokens=seq, global_batch=micro_batch).training(shape, 1)
        at = layout_wanted(f"dp1 mb{micro_batch} full", None, None).plainest(1)
        return float(peak_bytes(shape, at, training))

    assert layout.recompute == "full"
    assert peak(card.seq_tokens, 1) <= card.gpu.visible_bytes < peak(card.seq_tokens + 256, 1)
    assert peak(2048, card.micro_batch) <= card.gpu.visible_bytes < peak(2048, card.micro_batch + 1)
    surely = held_surely(card.gpu, card.training).visible_bytes
    assert peak(card.sure_seq_tokens, 1) <= surely < peak(card.sure_seq_tokens + 256, 1)
    assert peak(2048, card.sure_micro_batch) <= surely < peak(2048, card.sure_micro_batch + 1)


def test_a_card_that_holds_it_only_as_planned_is_named_as_tight_beside_one_that_holds_it_surely() -> None:
    request = _cards(names=("RTX-3090",), train="qlora", seq_tokens=2048, global_batch=16).request
    card = CATALOGUE.find_gpu("RTX-3090")
    needs = best_layout(replace(request, gpu=card).case(), layout_wanted("dp1 full mb1", None, None)).nearest
    small = replace(card, name="small", memory_bytes=needs.peak_bytes + 10**6, visible_fraction=1.0)
    found = ask_cards(request, (small, card))
    assert found.smallest is not None and found.smallest_sure is not None
    assert (found.smallest.gpu.name, found.smallest.candidate.tight) == ("small", True)
    assert found.smallest.candidate.gpu_memory_bytes < found.smallest.candidate.needed_interval_bytes[1]
    assert (found.smallest_sure.gpu.name, found.smallest_sure.candidate.tight) == ("RTX-3090", False)
    assert found.smallest.micro_batch == 1 and found.smallest.sure_micro_batch == 0
    document = cards_document(found)
    assert (document.smallest, document.smallest_sure) == ("small", "RTX-3090")
    assert [row.tight for row in document.cards] == [True, False]


def test_a_model_that_needs_several_cards_gets_the_fewest() -> None:
    found = _cards("llama-3-70b", ("H100", "RTX-4090", "MI300X"), train="lora", seq_tokens=4096, global_batch=16)
    assert {card.gpu.name: card.gpus for card in found.fitting} == {"MI300X": 1, "H100": 4}
    (rejected,) = found.rejected
    assert rejected.gpu.name == "RTX-4090" and rejected.gpus == 8 and rejected.candidate.shortfall_bytes > 0
    assert rejected.seq_tokens == rejected.micro_batch == 0


def test_cards_that_cannot_compute_it_say_so() -> None:
    found = _cards(names=("A100-80", "H100"), precision="fp8", seq_tokens=2048, global_batch=8, optimizer="adamw-8bit")
    assert [name for name, _ in found.unable] == ["A100-80"] and "no fp8 units" in found.unable[0][1]
    with pytest.raises(CatalogueError, match="no GPU of the catalogue"):
        _cards(names=("A100-80",), precision="fp8")


def test_kinds_whose_memory_is_less_than_the_state_need_no_search_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """405 and 70 billion parameters on one node of each kind: what is skipped changes no card."""
    searched: list[int] = []
    search = cards.best_layout
    monkeypatch.setattr(cards, "best_layout", lambda *given: searched.append(given[0].gpus) or search(*given))
    asked = (("llama-3-405b", ("H100", "RTX-4090")), ("llama-3-70b", ("A100-40", "B300")))
    few = [_cards(*each) for each in asked]
    n_few, searched[:] = len(searched), []
    monkeypatch.setattr(cards, "_holds_state", lambda _case, _wanted: True)
    assert [_cards(*each) for each in asked] == few
    assert n_few < len(searched) / 3
    assert not few[0].fitting and few[1].fitting


def test_state_on_the_host_is_searched_for_whatever_the_gpus_hold() -> None:
    """adamw's fp32 state of 8B is 128 GB: it fits on two RTX 4090s only with the optimizer on the host."""
    shape, gpu = load_shape("llama-3-8b"), CATALOGUE.find_gpu("RTX-4090")
    asked = Request(shape=shape, gpu=gpu, gpus=1, layout=layout_wanted("offload=optimizer", None, None))
    (card,) = ask_cards(asked, (gpu,)).fitting
    assert card.candidate.layout.offload == "optimizer" and card.gpus * gpu.visible_bytes < 16 * 8.03e9
