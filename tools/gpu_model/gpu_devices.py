"""What `gpu_model.py` has to know of a GPU, with the source of each number.

Per product: data sheets and architecture whitepapers of NVIDIA.

    T4        Turing whitepaper, appendix on TU104 and the T4 data sheet
    A10       A10 data sheet (9216 FP32 units, 31.2 TFLOPS); GA102 whitepaper
    RTX 4090  Ada whitepaper, appendix A
    A100      A100 whitepaper, table 4; data sheet of the version with 80 GB, SXM
    H100      H100 whitepaper, table 3 (SXM5, 80 GB)
    H200      H200 data sheet; the chip is that of H100
    B200      HGX B200 data sheet (37 TFLOPS float64, 75 float32, 8 TB/s); the number of 148
              multiprocessors is from third-party tables

These documents were not at hand when this was written. Multiprocessors, clocks and bandwidths of
T4, A10, A100 and B200 agree with third-party tables.

Clocks are boost clocks, those of A10, H100, H200 and B200 from the peak float32 rate (2 x 128 per
multiprocessor and clock). Under load they are lower.

Per compute capability: CUDA C++ Programming Guide. Threads, blocks and shared memory are from
"Technical Specifications per Compute Capability". Float64 and conversions are from "Throughput of
Native Arithmetic Instructions": rows "64-bit floating-point" and "type conversions from and to
64-bit types". The values of 10.0 for conversions are those of 9.0: an assumption. Each
multiprocessor has four schedulers, each of which issues one instruction of a warp per clock
(whitepapers), and 65536 registers.

Conversions of 16 bits are an assumption. The guide's row "all other type conversions" is not what
they are: ptxas makes `HADD2.F32` and `F2FP` of them (sm_90), arithmetic instructions of 16 bits. 64
per clock is half of the rate of `half2` arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GPUS", "Gpu"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device. Rates are per multiprocessor and clock, in numbers (a warp counts as 32)."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock: float  # per second
    bandwidth: float  # of the memory by its data sheet, bytes per second
    threads: int  # resident per multiprocessor, at most
    blocks: int
    shared: int  # bytes per multiprocessor
    float64: float
    conversions64: float
    conversions16: float = 64
    issue: float = 128  # four schedulers, one instruction of a warp each
    registers: int = 65536


_KIB, _GHZ, _GB = 1024, 1e9, 1e9

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("T4", (7, 5), 40, 1.59 * _GHZ, 320 * _GB, 1024, 16, 64 * _KIB, 2, 2),
        Gpu("A10", (8, 6), 72, 1.695 * _GHZ, 600 * _GB, 1536, 16, 100 * _KIB, 2, 2),
        Gpu("RTX 4090", (8, 9), 128, 2.52 * _GHZ, 1008 * _GB, 1536, 24, 100 * _KIB, 2, 2),
        Gpu("A100", (8, 0), 108, 1.41 * _GHZ, 2039 * _GB, 2048, 32, 164 * _KIB, 32, 16),
        Gpu("H100", (9, 0), 132, 1.98 * _GHZ, 3350 * _GB, 2048, 32, 228 * _KIB, 64, 16),
        Gpu("H200", (9, 0), 132, 1.98 * _GHZ, 4800 * _GB, 2048, 32, 228 * _KIB, 64, 16),
        Gpu("B200", (10, 0), 148, 1.98 * _GHZ, 8000 * _GB, 2048, 32, 228 * _KIB, 64, 16),
    )
}
