r"""Finds the answer in a completion, for all rewards that judge an answer.

Text after the tags, the line or the box of an answer is not part of the answer. If the text after
`</think>` has an answer, only that text is searched. If the searched text has
`<answer>...</answer>`, only the content of the last pair of these tags is searched. The answer is
the first of the following that exists:

1. the last of these: the last `\boxed{...}`, the line of the last `####`, the text of "the final
   answer is ..." after a box,
2. the sentence after the last "answer is" or "answer:",
3. the complete text, or else its last line, if this text is only an answer,
4. outside of tags, the last formula or the last number, whichever ends later; inside tags, the
   only number or formula that the last line states, or else the last line.

Boxes joined by `and`, `or` or a comma are one answer with several parts. If the text denies an
answer, the text has no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rloo.addons.graders.math.answer_equality import is_plain
from rloo.addons.graders.math.denial import denies_after, denies_before, retracts
from rloo.addons.graders.math.equation_sides import last_side
from rloo.addons.graders.math.normal_form import clean, closing, without_emphasis
from rloo.addons.graders.math.numbers import last_numeral_said, read_numeral, split_sentence
from rloo.addons.graders.math.special_answers import read_choice
from rloo.addons.graders.math.wording import (
    changes_value_after,
    is_statement,
    is_unit,
    word_set,
    words_of,
)

MAX_CHARACTERS = 1000
MARK = "####"
TAGS = "<answer></answer>"

_MOST_BOXES = 16
_THOUGHT = re.compile(r"</think(?:ing)?>(?=\s*\S)", re.IGNORECASE)
_OPENING = re.compile("<answer>", re.IGNORECASE)
_CLOSING = re.compile("</answer>", re.IGNORECASE)
_END_OF_TURN = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|end_of_text|end)\|>|</s>|<(?:end_of_turn|end|eos)>"
    r"|<\uff5cend\u2581of\u2581sentence\uff5c>"
)
# Calculator annotations in GSM8K's solutions: <<6*7=42>>42.
_CALCULATION = re.compile(r"<<[^<>\n]*>>")
_MARKED = re.compile(rf"{MARK}[ \t]*[^\s#]|\\boxed\s*\{{|\b[Tt]he (?:final )?answer is\b")
_NEXT_QUESTION = re.compile(
    r"\n[ \t]*(?:#{1,6} ?|\*\*)?(?:question|problem|human|user|instruction|q) ?[0-9]{0,3} ?:",
    re.IGNORECASE,
)
_BOX = re.compile(r"\\(?:f|frame)?box(?:ed)?(?![A-Za-z])\s*(?:(\{)|([^\s{}$\\,;()]+))")
_COLON = r"\s{0,3}[*_]{0,3}\s{0,3}[:\uff1a]"
_CHOICE = r"\W{0,6}(?:\\?(?:text|textbf|mathrm|mathbf)\W{0,6})?[A-J]{1,5}(?![A-Za-z])"
_ANSWER_IS = re.compile(
    rf"\banswers?(?P<is>\s{{1,3}}(?:is|are|would\s{{1,3}}be)\b)|\banswers?(?P<colon>{_COLON})"
    rf"|\b(?:choice|option)(?:\s{{1,3}}is\b|{_COLON})(?={_CHOICE})"
    rf"|\u7b54\u6848(?:\u662f|\u4e3a|\u9009|\u3011|{_COLON})"
    rf"|(?:\u6545|\u56e0\u6b64|\u6240\u4ee5|\u672c\u9898|\u5e94)?(?<!\u4e0d)\u9009(?:\u62e9)?\u9879?(?:\u662f|\u4e3a|{_COLON})?(?={_CHOICE})",
    re.IGNORECASE,
)
_FINAL = re.compile(r"\bfinal answer is\b", re.IGNORECASE)
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(?!\s)((?:[^$\\]|\\.)*?(?<!\s))\$(?!\d)|(?<!\\)\$\s([^$]+)\s\$"
    r"|(?<!\\)\$ ?((?i:[^$\\\na-z]|\\[a-z]+|\\[^a-z]|(?<![a-z])[a-z](?![a-z]))+?) ?\$(?=[.\s]*\Z)"
    r"|\\\((.+?)\\\)|\\\[(.+?)\\\]"
    r"|\\begin\{(?:align|equation|gather)\*?\}(.+?)\\end\{(?:align|equation|gather)\*?\}",
    re.DOTALL,
)
_ROWS = re.compile(
    r"\\begin\s*\{(?:align|gather|split|equation)(?:ed)?\*?\}|\\end\s*\{\w+\*?\}|\\\\"
)
_CHOSEN = re.compile(
    r"\b(?:(?:choose|select|pick)\s+)?(?:option|choice)?\s*\*{0,2}\(?(?P<letter>[A-J])\)?\*{0,2}"
    r"(?:\s+is\s+(?:the\s+)?(?:correct|right|best|true)(?:\s+(?:answer|option|choice|one))?)?[\s.!]*$"
)
_NAMED_CHOICE = re.compile(
    r"\b(?:choose|select|pick|option|choice)\b|\bis\s+(?:the\s+)?(?:correct|right)\b", re.IGNORECASE
)
_VALUE = r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:/[0-9]+)?|\$[^$\n]+\$|\\\((?:(?!\\\)).)+\\\)"
_AND = r"\s*(?:[,;]?\s+(?:and|or)|[,;])\s+"
_ITEMS = re.compile(rf"(?<![\w.$\\])(?:(?:{_VALUE}){_AND})+(?:{_VALUE})(?=[\s.!]*$)")
_ITEM = re.compile(_VALUE)
_ITEM_NAME = re.compile(r"[$\\(\s]*([A-Za-z])\w*\s*=")
_PERCENT = re.compile(r"[\s$\\)]*(?:%|percent\b)")
_OR_BEFORE = re.compile(r"(-?[0-9][0-9.,/]*)[\s$\\)]*(?:\bor|\\lor)[\s$\\(]*$")
_OR_AFTER = re.compile(
    r"[\s$\\).,(]*or (?:(?:possibly|maybe|perhaps|even|else) )*[\s$\\(]*(-?[0-9][0-9.,/]*(?:\\?%)?)"
)
_CUT = re.compile(r"\$|\n|\\[)\]]")
_CLAUSE_END = re.compile(r"[,.;:(\n][^,.;:(\n]*$")  # the clause that denies the box after it
_DATE = re.compile(
    r"(?:[a-z]+day,? )?(?:(?:the )?[0-9]{1,2}(?:st|nd|rd|th)? )?(?:of )?"
    r"(?:january|february|march|april|may|june|july|august|september|october|november|december)"
    r"(?: [0-9]{1,2}(?:st|nd|rd|th)?)?(?:,? [0-9]{4})?"
    r"|[0-9]{1,2}:[0-9]{2}(?:\s*[ap]\.?\s*m\.?)?|[0-9]{1,2}\s*[ap]\.?m\.?",
    re.IGNORECASE,
)
_HEADING = re.compile(
    r"\W*(?:(?:the )?(?:final )?(?:answer|solution|conclusion|result|summary|verification|check"
    r"|explanation)s?|(?:step|part) \w+\b.*)\W*",
    re.IGNORECASE,
)
_JOINERS = re.compile(
    r"\\text\s*\{([^{}]*)\}|\$|\\[()\[\] ,;]|\\q?quad"
    r"|[A-Za-z](?:_\{?\w\}?)?\s*=|\s+"
)
_SIGNS_OF_AND = re.compile(r"&|\\lor(?![A-Za-z])|\n[ \t]*[-*\u2022]\s")
_REASON = re.compile(r",?\s+(?:because|since)\b", re.IGNORECASE)
_CORRECTING = word_set(
    "no not nope wait but so then thus hence therefore rather instead actually equals"
)


@dataclass(frozen=True, slots=True)
class ExtractedAnswer:
    """An answer found in a completion. `text` is the answer, or empty if the completion denies it.
    `parts` are the contents of joined boxes."""

    text: str
    parts: tuple[str, ...] = ()


def read_answer(text: str, asked: str = "") -> ExtractedAnswer | None:
    """The answer of a completion, or None. `asked` has the sentences of the question that request
    the answer (`wording.asked_in`)."""
    text = _CALCULATION.sub("", _own_turn(text))
    *_, start = (0, *(found.end() for found in _THOUGHT.finditer(text)))
    found = _read(text[start:], asked)
    return _read(text, asked) if found is None and start else found


def _own_turn(text: str) -> str:
    """The text up to its end-of-turn token, or up to the next question. A model that does not stop
    may write a question after its answer."""
    end = _END_OF_TURN.search(text)
    text = text if end is None or not text[: end.start()].strip() else text[: end.start()]
    answer = _MARKED.search(text)
    follows = None if answer is None else _NEXT_QUESTION.search(text, answer.end())
    return text if follows is None else text[: follows.start()]


def tagged(text: str) -> tuple[str, str, str] | None:
    """The texts before, inside and after the last `<answer>`; None without this tag. The inside
    ends at `</answer>` or at the end of the text."""
    *_, opening = (None, *_OPENING.finditer(text))
    if opening is None:
        return None
    inside = text[opening.end() :]
    closing_tag = _CLOSING.search(inside)
    if closing_tag is None:
        return text[: opening.start()], inside, ""
    return text[: opening.start()], inside[: closing_tag.start()], inside[closing_tag.end() :]


def boxed_answer(text: str) -> ExtractedAnswer | None:
    r"""The content of the last `\boxed{...}`, or of the last joined boxes. None without a box. The
    answer is empty if the box is not closed or the words around the box deny it."""
    boxes = _boxes_of(text)
    if not boxes:
        return None
    denied = None
    while boxes and denies_before(text[: boxes[-1][0]]):
        denied = boxes.pop()
    if not boxes:
        return ExtractedAnswer("")
    after = text[boxes[-1][2] : None if denied is None else denied[0]]
    if denies_after(after if denied is None else _CLAUSE_END.sub("", after)):
        return ExtractedAnswer("")
    joined = [boxes.pop()]
    if _has_alternative(text[: joined[0][0]], joined[0][1], text[joined[0][2] :]):
        return ExtractedAnswer("")
    while boxes and _are_joined(text[boxes[-1][2] : joined[0][0]]):
        joined.insert(0, boxes.pop())
    parts = tuple(content for _, content, _ in joined)
    return ExtractedAnswer(", ".join(parts), parts if len(parts) > 1 else ())


def _has_alternative(before: str, content: str, after: str) -> bool:
    """Whether `or` connects the number in a box with a different number."""
    number = read_numeral(content)
    found = [_OR_BEFORE.search(before[-60:]), _OR_AFTER.match(after)]
    others = [read_numeral(one[1].rstrip(".,/")) for one in found if one is not None]
    return number is not None and any(
        other is not None and number.value not in (other.value, other.value / 100)
        for other in others
    )


def _read(text: str, asked: str) -> ExtractedAnswer | None:
    within = tagged(text)
    if within is None:
        return explicit_answer(text, asked) or _in_prose(text, asked)
    before, inside, after = within
    if denies_before(before.rpartition(">")[2]) or denies_after(f"\n{after}"):
        return ExtractedAnswer("")
    return explicit_answer(inside, asked) or ExtractedAnswer(_in_lines(inside, asked))


def explicit_answer(text: str, asked: str = "") -> ExtractedAnswer | None:
    """The answer that a text marks by a box, `####` or "answer is"; None without such a mark."""
    boxed, marked = boxed_answer(text), _marked(text)
    if boxed is not None and marked is not None:
        line, start = marked
        last = _boxes_of(text)[-1][0]
        return boxed if last > start or not any(map(str.isdecimal, line)) else ExtractedAnswer(line)
    if boxed is not None:
        after = text[_boxes_of(text)[-1][2] :]
        final = _named(after, asked) if _FINAL.search(after) else None
        return boxed if final is None or not is_plain(final.text) else final
    return _named(text, asked) if marked is None else ExtractedAnswer(marked[0])


def answer_of_reference(text: str) -> str:
    """The marked answer of a reference, or else its complete text. A percent sign after the box is
    included."""
    explicit = explicit_answer(text)
    boxes = _boxes_of(text)
    is_percent = bool(boxes) and _PERCENT.match(text[boxes[-1][2] :]) is not None
    return text if explicit is None else explicit.text + "\\%" * is_percent


def _boxes_of(text: str) -> list[tuple[int, str, int]]:
    """The start, content and end of each of the last boxes."""
    boxes: list[tuple[int, str, int]] = []
    for found in list(_BOX.finditer(text))[-_MOST_BOXES:]:
        if found[1] is None:
            boxes.append((found.start(), found[2], found.end()))
            continue
        end = closing(text, found.end() - 1)
        # An unclosed box ends with its formula or line. If the text ends first, the box is
        # truncated.
        cut = _CUT.search(text, found.end())
        stop = cut.start() if end is None and cut is not None else end
        content = "" if stop is None else text[found.end() : stop]
        boxes.append((found.start(), content, len(text) if end is None else end + 1))
    return boxes


def _are_joined(between: str) -> bool:
    if len(between) > 100:
        return False
    joined = _SIGNS_OF_AND.sub(" and ", between)
    plain = _JOINERS.sub(lambda found: f" {found[1] or ''} ", joined)
    words = set(words_of(plain))
    if words & _CORRECTING or len(words) > 6 or is_statement(plain):
        return False
    if not between or (not words and plain.strip() in ("/", "|")):
        return True
    has_other_signs = re.search(r"[^A-Za-z\s,;()'*]", plain) is not None
    return not has_other_signs and ("," in plain or ";" in plain or bool({"and", "or"} & words))


def _marked(text: str) -> tuple[str, int] | None:
    """(the line after the last `####` together with following lines of numbers, position of the
    mark). None if there is no mark, or if the mark begins a heading."""
    before, mark, after = text.rpartition(MARK)
    if not mark:
        return None
    line, _, follows = after.lstrip(" \t\n\r:").partition("\n")
    if follows.strip() and _HEADING.fullmatch(line):
        return None
    if denies_after(f"\n{follows}"):
        return "", len(before)
    lines = [line]
    for other in follows[:MAX_CHARACTERS].split("\n"):
        if other.strip() and read_numeral(other) is None:
            break
        lines += [other] if other.strip() else []
    return without_emphasis(", ".join(lines)[: MAX_CHARACTERS + 1]), len(before)


def _named(text: str, asked: str) -> ExtractedAnswer | None:
    """The answer after the last "answer is" or a similar phrase."""
    *_, found = (None, *_ANSWER_IS.finditer(text))
    if found is None:
        return None
    after = text[found.end() :].lstrip(" :\uff1a*_\n\t")[: 2 * MAX_CHARACTERS]
    # A formula may continue in the next line. A sentence does not.
    after = _FORMULA.sub(lambda formula: " ".join(formula[0].split()), after)
    sentence, end, follows = split_sentence(after)
    if found["colon"] and is_statement(sentence):
        return None
    if end == "?" or retracts(follows) or denies_before(text[: found.end()]):
        return ExtractedAnswer("")
    return ExtractedAnswer(_in_sentence(sentence, asked))


def _in_sentence(sentence: str, asked: str) -> str:
    """The only number or the only formula that a sentence states, or else the sentence."""
    stated = _REASON.split(without_emphasis(sentence[:MAX_CHARACTERS]))[0]
    bare = last_side(stated.strip(" *_"))
    if read_numeral(bare, asked) is not None or read_choice(clean(bare)) or _DATE.fullmatch(bare):
        return bare
    said = last_numeral_said(bare, asked, only=True)
    if said is not None:
        return said.text
    formulas = list(_FORMULA.finditer(bare))
    if len(formulas) == 1 and not denies_before(bare[: formulas[0].start()]):
        after = bare[formulas[0].end() :].strip(" .")
        if is_unit(after, asked=asked) and not changes_value_after(after, asked):
            return _content(formulas[0])
    return bare


def _in_lines(text: str, asked: str) -> str:
    """The answer in tags: the complete text if the text or each of its lines is only an answer, or
    else the statement of the last line."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines or is_plain(text):
        return last_side(text.strip())
    if len(lines) > 1 and len(text) <= MAX_CHARACTERS and all(map(is_plain, lines)):
        return ", ".join(lines)
    return _in_sentence(lines[-1], asked)


