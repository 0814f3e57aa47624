r"""The normal form of an answer's text, plain or LaTeX. It unifies differences of layout: white
space, sizes, fonts, delimiters, environments, emphasis, spellings."""

from __future__ import annotations

import re

_UNICODE = str.maketrans({
    "\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": " ", "\u00d7": r"\times ",
    "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": "/", "\u2044": "/", "\u03c0": r"\pi ",
    "\u221a": r"\sqrt ", "\u00b0": r"^\circ ", "\u221e": r"\infty ",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u00b1": r"\pm ",
    "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u2248": r"\approx ",
    "\u2261": r"\equiv ", "\u2032": "'", "\u2019": "'", "\u3000": " ",
    "\uff0c": ", ", "\u3001": ", ",
    "\uff08": "(", "\uff09": ")", "\uff1a": ": ", "\uff1b": "; ", "\u3002": ". ", "\uff1d": "=",
    "\u00bc": r"\frac{1}{4}", "\u00bd": r"\frac{1}{2}", "\u00be": r"\frac{3}{4}",
    "\u2153": r"\frac{1}{3}", "\u2154": r"\frac{2}{3}",
})  # fmt: skip
_RAISED = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b"
_LOWERED = str.maketrans(_RAISED, "0123456789-")
# Ticks and similar signs that a completion appends to its answer. A cross is no such sign.
_DONE = "\ufe0f\u2713\u2714\u2611\u2705\u220e\u25a0\u25a1\U0001f389\U0001f44d\U0001f4af"

_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|det|gcd|lcm"
_FONTS = r"mathrm|mathbf|mathit|mathsf|mathtt|mathnormal|boldsymbol|bm|bold|rm|bf|it|text|textbf"
_TEXTS = (
    r"mathrm|mathbf|mathit|mathsf|mathtt|mathnormal|boldsymbol|bm|bold|textbf|textit|textrm|textsf"
    r"|texttt|textnormal|emph|mbox|hbox|operatorname|unit"
)
_MATRICES = r"bmatrix|Bmatrix|matrix|smallmatrix|psmallmatrix|bsmallmatrix|array"
_END = r"(?![A-Za-z])"
_ESCAPED = r"[dtc]?frac|sqrt|left|right|leq?|geq?|neq?|text|pi|cdot|infty|cup|cap|in|pm|circ|boxed"


def _raised(found: re.Match[str]) -> str:
    return f"^{{{found[0].translate(_LOWERED)}}}"


def _matrix(found: re.Match[str]) -> str:
    rows = re.sub(r"(?:\s|\\\\|\\hline)+$", "", found["rows"])
    return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}"


def _label(text: re.Match[str]) -> str:
    return rf"\text{{{text[1]}}}{text[2] or ':'} "


def _joined(found: re.Match[str]) -> str:
    return found[0] if found[1] is None else rf"\text{{ {found[1]} }}"


