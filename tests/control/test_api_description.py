"""The description of the API as an answer."""

import asyncio
import json

import pytest
from fastapi import FastAPI
from starlette.requests import Request

from cordee.control.api_description import Described


def test_a_description_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()

    def describe(_: FastAPI) -> dict[str, str]:
        made.append("")
        if len(made) == 1:
            raise MemoryError
        return {"openapi": "3.1.0"}

    monkeypatch.setattr("cordee.control.api_description.describe", describe)
    described, request = Described(FastAPI()), Request({"type": "http"})

    async def ask() -> None:
        with pytest.raises(MemoryError):
            await described.answer(request)
        for _ in range(2):
            answer = await described.answer(request)
            assert json.loads(bytes(answer.body)) == {"openapi": "3.1.0"}

    asyncio.run(ask())
    assert len(made) == 2, "what was made once is sent again"
