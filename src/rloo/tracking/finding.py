"""What can be found wrong with a run: an entry of summary.json and alarms.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that holds for a run."""

    name: str
    title: str
    evidence: str
    why: str
    change: str
    command: str
    examples: Sequence[str]
    voids: bool
    # What the command changes.
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """It in one line, for an alarm."""
        return f"{self.title}: {self.evidence}. Change: {self.change}."


def closing(findings: Sequence[Finding], folder: str) -> Iterator[str]:
    """Findings as lines under a verdict, which begins with the first one that voids a run."""
    void = next((finding for finding in findings if finding.voids), None)
    for finding in findings:
        yield f"Change: {finding.change}." if finding is void else finding.line
    if findings:
        yield f"More about it: rloo doctor {folder}"


def text_of_content(content: Any) -> str:
    """A prompt or a completion, a text or messages, as one text."""
    if isinstance(content, str):
        return content
    parts = [message.get("content") for message in content or []]
    return "\n".join(p if isinstance(p, str) else str(p) for p in parts)