_REWRITES = [
    (re.compile(pattern), written)
    for pattern, written in (
        (rf"[{_RAISED}]+", _raised),
        (r"\s+", " "),
        (rf"(?<!\\)\\\\(?=(?:{_ESCAPED}){_END})", r"\\"),  # for a text that was escaped twice
        (rf"\\(?:left|right|middle|[bB]igg?[lr]?|(?:display|text|script)style|limits|nolimits"
         rf"|null|hfill|centering|smallskip|tiny|small|normalsize|large|Large|LARGE|huge|Huge)"
         rf"{_END}\.?", ""),
        (r"\\(?:tag|label|hspace|vspace|phantom)\*?\s*\{[^{}]*\}", " "),
        (rf"\\[dtc]frac{_END}", r"\\frac"),
        (rf"\\[dt]binom{_END}", r"\\binom"),
        (r"\{\s*([^{}\\]+)\s*\\choose\s*([^{}\\]+)\}", r"\\binom{\1}{\2}"),
        (r"\\root\s*([0-9]+)\s*\\of\s*(\{[^{}]*\}|[0-9A-Za-z])", r"\\sqrt[\1]{\2}"),
        (rf"\\cr{_END}", r"\\\\ "),
        (rf"\\vec{_END}", r"\\overrightarrow"),
        (r"\\mathbb\s*([A-Z])(?![A-Za-z])", r"\\mathbb{\1}"),
        (r"(?<=[.0-9])\\(?:bar|dot)\s*\{\s*([0-9]+)\s*\}", r"\\overline{\1}"),
        (r"\\exp\s*([0-9a-z])(?![0-9A-Za-z])", r"e^{\1}"),
        (r"</?(?:b|i|em|strong)>", ""),
        (r"\\frac\s*([0-9])", r"\\frac{\1}"),
        (r"\\frac\s*(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac\1{\2}"),
        (r"(?<=[0-9])\{:\}(?=[0-9])", ":"),
        (r"\{\s*([0-9A-Za-z.]+)\s*\\over\s*([0-9A-Za-z.]+)\s*\}", r"\\frac{\1}{\2}"),
        (rf"\\(?:operatorname\*?|text|mathrm|textrm)\s*\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1 "),
        (rf"\\(?:{_FONTS})\s*\{{\s*([ieπ]|\\pi)\s*\}}", r"\1 "),
        (r"\\(?:mathbf|mathit|mathnormal|boldsymbol|bm)\s*\{\s*([A-Za-z])\s*\}", r"\1 "),
        (rf"\\(?:{_TEXTS})\s*\{{", r"\\text{"),
        (rf"\\(?:rm|bf|it|sf|tt){_END}", ""),
        (r"\\\\(?:\*|\s*\[[^\]]*\])", r"\\\\"),
        (rf"(?:(?P<open>[\[(])\s*)?\\begin\s*\{{(?:{_MATRICES})\}}(?:\s*\{{[lcr| ]*\}})?"
         rf"(?P<rows>(?:(?!\\begin|\\end).)*)\\end\s*\{{(?:{_MATRICES})\}}(?(open)\s*[\])])",
         _matrix),
        (r"\\begin\s*\{pmatrix\}(?P<rows>(?:(?!\\begin|\\end).)*)\\end\s*\{pmatrix\}", _matrix),
        (r"(?<=[0-9])\s*\{\s*,\s*\}\s*(?=[0-9]{3}(?![0-9]))|\{,\}|,\\!\s*", ","),
        (r"(?<=[0-9])\\[,!:;](?=[0-9]{3}(?![0-9]))", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,:;> ]|(?<=[0-9A-Za-z{},;])~|\\q?quad", " "),
        (r"(?<=[0-9A-Za-z}/])(\s*/\s*)\{\s*([0-9A-Za-z.]+)\s*\}", r"\1\2"),
        (r"(?:^|(?<=[-+=(,]))\s*\{\s*([0-9]+)\s*\}(?=\s*/)", r"\1"),
        (r"(?<=[0-9])\{(\\frac\{[0-9]+\}\{[0-9]+\})\}", r"\1"),
        (r"\\%|(?<=[0-9])\s*(?:\\text\s*\{\s*percent(?:age)?\s*\}|percent(?:age)?(?![a-z]))", "%"),
        (r"\s*\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
        (rf"\\(?:leq|leqslant|leqq){_END}|<=", r"\\le "),
        (rf"\\(?:geq|geqslant|geqq){_END}|(?<!=)>=", r"\\ge "),
        (rf"\\lt{_END}", "<"),
        (rf"\\gt{_END}", ">"),
        (rf"\\neq{_END}|!=|\\not\s*=", r"\\ne "),
        (rf"\\l(?:brace){_END}", r"\\{"),
        (rf"\\r(?:brace){_END}", r"\\}"),
        (rf"\\lbrack{_END}", "["),
        (rf"\\rbrack{_END}", "]"),
        (rf"\\ast{_END}", "*"),
        (rf"\\infin{_END}", r"\\infty "),
        (rf"\\varnothing{_END}", r"\\emptyset"),
        (r"(?<!\\)\$([^$]*)(?<!\\)\$", r"\1"),
        (r"\*\*([^*]*)\*\*|`([^`]*)`", r"\1\2"),
        (r"\\text\s*\{([^a-zA-Z{}]*)\}", r"\1"),
        (r"\\text\s*\{([A-Za-z' ]+?)\s*(?:([:=])|\bis:?)\s*\}(?=\s*[^\s=:])", _label),
        (r"\\text\s*\{[^{}]*\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z])", _joined),
        (rf"\\(?:lor|vee){_END}", r"\\text{ or }"),
        (rf"\\(?:land|wedge){_END}", r"\\text{ and }"),
        (r"^(?:=>?|\\(?:implies|[Rr]ightarrow|therefore|to)(?![A-Za-z]))\s*", ""),
        (r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})", r"\\ln "),
        (r"\\sqrt\s*\[\s*([0-9]+)\s*\]\s*([0-9A-Za-z])", r"\\sqrt[\1]{\2}"),
        (r"(\^\s*(?:\{[^{}]*\}|[0-9])(?:\s+|(?<=\})))(?=[0-9])", r"\1\\cdot "),
        (rf"(?:\s|[{_DONE}]|\\checkmark|\\\\)+$", ""),
        (r"^\\\{\s*[a-z](?:\s*\\in\s*(?:\\mathbb\s*\{\s*R\s*\}|\\R))?\s*(?:\\mid|[:|])\s*"
         r"([^:|]*(?:[<>]|\\[lgn]e(?![A-Za-z])).*)\\\}$", r"\1"),
    )
]  # fmt: skip
_WRAPPED = re.compile(
    r"\\f?boxed\s*\{(.*)\}|\{(.*)\}|\\\((.*)\\\)|\\\[(.*)\\\]|\\text\s*\{([^{}]*[0-9][^{}]*)\}"
    r"|(?:\*{1,3}|_{1,3})(?=[^*_])([^*]*[^*_])(?:\*{1,3}|_{1,3})",
    re.DOTALL,
)
_SPACED = re.compile(r"[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_EMPHASIS = re.compile(
    r"(?<![\w*\\])(\*{1,3})(?=[^\s*])([^*\n]*[^\s*])\1(?![\w*])"
    r"|(?<![\w\\}])(_{1,3})(?=[^\s_])([^_\n]*[^\s_])\3(?!\w)"
)
_EXP = re.compile(r"\\exp\s*(?=[({])")
_LOOKS = re.compile(
    r"\\(?P<look>textcolor\s*\{\w+\}|color\s*\{\w+\}|underline|uline|bold(?:symbol)?|bm|math(?:bf|rm|sf|it))"
    r"\s*(?=\{)"
)
_COMMAND = re.compile(r"\\[A-Za-z]|\s*-?[0-9]")
# French notation of intervals: ]1,2] is (1,2].
_TURNED = re.compile(
    r"(?<![^\s=np])([\[\]])([^\[\]()]*,[^\[\]()]*)([\[\]])(?=\s*(?:$|[,;.]|\\cup|\\text))"
)


