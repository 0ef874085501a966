// Lets node load a client's TypeScript as it is: compiled file by file, with packages that are not installed, and the API of the editor,
// replaced by stand-ins. Set NODE_PATH to the folder of installed packages.
"use strict";
const fs = require("fs");
const Module = require("module");
const path = require("path");
const typescript = require("typescript");

// An object that has every property, can be called and constructed, and does nothing.
function standIn() {
  return new Proxy(function () {}, {
    get: (target, key) => {
      if (key === "__esModule") return true;
      if (key === "then") return undefined;
      if (key === Symbol.toPrimitive) return () => "";
      if (key === "prototype") return target.prototype;
      return standIn();
    },
    apply: () => undefined,
    construct: () => ({}),
  });
}

const resolve = Module._resolveFilename;
Module._resolveFilename = function (request, parent, ...rest) {
  const local = request.startsWith(".") && path.resolve(path.dirname(parent.filename), request);
  const files = local ? [local + ".ts", local.replace(/\.js$/, ".ts"), path.join(local, "index.ts")] : [];
  const found = files.find((file) => file.endsWith(".ts") && fs.existsSync(file));
  if (found) return found;
  try {
    return resolve.call(this, request, parent, ...rest);
  } catch {
    return "stand-in:" + request;
  }
};

const load = Module._load;
Module._load = function (request, parent, ...rest) {
  return Module._resolveFilename(request, parent).startsWith("stand-in:") ? standIn() : load.call(this, request, parent, ...rest);
};

require.extensions[".ts"] = function (module, filename) {
  const options = { module: "commonjs", target: "es2022", esModuleInterop: true };
  const { outputText } = typescript.transpileModule(fs.readFileSync(filename, "utf8"), { compilerOptions: options });
  module._compile(outputText, filename);
};

// Runs named checks one after the other; prints their names, and exits with 1 where one fails.
exports.run = async function (client, version, checks) {
  const failed = [];
  for (const check of checks) {
    try {
      await check();
    } catch (error) {
      console.error(error.stack, error.response ? error.response.data : "");
      failed.push(check.name);
    }
  }
  const names = checks.map((check) => check.name).join(", ");
  console.log(`${client} ${version}: ${names}: ${failed.length ? "failed: " + failed.join(", ") : "all hold"}`);
  process.exit(failed.length ? 1 : 0);
};
exports.standIn = standIn;
