"""Detects from the structure of the sentence whether the words around an answer deny the answer.

A denial before the answer counts if the answer is its predicate (`it cannot be 42`). It does not
count if a finite verb or a relation is between the denial and the answer (`the number that did not
pass is 42`). A denial after the answer counts if it refers to the answer (`42 is wrong`, `42. No,
it is not.`) and not to something else (`42. No other solutions exist.`).
"""

from __future__ import annotations

import re

from rloo.addons.graders.math.wording import word_set

_LOOKED_AT = 400

_DENIAL = (
    r"(?:not|never|neither|nor|cannot|(?:is|are|was|were|do|does|did|ca|wo|would|could|should|must"
    r"|has|have|had|ai)nt)"
)
_PHRASE = re.compile(
    r"\b(?:instead of|rather than|other than|different from|anything but|far from|except(?: for)?"
    r"|excluding|unlike|unequal to|no longer|between (?:\w+ ){0,2}and"
    r"|(?:wrong|incorrect|false|invalid) (?:final )?(?:answer|value|number|result|solution)"
    r" (?:is|was|would be)"
    r"|(?<!\bno )(?<!\bnot )(?:doubt|deny)(?: that)? (?:it|this|that|the answer) (?:is|equals)"
    r"|(?:reject|discard|dismiss|exclude)(?: the (?:answer|value|solution))?)$"
)
# Finite verbs. A denial before a finite verb does not refer to the answer.
_FINITE = word_set(
    """is are was were equals gives yields has makes means becomes leaves shows implies gets costs
    contains totals comes produces remains reads says earns pays sells had gave got made became
    left came took takes"""
)
# Verbs that are finite after a subject.
_BASE = word_set(
    """be have get obtain find equal give yield make conclude deduce see know need do can may might
    must will would could should answer box write report"""
)
_SUBJECTS = word_set("i we you they it he she this that there one which")
_TURNS = word_set("but so thus hence therefore then because since")
_TOKEN = re.compile(
    r"(?P<relation>=|:|;|\u2014|\u2192|\\(?:to|in|equiv|approx|implies|iff|r?rightarrow)\b)"
    r"|(?P<comma>,)|(?P<word>[a-z]+)"
)
# Chinese: is not, does not equal; is wrong, is not right.
_CHINESE_BEFORE = re.compile(
    r"(?:\u4e0d\u662f|\u4e0d\u7b49\u4e8e|\u4e0d\u4e3a|\u5e76\u975e)[\s$\\(:\uff1a]*$"
)
_CHINESE_AFTER = re.compile(
    r"[\s$\\).,\uff0c\u3002]*(?:\u8fd9|\u7b54\u6848)?\u662f?"
    r"(?:\u9519\u8bef?\u7684?|\u4e0d\u5bf9|\u4e0d\u6b63\u786e|\u4e0d\u6210\u7acb|\u9519)"
)
_UNEQUAL = re.compile(r"(?:\\neq?(?![A-Za-z])|\u2260|!=|\\not\s*=)[\s${\\([]*$")
# These phrases deny a clause with any verb.
_CLAUSE = re.compile(
    rf"\b(?:{_DENIAL}|nobody) (?:\w+ )?(?:true|the case|correct|right|possible|likely|think"
    r"|believe|say|claim|agree|suppose|mean)\b(?! to\b)(?P<clause>[^,;:]*)$"
    r"|\b(?:impossible|wrong|incorrect|false|untrue|mistake|error|lie)"
    r" (?:that|to (?:say|claim|think|answer|write))\b"
    r"(?P<other>[^,;:]*)$"
)

