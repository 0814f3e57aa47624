"""All attacks on the host of a code reward, in the order in which they are run."""

from support.cases import Attack
from support.cases.attacks_kernel import KERNEL
from support.cases.attacks_process import PROCESSES
from support.cases.attacks_reach import NETWORKS, SECRETS, WRITES
from support.cases.attacks_resource import RESOURCES
from support.cases.attacks_trace import TRACES

ATTACKS: list[Attack] = [
    *SECRETS, *WRITES, *NETWORKS, *PROCESSES, *KERNEL, *RESOURCES, *TRACES
]  # fmt: skip
by_name = {attack.name: attack for attack in ATTACKS}


def with_before(attack: Attack) -> list[Attack]:
    """The attack, after the one whose trace it looks for."""
    return [by_name[attack.before], attack] if attack.before else [attack]
