"""Seconds of one step of an engine: chunks of prompts and single tokens of answers, in one batch.

All tokens of a step pass the products together; attention is counted apart for prompts and for answers. A step ends
with the sampler and the host's own work. Nothing here queues: see `batching.py`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapreplace
from math import ceil

from cordee.plan.serving.case import ServingCase
from cordee.plan.serving.formats import WEIGHTS, Format
from cordee.plan.serving.speed.attention import (
    decode_attention,
    decode_attention_s,
    prefill_attention,
    prefill_attention_s,
)
from cordee.plan.serving.speed.grouped import Grouped, expected_imbalance, grouped_s
from cordee.plan.serving.speed.mixers import projections, scan_s, states_s
from cordee.plan.serving.speed.products import product_s
from cordee.plan.serving.speed.traffic import handover_s, scatter_s, sum_s
from cordee.workload.layers import LayerKind

# 16-bit words that a layer reads and writes for each token beside its products: two norms with their residuals (each
# reads two and writes two), the rotation of queries and keys, the activation of the MLP.
NORM_WORDS = 8
# Kernels of a layer that only move memory, in an engine that fuses norms with residuals and the rotation with the
# writing of the KV cache.
SMALL_KERNELS = 4


@dataclass(frozen=True)
class Speed:
    """Step times of one replica."""

    case: ServingCase
    _products: dict[tuple[int, int, int], float] = field(default_factory=dict, repr=False, compare=False, hash=False)

    def prefill_s(self, tokens: int, past: int = 0) -> float:
        """Return the seconds of one step with nothing but `tokens` of a prompt, `past` of which are in the cache."""
        return self.step_s([(tokens, past)])

    def decode_s(self, sequences: int, context_tokens: float, *, each: int = 1) -> float:
        """Return the seconds of one step for sequences with so many tokens of context in all; see `step_s`."""
        return self.step_s([], sequences, context_tokens, each=each)

    def step_s(
        self,
        prefill: Sequence[tuple[int, int]],
        sequences: int = 0,
        context_tokens: float = 0.0,
        *,
        each: int = 1,
    ) -> float:
        """Return the seconds of one step.

        Args:
            prefill: for each prompt in the batch its tokens in this step and those that are in the cache already.
            sequences: answers that are continued.
            context_tokens: tokens of context of these answers in all.
            each: tokens that pass the model for each answer: 1, or a speculated draft and one more.
        """
        layout, gpu = self.case.layout, self.case.gpu
        answers = sequences * each
        tokens = sum(new for new, _ in prefill) + answers
        if tokens <= 0:
            return 0.0
        # All ranks wait for the one with most tokens of prompts.
        slowest = _fullest(prefill, layout.dp)
        new = sum(tokens for tokens, _ in slowest)
        here = ceil((new + ceil(answers / layout.dp)) / layout.pp)
        sampled = ceil((len(slowest) + ceil(answers / layout.dp)) / layout.pp)
        seconds = self._token_s(_padded(here), _padded(ceil(tokens / layout.pp)), _padded(sampled))
        seconds += self._attention_s(slowest, sequences, context_tokens, each)
        if layout.pp > 1:
            # The last stage has the head and the sampler beside its layers: the others wait for it each time.
            sent_s = handover_s(gpu, 2.0 * here * self.case.shape.hidden, layout.gpus)
            seconds += (layout.pp - 1) * (sent_s + self._head_s(_padded(sampled)))
        return seconds

    def _attention_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int, context_tokens: float, each: int
    ) -> float:
        """Return the seconds in all layers; data-parallel ranks and stages each have their part of the sequences."""
        case, tp, groups = self.case, self.case.layout.tp, self.case.layout.dp * self.case.layout.pp
        per_group = ceil(sequences / groups)
        context = context_tokens * per_group / sequences if sequences else 0.0
        chunks = [(new / case.layout.pp, past) for new, past in prefill]
        seconds = 0.0
        for kind, layers in self.mixers:
            if kind == "recurrent":
                seconds += layers * self._recurrent_s(sum(new for new, _ in chunks), per_group)
                continue
            seconds += layers * prefill_attention_s(case.gpu, prefill_attention(case.shape, tp, kind), case.kv, chunks)
            answers = decode_attention(case.shape, tp, kind, grouped_reads=case.engine.grouped_reads)
            seconds += layers * decode_attention_s(case.gpu, answers, case.kv, per_group, context, each=each)
        return seconds

    @cached_property
    def mixers(self) -> tuple[tuple[LayerKind, int], ...]:
        """Layers by the way in which they mix tokens, with their number."""
        kinds = Counter(self.case.shape.kind(layer) for layer in range(self.case.shape.layers))
        return tuple((kind, count) for kind, count in kinds.items() if kind not in ("mlp", "experts"))

    def _recurrent_s(self, tokens: float, sequences: int) -> float:
        """Return one recurrent layer's seconds: prompts are scanned, the states of answers are read and written."""
        mixed, gpu, tp = self.case.shape.mixed, self.case.gpu, self.case.layout.tp
        if mixed is None or mixed.recurrent is None:
            return 0.0
        return scan_s(gpu, mixed.recurrent, tp, tokens) + states_s(gpu, mixed.recurrent, tp, sequences)

    def _token_s(self, tokens: int, everywhere: int, sampled: int) -> float:
        """Return the seconds of all that does not look at the context, for one rank's tokens among those of all."""
        key = (tokens, everywhere, sampled)
        if key not in self._products:
            shape = self.case.shape
            mixing = sum(layers for _, layers in self.mixers)
            alone = shape.mixed is not None and shape.mixed.blocks_alone
            dense = shape.layers - shape.expert_layers - (mixing if alone else 0)
            seconds = sum(layers * self._common_s(tokens, kind) for kind, layers in self.mixers)
            seconds += dense * self._mlp_s(tokens, shape.ffn)
            if shape.expert_layers:
                seconds += shape.expert_layers * self._experts_s(tokens, everywhere)
            self._products[key] = seconds + self._head_s(sampled)
        return self._products[key]

    @property
    def mixer_weights(self) -> Format:
        """The format of attention's projections."""
        weights = self.case.weights
        return WEIGHTS["bf16"] if weights.experts_only or weights.keeps_mixers else weights

    @property
    def dense_weights(self) -> Format:
        """The format of feed-forward blocks that every token passes."""
        return WEIGHTS["bf16"] if self.case.weights.experts_only else self.case.weights

    def _common_s(self, tokens: int, kind: LayerKind) -> float:
        """Return the projections of one layer's mixer, norms, and the sum over tensor-parallel ranks."""
        case, shape, tp = self.case, self.case.shape, self.case.layout.tp
        products = projections(shape, tp, kind)
        seconds = sum(product_s(case.gpu, self.mixer_weights, tokens, n, k) for n, k in products)
        words: float = NORM_WORDS * shape.hidden
        if kind != "recurrent":
            kv_heads, head_dim = shape.kv_shape(kind)
            words += 2 * (shape.heads + 2 * kv_heads) * head_dim / tp * (2 if shape.qk_norm else 1)
        seconds += 2 * words * tokens / (case.gpu.memory_bytes_per_s * case.gpu.efficiency.memory_fraction)
        seconds += SMALL_KERNELS * case.gpu.efficiency.launch_s
        return seconds + sum_s(case.gpu, 2.0 * tokens * shape.hidden, tp)

    def _mlp_s(self, tokens: int, ffn: int) -> float:
        """Return one feed-forward block with its sum over tensor-parallel ranks."""
        case, hidden = self.case, self.case.shape.hidden
        width = ceil(ffn / case.layout.tp)
        up = 2 if case.shape.gated else 1
        seconds = product_s(case.gpu, self.dense_weights, tokens, up * width, hidden)
        seconds += product_s(case.gpu, self.dense_weights, tokens, hidden, width)
        seconds += 2 * (up + 1) * width * tokens / (case.gpu.memory_bytes_per_s * case.gpu.efficiency.memory_fraction)
        seconds += case.gpu.efficiency.launch_s
        return seconds + sum_s(case.gpu, 2.0 * tokens * hidden, case.layout.tp)

    def _experts_s(self, tokens: int, everywhere: int) -> float:
        """Return one layer of experts: routing, tokens on their way, grouped products, shared experts."""
        case, shape, layout = self.case, self.case.shape, self.case.layout
        moe = shape.experts
        assert moe is not None, "only a model with experts has layers of experts"
        ranks = layout.tp * layout.dp
        spread = ranks if layout.ep else 1
        width = moe.latent or shape.hidden
        group = Grouped(moe.routed / spread, moe.routed, moe.per_token, width, moe.ffn * spread / ranks, shape.gated)
        # Experts that each GPU holds a part of have the same tokens on all of them.
        imbalance = expected_imbalance(moe.routed, spread) if spread == 1 or case.imbalance is None else case.imbalance
        seconds = grouped_s(case.gpu, case.weights, group, everywhere, imbalance=imbalance)
        seconds += product_s(case.gpu, WEIGHTS["bf16"], tokens, moe.routed, shape.hidden)
        if moe.latent:  # every rank projects its tokens to the experts' width and back
            narrow = ((moe.latent, shape.hidden), (shape.hidden, moe.latent))
            seconds += sum(product_s(case.gpu, self.dense_weights, tokens, n, k) for n, k in narrow)
        seconds += 2 * case.gpu.efficiency.launch_s
        if layout.dp > 1:
            sent = everywhere / layout.dp * min(moe.per_token, ranks) * width
            seconds += scatter_s(case.gpu, 1.0 * sent, ranks) + scatter_s(case.gpu, 2.0 * sent, ranks)
        elif not moe.shared_ffn:
            seconds += sum_s(case.gpu, 2.0 * tokens * shape.hidden, layout.tp)
        return seconds + (self._mlp_s(tokens, moe.shared_ffn) if moe.shared_ffn else 0.0)

    def _head_s(self, sampled: int) -> float:
        """Return the output head, the sampler over the vocabulary, and the host's work of one step."""
        case, shape, tp = self.case, self.case.shape, self.case.layout.tp
        head: Format = WEIGHTS["bf16"] if case.weights.keeps_head else case.weights
        seconds = product_s(case.gpu, head, sampled, ceil(shape.vocab / tp), shape.hidden)
        return seconds + 3 * 4.0 * sampled * shape.vocab / case.gpu.memory_bytes_per_s + host_s(case, sampled)


