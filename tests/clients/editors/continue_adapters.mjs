// Continue's adapters against a server: node continue_adapters.mjs SERVER FOLDER, the folder of installed packages.
import assert from "assert";
import { readFileSync } from "fs";
import { createRequire } from "module";
import path from "path";
import { pathToFileURL } from "url";

const { run } = createRequire(import.meta.url)("./typescript.cjs");
const [server, folder] = process.argv.slice(2);
const adapters = path.join(folder, "@continuedev", "openai-adapters");
const { constructLlmApi } = await import(pathToFileURL(path.join(adapters, "dist", "index.js")));
const { version } = JSON.parse(readFileSync(path.join(adapters, "package.json"), "utf8"));
const signal = new AbortController().signal;
const gap = { model: "embedded", prompt: "def add(a, b):\n    ", suffix: "\n\nprint(add(1, 2))\n", max_tokens: 24, temperature: 0.01, stop: ["/src/"] };
const talk = { model: "embedded", messages: [{ role: "user", content: "hi" }], max_tokens: 16, temperature: 0.01 };
const api = (provider) => constructLlmApi({ provider, apiKey: "none", apiBase: server + "/v1/" });

async function fill(provider) {
  let text = "";
  for await (const chunk of api(provider).fimStream(gap, signal)) text += chunk.choices[0].delta.content;
  assert(text.length);
}
async function mistral_fill_in_the_middle() {
  await fill("mistral");
}
async function openai_fill_in_the_middle() {
  await fill("openai");
}
async function vllm_completion() {
  let text = "";
  const { suffix, ...body } = gap;
  for await (const chunk of api("vllm").completionStream({ ...body, stream: true }, signal)) text += chunk.choices[0].text;
  assert(text.length);
}
async function chat() {
  const whole = await api("openai").chatCompletionNonStream({ ...talk, stream: false }, signal);
  let text = "";
  let usage;
  for await (const chunk of api("openai").chatCompletionStream({ ...talk, stream: true }, signal)) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert(whole.choices[0].message.content.length && text.length);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
}
async function models() {
  assert.equal((await api("openai").list())[0].id, "embedded");
}

await run("@continuedev/openai-adapters", version, [mistral_fill_in_the_middle, openai_fill_in_the_middle, vllm_completion, chat, models]);
