// The providers of Continue's core against a server: node continue_core.cjs SERVER FOLDER, the folder of the package @continuedev/core.
// Of each provider its own requests and its reading of the answers are run; the base class, which needs Continue's databases and indexes,
// is replaced by one that only fetches.
"use strict";
const assert = require("assert");
const path = require("path");
const Module = require("module");
const { run } = require("./typescript.cjs");

const [server, folder] = process.argv.slice(2);
const base = path.join(folder, "llm", "index.ts");
class BaseLLM {
  constructor(options) {
    this.apiBase = options.apiBase;
    this.apiKey = "";
    this.waiting = [];
  }
  fetch(url, options) {
    const answer = fetch(url, options);
    this.waiting.push(answer);
    return answer;
  }
}
require.cache[base] = Object.assign(new Module(base), { filename: base, loaded: true, exports: { BaseLLM } });
const LlamaCpp = require(path.join(folder, "llm", "llms", "LlamaCpp.ts")).default;
const HuggingFaceTGI = require(path.join(folder, "llm", "llms", "HuggingFaceTGI.ts")).default;
const { version } = require(path.join(folder, "package.json"));
const options = { maxTokens: 4096, temperature: 0.01, topP: 0.9, topK: 40, minP: 0.05, mirostat: 0, presencePenalty: 0.1, stop: ["/src/", "\n\n"] };

async function text_of(provider) {
  let text = "";
  for await (const part of provider._streamComplete("def add(a, b):\n    ", new AbortController().signal, options)) text += part;
  return text;
}
async function llama_cpp() {
  assert((await text_of(new LlamaCpp({ apiBase: server + "/" }))).length);
}
async function huggingface_tgi() {
  options.maxTokens = 24;
  const provider = new HuggingFaceTGI({ apiBase: server + "/" });
  assert((await text_of(provider)).length);
  await Promise.all(provider.waiting);
  await new Promise((resolve) => setTimeout(resolve, 100));
  assert(provider.model && provider.contextLength > 100, `${provider.model} ${provider.contextLength}`);
}

run("@continuedev/core", version, [llama_cpp, huggingface_tgi]);
