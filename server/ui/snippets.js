/* A request as what anybody can paste: curl, Python with openai's package, JavaScript; one of texts alone also in the server's other APIs.

   Pure functions of texts. Invariant: whatever a prompt or parameter holds stays a string of that language. A key is never written down:
   programs read it from the environment variable ONEHEAD_API_KEY. */

/** Parameters of openai's methods; others go into extra_body. */
const OPENAI = new Set(["model", "prompt", "messages", "suffix", "max_tokens", "temperature", "top_p", "frequency_penalty",
  "presence_penalty", "logit_bias", "seed", "stop", "stream", "tools", "tool_choice", "parallel_tool_calls", "response_format"]);
const INDENT = "    ";
const sameNames = (...names) => Object.fromEntries(names.map((name) => [name, name]));
/** Of other APIs: name of a field -> its name there. */
const RESPONSES = { max_tokens: "max_output_tokens", ...sameNames("temperature", "top_p") };
const MESSAGES = { stop: "stop_sequences", ...sameNames("max_tokens", "temperature", "top_p", "top_k") };
const OLLAMA = { max_tokens: "num_predict", repetition_penalty: "repeat_penalty", ...sameNames("temperature", "top_k", "top_p", "min_p",
  "typical_p", "frequency_penalty", "presence_penalty", "seed", "stop") };

/** Name of a language or an API -> function of the server's URL, the route, the body and whether a key is needed. */
export function snippetsOf({ messages, tools, structured_outputs: constraint }) {
  const snippets = { curl, Python: python, JavaScript: javascript };
  if (tools || constraint || messages?.some(({ role, tool_calls: calls }) => role === "tool" || calls)) return snippets;
  return messages ? { ...snippets, Ollama: ollama, Messages: anthropic, Responses: responses } : { ...snippets, Ollama: ollama };
}

/** In single quotes a shell takes everything as it is, but for the quote itself. */
const shellQuoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function curl(base, path, body, hasKey) {
  const lines = [`curl -N ${shellQuoted(base + path)}`, `-H 'content-type: application/json'`];
  if (hasKey) lines.push(`-H "authorization: Bearer $ONEHEAD_API_KEY"`);
  return [...lines, `-d ${shellQuoted(JSON.stringify(body, null, 2))}`].join(" \\\n  ");
}

/** A request to another API: those of its fields that the API has, by their `names` there, in its body, and a comment with the others. */
function translated(url, names, fields, bodyOf, hasKey) {
  const [has, lacks] = [{}, []];
  for (const [name, value] of Object.entries(fields)) name in names ? (has[names[name]] = value) : lacks.push(name);
  return (lacks.length > 0 ? `# Not translated: ${lacks.join(", ")}\n` : "") + curl(url, "", bodyOf(has), hasKey);
}

function ollama(base, _, { model, messages, prompt, suffix, stream, ...fields }, hasKey) {
  const raw = messages || suffix ? undefined : true;
  const bodyOf = (options) => ({ model, messages, prompt, suffix, raw, stream, options });
  return translated(`${base}api/${messages ? "chat" : "generate"}`, OLLAMA, fields, bodyOf, hasKey);
}

function anthropic(base, _, { model, messages, stream, ...fields }, hasKey) {
  const [{ role, content: system }, ...rest] = messages;
  const texts = role === "system" ? { system, messages: rest } : { messages };
  return translated(`${base}v1/messages`, MESSAGES, fields, (has) => ({ model, max_tokens: 1024, ...has, ...texts, stream }), hasKey);
}

function responses(base, _, { model, messages: input, stream, ...fields }, hasKey) {
  return translated(`${base}v1/responses`, RESPONSES, fields, (has) => ({ model, input, ...has, stream }), hasKey);
}

/** A value as Python writes it: JSON's strings and numbers are Python's too. */
function pythonValue(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = indent + INDENT;
  const isList = Array.isArray(value);
  const items = Object.entries(value).map(([key, item]) => `${isList ? "" : `${JSON.stringify(key)}: `}${pythonValue(item, inner)}`);
  const [open, close] = isList ? "[]" : "{}";
  if (items.length === 0) return open + close;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}

function python(base, path, body, hasKey) {
  const known = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.entries(body).filter(([name]) => !OPENAI.has(name));
  if (extra.length > 0) known.push(["extra_body", Object.fromEntries(extra)]);
  const values = known.map(([name, value]) => `${INDENT}${name}=${pythonValue(value, INDENT)},\n`).join("");
  const isChat = path.includes("chat");
  const key = hasKey ? `os.environ["ONEHEAD_API_KEY"]` : `"none"`;
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${base}v1`)}, api_key=${key})
stream = client.${isChat ? "chat.completions" : "completions"}.create(
${values})
for chunk in stream:
    for choice in chunk.choices:
        print(choice.${isChat ? `delta.content or ""` : "text"}, end="", flush=True)
`;
}

function javascript(base, path, body, hasKey) {
  const key = hasKey ? ", authorization: `Bearer ${process.env.ONEHEAD_API_KEY}`" : "";
  return `const response = await fetch(${JSON.stringify(base + path)}, {
  method: "POST",
  headers: { "content-type": "application/json"${key} },
  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),
});
const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
for (let part; !(part = await reader.read()).done; ) console.log(part.value);
`;
}
