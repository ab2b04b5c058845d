"""A profiler's trace in a few lines of test: kernels with launches, marks, peers; written as Kineto writes it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
ATTENTION = "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::Mainloop<2>>>(flash::Params)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
DISPATCH = "void deep_ep::internode::dispatch<false, 8, false, 8>(int4*, float*)"
COMBINE = "void deep_ep::internode::combine<false, 8, __nv_bfloat16>(int4*, float*)"
NOTIFY = "void deep_ep::internode::cached_notify<false>(int, int)"
HOST = 77


@dataclass
class Kineto:
    """Times are microseconds; `kernel` launches `ahead` of its start unless told not to."""

    rank: int | None = 0
    gpu: str | None = "NVIDIA H100 80GB HBM3"
    events: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0

    def add(self, **event: Any) -> "Kineto":
        """Any event."""
        self.events.append(event)
        return self

    def kernel(
        self, name: str, start: float, length: float, stream: int = 7, *, ahead: float | None = 10, device: int = 0,
        category: str = "kernel", **args: Any,
    ) -> "Kineto":  # fmt: skip
        """A kernel, and the call that launched it."""
        self.number += 1
        numbered = {"correlation": self.number, "stream": stream, "device": device, **args}
        self.add(ph="X", cat=category, name=name, pid=device, tid=stream, ts=start, dur=length, args=numbered)
        if ahead is not None:
            self.add(ph="X", cat="cuda_runtime", name="cudaLaunchKernel", pid=HOST, tid=HOST, ts=start - ahead, dur=2,
                     args={"cbid": 211, "correlation": self.number})  # fmt: skip
        return self

    def operator(self, name: str, start: float, length: float, thread: int = HOST) -> "Kineto":
        """Something that the host did."""
        dims = {"External id": 1, "Input Dims": [[4, 8], []], "Input type": ["float", "}, {"]}
        return self.add(ph="X", cat="cpu_op", name=name, pid=HOST, tid=thread, ts=start, dur=length, args=dims)

    def step(self, number: int, start: float, length: float) -> "Kineto":
        """The profiler's mark on the host."""
        name = f"ProfilerStep#{number}"
        return self.add(ph="X", cat="user_annotation", name=name, pid=HOST, tid=HOST, ts=start, dur=length)

    def text(self, indent: int | None = 2) -> str:
        """The file."""
        head: dict[str, Any] = {"schemaVersion": 1}
        if self.gpu:
            head["deviceProperties"] = [{"id": 0, "name": self.gpu}]
        if self.rank is not None:
            head["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": 8}
        return json.dumps({**head, "traceEvents": self.events, "traceName": "made.json"}, indent=indent)

    def write(self, path: Path, indent: int | None = 2) -> Path:
        """The file, written."""
        path.write_text(self.text(indent))
        return path


def expert_step() -> Kineto:
    """One rank of expert parallelism: two compute streams, one of communication, waiting apart from transfer.

    By hand, in microseconds from the first kernel, at 1,000: compute 0-400, 410-700, 720-900 and on another stream
    100-200; waiting 350-450; transfer 450-600 and 650-800; a copy 895-905. So of a span of 905: compute and copy
    400 + 290 + 185 = 875, idle 0; communication 100 + 150 + 150 = 400 in all, of which exposed 400-410 (waiting) and
    700-720 (transfer): 30, hidden 370.
    """
    made = Kineto()
    made.step(4, 980, 900)
    made.kernel(GEMM, 1000, 400).kernel(ATTENTION, 1410, 290).kernel(ADD, 1720, 180, ahead=300)
    made.kernel(GEMM, 1100, 100, stream=23)
    made.kernel(NOTIFY, 1350, 100, stream=27).kernel(DISPATCH, 1450, 150, stream=27)
    made.kernel(COMBINE, 1650, 150, stream=27)
    return made.kernel("Memcpy DtoD (Device -> Device)", 1895, 10, stream=24, category="gpu_memcpy")