def clean(text: str) -> str:
    """The normal form of `text`, without brackets, boxes and marks that enclose the complete
    text."""
    text = _without_looks(text.translate(_UNICODE))
    for pattern, written in _REWRITES:
        text = pattern.sub(written, text)
    text = _TURNED.sub(_interval, _without_exp(text))
    for _ in range(4):
        text = text.strip().rstrip(".,;: ")
        inner = _WRAPPED.fullmatch(text)
        if inner is None or not is_balanced(
            found := next(g for g in inner.groups() if g is not None)
        ):
            break
        text = found
    if text[:1] == "(" and text[-1:] == ")" and "," not in text and is_balanced(text[1:-1]):
        text = text[1:-1].strip()
    return text.replace(" ", "") if _SPACED.fullmatch(text) else text


def without_emphasis(text: str) -> str:
    """Prose without Markdown emphasis, and with LaTeX thousands separators as plain commas."""
    text = re.sub(r"(?<=[0-9])(?:\{,\}|\\,|,\\!)(?=[0-9]{3}(?![0-9]))", ",", text)
    text = re.sub(r"(?m)^[ \t]*[-*\u2022][ \t]+(?=\*\*|__)", "", text)
    for _ in range(2):
        text = _EMPHASIS.sub(lambda found: found[2] or found[4], text)
    return text


def is_balanced(text: str) -> bool:
    """Whether all braces and round brackets are opened and closed in order."""
    depth = 0
    for character in text:
        depth += (character in "{(") - (character in "})")
        if depth < 0:
            return False
    return depth == 0


def closing(text: str, start: int) -> int | None:
    """The position where the brace or bracket at `start` is closed, or None."""
    opening, depth = text[start], 0
    closes = {"{": "}", "(": ")", "[": "]"}[opening]
    for position in range(start, len(text)):
        depth += (text[position] == opening) - (text[position] == closes)
        if depth == 0:
            return position
    return None


def _without_looks(text: str) -> str:
    """The text without colours and underlines, and without fonts around commands or numbers."""
    start = 0
    while (found := _LOOKS.search(text, start)) is not None:
        end = closing(text, found.end())
        content = "" if end is None else text[found.end() + 1 : end]
        start = found.end()
        if end is not None and (found["look"][0] in "tcu" or _COMMAND.match(content)):
            text, start = text[: found.start()] + content + text[end + 1 :], found.start()
    return re.sub(r"\\color\s*\{\w+\}", "", text)


def _interval(found: re.Match[str]) -> str:
    if found[1] == "[" and found[3] == "]":
        return found[0]
    return f"{'[' if found[1] == '[' else '('}{found[2]}{']' if found[3] == ']' else ')'}"


def _without_exp(text: str) -> str:
    for _ in range(4):
        found = _EXP.search(text)
        end = None if found is None else closing(text, found.end())
        if found is None or end is None:
            break
        text = f"{text[: found.start()]}e^{{{text[found.end() + 1 : end]}}}{text[end + 1 :]}"
    return text
