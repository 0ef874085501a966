// Vercel's `ai` (by @ai-sdk/openai-compatible and @ai-sdk/openai) and @huggingface/inference with a
// server: node suite.mjs SERVER, from the folder of the installed packages. Prints what holds, as
// check.py does.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { InferenceClient } from "@huggingface/inference";
import { APICallError, Output, generateObject, generateText } from "ai";
import { isStepCount, streamObject, streamText, tool } from "ai";
import assert from "assert";
import { z } from "zod";
import { joined, refusal, run } from "./check.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const server = process.argv[2];
const STEPS = 3;
const settings = { maxOutputTokens: 80, temperature: 0, maxRetries: 0 };
const level = z.number().int().min(0).max(9);
const lightOf = z.object({ room: z.enum(["kitchen", "hall"]), on: z.boolean(), level });
const schema = z.toJSONSchema(lightOf);
const messages = [{ role: "user", content: "hi" }];
const baseURL = `${server}/v1`;
const named = { name: "onehead", baseURL, includeUsage: true, supportsStructuredOutputs: true };
const compatible = createOpenAICompatible(named);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = [compatible("embedded"), openai.chat("embedded")];
const hub = new InferenceClient("none").endpoint(server);

async function text_and_stream() {
  for (const model of models) {
    const request = { ...settings, model, prompt: "hi", maxOutputTokens: 8 };
    const whole = await generateText(request);
    const stream = streamText(request);
    assert(whole.text && whole.usage.outputTokens === 8 && whole.finishReason === "length");
    assert.equal(await joined(stream.textStream), whole.text);
    assert.equal((await stream.usage).outputTokens, 8);
  }
}

async function completion() {
  for (const model of [compatible.completionModel("embedded"), openai.completion("embedded")]) {
    const request = { ...settings, model, prompt: "def add(", maxOutputTokens: 8 };
    const whole = await generateText(request);
    assert.equal(await joined(streamText(request).textStream), whole.text);
  }
}

async function reasoning_effort() {
  const low = { reasoningEffort: "low" };
  for (const model of models) {
    const providerOptions = { onehead: low, openai: low };
    assert((await generateText({ ...settings, model, prompt: "hi", providerOptions })).text);
  }
}

async function structured_output() {
  for (const model of models) {
    const output = Output.object({ schema: lightOf });
    const request = { ...settings, model, prompt: "Light, please", output };
    const whole = (await generateText(request)).output;
    lightOf.parse(whole);
    assert.deepEqual(await streamText(request).output, whole);
  }
}

async function objects() {
  for (const model of models) {
    const request = { ...settings, model, prompt: "Light, please", schema: lightOf };
    const whole = (await generateObject(request)).object;
    lightOf.parse(whole);
    const stream = streamObject(request);
    let partial;
    for await (partial of stream.partialObjectStream);
    assert.deepEqual(partial, whole);
    assert.deepEqual(await stream.object, whole);
    const either = ["rain", "sun"];
    const choice = { ...settings, model, prompt: "Pick", output: "enum", enum: either };
    assert(either.includes((await generateObject(choice)).object));
  }
}

// A task with one call in each of STEPS steps, and text after them.
function task(model, done) {
  const execute = async (light) => {
    done.push(light);
    return { done: true, light };
  };
  const description = "Turns a light on or off.";
  const tools = { set_light: tool({ description, inputSchema: lightOf, execute }) };
  const prepareStep = ({ stepNumber }) => ({
    toolChoice: stepNumber < STEPS ? "required" : "none",
  });
  const onehead = { parallel_tool_calls: false };
  const providerOptions = { onehead, openai: { parallelToolCalls: false } };
  const stopWhen = isStepCount(STEPS + 1);
  const prompt = "All lights on!";
  return { ...settings, model, tools, prepareStep, providerOptions, prompt, stopWhen };
}

async function tools_of_several_steps() {
  for (const model of models) {
    const done = [];
    const result = await generateText(task(model, done));
    assert.equal(result.steps.length, STEPS + 1);
    assert.equal(done.length, STEPS);
    assert(result.text && result.steps[0].toolResults[0].output.done);
  }
}

async function tools_streamed() {
  for (const model of models) {
    const done = [];
    const result = streamText(task(model, done));
    const text = await joined(result.textStream);
    assert.equal((await result.steps).length, STEPS + 1);
    assert(text && done.length === STEPS);
    done.forEach((light) => lightOf.parse(light));
  }
}

async function tools_with_output() {
  for (const model of models) {
    const output = Output.object({ schema: lightOf });
    const result = await generateText({ ...task(model, []), output });
    lightOf.parse(result.output);
  }
}

async function errors() {
  const prompt = "x".repeat(30000);
  for (const model of models) {
    const error = await refusal(generateText({ ...settings, model, prompt }));
    assert(APICallError.isInstance(error) && error.statusCode === 400, error);
    assert(error.message.includes("context"), error.message);
    const errors = [];
    const onError = ({ error }) => errors.push(error);
    await streamText({ ...settings, model, prompt, onError }).consumeStream();
    assert(errors.length === 1 && errors[0].statusCode === 400);
  }
}

async function hub_chat() {
  const request = { messages, max_tokens: 8, temperature: 0 };
  const whole = await hub.chatCompletion(request);
  let text = "";
  for await (const chunk of hub.chatCompletionStream(request)) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  assert(whole.choices[0].message.content && whole.usage.completion_tokens === 8);
  assert.equal(text, whole.choices[0].message.content);
  assert((await hub.chatCompletion({ ...request, model: "embedded" })).choices.length);
}

async function hub_json_schema() {
  const json_schema = { name: "light", schema, strict: true };
  const response_format = { type: "json_schema", json_schema };
  const answer = await hub.chatCompletion({ messages, max_tokens: 80, response_format });
  lightOf.parse(JSON.parse(answer.choices[0].message.content));
}

async function hub_tools() {
  const described = { name: "set_light", description: "Light", parameters: schema };
  const tools = [{ type: "function", function: described }];
  const tool_choice = { type: "function", function: { name: "set_light" } };
  const request = { messages, tools, tool_choice, max_tokens: 80 };
  const [call] = (await hub.chatCompletion(request)).choices[0].message.tool_calls;
  lightOf.parse(JSON.parse(call.function.arguments));
}

// It asks /v1/completions, and hands on the chunks of that route.
async function hub_text_generation() {
  const parameters = { max_new_tokens: 8, temperature: 0, return_full_text: false };
  const request = { inputs: "def add(", parameters };
  const whole = await hub.textGeneration(request);
  let text = "";
  for await (const chunk of hub.textGenerationStream(request)) text += chunk.choices[0].text;
  assert(whole.generated_text && text === whole.generated_text);
}

async function hub_errors() {
  const request = { messages: [{ role: "user", content: "x".repeat(30000) }] };
  const { httpResponse } = await refusal(hub.chatCompletion(request));
  assert(httpResponse.status === 400 && httpResponse.body.error.code === "context_length_exceeded");
  const { message } = await refusal(hub.chatCompletionStream(request).next());
  assert(message.includes("context"), message);
}

const texts = [text_and_stream, completion, reasoning_effort];
const structures = [structured_output, objects];
const tasks = [tools_of_several_steps, tools_streamed, tools_with_output];
const hubs = [hub_chat, hub_json_schema, hub_tools, hub_text_generation, hub_errors];
const suites = [
  ["ai", [...texts, ...structures, ...tasks, errors]],
  ["@huggingface/inference", hubs],
];
await run(suites);
