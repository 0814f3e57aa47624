"""Interprets words: the words of a question, and the words next to a number.

Any noun may be a unit. The words that change a number or an answer are listed in this module: they
negate, hedge, condition, compare, compute or multiply.
"""

from __future__ import annotations

import re


def word_set(words: str) -> frozenset[str]:
    """The set of a text's words."""
    return frozenset(words.split())


# A sentence is a question if it ends with `?`, or if one of its clauses begins with one of these
# imperatives.
_SENTENCE = re.compile(r"(?<=[.?!])\s+|(?<=[.?!][$*)\"'])\s+|\n+")
_ORDER = r"(?:^|[,;:]\s*|\b(?:and|then|please|now)\s+)(?:{})\b"
_TASK = re.compile(
    _ORDER.format("find|determine|compute|calculate|evaluate|simplify|work out|solve for"),
    re.IGNORECASE,
)
_FORM = re.compile(
    _ORDER.format("express|give|write|round|report|state|answer|leave|provide|convert"),
    re.IGNORECASE,
)
_NUMBER_WORDS = word_set(
    """one two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty
    fifty sixty seventy eighty ninety hundred thousand"""
)
# The word before `percent` distinguishes "what percent" from "20 percent of what".
_PERCENT = re.compile(r"([\w.]*)[\s\\-]*(?:per ?cent|%)", re.IGNORECASE)
_DEGREES = re.compile(
    r"([\w.]*)[\s\\^{-]*(?:degrees|degree measure|\bangle|\u00b0|circ\b)", re.IGNORECASE
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_UNIT = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*(?:\^\{?[23]\}?)?|[\u4e00-\u9fff]{1,4}")
# Chinese characters for numbers from ten to a hundred million, negation, hedges, shares, sums.
_ALTERING_SIGNS = frozenset(
    "\u5341\u767e\u5343\u4e07\u842c\u4ebf\u5104\u4e0d\u975e\u7ea6\u5de6\u53f3\u81f3\u5c11\u591a\u534a\u500d\u4e4b"
    "\u51e0\u6210\u6298\u6216\u548c"
)
_MOST_WORDS = 5

# Single letters that are units. Other letters are variables, or multipliers: k, K, M, G, T, B.
_LETTERS = word_set("m g l s h t L W V J N C F A a")
_LETTERS_ATTACHED = word_set("m g l s h t L")
# Units of two letters, and longer abbreviations.
_PAIRS = word_set("km cm mm nm kg mg lb oz ft in yd mi ml cl dl hr kw hz pa am pm")
_FUNCTION_PAIRS = word_set("an of at on to by he she it we")
_ABBREVIATIONS = word_set("hrs min mins sec secs lbs mph kmh kph usd kwh")
MULTIPLIERS = _NUMBER_WORDS - {"one"} | word_set(
    """tens dozen dozens score scores gross pair pairs couple couples lakh lakhs crore crores
    hundreds thousands grand million millions billion billions trillion trillions quadrillion mln
    mio mil thou mega giga tera milli micro tenth tenths
    hundredth hundredths thousandth thousandths percent percentage permille"""
)
# Names of the number in a label, or in a sentence with `is`.
_RESULTS = word_set("sum difference product quotient ratio power root minimum maximum")
_RATE = re.compile(r"\b(?:per|an?|each|every)\s+(?:dozen|pair|couple|gross|half|quarter)\b", re.I)
_DENIALS = word_set(
    """not no non none never neither nor without cannot except excluding unlike unequal isnt arent
    wasnt werent dont doesnt didnt cant wont wouldnt couldnt shouldnt hasnt nope nah unknown
    undefined undetermined differs differ unlikely instead"""
)
_JUDGEMENTS = word_set(
    """wrong wrongly incorrect incorrectly false falsely invalid untrue error erroneous mistake
    mistaken impossible bad fake trick denied refuted rejected disproved retracted nonsense absurd
    kidding joking"""
)
_HEDGES = word_set(
    """nearly almost approximately approx roughly circa estimated estimate guess guessing maybe
    perhaps possibly probably likely supposedly allegedly apparently hardly barely scarcely
    somewhat ish least most rounded or"""
)
_CONDITIONS = word_set(
    "if unless assuming supposing suppose provided ignoring disregarding neglecting"
)
_COMPUTING = word_set(
    """plus minus times divided multiplied subtracted squared cubed power root factorial modulo mod
    sum difference product quotient ratio negative opposite inverse reciprocal complement twice
    thrice half halves third thirds quarter quarters double doubled triple tripled quadruple
    quadrupled halved fold tenfold"""
)
# Words of bounds, comparisons and clauses, which must not be in a unit or before a number.
_BOUNDS = word_set(
    """otherwise and but either versus vs whether though although because over under above below
    beyond within up upto exceeding minimum maximum bigger larger smaller greater lower higher
    better worse further short shy base binary hex octal question different distinct than"""
)
_CLAUSES = word_set(
    "too when whenever until till given while where depending considering compared relative"
)
# These words change nothing after a noun: 42 miles from this town, or since then.
_JOINING = word_set(
    """other rather anything everything nothing something as like since between far about around
    near close closer merely some any several added"""
)
_REFERRING = word_set("that this these those which away off")
# These words change nothing if the question has them.
_ASKABLE = word_set(
    """more less fewer than times bigger larger smaller greater lower higher further different
    distinct other"""
)
_BARE_COMPARISON = re.compile(r"\b(more|less|fewer)\b(?!\s+(?!than|of|that|and|or)[A-Za-z])", re.I)
_BESIDE = _DENIALS | _JUDGEMENTS | _HEDGES | _CONDITIONS | _COMPUTING | {"than"}
_ANYWHERE = _BESIDE | _BOUNDS
_ALTERING = _ANYWHERE | _JOINING | (MULTIPLIERS - _NUMBER_WORDS) | {"hundred", "thousand"}
# Verbs that make the words after a number a statement, not a unit.
_VERBS = word_set(
    """is are was were be been being am do does did has have had can could may might must shall
    should will would seems seem appears looks makes gives means let lets say says think
    believe"""
)


def asked_in(question: str, reference: str = "") -> str:
    """The sentences of a question that request the answer: the last sentence that asks for a value,
    and all sentences that ask for a form of the value. The multipliers in a reference count as
    requested, too."""
    task, forms = "", [f"in {word}." for word in words_of(reference) if word in MULTIPLIERS]
    for sentence in _SENTENCE.split(question):
        if sentence.rstrip(" $*_)\\]\"'}").endswith("?") or _TASK.search(sentence):
            task = sentence
        elif _FORM.search(sentence):
            forms.append(sentence)
    return " ".join([task, *forms])


def asks_for(mark: str, question: str) -> bool:
    r"""Whether a question asks for a percentage (`%`), or for degrees (`^\circ`)."""
    pattern = {"%": _PERCENT, "^\\circ": _DEGREES}.get(mark)
    before = [] if pattern is None else pattern.findall(asked_in(question))
    return any(not word[:1].isdecimal() and word.lower() not in _NUMBER_WORDS for word in before)


def changes_value(words: str, asked: str = "") -> bool:
    """Whether the words before a number change its value or make it another answer. `the difference
    of` changes it, `the difference is` does not. `asked` has the sentences of the question that
    request the answer (`asked_in`)."""
    found = set(words_of(words))
    return _alter(found & (_ALTERING - _RESULTS if "is" in found else _ALTERING), asked)


def changes_value_after(words: str, asked: str = "", *, in_prose: bool = False) -> bool:
    """Whether the words after a number change its value. With `in_prose`, later words than the
    second are ignored, except for judgements such as `wrong`: a sentence may continue with `not` or
    `less than` about something else."""
    plain = _RATE.sub("", words)
    said = words_of(plain)
    first, beside = set(said[:1]), set(said[:2])
    found = beside & MULTIPLIERS  # only the first two words: not in 42 eggs for two days
    if in_prose:
        found |= beside & _BESIDE | set(said) & _JUDGEMENTS
    else:
        found |= set(said) & ((_ANYWHERE | _CLAUSES) - MULTIPLIERS)
        found |= first & (_JOINING | _REFERRING)
    bare = _BARE_COMPARISON.search(plain)
    if bare is not None and (not in_prose or bare[0].lower() in first):
        found.add(bare[0].lower())
    return _alter(found, asked)


def _alter(words: set[str], asked: str) -> bool:
    return any(not _is_asked(word, asked) for word in words)


def _is_asked(word: str, asked: str) -> bool:
    if word in MULTIPLIERS:
        word = f"{word.removesuffix('s')}s?"
        number = rf"(?:how many|number of)\s+(?:[a-z]+\s+){{0,2}}{word}\b|\bin {word}\b"
        return re.search(number, asked, re.IGNORECASE) is not None
    if word == "than":
        return bool({"than", "more", "less", "fewer"} & set(words_of(asked)))
    return word in _ASKABLE and word in words_of(asked)


def since_verb(words: str) -> str:
    """The last four words before a number, without denials before the last verb: `who did vote is`
    for `who did not vote is`."""
    said = words.split()[-4:]
    verbs = [n for n, word in enumerate(said) if word.lower() in ("is", "are", "was", "were", "=")]
    free = verbs[-1] if verbs else 0
    kept = [word for word in said[:free] if not _DENIALS & set(words_of(word))]
    return " ".join(kept + said[free:])


def is_statement(words: str) -> bool:
    """Whether one of the words is a verb, which makes the words a statement."""
    return bool(_VERBS & set(words_of(words)))


def is_unit(text: str, attached: bool = False, asked: str = "") -> bool:
    """Whether `text` after a number is a unit: empty, or up to five words that do not change the
    number. `attached` means that no space separates `text` from the number."""
    opened = _TEXT.sub(lambda found: f" {found[1].strip()}", text)  # keeps an exponent attached
    opened = re.sub(r"^\(([A-Za-z /]+)\)$|(?<=[A-Za-z])[.!]$", r"\1", opened.strip())
    words = [word for word in re.split(r"[\s/]+|\\cdot", opened) if word]
    if text.strip()[:1] in ("/", "^") or len(words) > _MOST_WORDS:
        return False
    if not all(_UNIT.fullmatch(word) and _names(word, attached, asked) for word in words):
        return False
    return not changes_value_after(" ".join(words), asked) and not is_statement(" ".join(words))


def _names(word: str, attached: bool, asked: str) -> bool:
    """Whether a word is long enough for a noun, or a known abbreviation."""
    name = re.sub(r"\^.*", "", word)
    if not name.isascii():
        return not _ALTERING_SIGNS & set(name)
    if len(name) == 1:
        known = _LETTERS_ATTACHED if attached else _LETTERS
        return name in known or (name == "K" and "kelvin" in asked.lower())
    if not attached and len(name) > 2:
        return True
    return name.lower() in _PAIRS | _ABBREVIATIONS | (frozenset() if attached else _FUNCTION_PAIRS)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case; `isn't` is one word."""
    return re.findall(r"[a-z]+", text.lower().replace("'", "").replace("\u2019", ""))
