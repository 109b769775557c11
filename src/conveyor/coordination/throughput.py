"""Throughput: how many attempts one host answered a second, and how many of them ran at once meanwhile. A pace
compares it before and after a change of its limit."""

# Measurements last so long; one that is read covers the last whole one, too.
_SECONDS = 1.0


class Throughput:
    """Times are by the monotonic clock."""

    __slots__ = ("_answered", "_area", "_at", "_before", "_from")

    def __init__(self) -> None:
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """Forget what was measured."""
        self._from = self._at = now
        # Of the measurement before: its seconds, answers, and the area below what ran at once.
        self._before = (0.0, 0.0, 0.0)
        self._answered = self._area = 0.0

    def note(self, now: float, answered: int, in_use: int) -> None:
        """Note answers, and what has run at once up to now."""
        if now - self._from >= _SECONDS:
            self._before = now - self._from, self._answered, self._area
            self._from, self._answered, self._area = now, 0.0, 0.0
        self._area += in_use * (now - self._at)
        self._at = now
        self._answered += answered

    @property
    def seconds(self) -> float:
        return self._at - self._from + self._before[0]

    @property
    def answered(self) -> float:
        return self._answered + self._before[1]

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.answered / self.seconds if self.seconds > 0 else 0.0

    @property
    def in_use(self) -> float:
        """How many attempts ran at once on average."""
        return (self._area + self._before[2]) / self.seconds if self.seconds > 0 else 0.0
