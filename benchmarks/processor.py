"""The name of the processor from its family and model, since a hypervisor often hides the name.

Families and models: AMD's revision guides; Intel's Software Developer's Manual, volume 4, table
2-1.
"""

from __future__ import annotations

import platform
from pathlib import Path

_VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
_FAMILIES = {
    ("AMD", 23): "Zen, Zen+ or Zen 2",
    ("AMD", 25): "Zen 3 or Zen 4",
    ("AMD", 26): "Zen 5",
}
_MODELS = {
    ("Intel", 6, 85): "Skylake, Cascade Lake or Cooper Lake",
    ("Intel", 6, 106): "Ice Lake, 3rd generation Xeon Scalable",
    ("Intel", 6, 143): "Sapphire Rapids, 4th generation Xeon Scalable",
    ("Intel", 6, 173): "Granite Rapids, Xeon 6",
    ("Intel", 6, 207): "Emerald Rapids, 5th generation Xeon Scalable",
}
# Instruction sets that matrix products may use, as named in /proc/cpuinfo.
_SETS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_tile": "AMX"}


def describe_processor() -> str:
    """The description of this machine's processor."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    return describe(text) or platform.processor() or platform.machine()


def describe(cpuinfo: str) -> str:
    """A description of the first processor in /proc/cpuinfo: its name, vendor, family, model, the
    name of the model if known, and instruction sets. Empty if /proc/cpuinfo has no family."""
    lines = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    if not {"vendor_id", "cpu family", "model"} <= facts.keys():
        return facts.get("model name", "")
    vendor = _VENDORS.get(facts["vendor_id"], facts["vendor_id"])
    family, model = int(facts["cpu family"]), int(facts["model"])
    name = _MODELS.get((vendor, family, model)) or _FAMILIES.get((vendor, family))
    flags = facts.get("flags", "").split()
    sets = [known for flag, known in _SETS.items() if flag in flags]
    parts = [f"{vendor} family {family} model {model}" + (f" ({name})" if name else "")]
    if "model name" in facts:
        parts.insert(0, facts["model name"])
    return ", ".join(parts) + (f", with {', '.join(sets)}" if sets else "")
