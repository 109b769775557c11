"""Pace: how many requests one tenant makes to one host at once, found by watching how the host responds.

It begins with a few and doubles with each round trip (slow start), then grows by a few, while latency stays flat.
Latency that rises with the number of requests shrinks it, and so do 429, and 503, timeouts and failed connections that
become more frequent with it; these also leave a ceiling: a while passes before the pace goes there again. Retry-After
with 429, or of many at once, pauses the host; after a pause it begins with a fraction.

Some pages fail or are slow whatever the load, and must not slow down the others. So the latency of a round trip is a
low quantile, which a few slow pages do not move; a page that fails again in a retry says nothing; failures are compared
with those of the round trips before; and if they get no better by shrinking, the limit is restored, and what is left
counts as the pages' own. So it is if throughput falls with the number of requests: a host that queues them answers as
many as before.

Each worker finds its own part: as flows of TCP do, workers that share a host converge. paces.py is what they share, and
host_lanes.py how the lanes of one worker do.
Everything here is arithmetic on batches of finished attempts: no call and no await.
"""

from collections.abc import Sequence
from math import inf, sqrt

from conveyor.coordination.host_lanes import LARGEST, HostLanes, PaceUser
from conveyor.coordination.throughput import Throughput

# Requests at once to a host that nothing is known of.
START = 8
# Latency is flat up to this ratio to its base, this many seconds above it, and so many in all: less says nothing.
_FLAT_RATIO = 1.2
_FLAT_SECONDS = 0.01
_LOW_SECONDS = 0.05
# How much longer attempts take, as a multiple of the lag of the process that makes them: it waits to read a response,
# and again to go on with what it read, each time on average as long as the lag, and with more in line up to twice that.
_OWN_DELAY = 4.0
# A round trip whose latency rose lasts at least so many seconds, so that a stall of this machine is a small part of it.
_LEAST_SECONDS = 0.1
# Growth for each round trip after the slow start, as a share of the limit.
_GROWTH = 0.05
# After how many seconds at most the load has doubled with the limit, and all attempts count again after that.
_LONGEST_FILL, _LONGEST_DOUBLING = 0.1, 10.0
# The latency of a round trip: what this share of its attempts stay below.
_QUANTILE = 1 / 3
# Two quantiles half of the attempts apart around it, and by how many of its standard errors it may be higher by chance.
_LOWER, _UPPER = _QUANTILE - 0.25, _QUANTILE + 0.25
_ERRORS = 2.0
# Attempts over which it is averaged, where round trips have fewer; and how much of the way the latency without load
# follows one that is higher and flat.
_AVERAGED = 24
_DRIFT = 0.005
# Factors of the limit after latency rose and after requests failed, and of the ceiling after a pause.
_SMALLEST_SHRINK, _LARGEST_SHRINK = 0.85, 0.5
_AFTER_FAILURE, _AFTER_MANY = 0.75, 0.5
_AFTER_PAUSE = 0.25
# Rising latency alone never shrinks the limit below this.
_LEAST_BY_LATENCY = 4
# After latency has shrunk the limit to this share at least, the throughput of so many seconds, latencies and round
# trips is compared with that before.
_TRIAL_SHARE = 0.5
_TRIAL_SECONDS, _TRIAL_LATENCIES, _TRIAL_ROUNDS = 0.5, 8, 2
# It says something if not more than this share of the requests is left. And if round trips were slow for this share of
# the time, latency did not get better.
_FAR_LOWER = 0.8
_STILL_SLOW = 0.25
# For how many seconds latency as it was counts as flat then, at first; each time in vain doubles that, up to the last.
_TOLERANCES = (5.0, 60.0)
# How close to the ceiling the limit grows.
_BELOW_CEILING = 0.95
# After how many seconds the limit may pass the ceiling, at first; each time in vain doubles that, up to the last.
_FAILURE_PAUSES, _LATENCY_PAUSES = (0.25, 300.0), (1.0, 8.0)
# After failures, these many round trips at first if that is longer; and at most so many seconds for each request of the
# limit, because a try of a small one costs few requests.
_FAILURE_ROUNDS = 20
_LONGEST_FOR_EACH = 10.0
# A limit so far above the ceiling shows that there is none.
_ABOVE_CEILING = 1.15
# A ceiling up to this much higher than the one before is the same one.
_SAME_CEILING = 1.5
# Failures beyond those that the round trips before let expect are added up, less half a standard deviation for each
# round trip. Too many are this many, and this many standard deviations.
_SLACK, _TOO_MANY, _DEVIATIONS = 0.5, 3.0, 3.0
# Failures and attempts that an unknown host starts with, and the largest number of attempts that counts.
_PRIOR_FAILED, _PRIOR_COUNT = 0.2, 10.0
_LARGEST_COUNT = 1000.0
# A host is overloaded, and the round trip over, once this share of the limit and this number of attempts failed.
_MANY_SHARE = 0.5
_MANY_LEAST = 6
# If this share of the failures is left after this number of falls in a row, the number of requests was not the cause.
_FAILURES_LEFT = 0.7
_VAIN_FALLS = 4
# Attempts in a round trip, at least; and how much of the limit must be in use for the limit to grow.
_LEAST_ROUND = 4
_IN_USE = 0.8
# How long attempts that take long must run without a failure for the limit to grow.
_ALIVE_SECONDS = 2.0
# The longest Retry-After that pauses a host, in seconds.
MAX_PAUSE = 3600.0


