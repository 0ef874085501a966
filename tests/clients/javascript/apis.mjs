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
const model = "own";
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
const greedy = { ...options, num_predict: 60 };
const weather = [{ role: "user", content: "What is the weather in Oslo?" }];
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const function_ = { name: "get_weather", description: "Tells the weather.", parameters: city };
const getWeather = { type: "function", function: function_ };

async function generate() {
  const request = { model, prompt: "def add(", options };
  const whole = await ollama.generate(request);
  const parts = await ollama.generate({ ...request, stream: true });
  const [text, last] = await texts(parts, (part) => part.response);
  assert.equal(text, whole.response);
  assert(last.done && last.done_reason === whole.done_reason && last.eval_count === whole.eval_count);
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
  const request = { model, messages: weather, tools: [getWeather], options: greedy };
  const whole = await ollama.chat(request);
  const parts = await ollama.chat({ ...request, stream: true });
  const calls = [];
  for await (const part of parts) calls.push(...(part.message.tool_calls ?? []));
  assert.deepEqual(calls[0].function.arguments, { city: "Oslo" });
  const called = whole.message.tool_calls.map((call) => call.function);
  assert.deepEqual(calls.map((call) => call.function), called);
  const told = { role: "tool", tool_name: "get_weather", content: "7 degrees and rain" };
  const second = { ...request, messages: [...weather, whole.message, told] };
  assert((await ollama.chat(second)).message.content.includes("7"));
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
  assert.equal(listed.name, "own:latest");
  assert((await ollama.show({ model })).capabilities.includes("completion"));
  assert.equal((await ollama.ps()).models[0].name, "own:latest");
  assert.equal((await ollama.pull({ model })).status, "success");
  assert((await ollama.version()).version);
}

async function systemone() {
  const criteria = { kitchen: null, hall: null };
  const room = { type: "choice", instructions: "Which room is it?", criteria };
  const dark = { type: "noul", instructions: "It is dark." };
  const state = { text: "The kitchen is dark." };
  const { answers } = await ollama.systemone({ model, state, questions: { room, dark } });
  assert(Object.keys(criteria).includes(answers.room.choice));
  assert(answers.dark.noul >= 0 && answers.dark.noul <= 1);
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

async function bound_tools() {
  const chat = new ChatOllama(langchain).bindTools([getWeather]);
  const [call] = (await chat.invoke(weather[0].content)).tool_calls;
  assert.deepEqual(call.args, { city: "Oslo" });
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
  const sum = [{ role: "user", content: "What is 3 + 4?" }];
  for (const more of [{}, { messages: sum, stop_sequences: ["="] }, anyTool]) {
    const request = { model, messages, max_tokens: 80, temperature: 0, ...more };
    const whole = await anthropic.messages.create(request);
    const streamed = await anthropic.messages.stream(request).finalMessage();
    assert.deepEqual(blocks(streamed), blocks(whole));
    assert.equal(streamed.stop_reason, whole.stop_reason);
    assert.equal(streamed.usage.output_tokens, whole.usage.output_tokens);
    if (more.tools) lightOf.parse(whole.content.at(-1).input);
    if (more.stop_sequences) assert.equal(whole.stop_reason, "stop_sequence");
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
  ["ollama", [...chats, embed, list_show_ps, systemone, abort, ollama_errors]],
  ["@langchain/ollama", [invoke_and_stream, structured, bound_tools, embed_documents]],
  ["@anthropic-ai/sdk", [messages_and_stream, count_tokens, anthropic_errors]],
  ["openai", [...asked, openai_embeddings, openai_errors]],
]);
