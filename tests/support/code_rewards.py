"""The reward of code against its corpora: what each program is worth, and what attacks reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rloo.addons.graders.code.code_reward import CodeReward
from rloo.addons.graders.code.sandbox_pool import ResourceLimits, SandboxPool
from support.cases import Attack, Case
from support.cases.attack_host import Host

SECONDS = 1.0
# Time is that of processors; an attack that nothing ends takes 14 s by the clock.
SLACK = 12.0
# Looked at every 50 ms: what is allocated meanwhile comes on top.
ATTACK_LIMITS = ResourceLimits(
    seconds=SECONDS, total_seconds=SECONDS, memory=1 << 28, output=1 << 20
)
MOST_MEMORY = 3 << 28


def score(reward: CodeReward, case: Case) -> float | None:
    """The reward of a program for its task."""
    columns: dict[str, list[Any]] = {name: [value] for name, value in case.task.items()}
    (found,) = reward([f"````python\n{case.program}\n````"], **columns)
    return found


def escapes(wall: str, attacks: Iterable[Attack]) -> dict[str, list[str]]:
    """What each attack has reached behind a wall, by its name; in one worker, in their order."""
    found = {}
    limits = ATTACK_LIMITS
    room = {"files": limits.files + 2000, "disk": 4 * limits.disk, "output": limits.output}
    with Host(
        seconds=SECONDS, slack=SLACK, memory=MOST_MEMORY, processes=limits.processes + 8, **room
    ) as host:
        staff = SandboxPool(wall, 1, limits)
        try:
            staff.submit({"kind": "run", "program": "", "given": ""}).result(60)  # it starts
            for attack in attacks:
                program = host.begin(attack)
                begun = staff.submit({"kind": "run", "program": program, "given": ""})
                found[attack.name] = host.escapes(attack.name, begun.result(60)["output"])
        finally:
            staff.close()
    return found