# Statements about an answer; `#` stands for a formula or a number.
_VERB = r"(?:is|was|are|were|be|seems|looks|(?:would|must|may|might|could|can|should) be)"
_ADVERBS = r"(?:(?:clearly|certainly|definitely|probably|just|simply|quite|really|also) )*"
# With these words after it, a judgement refers to something else: wrong to, not possible that.
_OF_ELSE = r"(?! (?:to|for|that|if|when|with|in|otherwise)\b)"
_BAD = (
    r"(?:wrong|incorrect|false|invalid|impossible|untrue|mistaken|a mistake|an error|nonsense|a lie"
    rf"|a guess|a trick|fake)\b{_OF_ELSE}"
)
_GOOD = (
    r"(?:(?:the |a |my |our )?(?:right|correct|true|valid|possible|real|final|(?:\w+ )?answer)\b"
    rf"{_OF_ELSE}"
    r"|(?:it|so|quite)\W*$)"
)
_PREDICATE = re.compile(
    rf"{_VERB} {_ADVERBS}{_BAD}|{_BAD}|{_DENIAL} {_GOOD}|just kidding"
    rf"|{_VERB} {_ADVERBS}(?:ruled out|excluded|eliminated|rejected)\b"
    rf"|(?:{_VERB} {_ADVERBS}{_DENIAL}|{_DENIAL}(?: be)?"
    rf"|(?:does|did|can|could|would|will) not(?: be)?)"
    rf" {_ADVERBS}(?:{_GOOD}|equal (?:it|that|the)\b|(?:work|hold)\b{_OF_ELSE}|be the\b)"
    rf"|{_VERB} {_DENIAL}[\s.!]*$|{_DENIAL}[\s.!]*$"
)
_SPEAKING = re.compile(
    r"(?:(?:the |my |this |that )(?:\w+ )?(?:answer|number|value|result|solution) "
    r"|but |and |which |that |this |it |i think )+"
)
_NO = re.compile(
    r"(?:no|nope|no wait|never mind|scratch that|just kidding|oops|i was wrong"
    r"|i (?:have )?made (?:a mistake|an error)|that was (?:a lie|a joke)|correction)"
)
_CORRECTING = re.compile(r"(?:wait|actually|sorry|hold on)\b", re.IGNORECASE)
_CORRECTS = re.compile(
    r"(?:it|that|the (?:right |correct |real )?answer) (?:is|should be|must be) (?:# )?#"
)
_REPLACES = re.compile(rf"\bbut (?:actually )?{_CORRECTS.pattern}")
_START = re.compile(
    r"(?:(?:wait|hmm+|actually|oh|sorry|well|hold on|ah)\b[\s,.!\u2026-]*)+", re.IGNORECASE
)
_SENTENCE = re.compile(r"(?<=[.?!])(?:[*_$)\]\"]|\\[\])])*\s+|\n+")
_SPLIT = re.compile(r"[,;:()\u2014]|\b(?:but|because|since|as|while|whereas|so|and)\b")


def denies_before(text: str) -> bool:
    """Whether the last sentence of `text` denies the answer that follows `text`."""
    if _UNEQUAL.search(text[-40:]) or _CHINESE_BEFORE.search(text[-40:]):
        return True
    sentence = _SENTENCE.split(text[-_LOOKED_AT:])[-1].lower()
    sentence = re.sub(r"(?<=[a-z])['\u2019]s\b", " is", sentence)
    sentence = re.sub(r"['\u2019]", "", sentence)
    words = " ".join(re.findall(r"[a-z]+|[,;:]", sentence))
    clause = _CLAUSE.search(words)
    if clause is not None and not _TURNS & set((clause["clause"] or clause["other"] or "").split()):
        return True
    return _PHRASE.search(words) is not None or _is_predicate(sentence)


def _is_predicate(sentence: str) -> bool:
    """Whether the sentence has a denial, and no finite verb or relation after the denial."""
    has_verb = False
    for token in reversed(list(_TOKEN.finditer(sentence))):
        word = token["word"]
        if token["comma"]:  # `it is not, in fact,`
            return re.search(rf"\b{_DENIAL}\s*(?:,[^,]*)?$", sentence[: token.start()]) is not None
        if word is not None and re.fullmatch(_DENIAL, word):
            return True
        if word is None or word in _FINITE | _TURNS or (has_verb and word in _SUBJECTS):
            return False
        has_verb = has_verb or word in _BASE
    return False


def denies_after(text: str) -> bool:
    """Whether the rest of the answer's sentence, or the next sentence, denies the answer."""
    if _CHINESE_AFTER.match(text[:40]):
        return True
    rest, *others = _SENTENCE.split(text[: 2 * _LOOKED_AT])
    words = _plain(re.sub(r"^[^A-Za-z,;:(]+", "", rest))
    if re.search(r"\b(?:otherwise|unless)\b", words) or _REPLACES.search(words):
        return True
    if any(_PREDICATE.match(_spoken(clause)) for clause in _SPLIT.split(words)):
        return True
    return any(map(retracts, [text for text in others if _START.sub("", _bare(text))][:1]))


def retracts(text: str) -> bool:
    """Whether the beginning of a text denies the answer that precedes the text."""
    said = _START.sub("", _bare(text[:_LOOKED_AT]), count=1)
    first = re.split(r"[,;:.!?\n\u2014]", _plain(said), maxsplit=1)[0].strip()
    spoken = _SPEAKING.match(first)
    if _CORRECTING.match(_bare(text)) and _CORRECTS.match(first):
        return True
    return _NO.fullmatch(first) is not None or (
        _PREDICATE.match(_spoken(first)) is not None
        and (spoken is not None or not first.startswith(("is ", "was ")))
    )


def _bare(text: str) -> str:
    return re.sub(r"^\W+", "", text)


def _spoken(clause: str) -> str:
    return _SPEAKING.sub("", clause.strip(), count=1).strip()


def _plain(text: str) -> str:
    text = text.lower().replace("\u2019", "'").replace("'s ", " is ").replace("'", "")
    text = re.sub(r"[^a-z,;:.!?()\s\u2014]+", " # ", text)
    return re.sub(r"[ \t]+", " ", text).strip()
