r"""Which operations an answer leaves to be done, found by parsing it, plain or LaTeX.

An answer may have the form of its reference, and be further worked out, but leave no more to do:
where the reference is $2\sqrt2$, $\sqrt{8}$ is an answer and $\sqrt{4+4}$ is not, nor is an
integral, a maximum, a chain or a condition.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rloo.rewards.numerals import clean, is_unit

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
_INEQUALITIES = {"<", ">", "\\le", "\\ge", "\\in"}
_SUMS = {"+", "-", "\\pm", "\\mp", "\\cup", "\\cap", "\\setminus"}
_PRODUCTS = {
    "*": "product",
    "\\cdot": "product",
    "\\times": "product",
    "/": "quotient",
    "\\div": "quotient",
}
_OPENING = {"(": ")", "[": "]", "\\{": "\\}", "|": "|", "\\langle": "\\rangle",
            "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "\\|": "\\|"}  # fmt: skip
_CLOSING = set(_OPENING.values()) | {"}", "&", "\\\\", ",", ";"}
_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp det gcd lcm max min"
)
_NAMES = (
    "pi infty alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu"
    " xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
    " emptyset ell hbar imath"
)
_KNOWN_NAMES = {f"\\{name}" for name in _NAMES.split()}
_KNOWN_FUNCTIONS = {f"\\{name}" for name in _FUNCTIONS.split()} | {
    "\\binom",
    "\\mathbb",
    "\\overline",
}
_SAME = {"\\lt": "<", "\\gt": ">", "\\lvert": "|", "\\rvert": "|"}
_ALWAYS = {"\\sqrt"}


class NoForm(ValueError):
    """The text cannot be parsed."""


@dataclass(slots=True)
class Form:
    """What an expression is made of. `pending` are the operations that could be carried out, since
    they are between rational numbers; `parts` are names, functions, relations, lists and marks."""

    pending: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)

    def is_within(self, reference: Form) -> bool:
        """Whether everything here is in the reference too, or is another way to write it."""
        allowed = set(reference.parts) | _ALWAYS
        if "list" in allowed:
            allowed |= {"\\pm", "\\cup"} | ({f"relation {name}" for name in _INEQUALITIES})
        if "\\pm" in allowed:
            allowed.add("list")
        if any(part.startswith("relation") and part != "relation =" for part in allowed):
            allowed |= {"list", "\\infty", "\\cup"} | {f"relation {n}" for n in _INEQUALITIES}
        return self.pending <= reference.pending and self.parts <= allowed


def read_form(text: str) -> Form:
    """The form of an expression. Raises NoForm if it cannot be parsed."""
    tokens, form = [], Form()
    for match in _TOKEN.finditer(clean(text)):
        kind = match.lastgroup
        if kind == "other":
            raise NoForm(match.group())
        if kind == "number" and len(match.group()) > _MAX_DIGITS:
            raise NoForm("a number of so many digits")
        if kind == "number" and len(match.group().partition(".")[2]) > _MAX_DECIMALS:
            form.parts.add("decimals")  # math-verify takes six of them for a root or a third
        if kind == "word" and f"\\{match.group()}" not in _KNOWN_FUNCTIONS | {"\\pi", "\\sqrt"}:
            tokens += [("name", letter) for letter in match.group()]
        elif kind == "word":
            tokens.append(("command", f"\\{match.group()}"))
        elif kind is not None:
            tokens.append((kind, _SAME.get(match.group(), match.group())))
    parser = _Parser(tokens, form)
    parser.read_list()
    if parser.kind != "end":
        raise NoForm(parser.token)
    return form


class _Operand(NamedTuple):
    is_rational: bool
    text: str


def _is_numeral(operands: list[_Operand], operation: str) -> bool:
    """Whether two operands are one number, as in 3/4 and 1\\frac{3}{4}."""
    (_, first), (rational, second) = operands
    if operation == "beside":
        return first.isdecimal() and rational and second.startswith("\\frac")
    return operation == "quotient" and first.isdecimal() and second.isdecimal()


class _Parser:
    """Recursive descent; what a method returns is whether it has read a rational number."""

    def __init__(self, tokens: list[tuple[str, str]], form: Form) -> None:
        self._tokens = [*tokens, ("end", "")]
        self._at = 0
        self._depth = 0
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

    def read_list(self) -> bool:
        """Expressions and relations, divided by commas or by words for them."""
        rational, count = self._read_relation(), 1
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
        return rational and count == 1

    def _is_connective(self) -> bool:
        return self.kind == "text" and self.token[5:].strip("{} ,") in ("and", "or")

    def _read_relation(self) -> bool:
        rational = self._read_sum()
        while self.token in _RELATIONS:
            self.form.parts.add(f"relation {self._take()}")
            rational = self._read_sum() and False
        return rational

    def _read_sum(self) -> bool:
        if self.token in _SUMS:
            self._take_sum_sign()
        operands = [self._read_operand(self._read_product)]
        while self.token in _SUMS:
            self._take_sum_sign()
            operands.append(self._read_operand(self._read_product))
        return self._combine(operands, "sum")

    def _take_sum_sign(self) -> None:
        sign = self._take()
        if sign not in "+-":
            self.form.parts.add("\\pm" if sign == "\\mp" else sign)

    def _read_product(self) -> bool:
        operands, operation = [self._read_operand(self._read_power)], "product"
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
                raise NoForm("two numbers beside each other")
            operands.append(self._read_operand(self._read_power))
            if len(operands) == 2 and _is_numeral(operands, "beside" if beside else operation):
                operands.pop()
        self._read_unit()
        return self._combine(operands, operation)

    def _read_operand(self, read: Callable[[], bool]) -> _Operand:
        start = self._at
        rational = read()
        return _Operand(rational, "".join(token for _, token in self._tokens[start : self._at]))

    def _combine(self, operands: list[_Operand], operation: str) -> bool:
        rationals = [operand.is_rational for operand in operands]
        idle = {"0"} if operation == "sum" else {"0", "1"}
        if sum(rationals) > 1 or (len(operands) > 1 and idle & {o.text for o in operands[1:]}):
            self.form.pending.add(operation)
        return all(rationals)

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

    def _read_power(self) -> bool:
        rational = self._read_base()
        while self.token in ("^", "!", "_") or self.kind == "mark":
            if self.kind == "mark":
                self.form.parts.add(f"mark {self._take()}")
                continue
            sign = self._take()
            if sign == "!":
                self.form.pending.add("factorial")
                continue
            exponent = self._read_group()
            if sign == "^" and rational:
                rational = exponent
                if exponent:
                    self.form.pending.add("power")
        return rational

    def _read_group(self) -> bool:
        """The argument of a command: a group in braces, or one token."""
        if self.token == "{":
            return self._read_bracket("{", "}")
        if self.kind == "number" and len(self.token) > 1:  # \frac12: one digit each
            kind, token = self._tokens[self._at]
            self._tokens[self._at : self._at + 1] = [(kind, digit) for digit in token]
        if self.token == "-":
            self._take()
        return self._read_base()

    def _read_bracket(self, opening: str, closing: str) -> bool:
        self._take()
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NoForm("so many brackets")
        rational = self.token == closing or self.read_list()
        # Half-open intervals end with the other kind of bracket.
        if self.token not in ({closing} | ({")", "]"} if opening in "([" else set())):
            raise NoForm(f"{opening} without {closing}")
        if opening not in "({" or self.token != closing:
            self.form.parts.add(f"{opening}{self.token}")
        self._take()
        self._depth -= 1
        return rational and opening in "({"

    def _read_base(self) -> bool:
        kind, token = self._tokens[self._at]
        if kind == "number":
            self._take()
            return True
        if kind == "name" or token in _KNOWN_NAMES:
            self.form.parts.add(self._take())
            return False
        if token in _OPENING or token == "{":
            return self._read_bracket(token, _OPENING.get(token, "}"))
        if kind == "begin" and token.startswith("\\begin"):
            return self._read_environment()
        if kind == "text":
            self._read_unit()
            return False
        if kind != "command":
            raise NoForm(token)
        return self._read_command()

    def _read_environment(self) -> bool:
        self._take()
        self.form.parts |= {"environment", "list"}
        while not (self.kind == "begin" and self.token.startswith("\\end")):
            self.read_list()
        self._take()
        return False

    def _read_command(self) -> bool:
        command = self._take()
        if command == "\\frac":
            operands = [self._read_operand(self._read_group) for _ in range(2)]
            simple = all(operand.text.strip("{}-").isdecimal() for operand in operands)
            return simple or self._combine(operands, "quotient")
        self.form.parts.add(command)
        if command == "\\sqrt":
            if self.token == "[":
                self._read_bracket("[", "]")
            self._read_group()
            return False
        if command not in _KNOWN_FUNCTIONS:
            raise NoForm(command)
        while self.token in ("^", "_"):
            self._take()
            self._read_group()
        if self.token == "{" or command in ("\\binom", "\\mathbb", "\\overline"):
            self._read_group()
        if command == "\\binom" or self._begins_factor():
            self._read_group() if command == "\\binom" else self._read_power()
        return False
