"""All programs that must score 1, however odd they look."""

from support.cases import Case
from support.cases.honest_function import FUNCTIONS
from support.cases.honest_program import PROGRAMS, STATEMENTS

HONEST: list[Case] = [*FUNCTIONS, *PROGRAMS, *STATEMENTS]
