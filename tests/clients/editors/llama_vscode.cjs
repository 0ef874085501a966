// llama.vscode's own code against a server: node llama_vscode.cjs SERVER FOLDER TOOLS, the folder of its checkout, and the server of a
// model that calls tools.
"use strict";
const assert = require("assert");
const path = require("path");
const { run, standIn } = require("./typescript.cjs");

const [server, folder, serverOfTools] = process.argv.slice(2);
const source = (name) => require(path.join(folder, "src", name));
const { LlamaServer } = source("llama-server.ts");
const { Statusbar } = source("statusbar.ts");
const limits = source("language-model-token-limits.ts");
const { version } = require(path.join(folder, "package.json"));
const model = { name: "served", endpoint: server, aiModel: "embedded" };
const settings = {
  n_predict: 16, n_prefix: 256, max_parallel_completions: 3, t_max_prompt_ms: 500, t_max_predict_ms: 2500,
  lora_completion: "", lora_chat: "", ai_api_version: "v1", ai_model: "", lm_max_input_tokens: 0, lm_max_output_tokens: 0,
  show_info: true, axiosRequestConfigCompl: {}, axiosRequestConfigChat: {}, axiosRequestConfigTools: {},
};
const app = {
  configuration: new Proxy(settings, { get: (target, key) => (key in target ? target[key] : key === "getUiText" ? (text) => text : "") }),
  logger: { addEventLog: () => undefined },
  prompts: { CHAT_EDIT_TEXT: "{instructions}\n{originalText}", replacePlaceholders: (text, values) => text + JSON.stringify(values) },
  getComplModel: () => model, getChatModel: () => model, getToolsModel: () => model, isChatModelSelected: () => true,
  tools: { addSelectedTools: () => undefined, getTools: () => [], vscodeTools: [], clearToolSearch: () => undefined },
  persistence: standIn(),
  extraContext: { chunks: [], queuedChunks: [], ringNEvict: 0, lastComplStartTime: Date.now() },
};
const client = new LlamaServer(app);
const messages = [{ role: "system", content: "You are an agent." }, { role: "user", content: "hi" }];

async function completion() {
  const answers = await client.getFIMCompletion("def add(a, b):\n", "\n\nprint(add(1, 2))\n", "    ret", app.extraContext.chunks, 4);
  assert.equal(answers.length, 3);
  assert(answers.every((answer) => typeof answer.content === "string"));
}
async function status_bar() {
  settings.max_parallel_completions = 1;
  const answer = await client.getFIMCompletion("def add(a, b):\n", "\n\nprint(add(1, 2))\n", "    ret", [], 0);
  const bar = new Statusbar(app);
  bar.llamaVscodeStatusBarItem = { show: () => undefined };
  bar.showInfo(answer);
  assert.match(bar.llamaVscodeStatusBarItem.text, /c: \d+ \/ \d{3,}, .* p: \d+ \([\d.]+ ms, [\d.]+ t\/s\) \| g: \d+/);
}
async function warm_up() {
  const done = new Promise((resolve) => (app.logger.addEventLog = (group, event, text) => /^FIM_PREP.*(RESPONSE|ERROR)/.test(event) && resolve(event)));
  client.updateExtraContext([{ text: "x = 1\n", time: Date.now(), filename: "other.py" }]);
  assert.equal(await done, "FIM_PREP_POST_RESPONSE");
}
async function edit() {
  const answer = await client.getChatEditCompletion("rename x", "x = 1", "", [], 0);
  assert(answer.choices[0].message.content.length);
}
async function chat() {
  assert(typeof (await client.getChatCompletion("hi")).choices[0].message.content === "string");
}
async function token_limits() {
  const found = await client.getToolsModelTokenLimits();
  const props = await (await fetch(server + "/props")).json();
  assert.equal(found.maxInputTokens, limits.extractRuntimeContextSize(props));
}
async function template_and_tokens() {
  const prompt = await client.applyToolsTemplate(messages);
  assert(prompt.includes("You are an agent."));
  assert.equal(await client.countToolsPromptTokens(messages), await client.countTextTokens(prompt));
  assert((await client.countTextTokens(prompt)) > 5);
}
async function agent() {
  let text = "";
  const answer = await client.getAgentCompletion(messages, false, (delta) => (text += delta));
  assert(!answer.error, JSON.stringify(answer.error));
  assert(text.length && answer.choices[0].message.content === text && answer.choices[0].finish_reason);
}
async function agent_with_tools() {
  const parameters = { type: "object", properties: { command: { enum: ["ls", "pwd"], description: "The command" } }, required: ["command"] };
  const tool = { type: "function", function: { name: "run_terminal_command", description: "Runs a command", parameters, strict: true } };
  const details = { endpoint: serverOfTools, model: "embedded", requestConfig: {}, tools: [tool], toolChoice: "auto" };
  model.endpoint = serverOfTools;
  app.tools.getTools = () => [tool];
  const withTools = await client.countToolsPromptTokens(messages, "", details);
  assert(withTools > (await client.countToolsPromptTokens(messages, "", { ...details, tools: [] })));
  let calls = 0;
  for (let i = 0; i < 20; i++) {
    const answer = await client.getAgentCompletion(messages, false, () => undefined);
    assert(!answer.error, JSON.stringify(answer.error));
    if (answer.choices[0].finish_reason === "length") continue; // A call may be cut.
    for (const call of answer.choices[0].message.tool_calls ?? []) {
      assert.equal(call.function.name, "run_terminal_command");
      assert.equal(typeof JSON.parse(call.function.arguments).command, "string");
      calls += 1;
    }
  }
  assert(calls > 0, "the model has called nothing in 20 answers");
  model.endpoint = server;
  app.tools.getTools = () => [];
}
async function health() {
  assert.equal(await client.checkHealth("completion", model), "ok");
}

run("llama.vscode", version, [completion, status_bar, warm_up, edit, chat, token_limits, template_and_tokens, agent, agent_with_tools, health]);
