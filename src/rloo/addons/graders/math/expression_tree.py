"""The form of an expression, and comparisons of two forms."""

from __future__ import annotations

from dataclasses import dataclass, field

INEQUALITIES = frozenset({"<", ">", "\\le", "\\ge", "\\in"})
_ALWAYS = frozenset({"\\sqrt"})
_LOGARITHMS = frozenset({"\\log", "\\ln"})
_INTERVALS = frozenset({"(]", "[)", "[]"})


class UnparsableExpression(ValueError):
    """Raised if a text cannot be parsed."""


@dataclass(slots=True)
class ExpressionForm:
    """The form of an expression. `pending` are operations that could be evaluated, between rational
    numbers or like terms. `parts` are names, functions, relations, lists, marks and bases. `lists`
    are the brackets of lists: `()`, `[)`, an environment, or `bare` for none. `size` is the number
    of items of the expression."""

    pending: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    lists: set[str] = field(default_factory=set)
    size: int = 1

    @property
    def has_inequality(self) -> bool:
        """Whether the expression has an order relation."""
        return not self.parts.isdisjoint(
            {"relation <", "relation >", "relation \\le", "relation \\ge"}
        )

    def brackets_for(self, reference: ExpressionForm) -> str | None:
        """The brackets to add to a list without brackets, so that answer and reference have the
        same kind of list: `bare` if none are needed, None if the kinds differ."""
        if not self.lists or not reference.lists or self.lists == reference.lists:
            return "bare"
        for kind in ("()", "\\{\\}"):
            both = [{kind if k == "bare" else k for k in form.lists} for form in (self, reference)]
            if both[0] == both[1]:
                return kind
        return None

    def is_within(self, reference: ExpressionForm) -> bool:
        """Whether each part is also in the reference, or is another notation for a part of the
        reference."""
        allowed = set(reference.parts) | _ALWAYS
        relations = {f"relation {name}" for name in INEQUALITIES}
        if "list" in allowed:
            allowed |= {"\\pm", "\\cup"} | relations
        if _LOGARITHMS & allowed:
            allowed |= _LOGARITHMS
        if "bare" in reference.lists:
            allowed.add("\\{\\}")
        if "\\pm" in allowed:
            allowed.add("list")
        if any(part.startswith("relation") and part != "relation =" for part in allowed):
            allowed |= {"list", "\\infty", "\\cup"} | relations
        if relations & reference.parts:
            allowed |= _INTERVALS
        based = [{p for p in form.parts if p.startswith("base")} for form in (self, reference)]
        return based[0] == based[1] and self.pending <= reference.pending and self.parts <= allowed

    def has_items_of(self, reference: ExpressionForm) -> bool:
        """Whether a list has as many items as the reference. True if a count is unknown: sets may
        repeat an item, and `\\pm` and `\\cup` represent several items."""
        if {"\\pm", "\\cup"} & (self.parts | reference.parts) or "bare" not in (
            self.lists | reference.lists
        ):
            return True
        if not self.lists and any(part.startswith("relation") for part in self.parts):
            return True
        return self.size == reference.size
