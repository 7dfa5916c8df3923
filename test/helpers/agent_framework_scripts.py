"""Agents in frameworks of other people: each a short program that is given a query and a mode, and prints the answer.

A mode has the API (`chat`, `responses`, `anthropic`) first, and then what it does: `stream`, `tools`, `schema`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework: what is installed, its modes, and the program."""

    packages: tuple[str, ...]
    """Requirements; the version of the first is reported."""
    modes: tuple[str, ...]
    source: str
    """Program in Python, JavaScript or for bash, by `kind`."""
    kind: str = "python"
    final: str = "The answer is 15."
    """What the model answers last."""
    call: str = "add"
    """Function that it calls in the mode `tools`."""
    arguments: str = '{"a": 7, "b": 8}'
    env: tuple[tuple[str, str], ...] = ()


HEADER = '''
import asyncio, os, sys
query, mode = sys.argv[1], sys.argv[2].split()
url, key, bare = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["ANTHROPIC_BASE_URL"]

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"],
    "additionalProperties": False}
'''
JAVASCRIPT_HEADER = """
const [query, modes] = process.argv.slice(2);
const mode = modes.split(" ");
const { OPENAI_BASE_URL: url, OPENAI_API_KEY: key, ANTHROPIC_BASE_URL: bare } = process.env;
const properties = { a: { type: "integer" }, b: { type: "integer" } };
const parameters = { type: "object", properties, required: ["a", "b"] };
const add = ({ a, b }) => String(a + b);
"""
MESSAGES = 'messages = [{"role": "user", "content": query}]\n'
CHATS = ("chat", "chat stream", "chat tools")

FRAMEWORKS: dict[str, Framework] = {}

