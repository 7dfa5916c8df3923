"""Classes of tools as TRL documents them."""

from __future__ import annotations


class Increment:
    """Sets its own task, as the first example of TRL's page on environments does, and its tool returns a number."""

    def reset(self, **kwargs):
        self.counter, self.target = 0, 4
        return f"Increment the counter by {self.target}."

    def get_reward(self):
        return float(self.counter == self.target)

    def guess(self, number: int) -> int:
        """Increment the counter.

        Args:
            number: what to add.
        """
        self.counter += number
        return self.counter
