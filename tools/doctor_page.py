"""Writes the findings of docs/doctor.md from the rules: `python tools/doctor_page.py`.

The text after the line `<!-- findings -->` is replaced.
"""

from __future__ import annotations

from pathlib import Path

from rloo.addons.report.doctor.causes import EXPLAINS, causes_of
from rloo.addons.report.doctor.rules import RULES
from rloo.addons.report.doctor.run_record import Rule

PAGE = Path(__file__).resolve().parent.parent / "docs/doctor.md"
MARK = "<!-- findings -->\n"


def filled(page: str) -> str:
    """The page with all findings rewritten."""
    head, mark, _ = page.partition(MARK)
    return head + mark + "".join(map(_section, RULES))


def _section(rule: Rule) -> str:
    voids = "\n- This finding voids the run." if rule.voids else ""
    causes = [name for name in EXPLAINS if name in causes_of(rule.name)]
    after = (
        f"\n- Not reported if a possible cause is reported: {', '.join(causes)}." if causes else ""
    )
    return (
        f"\n## {rule.title}\n\n`{rule.name}`\n\n- Detected by: {rule.looks_at}.\n- Why it matters: "
        f"{rule.why}\n- Change: {rule.usual_change}.{voids}{after}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
