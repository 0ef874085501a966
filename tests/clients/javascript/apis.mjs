// The clients of Ollama's API, of Anthropic's messages and of OpenAI's responses with a server:
// node apis.mjs SERVER EMBEDDER, from the folder of the installed packages. EMBEDDER serves a model
// that makes vectors. @langchain/ollama is what n8n's nodes speak with.
import Anthropic from "@anthropic-ai/sdk";
import { ChatOllama, OllamaEmbeddings } from "@langchain/ollama";
import assert from "assert";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { z } from "zod";
import { refusal, run } from "./check.mjs";

const [server, embedder] = process.argv.slice(2);
const model = "embedded";
const lightOf = z.object({ room: z.enum(["kitchen", "hall"]), on: z.boolean() });
const parameters = z.toJSONSchema(lightOf);
const described = { name: "set_light", description: "Turns a light on or off." };
const messages = [{ role: "user", content: "hi" }];

async function texts(parts, of) {
  let text = "";
  let last;
  for await (const part of parts) {
    text += of(part);
    last = part;
  }
  return [text, last];
}

// --- ollama

const ollama = new Ollama({ host: server });
const vectors = new Ollama({ host: embedder });
const options = { temperature: 0, num_predict: 8 };

async function generate() {
  const request = { model, prompt: "def add(", options };
  const whole = await ollama.generate(request);
  const parts = await ollama.generate({ ...request, stream: true });
  const [text, last] = await texts(parts, (part) => part.response);
  assert.equal(text, whole.response);
  assert(last.done && last.done_reason === "length" && last.eval_count === 8);
  assert(whole.total_duration > 0 && whole.context.length > 8);
}

async function chat() {
  const whole = await ollama.chat({ model, messages, options });
  const parts = await ollama.chat({ model, messages, options, stream: true });
  const [text, last] = await texts(parts, (part) => part.message.content);
  assert(whole.message.content && last.done);
  assert.equal(text, whole.message.content);
}

async function tools() {
  const properties = { on: { type: "boolean" } };
  const schema = { type: "object", properties, required: ["on"] };
  const tool = { type: "function", function: { ...described, parameters: schema } };
  const request = { model, messages, tools: [tool], options: { ...options, num_predict: 60 } };
  const whole = await ollama.chat(request);
  const parts = await ollama.chat({ ...request, stream: true });
  const calls = [];
  const [text] = await texts(parts, (part) => {
    calls.push(...(part.message.tool_calls ?? []));
    return part.message.content;
  });
  assert.equal(text, whole.message.content);
  assert.deepEqual(
    calls.map((call) => call.function),
    (whole.message.tool_calls ?? []).map((call) => call.function),
  );
}

async function format() {
  const request = { model, format: parameters, options: { ...options, num_predict: 60 } };
  const answer = await ollama.chat({ ...request, messages });
  lightOf.parse(JSON.parse(answer.message.content));
  const { response } = await ollama.generate({ ...request, prompt: "Light, please" });
  lightOf.parse(JSON.parse(response));
}

async function embed() {
  const { embeddings } = await vectors.embed({ model: "embedder", input: ["one", "two"] });
  const { embedding } = await vectors.embeddings({ model: "embedder", prompt: "one" });
  assert.equal(embeddings.length, 2);
  assert.deepEqual(embeddings[0], embedding);
  const { error } = await refusal(ollama.embed({ model, input: "one" }));
  assert(error.includes("does not support embeddings"), error);
}

async function list_show_ps() {
  const [listed] = (await ollama.list()).models;
  assert.equal(listed.name, "embedded:latest");
  assert((await ollama.show({ model })).capabilities.includes("completion"));
  assert.equal((await ollama.ps()).models[0].name, "embedded:latest");
  assert.equal((await ollama.pull({ model })).status, "success");
  assert((await ollama.version()).version);
}

async function abort() {
  const parts = await ollama.generate({ model, prompt: "a", options: {}, stream: true });
  const error = await refusal(
    (async () => {
      for await (const part of parts) if (part.response) ollama.abort();
    })(),
  );
  assert.equal(error.name, "AbortError");
}

async function ollama_errors() {
  const { status_code } = await refusal(ollama.chat({ model: "other", messages }));
  assert.equal(status_code, 404);
}

// --- @langchain/ollama

const langchain = { model, baseUrl: server, temperature: 0, numPredict: 60 };

async function invoke_and_stream() {
  const chat = new ChatOllama({ ...langchain, numPredict: 8 });
  const whole = await chat.invoke("hi");
  const [text] = await texts(await chat.stream("hi"), (part) => part.content);
  assert.equal(text, whole.content);
  assert.equal(whole.usage_metadata.output_tokens, 8);
}

