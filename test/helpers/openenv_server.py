"""A server on this machine that speaks OpenEnv's protocol and plays guessing games."""

from __future__ import annotations

import json
from collections import Counter

from aiohttp import WSMsgType, web

from llmrl._utils.background_loop import BackgroundLoop

OBSERVATION = '{"type":"observation","data":{"observation":{"hint":"%s"},"reward":%s,"done":%s}}'


NO_NUMBER = (
    '{"type":"error","data":{"message":"invalid literal for int() with base 10: \'many\'","code":"EXECUTION_ERROR"}}'
)


NO_FIELD = (
    '{"type":"error","data":{"message":"Invalid message","code":"VALIDATION_ERROR","errors":[{"type":"missing",'
    '"loc":["message"],"msg":"Field required","input":{"text":"3"}}]}}'
)


FULL = (
    '{"type":"error","data":{"message":"Server at capacity: 1/1 sessions active","code":"CAPACITY_REACHED",'
    '"active_sessions":1,"max_sessions":1}}'
)


SCHEMA = {
    "action": {
        "additionalProperties": False,
        "properties": {"metadata": {"type": "object"}, "message": {"title": "Message", "type": "string"}},
        "required": ["message"],
    }
}


class GuessingServer:
    """Speaks the protocol on loopback: a number is guessed, and some guesses do harm. A ping follows each answer."""

    def __init__(self, max_sessions=8, schema=SCHEMA):
        self.max_sessions, self.schema = max_sessions, schema
        self.num_pongs = 0
        self.events, self.resets = Counter(), []
        self.num_active = 0
        self.loop = BackgroundLoop("openenv")
        self.url = self.loop.run(self._start())

    async def _start(self):
        app = web.Application()
        app.add_routes([web.get("/schema", self._schema), web.get("/ws", self._session)])
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _schema(self, request):
        return web.json_response(self.schema)

    async def _session(self, request):
        ws = web.WebSocketResponse(autoping=False)
        await ws.prepare(request)
        if self.num_active >= self.max_sessions:
            self.events["full"] += 1
            await ws.send_str(FULL)
            await ws.close()
            return ws
        self.num_active += 1
        self.events["opened"] += 1
        async for message in ws:
            if message.type is WSMsgType.PONG:
                self.num_pongs += 1
                continue
            question = json.loads(message.data)
            if question["type"] == "close":
                self.events["closed"] += 1
                break
            if (said := await self._answer(question, ws)) is not None:
                await ws.send_str(said)
                await ws.ping()
        self.num_active -= 1
        await ws.close()
        return ws

    async def _answer(self, question, ws):
        data = question["data"]
        if question["type"] == "reset":
            self.resets.append(data)
            is_over = json.dumps(data.get("secret") == 0)
            return OBSERVATION % (f"Guess my number (seed {data.get('seed')}).", "null", is_over)
        if "message" not in data:
            return NO_FIELD
        match data["message"]:
            case "many":
                return NO_NUMBER
            case "silence":
                return None
            case "leave":
                return await ws.close(code=1011, message=b"keepalive")
            case "crash":
                return ws._req.transport.abort()
            case "twice":
                await ws.send_str(OBSERVATION % ("higher", "0", "false"))
            case "broken":
                return '{"type":"observation","data":{"obser'
            case "empty":
                return '{"type":"observation","data":{}}'
            case "list":
                return "[1]"
            case "nan":
                return OBSERVATION % ("nan", "NaN", "false")
            case "4":
                return OBSERVATION % ("right", "1.0", "true")
        return OBSERVATION % ("higher", "-0.25", "false")

    def close(self):
        self.loop.run(self.runner.cleanup())
        self.loop.close()