def _in_prose(text: str, asked: str) -> ExtractedAnswer | None:
    whole = text.strip()
    *_, line = (whole, *whole[-MAX_CHARACTERS:].split("\n"))
    for part in (whole, line):
        if len(part) <= MAX_CHARACTERS and is_plain(without_emphasis(part)):
            return ExtractedAnswer(last_side(without_emphasis(part)))
    tail = without_emphasis(text[-MAX_CHARACTERS:])
    listed = _listed(tail) or _chosen(whole, line)
    if listed is not None:
        return listed
    formulas, number = list(_FORMULA.finditer(tail)), last_numeral_said(tail, asked)
    if formulas and (number is None or number.end < formulas[-1].end()):
        last = formulas[-1]
        if denies_before(tail[: last.start()]) or denies_after(tail[last.end() :]):
            return ExtractedAnswer("")
        return ExtractedAnswer(_content(last))
    return None if number is None else ExtractedAnswer(number.text)


def _content(formula: re.Match[str]) -> str:
    content = next(group for group in formula.groups() if group is not None)
    rows = [row.strip() for row in _ROWS.split(content) if row.strip()]
    if rows and "matrix" not in content and "array" not in content:
        content = rows[-1].replace("&", "")
    return last_side(content)


def _listed(text: str) -> ExtractedAnswer | None:
    """Several values listed at the end of a text, unless they have different names."""
    found = _ITEMS.search(text[-400:])
    if found is None or denies_before(text[-400:][: found.start()]):
        return None
    items = _ITEM.findall(found[0])
    names = {name[1] if name else "" for name in map(_ITEM_NAME.match, items)} - {""}
    joined = re.search(r"\b(?:and|or)\b", found[0]) or len(items) > 2
    if len(names) > 1 or not (joined or all(item[0] in "$\\" for item in items)):
        return None
    parts = tuple(clean(item) for item in items)
    return ExtractedAnswer(", ".join(parts), parts)


def _chosen(whole: str, line: str) -> ExtractedAnswer | None:
    """The choice, if the complete text is one or if its last sentence names one."""
    choice = read_choice(clean(whole)) if len(whole) <= MAX_CHARACTERS else None
    if choice is not None and choice[1] and re.match(r"\W*[A-J]\s*[.)]", whole):
        is_alone = is_plain(choice[1]) or not any(map(str.isdecimal, choice[1]))
        return ExtractedAnswer(whole) if is_alone else None
    sentence = re.split(r"(?<=[.!?])\s+", without_emphasis(line))[-1]
    found = _CHOSEN.search(sentence)
    if (
        found is None
        or not _NAMED_CHOICE.search(sentence)
        or denies_before(sentence[: found.start()])
    ):
        return None
    others = re.findall(
        r"(?<![A-Za-z])(?:[B-HJ](?![A-Za-z])|A(?=\s*(?:,|/|and\b|or\b)))",
        sentence[: found.start("letter")],
    )
    return None if others else ExtractedAnswer(found["letter"])
