"""Rewrites the table of GPUs in docs/scaling.md from the planner's figures:
`python tools/gpu_table.py`. A test compares the page with this tool."""

from __future__ import annotations

import re
from pathlib import Path

from rloo.addons.planner.gpu.gpu_specs import GPU, GPUS

PAGE = Path(__file__).resolve().parent.parent / "docs/scaling.md"
HEAD = (
    "| GPU | memory, 10^9 bytes | 16-bit operations, 10^12/s | memory bandwidth, TB/s | NVLink or "
    "PCIe, GB/s, one way | PCIe, GB/s, one way | network, GB/s | FlashAttention-2, 10^12/s | "
    "source |\n|---|---|---|---|---|---|---|---|---|\n"
)


def filled(page: str) -> str:
    """The page with its table rewritten."""
    table = HEAD + "".join(map(_line, GPUS.values()))
    pattern = r"(<!-- table:gpus -->\n\n)(?:\|.*\n)*"
    return re.sub(pattern, lambda match: match[1] + table, page)


def _line(gpu: GPU) -> str:
    cells = [
        gpu.name,
        f"{gpu.memory / 1e9:.1f}",
        f"{gpu.operations / 1e12:,.5g}" + ("" if gpu.bf16 else " (fp16)"),
        f"{gpu.bandwidth / 1e12:.3g}",
        *(f"{rate / 1e9:.3g}" for rate in (gpu.nvlink, gpu.host, gpu.network)),
        f"{gpu.attention / 1e12:.3g}",
        gpu.source,
    ]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
