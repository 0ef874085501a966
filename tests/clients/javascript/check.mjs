// What the suites beside this file share: named checks, run one by one, and a line for each client
// that says how many hold, as check.py does.
import assert from "assert";
import { readFileSync } from "fs";

export async function joined(parts) {
  let text = "";
  for await (const part of parts) text += part;
  return text;
}

export async function refusal(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  assert.fail("was not refused");
}

function version(name) {
  const file = new URL(`node_modules/${name}/package.json`, import.meta.url);
  return JSON.parse(readFileSync(file, "utf8")).version;
}

// Runs suites, [client, checks] each. The process ends with 1 where a check fails.
export async function run(suites) {
  for (const [client, checks] of suites) {
    const failed = [];
    for (const check of checks) {
      try {
        await check();
      } catch (error) {
        console.error(error);
        failed.push(check.name);
      }
    }
    const names = checks.map((check) => check.name.replaceAll("_", " ")).join(", ");
    const outcome = failed.length ? `failed: ${failed.join(", ")}` : "all hold";
    console.log(`${client} ${version(client)}: ${names}: ${outcome}`);
    if (failed.length) process.exitCode = 1;
  }
}
