r"""Finds the operations that an answer leaves unevaluated, by parsing the answer (plain text or
LaTeX).

An answer must not have more unevaluated operations than its reference. For the reference $2\sqrt2$,
$\sqrt{8}$ is a valid form. $\sqrt{4+4}$ is not, and neither is an integral, a maximum, a chain of
equations or a condition.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import gcd, isqrt
from typing import NamedTuple

from rloo.addons.graders.math.expression_tree import ExpressionForm, UnparsableExpression
from rloo.addons.graders.math.normal_form import clean
from rloo.addons.graders.math.wording import is_unit

_MAX_DEPTH = 24
_MAX_DIGITS, _MAX_DECIMALS = 60, 4
_TOKEN = re.compile(
    r"(?P<number>[0-9]{1,3}(?:\{,\}[0-9]{3})+|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<text>\\text\s*\{[^{}]*\})|(?P<begin>\\(?:begin|end)\s*\{[a-z]+\*?\}(?:\{[a-z|]*\})?)"
    r"|(?P<command>\\[A-Za-z]+|\\[^A-Za-z])|(?P<word>[A-Za-z]+)"
    r"|(?P<mark>%|\^\\circ|')|(?P<sign>[-+*/^_=<>()\[\]{}|,;:!&])|\s+|(?P<other>.)",
    re.DOTALL,
)
_RELATIONS = {"=", "<", ">", ":", "\\le", "\\ge", "\\ne", "\\in", "\\approx", "\\sim", "\\equiv",
              "\\cong", "\\to", "\\mid", "\\Rightarrow", "\\implies", "\\iff"}  # fmt: skip
_SUMS = {"+", "-", "\\pm", "\\mp", "\\cup", "\\cap", "\\setminus"}
_PRODUCTS = {"*": "product", "\\cdot": "product", "\\times": "product",
             "/": "quotient", "\\div": "quotient"}  # fmt: skip
_OPENING = {"(": ")", "[": "]", "\\{": "\\}", "|": "|", "\\langle": "\\rangle",
            "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "\\|": "\\|"}  # fmt: skip
_CLOSING = set(_OPENING.values()) | {"}", "&", "\\\\", ",", ";"}
_NAMES = (
    "pi infty alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu"
    " xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
    " emptyset ell hbar imath"
)
_KNOWN_NAMES = {f"\\{name}" for name in _NAMES.split()}
_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp det gcd lcm"
_ACCENTS = "overline overrightarrow vec bar hat tilde dot ddot widehat widetilde"
_WITH_GROUP = {"\\binom", "\\mathbb", *(f"\\{name}" for name in _ACCENTS.split())}
_KNOWN_FUNCTIONS = {f"\\{name}" for name in f"{_FUNCTIONS} max min".split()} | _WITH_GROUP
_KNOWN_FUNCTIONS |= {"\\sum", "\\prod", "\\int", "\\lim"}
_SAME = {"\\lt": "<", "\\gt": ">", "\\lvert": "|", "\\rvert": "|"}
_PLAIN = str.maketrans("", "", "{}() ")
# An exponent that means a root.
_BROKEN = re.compile(r"-?(?:[0-9]+/[0-9]+|[0-9]*\.[0-9]+|\\frac[0-9]{2,})")


def parse_form(text: str) -> ExpressionForm:
    """The form of an expression. Raises UnparsableExpression if it cannot be parsed."""
    tokens, form = [], ExpressionForm()
    for match in _TOKEN.finditer(clean(text)):
        kind = match.lastgroup
        if kind == "other":
            raise UnparsableExpression(match.group())
        if kind == "number" and len(match.group()) > _MAX_DIGITS:
            raise UnparsableExpression("a number of so many digits")
        if kind == "number" and len(match.group().partition(".")[2]) > _MAX_DECIMALS:
            form.parts.add("decimals")  # math-verify: six decimals equal a root or a third
        if kind == "word" and f"\\{match.group()}" not in _KNOWN_FUNCTIONS | {"\\pi", "\\sqrt"}:
            tokens += [("name", letter) for letter in match.group()]
        elif kind == "word":
            tokens.append(("command", f"\\{match.group()}"))
        elif kind is not None:
            tokens.append((kind, _SAME.get(match.group(), match.group())))
    parser = _Parser(tokens, form)
    whole = parser.read_list()
    form.size = whole.size if whole.size > 1 else parser.size
    if whole.size > 1:
        form.lists.add("bare")
    if parser.kind != "end":
        raise UnparsableExpression(parser.token)
    return form


class _Operand(NamedTuple):
    """A parsed operand. `core` is "" for a rational number, and equal for like terms."""

    core: str
    text: str = ""
    size: int = 1


def _is_numeral(operands: list[_Operand], operation: str) -> bool:
    """Whether two operands are one number, as in 3/4 and 1\\frac{3}{4}."""
    first, second = operands[0].text, operands[1].text
    if operation == "beside":
        return first.isdecimal() and not operands[1].core and second.startswith("\\frac")
    return operation == "quotient" and first.isdecimal() and second.isdecimal()


def _base_of(core: str) -> str:
    """The base of a power; "" for a sum in brackets, which may occur twice."""
    return "" if core.startswith("(") else core.partition("^")[0]


class _Parser:
    """A recursive descent parser. Its methods return the core (see `_Operand`) of the parsed
    part."""

    def __init__(self, tokens: list[tuple[str, str]], form: ExpressionForm) -> None:
        self._tokens = [*tokens, ("end", "")]
        self._at = 0
        self._depth = 0
        self._inside = 0  # depth of nesting in roots and functions
        self.size = 1  # number of items, if the complete expression is a list in brackets
        self.form = form

    @property
    def kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def token(self) -> str:
        return self._tokens[self._at][1]

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1][1]

    def read_list(self) -> _Operand:
        """Parse expressions and relations, separated by commas or by connectives."""
        start, core, count = self._at, self._read_relation(), 1
        while self.token in (",", ";", "&", "\\\\") or self._is_connective():
            self._take()
            if self.kind == "text" and self._is_connective():
                self._take()
            if self.kind == "end" or self.token in _CLOSING or self.kind == "begin":
                break
            self._read_relation()
            count += 1
        if count > 1:
            self.form.parts.add("list")
        return _Operand(core if count == 1 else self._text(start), size=count)

    def _text(self, start: int) -> str:
        return "".join(token for _, token in self._tokens[start : self._at])

    def _irrational(self, start: int) -> str:
        """The core of a part whose operations are not checked. The core is the part's text without
        braces."""
        return self._text(start).translate(_PLAIN)

    def _is_connective(self) -> bool:
        return self.kind == "text" and self.token[5:].strip("{} ,") in ("and", "or")

    def _read_relation(self) -> str:
        start, core = self._at, self._read_sum()
        while self.token in _RELATIONS:
            self.form.parts.add(f"relation {self._take()}")
            self._read_sum()
            core = self._irrational(start)
        return core

    def _read_sum(self) -> str:
        start = self._at
        operands: list[_Operand] = []
        while not operands or self.token in _SUMS:
            if self.token in _SUMS:
                self._take_sum_sign()
            operands.append(self._read_operand(self._read_product))
        cores = self._combine(operands, "sum")
        return f"({self._irrational(start)})" if cores and len(operands) > 1 else "".join(cores)

    def _take_sum_sign(self) -> None:
        sign = self._take()
        if sign not in "+-":
            self.form.parts.add("\\pm" if sign == "\\mp" else sign)

    def _read_product(self) -> str:
        operands, operation = [self._read_operand(self._read_power)], "product"
        is_divided = False
        while self.token in _PRODUCTS or self._begins_factor():
            beside = self.token not in _PRODUCTS
            if not beside:
                operation = _PRODUCTS[self._take()]
                if self.token in ("+", "-"):
                    self._take()
                if self._is_ten_to_a_power():
                    self._skip_power()
                    continue
            elif self.kind == "number":
                raise UnparsableExpression("two numbers beside each other")
            operands.append(self._read_operand(self._read_power))
            if len(operands) == 2 and _is_numeral(operands, "beside" if beside else operation):
                under = operands.pop().text
                is_divided = True
                if under.isdecimal():
                    self._look_at_fraction(operands[0].text, under)
            elif operation == "quotient" and not (beside or is_divided):
                is_divided = self._divides_coefficient(operands)
        self._read_unit()
        return "*".join(sorted(self._combine(operands, operation)))

    def _divides_coefficient(self, operands: list[_Operand]) -> bool:
        """Whether the last operand divides the only integer factor, as in 2x/3."""
        whole = [o.text for o in operands[:-1] if not o.core]
        under = operands[-1].text
        if len(whole) != 1 or not (whole[0].isdecimal() and under.isdecimal()):
            return False
        self._look_at_fraction(whole[0], under)
        operands.pop()
        return True

    def _read_operand(self, read: Callable[[], str]) -> _Operand:
        start = self._at
        core = read()
        return _Operand(core, self._text(start))

    def _combine(self, operands: list[_Operand], operation: str) -> list[str]:
        """The cores of the operands. Adds the operation to `pending` if it could be evaluated."""
        cores = [operand.core for operand in operands if operand.core]
        alike = cores if operation == "sum" else [base for base in map(_base_of, cores) if base]
        idle = {"0"} if operation == "sum" else {"0", "1"}
        if (
            len(operands) - len(cores) > 1
            or len(set(alike)) < len(alike)
            or (len(operands) > 1 and idle & {o.text for o in operands[1:]})
        ):
            self.form.pending.add(operation)
        return cores

    def _look_at_fraction(self, over: str, under: str) -> None:
        """Add a fraction that equals an integer to `pending`; in a root or function, also a
        reducible one."""
        divisor = gcd(int(over), int(under))
        if divisor == int(under) or (self._inside and divisor > 1):
            self.form.pending.add("quotient")

    def _is_ten_to_a_power(self) -> bool:
        return self.token == "10" and self._tokens[self._at + 1][1] == "^"

    def _skip_power(self) -> None:
        self._take(), self._take()
        self._read_group()

    def _begins_factor(self) -> bool:
        if self.kind in ("number", "name"):
            return True
        if self.kind == "begin":
            return self.token.startswith("\\begin")
        if self.kind == "command":
            return self.token not in _CLOSING | _RELATIONS | _SUMS
        return self.token in ("(", "[", "{")

    def _read_unit(self) -> None:
        while self.kind == "mark" or (self.kind == "text" and not self._is_connective()):
            kind, token = self.kind, self._take()
            if kind == "mark":
                self.form.parts.add(f"mark {token}")
            elif not is_unit(token):
                self.form.parts.add(f"text {token[5:].strip('{} ').lower()}")
            if kind == "text" and self.token == "^":
                self._take()
                self._read_group()

    def _read_power(self) -> str:
        start, core = self._at, self._read_base()
        while self.token in ("^", "!", "_") or self.kind == "mark":
            if self.kind == "mark":
                self.form.parts.add(f"mark {self._take()}")
                continue
            sign = self._take()
            if sign == "!":
                self.form.pending.add("factorial")
                core = core and self._irrational(start)
                continue
            exponent = self._read_operand(self._read_group)
            if sign == "^" and core:
                core += f"^{exponent.text}"
            elif sign == "_" and not core:
                self.form.parts.add(f"base {exponent.text.translate(_PLAIN)}")
            elif core or exponent.core:
                core = self._irrational(start)
            elif sign == "^" and _BROKEN.fullmatch(exponent.text.translate(_PLAIN)):
                self.form.parts.add("\\sqrt")
                core = self._irrational(start)
            elif sign == "^":
                self.form.pending.add("power")
        return core

    def _read_group(self) -> str:
        """Parse the argument of a command: a group in braces, or one token."""
        if self.token == "{":
            return self._read_bracket("{", "}")
        if self.kind == "number" and len(self.token) > 1:  # \frac12: each argument is one digit
            kind, token = self._tokens[self._at]
            self._tokens[self._at : self._at + 1] = [(kind, digit) for digit in token]
        if self.token == "-":
            self._take()
        return self._read_base()

    def _read_bracket(self, opening: str, closing: str) -> str:
        start = self._at
        self._take()
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnparsableExpression("so many brackets")
        inner = _Operand("") if self.token == closing else self.read_list()
        # Half-open intervals end with the other kind of bracket.
        if self.token not in ({closing} | ({")", "]"} if opening in "([" else set())):
            raise UnparsableExpression(f"{opening} without {closing}")
        if opening not in "({" or self.token != closing:
            self.form.parts.add(f"{opening}{self.token}")
        if inner.size > 1 and opening != "{":
            self.form.lists.add(f"{opening}{self.token}")
        self._take()
        if start == 0 and self.kind == "end":
            self.size = inner.size
        self._depth -= 1
        if opening in "({" and inner.size == 1:
            return inner.core
        return self._irrational(start)

    def _read_base(self) -> str:
        kind, token = self._tokens[self._at]
        if kind == "number":
            return self._take() and ""
        if kind == "name" or token in _KNOWN_NAMES:
            self.form.parts.add(self._take())
            return token
        if token in _OPENING or token == "{":
            return self._read_bracket(token, _OPENING.get(token, "}"))
        if kind == "begin" and token.startswith("\\begin"):
            return self._read_environment()
        if kind == "text":
            self._read_unit()
            return token
        if kind != "command":
            raise UnparsableExpression(token)
        return self._read_command()

    def _read_environment(self) -> str:
        start = self._at
        self._take()
        self.form.parts |= {"environment", "list"}
        self.form.lists.add("environment")
        while not (self.kind == "begin" and self.token.startswith("\\end")):
            self.read_list()
        self._take()
        return self._irrational(start)

    def _read_command(self) -> str:
        start, command = self._at, self._take()
        if command == "\\frac":
            return self._read_fraction()
        self.form.parts.add(command)
        self._inside += 1
        if command == "\\sqrt":
            has_index = self.token == "["
            if has_index:
                self._read_bracket("[", "]")
            under = self._read_operand(self._read_group).text.strip("{}")
            if not has_index and under.isdecimal() and isqrt(int(under)) ** 2 == int(under):
                self.form.pending.add("root")
        elif command not in _KNOWN_FUNCTIONS:
            raise UnparsableExpression(command)
        else:
            self._read_arguments(command)
        self._inside -= 1
        return self._irrational(start).replace("^", "**")  # so that `_base_of` finds no power

    def _read_fraction(self) -> str:
        over, under = (self._read_operand(self._read_group) for _ in range(2))
        if all(operand.text.strip("{}-").isdecimal() for operand in (over, under)):
            self._look_at_fraction(over.text.strip("{}-"), under.text.strip("{}-"))
            return ""
        self._combine([over, under], "quotient")
        return f"{over.core}/{under.core}" if under.core else over.core

    def _read_arguments(self, command: str) -> None:
        while self.token in ("^", "_"):
            self._take()
            self._read_group()
        if self.token == "{" or command in _WITH_GROUP:
            self._read_group()
        if command == "\\binom":
            self._read_group()
        elif self._begins_factor() or self.token == "|":
            self._read_power()
