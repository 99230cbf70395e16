"""Whose rows are whose: ids of requests, and those of their prompts (docs/spec/clients.md 3.9)."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest

from mlxcel.server.record import LiveRequests, RequestRecord
from mlxcel.server.request_id import ACCEPTED


@attrs.frozen
class Rows:
    """As much of a request of the engine's as the record looks at."""

    request_id: str
    choices: tuple[int, ...] = (0,)


def live(*asked: tuple[str, int]) -> tuple[LiveRequests, list[tuple[RequestRecord, list[str]]], list[RequestRecord]]:
    """Requests by id and number of prompts, all of them submitted, and the list of those that are over."""
    over: list[RequestRecord] = []
    requests = LiveRequests(over.append)
    made = []
    for name, prompts in asked:
        record = RequestRecord(name, "POST", "here", 0.0)
        requests.add(record)
        ids = record.engine_ids(prompts)
        for engine_id in ids:
            rows: Any = Rows(engine_id)
            requests.submitted(rows)
        made.append((record, ids))
    return requests, made, over


@pytest.mark.parametrize("name", ["x-0", "x-1", "x.2", "x0", "x_0", "x-"])
def test_h_k14_a_client_cannot_take_the_rows_of_another_request(name: str) -> None:
    """H-K14: one end each, with its own rows, although one id is how another's prompts might be called."""

    async def scenario() -> None:
        requests, made, over = live(("x", 2), (name, 1), ("x", 2))
        everyone = [engine_id for _, ids in made for engine_id in ids]
        assert len(set(everyone)) == len(everyone)
        for record, _ in made:
            requests.answered(record, 1.0)
        for engine_id in reversed(everyone):
            result: Any = Rows(engine_id)
            requests.ended(result)
        await asyncio.sleep(0)
        assert {record.id for record in over} == {record.id for record, _ in made}
        assert len(over) == 3
        assert len(requests) == 0
        for record, ids in made:
            assert sorted(result.request_id for result in record.results) == sorted(ids)

    asyncio.run(scenario())


def test_ids_of_prompts_are_none_that_a_client_may_send() -> None:
    record = RequestRecord("x", "POST", "here", 0.0)
    assert record.engine_ids(1) == ["x"]
    assert not any(ACCEPTED.fullmatch(engine_id) for engine_id in record.engine_ids(256))
