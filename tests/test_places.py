"""Places for rows: how many there are, and who is next."""

from __future__ import annotations

from mlxcel.places import Places


class Waiter:
    """Takes when it is rung, as a client would."""

    def __init__(self, places: Places, count: int, log: list[str], name: str) -> None:
        self.places, self.count, self.log, self.name = places, count, log, name
        self.rung = 0

    def ring(self) -> None:
        self.rung += 1

    def ask(self) -> bool:
        taken = self.places.take(self.count, self.ring)
        if taken:
            self.log.append(self.name)
        return taken


def test_first_come_first_served_whatever_the_size() -> None:
    places, log = Places(4), []
    holder, large, small = (Waiter(places, count, log, name) for count, name in ((3, "holder"), (4, "large"), (1, "s")))
    assert holder.ask()
    assert not large.ask()
    assert not small.ask()  # a place is free, and the one before it wants more
    places.give(3)
    assert (large.rung, small.rung) == (1, 0)
    assert large.ask()
    assert not small.ask()
    places.give(4)
    assert small.rung == 1
    assert small.ask()
    assert log == ["holder", "large", "s"]


def test_who_leaves_lets_the_next_one_ask() -> None:
    places, log = Places(1), []
    holder, first, second = (Waiter(places, 1, log, name) for name in ("holder", "first", "second"))
    assert holder.ask()
    assert not first.ask()
    assert not second.ask()
    places.give(1)
    places.leave(first.ring)
    assert second.rung == 1
    assert second.ask()
    places.leave(first.ring)  # again: nothing
    places.give(1)
    assert holder.ask()


def test_one_that_cannot_be_rung_is_passed_over() -> None:
    places, log = Places(1), []
    holder, second = Waiter(places, 1, log, "holder"), Waiter(places, 1, log, "second")

    def gone() -> None:
        raise RuntimeError("Event loop is closed")

    assert holder.ask()
    assert not places.take(1, gone)
    assert not second.ask()
    places.give(1)
    assert second.rung == 1
    assert second.ask()


def test_a_request_of_more_rows_than_places_takes_all() -> None:
    places = Places(3)
    assert (places.size(16), places.size(2)) == (3, 2)
    assert places.take(places.size(16), lambda: None)
    places.give(3)
    assert places.take(3, lambda: None)
