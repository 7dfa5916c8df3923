// Messages as a chat. Text is rendered as Markdown, or shown as it was written; elements are made, HTML is never parsed.

function textOf(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content, null, 2);
  return content.map((part) => (part?.type === "text" ? part.text : `[${part?.type ?? "?"}]`)).join("");
}

const INLINE = /(`+)([^`][\s\S]*?)\1(?!`)|\*\*(\S(?:[\s\S]*?\S)?)\*\*|(?<![\w*])\*([^\s*](?:[^*\n]*[^\s*])?)\*(?![\w*])/g;

// What looks for its end in all that follows takes time with the square of its length, and a model that repeats itself
// writes much of it: a long paragraph is text.
const MOST_INLINE = 4000;

function inline(text) {
  if (text.length > MOST_INLINE) return [text];
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    parts.push(text.slice(from, match.index));
    const [all, , code, strong, emphasis] = match;
    if (code !== undefined) parts.push(make("code", {}, code));
    else if (strong !== undefined) parts.push(make("strong", {}, inline(strong)));
    else parts.push(make("em", {}, emphasis));
    from = match.index + all.length;
  }
  return [...parts, text.slice(from)];
}

// Fences, headings, lists and paragraphs, whose line breaks stay; anything else is text.
function markdown(text) {
  const blocks = [], lines = text.split("\n");
  let paragraph = [], list = null;
  const close = () => {
    if (paragraph.length) blocks.push(make("p", {}, inline(paragraph.join("\n"))));
    paragraph = [];
    list = null;
  };
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    const fence = line.match(/^\s*(```+|~~~+)\s*(\S*)/), heading = line.match(/^(#{1,6})\s+(.*)/);
    const item = line.match(/^\s*([-*+]|(\d+)[.)])\s+(.*)/);
    if (fence) {
      close();
      const code = [];
      while (++at < lines.length && !lines[at].trimStart().startsWith(fence[1])) code.push(lines[at]);
      blocks.push(make("pre", { class: "code", "data-language": fence[2] }, code.join("\n")));
    } else if (heading) {
      close();
      blocks.push(make("p", { class: "heading" }, inline(heading[2])));
    } else if (item) {
      const tag = item[2] === undefined ? "ul" : "ol";
      if (list?.localName !== tag) {
        close();
        blocks.push(list = make(tag, { start: item[2] }));
      }
      list.append(make("li", {}, inline(item[3])));
    } else if (!line.trim()) close();
    else {
      if (list) close();
      paragraph.push(line);
    }
  }
  close();
  return make("div", { class: "markdown" }, blocks);
}

const textBox = (text, isPlain) => (isPlain || state.values.text === "plain" ? make("div", { class: "text" }, text) : markdown(text));

// A value of JSON in one line, of which NaN is one here.
const valueText = (value) => (value === "NaN" || value === "Infinity" || value === "-Infinity" ? value : JSON.stringify(value, null, 1)?.replace(/\n\s*/g, " ") ?? "null");

// Text of several lines as it is; anything else as a line.
function callBox(call) {
  const { name, arguments: given } = call.function ?? {};
  const box = make("div", { class: "call" }, make("div", { class: "call-name" }, make("span", { class: "faint" }, "calls "), make("b", {}, name ?? "?")));
  if (given === null || typeof given !== "object" || Array.isArray(given)) {  // what was not read as arguments
    box.append(make("pre", { class: "code" }, typeof given === "string" ? given : valueText(given ?? null)));
    return box;
  }
  const entries = Object.entries(given);
  if (!entries.length) box.append(make("p", { class: "faint" }, "without arguments"));
  for (const [key, value] of entries) {
    const isBlock = typeof value === "string" && (value.includes("\n") || value.length > 80);
    box.append(make("div", { class: "argument" }, make("span", { class: "faint" }, `${key} = `),
      isBlock ? make("pre", { class: "code" }, value) : make("code", {}, valueText(value))));
  }
  return box;
}

const isError = (text) => /^\s*(error\b|exception\b)/i.test(text) || text.includes("Traceback (most recent call last)");

function messageBox(message) {
  const text = textOf(message.content), isTool = message.role === "tool" || message.role === "ipython";
  const isBad = isTool && isError(text);
  const box = make("section", { class: `message ${message.role}${isBad ? " failed" : ""}` },
    make("h3", {}, message.role, message.name ? make("span", { class: "faint" }, ` ${message.name}`) : null,
      isBad ? make("span", { class: "error" }, " error") : null,
      message.tool_call_id ? make("span", { class: "faint" }, ` ${message.tool_call_id}`) : null));
  if (message.reasoning_content) {
    box.append(make("details", { open: "" }, make("summary", {}, "reasoning"), make("div", { class: "reasoning" }, textBox(textOf(message.reasoning_content)))));
  }
  if (isTool && text.length > 1500) {
    box.append(make("div", { class: "text" }, `${text.slice(0, 600)}…`),
      make("details", {}, make("summary", {}, `all ${text.length.toLocaleString("en")} characters`), make("div", { class: "text" }, text)));
  } else if (text) box.append(textBox(text, isTool));
  for (const call of Array.isArray(message.tool_calls) ? message.tool_calls : []) box.append(callBox(call ?? {}));
  if (!text && !message.reasoning_content && !message.tool_calls?.length) box.append(make("p", { class: "faint" }, "(empty)"));
  return box;
}

const textChoice = () => make("div", { class: "tabs small", role: "group", "aria-label": "text" }, ["rendered", "plain"].map((name) =>
  make("button", { "aria-pressed": String(state.values.text === name), onclick: () => state.set({ text: name }) }, name)));

function conversation(record) {
  if (!record.messages.length) return make("p", { class: "hint" }, "It ended before its first message.");
  return make("div", {}, record.messages.map(messageBox));
}
