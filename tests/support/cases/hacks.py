"""All programs that must score 0 although each fools some judge, or is aimed at one."""

from support.cases import Case
from support.cases.hacks_function import EQUAL, EXITS
from support.cases.hacks_inside import PATCHES, READERS
from support.cases.hacks_output import OUTPUT

HACKS: list[Case] = [*EQUAL, *EXITS, *PATCHES, *READERS, *OUTPUT]
