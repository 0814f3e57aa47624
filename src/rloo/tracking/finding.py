"""A problem found in a run: an entry of summary.json and alarms.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that a diagnostic rule found in a run. If `voids` is true, the run's improvement does
    not count."""

    name: str
    title: str
    evidence: str
    why: str
    change: str
    command: str
    examples: Sequence[str]
    voids: bool
    # The options that the command changes.
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The finding as one line, for an alarm."""
        return f"{self.title}: {self.evidence}. Change: {self.change}."


def closing(findings: Sequence[Finding], folder: str) -> Iterator[str]:
    """Yield the findings as lines below the verdict. The verdict already describes the first
    finding that voids the run, so the line of this finding is only the change that it proposes."""
    void = next((finding for finding in findings if finding.voids), None)
    for finding in findings:
        yield f"Change: {finding.change}." if finding is void else finding.line
    if findings:
        yield f"More about it: rloo doctor {folder}"


def text_of_content(content: Any) -> str:
    """Return a prompt or a completion, a string or messages, as one text."""
    if isinstance(content, str):
        return content
    parts = [message.get("content") for message in content or []]
    return "\n".join(p if isinstance(p, str) else str(p) for p in parts)
