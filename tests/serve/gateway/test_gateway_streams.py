"""Streams survive their replicas. The engines here are `fake_engine.py`: an answer that lost, doubled or changed one
token differs from `expected`. `test_gateway_llama.py` has the same with llama.cpp."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_engine import expected, template
from gateway_rig import Answer, FakeEngine, Rig, chat, get, post, rig, run, stream, until

from cordee.serve.gateway.health import ANSWER_S, SILENCE_S

PROMPT = "Count words."


def engines(of: Rig) -> list[FakeEngine]:
    return [each for each in of.processes if isinstance(each, FakeEngine)]


async def working(session: aiohttp.ClientSession, of: Rig) -> FakeEngine:
    """Return the engine that works on the one open request."""
    for each in engines(of):
        if (await get(session, f"{each.address}/stats"))["open"]:
            return each
    raise AssertionError("no engine works")


async def hold(session: aiohttp.ClientSession, of: Rig, tokens: int) -> None:
    """Let each engine stop after so many tokens of an answer, so that its client is never behind its end."""
    for each in engines(of):
        await post(session, f"{each.address}/fault", {"hold_at": tokens})


async def go_on(session: aiohttp.ClientSession, of: Rig, *but: FakeEngine) -> None:
    """Let them go on."""
    for each in engines(of):
        if each not in but:
            await post(session, f"{each.address}/fault", {})


async def fail(session: aiohttp.ClientSession, of: Rig, fault: dict[str, Any]) -> None:
    """Let the engine that works fail, and the others go on."""
    working_one = await working(session, of)
    await go_on(session, of, working_one)
    await post(session, f"{working_one.address}/fault", fault)


def check_whole(answer: Answer, limit: int, prompt: str = PROMPT) -> None:
    text, finish, tokens = expected(template([{"role": "user", "content": prompt}]), limit)
    assert answer.status == 200 and answer.error is None and answer.done
    assert answer.text == text
    assert answer.finish == finish
    assert answer.usage is not None and answer.usage["completion_tokens"] == tokens
    assert len(answer.ids) == 1, "one stream has one id"


@pytest.mark.parametrize(
    "fault",
    [{"cut": True}, {"error_after": 70}, {"done_after": 70}, {"cut_after": 70}],
    ids=lambda fault: next(iter(fault)),
)
def test_a_stream_goes_on_elsewhere(two: Rig, fault: dict[str, Any]) -> None:
    async def work(session: aiohttp.ClientSession) -> Answer:
        async def at(answer: Answer) -> None:
            if answer.events == 60:
                await fail(session, two, fault)

        await hold(session, two, 60)
        return await stream(session, two.url, chat(PROMPT, 150), on_event=at)

    check_whole(run(work), 150)


def test_a_stream_of_completions_goes_on_elsewhere(two: Rig) -> None:
    async def work(session: aiohttp.ClientSession) -> Answer:
        async def at(answer: Answer) -> None:
            if answer.events == 20:
                await fail(session, two, {"cut": True})

        await hold(session, two, 20)
        body = {"model": "chat", "prompt": "abc", "max_tokens": 60, "stream": True}
        return await stream(session, two.url, body, path="/v1/completions", on_event=at)

    answer = run(work)
    assert (answer.text, answer.finish) == expected("abc", 60)[:2] and answer.done and len(answer.ids) == 1
    assert answer.usage is None, "nobody asked for it"


@pytest.fixture
def swapping(two: Rig) -> Iterator[Rig]:
    """Return the rig with a second service of two models, the first of which a replica holds."""
    for key, names in (("a", ["swap", "a"]), ("b", ["b"])):
        two.routes.service(f"swap {key}", models=names, model=f"./{key}")
        two.routes.services[f"swap {key}"]["name"] = "swap"
    two.routes.endpoint("s.1", engines(two)[0].address, "swap a", model="./a", slots=8)
    two.routes.write()
    yield two
    del two.routes.services["swap a"], two.routes.services["swap b"]


def test_a_request_waits_while_its_model_takes_the_place_of_another_one(swapping: Rig) -> None:
    """The replica drains its open stream, and comes back with the other model at another address."""
    first, second = engines(swapping)

    async def resident(session: aiohttp.ClientSession) -> dict[str, bool]:
        listed = (await get(session, f"{swapping.url}/v1/models"))["data"]
        return {each["id"]: each["resident"] for each in listed if "resident" in each}

    async def work(session: aiohttp.ClientSession) -> tuple[Answer, Answer, Answer]:
        async def known() -> bool:
            return await resident(session) == {"swap": True, "a": True, "b": False}

        async def drains() -> bool:
            return not (await resident(session))["a"]

        await until(known, "the routes")
        held: list[asyncio.Task[Answer]] = []

        async def at(answer: Answer) -> None:
            if answer.events == 30:
                swapping.routes.endpoint("s.1", first.address, "swap a", model="./a", slots=8, state="draining")
                swapping.routes.write()
                await until(drains, "the new routes")
                for model in ("a", "b"):
                    body = chat(PROMPT, 20, model=model)
                    held.append(asyncio.create_task(stream(session, swapping.url, body)))

        running = await stream(session, swapping.url, chat(PROMPT, 150, model="swap"), on_event=at)
        assert not any(each.done() for each in held), "one waits for its model, one for its replica"
        swapping.routes.services["swap a"]["endpoints"] = []
        swapping.routes.endpoint("s.1", second.address, "swap b", model="./b", slots=8)
        swapping.routes.write()
        of_b = await held[1]
        assert await resident(session) == {"swap": False, "a": False, "b": True} and not held[0].done()
        swapping.routes.services["swap b"]["endpoints"] = []
        swapping.routes.endpoint("s.1", first.address, "swap a", model="./a", slots=8)
        swapping.routes.write()
        return running, of_b, await held[0]

    running, of_b, of_a = run(work)
    check_whole(running, 150)
    check_whole(of_b, 20)
    check_whole(of_a, 20)
    busy = {each["model"] for each in swapping.usage() if each["job_id"] == "s" and not each["tenant"]}
    assert busy == {"./a", "./b"}, "the time of each model is written when its replica swaps"


def test_an_unknown_model_is_refused_with_the_names_that_there_are(swapping: Rig) -> None:
    async def known(session: aiohttp.ClientSession) -> bool:
        return len((await get(session, f"{swapping.url}/v1/models"))["data"]) == 5

    async def work(session: aiohttp.ClientSession) -> Answer:
        await until(lambda: known(session), "the routes")
        return await stream(session, swapping.url, chat(PROMPT, 5, model="c"))

    refused = run(work)
    assert refused.status == 404 and refused.error is not None and refused.error["code"] == "model_not_found"
    assert "there is no model 'c'; services: b, chat, swap" in refused.error["message"]


def test_a_draining_replica_hands_its_stream_over(two: Rig) -> None:
    async def work(session: aiohttp.ClientSession) -> Answer:
        async def at(answer: Answer) -> None:
            if answer.events == 30:
                left = await working(session, two)
                two.routes.endpoint(f"{left.name}.1", left.address, slots=32, state="draining")
                two.routes.write()

                async def handed_over() -> bool:
                    return not (await get(session, f"{left.address}/stats"))["open"]

                await until(handed_over, "the end of the request on the draining replica")
                await go_on(session, two)

        await hold(session, two, 30)
        return await stream(session, two.url, chat(PROMPT, 400), on_event=at)

    check_whole(run(work), 400)


def test_another_revision_takes_no_stream_of_a_draining_replica(two: Rig) -> None:
    async def work(session: aiohttp.ClientSession) -> tuple[Answer, FakeEngine]:
        first: list[FakeEngine] = []

        async def at(answer: Answer) -> None:
            if answer.events == 20:
                first.append(await working(session, two))
                other = next(each for each in engines(two) if each is not first[0])
                two.routes.endpoint(f"{first[0].name}.1", first[0].address, slots=32, state="draining", revision=1)
                two.routes.endpoint(f"{other.name}.1", other.address, slots=32, revision=2)
                two.routes.write()
                await hold(session, two, 150)
            elif answer.events == 150:
                assert await working(session, two) is first[0]
                await go_on(session, two)

        await hold(session, two, 20)
        return await stream(session, two.url, chat(PROMPT, 200), on_event=at), first[0]

    answer, _ = run(work)
    check_whole(answer, 200)


def test_an_answer_that_is_no_stream_is_computed_again(two: Rig) -> None:
    async def work(session: aiohttp.ClientSession) -> Any:
        await hold(session, two, 50)
        asked = asyncio.create_task(post(session, f"{two.url}/v1/chat/completions", chat(PROMPT, 100, stream=False)))

        async def begun() -> bool:
            return any([(await get(session, f"{each.address}/stats"))["open"] for each in engines(two)])

        await until(begun, "an engine at work")
        await fail(session, two, {"cut": True})
        return await asked

    answer = run(work)
    text, finish, _ = expected(template([{"role": "user", "content": PROMPT}]), 100)
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["choices"][0]["finish_reason"] == finish


@pytest.mark.parametrize(
    "fault", [{"lie": True}, {"garbage": True}, {"silent": True}], ids=lambda each: next(iter(each))
)
def test_a_replica_that_lies_about_its_health_gets_no_requests_for_long(two: Rig, fault: dict[str, Any]) -> None:
    """Its /health says 200 and its answers are errors, no HTTP, or none at all."""

    async def work(session: aiohttp.ClientSession) -> list[Answer]:
        await post(session, f"{engines(two)[0].address}/fault", fault)
        if fault.get("silent"):  # It answers nothing at all, so only one stream waits for it.
            return [await stream(session, two.url, chat(PROMPT, 10)) for _ in range(2)]
        return [await stream(session, two.url, chat(PROMPT, 10)) for _ in range(8)]

    for answer in run(work):
        check_whole(answer, 10)


def test_a_killed_and_a_frozen_replica(tmp_path: Path) -> None:
    """kill -9 and SIGSTOP in mid-stream; both replicas come back, and none is left out of rotation."""

    async def work(session: aiohttp.ClientSession) -> tuple[Answer, Answer]:
        async def kill(answer: Answer) -> None:
            if answer.events == 50:
                victim = await working(session, made)
                await go_on(session, made, victim)
                victim.kill()

        await hold(session, made, 50)
        killed = await stream(session, made.url, chat(PROMPT, 120), on_event=kill)
        dead = next(each for each in engines(made) if each.process.poll() is not None)
        dead.start()
        frozen: list[FakeEngine] = []

        async def freeze(answer: Answer) -> None:
            if answer.events == 50:
                frozen.append(await working(session, made))
                await go_on(session, made, frozen[0])
                frozen[0].signal(signal.SIGSTOP)

        await hold(session, made, 50)
        stopped = await stream(session, made.url, chat(PROMPT, 150), on_event=freeze)
        frozen[0].signal(signal.SIGCONT)

        async def both_back() -> bool:
            async with session.get(f"{made.url}/metrics") as response:
                lines = [each for each in (await response.text()).splitlines() if "replica_usable{" in each]
            return all(each.endswith(" 1") for each in lines)

        await until(both_back, "both replicas in rotation")
        return killed, stopped

    with rig(tmp_path) as made:
        made.fake("a", interval_ms=2)
        made.fake("b", interval_ms=2)
        made.start()
        killed, stopped = run(work)
    check_whole(killed, 120)
    check_whole(stopped, 150)
    moved = [row for row in made.usage() if row["tenant"] and not row["requests"]]
    assert len(moved) == 2 and all(40 <= row["output_tokens"] <= 140 for row in moved)
    served = sum(row["output_tokens"] for row in made.usage())
    assert served == 270, "each token is counted once, for the replica that made it"


def test_the_only_replica_keeps_a_stream_through_a_pause(tmp_path: Path) -> None:
    """It is silent for longer than a probe is waited for; there is nowhere to go, and the answer is not begun anew."""

    async def work(session: aiohttp.ClientSession) -> Answer:
        async def pause(answer: Answer) -> None:
            if answer.events == 20:
                engines(made)[0].signal(signal.SIGSTOP)
                await asyncio.sleep(SILENCE_S[0] + 2 * ANSWER_S)
                engines(made)[0].signal(signal.SIGCONT)
                await go_on(session, made)

        await hold(session, made, 20)
        return await stream(session, made.url, chat(PROMPT, 100), on_event=pause)

    with rig(tmp_path) as made:
        made.fake("a", interval_ms=2)
        made.start()
        check_whole(run(work), 100)
    assert "out of rotation" not in made.log()
    assert [row["requests"] for row in made.usage() if row["tenant"]] == [1]


def test_an_answer_that_nobody_can_finish_ends_with_an_error(tmp_path: Path) -> None:
    async def work(session: aiohttp.ClientSession) -> tuple[Answer, Answer]:
        async def kill(answer: Answer) -> None:
            if answer.events == 20:
                engines(made)[0].kill()

        await hold(session, made, 20)
        broken = await stream(session, made.url, chat(PROMPT, 100), on_event=kill)
        return broken, await stream(session, made.url, chat(PROMPT, 100))

    with rig(tmp_path) as made:
        made.fake("a", interval_ms=2)
        made.start("--resume", "0.5", "--hold", "0.5")
        broken, refused = run(work)
    assert broken.error is not None and broken.error["code"] == "upstream_failed"
    assert not broken.done and broken.finish is None, "a broken answer has no clean end"
    assert expected(template([{"role": "user", "content": PROMPT}]), 100)[0].startswith(broken.text)
    assert refused.status == 503 and refused.error is not None and refused.error["code"] == "no_replica"


def test_a_request_that_kills_each_replica_is_given_up(tmp_path: Path) -> None:
    async def work(session: aiohttp.ClientSession) -> Answer:
        for each in engines(made):
            await post(session, f"{each.address}/fault", {"cut_after": 1, "interval_ms": 1})
        return await stream(session, made.url, chat("one token", 1, stop=["x"]))

    with rig(tmp_path) as made:
        made.fake("a")
        made.fake("b")
        made.start("--resume", "20")
        answer = run(work)
    assert answer.text and (answer.error is not None) != answer.done


def test_a_second_gateway_takes_over_from_a_killed_one(two: Rig, tmp_path: Path) -> None:
    """Its streams break off without a clean end, and their clients ask the other one again."""
    with rig(tmp_path) as other:
        other.routes.services = two.routes.services
        other.start()
        assert other.gateway is not None

        async def work(session: aiohttp.ClientSession) -> tuple[list[Answer], list[Answer]]:
            begun: list[Answer] = []

            async def kill(answer: Answer) -> None:
                if answer.events == 20:
                    begun.append(answer)
                    if len(begun) == 5:
                        other.signal_gateway(signal.SIGKILL)

            async def broken(prompt: str) -> Answer:
                answer = Answer()
                try:
                    await stream(session, other.url, chat(prompt, 100), on_event=kill, answer=answer)
                except aiohttp.ClientError:
                    assert not answer.done
                return answer

            prompts = [f"{PROMPT}{i}" for i in range(5)]
            await hold(session, two, 20)
            cut = await asyncio.gather(*[broken(each) for each in prompts])

            async def idle() -> bool:
                return not any([(await get(session, f"{each.address}/stats"))["open"] for each in engines(two)])

            await until(idle, "the end of the work for the killed gateway")
            await go_on(session, two)
            return cut, await asyncio.gather(*[stream(session, two.url, chat(each, 100)) for each in prompts])

        cut, again = run(work)
    for i, answer in enumerate(again):
        check_whole(answer, 100, f"{PROMPT}{i}")
        assert answer.text.startswith(cut[i].text) and cut[i].finish is None


def test_a_stream_that_alone_hangs_moves_although_its_replica_is_well(two: Rig) -> None:
    async def work(session: aiohttp.ClientSession) -> Answer:
        async def hang(answer: Answer) -> None:
            if answer.events == 20:
                await fail(session, two, {"stuck": True})

        await hold(session, two, 20)
        return await stream(session, two.url, chat(PROMPT, 40), on_event=hang)

    check_whole(run(work), 40)


def test_a_standby_takes_over_while_no_other_replica_answers(tmp_path: Path) -> None:
    async def work(session: aiohttp.ClientSession) -> Answer:
        async def kill(answer: Answer) -> None:
            if answer.events == 20:
                first = await working(session, made)
                assert first.name == "a"
                await go_on(session, made, first)
                first.kill()

        await hold(session, made, 20)
        return await stream(session, made.url, chat(PROMPT, 60), on_event=kill)

    with rig(tmp_path) as made:
        made.fake("a", interval_ms=2)
        made.fake("b", interval_ms=2, state="standby")
        made.start()
        check_whole(run(work), 60)


def test_a_stream_bears_more_failures_than_a_request_that_makes_no_progress(two: Rig) -> None:
    async def work(session: aiohttp.ClientSession) -> Answer:
        async def cut(answer: Answer) -> None:
            if answer.events in (10, 20, 30, 40):
                await post(session, f"{(await working(session, two)).address}/fault", {"cut": True, "hold_at": 10})
            elif answer.events == 50:
                await fail(session, two, {"cut": True})

        await hold(session, two, 10)
        return await stream(session, two.url, chat(PROMPT, 60), on_event=cut)

    check_whole(run(work), 60)
