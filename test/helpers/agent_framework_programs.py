"""Agents in JavaScript and on the command line, beside those of `agent_framework_scripts`."""

from __future__ import annotations

from agent_framework_scripts import CHATS, FRAMEWORKS, Framework

FRAMEWORKS["OpenAI's client (JS)"] = Framework(
    packages=("openai",),
    modes=("chat", "chat stream", "responses", "responses stream"),
    kind="node",
    source="""
import OpenAI from "openai";
const client = new OpenAI();
const messages = [{ role: "user", content: query }];
const stream = mode.includes("stream");
const answer = mode[0] === "chat"
  ? await client.chat.completions.create({ model: "policy", messages, stream })
  : await client.responses.create({ model: "policy", input: query, stream });
let said = "";
if (stream) for await (const event of answer) {
  if (mode[0] === "chat") said += event.choices[0].delta.content ?? "";
  else if (event.type.endsWith("text.delta")) said += event.delta;
}
console.log(stream ? said : mode[0] === "chat" ? answer.choices[0].message.content : answer.output_text);
""",
)
FRAMEWORKS["Anthropic's client (JS)"] = Framework(
    packages=("@anthropic-ai/sdk",),
    modes=("anthropic", "anthropic stream"),
    kind="node",
    source="""
import Anthropic from "@anthropic-ai/sdk";
const client = new Anthropic();
const asked = { model: "policy", max_tokens: 64, messages: [{ role: "user", content: query }] };
const answer = mode.includes("stream")
  ? await client.messages.stream(asked).finalMessage() : await client.messages.create(asked);
console.log(answer.content[0].text);
""",
)
FRAMEWORKS["Vercel AI SDK"] = Framework(
    packages=("ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod"),
    modes=(*CHATS, "chat schema", "responses", "responses stream", "responses tools", "anthropic", "anthropic tools"),
    kind="node",
    source="""
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
const openai = createOpenAI({ baseURL: url, apiKey: key });
const anthropic = createAnthropic({ baseURL: url, apiKey: key });
const kinds = { chat: openai.chat, responses: openai.responses, anthropic };
const tools = mode.includes("tools")
  ? { add: tool({ description: "Adds.", inputSchema: jsonSchema(parameters), execute: add }) } : undefined;
const asked = { model: kinds[mode[0]]("policy"), prompt: query, tools, stopWhen: stepCountIs(3) };
const schema = jsonSchema({ type: "object", properties: { answer: { type: "integer" } }, required: ["answer"],
  additionalProperties: false });
if (mode.includes("schema")) console.log((await generateObject({ model: asked.model, prompt: query, schema })).object);
else if (mode.includes("stream")) console.log(await streamText(asked).text);
else console.log((await generateText(asked)).text);
""",
)
FRAMEWORKS["OpenAI Agents SDK (JS)"] = Framework(
    packages=("@openai/agents", "zod"),
    modes=("chat", "chat tools", "responses", "responses stream", "responses tools"),
    kind="node",
    source="""
import { Agent, run, setOpenAIAPI, setTracingDisabled, tool } from "@openai/agents";
setTracingDisabled(true);
setOpenAIAPI(mode[0] === "chat" ? "chat_completions" : "responses");
const adder = tool({ name: "add", description: "Adds.", strict: false, execute: add,
  parameters: { ...parameters, additionalProperties: true } });
const agent = new Agent({ name: "Adder", model: "policy", tools: mode.includes("tools") ? [adder] : [] });
const answer = await run(agent, query, { stream: mode.includes("stream") });
if (mode.includes("stream")) await answer.completed;
console.log(answer.finalOutput);
""",
)
FRAMEWORKS["LangChain (JS)"] = Framework(
    packages=("langchain", "@langchain/core", "@langchain/openai", "@langchain/langgraph", "zod"),
    modes=(*CHATS, "responses"),
    kind="node",
    source="""
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent } from "langchain";
const model = new ChatOpenAI({ model: "policy", apiKey: key, configuration: { baseURL: url },
  useResponsesApi: mode[0] === "responses" });
const tools = mode.includes("tools") ? [tool(add, { name: "add", description: "Adds.", schema: parameters })] : [];
if (mode.includes("stream")) {
  let said = "";
  for await (const chunk of await model.stream(query)) said += chunk.text;
  console.log(said);
} else {
  const { messages } = await createAgent({ model, tools }).invoke({ messages: [{ role: "user", content: query }] });
  console.log(messages.at(-1).text);
}
""",
)
FRAMEWORKS["Mastra"] = Framework(
    packages=("@mastra/core", "@ai-sdk/openai@2", "zod"),
    modes=("chat", "chat stream"),
    kind="node",
    source="""
import { createOpenAI } from "@ai-sdk/openai";
import { Agent } from "@mastra/core/agent";
const model = createOpenAI({ baseURL: url, apiKey: key }).chat("policy");
const agent = new Agent({ name: "adder", instructions: "Add.", model });
console.log(mode.includes("stream") ? await (await agent.stream(query)).text : (await agent.generate(query)).text);
process.exit(0);
""",
)
FRAMEWORKS["Claude Agent SDK (JS)"] = Framework(
    packages=("@anthropic-ai/claude-agent-sdk",),
    modes=("anthropic stream",),
    kind="node",
    env=(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"), ("IS_SANDBOX", "1")),
    source="""
import { query as ask } from "@anthropic-ai/claude-agent-sdk";
for await (const message of ask({ prompt: query, options: { model: "policy", maxTurns: 3, settingSources: [] } }))
  if (message.type === "result") console.log(message.result);
""",
)
FRAMEWORKS["Claude Code"] = Framework(
    packages=("@anthropic-ai/claude-code",),
    modes=("anthropic stream", "anthropic stream tools"),
    kind="bash",
    call="Bash",
    arguments='{"command": "echo $((7 + 8))", "description": "Adds"}',
    env=(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"), ("IS_SANDBOX", "1")),
    source='HOME=$PWD $BIN/claude -p "$1" --model policy --allowedTools Bash < /dev/null',
)
FRAMEWORKS["Codex"] = Framework(
    packages=("@openai/codex",),
    modes=("responses stream", "responses stream tools"),
    kind="bash",
    call="exec_command",
    arguments='{"cmd": "echo $((7 + 8))"}',
    source="""
export CODEX_HOME=$PWD/home && mkdir -p "$CODEX_HOME"
provider="{name=\\"llmrl\\",base_url=\\"$OPENAI_BASE_URL\\",env_key=\\"OPENAI_API_KEY\\",wire_api=\\"responses\\"}"
$BIN/codex exec --skip-git-repo-check --sandbox danger-full-access -c model_provider=llmrl \\
    -c "model_providers.llmrl=$provider" -m policy "$1" < /dev/null
""",
)
FRAMEWORKS["opencode"] = Framework(
    packages=("opencode-ai",),
    modes=("chat stream", "chat stream tools"),
    kind="bash",
    call="bash",
    arguments='{"command": "echo $((7 + 8))", "description": "Adds"}',
    env=(("OPENCODE_DISABLE_AUTOUPDATE", "1"), ("OPENCODE_DISABLE_MODELS_FETCH", "1")),
    source="""
export HOME=$PWD XDG_CONFIG_HOME=$PWD/c XDG_DATA_HOME=$PWD/d XDG_CACHE_HOME=$PWD/k
cat > opencode.json <<END
{"small_model": "llmrl/policy:aside", "provider": {"llmrl": {"npm": "@ai-sdk/openai-compatible",
 "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
 "models": {"policy": {}, "policy:aside": {}}}}}
END
$BIN/opencode run -m llmrl/policy "$1" < /dev/null
""",
)
FRAMEWORKS["Qwen Code"] = Framework(
    packages=("@qwen-code/qwen-code",),
    modes=("chat stream", "chat stream tools"),
    kind="bash",
    call="run_shell_command",
    arguments='{"command": "echo $((7 + 8))", "is_background": false}',
    source='HOME=$PWD $BIN/qwen --auth-type openai --openai-api-key "$OPENAI_API_KEY" '
    '--openai-base-url "$OPENAI_BASE_URL" --model policy --yolo -p "$1" < /dev/null',
)