FRAMEWORKS["OpenAI's client"] = Framework(
    packages=("openai",),
    modes=("chat", "chat stream", "chat schema", "responses", "responses stream", "responses schema"),
    source=MESSAGES
    + """
from openai import OpenAI
client = OpenAI()
stream = {"stream": True} if "stream" in mode else {}
if mode[0] == "chat":
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    more = {"response_format": form} if "schema" in mode else stream
    answer = client.chat.completions.create(model="policy", messages=messages, **more)
    print("".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content)
else:
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    more = {"text": form} if "schema" in mode else stream
    answer = client.responses.create(model="policy", input=query, **more)
    print("".join(getattr(e, "delta", "") for e in answer) if stream else answer.output_text)
""",
)
FRAMEWORKS["Anthropic's client"] = Framework(
    packages=("anthropic",),
    modes=("anthropic", "anthropic stream", "anthropic tools"),
    source=MESSAGES
    + """
from anthropic import Anthropic
client = Anthropic()
tools = [{"name": "add", "input_schema": TOOL["parameters"]}]
more = {"tools": tools} if "tools" in mode else {}
while True:
    asked = dict(model="policy", max_tokens=64, messages=messages, **more)
    if "stream" in mode:
        with client.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**asked)
    uses = [block for block in answer.content if block.type == "tool_use"]
    if not uses:
        break
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": use.id, "content": str(add(**use.input))} for use in uses]}]
print(answer.content[-1].text)
""",
)
FRAMEWORKS["pydantic-ai"] = Framework(
    packages=("pydantic-ai-slim[openai,anthropic]",),
    modes=(*CHATS, "chat schema", "responses", "responses stream", "responses tools", "anthropic", "anthropic tools"),
    source="""
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
class Answer(BaseModel):
    answer: int
model = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "anthropic": AnthropicModel}[mode[0]]("policy")
output = {"output_type": NativeOutput(Answer)} if "schema" in mode else {}
agent = Agent(model, tools=[add] if "tools" in mode else [], **output)
async def main():
    if "stream" in mode:
        async with agent.run_stream(query) as run:
            return await run.get_output()
    return (await agent.run(query)).output
print(asyncio.run(main()))
""",
)
FRAMEWORKS["OpenAI Agents SDK"] = Framework(
    packages=("openai-agents",),
    modes=(*CHATS, "responses", "responses stream", "responses tools"),
    source="""
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
kind = OpenAIChatCompletionsModel if mode[0] == "chat" else OpenAIResponsesModel
tools = [function_tool(add)] if "tools" in mode else []
agent = Agent(name="Adder", model=kind("policy", openai_client=AsyncOpenAI()), tools=tools)
async def main():
    if "stream" not in mode:
        return (await Runner.run(agent, query)).final_output
    run = Runner.run_streamed(agent, query)
    async for event in run.stream_events():
        pass
    return run.final_output
print(asyncio.run(main()))
""",
)
FRAMEWORKS["LangChain, LangGraph"] = Framework(
    packages=("langgraph", "langchain", "langchain-openai", "langchain-anthropic"),
    modes=(*CHATS, "responses tools", "anthropic", "anthropic tools"),
    source="""
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
models = {"chat": lambda: ChatOpenAI(model="policy"), "anthropic": lambda: ChatAnthropic(model="policy"),
    "responses": lambda: ChatOpenAI(model="policy", use_responses_api=True)}
model = models[mode[0]]()
if "stream" in mode:
    print("".join(chunk.text for chunk in model.stream(query)))
else:
    agent = create_agent(model, tools=[add] if "tools" in mode else [])
    print(agent.invoke({"messages": [("user", query)]})["messages"][-1].text)
""",
)
FRAMEWORKS["instructor"] = Framework(
    packages=("instructor",),
    modes=("chat schema", "chat tools"),
    call="Answer",
    arguments='{"answer": 15}',
    source=MESSAGES
    + """
import instructor
from openai import OpenAI
from pydantic import BaseModel
class Answer(BaseModel):
    answer: int
how = instructor.Mode.TOOLS if "tools" in mode else instructor.Mode.JSON_SCHEMA
client = instructor.from_openai(OpenAI(), mode=how)
print(client.chat.completions.create(model="policy", messages=messages, response_model=Answer))
""",
)
FRAMEWORKS["LiteLLM"] = Framework(
    packages=("litellm",),
    modes=("chat", "chat stream", "responses", "anthropic", "anthropic stream"),
    source=MESSAGES
    + """
import litellm
if mode[0] == "responses":
    print(litellm.responses(model="openai/policy", input=query, api_base=url, api_key=key).output[-1].content[0].text)
else:
    named = {"chat": ("openai/policy", url), "anthropic": ("anthropic/policy", bare)}[mode[0]]
    answer = litellm.completion(*named[:1], messages=messages, api_base=named[1], api_key=key, stream="stream" in mode)
    if "stream" in mode:
        print("".join(chunk.choices[0].delta.content or "" for chunk in answer))
    else:
        print(answer.choices[0].message.content)
""",
)
FRAMEWORKS["DSPy"] = Framework(
    packages=("dspy",),
    modes=("chat",),
    final="[[ ## answer ## ]]\n15\n\n[[ ## completed ## ]]",
    source="""
import dspy
dspy.configure(lm=dspy.LM("openai/policy", api_base=url, api_key=key, cache=False))
print(dspy.Predict("question -> answer")(question=query).answer)
""",
)
FRAMEWORKS["smolagents"] = Framework(
    packages=("smolagents[openai]",),
    modes=("chat", "chat stream"),
    final="Thought: I add.\n<code>\nfinal_answer(7 + 8)\n</code>",
    source="""
from smolagents import CodeAgent, OpenAIModel
model = OpenAIModel("policy", api_base=url, api_key=key)
print(CodeAgent(tools=[], model=model, max_steps=2, stream_outputs="stream" in mode).run(query))
""",
)
FRAMEWORKS["Agno"] = Framework(
    packages=("agno", "openai"),
    modes=(*CHATS, "responses tools"),
    source="""
from agno.agent import Agent
from agno.models.openai import OpenAIChat, OpenAIResponses
kind = OpenAIChat if mode[0] == "chat" else OpenAIResponses
model = kind(id="policy", base_url=url, api_key=key)
agent = Agent(model=model, tools=[add] if "tools" in mode else [], telemetry=False)
if "stream" in mode:
    print("".join(event.content or "" for event in agent.run(query, stream=True) if event.event == "RunContent"))
else:
    print(agent.run(query).content)
""",
)
FRAMEWORKS["AutoGen"] = Framework(
    packages=("autogen-agentchat", "autogen-ext[openai]"),
    modes=CHATS,
    source="""
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
info = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}
client = OpenAIChatCompletionClient(model="policy", model_info=info)
agent = AssistantAgent("adder", client, tools=[add] if "tools" in mode else [], reflect_on_tool_use="tools" in mode,
    model_client_stream="stream" in mode)
print(asyncio.run(agent.run(task=query)).messages[-1].content)
""",
)
FRAMEWORKS["LlamaIndex"] = Framework(
    packages=("llama-index-core", "llama-index-llms-openai-like"),
    modes=CHATS,
    source="""
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
llm = OpenAILike(model="policy", api_base=url, api_key=key, is_chat_model=True, is_function_calling_model=True,
    context_window=8000)
async def main():
    return await FunctionAgent(tools=[add], llm=llm, streaming=False).run(query)
if "tools" in mode:
    print(asyncio.run(main()))
elif "stream" in mode:
    print("".join(part.delta for part in llm.stream_complete(query)))
else:
    print(llm.complete(query))
""",
)
FRAMEWORKS["Haystack"] = Framework(
    packages=("haystack-ai",),
    modes=CHATS,
    source="""
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
callback = {"streaming_callback": lambda chunk: None} if "stream" in mode else {}
generator = OpenAIChatGenerator(model="policy", api_base_url=url, **callback)
messages = [ChatMessage.from_user(query)]
if "tools" in mode:
    agent = Agent(chat_generator=generator, tools=[create_tool_from_function(add)])
    print(agent.run(messages=messages)["messages"][-1].text)
else:
    print(generator.run(messages)["replies"][0].text)
""",
)
FRAMEWORKS["Google ADK"] = Framework(
    packages=("google-adk", "litellm"),
    modes=("chat", "chat tools"),
    source="""
from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
model = LiteLlm(model="openai/policy", api_base=url, api_key=key)
agent = LlmAgent(model=model, name="adder", instruction="Add.", tools=[add] if "tools" in mode else [])
async def main():
    runner = InMemoryRunner(agent, app_name="adder")
    session = await runner.session_service.create_session(app_name="adder", user_id="me")
    message = types.Content(role="user", parts=[types.Part(text=query)])
    async for event in runner.run_async(user_id="me", session_id=session.id, new_message=message):
        if event.is_final_response():
            print(event.content.parts[-1].text)
asyncio.run(main())
""",
)
FRAMEWORKS["Semantic Kernel"] = Framework(
    packages=("semantic-kernel",),
    modes=("chat", "chat stream", "chat tools"),
    call="Adder-add",
    source="""
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function
class Adder:
    @kernel_function
    def add(self, a: int, b: int) -> int:
        "Adds two numbers."
        return int(a) + int(b)
service = OpenAIChatCompletion(ai_model_id="policy", async_client=AsyncOpenAI())
plugins = [Adder()] if "tools" in mode else []
agent = ChatCompletionAgent(service=service, name="Agent", instructions="Add.", plugins=plugins)
async def main():
    if "stream" in mode:
        return "".join([str(part.message) async for part in agent.invoke_stream(messages=query)])
    return await agent.get_response(messages=query)
print(asyncio.run(main()))
""",
)
FRAMEWORKS["Strands Agents"] = Framework(
    packages=("strands-agents[openai]",),
    modes=("chat stream", "chat stream tools"),
    source="""
from strands import Agent, tool
from strands.models.openai import OpenAIModel
model = OpenAIModel(client_args={"api_key": key, "base_url": url}, model_id="policy")
print(Agent(model=model, tools=[tool(add)] if "tools" in mode else [], callback_handler=None)(query))
""",
)
FRAMEWORKS["CrewAI"] = Framework(
    packages=("crewai",),
    modes=("chat",),
    final="Thought: I now can give a great answer\nFinal Answer: 15",
    env=(("CREWAI_DISABLE_TELEMETRY", "true"), ("OTEL_SDK_DISABLED", "true")),
    source="""
from crewai import LLM, Agent
llm = LLM(model="openai/policy", base_url=url, api_key=key)
print(Agent(role="adder", goal="Add.", backstory="You add.", llm=llm).kickoff(query).raw)
""",
)
FRAMEWORKS["Griptape"] = Framework(
    packages=("griptape[drivers-prompt-openai]",),
    modes=("chat", "chat stream"),
    source="""
from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
from griptape.structures import Agent
from griptape.utils import Stream
driver = OpenAiChatPromptDriver(model="policy", base_url=url, api_key=key, stream="stream" in mode)
agent = Agent(prompt_driver=driver)
if "stream" in mode:
    print("".join(part.value for part in Stream(agent).run(query)))
else:
    print(agent.run(query).output.value)
""",
)
FRAMEWORKS["Mirascope"] = Framework(
    packages=("mirascope[openai]",),
    modes=("chat", "chat stream", "responses"),
    source="""
from mirascope import llm
llm.register_provider("openai", scope="openai/", base_url=url, api_key=key)
model = llm.model("openai/policy" + (":completions" if mode[0] == "chat" else ":responses"))
if "stream" in mode:
    print("".join(model.stream(query).text_stream()))
else:
    print(model.call(query).text())
""",
)
FRAMEWORKS["Atomic Agents"] = Framework(
    packages=("atomic-agents", "instructor<1.8"),
    modes=("chat tools",),
    call="BasicChatOutputSchema",
    arguments='{"chat_message": "15"}',
    source="""
import instructor
from atomic_agents.agents.base_agent import BaseAgent, BaseAgentConfig, BaseAgentInputSchema
from openai import OpenAI
agent = BaseAgent(BaseAgentConfig(client=instructor.from_openai(OpenAI()), model="policy"))
print(agent.run(BaseAgentInputSchema(chat_message=query)).chat_message)
""",
)
FRAMEWORKS["Qwen-Agent"] = Framework(
    packages=("qwen-agent", "soundfile", "numpy", "tqdm", "python-dateutil"),
    modes=("chat stream",),
    source=MESSAGES
    + """
from qwen_agent.agents import Assistant
agent = Assistant(llm={"model": "policy", "model_type": "oai", "model_server": url, "api_key": key})
print(list(agent.run(messages))[-1][-1]["content"])
""",
)
FRAMEWORKS["Inspect"] = Framework(
    packages=("inspect-ai", "openai"),
    modes=("chat", "chat tools"),
    source="""
from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
from inspect_ai.tool import tool
@tool
def add():
    async def execute(a: int, b: int) -> int:
        '''Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        '''
        return a + b
    return execute
model = get_model("openai/policy", base_url=url, api_key=key, responses_api=False)
async def main():
    if "tools" in mode:
        _, answer = await model.generate_loop(query, tools=[add()])
        return answer.completion
    return (await model.generate(query)).completion
print(asyncio.run(main()))
""",
)
FRAMEWORKS["Aider"] = Framework(
    packages=("aider-chat",),
    modes=("chat stream",),
    kind="bash",
    source="$BIN/aider --model openai/policy --no-git --yes-always --no-show-model-warnings --no-check-update "
    '--analytics-disable --map-tokens 0 --edit-format ask --message "$1"',
)
FRAMEWORKS["mini-swe-agent"] = Framework(
    packages=("mini-swe-agent",),
    modes=("chat",),
    kind="bash",
    final="THOUGHT: done.\n\n```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 15\n```",
    env=(("MSWEA_MODEL_NAME", "openai/policy"), ("MSWEA_CONFIGURED", "true"), ("MSWEA_COST_TRACKING", "ignore_errors")),
    source='$BIN/mini -t "$1" -y --exit-immediately -l 0 -o trajectory.json -c mini_textbased.yaml',
)
