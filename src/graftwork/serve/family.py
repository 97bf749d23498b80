"""Chooses the member of a family for a request: declared rules first, then the learned router.

Input: the settings of the family, the learned router if there is one, and what a request says. Output: a
model of the project, and why. Pure; releases are chosen afterwards, by `serve/routing.py`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from graftwork.serve.api.call import ChatCall
from graftwork.serve.settings import FamilySettings, RouteRule

if TYPE_CHECKING:
    from graftwork.text.classifier import TextClassifier

ROLE_HEADER = "x-graft-role"


ChosenBy = Literal["rule", "router", "default"]


@dataclass(frozen=True)
class Family:
    """The project's models behind one name."""

    settings: FamilySettings
    main: str
    aliases: Mapping[str, str]
    """The alias of each model's live release."""
    router: "TextClassifier | None" = None

    @property
    def name(self) -> str:
        return self.settings.name

    def choose(
        self, call: ChatCall, headers: Mapping[str, str], *, loaded: Collection[str]
    ) -> tuple[str, ChosenBy, str]:
        """The member for a call, what chose it, and why as in the response header: `rule 2`, `router 0.97`,
        `router unsure 0.41` or `default`.

        The main model answers for one that has no release or server now.
        """
        model, by, why = self._choose(call, headers)
        endpoint = self.settings.remote.get(model)
        if endpoint is not None and endpoint not in loaded:
            return self.main, by, f"{why}, {model} is not ready"
        if endpoint is None and model != self.main and self.aliases[model] not in loaded:
            return self.main, by, f"{why}, {model} is not loaded"
        return model, by, why

    def _choose(self, call: ChatCall, headers: Mapping[str, str]) -> tuple[str, ChosenBy, str]:
        for number, (rule, keywords) in enumerate(self._rules, 1):
            if matches(rule, call, headers, keywords=keywords):
                return rule.to, "rule", f"rule {number}"
        if self.router is None:
            return self.main, "default", "default"
        prediction = self.router.predict(user_text(call.messages))
        if prediction.label is None:
            return self.main, "router", f"router unsure {prediction.probability:.2f}"
        return prediction.label, "router", f"router {prediction.probability:.2f}"

    @cached_property
    def _rules(self) -> list[tuple[RouteRule, Callable[[str], object]]]:
        return [(rule, _find_any(rule.keywords)) for rule in self.settings.rules]


def matches(
    rule: RouteRule, call: ChatCall, headers: Mapping[str, str], *, keywords: Callable[[str], object]
) -> bool:
    """Whether every condition of the rule holds."""
    if rule.role:
        metadata = call.body.get("metadata")
        stated = metadata.get("role") if isinstance(metadata, dict) else None
        if headers.get(ROLE_HEADER) not in rule.role and stated not in rule.role:
            return False
    if any(headers.get(name.lower()) != value for name, value in rule.headers.items()):
        return False
    if rule.schema_names:
        form = call.body.get("response_format")
        schema = form.get("json_schema") if isinstance(form, dict) else None
        if not isinstance(schema, dict) or schema.get("name") not in rule.schema_names:
            return False
    return not rule.keywords or bool(keywords(last_user_turn(call.messages)))


def user_text(messages: Iterable[Mapping[str, str]]) -> str:
    return "\n".join(message["content"] for message in messages if message["role"] == "user")


def last_user_turn(messages: Iterable[Mapping[str, str]]) -> str:
    turns = [message["content"] for message in messages if message["role"] == "user"]
    return turns[-1] if turns else ""


def _find_any(keywords: Iterable[str]) -> Callable[[str], object]:
    """Finds one of the keywords as whole words, in any case."""
    pattern = "|".join(re.escape(keyword) for keyword in sorted(keywords, key=len, reverse=True))
    return re.compile(rf"(?<!\w)(?:{pattern})(?!\w)", re.IGNORECASE).search
