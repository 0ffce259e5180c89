"""Which nights there are: occasions of a cron line in a time zone.

In: a cron line, a zone, a moment. Out: *nights*, dates in that zone. A night is a scheduled
occasion and not the moment at which somebody works on it, so a run that comes hours late, or twice,
still means the same night. Cron lines are read by cronsim, which knows what Debian's cron does when
clocks are changed.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

from refiner_core.contract.errors import ConfigurationError

#: So many occasions are looked at for two in one night.
_LOOKED_AT = 400
#: Nobody means a line that has no occasion within so many days.
_LONGEST_GAP = timedelta(days=370)


class Schedule:
    """The nights of a cron line.

    Parameters
    ----------
    cron, timezone
        Five fields, and an IANA name such as ``Europe/Berlin``.

    Raises
    ------
    ConfigurationError
        One of them cannot be read, or the line has two occasions in one night, or hardly any.
    """

    def __init__(self, cron: str, timezone: str) -> None:
        self.cron, self.timezone = cron, timezone
        self._zone = _zone(timezone)
        self._check()

    def night_at(self, moment: datetime) -> str:
        """The newest night that has begun by then."""
        return self.nights_up_to(moment, 1)[0]

    def nights_up_to(self, moment: datetime, count: int) -> list[str]:
        """The last ``count`` nights that have begun by then, oldest first."""
        from cronsim import CronSim

        # One that begins exactly now has begun.
        there = self._here(moment) + timedelta(seconds=1)
        found = CronSim(self.cron, there, reverse=True)
        return [next(found).date().isoformat() for _ in range(count)][::-1]

    def next_after(self, moment: datetime) -> datetime:
        """When the next night begins."""
        from cronsim import CronSim

        return next(CronSim(self.cron, self._here(moment)))

    def begins(self, night: str) -> datetime:
        """When a night begins.

        Raises
        ------
        ConfigurationError
            It is no date, or the schedule has no night on it.
        """
        day = _date(night)
        start = datetime(day.year, day.month, day.day, tzinfo=self._zone) - timedelta(seconds=1)
        begins = self.next_after(start)
        if begins.date() != day:
            raise ConfigurationError(
                f"There is no night of {night}: the schedule is `{self.cron}` ({self.timezone}).",
                expected=f"a date on which it has one, such as {begins.date()}",
                fix="name another --night, or correct `schedule`",
            )
        return begins

    def _here(self, moment: datetime) -> datetime:
        """The moment in the zone, as a plain one: Prefect's are of a kind that computes otherwise,
        and takes cronsim a night too far back."""
        return datetime.fromtimestamp(moment.timestamp(), self._zone)

    def _check(self) -> None:
        from cronsim import CronSim, CronSimError

        if len(self.cron.split()) != 5:
            raise self._refusal(f"has {len(self.cron.split())} fields")
        moment = datetime(2026, 1, 1, tzinfo=UTC)
        try:
            found = CronSim(self.cron, moment.astimezone(self._zone))
            occasions = [next(found) for _ in range(_LOOKED_AT)]
        except CronSimError as error:
            raise self._refusal(f"cannot be read ({error})") from error
        except StopIteration as error:
            raise self._refusal("never comes, or ends some day") from error
        for one, other in pairwise(occasions):
            if one.date() == other.date():
                raise self._refusal(
                    f"has two occasions in one night ({one:%H:%M} and {other:%H:%M})"
                )
            if other - one > _LONGEST_GAP:
                raise self._refusal("leaves more than a year between two nights")

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"`schedule: {self.cron}` {why}.",
            expected="a cron line of five fields with at most one occasion a day, such as "
            "`0 3 * * *` (three in the morning) or `30 2 * * 1-5`",
            fix="correct `schedule`",
        )


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError) as error:  # ZoneInfoNotFoundError is a KeyError
        from zoneinfo import available_timezones

        from refiner_core.contract.fields import suggest

        raise ConfigurationError(
            f"There is no time zone {name!r}.{suggest(name, available_timezones())}",
            expected="an IANA name such as Europe/Berlin, or UTC",
            fix="correct `timezone`",
        ) from error


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} is no date.", expected="a night as YYYY-MM-DD", fix="correct --night"
        ) from error