def _fullest(prefill: Sequence[tuple[int, int]], ranks: int) -> Sequence[tuple[int, int]]:
    """Return the chunks of the rank with most tokens, if each goes whole to the rank with least, the longest first.

    >>> _fullest([(5, 0), (4, 0), (3, 0)], 2)
    [(4, 0), (3, 0)]
    """
    if ranks == 1 or not prefill:
        return prefill
    loads: list[tuple[int, int, list[tuple[int, int]]]] = [(0, rank, []) for rank in range(ranks)]
    for chunk in sorted(prefill, reverse=True):
        tokens, rank, chunks = loads[0]
        heapreplace(loads, (tokens + chunk[0], rank, [*chunks, chunk]))
    return max(loads)[2]


def _padded(tokens: int) -> int:
    """Return the tokens that kernels compute: engines pad small batches to the sizes of their graphs, tiles the others.

    >>> [_padded(tokens) for tokens in (7, 9, 65, 700)]
    [7, 9, 72, 704]
    """
    step = 1 if tokens <= 64 else 8 if tokens <= 512 else 64
    return -(-tokens // step) * step


def host_s(case: ServingCase, sampled: int) -> float:
    """Return the seconds between two steps in which the GPU waits for the host: scheduling, inputs, the new tokens."""
    return STEP_HOST_S + SEQUENCE_HOST_S * sampled


STEP_HOST_S = 1e-3
SEQUENCE_HOST_S = 5e-6