async function structured() {
  const chat = new ChatOllama({ ...langchain, format: parameters });
  lightOf.parse(JSON.parse((await chat.invoke("Light, please")).content));
  const method = "jsonSchema";
  lightOf.parse(await new ChatOllama(langchain).withStructuredOutput(lightOf, { method }).invoke("x"));
}

async function embed_documents() {
  const embeddings = new OllamaEmbeddings({ model: "embedder", baseUrl: embedder });
  const [first] = await embeddings.embedDocuments(["one", "two"]);
  assert.deepEqual(await embeddings.embedQuery("one"), first);
}

// --- @anthropic-ai/sdk

const anthropic = new Anthropic({ baseURL: server, apiKey: "none", maxRetries: 0 });
const light = { ...described, input_schema: parameters };
const anyTool = { tools: [light], tool_choice: { type: "any" } };

function blocks({ content }) {
  return content.map(({ id, ...block }) => block);
}

async function messages_and_stream() {
  for (const more of [{}, { stop_sequences: ["e"] }, anyTool]) {
    const request = { model, messages, max_tokens: 80, temperature: 0, ...more };
    const whole = await anthropic.messages.create(request);
    const streamed = await anthropic.messages.stream(request).finalMessage();
    assert.deepEqual(blocks(streamed), blocks(whole));
    assert.equal(streamed.stop_reason, whole.stop_reason);
    assert.equal(streamed.usage.output_tokens, whole.usage.output_tokens);
    if (more.tools) lightOf.parse(whole.content.at(-1).input);
  }
}

async function count_tokens() {
  const request = { model, messages, ...anyTool };
  const { input_tokens } = await anthropic.messages.countTokens(request);
  const { usage } = await anthropic.messages.create({ ...request, max_tokens: 80 });
  assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
}

async function anthropic_errors() {
  const long = [{ role: "user", content: "x".repeat(30000) }];
  const error = await refusal(anthropic.messages.create({ model, messages: long, max_tokens: 8 }));
  assert(error instanceof Anthropic.BadRequestError);
  assert(/prompt is too long: \d+ tokens > \d+ maximum/.test(error.message), error.message);
}

// --- openai

const openai = new OpenAI({ baseURL: `${server}/v1`, apiKey: "none", maxRetries: 0 });
const tool = { type: "function", ...described, parameters, strict: true };

function items({ output }) {
  return JSON.parse(
    JSON.stringify(output, (key, value) => (/^(id|call_id|parsed.*)$/.test(key) ? undefined : value)),
  );
}

async function responses_and_stream() {
  for (const more of [{}, { top_logprobs: 2 }, { tools: [tool], tool_choice: "required" }]) {
    const request = { model, input: "hi", max_output_tokens: 80, temperature: 0, ...more };
    const whole = await openai.responses.create(request);
    const streamed = await openai.responses.stream(request).finalResponse();
    assert.deepEqual(items(streamed), items(whole));
    assert.equal(streamed.usage.output_tokens, whole.usage.output_tokens);
    if (more.tools) lightOf.parse(JSON.parse(whole.output.at(-1).arguments));
  }
}

async function parse() {
  const format = { type: "json_schema", name: "light", schema: parameters, strict: true };
  const request = { model, input: "Light, please", max_output_tokens: 80, text: { format } };
  const whole = await openai.responses.create(request);
  lightOf.parse(JSON.parse(whole.output_text));
}

async function chat_completions() {
  const request = { model, messages, max_tokens: 8, temperature: 0 };
  const whole = await openai.chat.completions.create(request);
  const parts = await openai.chat.completions.create({ ...request, stream: true });
  const [text] = await texts(parts, (part) => part.choices[0]?.delta.content ?? "");
  assert.equal(text, whole.choices[0].message.content);
}

async function openai_embeddings() {
  const client = new OpenAI({ baseURL: `${embedder}/v1`, apiKey: "none", maxRetries: 0 });
  const request = { model: "embedder", input: ["one", "two"] };
  const packed = (await client.embeddings.create(request)).data;
  const floats = (await client.embeddings.create({ ...request, encoding_format: "float" })).data;
  assert.equal(packed.length, 2);
  packed[0].embedding.forEach((x, i) => assert(Math.abs(x - floats[0].embedding[i]) < 1e-6));
}

async function openai_errors() {
  const error = await refusal(openai.responses.create({ model, input: "x".repeat(30000) }));
  assert(error.status === 400 && error.code === "context_length_exceeded", error);
}

const chats = [generate, chat, tools, format];
const asked = [responses_and_stream, parse, chat_completions];
await run([
  ["ollama", [...chats, embed, list_show_ps, abort, ollama_errors]],
  ["@langchain/ollama", [invoke_and_stream, structured, embed_documents]],
  ["@anthropic-ai/sdk", [messages_and_stream, count_tokens, anthropic_errors]],
  ["openai", [...asked, openai_embeddings, openai_errors]],
]);
