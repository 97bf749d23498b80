"""An environment: it thinks of a number, and says whether a guess is too low or too high.

It runs in the sandbox and is played again from the beginning at every turn, so it draws nothing by chance:
the number is the reference of the case.
"""

import re
from typing import Any


class Guess:
    def reset(self, case: dict[str, Any]) -> None:
        self.number = int(case["reference"])
        self.found = False
        self.numbers = 0

    def step(self, text: str) -> str | dict[str, Any]:
        """Answer one reply of the model."""
        guesses = re.findall(r"\d+", text)
        if len(guesses) != 1:
            return "Say one number."
        self.numbers += 1
        guess = int(guesses[0])
        if guess == self.number:
            self.found = True
            return {"text": "Right!", "done": True}
        return "Higher." if guess < self.number else "Lower."

    def reward(self) -> float:
        """Up to 0.2 for replies that are guesses at all, 1 for the right one."""
        return 1.0 if self.found else min(0.05 * self.numbers, 0.2)