class HostPace:
    """The pace of one tenant at one host, for one worker. Times are by the monotonic clock."""

    __slots__ = (
        "_excess",
        "_failed",
        "_falls",
        "_first_share",
        "_fresh_from",
        "_is_fresh",
        "_lag",
        "_past_count",
        "_past_failed",
        "_probe_pause",
        "_proven",
        "_restored",
        "_retry_after",
        "_round_from",
        "_running",
        "_seconds",
        "_settled_at",
        "_skipped",
        "_slow_seconds",
        "_stale",
        "_threshold",
        "_throughput",
        "_tolerance",
        "_tolerated",
        "_tolerated_until",
        "_trial",
        "_undecided_until",
        "_vain",
        "_warned",
        "base",
        "ceiling",
        "host",
        "is_changed",
        "is_dropped",
        "is_new",
        "lanes",
        "latency",
        "limit",
        "paused_until",
        "probe_at",
        "tenant",
        "used_at",
    )

    def __init__(self, tenant: str, host: str) -> None:
        self.tenant = tenant
        self.host = host
        self.limit = float(START)
        self.lanes = HostLanes(START)
        self.paused_until = 0.0
        # Where requests failed, and when the limit may pass it again.
        self.ceiling = inf
        self.probe_at = 0.0
        self._probe_pause = 0.0
        # Latency of the last round trip, and the latency without load.
        self.latency = 0.0
        self.base = inf
        # Whether the next round trip has a latency of its own, because the limit has changed much.
        self._is_fresh = True
        # Below this the limit doubles.
        self._threshold = inf
        # The round trip so far: latencies of what was answered, how many more were and met less load, how many failed,
        # and their longest Retry-After.
        self._seconds: list[float] = []
        self._skipped = 0
        self._failed = 0
        self._retry_after = 0.0
        # The largest lag of the processes that made them.
        self._lag = 0.0
        # When it began, and until when it goes on although it has enough attempts.
        self._round_from = -inf
        self._undecided_until = -inf
        # Attempts and failures of the round trips before, at this limit or lower ones; the last ones count more.
        self._past_count = _PRIOR_COUNT
        self._past_failed = _PRIOR_FAILED
        # Failures beyond what those let expect.
        self._excess = 0.0
        # Falls in a row, and the share of failures before the first of them.
        self._falls = 0
        self._first_share = 0.0
        # The limit and the threshold before the first of several shrinks or falls.
        self._restored = (float(START), inf)
        # The most that ran at once in this round trip.
        self._running = 0
        # When the limit last changed, or requests last failed.
        self._settled_at = 0.0
        # Attempts in flight that began before the limit shrank: they say nothing about the new one.
        self._stale = 0
        # Attempts that began before this time say nothing about the latency of this round trip.
        self._fresh_from = -inf
        # The limit up to which latency was flat, and whether it rose all the same in the last round trip.
        self._proven = 0.0
        self._warned = False
        # What the host answers. While a shrink is on trial: what it answered a second before, and to how many requests
        # at once; the largest latency, and the seconds of slow round trips since.
        self._throughput = Throughput()
        self._trial: tuple[float, float] | None = None
        self._tolerated = 0.0
        self._slow_seconds = 0.0
        # How many in a row were in vain; for how long, and until when, that latency counts as flat.
        self._vain = 0
        self._tolerance = 0.0
        self._tolerated_until = -inf
        # Whether there is something to share; whether no round trip is over yet; whether another object stands for this
        # host by now; when it was last used.
        self.is_changed = False
        self.is_new = True
        self.is_dropped = False
        self.used_at = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether the slow start has ended, so that the limit says what the host bears."""
        return self._threshold < inf

    @property
    def is_idle(self) -> bool:
        return self.lanes.is_idle

    def room(self, user: PaceUser, now: float) -> int:
        """Return how many more references this lane may send now."""
        return 0 if now < self.paused_until else self.lanes.room(user)

    def start(self, user: PaceUser, count: int) -> None:
        """Count references as sent."""
        self.lanes.start(user, count)
        self._note_running()

    def finish(self, user: PaceUser, count: int, now: float) -> None:
        """Count references as no longer sent, and let lanes know that there is room."""
        self.lanes.finish(user, count)
        self._stale = min(self._stale, self.lanes.in_flight)
        self.wake(now, user)

    def wake(self, now: float, finished: PaceUser | None = None) -> None:
        """Let lanes know that there is room, if there is. With `finished` it is because this lane sends less."""
        if now >= self.paused_until:
            for user in self.lanes.find_next(finished):
                user.on_room(self)

    def grow_while_alive(self, now: float) -> None:
        """Grow although no attempt has ended: attempts take long, and none has failed for a while."""
        if now >= self.paused_until and now - self._settled_at >= _ALIVE_SECONDS and self._is_full():
            self._settled_at = now
            self._grow(now)
            self.wake(now)

    def learn(self, seconds: Sequence[float], now: float, lag: float = 0.0) -> None:
        """Learn from attempts that were answered, with the seconds that each took. `lag` is how late the process that
        made them runs what is due: so much of their latency, a few times over, is its own."""
        self.used_at = now
        self._lag = max(self._lag, lag)
        self._note_running()
        self._throughput.note(now, len(seconds), self.lanes.in_use)
        stale = min(len(seconds), self._stale)
        if stale:
            self._stale -= stale
            seconds = seconds[stale:]
        if now - self._fresh_from < _LONGEST_DOUBLING:
            fresh = [each for each in seconds if now - each >= self._fresh_from]
            self._skipped += len(seconds) - len(fresh)
            seconds = fresh
        self._seconds += seconds
        self._end_if_over(now)

    def refuse(self, now: float, retry_after: float | None = None) -> None:
        """An attempt was answered with 429, which is about the number of requests; its Retry-After about the host."""
        self.used_at = now
        if self._stale > 0:
            self._stale -= 1
        else:
            self._fall(now)
        if retry_after is not None and retry_after > 0:
            self.pause(now + min(retry_after, MAX_PAUSE))

    def fail(self, now: float, retry_after: float | None = None, *, is_retry: bool = False) -> None:
        """An attempt was answered with 503, timed out, or had no connection: because of the load, or of its URL."""
        self.used_at = now
        if self._stale > 0:
            self._stale -= 1
            return
        if is_retry:
            # It failed before, most likely at another load.
            return
        self._failed += 1
        self._retry_after = max(self._retry_after, retry_after or 0.0)
        self._end_if_over(now)

    def pause(self, until: float) -> None:
        """Send nothing up to this time, and then begin with a fraction."""
        if until <= self.paused_until:
            return
        self.paused_until = until
        known = self.limit if self.ceiling == inf else self.ceiling
        self._threshold = min(self._threshold, max(1.0, known / 2))
        self._set(max(1.0, known * _AFTER_PAUSE))
        self._settled_at = until
        self._make_stale()
        for user in list(self.lanes.waiting):
            user.on_lower(self)

    def adopt(self, limit: float, threshold: float = inf) -> None:
        """Begin with what other workers, or earlier jobs, found for this host, and double up to the threshold."""
        if self.is_new:
            self._threshold = max(1.0, threshold)
            self._set(max(1.0, min(limit, LARGEST)))

    def _end_if_over(self, now: float) -> None:
        attempts = len(self._seconds) + self._failed
        if self._failed >= max(_MANY_LEAST, _MANY_SHARE * self.limit):
            self._end_round(now)
        elif attempts >= max(_LEAST_ROUND, int(self.limit)) and now >= self._undecided_until:
            if self._is_too_short(now):
                self._undecided_until = self._round_from + _LEAST_SECONDS
            else:
                self._end_round(now)

    def _is_too_short(self, now: float) -> bool:
        """Whether the latency of the round trip rose, and a stall of this machine could be all of the reason."""
        if now - self._round_from >= _LEAST_SECONDS or not self._seconds:
            return False
        return sorted(self._seconds)[int(len(self._seconds) * _QUANTILE)] > self._allowed() + self._own_delay

    def _end_round(self, now: float) -> None:
        self.is_new, self.is_changed = False, True
        self._settled_at = now
        if self._is_overload():
            self._end_overload(now)
            return
        if self._failed <= self._first_share * _FAILURES_LEFT * (self._failed + self._answered):
            # Else it took more than this round trip to see that they got no better.
            self._falls = 0
        self._note_past(self._answered, self._failed)
        if self._seconds:
            self._end_flat_or_slow(now)
        self._judge_trial(now)
        self._begin_round(now)

    def _is_overload(self) -> bool:
        """Whether more failed, in this round trip or in the last few, than those before let expect."""
        expected = (self._answered + self._failed) * self._past_failed / self._past_count
        deviation = sqrt(expected)
        self._excess = max(0.0, self._excess + self._failed - expected - _SLACK * deviation)
        return self._excess > _TOO_MANY + _DEVIATIONS * deviation

    def _end_overload(self, now: float) -> None:
        """Too many failed: lower the limit, unless that did not help before."""
        failed, count = self._failed, self._failed + self._answered
        if self._falls == 0:
            self._first_share, self._restored = failed / count, (self.limit, self._threshold)
        if self._falls >= _VAIN_FALLS and failed / count >= self._first_share * _FAILURES_LEFT:
            self._past_count, self._past_failed = _PRIOR_COUNT, _PRIOR_COUNT * failed / count
            self._falls = 0
            self._restore()
            self._begin_round(now)
            return
        self._falls += 1
        # One of them may be about its URL alone.
        retry_after = self._retry_after if failed >= max(_MANY_LEAST, _MANY_SHARE * count) else 0.0
        is_first = self._falls == 1
        self._fall(now, _AFTER_FAILURE if is_first else max(_AFTER_MANY, min(_AFTER_FAILURE, 1 - failed / count)))
        if retry_after > 0:
            self.pause(now + min(retry_after, MAX_PAUSE))

    @property
    def _answered(self) -> int:
        return len(self._seconds) + self._skipped

    def _note_past(self, answered: int, failed: int) -> None:
        count = self._past_count + answered + failed
        fade = min(1.0, _LARGEST_COUNT / count)
        self._past_count = count * fade
        self._past_failed = (self._past_failed + failed) * fade

    def _end_flat_or_slow(self, now: float) -> None:
        """Grow if latency was flat; shrink if it rose, unless that did not help before."""
        seconds = sorted(self._seconds)
        count = len(seconds)
        latency = seconds[int(count * _QUANTILE)]
        # How far it may be off by chance, from how far the latencies around it are apart.
        spread = seconds[int(count * _UPPER)] - seconds[int(count * _LOWER)]
        error = 2 * spread * sqrt(_QUANTILE * (1 - _QUANTILE) / count)
        weight = 1.0 if self._is_fresh else min(1.0, count / _AVERAGED)
        before = self.latency
        latency = self.latency = self.latency + weight * (latency - self.latency)
        self._is_fresh = False
        if latency < self.base:
            # Half of the way: a round trip may be short by chance, and the first ones have connections to open.
            self.base = latency if self.base == inf else (self.base + latency) / 2
        is_flat = latency <= max(self._allowed() + self._own_delay, self.base + _ERRORS * error)
        self._slow_seconds += 0.0 if is_flat else now - self._round_from
        if is_flat:
            self.base += _DRIFT * (max(min(latency, self.base), latency - self._own_delay) - self.base)
            self._warned = False
            self._proven = max(self._proven, min(self.limit, self._running))
            if self._is_full():
                self._grow(now)
        elif int(self.limit) <= self._proven and not self._warned:
            # It was flat with so many requests: if their number is the cause, those that begin now are slow, too.
            self._warned, self.latency, self._fresh_from = True, before, now
        else:
            self._shrink(latency, now)

    def _judge_trial(self, now: float) -> None:
        """Once throughput can be compared with that before a shrink: restore the limit if it fell with it."""
        seen = self._throughput
        least = max(_TRIAL_SECONDS, _TRIAL_LATENCIES * self._tolerated)
        if self._trial is None or seen.seconds < least or seen.answered < _TRIAL_ROUNDS * self.limit:
            return
        rate, in_use = self._trial
        self._trial = None
        left = seen.in_use / in_use
        if left > _FAR_LOWER or seen.rate >= rate * (1 + left) / 2:
            self._vain = 0
            return
        self._vain += 1
        if self._vain > 1 or self._slow_seconds >= _STILL_SLOW * seen.seconds:
            # Latency did not get better, or rises now and then whatever the limit.
            self._tolerance = min(_TOLERANCES[1], max(_TOLERANCES[0], self._tolerance * 2))
            self._tolerated_until = now + self._tolerance
        self._restore()

    def _restore(self) -> None:
        """Shrinking was in vain."""
        limit, self._threshold = self._restored
        self.ceiling, self.probe_at = inf, 0.0
        self._set(max(self.limit, limit))

    def _allowed(self) -> float:
        """The latency up to which it is flat."""
        tolerated = self._tolerated if self._settled_at < self._tolerated_until else 0.0
        return max(self.base * _FLAT_RATIO, self.base + _FLAT_SECONDS, _LOW_SECONDS, tolerated)

    @property
    def _own_delay(self) -> float:
        return _OWN_DELAY * self._lag

    def _grow(self, now: float) -> None:
        if self.limit > self.ceiling * _ABOVE_CEILING:
            self.ceiling, self._probe_pause = inf, 0.0
        if self.limit < self._threshold:
            limit = min(self.limit * 2, max(self._threshold, self.limit + 1))
            # The next round trip is of those that begin when the load has doubled, too.
            self._fresh_from, self._is_fresh = now + min(self.latency, _LONGEST_FILL), True
        else:
            limit = self.limit + max(1.0, self.limit * _GROWTH)
        if now < self.probe_at:
            limit = min(limit, self.ceiling * _BELOW_CEILING)
        self._set(max(min(limit, LARGEST), self.limit))

    def _shrink(self, latency: float, now: float) -> None:
        """Latency rises with the number of requests, as far as one can see by now."""
        if self._trial is None and self.limit <= _LEAST_BY_LATENCY:
            # Less would not help.
            self.base = latency
            return
        self._fresh_from = now
        self._tolerated = latency if self._trial is None else max(self._tolerated, latency)
        factor = max(_LARGEST_SHRINK, min(_SMALLEST_SHRINK, (self._allowed() + self._own_delay) / latency))
        if self._trial is None:
            self._trial = self._throughput.rate, max(1.0, self._throughput.in_use)
            self._restored = self.limit, self._threshold
            self._throughput.restart(now)
        least = max(_LEAST_BY_LATENCY, self._restored[0] * _TRIAL_SHARE)
        if self._used > least:
            self._lower(max(factor, least / self._used), _LEAST_BY_LATENCY)
            self._throughput.restart(now)
            self._slow_seconds = 0.0
            self._wait_to_probe(now, *_LATENCY_PAUSES)

    def _fall(self, now: float, factor: float = _AFTER_FAILURE) -> None:
        """Requests failed."""
        self._trial, self._excess = None, 0.0
        self._settled_at = self._fresh_from = now
        self._lower(factor, 1)
        self._begin_round(now)
        first, last = _FAILURE_PAUSES
        self._wait_to_probe(now, max(first, _FAILURE_ROUNDS * self.latency), min(last, _LONGEST_FOR_EACH * self.limit))

    def _lower(self, factor: float, least: int) -> None:
        """Lower the limit from what was in use, and remember that as the ceiling."""
        used = self._used
        if used > self.ceiling * _SAME_CEILING or used * _SAME_CEILING < self.ceiling:
            self._probe_pause = 0.0
        self.ceiling = float(used)
        self._set(min(self.limit, max(float(least), used * factor)))
        self._proven, self._warned = min(self._proven, self.limit), False
        self._threshold = self.limit
        self._is_fresh = True
        self._make_stale()

    def _wait_to_probe(self, now: float, first: float, last: float) -> None:
        self._probe_pause = max(first, min(last, self._probe_pause * 2))
        self.probe_at = now + self._probe_pause

    def _begin_round(self, now: float) -> None:
        self._round_from, self._undecided_until = now, -inf
        self._seconds, self._skipped, self._failed = [], 0, 0
        self._retry_after = self._lag = 0.0
        self._running = 0
        self._note_running()

    @property
    def _used(self) -> float:
        """How much of the limit was in use in this round trip."""
        return min(self.limit, max(self._running, 1))

    def _note_running(self) -> None:
        """Lanes send ahead: what is beyond their width does not run, and is no load for the host."""
        self._running = max(self._running, self.lanes.in_use)

    def _is_full(self) -> bool:
        """Whether the limit was in use, so that more might be used."""
        return self._running >= _IN_USE * int(self.limit)

    def _make_stale(self) -> None:
        self._stale = self.lanes.in_use
        if self.lanes.in_flight > self.limit:
            for user in list(self.lanes.users):
                user.on_lower(self)

    def _set(self, limit: float) -> None:
        if limit != self.limit:
            self.limit, self.is_changed = limit, True
            self.lanes.set_limit(max(1, int(limit)))
